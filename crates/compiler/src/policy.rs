//! A spec compiled to entries: any-identity entries once, an identity's entries when it is asked for.
//!
//! The kernel asks twice, for the exact identity and for any, and takes the higher precedence. So an identity's entries hold only
//! what rules say that ask something of the peer; rules for anyone and the default stay in the any-identity entries. `pass` is the
//! one case where a rule changes the answer of another: the answer found behind it carries the precedence of the `pass`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use flowloom_bpf_abi::{PolicyKey, PolicyValue, identity, policy_flags, verdict};
use flowloom_model::{Action, Entity, GroupName, Protocol, SharedMap, VpcName};
use ipnet::IpNet;

use crate::fault::{Fault, planted};
use crate::ports::{Best, Block, Pick, TIERS, Trie, Walk, blocks};
use crate::spec::protocol_numbers;
use crate::{
    DefaultVerdict, Identity, IdentityFacts, PolicyEntries, PolicySpec, SpecCidr, SpecRemote, SpecRule,
};

/// A policy ready to give entries for any identity.
#[derive(Clone, Debug)]
pub struct CompiledPolicy {
    spec: Arc<PolicySpec>,
    any: PolicyEntries,
    anyone: Table,
    /// Some rule for anyone is `pass`.
    anyone_passes: bool,
    index: Index,
    fault: Fault,
}

/// Which rules can match an identity, found by its facts.
#[derive(Clone, Debug, Default)]
struct Index {
    cidrs: HashMap<IpNet, Vec<u32>>,
    groups: HashMap<GroupName, Vec<u32>>,
    /// Selectors with a label to start from.
    labels: HashMap<(String, String), Vec<u32>>,
    /// Selectors without.
    selectors: Vec<u32>,
    entities: Vec<u32>,
    /// Rules for anyone that use ports which peers define.
    peer_ports: Vec<u32>,
}

/// Winners per protocol and port.
#[derive(Clone, Debug, Default)]
struct Table {
    every_protocol: Best,
    protocols: BTreeMap<u8, Trie>,
}

impl PartialEq for CompiledPolicy {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.spec, &other.spec) || self.spec == other.spec
    }
}

impl Eq for CompiledPolicy {}

/// Rank of rules that speak of an identity rather than an address, above every CIDR's.
const SPECIFICITY_IDENTITY: u16 = 1000;
const SPECIFICITY_ANYONE: u16 = 0;
/// Set in the precedence of an exact identity's entry: at the same level it names the more specific rule.
const EXACT: u32 = 1;

/// Precedence of a rule's entries: tier, priority, then reject, drop, pass, allow. Never 0 or 1 (the default's).
#[must_use]
pub fn precedence(tier: u8, priority: u16, action: Action) -> u32 {
    precedence_with(tier, priority, action, Fault::None)
}

fn precedence_with(tier: u8, priority: u16, action: Action, fault: Fault) -> u32 {
    let mut class = match action {
        Action::Reject => 3,
        Action::Drop => 2,
        Action::Pass => 1,
        Action::Allow | Action::Log => 0,
    };
    if planted!(fault, AllowFirst) {
        class = 3 - class;
    }
    if planted!(fault, DropBeforeReject) && class >= 2 {
        class = 5 - class;
    }
    let mut priority = u32::from(u16::MAX - priority);
    if planted!(fault, PriorityFlip) {
        priority = u32::from(u16::MAX) - priority;
    }
    let tier = 3 - u32::from(tier.min(3));
    (((tier << 16 | priority) << 2 | class) << 1) + 2
}

/// The order in which rules are asked; within one precedence the name decides last.
pub(crate) fn sort_rules(rules: &mut [SpecRule]) {
    rules.sort_by(|a, b| {
        let key = |r: &SpecRule| std::cmp::Reverse(precedence(r.tier, r.priority, r.action));
        key(a).cmp(&key(b)).then_with(|| a.name.cmp(&b.name))
    });
}

impl CompiledPolicy {
    /// Indexes the rules and compiles what holds for anyone.
    #[must_use]
    pub fn new(spec: Arc<PolicySpec>) -> Self {
        Self::with_fault(spec, Fault::None)
    }

