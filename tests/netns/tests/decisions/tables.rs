//! The user-space side: compiled entries asked by the compiler's own lookup, the shipped logic around them.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use flowloom_bpf_abi::{
    Addr, AddressKey, AddressRecord, AffinityKey, AffinityValue, BackendKey, BackendRecord, CtEntry, CtKey,
    DropKey, EndpointRecord, Event, FlowKey, FlowValue, FragKey, FragValue, MemberKey, NetnsRecord,
    NodeConfig, PeerKey, PeerRecord, PolicyKey, PolicyValue, QuotaKey, RangeKey, RateKey, ServiceKey,
    ServiceRecord, SocketKey, SocketValue, VpcRecord, address_flags, ct_flags, identity, peer_flags, verdict,
    vpc_flags,
};
use flowloom_bpf_logic::fake::FakeFrame;
use flowloom_bpf_logic::{
    CtCell, Inserted, Packet, Tables, Verdict, Zero, from_endpoint, from_uplink, to_endpoint,
};
use flowloom_compiler::{Identity, NodePlan, Op, PolicyEntries, lookup};
use flowloom_datapath::{Devices, Hook, lower};

use crate::fault::Fault;

type Connections = RefCell<BTreeMap<CtKey, &'static CtCell>>;

/// What the maps would hold, read from the plan.
#[derive(Default)]
pub(crate) struct Compiled {
    pub(crate) fault: Option<Fault>,
    endpoints: BTreeMap<u32, &'static EndpointRecord>,
    devices: BTreeMap<u32, u32>,
    addresses: BTreeMap<AddressKey, AddressRecord>,
    /// By prefix length, then (VPC, masked address).
    peers: BTreeMap<u32, BTreeMap<(u32, u128), &'static PeerRecord>>,
    vpcs: BTreeMap<u32, &'static VpcRecord>,
    generations: BTreeMap<u32, u32>,
    entries: BTreeMap<u32, PolicyEntries>,
    ingress: BTreeSet<u32>,
    nodes: BTreeSet<Addr>,
    config: Cell<Option<&'static NodeConfig>>,
    established: Connections,
    half_open: Connections,
    pub(crate) drops: RefCell<BTreeMap<DropKey, u64>>,
    pub(crate) events: RefCell<Vec<Event>>,
    values: RefCell<BTreeMap<PolicyValue, &'static PolicyValue>>,
    now_ns: Cell<u64>,
    /// Of the packet that is judged: its source is the lower end.
    src_is_lo: Cell<bool>,
}

fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

fn masked(addr: Addr, bits: u32) -> u128 {
    let keep = if bits == 0 { 0 } else { u128::MAX << (128 - bits) };
    u128::from_be_bytes(addr.0) & keep
}

impl Compiled {
    /// Takes a plan over. The operations say only which generations grew.
    pub(crate) fn hold(&mut self, plan: &NodePlan, ops: &[Op], devices: &Devices) {
        for op in ops {
            match op {
                Op::PutVpc { id, .. } => {
                    self.generations.entry(id.0).or_insert(1);
                }
                Op::RemoveVpc { id, .. } => {
                    self.generations.remove(&id.0);
                }
                Op::BumpGeneration(id) => *self.generations.entry(id.0).or_insert(1) += 1,
                _ => {}
            }
        }
        self.vpcs.clear();
        self.addresses.clear();
        for (id, vpc) in &plan.vpcs {
            let flags = if vpc.default { vpc_flags::DEFAULT } else { 0 };
            let generation = self.generations[&id.0];
            self.vpcs.insert(id.0, leak(VpcRecord { vni: id.0, generation, flags, pad: 0 }));
            let host = if vpc.default { address_flags::HOST } else { 0 };
            let local = plan.nodes.iter().filter(|(_, n)| vpc.default && n.local).map(|(ip, _)| ip);
            for ip in local {
                self.address(id.0, *ip, 0, address_flags::HOST);
            }
            for ip in &vpc.gateways {
                self.address(id.0, *ip, 0, address_flags::GATEWAY | host);
            }
        }
        self.endpoints.clear();
        self.devices.clear();
        self.ingress.clear();
        for endpoint in plan.endpoints.values() {
            let device = &devices[&endpoint.id];
            let record = lower::endpoint_record(endpoint, device).expect("a plan can be lowered");
            self.endpoints.insert(endpoint.id.0, leak(record));
            self.devices.insert(device.ifindex, endpoint.id.0);
            self.ingress.insert(endpoint.ingress_slot.0);
            for ip in &endpoint.ips {
                self.address(endpoint.vpc.0, *ip, endpoint.id.0, 0);
            }
        }
        self.peers.clear();
        for ((vpc, net), peer) in &plan.ipcache {
            let bits = u32::from(net.prefix_len()) + if net.addr().is_ipv4() { 96 } else { 0 };
            let record = PeerRecord {
                identity: peer.identity.0,
                flags: peer.flags,
                tunnel: peer.tunnel.map_or(Addr::ZERO, Addr::from),
            };
            let key = (vpc.0, masked(net.addr().into(), bits));
            self.peers.entry(bits).or_default().insert(key, leak(record));
        }
        self.entries = plan.policies.keys().map(|slot| (slot.0, plan.entries(*slot))).collect();
        self.nodes = plan.nodes.keys().map(|ip| Addr::from(*ip)).collect();
    }

