//! What is left to do between the kernel's state and a plan. Pure: after a restart, and as the proof that nothing is left.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use flowloom_bpf_abi::{self as abi, address_flags, identity, node_flags};
use flowloom_compiler::{
    EndpointId, EndpointPlan, Identity, NodeAddress, NodePlan, Op, PolicyEntries, PolicySlot, VpcId, VpcPlan,
};
use flowloom_model::{EndpointKey, EndpointName, Mac, NodeName, VpcName};

use crate::apply::Devices;
use crate::lower;
use crate::services;
use crate::state::KernelState;

/// The operations that turn `state` into what `plan` wants, in the order that is safe at every step; none when nothing differs.
///
/// Endpoints without a device in `devices` are compared on the device that the kernel remembers.
#[must_use]
pub fn remaining(state: &KernelState, plan: &NodePlan, devices: &Devices) -> Vec<Op> {
    let mut bumps = BTreeSet::new();
    let policies = policy_ops(state, plan, &mut bumps);
    let (put_peers, remove_peers) = peer_ops(state, plan, &mut bumps);
    let (release, remove_endpoints) = stale_endpoints(state, plan);
    let (remove_vpcs, remove_nodes) = stale_roots(state, plan);

    let mut ops = services::remaining(&state.services, &plan.services);
    ops.extend(vpc_ops(state, plan));
    ops.extend(node_ops(state, plan));
    ops.extend(policies.add);
    if !put_peers.is_empty() {
        ops.push(Op::PutPeers(put_peers));
    }
    if !policies.put.is_empty() {
        ops.push(Op::PutSlots(policies.put));
    }
    ops.extend(release);
    ops.extend(endpoint_ops(state, plan, devices));
    ops.extend(remove_endpoints);
    if !remove_peers.is_empty() {
        ops.push(Op::RemovePeers(remove_peers));
    }
    ops.extend(bumps.into_iter().map(Op::BumpGeneration));
    ops.extend(policies.remove);
    if !policies.free.is_empty() {
        ops.push(Op::FreeSlots(policies.free));
    }
    ops.extend(remove_nodes);
    ops.extend(remove_vpcs);
    ops
}

fn vpc_ops(state: &KernelState, plan: &NodePlan) -> Vec<Op> {
    let put = |(id, vpc): (&VpcId, &VpcPlan)| {
        let record = state.vpcs.get(&id.0);
        // The mark of services is set and taken away with them.
        let served = state.services.serves(id.0);
        let same_record = record.is_some_and(|r| {
            let marked = r.flags & abi::vpc_flags::SERVICES != 0;
            r.vni == id.0
                && r.flags & !abi::vpc_flags::SERVICES == lower::vpc_flag_bits(vpc)
                && (marked || !served)
                && r.generation != 0
        });
        let want = lower::gateway_record(vpc);
        let same_gateways =
            vpc.gateways.iter().all(|g| state.addresses.get(&lower::address_key(*id, *g)) == Some(&want));
        let stale_gateways: Vec<IpAddr> =
            gateways_of(state, id.0).filter(|g| !vpc.gateways.contains(g)).collect();
        (!same_record || !same_gateways || !stale_gateways.is_empty()).then(|| Op::PutVpc {
            id: *id,
            vpc: vpc.clone(),
            stale_gateways,
        })
    };
    plan.vpcs.iter().filter_map(put).collect()
}

/// Gateway addresses that the kernel answers for in a VPC.
fn gateways_of(state: &KernelState, vpc: u32) -> impl Iterator<Item = IpAddr> {
    state
        .addresses
        .iter()
        .filter(move |(k, r)| k.vpc == vpc && r.endpoint == 0 && r.flags & address_flags::GATEWAY != 0)
        .map(|(k, _)| k.addr.into())
}

fn node_ops(state: &KernelState, plan: &NodePlan) -> Vec<Op> {
    let default = plan.vpcs.iter().find(|(_, v)| v.default).map(|(id, _)| *id);
    let put = |(address, node): (&IpAddr, &NodeAddress)| {
        let same = state.nodes.get(&(*address).into()) == Some(&lower::node_record(node));
        let host = default.filter(|_| node.local).is_none_or(|vpc| {
            state
                .addresses
                .get(&lower::address_key(vpc, *address))
                .is_some_and(|r| r.endpoint == 0 && r.flags & address_flags::HOST != 0)
        });
        (!same || !host).then(|| Op::PutNode { address: *address, node: node.clone() })
    };
    plan.nodes.iter().filter_map(put).collect()
}

#[derive(Default)]
struct PolicyOps {
    add: Vec<Op>,
    put: Vec<(PolicySlot, PolicyEntries)>,
    remove: Vec<Op>,
    free: Vec<PolicySlot>,
}

