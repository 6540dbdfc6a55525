//! World to plan.

mod endpoint;
mod memo;
mod resolve;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_bpf_abi::{identity, peer_flags};
use flowloom_model::{
    Endpoint, GroupName, NamedPort, Node, NodeName, SecurityGroup, Subnet, Vpc, VpcName, World,
};
use ipnet::IpNet;

use self::memo::{Inputs, Memo};
pub use self::resolve::world_spec;
use crate::fault::{Fault, planted};
use crate::questions::{Questions, host};
use crate::services::state::ServiceMemo;
use crate::{
    CompiledPolicy, Condition, ConditionReason, EndpointFacts, Identity, IdentityFacts, NodeAddress,
    NodePlan, Numbers, ObjectRef, Peer, Pins, PolicySlot, VpcId, VpcPlan, everywhere, reserved_facts,
};

/// What came out of a world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compilation {
    /// What the node must hold.
    pub plan: NodePlan,
    /// What is not in force, and why; sorted.
    pub conditions: Vec<Condition>,
}

/// Choices that the node's configuration makes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompileOptions {
    /// Reach other nodes' endpoints of the default VPC by the underlay's routes instead of the tunnel.
    pub direct_routes: bool,
}

/// What compilations remember of each other: with it, a change costs what it touches, where the world shares with the one before what
/// did not change ([`flowloom_model::SharedMap`]). Dropping it costs time only; one cache goes with one [`Numbers`].
#[derive(Debug, Default)]
pub struct CompilerCache {
    memo: Option<Memo>,
    pub(crate) services: ServiceMemo,
    #[cfg(test)]
    resumed: u64,
    policies: HashMap<PolicySlot, Arc<CompiledPolicy>>,
    pub(crate) fault: Fault,
}

impl CompilerCache {
    /// A cache whose compilations have a fault planted (tests of the tests).
    #[cfg(any(test, feature = "oracle"))]
    #[must_use]
    pub fn with_fault(fault: Fault) -> Self {
        Self { fault, ..Self::default() }
    }
}

#[cfg(test)]
impl CompilerCache {
    /// How many compilations started from the last one.
    pub(crate) fn resumed(&self) -> u64 {
        self.resumed
    }
}

/// Compiles with default options and nothing remembered.
#[must_use]
pub fn compile(world: &World, local: &NodeName, numbers: &mut Numbers) -> Compilation {
    compile_with(world, local, CompileOptions::default(), numbers, &mut CompilerCache::default())
}

/// Compiles a world for one node. Never fails: objects that cannot be in force get a condition and are left out.
#[must_use]
pub fn compile_with(
    world: &World,
    local: &NodeName,
    options: CompileOptions,
    numbers: &mut Numbers,
    cache: &mut CompilerCache,
) -> Compilation {
    compile_pinned(world, &Pins::new(), local, options, numbers, cache)
}

/// The same with endpoints that are held at a policy of their own.
#[must_use]
pub fn compile_pinned(
    world: &World,
    pins: &Pins,
    local: &NodeName,
    options: CompileOptions,
    numbers: &mut Numbers,
    cache: &mut CompilerCache,
) -> Compilation {
    if let Some(memo) = cache.memo.take()
        && let Some(compilation) = memo::resume(memo, world, pins, local, options, numbers, cache)
    {
        #[cfg(test)]
        {
            cache.resumed += 1;
        }
        return compilation;
    }
    let mut compiler = Compiler {
        world,
        pins,
        local,
        options,
        numbers,
        cache,
        plan: NodePlan::default(),
        conditions: Vec::new(),
        specs: BTreeMap::new(),
        holders: HashMap::new(),
        new_policies: false,
        questions: BTreeMap::new(),
    };
    compiler.nodes();
    compiler.vpcs();
    compiler.name_rules();
    compiler.finish(Inputs::new(world, pins, local, options))
}

/// What two endpoints must have in common to share specs.
type SpecKey = (VpcName, Vec<GroupName>, Vec<NamedPort>);

struct Compiler<'a> {
    world: &'a World,
    pins: &'a Pins,
    local: &'a NodeName,
    options: CompileOptions,
    numbers: &'a mut Numbers,
    cache: &'a mut CompilerCache,
    plan: NodePlan,
    conditions: Vec<Condition>,
    specs: BTreeMap<SpecKey, Option<[PolicySlot; 2]>>,
    /// How many ipcache entries name a user identity.
    holders: HashMap<Identity, u32>,
    /// Some policy was not in the plan that this one started from.
    new_policies: bool,
    /// What the rules of each VPC in the plan ask.
    questions: BTreeMap<VpcId, Arc<Questions>>,
}

