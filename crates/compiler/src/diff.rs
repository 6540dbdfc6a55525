//! Plan to plan: operations, made before they break.
//!
//! What a packet meets at any moment is one endpoint record (slots), the peer's ipcache entry (identity) and the entries of that
//! identity in that slot. Each is switched in one write, but not together. Three ways to move an address from one identity to
//! another while slots change keep every decision either the old plan's or the new one's:
//!
//! * *early*, before the slots: when every slot that somebody leaves says the same about both identities;
//! * *late*, after the slots: when every slot that somebody enters does;
//! * else through a *transient* identity, which says in the slots in force what they say about the old identity, and in the new
//!   slots what those say about the new one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_bpf_abi::{PolicyKey, peer_flags};
use flowloom_model::VpcName;
use ipnet::IpNet;

use crate::fault::Fault;
use crate::numbers::{LAST_IDENTITY, LAST_SLOT};
use crate::{
    CompiledPolicy, EndpointPlan, Identity, IdentityFacts, NodePlan, Op, Peer, PolicyEntries, PolicySlot,
    VpcId, reserved_facts, services,
};

/// The operations that lead from `old` to `new`; none when they are equal. Both plans come from the same [`crate::Numbers`].
///
/// Every state in between decides every packet (endpoint, direction, peer, protocol, port) as `old` or as `new` does.
#[must_use]
pub fn diff(old: &NodePlan, new: &NodePlan) -> Vec<Op> {
    diff_with(old, new, Fault::None)
}

/// [`diff`] with a fault planted.
pub(crate) fn diff_with(old: &NodePlan, new: &NodePlan, fault: Fault) -> Vec<Op> {
    match without_strangers(old, new) {
        Some(between) => {
            let mut ops = change(old, &between, fault);
            ops.extend(change(&between, new, fault));
            ops
        }
        None => change(old, new, fault),
    }
}

/// Services first: new connections leave what goes after them. Their entries refer to nothing but each other.
fn change(old: &NodePlan, new: &NodePlan, fault: Fault) -> Vec<Op> {
    let mut ops = services::diff::ops(&old.services, &new.services, fault);
    ops.extend(Change::new(old, new).ops());
    ops
}

/// `old` without what only shares a number with something in `new`: a VPC whose VNI another VPC takes over, an endpoint that comes
/// back under another number. These go before the others come.
fn without_strangers(old: &NodePlan, new: &NodePlan) -> Option<NodePlan> {
    let renamed: BTreeSet<VpcId> = old
        .vpcs
        .iter()
        .filter(|(id, vpc)| new.vpcs.get(id).is_some_and(|other| other.name != vpc.name))
        .map(|(id, _)| *id)
        .collect();
    let stranger = |endpoint: &EndpointPlan| {
        let moved =
            new.endpoints.get(&endpoint.key).is_some_and(|e| e.id != endpoint.id || e.vpc != endpoint.vpc);
        moved || renamed.contains(&endpoint.vpc)
    };
    if renamed.is_empty() && !old.endpoints.values().any(stranger) {
        return None;
    }
    let names: BTreeSet<&VpcName> = renamed.iter().filter_map(|id| Some(&old.vpcs.get(id)?.name)).collect();
    let mut between = old.clone();
    between.endpoints.retain(|_, endpoint| !stranger(endpoint));
    between.vpcs.retain(|id, _| !renamed.contains(id));
    between.ipcache.retain(|(id, _), _| !renamed.contains(id));
    between.identities.retain(|_, facts| !names.contains(&facts.vpc));
    between.policies.retain(|_, policy| !names.contains(&policy.spec().vpc));
    between.services = old.services.without(&renamed);
    Some(between)
}

/// Two maps side by side, in the order of keys.
pub(crate) fn both<'a, K: Ord, V>(
    a: &'a BTreeMap<K, V>,
    b: &'a BTreeMap<K, V>,
) -> impl Iterator<Item = (&'a K, Option<&'a V>, Option<&'a V>)> {
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    std::iter::from_fn(move || {
        let order = match (a.peek(), b.peek()) {
            (Some((x, _)), Some((y, _))) => x.cmp(y),
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, _) => std::cmp::Ordering::Greater,
        };
        let left = if order.is_le() { a.next() } else { None };
        let right = if order.is_ge() { b.next() } else { None };
        let key = left.or(right)?.0;
        Some((key, left.map(|(_, v)| v), right.map(|(_, v)| v)))
    })
}

