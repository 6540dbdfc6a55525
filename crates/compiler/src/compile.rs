//! World to plan.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_bpf_abi::{identity, peer_flags};
use flowloom_model::{
    Action, AllowLocalhost, Direction, Endpoint, EndpointKey, GroupName, Mac, NamedPort, Node, NodeName,
    SecurityGroup, Subnet, Vpc, VpcName, World,
};
use ipnet::IpNet;

use crate::fault::{Fault, planted};
use crate::numbers::Used;
use crate::policy::sort_rules;
use crate::questions::{Questions, host};
use crate::spec::{default_verdict, resolve_remote, services};
use crate::{
    CompiledPolicy, Condition, ConditionReason, EndpointFacts, EndpointPlan, Identity, IdentityFacts,
    NodeAddress, NodePlan, Numbers, ObjectRef, Peer, PolicySlot, PolicySpec, RuleId, RuleRef, SpecRemote,
    SpecRule, VpcId, VpcPlan, everywhere, reserved_facts,
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

/// What compilations remember of each other. Dropping it costs time only.
#[derive(Debug, Default)]
pub struct CompilerCache {
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
    let mut compiler = Compiler {
        world,
        local,
        options,
        numbers,
        cache,
        used: Used::default(),
        plan: NodePlan::default(),
        conditions: Vec::new(),
        specs: BTreeMap::new(),
    };
    compiler.nodes();
    compiler.vpcs();
    compiler.finish()
}

/// What two endpoints must have in common to share specs.
type SpecKey = (VpcName, Vec<GroupName>, Vec<NamedPort>);

struct Compiler<'a> {
    world: &'a World,
    local: &'a NodeName,
    options: CompileOptions,
    numbers: &'a mut Numbers,
    cache: &'a mut CompilerCache,
    used: Used,
    plan: NodePlan,
    conditions: Vec<Condition>,
    specs: BTreeMap<SpecKey, Option<[PolicySlot; 2]>>,
}