/// One VPC while it is compiled.
struct VpcScope<'a> {
    id: VpcId,
    vpc: &'a Vpc,
    subnets: Vec<&'a Subnet>,
    groups: BTreeMap<&'a GroupName, &'a SecurityGroup>,
    questions: Arc<Questions>,
}

impl VpcScope<'_> {
    fn inside(&self, net: IpNet) -> bool {
        self.subnets.iter().flat_map(|s| &s.cidrs).any(|cidr| cidr.trunc().contains(&net))
    }

    fn facts(&self, net: IpNet, endpoint: Option<EndpointFacts>, reserved: u32) -> IdentityFacts {
        let spared = endpoint.is_some() && planted!(self.questions.prefixes.fault, CidrSparesWorkloads);
        IdentityFacts {
            vpc: self.vpc.name.clone(),
            endpoint,
            reserved,
            // Reserved kinds are one identity each unless a rule asks where their addresses lie.
            inside: self.inside(net) || (reserved != 0 && !self.questions.inside),
            cidrs: if spared { Default::default() } else { self.questions.prefixes.covering(net) },
        }
    }
}

impl<'a> Compiler<'a> {
    fn condition(&mut self, object: ObjectRef, reason: ConditionReason, message: impl Into<String>) {
        self.conditions.push(Condition { object, reason, message: message.into() });
    }

    fn nodes(&mut self) {
        let world = self.world;
        if !world.nodes.contains_key(self.local) {
            let message = format!("this node ({}) is not in the document: add it to nodes", self.local);
            self.condition(
                ObjectRef::Node { node: self.local.clone() },
                ConditionReason::DanglingReference,
                message,
            );
        }
        for node in world.nodes.values() {
            let Some(tunnel) = self.tunnel_of(node) else { continue };
            for &address in &node.addresses {
                let local = node.name == *self.local;
                let taken = self.plan.nodes.get(&address).map(|held| held.node.clone());
                if let Some(other) = taken {
                    let message =
                        format!("node {other} has the address {address}, too: give each node its own");
                    self.condition(
                        ObjectRef::Node { node: node.name.clone() },
                        ConditionReason::Conflict,
                        message,
                    );
                    continue;
                }
                self.plan.nodes.insert(address, NodeAddress { node: node.name.clone(), local, tunnel });
            }
        }
    }

    /// The address that tunnels between this node and another one use; the same seen from both sides: the family both list
    /// first, else IPv4 when both have it, else IPv6.
    fn tunnel_of(&self, node: &Node) -> Option<IpAddr> {
        let first = node.addresses.first().copied()?;
        let Some(own) = self.world.nodes.get(self.local).filter(|n| !n.addresses.is_empty()) else {
            return Some(first);
        };
        if own.addresses.first().is_some_and(|a| a.is_ipv4() == first.is_ipv4()) {
            return Some(first);
        }
        let of = |n: &Node, v4: bool| n.addresses.iter().copied().find(|a| a.is_ipv4() == v4);
        [true, false].into_iter().find_map(|v4| of(own, v4).and(of(node, v4))).or(Some(first))
    }

