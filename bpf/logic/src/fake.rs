//! In-memory [`Frame`] and [`Tables`]: the same logic under `cargo test`, and the other half of differential tests against the kernel.
//!
//! Values that the kernel's maps hand out live as long as the program; here they are leaked: tests are short.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use flowloom_bpf_abi::{
    Addr, AddressKey, AddressRecord, AffinityKey, AffinityValue, BackendKey, BackendRecord, Counter, CtEntry,
    CtKey, DropKey, DropReason, EndpointRecord, Event, FlowKey, FlowValue, FragKey, FragValue, MemberKey,
    NetnsRecord, NodeConfig, PeerKey, PeerRecord, PolicyKey, PolicyValue, QuotaKey, QuotaValue, RangeKey,
    RateKey, RateValue, ServiceKey, ServiceRecord, SocketKey, SocketValue, TraceStep, TrafficCounters,
    VpcRecord, ct_flags, direction,
};

use crate::{CtCell, Frame, Inserted, Packet, Tables, TunnelKey, Verdict, Zero};

/// Where a redirect went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Redirect {
    /// Out of a device.
    Out(u32),
    /// In through a device.
    In(u32),
    /// In through the other end of a veth.
    Peer(u32),
    /// Out of a device to a neighbour.
    Neighbour(u32),
}

/// A packet in memory.
#[derive(Clone, Debug, Default)]
pub struct Bytes {
    /// Ethernet frame.
    pub data: Vec<u8>,
    /// Device of the hook.
    pub ifindex: u32,
    /// Device it came in on.
    pub arrived_on: u32,
    /// `skb->mark`.
    pub mark: u32,
    /// Bytes per segment.
    pub gso_size: u32,
    /// A VLAN tag was taken off.
    pub tagged: bool,
    /// Offset of a transport checksum that is still to be filled in.
    pub pending: Option<u32>,
    /// Meant for another by the link.
    pub for_another: bool,
    /// Declared as for this host.
    pub for_this_host: bool,
    /// Tunnel it came through.
    pub from_tunnel: Option<TunnelKey>,
    /// Tunnel it shall go through.
    pub to_tunnel: Option<TunnelKey>,
    /// Ports that sockets of this host have.
    pub sockets: Vec<u16>,
    /// Last redirect.
    pub redirect: Option<Redirect>,
}

/// [`Frame`] over [`Bytes`].
#[derive(Debug, Default)]
pub struct FakeFrame(pub RefCell<Bytes>);

impl FakeFrame {
    /// A frame that arrives on a device.
    #[must_use]
    pub fn new(data: Vec<u8>, ifindex: u32) -> Self {
        Self(RefCell::new(Bytes { data, ifindex, ..Bytes::default() }))
    }

    /// What it is now.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.0.borrow().clone()
    }
}

impl FakeFrame {
    /// Adds to a checksum: to the sum itself where it is pending, else to its complement.
    fn fix(&self, at: u32, change: u16, udp: bool, pending: bool) -> bool {
        let mut held = [0; 2];
        if !self.load(at, &mut held) {
            return false;
        }
        let held = u16::from_be_bytes(held);
        if udp && held == 0 {
            return true;
        }
        let sum = u32::from(if pending { held } else { !held }) + u32::from(change);
        let sum = ((sum & 0xffff) + (sum >> 16)) as u16;
        let new = if pending { sum } else { !sum };
        let new = if udp && new == 0 { 0xffff } else { new };
        self.store(at, &new.to_be_bytes())
    }
}

impl Frame for &FakeFrame {
    fn len(self) -> u32 {
        self.0.borrow().data.len() as u32
    }

    fn load<const N: usize>(self, at: u32, into: &mut [u8; N]) -> bool {
        let b = self.0.borrow();
        let Some(bytes) = b.data.get(at as usize..at as usize + N) else { return false };
        into.copy_from_slice(bytes);
        true
    }

    fn store<const N: usize>(self, at: u32, bytes: &[u8; N]) -> bool {
        let mut b = self.0.borrow_mut();
        let Some(target) = b.data.get_mut(at as usize..at as usize + N) else { return false };
        target.copy_from_slice(bytes);
        true
    }

