//! CIDR groups, security groups and their rules.

use std::collections::{BTreeMap, BTreeSet};

use super::{Checker, limits};
use crate::document::MAX_PRIORITY;
use crate::ranges::{Family, covers};
use crate::{
    CidrEntry, CidrGroup, CidrGroupName, Direction, Endpoint, GroupName, ObjectRef, Operator, PortName,
    Protocol, Reason, Remote, Rule, SecurityGroup, Selector, VpcName, World,
};

/// Endpoints looked at for named ports of selectors, over the whole world. Past it the check is left out: an unresolved port matches nothing anyway.
const SELECTOR_WORK: usize = 4_000_000;

/// As [`super::endpoints_fit`], for security groups.
pub(crate) fn groups_fit<'a>(
    world: &World,
    changed: impl Iterator<Item = (&'a (VpcName, GroupName), &'a SecurityGroup)>,
) -> bool {
    let mut checker = Checker { world, faults: Vec::new() };
    let named = |g: &SecurityGroup| g.rules.iter().any(|r| !r.named_ports.is_empty());
    for (key, before) in changed {
        let Some(group) = world.security_groups.get(key).filter(|g| !named(g) && !named(before)) else {
            return false;
        };
        checker.security_group(group, None);
    }
    checker.faults.is_empty()
}

/// As [`super::endpoints_fit`], for CIDR groups.
pub(crate) fn cidr_groups_fit<'a>(
    world: &World,
    mut changed: impl Iterator<Item = &'a (VpcName, CidrGroupName)>,
) -> bool {
    let mut checker = Checker { world, faults: Vec::new() };
    changed.all(|key| {
        world.cidr_groups.get(key).is_some_and(|group| {
            checker.cidr_group(group);
            checker.faults.is_empty()
        })
    })
}

impl Checker<'_> {
    pub(super) fn cidr_groups(&mut self) {
        for group in self.world.cidr_groups.values() {
            self.cidr_group(group);
        }
    }

    fn cidr_group(&mut self, group: &CidrGroup) {
        let object = ObjectRef::CidrGroup(group.vpc.clone(), group.name.clone());
        self.vpc_reference(&object, &group.vpc);
        self.at_most(&object, "entries", group.entries.len(), limits::CIDRS_PER_GROUP);
        let mut seen = BTreeSet::new();
        for (i, entry) in group.entries.iter().enumerate() {
            self.cidr_entry(&object, &format!("entries[{i}]"), entry);
            if !seen.insert(entry.cidr) {
                let message = "is in the group twice; keep one";
                let field = format!("entries[{i}].cidr");
                self.fault(Reason::DuplicateName, &object, &field, entry.cidr, message);
            }
        }
    }

    fn cidr_entry(&mut self, object: &ObjectRef, field: &str, entry: &CidrEntry) {
        self.at_most(object, field, entry.except.len(), limits::CIDRS_PER_GROUP);
        for except in &entry.except {
            let field = format!("{field}.except_cidrs");
            if Family::of_net(except) != Family::of_net(&entry.cidr) {
                let message = format!("is not of the family of {}", entry.cidr);
                self.fault(Reason::FamilyMismatch, object, &field, except, message);
            } else if !covers(&entry.cidr, except) {
                let message =
                    format!("is not inside {}: an exception takes away from its own CIDR only", entry.cidr);
                self.fault(Reason::OutsideRange, object, &field, except, message);
            }
        }
    }

    pub(super) fn security_groups(&mut self) {
        let mut ports = PortIndex::new(self.world);
        for group in self.world.security_groups.values() {
            self.security_group(group, Some(&mut ports));
        }
    }

    /// Without `ports`, named ports are not looked up.
    fn security_group(&mut self, group: &SecurityGroup, mut ports: Option<&mut PortIndex<'_>>) {
        let object = ObjectRef::SecurityGroup(group.vpc.clone(), group.name.clone());
        self.vpc_reference(&object, &group.vpc);
        self.at_most(&object, "rules", group.rules.len(), limits::RULES_PER_GROUP);
        if group.tier > 1 {
            self.fault(Reason::OutOfRange, &object, "tier", group.tier, "must be 0 (platform) or 1 (tenant)");
        }
        let mut ids = BTreeSet::new();
        for rule in &group.rules {
            let field = format!("rules[{}]", rule.id);
            if !ids.insert(&rule.id) {
                let message = "two rules of the group have this id";
                self.fault(Reason::DuplicateName, &object, &field, &rule.id, message);
            }
            self.rule(&object, &field, group, rule);
            if let Some(ports) = ports.as_deref_mut() {
                self.resolve_named_ports(&object, &field, group, rule, ports);
            }
        }
    }

    fn rule(&mut self, object: &ObjectRef, at: &str, group: &SecurityGroup, rule: &Rule) {
        let field = |name: &str| format!("{at}.{name}");
        if !(1..=MAX_PRIORITY).contains(&rule.priority) {
            let message = format!("must be 1..={MAX_PRIORITY}; the lower number wins");
            self.fault(Reason::OutOfRange, object, &field("priority"), rule.priority, message);
        }
        match &rule.remote {
            Remote::Cidr(entry) => self.cidr_entry(object, &field("remote_cidr"), entry),
            Remote::CidrGroup(name) => {
                let target = ObjectRef::CidrGroup(group.vpc.clone(), name.clone());
                self.reference(object, &field("remote_cidr_group"), target);
            }
            Remote::Group(name) => {
                let target = ObjectRef::SecurityGroup(group.vpc.clone(), name.clone());
                self.reference(object, &field("remote_group"), target);
            }
            Remote::Selector(selector) => {
                self.selector(object, &field("remote_endpoint_expressions"), selector)
            }
            Remote::Any | Remote::Entities(_) => {}
        }
        self.at_most(object, &field("ports"), rule.ports.len(), limits::PORTS_PER_RULE);
        self.at_most(object, &field("named_ports"), rule.named_ports.len(), limits::PORTS_PER_RULE);
        for (i, &(from, to)) in rule.ports.iter().enumerate() {
            if from == 0 || to == 0 {
                let at = field(&format!("ports[{i}]"));
                self.fault(Reason::OutOfRange, object, &at, format!("{from}-{to}"), "a port is 1..=65535");
            } else if from > to {
                let at = field(&format!("ports[{i}]"));
                let f = self.fault(
                    Reason::InvalidRule,
                    object,
                    &at,
                    format!("{from}-{to}"),
                    "its ends are reversed",
                );
                f.suggestion = Some(format!("{{from: {to}, to: {from}}}"));
            }
        }
        let named = !rule.ports.is_empty() || !rule.named_ports.is_empty();
        if named && !rule.protocol.has_ports() {
            let message = "ports need protocol tcp, udp or sctp";
            self.fault(Reason::InvalidRule, object, &field("protocol"), rule.protocol.word(), message);
        }
        if rule.icmp.is_some() && rule.protocol != Protocol::Icmp {
            let message = "icmp_type needs protocol icmp";
            self.fault(Reason::InvalidRule, object, &field("icmp_type"), rule.protocol.word(), message);
        }
    }

    fn selector(&mut self, object: &ObjectRef, field: &str, selector: &Selector) {
        for (i, e) in selector.expressions.iter().enumerate() {
            let needs = matches!(e.operator, Operator::In | Operator::NotIn);
            if needs == e.values.is_empty() {
                let message =
                    if needs { "In and NotIn need values" } else { "Exists and DoesNotExist take no values" };
                self.fault(Reason::InvalidRule, object, &format!("{field}[{i}].values"), &e.key, message);
            }
        }
    }

    fn resolve_named_ports(
        &mut self,
        object: &ObjectRef,
        at: &str,
        group: &SecurityGroup,
        rule: &Rule,
        ports: &mut PortIndex<'_>,
    ) {
        if rule.named_ports.is_empty() || !rule.protocol.has_ports() {
            return;
        }
        let field = format!("{at}.named_ports");
        for name in &rule.named_ports {
            let port = (name, rule.protocol);
            let (defined, who) = match (&rule.direction, &rule.remote) {
                (Direction::Ingress, _) => (
                    ports.in_group(&group.vpc, &group.name, port),
                    format!("endpoint that {object} is attached to"),
                ),
                (Direction::Egress, Remote::Group(peer)) => {
                    (ports.in_group(&group.vpc, peer, port), format!("endpoint of security group {peer}"))
                }
                (Direction::Egress, Remote::Selector(s)) => {
                    (ports.selected(&group.vpc, s, port), "endpoint that the selector selects".to_owned())
                }
                (Direction::Egress, _) => {
                    let message = "an egress rule with named ports needs remote_group or a selector: the peers define the ports";
                    self.fault(Reason::InvalidRule, object, &field, name, message);
                    return;
                }
            };
            if !defined {
                let message = format!("no {who} defines a {} port of this name", rule.protocol.word());
                self.fault(Reason::UndefinedNamedPort, object, &field, name, message);
            }
        }
    }
}

