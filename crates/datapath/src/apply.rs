//! Operations to writes. A failure stays with its object: what depends on it is held back, the rest goes on, and nothing that the old state
//! still needs is taken away.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_bpf_abi::{self as abi, vpc_flags};
use flowloom_compiler::{
    BackendPlan, EndpointId, EndpointPlan, FrontendKey, FrontendPlan, ListId, NodeAddress, Op, Peer,
    PolicyEntries, PolicySlot, ServiceId, VpcId, VpcPlan,
};
use flowloom_model::EndpointKey;
use ipnet::IpNet;

use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::lower;
use crate::realise::{Realise, Write};
use crate::services;

/// What a failure concerns.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Object {
    /// A VPC.
    Vpc(VpcId),
    /// An underlay address.
    Node(IpAddr),
    /// An ipcache entry.
    Peer(VpcId, IpNet),
    /// A compiled policy.
    Slot(PolicySlot),
    /// A local endpoint.
    Endpoint(EndpointKey),
    /// The service maps.
    Services,
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vpc(id) => write!(f, "vpc {id}"),
            Self::Node(ip) => write!(f, "node address {ip}"),
            Self::Peer(vpc, net) => write!(f, "peer {net} of vpc {vpc}"),
            Self::Slot(slot) => write!(f, "policy slot {slot}"),
            Self::Endpoint(key) => write!(f, "endpoint {key}"),
            Self::Services => write!(f, "services"),
        }
    }
}

/// One object that is not as the plan wants it; what it was before is in force.
#[derive(Debug)]
pub struct Failure {
    /// Which.
    pub object: Object,
    /// Why.
    pub error: Error,
}

/// What came of a list of operations.
#[derive(Debug, Default)]
pub struct ApplyReport {
    /// Writes that the kernel saw.
    pub writes: u64,
    /// Per object.
    pub failures: Vec<Failure>,
    /// Removals held back because of failures; [`crate::Datapath::sync`] does them once nothing fails.
    pub deferred: usize,
    /// The write hook ended the run: the rest was not tried.
    pub aborted: bool,
}

impl ApplyReport {
    /// Everything is as the plan wants it.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.failures.is_empty() && self.deferred == 0 && !self.aborted
    }

    fn fail(&mut self, object: Object, error: Error) {
        self.aborted |= matches!(error, Error::Aborted(_));
        self.failures.push(Failure { object, error });
    }
}

/// Devices of local endpoints.
pub type Devices = BTreeMap<EndpointId, DeviceInfo>;

/// Applies operations in their order ([`flowloom_compiler::diff`] gives one in which every state in between is safe).
pub fn apply(
    realise: &mut impl Realise,
    devices: &Devices,
    default_vpc: &mut Option<VpcId>,
    ops: &[Op],
) -> ApplyReport {
    let start = realise.writes();
    let mut run = Run {
        realise,
        devices,
        default_vpc,
        report: ApplyReport::default(),
        bad_slots: BTreeSet::new(),
        bad_identities: BTreeSet::new(),
        bad_lists: BTreeSet::new(),
        bad_ranges: BTreeSet::new(),
    };
    for op in ops {
        run.op(op);
        if run.report.aborted {
            break;
        }
    }
    let mut report = run.report;
    report.writes = realise.writes() - start;
    report
}

/// Lets packets of these VPCs look for services: before the first frontend is there.
fn mark_served(realise: &mut impl Realise, vpcs: &BTreeSet<u32>) -> Result<()> {
    for id in vpcs {
        // A VPC that is not there yet comes with the mark.
        let Some(record) = realise.vpc(*id)? else { continue };
        if record.flags & vpc_flags::SERVICES == 0 {
            let marked = abi::VpcRecord { flags: record.flags | vpc_flags::SERVICES, ..record };
            realise.write(&Write::Vpc(*id, Some(marked)))?;
        }
    }
    Ok(())
}

/// Takes the mark off VPCs where nothing is left to be looked for; where flows are, it stays until a later frontend goes.
fn unmark_served(realise: &mut impl Realise, vpcs: &BTreeSet<u32>) -> Result<()> {
    for id in vpcs {
        let Some(record) = realise.vpc(*id)? else { continue };
        if record.flags & vpc_flags::SERVICES != 0 && !realise.serves(*id)? {
            let plain = abi::VpcRecord { flags: record.flags & !vpc_flags::SERVICES, ..record };
            realise.write(&Write::Vpc(*id, Some(plain)))?;
        }
    }
    Ok(())
}