    fn store_summed<const N: usize>(self, at: u32, bytes: &[u8; N]) -> bool {
        self.store(at, bytes)
    }

    fn fix_pseudo(self, at: u32, change: u16, _v4: bool, udp: bool) -> bool {
        let pending = self.0.borrow().pending == Some(at);
        self.fix(at, change, udp, pending)
    }

    fn fix_payload(self, at: u32, change: u16, udp: bool) -> bool {
        // What the device sums up is not in the field yet.
        self.0.borrow().pending == Some(at) || self.fix(at, change, udp, false)
    }

    fn ifindex(self) -> u32 {
        self.0.borrow().ifindex
    }

    fn arrived_on(self) -> u32 {
        self.0.borrow().arrived_on
    }

    fn mark(self) -> u32 {
        self.0.borrow().mark
    }

    fn set_mark(self, mark: u32) {
        self.0.borrow_mut().mark = mark;
    }

    fn gso_size(self) -> u32 {
        self.0.borrow().gso_size
    }

    fn tagged(self) -> bool {
        self.0.borrow().tagged
    }

    fn checksum_pending(self, at: u32) -> bool {
        self.0.borrow().pending == Some(at)
    }

    fn sum(self, at: u32, len: u32) -> u32 {
        let b = self.0.borrow();
        let bytes =
            b.data.get(at as usize..(at + len) as usize).filter(|b| b.len() <= crate::MAX_SUMMED as usize);
        bytes.unwrap_or_default().chunks_exact(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum()
    }

    fn resize(self, len: u32) -> bool {
        let mut b = self.0.borrow_mut();
        b.data.resize(len as usize, 0);
        b.gso_size = 0;
        true
    }

    fn insert_l3(self, bytes: u32) -> bool {
        let mut b = self.0.borrow_mut();
        if b.data.len() < 14 {
            return false;
        }
        b.data.splice(14..14, std::iter::repeat_n(0, bytes as usize));
        b.pending = b.pending.map(|at| at + bytes);
        true
    }

    fn unwrap(self, bytes: u32, v4: bool) -> bool {
        let mut b = self.0.borrow_mut();
        let end = 14 + bytes as usize;
        if b.gso_size > 0 || b.data.len() < end + if v4 { 20 } else { 40 } {
            return false;
        }
        b.data.drain(14..end);
        b.data[12..14].copy_from_slice(if v4 { &[0x08, 0x00] } else { &[0x86, 0xdd] });
        b.pending = b.pending.map(|at| at - bytes);
        true
    }

    fn is_for_this_host(self) -> bool {
        !self.0.borrow().for_another
    }

    fn for_this_host(self) {
        self.0.borrow_mut().for_this_host = true;
    }

    fn tunnel(self, key: &mut TunnelKey) -> bool {
        let Some(k) = self.0.borrow().from_tunnel else { return false };
        *key = k;
        true
    }

    fn set_tunnel(self, key: &TunnelKey) -> bool {
        self.0.borrow_mut().to_tunnel = Some(*key);
        true
    }

    fn has_socket(self, key: &FlowKey) -> bool {
        self.0.borrow().sockets.contains(&u16::from_be_bytes(key.dport))
    }

    fn redirect(self, ifindex: u32) -> Verdict {
        self.0.borrow_mut().redirect = Some(Redirect::Out(ifindex));
        Verdict::REDIRECT
    }

    fn redirect_ingress(self, ifindex: u32) -> Verdict {
        self.0.borrow_mut().redirect = Some(Redirect::In(ifindex));
        Verdict::REDIRECT
    }

    fn redirect_peer(self, ifindex: u32) -> Verdict {
        self.0.borrow_mut().redirect = Some(Redirect::Peer(ifindex));
        Verdict::REDIRECT
    }

    fn redirect_neigh(self, ifindex: u32) -> Verdict {
        self.0.borrow_mut().redirect = Some(Redirect::Neighbour(ifindex));
        Verdict::REDIRECT
    }
}

/// A policy: what an inner map holds.
pub type Policy = Vec<(PolicyKey, PolicyValue)>;

/// [`Tables`] in memory.
#[derive(Debug, Default)]
pub struct FakeTables {
    /// A trace: nothing is written but steps.
    pub dry: Cell<bool>,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub now_ns: Cell<u64>,
    /// ifindex -> endpoint id.
    pub devices: RefCell<BTreeMap<u32, u32>>,
    endpoints: RefCell<BTreeMap<u32, &'static EndpointRecord>>,
    /// Addresses of this node.
    pub addresses: RefCell<BTreeMap<AddressKey, AddressRecord>>,
    peers: RefCell<BTreeMap<PeerKey, &'static PeerRecord>>,
    vpcs: RefCell<BTreeMap<u32, &'static VpcRecord>>,
    policies: RefCell<BTreeMap<u32, BTreeMap<PolicyKey, &'static PolicyValue>>>,
    /// Established connections.
    pub established: RefCell<BTreeMap<CtKey, &'static CtCell>>,
    half_open: RefCell<BTreeMap<CtKey, &'static CtCell>>,
    /// Most established connections; 0 = no limit.
    pub capacity: Cell<usize>,
    /// Quotas by (vpc, endpoint).
    pub quotas: RefCell<BTreeMap<(u32, u32), QuotaValue>>,
    /// Node addresses.
    pub nodes: RefCell<Vec<Addr>>,
    fragments: RefCell<Vec<(FragKey, FragValue)>>,
    config: Cell<Option<&'static NodeConfig>>,
    /// Traffic by endpoint.
    pub traffic: RefCell<BTreeMap<u32, TrafficCounters>>,
    /// Drops.
    pub drops: RefCell<BTreeMap<DropKey, Counter>>,
    /// Hits by rule.
    pub hits: RefCell<BTreeMap<u32, Counter>>,
    rates: RefCell<BTreeMap<(u32, u32), RateValue>>,
    /// Events in order.
    pub events: RefCell<Vec<Event>>,
    /// Steps in order.
    pub steps: RefCell<Vec<TraceStep>>,
    /// Services.
    pub services: RefCell<BTreeMap<ServiceKey, ServiceRecord>>,
    /// Backends by list and place.
    pub backends: RefCell<BTreeMap<BackendKey, BackendRecord>>,
    /// Flags of a list's backends.
    pub members: RefCell<BTreeMap<MemberKey, u32>>,
    /// Who may use a service.
    pub ranges: RefCell<Vec<RangeKey>>,
    /// What clients were given.
    pub affinities: RefCell<BTreeMap<AffinityKey, AffinityValue>>,
    /// Whose sockets are in a namespace.
    pub namespaces: RefCell<BTreeMap<u64, NetnsRecord>>,
    /// What sockets were told.
    pub sockets: RefCell<Vec<(SocketKey, SocketValue)>>,
    /// Translations of flows.
    pub flows: RefCell<BTreeMap<FlowKey, FlowValue>>,
    /// Source of [`Tables::random`].
    pub seed: Cell<u32>,
    /// Lookups so far of VPCs, addresses, peers, services and flows.
    pub asked: Cell<u64>,
    /// Called once, before the next lookup of a backend: what user space may do meanwhile.
    pub before_backend: Cell<Option<fn(&FakeTables)>>,
}

fn copied<K: Ord, V: Copy>(map: &BTreeMap<K, V>, key: &K, into: &mut V) -> bool {
    map.get(key).is_some_and(|v| {
        *into = *v;
        true
    })
}

fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

/// Whether the first `bits` bits are equal.
fn prefix(a: &[u8], b: &[u8], bits: u32) -> bool {
    (0..bits as usize).all(|i| (a[i / 8] ^ b[i / 8]) & (0x80 >> (i % 8)) == 0)
}

fn peer_bytes(k: &PeerKey) -> [u8; 20] {
    let mut b = [0; 20];
    b[..4].copy_from_slice(&k.vpc.to_ne_bytes());
    b[4..].copy_from_slice(&k.addr.0);
    b
}

fn policy_bytes(k: &PolicyKey) -> [u8; 8] {
    let mut b = [0; 8];
    b[..4].copy_from_slice(&k.identity.to_ne_bytes());
    b[4] = k.protocol;
    b[5..7].copy_from_slice(&k.port);
    b
}

impl FakeTables {
    fn ask(&self) {
        self.asked.set(self.asked.get() + 1);
    }

