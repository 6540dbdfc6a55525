//! Pods: endpoints of other nodes, and what this node's attachments lack.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_model::{
    AllowLocalhost, Attachment, Endpoint, EndpointKey, EndpointName, GroupName, Labels, joined,
};

use super::node::subnet_name;
use super::policy::group_name;
use super::{Delta, LocalPod, Translator};
use crate::{Kind, ObjectName, Pod};

/// Label with a Pod's namespace.
pub const POD_NAMESPACE: &str = "k8s.pod.namespace";
/// Label with a Pod's name.
pub const POD_NAME: &str = "k8s.pod.name";
/// Label with a Pod's UID.
pub const POD_UID: &str = "k8s.pod.uid";
/// Label with a Pod's service account.
pub const POD_SERVICE_ACCOUNT: &str = "k8s.pod.serviceaccount";

/// A namespace's label on its Pods' endpoints. No Pod can carry such a key itself: label keys have no colon.
#[must_use]
pub fn namespace_label(key: &str) -> String {
    format!("k8s.ns:{key}")
}

/// A Pod's labels as its endpoint carries them. Ours come last: no Pod gives itself another namespace.
fn labels(name: &ObjectName, pod: &Pod, namespace: &Labels) -> Labels {
    let mut labels = (*pod.labels).clone();
    labels.extend(namespace.iter().map(|(k, v)| (namespace_label(k), v.clone())));
    for (key, value) in [
        (POD_NAMESPACE, &name.namespace),
        (POD_NAME, &name.name),
        (POD_UID, &pod.uid),
        (POD_SERVICE_ACCOUNT, &pod.service_account),
    ] {
        labels.insert(key.to_owned(), value.clone());
    }
    labels
}

impl Translator {
    fn key(&self, name: &ObjectName) -> Option<EndpointKey> {
        let name = EndpointName::new(joined(&[&name.namespace, &name.name])).ok()?;
        Some(EndpointKey { vpc: self.vpc.clone(), name })
    }

    pub(super) fn translate_pods(&mut self, dirty: &BTreeSet<ObjectName>, delta: &mut Delta) {
        // Who loses or wins an address is looked at again together with who claims it.
        let mut all = dirty.clone();
        for name in dirty {
            let ips = self.claims_of(name);
            let before = self.claimed.remove(name).unwrap_or_default();
            for ip in &before {
                if let Some(who) = self.claims.get_mut(ip) {
                    who.remove(name);
                    all.extend(who.keys().cloned());
                    if who.is_empty() {
                        self.claims.remove(ip);
                    }
                }
            }
            for ip in &ips {
                let who = self.claims.entry(*ip).or_default();
                all.extend(who.keys().cloned());
                who.insert(name.clone(), ());
            }
            if !ips.is_empty() {
                self.claimed.insert(name.clone(), ips);
            }
        }
        for name in all {
            self.translate_pod(&name, delta);
        }
    }

    /// Addresses that a Pod of another node has, as far as it says so itself.
    fn claims_of(&self, name: &ObjectName) -> Vec<IpAddr> {
        match self.pods.object(name) {
            Some(pod) if self.is_remote(pod) => pod.ips.clone(),
            _ => Vec::new(),
        }
    }

    fn is_remote(&self, pod: &Pod) -> bool {
        !pod.finished && !pod.host_network && pod.node.as_ref().is_some_and(|n| *n != self.options.node)
    }

    fn translate_pod(&mut self, name: &ObjectName, delta: &mut Delta) {
        let Some(key) = self.key(name) else { return };
        let pod = self.pods.object(name).cloned();
        let namespace = self.namespaces.object(&ObjectName::new("", &name.namespace)).cloned();
        let (mut endpoint, mut local, mut fault) = (None, None, None);
        // Without its namespace's labels nobody can say who may talk to it.
        if let (Some(pod), Some(namespace)) = (&pod, &namespace) {
            if pod.node.as_ref() == Some(&self.options.node) && !pod.finished && !pod.host_network {
                local = Some(LocalPod {
                    uid: pod.uid.clone(),
                    mirror_of: pod.mirror_of.clone(),
                    key: key.clone(),
                    labels: labels(name, pod, &namespace.labels),
                    security_groups: self.groups(name, pod),
                    named_ports: pod.named_ports.clone(),
                    host_ports: pod.host_ports.clone(),
                });
            } else if self.is_remote(pod) && !pod.ips.is_empty() {
                match self.winner(name, pod) {
                    None => endpoint = self.endpoint(name, &key, pod, &namespace.labels),
                    Some(other) => {
                        fault = Some(("AddressTaken", format!("Pod {other} has one of its addresses now")));
                    }
                }
            }
        }
        delta.endpoints.insert(key, endpoint.map(Arc::new));
        // Of Pods elsewhere there is nothing to take back.
        let known = if local.is_some() { !self.local.insert(name.clone()) } else { self.local.remove(name) };
        if local.is_some() || known {
            delta.local_pods.insert(name.clone(), local);
        }
        self.fault(Pod::NAME, name, fault);
    }

    /// Another Pod that has a better claim to an address of this one: one that is not leaving, the younger.
    fn winner(&self, name: &ObjectName, pod: &Pod) -> Option<ObjectName> {
        let rank = |name: &ObjectName, pod: &Pod| (!pod.leaving, pod.created.clone(), name.clone());
        let own = rank(name, pod);
        let claims = pod.ips.iter().filter_map(|ip| self.claims.get(ip));
        let rivals = claims.flat_map(|who| who.keys()).filter(|n| *n != name);
        rivals
            .filter_map(|n| Some((n, self.pods.object(n)?)))
            .find(|(n, p)| rank(n, p) > own)
            .map(|(n, _)| n.clone())
    }

    fn endpoint(
        &self,
        name: &ObjectName,
        key: &EndpointKey,
        pod: &Arc<Pod>,
        namespace: &Labels,
    ) -> Option<Endpoint> {
        let node = pod.node.clone()?;
        let mut ips: Vec<IpAddr> = Vec::with_capacity(2);
        for ip in &pod.ips {
            if !ips.iter().any(|o| o.is_ipv4() == ip.is_ipv4()) {
                ips.push(*ip);
            }
        }
        Some(Endpoint {
            vpc: key.vpc.clone(),
            name: key.name.clone(),
            subnet: subnet_name(node.as_str())?,
            ips,
            mac: None,
            node,
            security_groups: self.groups(name, pod),
            labels: labels(name, pod, namespace),
            named_ports: pod.named_ports.clone(),
            attachment: Attachment::Cni,
            allow_localhost: AllowLocalhost::default(),
        })
    }

    /// Policies of its namespace that select it.
    fn groups(&self, name: &ObjectName, pod: &Pod) -> BTreeSet<GroupName> {
        self.policies
            .of_namespace(&name.namespace)
            .filter(|(_, policy)| policy.selector.matches(&pod.labels))
            .filter_map(|(name, _)| group_name(name))
            .collect()
    }
}
