//! Services: plans to map entries, what is left to do, and writing it. Order is [`flowloom_compiler::diff`]'s.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_bpf_abi::{self as abi, backend_flags, service_scope};
use flowloom_compiler::{
    BackendPlan, FrontendKey, FrontendPlan, HeldServices, ListId, Op, Scope, ServiceId, ServicePlan, VpcId,
};
use ipnet::IpNet;

use crate::lower;

/// What the service maps hold.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServiceState {
    /// Frontends.
    pub services: BTreeMap<abi::ServiceKey, abi::ServiceRecord>,
    /// Backends by list and place.
    pub backends: BTreeMap<abi::BackendKey, abi::BackendRecord>,
    /// Backends by list and address.
    pub members: BTreeMap<abi::MemberKey, abi::MemberRecord>,
    /// Who may use a service.
    pub ranges: BTreeSet<abi::RangeKey>,
}

impl ServiceState {
    /// Whether a VPC has a frontend.
    #[must_use]
    pub fn serves(&self, vpc: u32) -> bool {
        let first = abi::ServiceKey { vpc, ..abi::ServiceKey::default() };
        self.services.range(first..).next().is_some_and(|(key, _)| key.vpc == vpc)
    }
}

/// Key of a frontend.
#[must_use]
pub fn service_key(key: &FrontendKey) -> abi::ServiceKey {
    abi::ServiceKey {
        vpc: key.vpc.0,
        addr: key.ip.into(),
        port: key.port.to_be_bytes(),
        protocol: key.protocol,
        scope: match key.scope {
            Scope::Inside => service_scope::INSIDE,
            Scope::Outside => service_scope::OUTSIDE,
        },
    }
}

/// Frontend of a key; `None` for a scope that [`service_key`] never makes.
#[must_use]
pub fn frontend_key(key: &abi::ServiceKey) -> Option<FrontendKey> {
    let scope = match key.scope {
        service_scope::INSIDE => Scope::Inside,
        service_scope::OUTSIDE => Scope::Outside,
        _ => return None,
    };
    Some(FrontendKey {
        vpc: VpcId(key.vpc),
        ip: key.addr.into(),
        protocol: key.protocol,
        port: u16::from_be_bytes(key.port),
        scope,
    })
}

/// Value of a frontend.
#[must_use]
pub fn service_record(plan: &FrontendPlan) -> abi::ServiceRecord {
    abi::ServiceRecord {
        service: plan.service.0,
        list: plan.list.0,
        count: plan.count,
        affinity: plan.affinity,
        flags: plan.flags,
        pad: 0,
    }
}

/// A backend's flags.
fn flags(plan: &BackendPlan) -> u16 {
    if plan.local { backend_flags::LOCAL } else { 0 }
}

/// A list's entries in `backends`.
pub(crate) fn backends(
    list: ListId,
    plans: &[BackendPlan],
) -> impl Iterator<Item = (abi::BackendKey, abi::BackendRecord)> {
    plans.iter().zip(0..).map(move |(b, index)| {
        let record =
            abi::BackendRecord { addr: b.ip.into(), port: b.port.to_be_bytes(), flags: flags(b), pad: 0 };
        (abi::BackendKey { list: list.0, index }, record)
    })
}

/// A list's entries in `members`.
pub(crate) fn members(
    list: ListId,
    plans: &[BackendPlan],
) -> impl Iterator<Item = (abi::MemberKey, abi::MemberRecord)> {
    plans.iter().map(move |b| {
        let key = abi::MemberKey { list: list.0, addr: b.ip.into(), port: b.port.to_be_bytes(), pad: [0; 2] };
        (key, abi::MemberRecord { flags: u32::from(flags(b)) })
    })
}

/// Key of a source range.
#[must_use]
pub fn range_key(service: ServiceId, net: IpNet) -> abi::RangeKey {
    // The same layout as the ipcache's: a number in front of an address.
    let key = lower::peer_key(VpcId(service.0), net);
    abi::RangeKey { prefixlen: key.prefixlen, service: key.vpc, addr: key.addr }
}

fn range_net(key: &abi::RangeKey) -> Option<(ServiceId, IpNet)> {
    let key = abi::PeerKey { prefixlen: key.prefixlen, vpc: key.service, addr: key.addr };
    lower::peer_net(&key).map(|(id, net)| (ServiceId(id.0), net))
}

