//! Objects to nodes, subnets, endpoints, groups and services. Pure. What changed is translated again, and only that.

mod node;
mod pod;
mod policy;
mod service;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_model::{
    DEFAULT_VPC, Endpoint, EndpointKey, GroupName, Labels, NameError, NamedPort, Node, NodeName, PackedMap,
    SecurityGroup, Service, ServiceName, Subnet, SubnetName, VpcName,
};

pub use self::pod::{POD_NAME, POD_NAMESPACE, POD_SERVICE_ACCOUNT, POD_UID, namespace_label};
pub use self::service::host_ports;
use crate::object;
use crate::{
    Cache, EndpointSlice, HostPort, Kind, LoadBalancer, Namespace, NetworkPolicy, ObjectName, Pod,
    ServiceCidr,
};

/// New value, or none for what is gone.
pub type Changes<K, V> = BTreeMap<K, Option<V>>;

/// What a node needs to know about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// This node.
    pub node: NodeName,
}

/// A Pod that runs on this node: its attachment gives the addresses, this gives the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalPod {
    /// Which life of the name.
    pub uid: String,
    /// The UID under which the kubelet runs it, where that differs (static Pods).
    pub mirror_of: String,
    /// Name of its endpoint, unless another life of it still has it.
    pub key: EndpointKey,
    /// Labels, its namespace's included.
    pub labels: Labels,
    /// Policies that select it.
    pub security_groups: BTreeSet<GroupName>,
    /// Ports by name.
    pub named_ports: Vec<NamedPort>,
    /// Ports of this node.
    pub host_ports: Vec<HostPort>,
}

impl LocalPod {
    /// Whether a container runtime that names this UID (or none) speaks of this Pod.
    #[must_use]
    pub fn is(&self, uid: Option<&str>) -> bool {
        uid.is_none_or(|uid| uid == self.uid || uid == self.mirror_of)
    }
}

/// What is wrong with an object of the API.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectFault {
    /// As in manifests.
    pub kind: &'static str,
    /// Full name.
    pub name: ObjectName,
    /// CamelCase.
    pub reason: &'static str,
    /// For people.
    pub message: String,
}

impl fmt::Display for ObjectFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {} [{}]", self.kind, self.name, self.message, self.reason)
    }
}

/// What changed in the parts of a world that stem from Kubernetes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Nodes.
    pub nodes: Changes<NodeName, Node>,
    /// Their pod CIDRs.
    pub subnets: Changes<(VpcName, SubnetName), Subnet>,
    /// Pods of other nodes.
    pub endpoints: Changes<EndpointKey, Arc<Endpoint>>,
    /// Policies.
    pub security_groups: Changes<(VpcName, GroupName), SecurityGroup>,
    /// Services.
    pub services: Changes<(VpcName, ServiceName), Arc<Service>>,
    /// Pods of this node.
    pub local_pods: Changes<ObjectName, LocalPod>,
}