    fn address(&mut self, vpc: u32, ip: IpAddr, endpoint: u32, flags: u32) {
        self.addresses.insert(AddressKey { vpc, addr: ip.into() }, AddressRecord { endpoint, flags });
    }

    /// Sets the node's configuration.
    pub(crate) fn configure(&self, config: NodeConfig) {
        self.config.set(Some(leak(config)));
    }

    /// Forgets connections.
    pub(crate) fn flush(&self) {
        self.established.borrow_mut().clear();
        self.half_open.borrow_mut().clear();
    }

    /// Every connection but for times.
    pub(crate) fn connections(&self) -> BTreeMap<CtKey, CtEntry> {
        let (a, b) = (self.established.borrow(), self.half_open.borrow());
        let begun = b.iter().filter(|(_, c)| !c.has_moved());
        a.iter().chain(begun).map(|(k, c)| (*k, timeless(k, c.value()))).collect()
    }

    /// Runs a hook. `src_is_lo`: how the packet's ends are ordered.
    pub(crate) fn run(&self, hook: Hook, frame: &FakeFrame, now_ns: u64, src_is_lo: bool) -> Verdict {
        self.now_ns.set(now_ns);
        self.src_is_lo.set(src_is_lo);
        self.events.borrow_mut().clear();
        let mut packet = Packet::default();
        match hook {
            Hook::FromEndpoint => from_endpoint(frame, self, &mut packet),
            Hook::ToEndpoint => to_endpoint(frame, self, &mut packet),
            Hook::FromUplink => from_uplink(frame, self, &mut packet),
            Hook::FromOverlay | Hook::ToOverlay | Hook::ToUplink => panic!("{hook:?} has no test run here"),
        }
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    fn tracked(&self, key: &CtKey) -> CtKey {
        if self.has(Fault::VpcNotInConntrackKey) { CtKey { vpc: 0, ..*key } } else { *key }
    }

    fn find(&self, map: &Connections, key: &CtKey) -> Option<&'static CtCell> {
        let key = self.tracked(key);
        let cell = *map.borrow().get(&key)?;
        let mut entry = cell.value();
        if self.has(Fault::ReplyAsNew) && (entry.flags & ct_flags::ORIG_IS_LO != 0) != self.src_is_lo.get() {
            return None;
        }
        if !self.has(Fault::RevisionIgnored) {
            return Some(cell);
        }
        for side in 0..2 {
            let id = [entry.orig_endpoint, entry.reply_endpoint][side];
            let decision = &mut entry.decision[side];
            if let Some(record) = self.endpoints.get(&id).filter(|_| decision.revision != 0) {
                decision.revision = record.revision;
                decision.slot = [record.egress_slot, record.ingress_slot][side];
            }
        }
        let cell = leak(CtCell::new(&entry));
        map.borrow_mut().insert(key, cell);
        Some(cell)
    }

    fn insert(&self, map: &Connections, key: &CtKey, entry: &CtEntry) -> Inserted {
        let mut map = map.borrow_mut();
        if map.contains_key(&self.tracked(key)) {
            return Inserted::Exists;
        }
        map.insert(self.tracked(key), leak(CtCell::new(entry)));
        Inserted::Yes
    }
}

/// An entry without what clocks wrote: what is not TCP becomes a connection by its age.
pub(crate) fn timeless(key: &CtKey, entry: CtEntry) -> CtEntry {
    let (state, flags) =
        if key.protocol == 6 { (entry.state, entry.flags) } else { (0, entry.flags & !ct_flags::COUNTED) };
    CtEntry { last_seen: 0, created: 0, state, flags, ..entry }
}

impl Tables for &Compiled {
    type Slot = u32;

    fn clear<Z: Zero>(self, value: &mut Z) {
        *value = Z::default();
    }

    fn dry(self) -> bool {
        false
    }

    fn device(self, ifindex: u32) -> Option<u32> {
        self.devices.get(&ifindex).copied()
    }

