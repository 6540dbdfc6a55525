//! Node-local numbers: same fact, same number; nothing handed out twice while something may still name it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::Arc;

use flowloom_bpf_abi::identity::FIRST_USER;
use flowloom_model::EndpointKey;
use serde::{Deserialize, Serialize};

use crate::services::numbers::ServiceNumbers;
use crate::{
    EndpointId, HeldServices, Identity, IdentityFacts, NodePlan, PolicySlot, PolicySpec, RuleId, RuleRef,
};

/// Last user identity; the numbers above are for the moments inside a change (see [`crate::diff`]).
pub(crate) const LAST_IDENTITY: u32 = 0x7fff_ffff;
/// Last policy slot; the numbers above are for the moments inside a change.
pub(crate) const LAST_SLOT: u32 = 0x7fff_ffff;
const LAST_ENDPOINT: u32 = flowloom_bpf_abi::MAX_ENDPOINTS - 1;

/// What the node has numbered. The agent persists it (before it applies a plan that came out of it) and hands it to every
/// compilation. A compilation that changes nothing leaves it equal to what it was.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Numbers {
    epoch: u64,
    identities: Pool<IdentityFacts>,
    slots: Pool<PolicySpec>,
    rules: Pool<RuleRef>,
    endpoints: Pool<EndpointKey>,
    last_revision: u32,
    revisions: BTreeMap<u32, Revision>,
    /// See [`Numbers::version`].
    #[serde(skip)]
    version: u64,
    /// Not stored: the kernel's maps have them.
    #[serde(skip)]
    pub(crate) services: ServiceNumbers,
}

/// The slots an endpoint was compiled to, and the revision that stands for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Revision {
    revision: u32,
    egress: PolicySlot,
    ingress: PolicySlot,
}

impl Default for Numbers {
    fn default() -> Self {
        Self {
            epoch: 0,
            identities: Pool::new(FIRST_USER, LAST_IDENTITY),
            slots: Pool::new(1, LAST_SLOT),
            rules: Pool::new(1, u32::MAX),
            endpoints: Pool::new(1, LAST_ENDPOINT),
            last_revision: 0,
            revisions: BTreeMap::new(),
            version: 0,
            services: ServiceNumbers::default(),
        }
    }
}

/// Equal when there is nothing to store anew.
impl PartialEq for Numbers {
    fn eq(&self, other: &Self) -> bool {
        self.epoch == other.epoch
            && self.last_revision == other.last_revision
            && self.identities == other.identities
            && self.slots == other.slots
            && self.rules == other.rules
            && self.endpoints == other.endpoints
            && self.revisions == other.revisions
    }
}

impl Eq for Numbers {}

impl Numbers {
    /// Counts compilations that changed something. Note it after a plan was applied; once nothing in the kernel can name what
    /// that plan retired (connections swept, events read), hand it to [`Self::release_before`].
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Another one after every compilation or release that left something to store anew.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Forgets the numbers that retired in `epoch` or before and did not come back. Until then nobody else gets them.
    pub fn release_before(&mut self, epoch: u64) {
        let mut released = self.identities.release(epoch).len();
        released += self.slots.release(epoch).len();
        released += self.rules.release(epoch).len();
        for id in self.endpoints.release(epoch) {
            self.revisions.remove(&id);
            released += 1;
        }
        self.version += u64::from(released > 0);
    }

    /// Takes over the numbers of services that the kernel's maps hold. Before the first compilation after a start: what did not change
    /// keeps its numbers then.
    pub fn adopt_services(&mut self, held: HeldServices) {
        self.services.adopt(held);
    }

    /// How many retired numbers wait for [`Self::release_before`].
    #[must_use]
    pub fn retained(&self) -> usize {
        self.identities.retired() + self.slots.retired() + self.rules.retired() + self.endpoints.retired()
    }

    /// The facts of an identity, retired ones too.
    #[must_use]
    pub fn facts(&self, identity: Identity) -> Option<&Arc<IdentityFacts>> {
        self.identities.fact(identity.0)
    }

