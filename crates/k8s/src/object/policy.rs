//! NetworkPolicy v1.

use flowloom_model::{PortName, Protocol};
use ipnet::IpNet;

use super::{Kind, LabelSelector, cidr, protocol, read};
use crate::wire;

/// A NetworkPolicy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkPolicy {
    /// The Pods of its namespace that it isolates.
    pub selector: LabelSelector,
    /// It isolates for ingress, and these rules open.
    pub ingress: Option<Vec<PolicyRule>>,
    /// The same for egress.
    pub egress: Option<Vec<PolicyRule>>,
    /// Why its rules could not be read: it isolates and opens nothing.
    pub fault: Option<String>,
}

/// One rule: any of the peers on any of the ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyRule {
    /// Empty: everyone.
    pub peers: Vec<PolicyPeer>,
    /// Empty: every protocol and port.
    pub ports: Vec<PolicyPort>,
}

/// Whom a rule speaks of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyPeer {
    /// Pods.
    Pods {
        /// Namespaces by label; the policy's own when absent.
        namespaces: Option<LabelSelector>,
        /// Pods in them; all when absent.
        pods: Option<LabelSelector>,
    },
    /// Addresses.
    Block {
        /// Range.
        cidr: IpNet,
        /// Holes.
        except: Vec<IpNet>,
    },
}

/// A port of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyPort {
    /// Protocol.
    pub protocol: Protocol,
    /// Ports of it.
    pub port: PortMatch,
}

/// Which ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortMatch {
    /// All.
    Any,
    /// First and last.
    Range(u16, u16),
    /// By name.
    Named(PortName),
}

impl Kind for NetworkPolicy {
    const NAME: &'static str = "NetworkPolicy";
    const PATH: &'static str = "/apis/networking.k8s.io/v1/networkpolicies";

    fn decode(json: &str) -> Result<Self, String> {
        let w: wire::Policy = read(json)?;
        let spec = w.spec;
        let has = |kind: &str| spec.policy_types.iter().any(|t| t == kind);
        if let Some(other) = spec.policy_types.iter().find(|t| !matches!(t.as_str(), "Ingress" | "Egress")) {
            return Err(format!("spec.policyTypes: {other:?} is not Ingress or Egress"));
        }
        // Absent: ingress always, egress when there are rules for it.
        let absent = spec.policy_types.is_empty();
        let (ingress, egress) =
            (absent || has("Ingress"), has("Egress") || (absent && !spec.egress.is_empty()));
        let read_in =
            |(i, r): (usize, wire::IngressRule)| rule(&format!("spec.ingress[{i}]"), "from", r.from, r.ports);
        let read_out =
            |(i, r): (usize, wire::EgressRule)| rule(&format!("spec.egress[{i}]"), "to", r.to, r.ports);
        let ingress_rules =
            spec.ingress.into_iter().enumerate().map(read_in).collect::<Result<Vec<_>, _>>()?;
        let egress_rules =
            spec.egress.into_iter().enumerate().map(read_out).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            selector: LabelSelector::parse("spec.podSelector", spec.pod_selector)?,
            ingress: ingress.then_some(ingress_rules),
            egress: egress.then_some(egress_rules),
            fault: None,
        })
    }

    /// Whoever wrote it wanted these Pods isolated. Rules only open, so none of them is the safe side.
    fn salvage(json: &str, reason: &str) -> Option<Self> {
        let wire::PolicyFrame { spec } = serde_json::from_str(json).ok()?;
        let selector = LabelSelector::parse("spec.podSelector", spec.pod_selector).ok()?;
        let named = spec.policy_types.as_array().map_or(&[][..], Vec::as_slice);
        let known = |t: &serde_json::Value| matches!(t.as_str(), Some("Ingress" | "Egress"));
        let readable =
            (spec.policy_types.is_null() || spec.policy_types.is_array()) && named.iter().all(known);
        let has = |kind: &str| named.iter().any(|t| t.as_str() == Some(kind));
        let egress_rules = spec.egress.as_array().map_or(!spec.egress.is_null(), |list| !list.is_empty());
        let (ingress, egress) = match (readable, named.is_empty()) {
            (false, _) => (true, true),
            (true, true) => (true, egress_rules),
            (true, false) => (has("Ingress"), has("Egress")),
        };
        Some(Self {
            selector,
            ingress: ingress.then(Vec::new),
            egress: egress.then(Vec::new),
            fault: Some(reason.to_owned()),
        })
    }

    fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }
}

fn rule(
    field: &str,
    peers_field: &str,
    peers: Vec<wire::Peer>,
    ports: Vec<wire::PolicyPort>,
) -> Result<PolicyRule, String> {
    let peers = peers.into_iter().enumerate().map(|(i, p)| peer(&format!("{field}.{peers_field}[{i}]"), p));
    let ports = ports.into_iter().enumerate().map(|(i, p)| port(&format!("{field}.ports[{i}]"), p));
    Ok(PolicyRule { peers: peers.collect::<Result<_, _>>()?, ports: ports.collect::<Result<_, _>>()? })
}