    fn vpcs(&mut self) {
        let world = self.world;
        let mut endpoints: BTreeMap<&VpcName, Vec<&Endpoint>> = BTreeMap::new();
        for endpoint in world.endpoints.values() {
            endpoints.entry(&endpoint.vpc).or_default().push(endpoint);
        }
        let mut subnets: BTreeMap<&VpcName, Vec<&Subnet>> = BTreeMap::new();
        for subnet in world.subnets.values() {
            subnets.entry(&subnet.vpc).or_default().push(subnet);
        }
        let mut groups: BTreeMap<&VpcName, BTreeMap<&GroupName, &SecurityGroup>> = BTreeMap::new();
        for group in world.security_groups.values() {
            groups.entry(&group.vpc).or_default().insert(&group.name, group);
        }
        for (name, endpoints) in &endpoints {
            if !world.vpcs.contains_key(*name) {
                for endpoint in endpoints {
                    let message = format!("vpc {name} does not exist");
                    self.endpoint_condition(endpoint, ConditionReason::DanglingReference, message);
                }
            }
        }
        let mut numbers: BTreeMap<VpcId, &VpcName> = BTreeMap::new();
        for vpc in world.vpcs.values() {
            let object = || ObjectRef::Vpc { vpc: vpc.name.clone() };
            let endpoints = endpoints.get(&vpc.name).map_or(&[][..], Vec::as_slice);
            let Some(vni) = vpc.vni else {
                let message = "the vpc has no vni yet: write one, or let `flowloom apply` allocate it";
                self.condition(object(), ConditionReason::NotAllocated, message);
                for endpoint in endpoints {
                    let message = format!("vpc {} has no vni yet", vpc.name);
                    self.endpoint_condition(endpoint, ConditionReason::DependencyWaits, message);
                }
                continue;
            };
            let id = VpcId(vni.number());
            if let Some(other) = numbers.get(&id) {
                let message = format!("vpc {other} has the vni {vni}, too: give each vpc its own");
                self.condition(object(), ConditionReason::Conflict, message);
                for endpoint in endpoints {
                    let message = format!("vpc {} waits for a vni of its own", vpc.name);
                    self.endpoint_condition(endpoint, ConditionReason::DependencyWaits, message);
                }
                continue;
            }
            numbers.insert(id, &vpc.name);
            if !vpc.name.is_default() && endpoints.iter().all(|e| e.node != *self.local) {
                continue;
            }
            let groups = groups.remove(&vpc.name).unwrap_or_default();
            let mut questions = Questions::of(world, &vpc.name, groups.values().copied(), self.pins);
            questions.prefixes.fault = self.cache.fault;
            let subnets = subnets.remove(&vpc.name).unwrap_or_default();
            let questions = Arc::new(questions);
            self.questions.insert(id, questions.clone());
            self.vpc(&VpcScope { id, vpc, subnets, groups, questions }, endpoints);
        }
    }