    /// Writes an endpoint's record.
    pub fn set_endpoint(&self, id: u32, record: EndpointRecord) {
        self.endpoints.borrow_mut().insert(id, leak(record));
    }

    /// Writes an entry of the ipcache (`prefixlen` as in the map).
    pub fn set_peer(&self, key: PeerKey, record: PeerRecord) {
        self.peers.borrow_mut().insert(key, leak(record));
    }

    /// Removes an entry of the ipcache.
    pub fn remove_peer(&self, key: &PeerKey) {
        self.peers.borrow_mut().remove(key);
    }

    /// Writes a VPC's record.
    pub fn set_vpc(&self, id: u32, record: VpcRecord) {
        self.vpcs.borrow_mut().insert(id, leak(record));
    }

    /// Bumps a VPC's generation.
    pub fn bump(&self, id: u32) {
        let record = self.vpcs.borrow().get(&id).copied().copied();
        if let Some(mut record) = record {
            record.generation += 1;
            self.set_vpc(id, record);
        }
    }

    /// Writes the configuration.
    pub fn set_config(&self, config: NodeConfig) {
        self.config.set(Some(leak(config)));
    }

    /// Replaces the policy of a slot.
    pub fn set_policy(&self, slot: u32, policy: &[(PolicyKey, PolicyValue)]) {
        let entries = policy.iter().map(|(k, v)| (*k, leak(*v))).collect();
        self.policies.borrow_mut().insert(slot, entries);
    }