    /// The spec of a slot, retired ones too: what a restart needs to judge new identities as the maps in force do.
    #[must_use]
    pub fn spec(&self, slot: PolicySlot) -> Option<&Arc<PolicySpec>> {
        self.slots.fact(slot.0)
    }

    /// The name of a rule, retired ones too (events may still name it).
    #[must_use]
    pub fn rule(&self, rule: RuleId) -> Option<&Arc<RuleRef>> {
        self.rules.fact(rule.0)
    }

    /// The endpoint with a number, retired ones too.
    #[must_use]
    pub fn endpoint(&self, id: EndpointId) -> Option<&Arc<EndpointKey>> {
        self.endpoints.fact(id.0)
    }

    /// The number an endpoint has or had.
    #[must_use]
    pub fn endpoint_id(&self, key: &EndpointKey) -> Option<EndpointId> {
        self.endpoints.number(key).map(EndpointId)
    }

    /// The revision an endpoint of the last plan was compiled to.
    #[must_use]
    pub fn revision_of(&self, key: &EndpointKey) -> Option<u32> {
        self.revisions.get(&self.endpoints.number(key)?).map(|r| r.revision)
    }

    /// Every endpoint of the last plan with its revision, and the slots (egress, ingress) that it stands for.
    pub fn decided(&self) -> impl Iterator<Item = (&Arc<EndpointKey>, u32, [PolicySlot; 2])> {
        let named = |(id, held): (&u32, &Revision)| {
            Some((self.endpoints.fact(*id)?, held.revision, [held.egress, held.ingress]))
        };
        self.revisions.iter().filter_map(named)
    }

    pub(crate) fn identity(&mut self, facts: &Arc<IdentityFacts>) -> Option<Identity> {
        self.identities.take(facts).map(Identity)
    }

    pub(crate) fn slot(&mut self, spec: &Arc<PolicySpec>) -> Option<PolicySlot> {
        self.slots.take(spec).map(PolicySlot)
    }

    pub(crate) fn rule_id(&mut self, rule: &Arc<RuleRef>) -> Option<RuleId> {
        self.rules.take(rule).map(RuleId)
    }

    pub(crate) fn take_endpoint(&mut self, key: &EndpointKey) -> Option<EndpointId> {
        match self.endpoints.number(key) {
            Some(id) => Some(EndpointId(id)),
            None => self.endpoints.take(&Arc::new(key.clone())).map(EndpointId),
        }
    }

    /// The revision for an endpoint's slots: the one it has while they stay the same.
    pub(crate) fn revision(&mut self, id: EndpointId, egress: PolicySlot, ingress: PolicySlot) -> u32 {
        match self.revisions.get(&id.0) {
            Some(held) if held.egress == egress && held.ingress == ingress => held.revision,
            _ => {
                self.last_revision = self.last_revision.wrapping_add(1).max(1);
                self.version += 1;
                self.revisions.insert(id.0, Revision { revision: self.last_revision, egress, ingress });
                self.last_revision
            }
        }
    }

    /// Ends a compilation: what the plan does not use retires, what it uses is alive.
    pub(crate) fn settle(&mut self, plan: &NodePlan) {
        let epoch = self.epoch + 1;
        let endpoints: BTreeSet<u32> = plan.endpoints.values().map(|e| e.id.0).collect();
        let mut changed = self.identities.settle(plan.identities.keys().map(|n| n.0), epoch);
        changed |= self.slots.settle(plan.policies.keys().map(|n| n.0), epoch);
        changed |= self.rules.settle(plan.rules.keys().map(|n| n.0), epoch);
        // Who comes back is decided about anew, also where its VPC went with it and counts generations from 1 again.
        self.revisions.retain(|id, _| endpoints.contains(id));
        changed |= self.endpoints.settle(endpoints.into_iter(), epoch);
        if changed {
            self.epoch = epoch;
            self.version += 1;
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Held<K> {
    number: u32,
    fact: Arc<K>,
    /// Epoch in which it fell out of use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retired: Option<u64>,
}

/// One number space, handed out round robin.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(
    from = "PoolForm<K>",
    into = "PoolForm<K>",
    bound(serialize = "K: Serialize + Clone + Eq + Hash", deserialize = "K: Deserialize<'de> + Eq + Hash")
)]
struct Pool<K> {
    first: u32,
    end: u32,
    last: u32,
    /// Handed out since the last settle.
    fresh: bool,
    by_number: BTreeMap<u32, Held<K>>,
    by_fact: HashMap<Arc<K>, u32>,
}

/// A pool as it is stored: JSON has no maps with structured keys.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct PoolForm<K> {
    first: u32,
    end: u32,
    last: u32,
    held: Vec<Held<K>>,
}