struct Run<'a, R> {
    realise: &'a mut R,
    devices: &'a Devices,
    default_vpc: &'a mut Option<VpcId>,
    report: ApplyReport,
    /// Slots that could not be made: their endpoints keep the old ones.
    bad_slots: BTreeSet<PolicySlot>,
    /// Identities that some slot does not know: no address may get them.
    bad_identities: BTreeSet<u32>,
    /// Lists that could not be made: no frontend may name them.
    bad_lists: BTreeSet<ListId>,
    /// Services whose source ranges could not be written.
    bad_ranges: BTreeSet<ServiceId>,
}

impl<R: Realise> Run<'_, R> {
    fn op(&mut self, op: &Op) {
        match op {
            Op::PutVpc { id, vpc, stale_gateways } => {
                let r = self.put_vpc(*id, vpc, stale_gateways);
                self.note(Object::Vpc(*id), r);
            }
            Op::RemoveVpc { id, vpc } => {
                let r = self.remove_vpc(*id, vpc);
                self.note(Object::Vpc(*id), r);
            }
            Op::PutNode { address, node } => {
                let r = self.put_node(*address, node);
                self.note(Object::Node(*address), r);
            }
            Op::RemoveNode { address, node } => {
                let r = self.remove_node(*address, node);
                self.note(Object::Node(*address), r);
            }
            Op::AddEntries { slot, entries } => self.add_entries(*slot, entries),
            Op::RemoveEntries { slot, keys } => {
                if self.may_take_away() {
                    let r = self.realise.write(&Write::RemoveEntries(slot.0, keys));
                    self.note(Object::Slot(*slot), r);
                }
            }
            Op::PutPeers(peers) => self.put_peers(peers),
            Op::RemovePeers(peers) => self.remove_peers(peers),
            Op::PutSlots(slots) => self.put_slots(slots),
            Op::FreeSlots(slots) => {
                if self.may_take_away() && !slots.is_empty() {
                    let numbers: Vec<u32> = slots.iter().map(|s| s.0).collect();
                    let r = self.realise.write(&Write::FreePolicies(&numbers));
                    self.note(Object::Slot(slots[0]), r);
                }
            }
            Op::PutEndpoint(endpoint) => {
                let r = self.put_endpoint(endpoint);
                self.note(Object::Endpoint(endpoint.key.clone()), r);
            }
            Op::RemoveAddresses { endpoint, ips } => {
                let r = ips.iter().try_for_each(|ip| self.release_address(endpoint, *ip));
                self.note(Object::Endpoint(endpoint.key.clone()), r);
            }
            Op::RemoveEndpoint(endpoint) => {
                let r = self.remove_endpoint(endpoint);
                self.note(Object::Endpoint(endpoint.key.clone()), r);
            }
            Op::BumpGeneration(vpc) => {
                let r = self.bump(*vpc);
                self.note(Object::Vpc(*vpc), r);
            }
            Op::PutLists(lists) => self.put_lists(lists),
            Op::PutRanges(ranges) => {
                let keys: Vec<_> = ranges.iter().map(|(id, net)| services::range_key(*id, *net)).collect();
                if let Err(error) = self.realise.write(&Write::PutRanges(&keys)) {
                    self.bad_ranges.extend(ranges.iter().map(|(id, _)| *id));
                    self.report.fail(Object::Services, error);
                }
            }
            Op::PutFrontends(frontends) => self.put_frontends(frontends),
            Op::RemoveFrontends(keys) => {
                let vpcs: BTreeSet<u32> = keys.iter().map(|k| k.vpc.0).collect();
                let keys: Vec<_> = keys.iter().map(services::service_key).collect();
                let r = self.realise.write(&Write::RemoveServices(&keys));
                let r = r.and_then(|()| unmark_served(self.realise, &vpcs));
                self.note(Object::Services, r);
            }
            Op::RemoveRanges(ranges) => {
                if self.may_take_away() {
                    let keys: Vec<_> =
                        ranges.iter().map(|(id, net)| services::range_key(*id, *net)).collect();
                    let r = self.realise.write(&Write::RemoveRanges(&keys));
                    self.note(Object::Services, r);
                }
            }
            Op::RemoveLists(lists) => {
                if self.may_take_away() {
                    let backends: Vec<_> =
                        lists.iter().flat_map(|(id, l)| services::backends(*id, l)).map(|(k, _)| k).collect();
                    let members: Vec<_> =
                        lists.iter().flat_map(|(id, l)| services::members(*id, l)).map(|(k, _)| k).collect();
                    let r = self.realise.write(&Write::RemoveBackends(&backends, &members));
                    self.note(Object::Services, r);
                }
            }
        }
    }

    fn note(&mut self, object: Object, result: Result<()>) {
        if let Err(error) = result {
            self.report.fail(object, error);
        }
    }

    /// Removals that an object which kept its old state may still need wait for the next pass.
    fn may_take_away(&mut self) -> bool {
        let free = self.report.failures.is_empty();
        self.report.deferred += usize::from(!free);
        free
    }

    fn put_address(&mut self, key: abi::AddressKey, record: abi::AddressRecord) -> Result<()> {
        if self.realise.address(&key)? == Some(record) {
            return Ok(());
        }
        self.realise.write(&Write::Address(key, Some(record)))
    }

    fn put_vpc(&mut self, id: VpcId, vpc: &VpcPlan, stale_gateways: &[IpAddr]) -> Result<()> {
        let have = self.realise.vpc(id.0)?;
        let mut flags = lower::vpc_flag_bits(vpc);
        if have.is_some_and(|r| r.flags & vpc_flags::SERVICES != 0) || self.realise.serves(id.0)? {
            flags |= vpc_flags::SERVICES;
        }
        let generation = have.map_or(1, |r| r.generation.max(1));
        let want = abi::VpcRecord { vni: id.0, generation, flags, pad: 0 };
        if have != Some(want) {
            self.realise.write(&Write::Vpc(id.0, Some(want)))?;
        }
        for gateway in &vpc.gateways {
            self.put_address(lower::address_key(id, *gateway), lower::gateway_record(vpc))?;
        }
        for gateway in stale_gateways {
            self.remove_gateway(id, *gateway)?;
        }
        if vpc.default {
            *self.default_vpc = Some(id);
            for addr in self.realise.local_nodes()? {
                self.put_host_address(id, addr)?;
            }
        }
        Ok(())
    }

    fn remove_gateway(&mut self, vpc: VpcId, ip: IpAddr) -> Result<()> {
        let key = lower::address_key(vpc, ip);
        let Some(record) = self.realise.address(&key)? else { return Ok(()) };
        if record.endpoint != 0 || record.flags & abi::address_flags::GATEWAY == 0 {
            return Ok(());
        }
        // An address that is also the node's own stays the host's.
        let host = *self.default_vpc == Some(vpc) && self.realise.local_nodes()?.contains(&ip.into());
        self.realise.write(&Write::Address(key, host.then(lower::host_record)))
    }

    fn remove_vpc(&mut self, id: VpcId, vpc: &VpcPlan) -> Result<()> {
        if !self.may_take_away() {
            return Ok(());
        }
        for gateway in &vpc.gateways {
            let key = lower::address_key(id, *gateway);
            if self.realise.address(&key)?.is_some_and(|r| r.endpoint == 0) {
                self.realise.write(&Write::Address(key, None))?;
            }
        }
        if *self.default_vpc == Some(id) {
            for addr in self.realise.local_nodes()? {
                self.remove_host_address(id, addr)?;
            }
            *self.default_vpc = None;
        }
        if self.realise.vpc(id.0)?.is_some() {
            self.realise.write(&Write::Vpc(id.0, None))?;
        }
        Ok(())
    }

    fn put_host_address(&mut self, vpc: VpcId, addr: abi::Addr) -> Result<()> {
        let key = abi::AddressKey { vpc: vpc.0, addr };
        match self.realise.address(&key)? {
            Some(r) if r.endpoint == 0 && r.flags & abi::address_flags::HOST != 0 => Ok(()),
            _ => self.realise.write(&Write::Address(key, Some(lower::host_record()))),
        }
    }

    fn remove_host_address(&mut self, vpc: VpcId, addr: abi::Addr) -> Result<()> {
        let key = abi::AddressKey { vpc: vpc.0, addr };
        if self.realise.address(&key)? == Some(lower::host_record()) {
            self.realise.write(&Write::Address(key, None))?;
        }
        Ok(())
    }

    fn put_node(&mut self, address: IpAddr, node: &NodeAddress) -> Result<()> {
        let want = lower::node_record(node);
        let have = self.realise.node(&address.into())?;
        if have != Some(want) {
            self.realise.write(&Write::Node(address.into(), Some(want)))?;
        }
        let Some(vpc) = *self.default_vpc else { return Ok(()) };
        if node.local {
            return self.put_host_address(vpc, address.into());
        }
        if have.is_some_and(|r| r.flags & abi::node_flags::LOCAL != 0) {
            self.remove_host_address(vpc, address.into())?;
        }
        Ok(())
    }

    fn remove_node(&mut self, address: IpAddr, node: &NodeAddress) -> Result<()> {
        if let (Some(vpc), true) = (*self.default_vpc, node.local) {
            self.remove_host_address(vpc, address.into())?;
        }
        if self.realise.node(&address.into())?.is_some() {
            self.realise.write(&Write::Node(address.into(), None))?;
        }
        Ok(())
    }

    fn add_entries(&mut self, slot: PolicySlot, entries: &PolicyEntries) {
        if entries.is_empty() {
            return;
        }
        if let Err(error) = self.realise.write(&Write::AddEntries(slot.0, entries)) {
            self.bad_identities
                .extend(entries.keys().map(|k| k.identity).filter(|i| *i != abi::identity::ANY));
            self.report.fail(Object::Slot(slot), error);
        }
    }

    fn write_lists(&mut self, lists: &[(ListId, Arc<[BackendPlan]>)]) -> Result<()> {
        let backends: Vec<_> = lists.iter().flat_map(|(id, l)| services::backends(*id, l)).collect();
        let members: Vec<_> = lists.iter().flat_map(|(id, l)| services::members(*id, l)).collect();
        self.realise.write(&Write::PutBackends(&backends, &members))
    }

    fn put_lists(&mut self, lists: &[(ListId, Arc<[BackendPlan]>)]) {
        match self.write_lists(lists) {
            Ok(()) => {}
            Err(error @ Error::Aborted(_)) => self.report.fail(Object::Services, error),
            // Find the ones that do not fit; the others need not suffer.
            Err(_) => {
                for one in lists.chunks(1) {
                    if let Err(error) = self.write_lists(one) {
                        self.bad_lists.insert(one[0].0);
                        self.report.fail(Object::Services, error);
                    }
                    if self.report.aborted {
                        return;
                    }
                }
            }
        }
    }

    fn put_frontends(&mut self, frontends: &[(FrontendKey, FrontendPlan)]) {
        let fits = |plan: &FrontendPlan| {
            !self.bad_lists.contains(&plan.list) && !self.bad_ranges.contains(&plan.service)
        };
        let records: Vec<_> = frontends
            .iter()
            .filter(|(_, plan)| fits(plan))
            .map(|(key, plan)| (services::service_key(key), services::service_record(plan)))
            .collect();
        if records.is_empty() {
            return;
        }
        let vpcs = records.iter().map(|(key, _)| key.vpc).collect();
        if let Err(error) = mark_served(self.realise, &vpcs) {
            return self.report.fail(Object::Services, error);
        }
        match self.realise.write(&Write::PutServices(&records)) {
            Ok(()) => {}
            Err(error @ Error::Aborted(_)) => self.report.fail(Object::Services, error),
            Err(_) => {
                for one in records.chunks(1) {
                    if let Err(error) = self.realise.write(&Write::PutServices(one)) {
                        self.report.fail(Object::Services, error);
                    }
                    if self.report.aborted {
                        return;
                    }
                }
            }
        }
    }

    fn put_slots(&mut self, slots: &[(PolicySlot, PolicyEntries)]) {
        let all: Vec<(u32, &PolicyEntries)> = slots.iter().map(|(s, e)| (s.0, e)).collect();
        if all.is_empty() {
            return;
        }
        match self.realise.write(&Write::CreatePolicies(&all)) {
            Ok(()) => {}
            Err(error) if all.len() == 1 || matches!(error, Error::Aborted(_)) => {
                self.bad_slots.extend(slots.iter().map(|(s, _)| *s));
                self.report.fail(Object::Slot(slots[0].0), error);
            }
            // Find the ones that do not fit; the others need not suffer.
            Err(_) => {
                for (slot, one) in slots.iter().map(|(s, _)| *s).zip(all.chunks(1)) {
                    if let Err(error) = self.realise.write(&Write::CreatePolicies(one)) {
                        self.bad_slots.insert(slot);
                        self.report.fail(Object::Slot(slot), error);
                    }
                    if self.report.aborted {
                        return;
                    }
                }
            }
        }
    }

    fn put_peers(&mut self, peers: &[((VpcId, IpNet), Peer)]) {
        let mut fit = Vec::with_capacity(peers.len());
        for ((vpc, net), peer) in peers {
            if self.bad_identities.contains(&peer.identity.0) {
                let detail =
                    format!("identity {} is not in every policy yet; its old one stays", peer.identity);
                let object = Object::Peer(*vpc, *net);
                let error = Error::Invalid { object: object.to_string(), detail };
                self.report.fail(object, error);
            } else {
                fit.push((lower::peer_key(*vpc, *net), lower::peer_record(peer)));
            }
        }
        if fit.is_empty() {
            return;
        }
        match self.realise.write(&Write::PutPeers(&fit)) {
            Ok(()) => {}
            Err(error @ Error::Aborted(_)) => self.fail_peer(&fit[0].0, error),
            Err(_) => {
                for one in fit.chunks(1) {
                    if let Err(error) = self.realise.write(&Write::PutPeers(one)) {
                        self.fail_peer(&one[0].0, error);
                    }
                    if self.report.aborted {
                        return;
                    }
                }
            }
        }
    }

    fn fail_peer(&mut self, key: &abi::PeerKey, error: Error) {
        if let Some((vpc, net)) = lower::peer_net(key) {
            self.report.fail(Object::Peer(vpc, net), error);
        }
    }

    fn remove_peers(&mut self, peers: &[(VpcId, IpNet)]) {
        let keys: Vec<_> = peers.iter().map(|(vpc, net)| lower::peer_key(*vpc, *net)).collect();
        let Some((vpc, net)) = peers.first() else { return };
        let r = self.realise.write(&Write::RemovePeers(&keys));
        self.note(Object::Peer(*vpc, *net), r);
    }

    fn put_endpoint(&mut self, plan: &EndpointPlan) -> Result<()> {
        let refused = |detail: String| Error::Invalid { object: format!("endpoint {}", plan.key), detail };
        if let Some(slot) = [plan.egress_slot, plan.ingress_slot].iter().find(|s| self.bad_slots.contains(s))
        {
            return Err(refused(format!(
                "its policy (slot {slot}) does not fit; the old one stays in force"
            )));
        }
        let device = self
            .devices
            .get(&plan.id)
            .ok_or_else(|| refused(format!("no device is attached for id {}", plan.id)))?;
        let record = lower::endpoint_record(plan, device)?;
        if self.realise.endpoint(plan.id.0)? != record {
            self.realise.write(&Write::Endpoint(plan.id.0, record))?;
        }
        for ip in &plan.ips {
            let want = abi::AddressRecord { endpoint: plan.id.0, flags: 0 };
            self.put_address(lower::address_key(plan.vpc, *ip), want)?;
        }
        Ok(())
    }

    fn release_address(&mut self, plan: &EndpointPlan, ip: IpAddr) -> Result<()> {
        let key = lower::address_key(plan.vpc, ip);
        if self.realise.address(&key)?.is_some_and(|r| r.endpoint == plan.id.0) {
            self.realise.write(&Write::Address(key, None))?;
        }
        Ok(())
    }

    fn remove_endpoint(&mut self, plan: &EndpointPlan) -> Result<()> {
        for ip in &plan.ips {
            self.release_address(plan, *ip)?;
        }
        let record = self.realise.endpoint(plan.id.0)?;
        if record != abi::EndpointRecord::default() {
            self.realise.write(&Write::Endpoint(plan.id.0, abi::EndpointRecord::default()))?;
        }
        Ok(())
    }

    fn bump(&mut self, vpc: VpcId) -> Result<()> {
        // A VPC that is going has no generation to bump.
        let Some(record) = self.realise.vpc(vpc.0)? else { return Ok(()) };
        let next = abi::VpcRecord { generation: record.generation.wrapping_add(1).max(1), ..record };
        self.realise.write(&Write::Vpc(vpc.0, Some(next)))
    }
}
