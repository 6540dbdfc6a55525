//! The rules of one direction of an endpoint, resolved to a spec.

use std::collections::BTreeMap;
use std::sync::Arc;

use flowloom_model::{Action, Direction, Endpoint, EndpointKey, GroupName, SecurityGroup, Vpc, World};

use crate::fault::{Fault, planted};
use crate::policy::sort_rules;
use crate::spec::{default_verdict, resolve_remote, services};
use crate::{Condition, ConditionReason, ObjectRef, PolicySpec, RuleId, RuleRef, SpecRemote, SpecRule};

/// What the world says of one direction of an endpoint, whatever it is held at: its rules have no numbers (0). `None`: it does not exist.
#[must_use]
pub fn world_spec(world: &World, endpoint: &EndpointKey, direction: Direction) -> Option<PolicySpec> {
    let endpoint = world.endpoints.get(endpoint)?;
    let vpc = world.vpcs.get(&endpoint.vpc)?;
    let groups = world.security_groups.values().filter(|g| g.vpc == vpc.name);
    let groups = groups.map(|g| (&g.name, g)).collect();
    let (spec, _) =
        build_spec(world, vpc, &groups, endpoint, direction, Fault::None, &mut |_| Some(RuleId(0)))?;
    Some(spec)
}

/// The spec of one direction of an endpoint. `None`: no rule number is free.
pub(super) fn build_spec(
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