    pub(crate) fn with_fault(spec: Arc<PolicySpec>, fault: Fault) -> Self {
        let mut policy = Self {
            spec,
            any: PolicyEntries::new(),
            anyone: Table::default(),
            anyone_passes: false,
            index: Index::default(),
            fault,
        };
        let spec = policy.spec.clone();
        for (at, rule) in spec.rules.iter().enumerate() {
            policy.index_rule(at as u32, rule);
        }
        policy.any = policy.compile_any();
        policy
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

    /// The any-identity entries, and those of every one of these identities that is of the policy's VPC.
    #[must_use]
    pub fn entries(&self, identities: &SharedMap<Identity, Arc<IdentityFacts>>) -> PolicyEntries {
        let mut entries = self.any.clone();
        for (identity, facts) in reserved_facts(&self.spec.vpc) {
            entries.extend(self.identity_entries(identity, &facts));
        }
        for (identity, facts) in identities.iter().filter(|(_, f)| f.vpc == self.spec.vpc) {
            entries.extend(self.identity_entries(*identity, facts));
        }
        entries
    }

    /// Entries of one identity: where rules say something about it that may decide. Depends on the spec and the facts only.
    #[must_use]
    pub fn identity_entries(&self, identity: Identity, facts: &IdentityFacts) -> PolicyEntries {
        let mut entries = PolicyEntries::new();
        let mut own = Table::default();
        let mut deep = self.anyone_passes;
        for (at, specificity) in self.rules_about(facts) {
            let Some(rule) = self.rule(at) else { continue };
            deep |= rule.action == Action::Pass;
            self.add(&mut own, at, rule, facts, specificity);
        }
        if own.every_protocol.is_empty() && own.protocols.is_empty() {
            return entries;
        }
        let answer = |own: &Best, anyone: &Best| self.exact_answer(own, anyone);
        let base = answer(&own.every_protocol, &self.anyone.every_protocol);
        if let Some(value) = base {
            entries.insert(any_protocol_key(identity.0), value);
        }
        let mut numbers: BTreeSet<u8> = own.protocols.keys().copied().collect();
        if deep {
            numbers.extend(self.anyone.protocols.keys());
        }
        let nothing = Trie::default();
        for number in numbers {
            let walk = Walk {
                own: own.protocols.get(&number).unwrap_or(&nothing),
                under: self.anyone.protocols.get(&number),
                deep,
                answer,
            };
            let answers = walk.run(own.every_protocol, self.anyone.every_protocol);
            answers.write(identity.0, number, base, &mut entries);
        }
        self.spoil(entries)
    }

    fn rule(&self, at: u32) -> Option<&SpecRule> {
        self.spec.rules.get(at as usize)
    }

    fn index_rule(&mut self, at: u32, rule: &SpecRule) {
        let index = &mut self.index;
        match &rule.remote {
            SpecRemote::Cidrs(cidrs) => {
                for entry in cidrs {
                    let rules = index.cidrs.entry(entry.cidr).or_default();
                    if rules.last() != Some(&at) {
                        rules.push(at);
                    }
                }
            }
            SpecRemote::Group(name) => index.groups.entry(name.clone()).or_default().push(at),
            SpecRemote::Selector(selector) => match selector.labels.iter().next() {
                Some((k, v)) => index.labels.entry((k.clone(), v.clone())).or_default().push(at),
                None => index.selectors.push(at),
            },
            SpecRemote::Entities(set) if !set.contains(&Entity::All) => index.entities.push(at),
            SpecRemote::Any | SpecRemote::Entities(_) => {
                if !rule.peer_ports.is_empty() {
                    index.peer_ports.push(at);
                }
                self.anyone_passes |= rule.action == Action::Pass && !rule.services.is_empty();
                let mut table = std::mem::take(&mut self.anyone);
                self.add_services(&mut table, at, rule, SPECIFICITY_ANYONE);
                self.anyone = table;
            }
        }
    }

    /// The rules that say something about an identity, with how specific they are about it.
    fn rules_about(&self, facts: &IdentityFacts) -> BTreeMap<u32, u16> {
        let mut found = BTreeMap::new();
        let mut offer = |at: u32, specificity: u16| {
            let held = found.entry(at).or_insert(specificity);
            *held = specificity.max(*held);
        };
        for cidr in &facts.cidrs {
            for &at in self.index.cidrs.get(cidr).into_iter().flatten() {
                let Some(SpecRemote::Cidrs(entries)) = self.rule(at).map(|r| &r.remote) else { continue };
                let hit = entries.iter().any(|e| e.cidr == *cidr && !self.has_hole(e, facts));
                if hit {
                    offer(at, u16::from(cidr.prefix_len()) + 1);
                }
            }
        }
        if let Some(endpoint) = &facts.endpoint {
            for group in &endpoint.groups {
                for &at in self.index.groups.get(group).into_iter().flatten() {
                    offer(at, SPECIFICITY_IDENTITY);
                }
            }
            let by_label =
                endpoint.labels.iter().filter_map(|(k, v)| self.index.labels.get(&(k.clone(), v.clone())));
            for &at in by_label.flatten().chain(&self.index.selectors) {
                let Some(SpecRemote::Selector(selector)) = self.rule(at).map(|r| &r.remote) else { continue };
                let all = planted!(self.fault, EmptySelectorMatches)
                    && selector.labels.is_empty()
                    && selector.expressions.is_empty();
                if all || selector.matches(&endpoint.labels) {
                    offer(at, SPECIFICITY_IDENTITY);
                }
            }
            if !endpoint.named_ports.is_empty() {
                for &at in &self.index.peer_ports {
                    offer(at, SPECIFICITY_ANYONE);
                }
            }
        }
        for &at in &self.index.entities {
            let Some(SpecRemote::Entities(set)) = self.rule(at).map(|r| &r.remote) else { continue };
            if set.iter().any(|e| entity_matches(*e, facts)) {
                offer(at, SPECIFICITY_IDENTITY);
            }
        }
        found
    }

    fn has_hole(&self, entry: &SpecCidr, facts: &IdentityFacts) -> bool {
        !planted!(self.fault, ExceptIgnored) && entry.except.iter().any(|hole| facts.cidrs.contains(hole))
    }

    /// Adds a rule that matches the identity: its services, and the ports that this peer defines.
    fn add(&self, table: &mut Table, at: u32, rule: &SpecRule, facts: &IdentityFacts, specificity: u16) {
        if specificity != SPECIFICITY_ANYONE {
            self.add_services(table, at, rule, specificity);
        }
        let ports = facts.endpoint.iter().flat_map(|e| &e.named_ports);
        for (name, number, port) in ports {
            let named = rule.peer_ports.iter().any(|p| p.as_str() == name);
            let fits = rule.peer_port_protocol == Protocol::Any
                || protocol_numbers(rule.peer_port_protocol).contains(number);
            if named && fits {
                self.add_block(
                    table,
                    at,
                    rule,
                    SPECIFICITY_IDENTITY,
                    *number,
                    Block { start: *port, len: 16 },
                );
            }
        }
    }

    fn add_services(&self, table: &mut Table, at: u32, rule: &SpecRule, specificity: u16) {
        for service in &rule.services {
            let Some(number) = service.protocol else {
                let pick = self.pick(at, rule, specificity, PolicyKey::IDENTITY_BITS);
                table.every_protocol.offer(self.tier(rule), pick);
                continue;
            };
            let (from, mut to) = service.ports.unwrap_or((0, u16::MAX));
            if planted!(self.fault, RangeOffByOne) && to > from && to != u16::MAX {
                to -= 1;
            }
            for block in blocks(from, to) {
                self.add_block(table, at, rule, specificity, number, block);
            }
        }
    }

    fn add_block(
        &self,
        table: &mut Table,
        at: u32,
        rule: &SpecRule,
        specificity: u16,
        number: u8,
        block: Block,
    ) {
        let pick = self.pick(at, rule, specificity, PolicyKey::PROTOCOL_BITS + block.len);
        table.protocols.entry(number).or_default().insert(block, self.tier(rule), pick);
    }

    fn tier(&self, rule: &SpecRule) -> usize {
        let tier = usize::from(rule.tier).min(TIERS - 1);
        if planted!(self.fault, TierFlip) { TIERS - 1 - tier } else { tier }
    }

    fn pick(&self, at: u32, rule: &SpecRule, specificity: u16, key_bits: u32) -> Pick {
        let level = self.level(rule);
        Pick { rank: u64::from(level) << 32 | u64::from(specificity) << 8 | u64::from(key_bits), rule: at }
    }

    fn level(&self, rule: &SpecRule) -> u32 {
        precedence_with(self.tier(rule) as u8, rule.priority, rule.action, self.fault)
    }

    fn passes(&self, at: u32) -> bool {
        self.rule(at).is_some_and(|r| r.action == Action::Pass) && !planted!(self.fault, PassAllows)
    }

    /// The answer for anyone: never none.
    fn any_answer(&self, best: &Best) -> PolicyValue {
        let first = best.in_order().next();
        let decides = best.in_order().find(|pick| !self.passes(pick.rule));
        self.value(first.map_or(0, |pick| (pick.rank >> 32) as u32), decides)
    }

    /// The answer for an exact identity; none where the any-identity answer decides anyway.
    fn exact_answer(&self, own: &Best, anyone: &Best) -> Option<PolicyValue> {
        if own.is_empty() {
            return None;
        }
        // A rule for anyone ties with none of the identity's own: those are the more specific ones at the same level.
        let level = |pick: Pick| (pick.rank >> 32) as u32;
        let first_of = |best: &Best| best.in_order().next().map(|pick| (level(pick), pick));
        let top = match (first_of(own), first_of(anyone)) {
            (Some((own, _)), Some((any, pick))) if any > own && !self.passes(pick.rule) => return None,
            (own, any) => own.map(|(l, _)| l).max(any.map(|(l, _)| l)).unwrap_or(0),
        };
        let both = own.with(anyone);
        let decides = both.in_order().find(|pick| !self.passes(pick.rule));
        Some(self.value(top | EXACT, decides))
    }

    fn value(&self, precedence: u32, decides: Option<Pick>) -> PolicyValue {
        let Some(rule) = decides.and_then(|pick| self.rule(pick.rule)) else {
            let open = (self.spec.default == DefaultVerdict::Allow) != planted!(self.fault, DefaultFlip);
            let verdict = if open { verdict::ALLOW } else { verdict::DROP };
            return PolicyValue { precedence, rule: 0, verdict, flags: 0, pad: [0; 2] };
        };
        let log = if rule.log || rule.action == Action::Log { policy_flags::LOG } else { 0 };
        let stateless = if rule.stateful { 0 } else { policy_flags::STATELESS };
        let verdict = match rule.action {
            Action::Allow | Action::Log | Action::Pass => verdict::ALLOW,
            Action::Drop => verdict::DROP,
            Action::Reject => verdict::REJECT,
        };
        PolicyValue { precedence, rule: rule.id.0, verdict, flags: log | stateless, pad: [0; 2] }
    }

    fn compile_any(&self) -> PolicyEntries {
        let mut entries = PolicyEntries::new();
        let base = self.any_answer(&self.anyone.every_protocol);
        entries.insert(any_protocol_key(identity::ANY), base);
        for (number, trie) in &self.anyone.protocols {
            let walk = Walk {
                own: trie,
                under: None,
                deep: false,
                answer: |best: &Best, _: &Best| Some(self.any_answer(best)),
            };
            let answers = walk.run(self.anyone.every_protocol, Best::default());
            answers.write(identity::ANY, *number, Some(base), &mut entries);
        }
        self.spoil(entries)
    }

    /// Faults in how keys are written.
    fn spoil(&self, entries: PolicyEntries) -> PolicyEntries {
        let swap = planted!(self.fault, PortByteOrder);
        let short = planted!(self.fault, PrefixOffByOne);
        if !swap && !short {
            return entries;
        }
        let spoilt = |mut key: PolicyKey| {
            if swap {
                key.port.reverse();
            }
            if short && key.prefixlen > PolicyKey::PROTOCOL_BITS {
                let port = u16::from_be_bytes(key.port);
                return crate::lookup::masked(key.identity, key.protocol, port, key.prefixlen - 1)
                    .unwrap_or(key);
            }
            key
        };
        entries.into_iter().map(|(key, value)| (spoilt(key), value)).collect()
    }
}

fn any_protocol_key(identity: u32) -> PolicyKey {
    PolicyKey { prefixlen: PolicyKey::IDENTITY_BITS, identity, protocol: 0, port: [0; 2], pad: 0 }
}

/// Whether an identity belongs to a well-known set.
pub(crate) fn entity_matches(entity: Entity, facts: &IdentityFacts) -> bool {
    let [v4, v6] = crate::everywhere();
    match entity {
        Entity::All => true,
        Entity::World => !facts.inside,
        Entity::WorldIpv4 => !facts.inside && facts.cidrs.contains(&v4),
        Entity::WorldIpv6 => !facts.inside && facts.cidrs.contains(&v6),
        Entity::Cluster => facts.inside,
        Entity::Private => crate::private_prefixes().iter().any(|p| facts.cidrs.contains(p)),
        Entity::Host => facts.reserved == identity::HOST,
        Entity::RemoteNode => facts.reserved == identity::REMOTE_NODE,
        Entity::None => false,
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
        cidrs: BTreeSet::new(),
    };
    vec![
        (Identity(identity::HOST), facts(identity::HOST, true)),
        (Identity(identity::WORLD), facts(0, false)),
        (Identity(identity::REMOTE_NODE), facts(identity::REMOTE_NODE, true)),
        (Identity(identity::UNMANAGED), facts(0, true)),
    ]
}
