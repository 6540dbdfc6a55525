//! Endpoints: where they are, what is known about them, and the records of those that run here.

use std::net::IpAddr;
use std::sync::Arc;

use flowloom_bpf_abi::peer_flags;
use flowloom_model::{AllowLocalhost, Direction, Endpoint, EndpointKey, Mac};
use ipnet::IpNet;

use super::resolve::build_spec;
use super::{Compiler, SpecKey, VpcScope};
use crate::questions::host;
use crate::{
    CompiledPolicy, ConditionReason, EndpointPlan, Identity, ObjectRef, PolicySlot, PolicySpec, RuleRef,
};

impl<'a> Compiler<'a> {
    pub(super) fn endpoint_condition(
        &mut self,
        endpoint: &Endpoint,
        reason: ConditionReason,
        message: impl Into<String>,
    ) {
        self.condition(ObjectRef::Endpoint { endpoint: endpoint.key() }, reason, message);
    }

    /// The endpoint's addresses, each with the CIDR of its subnet that holds it; none when it cannot be in force.
    pub(super) fn places(
        &mut self,
        scope: &VpcScope<'a>,
        endpoint: &Endpoint,
    ) -> Option<Vec<(IpAddr, IpNet)>> {
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

    /// Its entries, and its record when it runs here.
    pub(super) fn endpoint(&mut self, scope: &VpcScope<'a>, endpoint: &Endpoint, places: &[(IpAddr, IpNet)]) {
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
    pub(super) fn slots(&mut self, scope: &VpcScope<'a>, endpoint: &Endpoint) -> Option<[PolicySlot; 2]> {
        for name in &endpoint.security_groups {
            if !scope.groups.contains_key(name) {
                let message = format!("security group {name} does not exist: until then it allows nothing");
                self.endpoint_condition(endpoint, ConditionReason::DanglingReference, message);
            }
        }
        if let Some(held) = self.pins.get(&endpoint.key()) {
            let slots = [Direction::Egress, Direction::Ingress].map(|direction| match held.of(direction) {
                Some(spec) => self.held_slot(spec),
                None => self.slot(scope, endpoint, direction),
            });
            return match slots {
                [Some(egress), Some(ingress)] => Some([egress, ingress]),
                _ => None,
            };
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
        self.policy(spec)
    }

    /// The slot of a policy that is held. Its rules may have had other numbers when it was noted down.
    fn held_slot(&mut self, spec: &PolicySpec) -> Option<PolicySlot> {
        let mut spec = spec.clone();
        for rule in &mut spec.rules {
            rule.id = self.numbers.rule_id(&rule.name)?;
        }
        self.policy(spec)
    }

    /// The slot of a policy, which is in the plan then.
    fn policy(&mut self, spec: PolicySpec) -> Option<PolicySlot> {
        let fault = self.cache.fault;
        let spec = Arc::new(spec);
        let slot = self.numbers.slot(&spec)?;
        let cache = &mut self.cache.policies;
        let held = cache.get(&slot).filter(|policy| *policy.spec() == spec).cloned();
        let policy = held.unwrap_or_else(|| Arc::new(CompiledPolicy::with_fault(spec, fault)));
        cache.insert(slot, policy.clone());
        self.new_policies |= self.plan.policies.insert(slot, policy).is_none();
        Some(slot)
    }
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