    fn vpc(&mut self, scope: &VpcScope<'a>, endpoints: &[&'a Endpoint]) {
        let gateways = scope.subnets.iter().flat_map(|s| &s.gateways).copied().collect();
        let subnets = scope.subnets.iter().flat_map(|s| &s.cidrs).map(IpNet::trunc).collect();
        let default = scope.vpc.name.is_default();
        let plan = VpcPlan { name: scope.vpc.name.clone(), default, gateways, subnets };
        self.hosts(scope, &plan);
        for endpoint in endpoints {
            if let Some(places) = self.places(scope, endpoint) {
                self.endpoint(scope, endpoint, &places);
            }
        }
        self.prefixes(scope, &plan);
        self.plan.vpcs.insert(scope.id, plan);
    }

    /// World, subnets, and every prefix that rules name, where nobody has the very address.
    fn prefixes(&mut self, scope: &VpcScope<'_>, plan: &VpcPlan) {
        let all = everywhere().into_iter().chain(plan.subnets.iter().copied());
        let foreign: Vec<IpNet> = self.foreign_ranges(scope).map(|(net, _)| net).collect();
        for net in all.chain(foreign).chain(scope.questions.prefixes.iter().copied()) {
            if !self.plan.ipcache.contains_key(&(scope.id, net)) {
                self.prefix(scope, net);
            }
        }
    }

    /// Ranges that other nodes' agents allocate from, with the way there.
    fn foreign_ranges<'s>(
        &self,
        scope: &'s VpcScope<'_>,
    ) -> impl Iterator<Item = (IpNet, IpAddr)> + use<'_, 's, 'a> {
        let whole = scope
            .subnets
            .iter()
            .flat_map(|s| s.node.iter().flat_map(|n| s.cidrs.iter().map(move |c| (n, *c))));
        let parts = scope.subnets.iter().flat_map(|s| s.cni_ranges.iter().map(|r| (&r.node, r.cidr)));
        whole
            .chain(parts)
            .filter(|(node, _)| *node != self.local)
            .filter_map(|(node, cidr)| Some((cidr.trunc(), self.tunnel_of(self.world.nodes.get(node)?)?)))
    }

    fn prefix(&mut self, scope: &VpcScope<'_>, net: IpNet) {
        let world = if scope.vpc.name.is_default() { peer_flags::STACK } else { 0 };
        // What another node hands out to CNI attachments is known here by its range only.
        let foreign = self.foreign_ranges(scope).find(|(range, _)| range.contains(&net));
        let (flags, tunnel) = match foreign {
            Some((_, tunnel)) if self.options.direct_routes && scope.vpc.name.is_default() => {
                (peer_flags::REMOTE | peer_flags::DIRECT, Some(tunnel))
            }
            Some((_, tunnel)) => (peer_flags::REMOTE, Some(tunnel)),
            None => (if scope.inside(net) { peer_flags::UNASSIGNED } else { world }, None),
        };
        self.peer(scope, net, scope.facts(net, None, 0), flags, tunnel);
    }

    /// Gateways, and in the default VPC the nodes.
    fn hosts(&mut self, scope: &VpcScope<'_>, plan: &VpcPlan) {
        let stack = if plan.default { peer_flags::STACK } else { 0 };
        if plan.default {
            let nodes: Vec<_> = self.plan.nodes.iter().map(|(ip, n)| (*ip, n.local, n.tunnel)).collect();
            // Another node is reached the way its endpoints are: what its host asks comes that way, too.
            let way = if self.options.direct_routes { peer_flags::DIRECT } else { 0 };
            for (ip, local, tunnel) in nodes {
                let (reserved, flags, tunnel) = match local {
                    true => (identity::HOST, peer_flags::HOST | stack, None),
                    false => {
                        let flags = peer_flags::REMOTE_NODE | peer_flags::REMOTE | way;
                        (identity::REMOTE_NODE, flags, Some(tunnel))
                    }
                };
                self.peer(scope, host(ip), scope.facts(host(ip), None, reserved), flags, tunnel);
            }
        }
        for ip in &plan.gateways {
            let facts = scope.facts(host(*ip), None, identity::HOST);
            self.peer(scope, host(*ip), facts, peer_flags::HOST | stack, None);
        }
    }

    fn peer(
        &mut self,
        scope: &VpcScope<'_>,
        net: IpNet,
        facts: IdentityFacts,
        flags: u32,
        tunnel: Option<IpAddr>,
    ) {
        if let Some(identity) = self.identity(facts) {
            self.forget(scope.id, net);
            self.plan.ipcache.insert((scope.id, net), Peer { identity, flags, tunnel });
        }
    }

    /// Takes an entry out of the ipcache, and its identity when it was the last to name it.
    fn forget(&mut self, vpc: VpcId, net: IpNet) {
        let Some(peer) = self.plan.ipcache.remove(&(vpc, net)) else { return };
        if let Some(holders) = self.holders.get_mut(&peer.identity) {
            *holders -= 1;
            if *holders == 0 {
                self.holders.remove(&peer.identity);
                self.plan.identities.remove(&peer.identity);
            }
        }
    }

    /// The identity of an entry that is about to be written.
    fn identity(&mut self, facts: IdentityFacts) -> Option<Identity> {
        if facts.endpoint.is_none()
            && facts.cidrs.is_empty()
            && let Some((reserved, _)) = reserved_facts(&facts.vpc).into_iter().find(|(_, f)| *f == facts)
        {
            return Some(reserved);
        }
        let facts = Arc::new(facts);
        let identity = self.numbers.identity(&facts)?;
        *self.holders.entry(identity).or_insert(0) += 1;
        if !self.plan.identities.contains_key(&identity) {
            self.plan.identities.insert(identity, facts);
        }
        Some(identity)
    }

    /// Names of the rules of the policies in the plan, of which those that no endpoint uses go.
    fn name_rules(&mut self) {
        let NodePlan { policies, endpoints, rules, .. } = &mut self.plan;
        let used: BTreeSet<PolicySlot> =
            endpoints.values().flat_map(|e| [e.egress_slot, e.ingress_slot]).collect();
        let before = policies.len();
        policies.retain(|slot, _| used.contains(slot));
        if policies.len() == before && !self.new_policies {
            return;
        }
        let mut named = BTreeMap::new();
        for rule in policies.values().flat_map(|policy| &policy.spec().rules) {
            named.entry(rule.id).or_insert_with(|| (*rule.name).clone());
        }
        *rules = Arc::new(named);
    }

    fn finish(mut self, inputs: Inputs) -> Compilation {
        self.conditions.sort();
        self.conditions.dedup();
        let services = &mut self.cache.services;
        let (numbers, fault) = (&mut self.numbers.services, self.cache.fault);
        self.plan.services = services.update(self.world, self.local, &self.plan, numbers, fault);
        let plan = &self.plan;
        self.numbers.settle(plan);
        self.cache.policies.retain(|slot, _| plan.policies.contains_key(slot));
        self.specs
            .retain(|_, slots| slots.is_some_and(|s| s.iter().all(|slot| plan.policies.contains_key(slot))));
        let mut conditions = self.conditions.clone();
        conditions.extend(self.cache.services.conditions().cloned());
        conditions.sort();
        let compilation = Compilation { plan: self.plan.clone(), conditions };
        self.remember(inputs);
        compilation
    }
}