    /// Every connection, established ones first.
    #[must_use]
    pub fn connections(&self) -> Vec<(CtKey, CtEntry)> {
        let all = [&self.established, &self.half_open];
        all.iter()
            .flat_map(|m| m.borrow().iter().map(|(k, e)| (*k, e.value())).collect::<Vec<_>>())
            .filter(|(_, e)| e.flags & ct_flags::MOVED == 0)
            .collect()
    }

    /// How many connections are established and half open.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let begun = self.half_open.borrow().values().filter(|e| !e.has_moved()).count();
        (self.established.borrow().len(), begun)
    }

    /// Packets dropped by reason.
    #[must_use]
    pub fn dropped(&self) -> BTreeMap<&'static str, u64> {
        let mut sums = BTreeMap::new();
        for (key, counter) in self.drops.borrow().iter() {
            let name = DropReason::from_u8(key.reason).map_or("?", DropReason::name);
            *sums.entry(name).or_default() += counter.packets;
        }
        sums
    }

    /// Moves the clock.
    pub fn wait(&self, seconds: u64) {
        self.now_ns.set(self.now_ns.get() + seconds * 1_000_000_000);
    }

    /// Runs a hook over a frame.
    pub fn run(&self, hook: fn(&FakeFrame, &Self, &mut Packet) -> Verdict, frame: &FakeFrame) -> Verdict {
        let mut packet = Packet::default();
        hook(frame, self, &mut packet)
    }
}

impl Tables for &FakeTables {
    type Slot = u32;

    fn clear<Z: Zero>(self, value: &mut Z) {
        *value = Z::default();
    }

    fn dry(self) -> bool {
        self.dry.get()
    }

    fn device(self, ifindex: u32) -> Option<u32> {
        self.devices.borrow().get(&ifindex).copied()
    }