fn peer(field: &str, w: wire::Peer) -> Result<PolicyPeer, String> {
    let selector = |name: &str, s: Option<wire::Selector>| {
        s.map(|s| LabelSelector::parse(&format!("{field}.{name}"), s)).transpose()
    };
    match w.ip_block {
        Some(_) if w.pod_selector.is_some() || w.namespace_selector.is_some() => {
            Err(format!("{field}: ipBlock stands alone"))
        }
        Some(block) => {
            let holes = block.except.iter().map(|t| cidr(&format!("{field}.ipBlock.except"), t));
            Ok(PolicyPeer::Block {
                cidr: cidr(&format!("{field}.ipBlock.cidr"), &block.cidr)?,
                except: holes.collect::<Result<_, _>>()?,
            })
        }
        None if w.pod_selector.is_none() && w.namespace_selector.is_none() => {
            Err(format!("{field}: a peer needs podSelector, namespaceSelector or ipBlock"))
        }
        None => Ok(PolicyPeer::Pods {
            namespaces: selector("namespaceSelector", w.namespace_selector)?,
            pods: selector("podSelector", w.pod_selector)?,
        }),
    }
}

fn port(field: &str, w: wire::PolicyPort) -> Result<PolicyPort, String> {
    let protocol = protocol(&format!("{field}.protocol"), &w.protocol)?;
    let port = match (w.port, w.end_port) {
        (None, None) => PortMatch::Any,
        (Some(wire::IntOrString::Number(0)), _) => return Err(format!("{field}.port: 0 is no port")),
        (Some(wire::IntOrString::Number(first)), last) => {
            let last = last.unwrap_or(first);
            if last < first {
                return Err(format!("{field}.endPort: {last} is less than port {first}"));
            }
            PortMatch::Range(first, last)
        }
        (Some(wire::IntOrString::Name(name)), None) => {
            PortMatch::Named(PortName::new(&name).map_err(|e| format!("{field}.port: {e}"))?)
        }
        (_, Some(_)) => return Err(format!("{field}.endPort: it needs a port that is a number")),
    };
    Ok(PolicyPort { protocol, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(spec: &str) -> Result<NetworkPolicy, String> {
        NetworkPolicy::decode(&format!(r#"{{"metadata":{{"name":"p","namespace":"n"}},"spec":{spec}}}"#))
    }

    #[test]
    fn absent_policy_types_are_derived_as_the_api_server_does() {
        let p = decode(r#"{"podSelector":{}}"#).unwrap();
        assert!(p.ingress == Some(vec![]) && p.egress.is_none());
        let p = decode(r#"{"podSelector":{},"egress":[{}]}"#).unwrap();
        assert!(p.ingress == Some(vec![]) && p.egress.as_ref().unwrap().len() == 1);
        let p = decode(r#"{"podSelector":{},"policyTypes":["Egress"],"ingress":[{}]}"#).unwrap();
        assert!(p.ingress.is_none() && p.egress == Some(vec![]));
    }

    #[test]
    fn of_rules_that_cannot_be_read_the_isolation_stays() {
        let salvage = |spec: &str| {
            let json = format!(r#"{{"metadata":{{"name":"p","namespace":"n"}},"spec":{spec}}}"#);
            assert!(NetworkPolicy::decode(&json).is_err(), "{spec}");
            NetworkPolicy::salvage(&json, "why").map(|p| {
                assert_eq!(p.fault(), Some("why"));
                assert!(p.ingress.iter().chain(&p.egress).all(Vec::is_empty), "{p:?}");
                (p.ingress.is_some(), p.egress.is_some())
            })
        };
        let bad = r#""podSelector":{},"ingress":[{"ports":[{"protocol":"ICMP"}]}]"#;
        assert_eq!(salvage(&format!("{{{bad}}}")), Some((true, false)));
        assert_eq!(salvage(&format!(r#"{{{bad},"egress":[{{}}]}}"#)), Some((true, true)));
        assert_eq!(salvage(&format!(r#"{{{bad},"policyTypes":["Egress"]}}"#)), Some((false, true)));
        assert_eq!(salvage(&format!(r#"{{{bad},"policyTypes":["Both"]}}"#)), Some((true, true)));
        assert_eq!(salvage(r#"{"podSelector":{},"policyTypes":7}"#), Some((true, true)));
        // Nobody can say whom these mean.
        assert_eq!(salvage(r#"{"podSelector":{"matchLabels":{"a":5}}}"#), None);
        assert_eq!(salvage(r#"{"ingress":[{"from":[{}]}]}"#), None);
    }

    #[test]
    fn what_cannot_be_meant_is_refused_by_field() {
        for (spec, field) in [
            (r#"{"ingress":[{"from":[{}]}]}"#, "spec.ingress[0].from[0]"),
            (r#"{"ingress":[{"ports":[{"endPort":5}]}]}"#, "spec.ingress[0].ports[0].endPort"),
            (r#"{"egress":[{"to":[{"ipBlock":{"cidr":"10/8"}}]}]}"#, "spec.egress[0].to[0].ipBlock.cidr"),
            (r#"{"podSelector":{"matchExpressions":[{"key":"a","operator":"Is"}]}}"#, "spec.podSelector"),
            (r#"{"ingress":[{"ports":[{"protocol":"ICMP"}]}]}"#, "protocol"),
            (r#"{"policyTypes":["Both"]}"#, "spec.policyTypes"),
        ] {
            let e = decode(spec).unwrap_err();
            assert!(e.contains(field), "{spec}: {e}");
        }
    }
}