/// One VPC while it is compiled.
struct VpcScope<'a> {
    id: VpcId,
    vpc: &'a Vpc,
    subnets: Vec<&'a Subnet>,
    groups: BTreeMap<&'a GroupName, &'a SecurityGroup>,
    questions: Questions,
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
            let mut questions = Questions::new(groups.values().copied(), |name| {
                world.cidr_groups.get(&(vpc.name.clone(), name.clone()))
            });
            questions.prefixes.fault = self.cache.fault;
            let subnets = subnets.remove(&vpc.name).unwrap_or_default();
            self.vpc(&VpcScope { id, vpc, subnets, groups, questions }, endpoints);
        }
    }

    fn vpc(&mut self, scope: &VpcScope<'a>, endpoints: &[&'a Endpoint]) {
        let gateways = scope.subnets.iter().flat_map(|s| &s.gateways).copied().collect();
        let subnets = scope.subnets.iter().flat_map(|s| &s.cidrs).map(IpNet::trunc).collect();
        let default = scope.vpc.name.is_default();
        let plan = VpcPlan { name: scope.vpc.name.clone(), default, gateways, subnets };
        self.prefixes(scope, &plan);
        self.hosts(scope, &plan);
        for endpoint in endpoints {
            if let Some(places) = self.places(scope, endpoint) {
                self.endpoint(scope, endpoint, &places);
            }
        }
        self.plan.vpcs.insert(scope.id, plan);
    }

    /// World, subnets, and every prefix that rules name.
    fn prefixes(&mut self, scope: &VpcScope<'_>, plan: &VpcPlan) {
        let world = if plan.default { peer_flags::STACK } else { 0 };
        let all = everywhere().into_iter().chain(plan.subnets.iter().copied());
        for net in all.chain(scope.questions.prefixes.iter().copied()) {
            let flags = if scope.inside(net) { peer_flags::UNASSIGNED } else { world };
            self.peer(scope, net, scope.facts(net, None, 0), flags, None);
        }
    }

    /// Gateways, and in the default VPC the nodes.
    fn hosts(&mut self, scope: &VpcScope<'_>, plan: &VpcPlan) {
        let stack = if plan.default { peer_flags::STACK } else { 0 };
        if plan.default {
            let nodes: Vec<_> = self.plan.nodes.iter().map(|(ip, n)| (*ip, n.local)).collect();
            for (ip, local) in nodes {
                let (reserved, flag) = match local {
                    true => (identity::HOST, peer_flags::HOST),
                    false => (identity::REMOTE_NODE, peer_flags::REMOTE_NODE),
                };
                self.peer(scope, host(ip), scope.facts(host(ip), None, reserved), flag | stack, None);
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
            self.plan.ipcache.insert((scope.id, net), Peer { identity, flags, tunnel });
        }
    }

    fn identity(&mut self, facts: IdentityFacts) -> Option<Identity> {
        if facts.endpoint.is_none()
            && facts.cidrs.is_empty()
            && let Some((reserved, _)) = reserved_facts(&facts.vpc).into_iter().find(|(_, f)| *f == facts)
        {
            return Some(reserved);
        }
        let facts = Arc::new(facts);
        let identity = self.numbers.identity(&facts)?;
        self.used.identities.insert(identity.0);
        self.plan.identities.entry(identity).or_insert(facts);
        Some(identity)
    }

    fn endpoint_condition(
        &mut self,
        endpoint: &Endpoint,
        reason: ConditionReason,
        message: impl Into<String>,
    ) {
        self.condition(ObjectRef::Endpoint { endpoint: endpoint.key() }, reason, message);
    }

    /// The endpoint's addresses, each with the CIDR of its subnet that holds it; none when it cannot be in force.
    fn places(&mut self, scope: &VpcScope<'a>, endpoint: &Endpoint) -> Option<Vec<(IpAddr, IpNet)>> {
        let Some(subnet) = self.world.subnets.get(&(endpoint.vpc.clone(), endpoint.subnet.clone())) else {
            let message = format!("subnet {} does not exist in vpc {}", endpoint.subnet, endpoint.vpc);
            self.endpoint_condition(endpoint, ConditionReason::DanglingReference, message);
            return None;
        };
        if endpoint.ips.is_empty() {
            let message = "the endpoint has no address yet: write one, or let `flowloom apply` allocate it";
            self.endpoint_condition(endpoint, ConditionReason::NotAllocated, message);
            return None;
        }
        let mut places = Vec::new();
        for &ip in &endpoint.ips {
            let Some(cidr) = subnet.cidrs.iter().map(IpNet::trunc).find(|cidr| cidr.contains(&ip)) else {
                let message = format!("address {ip} is outside of subnet {}", subnet.name);
                self.endpoint_condition(endpoint, ConditionReason::Invalid, message);
                return None;
            };
            let held = self.plan.ipcache.get(&(scope.id, host(ip))).map(|peer| peer.flags);
            let taken = peer_flags::ENDPOINT | peer_flags::HOST | peer_flags::REMOTE_NODE;
            if held.is_some_and(|flags| flags & taken != 0) {
                let message =
                    format!("address {ip} belongs to another endpoint, a gateway or a node: choose another");
                self.endpoint_condition(endpoint, ConditionReason::Conflict, message);
                return None;
            }
            places.push((ip, cidr));
        }
        Some(places)
    }

    fn endpoint(&mut self, scope: &VpcScope<'a>, endpoint: &Endpoint, places: &[(IpAddr, IpNet)]) {
        let local = endpoint.node == *self.local;
        let mut flags = peer_flags::ENDPOINT;
        let mut tunnel = None;
        if !local {
            flags |= peer_flags::REMOTE;
            if self.options.direct_routes && scope.vpc.name.is_default() {
                flags |= peer_flags::DIRECT;
            }
            tunnel = self.world.nodes.get(&endpoint.node).and_then(|node| self.tunnel_of(node));
            if tunnel.is_none() {
                let message =
                    format!("node {} is not in the document or has no address: unreachable", endpoint.node);
                self.endpoint_condition(endpoint, ConditionReason::DanglingReference, message);
            }
        }
        let plan = if local {
            let Some(plan) = self.local_endpoint(scope, endpoint, places) else { return };
            Some(plan)
        } else {
            None
        };
        let asked = scope.questions.endpoint_facts(endpoint);
        for (ip, _) in places {
            self.peer(scope, host(*ip), scope.facts(host(*ip), Some(asked.clone()), 0), flags, tunnel);
        }
        if let Some(mut plan) = plan {
            let first = places.first().and_then(|(ip, _)| self.plan.ipcache.get(&(scope.id, host(*ip))));
            plan.identity = first.map_or(Identity::default(), |peer| peer.identity);
            self.plan.endpoints.insert(plan.key.clone(), plan);
        }
    }

    fn local_endpoint(
        &mut self,
        scope: &VpcScope<'a>,
        endpoint: &Endpoint,
        places: &[(IpAddr, IpNet)],
    ) -> Option<EndpointPlan> {
        let key = endpoint.key();
        let slots = self.slots(scope, endpoint);
        let numbers = slots.and_then(|slots| Some((slots, self.numbers.take_endpoint(&key)?)));
        let Some(([egress_slot, ingress_slot], id)) = numbers else {
            let message = "no endpoint, slot or rule number is free on this node: remove endpoints, or wait for old connections to end";
            self.endpoint_condition(endpoint, ConditionReason::OutOfNumbers, message);
            return None;
        };
        self.used.endpoints.insert(id.0);
        let subnet = self.world.subnets.get(&(endpoint.vpc.clone(), endpoint.subnet.clone()))?;
        let families: Vec<bool> = places.iter().map(|(ip, _)| ip.is_ipv4()).collect();
        let gateways = subnet.gateways.iter().copied().filter(|g| families.contains(&g.is_ipv4())).collect();
        Some(EndpointPlan {
            id,
            vpc: scope.id,
            ips: places.iter().map(|(ip, _)| *ip).collect(),
            subnets: places.iter().map(|(_, cidr)| *cidr).collect(),
            gateways,
            mac: endpoint.mac.unwrap_or_else(|| derived_mac(&key, places)),
            mac_pinned: endpoint.mac.is_some(),
            identity: Identity::default(),
            egress_slot,
            ingress_slot,
            revision: self.numbers.revision(id, egress_slot, ingress_slot),
            judge_host: endpoint.allow_localhost == AllowLocalhost::Policy,
            mtu: subnet.mtu,
            key,
        })
    }

    /// Egress and ingress slot of an endpoint.
    fn slots(&mut self, scope: &VpcScope<'a>, endpoint: &Endpoint) -> Option<[PolicySlot; 2]> {
        for name in &endpoint.security_groups {
            if !scope.groups.contains_key(name) {
                let message = format!("security group {name} does not exist: until then it allows nothing");
                self.endpoint_condition(endpoint, ConditionReason::DanglingReference, message);
            }
        }
        let mut ports = endpoint.named_ports.clone();
        ports.sort();
        let key: SpecKey = (endpoint.vpc.clone(), endpoint.security_groups.iter().cloned().collect(), ports);
        if let Some(slots) = self.specs.get(&key) {
            return *slots;
        }
        let slots =
            [Direction::Egress, Direction::Ingress].map(|direction| self.slot(scope, endpoint, direction));
        let slots = match slots {
            [Some(egress), Some(ingress)] => Some([egress, ingress]),
            _ => None,
        };
        self.specs.insert(key, slots);
        slots
    }

    fn slot(
        &mut self,
        scope: &VpcScope<'a>,
        endpoint: &Endpoint,
        direction: Direction,
    ) -> Option<PolicySlot> {
        let fault = self.cache.fault;
        let mut name_rule = |name: &Arc<RuleRef>| self.numbers.rule_id(name);
        let (spec, conditions) =
            build_spec(self.world, scope.vpc, &scope.groups, endpoint, direction, fault, &mut name_rule)?;
        self.conditions.extend(conditions);
        let spec = Arc::new(spec);
        let slot = self.numbers.slot(&spec)?;
        self.used.slots.insert(slot.0);
        for rule in &spec.rules {
            self.used.rules.insert(rule.id.0);
            self.plan.rules.entry(rule.id).or_insert_with(|| (*rule.name).clone());
        }
        let cache = &mut self.cache.policies;
        let held = cache.get(&slot).filter(|policy| *policy.spec() == spec).cloned();
        let policy = held.unwrap_or_else(|| Arc::new(CompiledPolicy::with_fault(spec, fault)));
        cache.insert(slot, policy.clone());
        self.plan.policies.insert(slot, policy);
        Some(slot)
    }

    fn finish(mut self) -> Compilation {
        self.numbers.settle(&self.used);
        let plan = &self.plan;
        self.cache.policies.retain(|slot, _| plan.policies.contains_key(slot));
        self.conditions.sort();
        self.conditions.dedup();
        Compilation { plan: self.plan, conditions: self.conditions }
    }
}