    fn endpoint(self, id: u32) -> Option<&'static EndpointRecord> {
        self.endpoints.get(&id).copied()
    }

    fn address(self, key: &AddressKey) -> Option<AddressRecord> {
        self.addresses.get(key).copied()
    }

    fn peer(self, key: &PeerKey) -> Option<&'static PeerRecord> {
        let vpc = if self.has(Fault::VpcNotInPeerKey) { 1 } else { key.vpc };
        let mut longest_first = self.peers.iter().rev();
        let found =
            longest_first.find_map(|(bits, peers)| peers.get(&(vpc, masked(key.addr, *bits))).copied())?;
        if self.has(Fault::NobodyRemembered) {
            return Some(leak(PeerRecord { flags: found.flags & !peer_flags::UNASSIGNED, ..*found }));
        }
        Some(found)
    }

    fn vpc(self, id: u32) -> Option<&'static VpcRecord> {
        self.vpcs.get(&id).copied()
    }

    fn slot(self, slot: u32) -> Option<u32> {
        self.entries.contains_key(&slot).then_some(slot)
    }

    /// The compiler's lookup decides between the identity and anyone; the logic around it compares once more and finds the same.
    fn policy(self, slot: u32, key: &PolicyKey) -> Option<&'static PolicyValue> {
        let entries = self.entries.get(&slot)?;
        let asked =
            |identity: u32| lookup(entries, Identity(identity), key.protocol, u16::from_be_bytes(key.port));
        let mut value = asked(key.identity)?;
        if self.has(Fault::AnyIdentityIgnored) && key.identity != identity::ANY {
            let own: PolicyEntries =
                entries.iter().filter(|(k, _)| k.identity == key.identity).map(|(k, v)| (*k, *v)).collect();
            let exact = lookup(&own, Identity(key.identity), key.protocol, u16::from_be_bytes(key.port));
            value = exact.map_or(value, |exact| PolicyValue { precedence: u32::MAX, ..exact });
        }
        if self.has(Fault::ReceiverNotAsked) && self.ingress.contains(&slot) {
            value.verdict = verdict::ALLOW;
        }
        Some(self.values.borrow_mut().entry(value).or_insert_with(|| leak(value)))
    }

    fn established(self, key: &CtKey) -> Option<&'static CtCell> {
        self.find(&self.established, key)
    }

    fn half_open(self, key: &CtKey) -> Option<&'static CtCell> {
        self.find(&self.half_open, key)
    }

    fn insert_established(self, key: &CtKey, entry: &CtEntry) -> Inserted {
        self.insert(&self.established, key, entry)
    }

    fn insert_half_open(self, key: &CtKey, entry: &CtEntry) -> Inserted {
        self.insert(&self.half_open, key, entry)
    }

    fn remove_established(self, key: &CtKey) -> bool {
        self.established.borrow_mut().remove(&self.tracked(key)).is_some()
    }

    fn remove_half_open(self, key: &CtKey) {
        self.half_open.borrow_mut().remove(&self.tracked(key));
    }

    fn take_quota(self, _: &QuotaKey) -> bool {
        true
    }

    fn give_quota(self, _: &QuotaKey) {}

    fn is_node(self, addr: &Addr) -> bool {
        self.nodes.contains(addr)
    }

    fn fragment(self, _: &FragKey) -> Option<FragValue> {
        None
    }

    fn learn_fragment(self, _: &FragKey, _: &FragValue) {}

    // Worlds of this test have no services.
    fn service(self, _: &ServiceKey, _: &mut ServiceRecord) -> bool {
        false
    }

    fn backend(self, _: &BackendKey, _: &mut BackendRecord) -> bool {
        false
    }

    fn member(self, _: &MemberKey) -> Option<u32> {
        None
    }

    fn in_range(self, _: &RangeKey) -> bool {
        false
    }

    fn affinity(self, _: &AffinityKey, _: &mut AffinityValue) -> bool {
        false
    }

    fn learn_affinity(self, _: &AffinityKey, _: &AffinityValue) {}

    fn touch_affinity(self, _: &AffinityKey, _: u32) {}

    fn netns(self, _: u64) -> Option<NetnsRecord> {
        None
    }

    fn socket(self, _: &SocketKey, _: &mut SocketValue) -> bool {
        false
    }

    fn learn_socket(self, _: &SocketKey, _: &SocketValue) {}

    fn touch_socket(self, _: &SocketKey, _: u32) {}

    fn flow(self, _: &FlowKey, _: &mut FlowValue) -> bool {
        false
    }

    fn is_flow(self, _: &FlowKey) -> bool {
        false
    }

    fn learn_flow(self, _: &FlowKey, _: &FlowValue) {}

    fn touch_flow(self, _: &FlowKey, _: u32) {}

    fn random(self) -> u32 {
        0
    }

    fn config(self) -> Option<&'static NodeConfig> {
        self.config.get()
    }

    fn count_traffic(self, _: u32, _: u8, _: u32) {}

    fn count_drop(self, key: &DropKey, _: u32) {
        *self.drops.borrow_mut().entry(*key).or_default() += 1;
    }

    fn count_rule(self, _: u32, _: u32) {}

    fn take_token(self, _: &RateKey, _: u32, _: u32, _: &mut u32) -> bool {
        true
    }

    fn emit(self, event: &Event) {
        self.events.borrow_mut().push(*event);
    }

    fn step(self, _: u32, _: u32, _: u32, _: u32) {}

    fn now_ns(self) -> u64 {
        self.now_ns.get()
    }

    fn once(self, field: &u32) -> u32 {
        *field
    }

    fn barrier(self) {}
}