impl Delta {
    /// Whether nothing changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Names of what was touched since the last delta.
#[derive(Debug, Default)]
struct Dirty {
    nodes: BTreeSet<ObjectName>,
    pods: BTreeSet<ObjectName>,
    policies: BTreeSet<ObjectName>,
    services: BTreeSet<ObjectName>,
}

/// Holds the objects and says what they mean.
#[derive(Debug)]
pub struct Translator {
    options: Options,
    vpc: VpcName,
    nodes: Cache<object::Node>,
    namespaces: Cache<Namespace>,
    pods: Cache<Pod>,
    services: Cache<LoadBalancer>,
    slices: Cache<EndpointSlice>,
    policies: Cache<NetworkPolicy>,
    service_cidrs: Cache<ServiceCidr>,
    /// Pod CIDRs in use, by node.
    accepted: BTreeMap<ObjectName, Vec<ipnet::IpNet>>,
    /// Names of each service's slices.
    slices_of: BTreeMap<ObjectName, PackedMap<Box<str>, ()>>,
    /// Pods of other nodes that claim an address.
    claims: BTreeMap<IpAddr, PackedMap<ObjectName, ()>>,
    /// Addresses that each of them claims.
    claimed: BTreeMap<ObjectName, Vec<IpAddr>>,
    /// Pods of this node that were told.
    local: BTreeSet<ObjectName>,
    common: Common,
    dirty: Dirty,
    faults: BTreeMap<(&'static str, ObjectName), ObjectFault>,
}

/// A kind whose objects the translator holds.
pub trait Held: Kind {
    /// Where.
    fn cache(translator: &Translator) -> &Cache<Self>;
    /// The same, to change.
    fn cache_mut(translator: &mut Translator) -> &mut Cache<Self>;
    /// Notes what has to be translated again, after an object changed; `before` is what it was.
    fn touch(translator: &mut Translator, name: &ObjectName, before: Option<&Self>);
    /// Takes parts of an object from where others of its kind have the same.
    fn share(&mut self, _common: &mut Common) {}
}

/// Parts that objects have in common.
#[derive(Debug, Default)]
pub struct Common {
    labels: HashSet<Arc<Labels>>,
    /// Sets at which those that nobody has any more are looked for.
    look_at: usize,
}

impl Common {
    fn labels(&mut self, labels: &mut Arc<Labels>) {
        if let Some(known) = self.labels.get(&**labels) {
            *labels = known.clone();
            return;
        }
        if self.labels.len() >= self.look_at {
            self.labels.retain(|set| Arc::strong_count(set) > 1);
            self.look_at = 2 * self.labels.len() + 64;
        }
        self.labels.insert(labels.clone());
    }
}

macro_rules! held {
    ($kind:ty, $field:ident, $touch:expr $(, $share:item)?) => {
        impl Held for $kind {
            fn cache(translator: &Translator) -> &Cache<Self> {
                &translator.$field
            }
            fn cache_mut(translator: &mut Translator) -> &mut Cache<Self> {
                &mut translator.$field
            }
            fn touch(translator: &mut Translator, name: &ObjectName, before: Option<&Self>) {
                let touch: fn(&mut Translator, &ObjectName, Option<&Self>) = $touch;
                touch(translator, name, before);
            }
            $($share)?
        }
    };
}

held!(object::Node, nodes, |t, name, _| t.dirty.nodes.extend([name.clone()]));
held!(Namespace, namespaces, |t, name, _| t.touch_pods_of(&name.name));
held!(
    Pod,
    pods,
    |t, name, _| t.dirty.pods.extend([name.clone()]),
    fn share(&mut self, common: &mut Common) {
        common.labels(&mut self.labels);
    }
);
held!(LoadBalancer, services, |t, name, _| t.dirty.services.extend([name.clone()]));
held!(EndpointSlice, slices, |t, name, before| t.touch_slice(name, before));
held!(NetworkPolicy, policies, |t, name, before| t.touch_policy(name, before));
held!(ServiceCidr, service_cidrs, |t, _, _| t.touch_nodes());

impl Translator {
    /// Knows nothing yet.
    ///
    /// # Errors
    /// Never in practice: the default VPC's name is legal.
    pub fn new(options: Options) -> Result<Self, NameError> {
        Ok(Self {
            options,
            vpc: DEFAULT_VPC.parse()?,
            nodes: Cache::default(),
            namespaces: Cache::default(),
            pods: Cache::default(),
            services: Cache::default(),
            slices: Cache::default(),
            policies: Cache::default(),
            service_cidrs: Cache::default(),
            accepted: BTreeMap::new(),
            slices_of: BTreeMap::new(),
            claims: BTreeMap::new(),
            claimed: BTreeMap::new(),
            local: BTreeSet::new(),
            common: Common::default(),
            dirty: Dirty::default(),
            faults: BTreeMap::new(),
        })
    }

    /// What it was made with.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Takes a new version of an object, good or refused.
    pub fn put<T: Held>(&mut self, name: &ObjectName, mut object: Result<T, String>) {
        if let Ok(object) = &mut object {
            object.share(&mut self.common);
        }
        let before = T::cache(self).object(name).cloned();
        if T::cache_mut(self).put(name, object) {
            T::touch(self, name, before.as_deref());
        }
    }

    /// Forgets an object.
    pub fn remove<T: Held>(&mut self, name: &ObjectName) {
        let before = T::cache(self).object(name).cloned();
        if T::cache_mut(self).remove(name) {
            T::touch(self, name, before.as_deref());
        }
    }

    /// Takes a complete list.
    pub fn replace<T: Held>(&mut self, mut list: Vec<(ObjectName, Result<T, String>)>) {
        for object in list.iter_mut().filter_map(|(_, object)| object.as_mut().ok()) {
            object.share(&mut self.common);
        }
        let known = T::cache(self).iter();
        let before: BTreeMap<ObjectName, Arc<T>> = known.map(|(name, o)| (name.clone(), o.clone())).collect();
        for name in T::cache_mut(self).replace(list) {
            T::touch(self, &name, before.get(&name).map(Arc::as_ref));
        }
    }

    /// Objects of a kind.
    #[must_use]
    pub fn cache<T: Held>(&self) -> &Cache<T> {
        T::cache(self)
    }