type Port<'w> = (&'w PortName, Protocol);

/// Who defines which named port.
struct PortIndex<'w> {
    /// Groups that some endpoint carries.
    attached: BTreeSet<(&'w VpcName, &'w GroupName)>,
    of_group: BTreeSet<(&'w VpcName, &'w GroupName, Port<'w>)>,
    /// Endpoints that define a port, by VPC and port.
    definers: BTreeMap<(&'w VpcName, Port<'w>), Vec<&'w Endpoint>>,
    world: &'w World,
    work: usize,
}

impl<'w> PortIndex<'w> {
    fn new(world: &'w World) -> Self {
        let (mut attached, mut of_group) = (BTreeSet::new(), BTreeSet::new());
        let mut definers: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for e in world.endpoints.values() {
            attached.extend(e.security_groups.iter().map(|g| (&e.vpc, g)));
            for p in &e.named_ports {
                let port = (&p.name, p.protocol);
                definers.entry((&e.vpc, port)).or_default().push(&**e);
                of_group.extend(e.security_groups.iter().map(|g| (&e.vpc, g, port)));
            }
        }
        Self { attached, of_group, definers, world, work: 0 }
    }

    /// Whether a member defines the port. A group without members is no fault: they may come by CNI.
    fn in_group(&self, vpc: &VpcName, group: &GroupName, port: Port<'_>) -> bool {
        self.of_group.contains(&(vpc, group, port)) || !self.attached.contains(&(vpc, group))
    }

    /// Whether a selected endpoint defines the port; none selected is no fault either.
    fn selected(&mut self, vpc: &VpcName, selector: &Selector, port: Port<'_>) -> bool {
        let definers = self.definers.get(&(vpc, port)).map_or(&[][..], Vec::as_slice);
        if self.work > SELECTOR_WORK {
            return true;
        }
        self.work += definers.len();
        if definers.iter().any(|e| selector.matches(&e.labels)) {
            return true;
        }
        self.work += self.world.endpoints.len();
        !self.world.endpoints.values().any(|e| &e.vpc == vpc && selector.matches(&e.labels))
    }
}