type PeerKey = (VpcId, IpNet);

/// An address range that gets another identity, and what identities its packets have before and after.
struct Move {
    key: PeerKey,
    from: Identity,
    to: Identity,
    /// What the entry is in the end; none = removed.
    peer: Option<Peer>,
    added: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Early,
    Late,
    Transient(Identity),
}

struct Change<'a> {
    old: &'a NodePlan,
    new: &'a NodePlan,
    names: BTreeMap<VpcId, &'a VpcName>,
    /// Slots that some endpoint leaves and enters, by VPC.
    leaves: BTreeMap<&'a VpcName, BTreeMap<PolicySlot, &'a CompiledPolicy>>,
    enters: BTreeMap<&'a VpcName, BTreeMap<PolicySlot, &'a CompiledPolicy>>,
    /// Transient identities: (VPC, from, to) -> number.
    transients: BTreeMap<(&'a VpcName, Identity, Identity), Identity>,
    /// Ways found so far: (VPC, from, to, added, stays) -> way.
    ways: BTreeMap<(&'a VpcName, Identity, Identity, bool, bool), Way>,
    ops: Vec<Op>,
}

impl<'a> Change<'a> {
    fn new(old: &'a NodePlan, new: &'a NodePlan) -> Self {
        let names = old.vpcs.iter().chain(&new.vpcs).map(|(id, vpc)| (*id, &vpc.name)).collect();
        let mut change = Self {
            old,
            new,
            names,
            leaves: BTreeMap::new(),
            enters: BTreeMap::new(),
            transients: BTreeMap::new(),
            ways: BTreeMap::new(),
            ops: Vec::new(),
        };
        for (_, before, after) in old.endpoints.apart(&new.endpoints) {
            let (Some(before), Some(after)) = (before, after) else { continue };
            for (from, to) in
                [(before.egress_slot, after.egress_slot), (before.ingress_slot, after.ingress_slot)]
            {
                change.switch(from, to);
            }
        }
        change
    }

    fn switch(&mut self, from: PolicySlot, to: PolicySlot) {
        let (Some(leaves), Some(enters)) = (self.old.policies.get(&from), self.new.policies.get(&to)) else {
            return;
        };
        if from == to && leaves == enters {
            return;
        }
        self.leaves.entry(&leaves.spec().vpc).or_default().insert(from, leaves);
        self.enters.entry(&enters.spec().vpc).or_default().insert(to, enters);
    }

    fn ops(mut self) -> Vec<Op> {
        let moves = self.moves();
        let ways: Vec<Way> = moves.iter().map(|m| self.way(m)).collect();
        let early = self.early(&moves, &ways);
        let late = Self::late(&moves, &ways);
        let removed: Vec<PeerKey> = moves.iter().filter(|m| m.peer.is_none()).map(|m| m.key).collect();

        self.departures();
        self.arrivals();
        self.add_entries();
        self.put_peers(early);
        let stand_ins = self.put_slots();
        let again = self.put_existing(&stand_ins);
        self.put_peers(late);
        self.bump(moves.iter().zip(&ways).filter(|(m, _)| m.peer.is_some()));
        if !removed.is_empty() {
            self.ops.push(Op::RemovePeers(removed));
            self.bump(moves.iter().zip(&ways).filter(|(m, _)| m.peer.is_none()));
        }
        self.ops.extend(again.into_iter().map(Op::PutEndpoint));
        self.put_fresh();
        self.remove_entries(&stand_ins);
        self.leftovers();
        self.ops
    }

    /// Every ipcache entry that differs, longest prefixes first: what an entry covers must not show what covers the entry.
    fn moves(&self) -> Vec<Move> {
        let mut moves = Vec::new();
        for (key, before, after) in self.old.ipcache.apart(&self.new.ipcache) {
            let change = match (before, after) {
                (Some(before), Some(after)) if before == after => continue,
                (Some(before), Some(after)) => Move {
                    key: *key,
                    from: before.identity,
                    to: after.identity,
                    peer: Some(*after),
                    added: false,
                },
                (None, Some(after)) => {
                    let from = cover(self.old, *key).map_or(after.identity, |peer| peer.identity);
                    Move { key: *key, from, to: after.identity, peer: Some(*after), added: true }
                }
                (Some(before), None) => {
                    let to = cover(self.new, *key).map_or(before.identity, |peer| peer.identity);
                    Move { key: *key, from: before.identity, to, peer: None, added: false }
                }
                (None, None) => continue,
            };
            moves.push(change);
        }
        moves.sort_by_key(|m| std::cmp::Reverse(m.key.1.prefix_len()));
        moves
    }

    fn way(&mut self, m: &Move) -> Way {
        let Some(&vpc) = self.names.get(&m.key.0) else { return Way::Early };
        if m.from == m.to || !self.leaves.contains_key(vpc) {
            return if m.peer.is_some() { Way::Early } else { Way::Late };
        }
        let key = (vpc, m.from, m.to, m.added, m.peer.is_some());
        if let Some(way) = self.ways.get(&key) {
            return *way;
        }
        let way = self.way_of(m, vpc);
        self.ways.insert(key, way);
        way
    }

    fn way_of(&mut self, m: &Move, vpc: &'a VpcName) -> Way {
        let same = |slots: &BTreeMap<&VpcName, BTreeMap<PolicySlot, &CompiledPolicy>>| {
            let (Some(from), Some(to)) = (facts_of(self.old, vpc, m.from), facts_of(self.new, vpc, m.to))
            else {
                return false;
            };
            let says = |policy: &CompiledPolicy, facts| policy.identity_entries(Identity::default(), facts);
            slots.get(vpc).into_iter().flat_map(BTreeMap::values).all(|p| says(p, &from) == says(p, &to))
        };
        // An entry that is removed goes last in any case; one that is added must not wait while what covers it changes.
        if m.peer.is_some() && same(&self.leaves) {
            return Way::Early;
        }
        if !m.added && same(&self.enters) {
            return Way::Late;
        }
        let next = Identity(LAST_IDENTITY + 1 + self.transients.len() as u32);
        Way::Transient(*self.transients.entry((vpc, m.from, m.to)).or_insert(next))
    }

    fn early(&self, moves: &[Move], ways: &[Way]) -> Vec<(PeerKey, Peer)> {
        let entry = |(m, way): (&Move, &Way)| match way {
            Way::Early => Some((m.key, m.peer?)),
            Way::Late => None,
            Way::Transient(identity) => {
                // An entry on its way out keeps its old route to the end.
                let peer = m.peer.or_else(|| self.old.ipcache.get(&m.key).copied())?;
                Some((m.key, Peer { identity: *identity, ..peer }))
            }
        };
        moves.iter().zip(ways).filter_map(entry).collect()
    }

    fn late(moves: &[Move], ways: &[Way]) -> Vec<(PeerKey, Peer)> {
        let entry = |(m, way): (&Move, &Way)| match way {
            Way::Early => None,
            Way::Late | Way::Transient(_) => Some((m.key, m.peer?)),
        };
        moves.iter().zip(ways).filter_map(entry).collect()
    }

    fn put_peers(&mut self, peers: Vec<(PeerKey, Peer)>) {
        if !peers.is_empty() {
            self.ops.push(Op::PutPeers(peers));
        }
    }

    /// What others will refer to: VPCs and nodes.
    fn arrivals(&mut self) {
        for (id, before, after) in both(&self.old.vpcs, &self.new.vpcs) {
            if let Some(vpc) = after.filter(|vpc| before != Some(vpc)) {
                let had = before.map(|b| &b.gateways).into_iter().flatten();
                let stale_gateways: Vec<IpAddr> =
                    had.filter(|g| !vpc.gateways.contains(*g)).copied().collect();
                self.ops.push(Op::PutVpc { id: *id, vpc: vpc.clone(), stale_gateways });
            }
        }
        for (address, before, after) in self.old.nodes.apart(&self.new.nodes) {
            if let Some(node) = after.filter(|node| before != Some(node)) {
                self.ops.push(Op::PutNode { address: *address, node: node.clone() });
            }
        }
    }

    /// Identities that only one of the plans has.
    fn only(one: &'a NodePlan, other: &'a NodePlan) -> Vec<(Identity, &'a Arc<IdentityFacts>)> {
        one.identities
            .apart(&other.identities)
            .filter_map(|(identity, here, there)| {
                here.filter(|_| there.is_none()).map(|facts| (*identity, facts))
            })
            .collect()
    }

    /// New identities, and what the transient ones mean before the switch, into the slots in force.
    fn add_entries(&mut self) {
        let fresh = Self::only(self.new, self.old);
        if fresh.is_empty() && self.transients.is_empty() {
            return;
        }
        for (slot, policy) in &self.old.policies {
            let vpc = &policy.spec().vpc;
            let mut entries = PolicyEntries::new();
            for (identity, facts) in fresh.iter().filter(|(_, facts)| facts.vpc == *vpc) {
                entries.extend(policy.identity_entries(*identity, facts));
            }
            for ((_, from, _), identity) in self.transients.iter().filter(|((name, ..), _)| *name == vpc) {
                if let Some(facts) = facts_of(self.old, vpc, *from) {
                    entries.extend(policy.identity_entries(*identity, &facts));
                }
            }
            if !entries.is_empty() {
                self.ops.push(Op::AddEntries { slot: *slot, entries });
            }
        }
    }

    /// New slots. Where transient identities are about, an endpoint that enters a slot already in force gets a stand-in for it
    /// until they are gone: in the original they still mean the old identity.
    fn put_slots(&mut self) -> BTreeMap<PolicySlot, PolicySlot> {
        let mut slots = Vec::new();
        let mut stand_ins = BTreeMap::new();
        let gone = Self::only(self.old, self.new);
        for (slot, policy) in &self.new.policies {
            let in_force = self.old.policies.get(slot).is_some_and(|held| held == policy);
            let vpc = &policy.spec().vpc;
            let transients = || self.transients.iter().filter(|((name, ..), _)| *name == vpc);
            let number = if !in_force {
                *slot
            } else if transients().next().is_some()
                && self.enters.get(vpc).is_some_and(|e| e.contains_key(slot))
            {
                let stand_in = PolicySlot(LAST_SLOT + 1 + stand_ins.len() as u32);
                stand_ins.insert(*slot, stand_in);
                stand_in
            } else {
                continue;
            };
            let mut entries = self.new.entries(*slot);
            for (identity, facts) in gone.iter().filter(|(_, facts)| facts.vpc == *vpc) {
                entries.extend(policy.identity_entries(*identity, facts));
            }
            for ((_, _, to), identity) in transients() {
                if let Some(facts) = facts_of(self.new, vpc, *to) {
                    entries.extend(policy.identity_entries(*identity, &facts));
                }
            }
            slots.push((number, entries));
        }
        if !slots.is_empty() {
            self.ops.push(Op::PutSlots(slots));
        }
        stand_ins
    }

    /// Endpoints that stay; returns the records that stand-ins must give way to later.
    fn put_existing(&mut self, stand_ins: &BTreeMap<PolicySlot, PolicySlot>) -> Vec<EndpointPlan> {
        let mut again = Vec::new();
        for (_, before, after) in self.old.endpoints.apart(&self.new.endpoints) {
            let (Some(before), Some(after)) = (before, after) else { continue };
            if before == after {
                continue;
            }
            let mut record = after.clone();
            for (slot, had) in [
                (&mut record.egress_slot, before.egress_slot),
                (&mut record.ingress_slot, before.ingress_slot),
            ] {
                if *slot != had
                    && let Some(stand_in) = stand_ins.get(slot)
                {
                    *slot = *stand_in;
                }
            }
            if record != *after {
                again.push(after.clone());
            }
            self.ops.push(Op::PutEndpoint(record));
            let ips: Vec<IpAddr> = before.ips.iter().filter(|ip| !after.ips.contains(ip)).copied().collect();
            if !ips.is_empty() {
                self.ops.push(Op::RemoveAddresses { endpoint: after.clone(), ips });
            }
        }
        again
    }

    /// Endpoints that go, first of all: nothing below then has to be right for them.
    fn departures(&mut self) {
        for (_, before, after) in self.old.endpoints.apart(&self.new.endpoints) {
            if let (Some(before), None) = (before, after) {
                self.ops.push(Op::RemoveEndpoint(before.clone()));
            }
        }
    }

    fn put_fresh(&mut self) {
        for (_, before, after) in self.old.endpoints.apart(&self.new.endpoints) {
            if let (None, Some(after)) = (before, after) {
                self.ops.push(Op::PutEndpoint(after.clone()));
            }
        }
    }

    /// One bump for each VPC where an address that may have flows moved. One that nobody had before has none, unless it stood for
    /// a transient identity since: flows met in the new slots then carry what the old identity is told by slots that stay.
    fn bump<'m>(&mut self, moves: impl Iterator<Item = (&'m Move, &'m Way)>) {
        let flowless = |m: &Move, way: &Way| {
            m.added
                && !matches!(way, Way::Transient(_))
                && cover(self.old, m.key).is_none_or(|peer| peer.flags & peer_flags::UNASSIGNED != 0)
        };
        let vpcs: BTreeSet<VpcId> = moves
            .filter(|(m, way)| self.new.vpcs.contains_key(&m.key.0) && !flowless(m, way))
            .map(|(m, _)| m.key.0)
            .collect();
        self.ops.extend(vpcs.into_iter().map(Op::BumpGeneration));
    }

    /// Identities that no address has any more, out of the slots that stay.
    fn remove_entries(&mut self, stand_ins: &BTreeMap<PolicySlot, PolicySlot>) {
        let gone = Self::only(self.old, self.new);
        for (slot, policy) in &self.new.policies {
            let vpc = &policy.spec().vpc;
            let mut keys: Vec<PolicyKey> = Vec::new();
            for (identity, facts) in gone.iter().filter(|(_, facts)| facts.vpc == *vpc) {
                keys.extend(policy.identity_entries(*identity, facts).into_keys());
            }
            let in_force = self.old.policies.get(slot).is_some_and(|held| held == policy);
            for ((_, from, to), identity) in self.transients.iter().filter(|((name, ..), _)| *name == vpc) {
                let facts =
                    if in_force { facts_of(self.old, vpc, *from) } else { facts_of(self.new, vpc, *to) };
                if let Some(facts) = facts {
                    keys.extend(policy.identity_entries(*identity, &facts).into_keys());
                }
            }
            if !keys.is_empty() {
                self.ops.push(Op::RemoveEntries { slot: *slot, keys });
            }
        }
        let unused = self.old.policies.keys().filter(|slot| !self.new.policies.contains_key(slot));
        let free: Vec<PolicySlot> = unused.chain(stand_ins.values()).copied().collect();
        if !free.is_empty() {
            self.ops.push(Op::FreeSlots(free));
        }
    }

    fn leftovers(&mut self) {
        for (id, before, after) in both(&self.old.vpcs, &self.new.vpcs) {
            if let (Some(before), None) = (before, after) {
                self.ops.push(Op::RemoveVpc { id: *id, vpc: before.clone() });
            }
        }
        for (address, before, after) in self.old.nodes.apart(&self.new.nodes) {
            if let (Some(before), None) = (before, after) {
                self.ops.push(Op::RemoveNode { address: *address, node: before.clone() });
            }
        }
    }
}

/// The entry that a prefix's addresses have without the prefix itself.
fn cover(plan: &NodePlan, (vpc, net): PeerKey) -> Option<Peer> {
    let mut wider = net.supernet();
    while let Some(candidate) = wider {
        if let Some(peer) = plan.ipcache.get(&(vpc, candidate)) {
            return Some(*peer);
        }
        wider = candidate.supernet();
    }
    None
}

/// What an identity stands for in a VPC.
pub(crate) fn facts_of(plan: &NodePlan, vpc: &VpcName, identity: Identity) -> Option<Arc<IdentityFacts>> {
    if let Some(facts) = plan.identities.get(&identity) {
        return Some(facts.clone());
    }
    reserved_facts(vpc).into_iter().find(|(number, _)| *number == identity).map(|(_, facts)| Arc::new(facts))
}