    /// Kinds whose first list is not complete. While there are any, nothing may be concluded from what is missing. A kind that the server
    /// need not have is none of them.
    #[must_use]
    pub fn waiting_for(&self) -> Vec<&'static str> {
        [
            (self.nodes.is_listed(), object::Node::NAME),
            (self.namespaces.is_listed(), Namespace::NAME),
            (self.pods.is_listed(), Pod::NAME),
            (self.services.is_listed(), LoadBalancer::NAME),
            (self.slices.is_listed(), EndpointSlice::NAME),
            (self.policies.is_listed(), NetworkPolicy::NAME),
        ]
        .into_iter()
        .filter_map(|(listed, kind)| (!listed).then_some(kind))
        .collect()
    }

    /// Everything that is wrong, refused objects included.
    #[must_use]
    pub fn faults(&self) -> Vec<ObjectFault> {
        let mut faults: Vec<ObjectFault> = self.faults.values().cloned().collect();
        fn refused<T: Kind>(cache: &Cache<T>) -> impl Iterator<Item = ObjectFault> + use<'_, T> {
            cache.refused().map(|(name, refused)| {
                let stays = match (refused.last_good, cache.object(name)) {
                    (true, _) => "; its last good version stays in force",
                    (false, Some(_)) => "; until it can be read, the Pods it selects are isolated",
                    (false, None) => "",
                };
                ObjectFault {
                    kind: T::NAME,
                    name: name.clone(),
                    reason: "Refused",
                    message: format!("{}{stays}", refused.reason),
                }
            })
        }
        faults.extend(refused(&self.nodes));
        faults.extend(refused(&self.namespaces));
        faults.extend(refused(&self.pods));
        faults.extend(refused(&self.services));
        faults.extend(refused(&self.slices));
        faults.extend(refused(&self.policies));
        faults.extend(refused(&self.service_cidrs));
        faults.sort();
        faults
    }

    /// Translates what was touched since the last call.
    #[must_use]
    pub fn delta(&mut self) -> Delta {
        let dirty = std::mem::take(&mut self.dirty);
        let mut delta = Delta::default();
        if !dirty.nodes.is_empty() {
            self.translate_nodes(&dirty.nodes, &mut delta);
        }
        for name in &dirty.policies {
            self.translate_policy(name, &mut delta);
        }
        self.translate_pods(&dirty.pods, &mut delta);
        for name in &dirty.services {
            self.translate_service(name, &mut delta);
        }
        delta
    }

    /// Which Pods a policy selects is a matter of the Pods that it selects or selected only.
    fn touch_policy(&mut self, name: &ObjectName, before: Option<&NetworkPolicy>) {
        self.dirty.policies.insert(name.clone());
        let now = self.policies.object(name).map(|p| &p.selector);
        let was = before.map(|p| &p.selector);
        if now == was {
            return;
        }
        let selects =
            |by: Option<&crate::LabelSelector>, pod: &Pod| by.is_some_and(|s| s.matches(&pod.labels));
        let pods = self.pods.of_namespace(&name.namespace);
        let turned = pods.filter(|(_, pod)| selects(now, pod) != selects(was, pod));
        self.dirty.pods.extend(turned.map(|(name, _)| name.clone()));
    }

    fn touch_nodes(&mut self) {
        let names = self.nodes.iter().map(|(name, _)| name.clone());
        self.dirty.nodes.extend(names);
    }

    fn touch_pods_of(&mut self, namespace: &str) {
        let names = self.pods.of_namespace(namespace).map(|(name, _)| name.clone());
        self.dirty.pods.extend(names);
    }

    fn fault(&mut self, kind: &'static str, name: &ObjectName, fault: Option<(&'static str, String)>) {
        let key = (kind, name.clone());
        match fault {
            None => drop(self.faults.remove(&key)),
            Some((reason, message)) => {
                drop(self.faults.insert(key, ObjectFault { kind, name: name.clone(), reason, message }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(n: usize) -> Arc<Labels> {
        Arc::new(Labels::from([("app".to_owned(), format!("a{n}"))]))
    }

    #[test]
    fn equal_labels_are_one_set_and_sets_that_nobody_has_go() {
        let mut common = Common::default();
        let (mut first, mut second, mut other) = (labels(1), labels(1), labels(2));
        for set in [&mut first, &mut second, &mut other] {
            common.labels(set);
        }
        assert!(Arc::ptr_eq(&first, &second) && !Arc::ptr_eq(&first, &other));
        for n in 0..1000 {
            common.labels(&mut labels(n));
        }
        assert!(common.labels.len() < 200, "{}", common.labels.len());
        let mut again = labels(2);
        common.labels(&mut again);
        assert!(Arc::ptr_eq(&again, &other));
    }
}
