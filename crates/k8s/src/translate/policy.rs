//! NetworkPolicies: security groups that allow, and deny what they do not.

use std::collections::{BTreeMap, BTreeSet};

use flowloom_model::{
    Action, CidrEntry, Direction, Expression, GroupName, Operator, PortName, Protocol, Remote, Rule,
    RuleName, SecurityGroup, Selector, joined,
};

use super::pod::{POD_NAMESPACE, namespace_label};
use super::{Delta, Translator};
use crate::{LabelSelector, NetworkPolicy, ObjectName, PolicyPeer, PolicyPort, PortMatch};

/// Of every rule: NetworkPolicies only allow, so there is no order among them.
const PRIORITY: u16 = 1000;

/// The group that stands for a policy.
pub(super) fn group_name(policy: &ObjectName) -> Option<GroupName> {
    joined(&["netpol", &policy.namespace, &policy.name]).parse().ok()
}

impl Translator {
    pub(super) fn translate_policy(&mut self, name: &ObjectName, delta: &mut Delta) {
        let Some(group) = group_name(name) else { return };
        let made = self.policies.object(name).map(|policy| SecurityGroup {
            vpc: self.vpc.clone(),
            name: group.clone(),
            tier: 1,
            default_deny_ingress: policy.ingress.is_none().then_some(false),
            default_deny_egress: policy.egress.is_none().then_some(false),
            rules: rules(&name.namespace, policy),
        });
        delta.security_groups.insert((self.vpc.clone(), group), made);
    }
}

fn rules(namespace: &str, policy: &NetworkPolicy) -> Vec<Rule> {
    let mut out = Vec::new();
    for (direction, word, peers_word, list) in [
        (Direction::Ingress, "ingress", "from", &policy.ingress),
        (Direction::Egress, "egress", "to", &policy.egress),
    ] {
        for (i, rule) in list.iter().flatten().enumerate() {
            let remotes: Vec<(String, Remote)> = if rule.peers.is_empty() {
                vec![(format!("{word}.{i}"), Remote::Any)]
            } else {
                let named = |(j, peer)| (format!("{word}.{i}.{peers_word}.{j}"), remote(namespace, peer));
                rule.peers.iter().enumerate().map(named).collect()
            };
            for (id, remote) in remotes {
                for (protocol, ports) in by_protocol(&rule.ports) {
                    let id = if protocol == Protocol::Any {
                        id.clone()
                    } else {
                        format!("{id}.{}", protocol.word())
                    };
                    // Made of our own words and numbers: always a name.
                    let Ok(id) = RuleName::new(joined(&[&id])) else { continue };
                    out.push(Rule {
                        id,
                        priority: PRIORITY,
                        direction,
                        protocol,
                        remote: remote.clone(),
                        ports: ports.ranges,
                        named_ports: ports.names.into_iter().collect(),
                        icmp: None,
                        action: Action::Allow,
                        stateful: true,
                        log: false,
                    });
                }
            }
        }
    }
    out
}

#[derive(Default)]
struct Ports {
    all: bool,
    ranges: Vec<(u16, u16)>,
    names: BTreeSet<PortName>,
}

/// No ports at all means everything, protocols without ports included.
fn by_protocol(ports: &[PolicyPort]) -> BTreeMap<Protocol, Ports> {
    if ports.is_empty() {
        return BTreeMap::from([(Protocol::Any, Ports::default())]);
    }
    let mut out: BTreeMap<Protocol, Ports> = BTreeMap::new();
    for port in ports {
        let of = out.entry(port.protocol).or_default();
        match &port.port {
            PortMatch::Any => of.all = true,
            PortMatch::Range(first, last) => of.ranges.push((*first, *last)),
            PortMatch::Named(name) => drop(of.names.insert(name.clone())),
        }
    }
    for of in out.values_mut().filter(|of| of.all) {
        of.ranges.clear();
        of.names.clear();
    }
    out
}

fn remote(namespace: &str, peer: &PolicyPeer) -> Remote {
    match peer {
        PolicyPeer::Block { cidr, except } => Remote::Cidr(CidrEntry { cidr: *cidr, except: except.clone() }),
        PolicyPeer::Pods { namespaces, pods } => {
            let mut selector = Selector::default();
            match namespaces {
                None => drop(selector.labels.insert(POD_NAMESPACE.to_owned(), namespace.to_owned())),
                Some(namespaces) => {
                    // Also keeps endpoints that are no Pods out of "namespaces without this label".
                    selector.expressions.push(Expression {
                        key: POD_NAMESPACE.to_owned(),
                        operator: Operator::Exists,
                        values: BTreeSet::new(),
                    });
                    add(&mut selector, namespaces, namespace_label);
                }
            }
            if let Some(pods) = pods {
                add(&mut selector, pods, str::to_owned);
            }
            Remote::Selector(selector)
        }
    }
}

fn add(to: &mut Selector, from: &LabelSelector, key: impl Fn(&str) -> String) {
    for (k, v) in &from.labels {
        let k = key(k);
        if to.labels.get(&k).is_some_and(|known| known != v) {
            // The key is asked for twice with different values: nothing has both.
            to.expressions.push(Expression {
                key: k,
                operator: Operator::In,
                values: BTreeSet::from([v.clone()]),
            });
        } else {
            to.labels.insert(k, v.clone());
        }
    }
    to.expressions.extend(from.expressions.iter().map(|e| Expression { key: key(&e.key), ..e.clone() }));
}