fn policy_ops(state: &KernelState, plan: &NodePlan, bumps: &mut BTreeSet<VpcId>) -> PolicyOps {
    let mut out = PolicyOps::default();
    for slot in plan.policies.keys() {
        let want = plan.entries(*slot);
        match state.policies.get(&slot.0).map(|have| difference(have, &want)) {
            None => out.put.push((*slot, want)),
            Some(Difference::None) => {}
            Some(Difference::InPlace { add, remove }) => {
                if !add.is_empty() {
                    out.add.push(Op::AddEntries { slot: *slot, entries: add });
                }
                if !remove.is_empty() {
                    out.remove.push(Op::RemoveEntries { slot: *slot, keys: remove });
                }
            }
            Some(Difference::Rules) => {
                // The slot number stays while its meaning changes: whatever was decided under it must be decided anew.
                let users =
                    plan.endpoints.values().filter(|e| e.egress_slot == *slot || e.ingress_slot == *slot);
                bumps.extend(users.map(|e| e.vpc));
                out.put.push((*slot, want));
            }
        }
    }
    let known = |slot: &u32| plan.policies.contains_key(&PolicySlot(*slot));
    out.free = state.policies.keys().filter(|s| !known(s)).map(|s| PolicySlot(*s)).collect();
    out
}

enum Difference {
    None,
    /// Whole identities come or go.
    InPlace {
        add: PolicyEntries,
        remove: Vec<abi::PolicyKey>,
    },
    /// Anything else: only a new inner map changes it in one step.
    Rules,
}

fn difference(have: &PolicyEntries, want: &PolicyEntries) -> Difference {
    if have == want {
        return Difference::None;
    }
    let add: PolicyEntries =
        want.iter().filter(|(k, v)| have.get(k) != Some(v)).map(|(k, v)| (*k, *v)).collect();
    let remove: Vec<_> = have.keys().filter(|k| !want.contains_key(k)).copied().collect();
    let identities = |map: &PolicyEntries| map.keys().map(|k| k.identity).collect::<BTreeSet<_>>();
    let (had, wanted) = (identities(have), identities(want));
    let whole = add.keys().all(|k| k.identity != identity::ANY && !had.contains(&k.identity))
        && remove.iter().all(|k| k.identity != identity::ANY && !wanted.contains(&k.identity));
    if whole { Difference::InPlace { add, remove } } else { Difference::Rules }
}

type PutPeers = Vec<((VpcId, ipnet::IpNet), flowloom_compiler::Peer)>;
type RemovePeers = Vec<(VpcId, ipnet::IpNet)>;

fn peer_ops(state: &KernelState, plan: &NodePlan, bumps: &mut BTreeSet<VpcId>) -> (PutPeers, RemovePeers) {
    let mut put = Vec::new();
    let mut wanted = BTreeSet::new();
    for ((vpc, net), peer) in &plan.ipcache {
        let key = lower::peer_key(*vpc, *net);
        wanted.insert(key);
        let record = lower::peer_record(peer);
        let have = state.peers.get(&key);
        if have == Some(&record) {
            continue;
        }
        let before = have.or_else(|| state.covering(&key));
        if before.is_some_and(|r| !lower::is_unassigned(r)) {
            bumps.insert(*vpc);
        }
        put.push(((*vpc, *net), *peer));
    }
    let remove: RemovePeers =
        state.peers.keys().filter(|k| !wanted.contains(k)).filter_map(lower::peer_net).collect();
    bumps.extend(remove.iter().map(|(vpc, _)| *vpc));
    (put, remove)
}

fn endpoint_ops(state: &KernelState, plan: &NodePlan, devices: &Devices) -> Vec<Op> {
    let same = |endpoint: &EndpointPlan| {
        let Some(have) = state.endpoints.get(&endpoint.id.0) else { return false };
        let remembered = lower::device_of(have);
        let Some(device) = devices.get(&endpoint.id).or(remembered.as_ref()) else { return false };
        let addresses = endpoint.ips.iter().all(|ip| {
            let record = state.addresses.get(&lower::address_key(endpoint.vpc, *ip));
            record == Some(&abi::AddressRecord { endpoint: endpoint.id.0, flags: 0 })
        });
        addresses && lower::endpoint_record(endpoint, device).is_ok_and(|want| want == *have)
    };
    plan.endpoints.values().filter(|e| !same(e)).map(|e| Op::PutEndpoint(e.clone())).collect()
}