    fn endpoint(self, id: u32) -> Option<&'static EndpointRecord> {
        self.endpoints.borrow().get(&id).copied()
    }

    fn address(self, key: &AddressKey) -> Option<AddressRecord> {
        self.ask();
        self.addresses.borrow().get(key).copied()
    }

    fn peer(self, key: &PeerKey) -> Option<&'static PeerRecord> {
        self.ask();
        let wanted = peer_bytes(key);
        let peers = self.peers.borrow();
        let hits = peers.iter().filter(|(k, _)| prefix(&peer_bytes(k), &wanted, k.prefixlen));
        hits.max_by_key(|(k, _)| k.prefixlen).map(|(_, v)| *v)
    }

    fn vpc(self, id: u32) -> Option<&'static VpcRecord> {
        self.ask();
        self.vpcs.borrow().get(&id).copied()
    }

    fn slot(self, slot: u32) -> Option<u32> {
        self.policies.borrow().contains_key(&slot).then_some(slot)
    }

    fn policy(self, slot: u32, key: &PolicyKey) -> Option<&'static PolicyValue> {
        let wanted = policy_bytes(key);
        let policies = self.policies.borrow();
        let entries = policies.get(&slot)?;
        let hits = entries.iter().filter(|(k, _)| prefix(&policy_bytes(k), &wanted, k.prefixlen));
        hits.max_by_key(|(k, _)| k.prefixlen).map(|(_, v)| *v)
    }

    fn established(self, key: &CtKey) -> Option<&'static CtCell> {
        self.established.borrow().get(key).copied()
    }

    fn half_open(self, key: &CtKey) -> Option<&'static CtCell> {
        self.half_open.borrow().get(key).copied()
    }

    fn insert_established(self, key: &CtKey, entry: &CtEntry) -> Inserted {
        let mut map = self.established.borrow_mut();
        if map.contains_key(key) {
            return Inserted::Exists;
        }
        if self.capacity.get() != 0 && map.len() >= self.capacity.get() {
            return Inserted::Full;
        }
        map.insert(*key, leak(CtCell::new(entry)));
        Inserted::Yes
    }

    fn insert_half_open(self, key: &CtKey, entry: &CtEntry) -> Inserted {
        let mut map = self.half_open.borrow_mut();
        if map.contains_key(key) {
            return Inserted::Exists;
        }
        map.insert(*key, leak(CtCell::new(entry)));
        Inserted::Yes
    }

    fn remove_established(self, key: &CtKey) -> bool {
        self.established.borrow_mut().remove(key).is_some()
    }

    fn remove_half_open(self, key: &CtKey) {
        self.half_open.borrow_mut().remove(key);
    }

    fn take_quota(self, key: &QuotaKey) -> bool {
        let mut quotas = self.quotas.borrow_mut();
        let Some(quota) = quotas.get_mut(&(key.vpc, key.endpoint)) else { return true };
        if quota.limit != 0 && quota.used >= quota.limit {
            return false;
        }
        quota.used += 1;
        true
    }

    fn give_quota(self, key: &QuotaKey) {
        if let Some(quota) = self.quotas.borrow_mut().get_mut(&(key.vpc, key.endpoint)) {
            quota.used -= 1;
        }
    }

    fn is_node(self, addr: &Addr) -> bool {
        self.nodes.borrow().contains(addr)
    }

    fn fragment(self, key: &FragKey) -> Option<FragValue> {
        self.fragments.borrow().iter().rev().find(|(k, _)| k == key).map(|(_, v)| *v)
    }

    fn learn_fragment(self, key: &FragKey, value: &FragValue) {
        if !self.dry.get() {
            self.fragments.borrow_mut().push((*key, *value));
        }
    }

    fn service(self, key: &ServiceKey, into: &mut ServiceRecord) -> bool {
        self.ask();
        copied(&self.services.borrow(), key, into)
    }

    fn backend(self, key: &BackendKey, into: &mut BackendRecord) -> bool {
        if let Some(change) = self.before_backend.take() {
            change(self);
        }
        copied(&self.backends.borrow(), key, into)
    }

    fn member(self, key: &MemberKey) -> Option<u32> {
        self.members.borrow().get(key).copied()
    }

    fn in_range(self, key: &RangeKey) -> bool {
        let bits = |k: &RangeKey| k.prefixlen - RangeKey::SERVICE_BITS;
        let mut ranges = self.ranges.borrow().clone();
        ranges.retain(|k| k.service == key.service && prefix(&k.addr.0, &key.addr.0, bits(k)));
        !ranges.is_empty()
    }

    fn affinity(self, key: &AffinityKey, into: &mut AffinityValue) -> bool {
        copied(&self.affinities.borrow(), key, into)
    }

    fn learn_affinity(self, key: &AffinityKey, value: &AffinityValue) {
        if !self.dry.get() {
            self.affinities.borrow_mut().insert(*key, *value);
        }
    }

    fn touch_affinity(self, key: &AffinityKey, second: u32) {
        if let Some(v) = self.affinities.borrow_mut().get_mut(key).filter(|_| !self.dry.get()) {
            v.last_used = second;
        }
    }

    fn netns(self, cookie: u64) -> Option<NetnsRecord> {
        self.namespaces.borrow().get(&cookie).copied()
    }

    fn socket(self, key: &SocketKey, into: &mut SocketValue) -> bool {
        let sockets = self.sockets.borrow();
        let found = sockets.iter().find(|(k, _)| k == key);
        found.is_some_and(|(_, v)| {
            *into = *v;
            true
        })
    }

    fn learn_socket(self, key: &SocketKey, value: &SocketValue) {
        if !self.dry.get() {
            let mut sockets = self.sockets.borrow_mut();
            sockets.retain(|(k, _)| k != key);
            sockets.push((*key, *value));
        }
    }

    fn touch_socket(self, key: &SocketKey, second: u32) {
        if let Some((_, v)) = self.sockets.borrow_mut().iter_mut().find(|(k, _)| k == key && !self.dry.get())
        {
            v.last_used = second;
        }
    }

    fn flow(self, key: &FlowKey, into: &mut FlowValue) -> bool {
        self.ask();
        copied(&self.flows.borrow(), key, into)
    }

    fn is_flow(self, key: &FlowKey) -> bool {
        self.flows.borrow().contains_key(key)
    }

    fn learn_flow(self, key: &FlowKey, value: &FlowValue) {
        if !self.dry.get() {
            self.flows.borrow_mut().insert(*key, *value);
        }
    }

    fn touch_flow(self, key: &FlowKey, second: u32) {
        if let Some(v) = self.flows.borrow_mut().get_mut(key).filter(|_| !self.dry.get()) {
            v.last_seen = second;
        }
    }

    fn random(self) -> u32 {
        // A linear congruential generator (constants: Numerical Recipes).
        let next = self.seed.get().wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.seed.set(next);
        next
    }

    fn config(self) -> Option<&'static NodeConfig> {
        self.config.get()
    }

    fn count_traffic(self, endpoint: u32, side: u8, bytes: u32) {
        if self.dry.get() {
            return;
        }
        let mut traffic = self.traffic.borrow_mut();
        let counters = traffic.entry(endpoint).or_default();
        let counter = if side == direction::EGRESS { &mut counters.egress } else { &mut counters.ingress };
        counter[0] += 1;
        counter[1] += u64::from(bytes);
    }

    fn count_drop(self, key: &DropKey, bytes: u32) {
        if !self.dry.get() {
            let mut drops = self.drops.borrow_mut();
            let counter = drops.entry(*key).or_default();
            counter.packets += 1;
            counter.bytes += u64::from(bytes);
        }
    }

    fn count_rule(self, rule: u32, bytes: u32) {
        if !self.dry.get() {
            let mut hits = self.hits.borrow_mut();
            let counter = hits.entry(rule).or_default();
            counter.packets += 1;
            counter.bytes += u64::from(bytes);
        }
    }

    fn take_token(self, key: &RateKey, limit: u32, second: u32, lost: &mut u32) -> bool {
        if limit == 0 || self.dry.get() {
            return true;
        }
        let mut rates = self.rates.borrow_mut();
        let fresh = RateValue { second, tokens: limit, refused: 0 };
        let bucket = rates.entry((key.endpoint, key.what)).or_insert(fresh);
        if bucket.second != second {
            (bucket.second, bucket.tokens) = (second, limit);
        }
        if bucket.tokens == 0 {
            bucket.refused += 1;
            return false;
        }
        bucket.tokens -= 1;
        *lost = bucket.refused as u32;
        true
    }

    fn emit(self, event: &Event) {
        if !self.dry.get() {
            self.events.borrow_mut().push(*event);
        }
    }

    fn step(self, kind: u32, a: u32, b: u32, c: u32) {
        if self.dry.get() {
            self.steps.borrow_mut().push(TraceStep { kind, a, b, c });
        }
    }

    fn now_ns(self) -> u64 {
        self.now_ns.get()
    }

    fn once(self, field: &u32) -> u32 {
        *field
    }

    fn barrier(self) {}
}