impl<K: Eq + Hash> From<PoolForm<K>> for Pool<K> {
    fn from(form: PoolForm<K>) -> Self {
        let by_fact = form.held.iter().map(|h| (h.fact.clone(), h.number)).collect();
        let by_number = form.held.into_iter().map(|h| (h.number, h)).collect();
        Self { first: form.first, end: form.end, last: form.last, fresh: false, by_number, by_fact }
    }
}

impl<K> From<Pool<K>> for PoolForm<K> {
    fn from(pool: Pool<K>) -> Self {
        Self {
            first: pool.first,
            end: pool.end,
            last: pool.last,
            held: pool.by_number.into_values().collect(),
        }
    }
}

impl<K: Eq> PartialEq for Pool<K> {
    fn eq(&self, other: &Self) -> bool {
        self.last == other.last && self.by_number == other.by_number
    }
}

impl<K: Eq> Eq for Pool<K> {}

impl<K: Eq + Hash> Pool<K> {
    fn new(first: u32, end: u32) -> Self {
        Self {
            first,
            end,
            last: first - 1,
            fresh: false,
            by_number: BTreeMap::new(),
            by_fact: HashMap::new(),
        }
    }

    fn number(&self, fact: &K) -> Option<u32> {
        self.by_fact.get(fact).copied()
    }

    fn fact(&self, number: u32) -> Option<&Arc<K>> {
        self.by_number.get(&number).map(|held| &held.fact)
    }

    /// The number of a fact, a new one when it has none. `None`: all are in use or retained.
    fn take(&mut self, fact: &Arc<K>) -> Option<u32> {
        if let Some(number) = self.number(fact) {
            return Some(number);
        }
        let number = self.next_free()?;
        self.last = number;
        self.fresh = true;
        self.by_number.insert(number, Held { number, fact: fact.clone(), retired: None });
        self.by_fact.insert(fact.clone(), number);
        Some(number)
    }

    fn next_free(&self) -> Option<u32> {
        let after = self.last.checked_add(1).filter(|n| *n <= self.end).unwrap_or(self.first);
        self.gap(after, self.end).or_else(|| self.gap(self.first, after))
    }

    /// First number in `from..=to` that nobody holds.
    fn gap(&self, from: u32, to: u32) -> Option<u32> {
        let mut candidate = from;
        for number in self.by_number.range(from..=to).map(|(n, _)| *n) {
            if number != candidate {
                return Some(candidate);
            }
            candidate = candidate.checked_add(1)?;
        }
        (candidate <= to).then_some(candidate)
    }

    /// `used` in ascending order.
    fn settle(&mut self, used: impl Iterator<Item = u32>, epoch: u64) -> bool {
        let mut changed = std::mem::take(&mut self.fresh);
        let mut used = used.peekable();
        for held in self.by_number.values_mut() {
            while used.next_if(|n| *n < held.number).is_some() {}
            match (used.peek() == Some(&held.number), held.retired) {
                (true, Some(_)) => held.retired = None,
                (false, None) => held.retired = Some(epoch),
                _ => continue,
            }
            changed = true;
        }
        changed
    }

    fn release(&mut self, epoch: u64) -> Vec<u32> {
        let gone: Vec<u32> = self
            .by_number
            .values()
            .filter(|held| held.retired.is_some_and(|retired| retired <= epoch))
            .map(|held| held.number)
            .collect();
        for number in &gone {
            if let Some(held) = self.by_number.remove(number) {
                self.by_fact.remove(&held.fact);
            }
        }
        gone
    }

    fn retired(&self) -> usize {
        self.by_number.values().filter(|held| held.retired.is_some()).count()
    }
}