/// What a list of the kernel holds, as far as it can be told.
fn held(state: &ServiceState, list: u32) -> Arc<[BackendPlan]> {
    let plan = |addr: abi::Addr, port: [u8; 2], flags: u32| BackendPlan {
        ip: IpAddr::from(addr),
        port: u16::from_be_bytes(port),
        local: flags & u32::from(backend_flags::LOCAL) != 0,
    };
    let first = abi::BackendKey { list, index: 0 };
    let last = abi::BackendKey { list, index: u32::MAX };
    let mut plans: Vec<BackendPlan> =
        state.backends.range(first..=last).map(|(_, r)| plan(r.addr, r.port, u32::from(r.flags))).collect();
    let first = abi::MemberKey { list, ..Default::default() };
    let last = abi::MemberKey { list, addr: abi::Addr([0xff; 16]), port: [0xff; 2], pad: [0xff; 2] };
    for (key, record) in state.members.range(first..=last) {
        let found = plan(key.addr, key.port, record.flags);
        if !plans.iter().any(|p| (p.ip, p.port) == (found.ip, found.port)) {
            plans.push(found);
        }
    }
    plans.into()
}

/// The numbers that the maps hold, for [`flowloom_compiler::Numbers::adopt_services`].
#[must_use]
pub fn held_services(state: &ServiceState) -> HeldServices {
    let mut out = HeldServices::default();
    for (key, record) in &state.services {
        if let Some(key) = frontend_key(key) {
            out.frontends.insert(key, (ServiceId(record.service), ListId(record.list)));
        }
    }
    let mut lists: BTreeMap<u32, (u32, Vec<BackendPlan>)> = BTreeMap::new();
    for (key, record) in &state.backends {
        let (last, list) = lists.entry(key.list).or_default();
        *last = key.index;
        list.push(BackendPlan {
            ip: IpAddr::from(record.addr),
            port: u16::from_be_bytes(record.port),
            local: record.flags & backend_flags::LOCAL != 0,
        });
    }
    let members = state.members.keys().next_back().map(|key| key.list);
    out.last_list = ListId(lists.keys().next_back().copied().max(members).unwrap_or(0));
    let whole = lists.into_iter().filter(|(_, (last, list))| *last as usize + 1 == list.len());
    out.lists = whole.map(|(id, (_, list))| (ListId(id), list)).collect();
    out
}

/// What is left to do, in the order that is safe at every step; none when nothing differs.
pub(crate) fn remaining(state: &ServiceState, plan: &ServicePlan) -> Vec<Op> {
    let mut put_lists = Vec::new();
    let mut known = BTreeSet::new();
    let mut places = 0;
    for (id, list) in plan.lists() {
        known.insert(id.0);
        places += list.len();
        let same = backends(id, list).all(|(k, v)| state.backends.get(&k) == Some(&v))
            && members(id, list).all(|(k, v)| state.members.get(&k) == Some(&v));
        if !same {
            put_lists.push((id, Arc::clone(list)));
        }
    }
    let mut stale = BTreeSet::new();
    // Equal counts prove that there is nothing else only where nothing is missing.
    if !put_lists.is_empty() || places != state.backends.len() || places != state.members.len() {
        stale.extend(state.backends.keys().map(|k| k.list).filter(|l| !known.contains(l)));
        stale.extend(state.members.keys().map(|k| k.list).filter(|l| !known.contains(l)));
    }
    let mut wanted = BTreeSet::new();
    let mut put = Vec::new();
    for (key, frontend) in plan.frontends() {
        let raw = service_key(key);
        if state.services.get(&raw) != Some(&service_record(frontend)) {
            put.push((*key, *frontend));
        }
        wanted.insert(raw);
    }
    let remove: Vec<FrontendKey> =
        state.services.keys().filter(|k| !wanted.contains(k)).filter_map(frontend_key).collect();
    let ranges: BTreeSet<abi::RangeKey> = plan.ranges().map(|(id, net)| range_key(id, net)).collect();
    let put_ranges: Vec<_> = ranges.difference(&state.ranges).filter_map(range_net).collect();
    let remove_ranges: Vec<_> = state.ranges.difference(&ranges).filter_map(range_net).collect();

    let lists = |ids: BTreeSet<u32>| ids.into_iter().map(|l| (ListId(l), held(state, l))).collect::<Vec<_>>();
    let mut ops = Vec::new();
    let mut push = |empty: bool, op: Op| {
        if !empty {
            ops.push(op);
        }
    };
    push(put_lists.is_empty(), Op::PutLists(put_lists));
    push(put_ranges.is_empty(), Op::PutRanges(put_ranges));
    push(put.is_empty(), Op::PutFrontends(put));
    push(remove.is_empty(), Op::RemoveFrontends(remove));
    push(remove_ranges.is_empty(), Op::RemoveRanges(remove_ranges));
    push(stale.is_empty(), Op::RemoveLists(lists(stale)));
    ops
}