/// The spec of one direction of an endpoint, local or not. `None`: no rule number is free.
pub(crate) fn build_spec(
    world: &World,
    vpc: &Vpc,
    groups: &BTreeMap<&GroupName, &SecurityGroup>,
    endpoint: &Endpoint,
    direction: Direction,
    fault: Fault,
    number: &mut dyn FnMut(&Arc<RuleRef>) -> Option<RuleId>,
) -> Option<(PolicySpec, Vec<Condition>)> {
    let attached = || endpoint.security_groups.iter().map(|name| groups.get(name).copied());
    let mut conditions = Vec::new();
    let mut rules = Vec::new();
    let wanted = match (direction, planted!(fault, DirectionSwapped)) {
        (Direction::Egress, false) | (Direction::Ingress, true) => Direction::Egress,
        (Direction::Ingress, false) | (Direction::Egress, true) => Direction::Ingress,
    };
    for group in attached().flatten() {
        for rule in group.rules.iter().filter(|r| r.direction == wanted) {
            let name =
                Arc::new(RuleRef { vpc: vpc.name.clone(), group: group.name.clone(), rule: rule.id.clone() });
            let remote = match resolve_remote(world, &vpc.name, &rule.remote) {
                Ok(remote) => remote,
                Err(missing) => {
                    let object = ObjectRef::Rule {
                        vpc: vpc.name.clone(),
                        group: group.name.clone(),
                        rule: rule.id.clone(),
                    };
                    // Fails closed: what denies an unknown set denies everyone, what opens to it opens to nobody.
                    let (remote, effect) = match rule.action {
                        Action::Drop | Action::Reject => (SpecRemote::Any, "denies everyone"),
                        Action::Allow | Action::Log | Action::Pass => {
                            (SpecRemote::Cidrs(Default::default()), "matches nobody")
                        }
                    };
                    let message =
                        format!("cidr group {missing} does not exist: until then the rule {effect}");
                    conditions.push(Condition {
                        object,
                        reason: ConditionReason::DanglingReference,
                        message,
                    });
                    remote
                }
            };
            let own =
                (direction == Direction::Ingress || planted!(fault, OwnPortForEgress)).then_some(endpoint);
            let mut services = services(rule, own);
            if planted!(fault, IcmpCodeIgnored) && rule.icmp.is_some() {
                for service in std::mem::take(&mut services) {
                    let kind = service.ports.map(|(from, _)| (from & 0xff00, from | 0xff));
                    services.insert(crate::Service { ports: kind, ..service });
                }
            }
            if planted!(fault, UdpAsTcp) {
                for service in std::mem::take(&mut services) {
                    let protocol = service.protocol.map(|n| if n == 17 { 6 } else { n });
                    services.insert(crate::Service { protocol, ..service });
                }
            }
            let peer_ports = match direction {
                Direction::Egress if own.is_none() && rule.icmp.is_none() => {
                    rule.named_ports.iter().cloned().collect()
                }
                _ => Default::default(),
            };
            rules.push(SpecRule {
                tier: group.tier,
                priority: rule.priority,
                id: number(&name)?,
                name,
                action: rule.action,
                log: rule.log,
                stateful: rule.stateful,
                remote,
                services,
                peer_ports,
                peer_port_protocol: rule.protocol,
            });
        }
    }
    sort_rules(&mut rules);
    let default = default_verdict(vpc.default_policy, direction, attached());
    Some((PolicySpec { vpc: vpc.name.clone(), direction, default, rules }, conditions))
}

/// A locally administered MAC for an endpoint that pins none: the same on every node and after every restart.
fn derived_mac(key: &EndpointKey, places: &[(IpAddr, IpNet)]) -> Mac {
    // FNV-1a (public domain): small, fixed for ever, and nothing depends on its strength.
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    let mut feed = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    key.vpc.as_str().bytes().chain([0]).for_each(&mut feed);
    match places.first().map(|(ip, _)| *ip) {
        Some(IpAddr::V4(ip)) => ip.octets().into_iter().for_each(&mut feed),
        Some(IpAddr::V6(ip)) => ip.octets().into_iter().for_each(&mut feed),
        None => {}
    }
    let [_, _, _, b, c, d, e, f] = hash.to_be_bytes();
    Mac([0x02, b, c, d, e, f])
}