/// Addresses and records of endpoints that the plan does not have (that way).
fn stale_endpoints(state: &KernelState, plan: &NodePlan) -> (Vec<Op>, Vec<Op>) {
    let by_id: BTreeMap<u32, &EndpointPlan> = plan.endpoints.values().map(|e| (e.id.0, e)).collect();
    let all: BTreeSet<abi::AddressKey> =
        plan.endpoints.values().flat_map(|e| e.ips.iter().map(|ip| lower::address_key(e.vpc, *ip))).collect();
    let mut stale: BTreeMap<(u32, u32), Vec<IpAddr>> = BTreeMap::new();
    for (key, record) in state.addresses.iter().filter(|(_, r)| r.endpoint != 0) {
        let ip = IpAddr::from(key.addr);
        let owned = |e: &&EndpointPlan| e.vpc.0 == key.vpc && e.ips.contains(&ip);
        // An address that another endpoint of the plan takes over is overwritten, not removed.
        if !by_id.get(&record.endpoint).is_some_and(owned) && !all.contains(key) {
            stale.entry((record.endpoint, key.vpc)).or_default().push(ip);
        }
    }
    for (id, record) in state.endpoints.iter().filter(|(id, _)| !by_id.contains_key(id)) {
        stale.entry((*id, record.vpc)).or_default();
    }
    let mut release = Vec::new();
    let mut remove = Vec::new();
    for ((id, vpc), ips) in stale {
        match by_id.get(&id) {
            Some(known) => {
                let endpoint = EndpointPlan { vpc: VpcId(vpc), ..(*known).clone() };
                release.push(Op::RemoveAddresses { endpoint, ips });
            }
            None => {
                let record = state.endpoints.get(&id).copied().unwrap_or_default();
                if let Some(endpoint) = forgotten(id, vpc, ips, &record) {
                    remove.push(Op::RemoveEndpoint(endpoint));
                }
            }
        }
    }
    (release, remove)
}

/// Stands for an endpoint whose name nobody remembers. The name is only shown.
fn forgotten(id: u32, vpc: u32, ips: Vec<IpAddr>, record: &abi::EndpointRecord) -> Option<EndpointPlan> {
    let key = EndpointKey {
        vpc: VpcName::new(format!("vni-{vpc}")).ok()?,
        name: EndpointName::new(format!("id-{id}")).ok()?,
    };
    Some(EndpointPlan {
        key,
        id: EndpointId(id),
        vpc: VpcId(vpc),
        ips,
        subnets: Vec::new(),
        gateways: Vec::new(),
        mac: Mac(record.mac),
        mac_pinned: false,
        identity: Identity(record.identity),
        egress_slot: PolicySlot(record.egress_slot),
        ingress_slot: PolicySlot(record.ingress_slot),
        revision: record.revision,
        judge_host: false,
        mtu: None,
    })
}

/// VPCs and nodes that the plan does not have, and host or gateway addresses that belong to none.
fn stale_roots(state: &KernelState, plan: &NodePlan) -> (Vec<Op>, Vec<Op>) {
    let default = plan.vpcs.iter().find(|(_, v)| v.default).map(|(id, _)| id.0).or(state.default_vpc());
    let mut vpcs: BTreeSet<u32> = state.vpcs.keys().copied().collect();
    let gateway = |r: &abi::AddressRecord| r.endpoint == 0 && r.flags & address_flags::GATEWAY != 0;
    vpcs.extend(state.addresses.iter().filter(|(_, r)| gateway(r)).map(|(k, _)| k.vpc));
    vpcs.retain(|id| !plan.vpcs.contains_key(&VpcId(*id)));
    let remove_vpc = |id: &u32| {
        let vpc = VpcPlan {
            name: VpcName::new(format!("vni-{id}")).ok()?,
            default: state.vpcs.get(id).is_some_and(|r| r.flags & abi::vpc_flags::DEFAULT != 0),
            gateways: gateways_of(state, *id).collect(),
            subnets: BTreeSet::new(),
        };
        Some(Op::RemoveVpc { id: VpcId(*id), vpc })
    };

    let mut nodes: BTreeMap<IpAddr, bool> = BTreeMap::new();
    for (addr, record) in &state.nodes {
        nodes.insert((*addr).into(), record.flags & node_flags::LOCAL != 0);
    }
    for (key, record) in &state.addresses {
        if *record == lower::host_record() && Some(key.vpc) == default {
            nodes.insert(key.addr.into(), true);
        }
    }
    nodes.retain(|ip, _| !plan.nodes.contains_key(ip));
    let remove_node = |(address, local): (&IpAddr, &bool)| {
        let node = NodeName::new("unknown").ok()?;
        Some(Op::RemoveNode {
            address: *address,
            node: NodeAddress { node, local: *local, tunnel: *address },
        })
    };
    (vpcs.iter().filter_map(remove_vpc).collect(), nodes.iter().filter_map(remove_node).collect())
}
