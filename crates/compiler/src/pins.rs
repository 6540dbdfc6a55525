//! Policies held: what an operator has an endpoint judged by, instead of what the world says.

use std::collections::BTreeMap;
use std::sync::Arc;

use flowloom_model::{Direction, EndpointKey, VpcName};
use serde::{Deserialize, Serialize};

use crate::{DefaultVerdict, PolicySpec};

/// What one endpoint is held at, by direction; none = as the world says. Peers are resolved in a held policy as in any other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// What it may send.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Arc<PolicySpec>>,
    /// What it may receive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<Arc<PolicySpec>>,
}

/// Held policies by endpoint. A name that the world does not have is no error.
pub type Pins = BTreeMap<EndpointKey, Held>;

impl Held {
    /// The held policy of a direction.
    #[must_use]
    pub fn of(&self, direction: Direction) -> Option<&Arc<PolicySpec>> {
        match direction {
            Direction::Egress => self.egress.as_ref(),
            Direction::Ingress => self.ingress.as_ref(),
        }
    }

    /// Every policy held.
    pub(crate) fn specs(&self) -> impl Iterator<Item = &PolicySpec> {
        self.egress.iter().chain(&self.ingress).map(Arc::as_ref)
    }
}

impl PolicySpec {
    /// A policy that lets nothing pass.
    #[must_use]
    pub fn deny_all(vpc: VpcName, direction: Direction) -> Self {
        Self { vpc, direction, default: DefaultVerdict::Drop, rules: Vec::new() }
    }
}
