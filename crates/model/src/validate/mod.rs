//! Rules between objects (semantics.md section 1). Every check sorts or indexes: none is worse than O(n log n).

mod endpoints;
mod network;
mod rules;
mod services;

pub(crate) use self::endpoints::endpoints_fit;
pub(crate) use self::rules::{cidr_groups_fit, groups_fit};
use crate::{Fault, ObjectRef, Reason, VpcName, World};

/// Most objects of each kind: what the datapath's maps and a sane document hold.
pub mod limits {
    /// Nodes.
    pub const NODES: usize = 5_000;
    /// VPCs.
    pub const VPCS: usize = 4_096;
    /// Subnets.
    pub const SUBNETS: usize = 65_536;
    /// Endpoints.
    pub const ENDPOINTS: usize = 131_072;
    /// Endpoints of the document on one node.
    pub const ENDPOINTS_PER_NODE: usize = 4_095;
    /// Security groups.
    pub const SECURITY_GROUPS: usize = 16_384;
    /// CIDR groups.
    pub const CIDR_GROUPS: usize = 16_384;
    /// Rules of a group.
    pub const RULES_PER_GROUP: usize = 16_384;
    /// Port ranges, or named ports, of a rule.
    pub const PORTS_PER_RULE: usize = 1_024;
    /// Entries of a CIDR group, and exceptions of an entry.
    pub const CIDRS_PER_GROUP: usize = 65_536;
    /// Groups of an endpoint.
    pub const GROUPS_PER_ENDPOINT: usize = 1_024;
    /// Labels of an endpoint.
    pub const LABELS_PER_ENDPOINT: usize = 64;
    /// Load balancers.
    pub const LOAD_BALANCERS: usize = 65_536;
    /// Ports of a load balancer.
    pub const PORTS_PER_LOAD_BALANCER: usize = 1_024;
    /// Backends of a port of a load balancer.
    pub const BACKENDS_PER_PORT: usize = 4_096;
    /// Named ports of an endpoint.
    pub const NAMED_PORTS_PER_ENDPOINT: usize = 256;
}

/// Checks the world as a whole. Every fault names its object, the other object where there is one, and the rule.
///
/// Objects without address or VNI are no fault here: [`crate::allocate`] completes them.
#[must_use]
pub fn validate(world: &World) -> Vec<Fault> {
    let mut checker = Checker { world, faults: Vec::new() };
    checker.limits();
    checker.nodes();
    checker.vpcs();
    checker.subnets();
    checker.endpoints();
    checker.cidr_groups();
    checker.security_groups();
    checker.services();
    checker.faults
}

pub(crate) struct Checker<'w> {
    world: &'w World,
    faults: Vec<Fault>,
}

impl Checker<'_> {
    fn fault(
        &mut self,
        code: Reason,
        object: &ObjectRef,
        field: &str,
        value: impl std::fmt::Display,
        message: impl Into<String>,
    ) -> &mut Fault {
        let separator = if field.is_empty() { "" } else { "." };
        let path = format!("{}{separator}{field}", object.path());
        let at = self.faults.len();
        self.faults.push(Fault::new(code, path, value, message).on(object.clone()));
        &mut self.faults[at]
    }

    /// A reference by name to an object that must exist.
    fn reference(&mut self, object: &ObjectRef, field: &str, target: ObjectRef) {
        if exists(self.world, &target) {
            return;
        }
        let message = format!("{object} names {target}, which does not exist");
        let value = target.full_name();
        self.fault(Reason::DanglingReference, object, field, value, message).other = Some(target);
    }

    fn vpc_reference(&mut self, object: &ObjectRef, vpc: &VpcName) {
        self.reference(object, "vpc", ObjectRef::Vpc(vpc.clone()));
    }

    /// A count that must stay within its limit.
    fn at_most(&mut self, object: &ObjectRef, field: &str, n: usize, limit: usize) {
        if n > limit {
            self.fault(
                Reason::LimitExceeded,
                object,
                field,
                n,
                format!("has {n} entries; the limit is {limit}"),
            );
        }
    }

    fn limits(&mut self) {
        let w = self.world;
        let over =
            |limit: usize, what: &str| format!("more than {limit} {what}; this one is beyond the limit");
        let mut beyond: Vec<(ObjectRef, String)> = Vec::new();
        let mut add = |object: ObjectRef, limit: usize, what: &str| beyond.push((object, over(limit, what)));
        w.nodes
            .keys()
            .skip(limits::NODES)
            .for_each(|n| add(ObjectRef::Node(n.clone()), limits::NODES, "nodes"));
        let named = w.vpcs.keys().filter(|v| !v.is_default());
        named.skip(limits::VPCS - 1).for_each(|v| add(ObjectRef::Vpc(v.clone()), limits::VPCS, "VPCs"));
        w.subnets
            .keys()
            .skip(limits::SUBNETS)
            .for_each(|(v, n)| add(ObjectRef::Subnet(v.clone(), n.clone()), limits::SUBNETS, "subnets"));
        w.endpoints
            .keys()
            .skip(limits::ENDPOINTS)
            .for_each(|k| add(ObjectRef::Endpoint(k.clone()), limits::ENDPOINTS, "endpoints"));
        w.security_groups.keys().skip(limits::SECURITY_GROUPS).for_each(|(v, n)| {
            add(ObjectRef::SecurityGroup(v.clone(), n.clone()), limits::SECURITY_GROUPS, "security groups");
        });
        w.cidr_groups.keys().skip(limits::CIDR_GROUPS).for_each(|(v, n)| {
            add(ObjectRef::CidrGroup(v.clone(), n.clone()), limits::CIDR_GROUPS, "CIDR groups")
        });
        w.services.keys().skip(limits::LOAD_BALANCERS).for_each(|(v, n)| {
            add(ObjectRef::LoadBalancer(v.clone(), n.clone()), limits::LOAD_BALANCERS, "load balancers")
        });
        for (object, message) in beyond {
            self.fault(Reason::LimitExceeded, &object, "", "", message);
        }
    }
}

/// Whether the world has the object.
pub(crate) fn exists(world: &World, object: &ObjectRef) -> bool {
    match object {
        ObjectRef::Node(n) => world.nodes.contains_key(n),
        ObjectRef::Vpc(v) => world.vpcs.contains_key(v),
        ObjectRef::Subnet(v, n) => world.subnets.contains_key(&(v.clone(), n.clone())),
        ObjectRef::Endpoint(k) => world.endpoints.contains_key(k),
        ObjectRef::SecurityGroup(v, n) => world.security_groups.contains_key(&(v.clone(), n.clone())),
        ObjectRef::CidrGroup(v, n) => world.cidr_groups.contains_key(&(v.clone(), n.clone())),
        ObjectRef::LoadBalancer(v, n) => world.services.contains_key(&(v.clone(), n.clone())),
    }
}

#[cfg(test)]
mod tests;
