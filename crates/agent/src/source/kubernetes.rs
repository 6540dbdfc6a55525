//! Kubernetes as a source beside the document: the core's copy of what it says, and how Pods and attachments become one endpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_k8s::{
    Changes, Delta, LocalPod, ObjectFault, ObjectName, PodEvent, SourceStatus, Update, host_ports,
};
use flowloom_model::{
    Endpoint, EndpointKey, GroupName, Node, NodeName, SecurityGroup, Service, ServiceName, SharedMap, Subnet,
    SubnetName, VpcName, World,
};
use tokio::sync::mpsc;

use crate::conditions::Complaint;
use crate::core::{Core, Handle};
use crate::record::{CniRecord, Record, labels};

/// Taint of a node that is going to be removed: what balances load from outside is to leave it alone.
const LEAVING: &str = "ToBeDeletedByClusterAutoscaler";

/// What Kubernetes says, as parts of the world.
#[derive(Debug, Default)]
pub(crate) struct KubernetesWorld {
    /// Every kind's first list is in.
    pub(crate) listed: bool,
    /// Address of the API server.
    pub(crate) server: String,
    /// How the watches stand.
    pub(crate) status: SourceStatus,
    /// What is wrong with which object.
    pub(crate) faults: Vec<ObjectFault>,
    /// Where events about Pods go.
    pub(crate) events: Option<mpsc::Sender<PodEvent>>,
    nodes: SharedMap<NodeName, Node>,
    subnets: SharedMap<(VpcName, SubnetName), Subnet>,
    endpoints: SharedMap<EndpointKey, Arc<Endpoint>>,
    security_groups: SharedMap<(VpcName, GroupName), SecurityGroup>,
    services: Services,
    local_pods: BTreeMap<ObjectName, Arc<LocalPod>>,
    /// The last that was known of the Pod of an attachment: its object may go before its DEL comes.
    attached: BTreeMap<EndpointKey, Arc<LocalPod>>,
    /// Services that stand for their ports of this node.
    hosted: Services,
    node_addresses: Vec<IpAddr>,
    /// An attachment with ports of the node came or went.
    stale: bool,
    /// When the updates that are not in force yet began to be heard.
    heard: Option<Instant>,
    updates: u64,
    applied_us: u64,
    /// The cluster is about to remove this node.
    pub(crate) leaving: bool,
}

type Services = SharedMap<(VpcName, ServiceName), Arc<Service>>;

/// What is different after an update.
#[derive(Debug, Default)]
struct Touched {
    /// Something that everything depends on.
    frame: bool,
    endpoints: BTreeSet<EndpointKey>,
    security_groups: bool,
    services: bool,
    local_pods: BTreeSet<ObjectName>,
}

impl Touched {
    fn is_empty(&self) -> bool {
        !(self.frame || self.security_groups || self.services)
            && self.endpoints.is_empty()
            && self.local_pods.is_empty()
    }
}

/// Returns the keys whose values are different now.
fn apply<K: Ord + Clone, V: PartialEq + Clone>(map: &mut SharedMap<K, V>, changes: Changes<K, V>) -> Vec<K> {
    let mut changed = Vec::new();
    for (key, value) in changes {
        match value {
            None => {
                if map.remove(&key).is_none() {
                    continue;
                }
            }
            Some(value) if map.get(&key) == Some(&value) => continue,
            Some(value) => drop(map.insert(key.clone(), value)),
        }
        changed.push(key);
    }
    changed
}

/// The Pod that an attachment is for, as its runtime named it.
fn pod_of(args: &BTreeMap<String, String>) -> Option<(ObjectName, Option<&str>)> {
    let text = |key: &str| args.get(key).map(String::as_str).filter(|v| !v.is_empty());
    let name = ObjectName::new(text("K8S_POD_NAMESPACE")?, text("K8S_POD_NAME")?);
    Some((name, text("K8S_POD_UID")))
}

impl KubernetesWorld {
    /// Takes over a change.
    fn take(&mut self, update: Update, touched: &mut Touched) {
        let Delta { nodes, subnets, endpoints, security_groups, services, local_pods } = update.delta;
        self.heard.get_or_insert(update.heard);
        touched.frame |= !self.listed || self.node_addresses != update.node_addresses;
        self.listed = true;
        self.faults = update.faults;
        self.leaving = update.own_node.is_some_and(|n| n.taints.iter().any(|(key, ..)| key == LEAVING));
        self.node_addresses = update.node_addresses;
        touched.frame |= !apply(&mut self.nodes, nodes).is_empty();
        touched.frame |= !apply(&mut self.subnets, subnets).is_empty();
        touched.endpoints.extend(apply(&mut self.endpoints, endpoints));
        touched.security_groups |= !apply(&mut self.security_groups, security_groups).is_empty();
        touched.services |= !apply(&mut self.services, services).is_empty();
        for (name, pod) in local_pods {
            if self.local_pods.get(&name).map(Arc::as_ref) == pod.as_ref() {
                continue;
            }
            match pod {
                Some(pod) => drop(self.local_pods.insert(name.clone(), Arc::new(pod))),
                None => drop(self.local_pods.remove(&name)),
            }
            touched.local_pods.insert(name);
        }
    }

    /// A Pod of this node by its runtime's words.
    pub(crate) fn local(&self, name: &ObjectName, uid: Option<&str>) -> Option<&Arc<LocalPod>> {
        self.local_pods.get(name).filter(|p| p.is(uid))
    }

    /// Adds everything to a document's world; what the document has already stays the document's.
    fn add_to(&self, world: &mut World) {
        world.nodes = world.nodes.over(&self.nodes);
        world.subnets = world.subnets.over(&self.subnets);
        world.endpoints = world.endpoints.over(&self.endpoints);
        world.security_groups = world.security_groups.over(&self.security_groups);
        world.services = self.services_with(&world.services);
    }

    fn services_with(&self, of_document: &Services) -> Services {
        of_document.over(&self.services).over(&self.hosted)
    }

    /// Objects that a name of the document stands in the way of.
    fn hidden(&self, world: &World) -> Vec<Complaint> {
        let mut hidden = Vec::new();
        let mut hide = |kind: &str, name: String| {
            let message = format!("the document has a {kind} of this name, which stays: rename one of them");
            hidden.push(Complaint { kind: kind.into(), name, reason: "Hidden".into(), message });
        };
        for (key, theirs) in &world.nodes {
            if self.nodes.get(key).is_some_and(|own| own != theirs) {
                hide("node", key.to_string());
            }
        }
        macro_rules! both_have {
            ($field:ident, $kind:literal, $show:expr) => {
                for key in world.$field.keys().filter(|key| self.$field.contains_key(*key)) {
                    let show: fn(&_) -> String = $show;
                    hide($kind, show(key));
                }
            };
        }
        both_have!(subnets, "subnet", |(vpc, name): &(VpcName, SubnetName)| format!("{vpc}/{name}"));
        both_have!(endpoints, "endpoint", |key: &EndpointKey| key.to_string());
        both_have!(security_groups, "security_group", |(vpc, name): &(VpcName, GroupName)| format!(
            "{vpc}/{name}"
        ));
        both_have!(services, "service", |(vpc, name): &(VpcName, ServiceName)| format!("{vpc}/{name}"));
        hidden
    }

    /// What was heard is in force.
    pub(crate) fn applied(&mut self) {
        if let Some(heard) = self.heard.take() {
            self.updates += 1;
            self.applied_us = u64::try_from(heard.elapsed().as_micros()).unwrap_or(u64::MAX);
        }
    }

    /// What is wrong, as conditions show it; `document` is what the document says by itself.
    pub(crate) fn complaints(&self, document: Option<&World>) -> impl Iterator<Item = Complaint> {
        let of = |f: &ObjectFault| Complaint {
            kind: f.kind.to_owned(),
            name: f.name.to_string(),
            reason: f.reason.to_owned(),
            message: f.message.clone(),
        };
        let hidden = document.map(|world| self.hidden(world)).unwrap_or_default();
        self.faults.iter().map(of).chain(hidden)
    }

    /// Labels and policies of the Pod join what the attachment's network gives it. What the record kept of the Pod at its ADD is for a
    /// time in which nothing else is known of it.
    fn join(&self, endpoint: &mut Endpoint, cni: &CniRecord, pod: &LocalPod) {
        endpoint.labels = labels(&cni.network, &cni.args);
        endpoint.labels.extend(pod.labels.clone());
        // Checked when they were asked for.
        let of_network = cni.network.security_groups.iter().filter_map(|name| name.parse().ok());
        endpoint.security_groups = of_network.chain(pod.security_groups.iter().cloned()).collect();
        endpoint.named_ports.clone_from(&pod.named_ports);
    }

    /// Follows the attachments: a Pod's newest object, or the last there was.
    fn follow(&mut self, records: &BTreeMap<EndpointKey, Record>) {
        self.attached.retain(|key, _| records.contains_key(key));
        for record in records.values() {
            let Some((name, uid)) = record.pod() else { continue };
            if let Some(pod) = self.local(&name, uid).cloned() {
                self.attached.insert(record.key.clone(), pod);
            }
        }
    }

    /// The services that stand for attachments' ports of this node; returns whether they are different now.
    fn host(&mut self, records: &BTreeMap<EndpointKey, Record>, node: &NodeName) -> bool {
        let mut hosted = Services::new();
        for (key, pod) in self.attached.iter().filter(|(_, pod)| !pod.host_ports.is_empty()) {
            let own = records.get(key).and_then(|r| r.cni.as_ref()?.endpoint.as_ref());
            let made = own.and_then(|own| host_ports(&key.vpc, node, &self.node_addresses, pod, &own.ips));
            if let Some(service) = made {
                hosted.or_insert_with((service.vpc.clone(), service.name.clone()), || service.into());
            }
        }
        let changed = hosted != self.hosted;
        if changed {
            self.hosted = hosted;
        }
        changed
    }
}

impl Record {
    /// The Pod whose network this is: the one of the default VPC, that is.
    pub(crate) fn pod(&self) -> Option<(ObjectName, Option<&str>)> {
        let cni = self.cni.as_ref().filter(|c| c.endpoint.is_some() && self.key.vpc.is_default())?;
        pod_of(&cni.args)
    }
}

impl Core {
    /// Names the tasks that fill what Kubernetes says.
    pub(crate) fn watch_kubernetes(&mut self, started: super::cluster::Started) {
        if let Some(kubernetes) = &mut self.kubernetes {
            kubernetes.status = started.status;
            kubernetes.events = Some(started.events);
        }
    }

    /// Whether every source has spoken.
    pub(crate) fn sources_spoke(&self) -> bool {
        self.document.is_some() && self.kubernetes.as_ref().is_none_or(|k| k.listed)
    }

    /// The sources that have not, for people.
    pub(crate) fn silent_kubernetes(&self) -> Option<String> {
        let kubernetes = self.kubernetes.as_ref().filter(|k| !k.listed)?;
        let kinds = kubernetes.status.kinds();
        let error = kinds.values().filter(|k| !k.optional).find_map(|k| k.error.as_deref());
        Some(error.map_or_else(|| "kubernetes".to_owned(), |e| format!("kubernetes: {e}")))
    }

    /// Takes what changed in Kubernetes and makes it so.
    pub(crate) fn kubernetes_changed(&mut self, updates: Vec<Update>) {
        let Some(kubernetes) = &mut self.kubernetes else { return };
        let mut touched = Touched::default();
        for update in updates {
            kubernetes.take(update, &mut touched);
        }
        if !self.sources_spoke() {
            self.publish();
            return;
        }
        if touched.is_empty() {
            if let Some(kubernetes) = &mut self.kubernetes {
                kubernetes.applied();
            }
            self.publish();
            return;
        }
        self.history.source = v1::ChangeSource::Kubernetes;
        match self.follow_kubernetes(touched) {
            Some(endpoints) => self.pass_over(Some(&endpoints)),
            None => {
                self.rebuild_world();
                self.pass();
            }
        }
    }

    /// The world follows what Kubernetes says now, where no more than this is different. Returns the endpoints that may be; `None`: it
    /// has to be put together anew.
    fn follow_kubernetes(&mut self, mut touched: Touched) -> Option<BTreeSet<EndpointKey>> {
        let document = &self.document.as_ref()?.world;
        let kubernetes = self.kubernetes.as_mut()?;
        let serves = |e: &Arc<Endpoint>| self.ipam.serves(&e.vpc, &e.subnet);
        let pooled = |key: &EndpointKey| {
            let known = [self.world.endpoints.get(key), kubernetes.endpoints.get(key)];
            known.into_iter().flatten().any(serves)
        };
        // An endpoint of another node in a subnet that this one allocates from: the pools follow, too.
        if touched.frame || touched.endpoints.iter().any(pooled) {
            return None;
        }
        if !touched.local_pods.is_empty() {
            kubernetes.follow(&self.records);
            touched.services |= kubernetes.host(&self.records, &self.config.node);
            let concerned = |r: &&Record| r.pod().is_some_and(|(name, _)| touched.local_pods.contains(&name));
            touched.endpoints.extend(self.records.values().filter(concerned).map(|r| r.key.clone()));
        }
        if touched.security_groups {
            self.world.security_groups = document.security_groups.over(&kubernetes.security_groups);
        }
        if touched.services {
            self.world.services = kubernetes.services_with(&document.services);
        }
        self.follow_endpoints(&touched.endpoints);
        Some(touched.endpoints)
    }

    /// Endpoints of the world follow the sources: the document first, then Kubernetes, then attachments.
    fn follow_endpoints(&mut self, keys: &BTreeSet<EndpointKey>) {
        for key in keys {
            let of_document = self.document.as_ref().and_then(|d| d.world.endpoints.get(key));
            let of_kubernetes = || self.kubernetes.as_ref().and_then(|k| k.endpoints.get(key));
            let said = of_document.or_else(of_kubernetes).cloned();
            let attachment = self.records.get(key).filter(|r| !self.leaving.contains(&r.key));
            match said.or_else(|| self.endpoint_of(attachment?).map(Arc::new)) {
                None => drop(self.world.endpoints.remove(key)),
                Some(now) if self.world.endpoints.get(key) == Some(&now) => {}
                Some(now) => drop(self.world.endpoints.insert(key.clone(), now)),
            }
        }
    }

    /// An attachment as an endpoint of the world, joined with its Pod.
    pub(crate) fn endpoint_of(&self, record: &Record) -> Option<Endpoint> {
        let mut endpoint = record.endpoint(&self.config.node)?;
        if let Some(kubernetes) = &self.kubernetes {
            let known = record.pod().and_then(|(name, uid)| kubernetes.local(&name, uid));
            let pod = known.or_else(|| kubernetes.attached.get(&record.key));
            if let Some((pod, cni)) = pod.zip(record.cni.as_ref()) {
                kubernetes.join(&mut endpoint, cni, pod);
            }
        }
        Some(endpoint)
    }

    /// Ports of the node come and go with their Pod's attachment.
    pub(crate) fn host_ports_follow(&mut self, record: &Record) {
        let Some(kubernetes) = &mut self.kubernetes else { return };
        let Some((name, uid)) = record.pod() else { return };
        let known = kubernetes.local(&name, uid).or_else(|| kubernetes.attached.get(&record.key));
        kubernetes.stale |= known.is_some_and(|pod| !pod.host_ports.is_empty());
    }

    /// The world follows what attachments changed of it beside their endpoints.
    pub(crate) fn refresh_stale(&mut self) {
        if !self.kubernetes.as_mut().is_some_and(|k| std::mem::take(&mut k.stale)) || !self.sources_spoke() {
            return;
        }
        let (Some(kubernetes), Some(document)) = (&mut self.kubernetes, &self.document) else { return };
        kubernetes.follow(&self.records);
        if kubernetes.host(&self.records, &self.config.node) {
            self.world.services = kubernetes.services_with(&document.world.services);
            self.pass_over(Some(&BTreeSet::new()));
        }
    }

    /// Kubernetes' part of the world, and what attachments bring along.
    pub(crate) fn add_kubernetes(&mut self, world: &mut World) {
        let Some(kubernetes) = &mut self.kubernetes else { return };
        kubernetes.follow(&self.records);
        kubernetes.host(&self.records, &self.config.node);
        kubernetes.add_to(world);
    }

    /// What an ADD needs to know of its Pod.
    ///
    /// # Errors
    /// [`ErrorCode::NotReady`] while the Pod's object has not come.
    pub(crate) fn pod_for(
        &self,
        vpc: &VpcName,
        args: &BTreeMap<String, String>,
    ) -> Result<Option<Arc<LocalPod>>, ApiError> {
        let Some(kubernetes) = self.kubernetes.as_ref().filter(|_| vpc.is_default()) else { return Ok(None) };
        let Some((name, uid)) = pod_of(args) else { return Ok(None) };
        if let Some(pod) = kubernetes.local(&name, uid) {
            return Ok(Some(pod.clone()));
        }
        let what = match kubernetes.local_pods.get(&name) {
            Some(other) => format!("the API server still shows another life of it (uid {})", other.uid),
            None => "the API server has not shown it on this node yet".to_owned(),
        };
        let uid = uid.map(|u| format!(" (uid {u})")).unwrap_or_default();
        Err(ApiError::new(ErrorCode::NotReady, format!("pod {name}{uid}: {what}")))
    }

    /// Why an ADD gets no address, with what is wrong with this node's own object: a pod CIDR that is refused gives none.
    pub(crate) fn with_own_fault(&self, vpc: &VpcName, error: ApiError) -> ApiError {
        let concerns = vpc.is_default() && error.code == ErrorCode::InvalidRequest;
        let own = |f: &&ObjectFault| {
            f.kind == <flowloom_k8s::Node as flowloom_k8s::Kind>::NAME
                && f.name.name == self.config.node.as_str()
        };
        match self.kubernetes.as_ref().filter(|_| concerns).and_then(|k| k.faults.iter().find(own)) {
            Some(fault) => ApiError::new(error.code, format!("{fault}; {}", error.message)),
            None => error,
        }
    }

    /// Tells the Pod's owner that its network could not be made.
    pub(crate) fn pod_event(&self, args: &BTreeMap<String, String>, error: &ApiError) {
        let Some(events) = self.kubernetes.as_ref().and_then(|k| k.events.as_ref()) else { return };
        let Some((pod, Some(uid))) = pod_of(args) else { return };
        // Without the task nobody sends events; then there is no API server either. One that is slow keeps no heap of them here.
        let _ = events.try_send(PodEvent {
            pod,
            uid: uid.to_owned(),
            reason: "NetworkNotReady".to_owned(),
            message: error.message.clone(),
        });
    }

    /// For `flowloom k8s status`.
    pub(crate) fn kubernetes_status(&self) -> v1::KubernetesStatus {
        let Some(kubernetes) = &self.kubernetes else { return v1::KubernetesStatus::default() };
        let ms = |at: Option<std::time::SystemTime>| {
            let since = at.and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
            since.map(|d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
        };
        let kinds = kubernetes.status.kinds().into_iter().map(|(kind, s)| v1::KubernetesKind {
            kind: kind.to_owned(),
            listed: s.listed,
            objects: s.objects as u64,
            refused: s.refused as u64,
            heard_ms: ms(s.heard),
            changed_ms: ms(s.changed),
            lists: s.lists,
            failures: s.failures,
            error: s.error.unwrap_or_default(),
            optional: s.optional,
        });
        let fault = |c: Complaint| v1::KubernetesFault {
            kind: c.kind,
            name: c.name,
            reason: c.reason,
            message: c.message,
        };
        v1::KubernetesStatus {
            enabled: true,
            server: kubernetes.server.clone(),
            synced: kubernetes.listed,
            kinds: kinds.collect(),
            faults: kubernetes.complaints(self.document.as_ref().map(|d| &d.world)).map(fault).collect(),
            local_pods: kubernetes.local_pods.len() as u64,
            updates: kubernetes.updates,
            applied_us: kubernetes.applied_us,
        }
    }
}

/// Waits until the Pod of a request is known. Other requests need not wait.
///
/// # Errors
/// [`ErrorCode::NotReady`] when it has not come in time: the kubelet tries again.
pub(crate) async fn await_pod(core: &Handle, request: &v1::CniAddRequest) -> Result<(), ApiError> {
    if pod_of(&request.args).is_none() || request.args.get("FLOWLOOM_ENDPOINT").is_some_and(|v| !v.is_empty())
    {
        return Ok(());
    }
    let Ok(vpc) = VpcName::new(request.network.vpc.as_deref().unwrap_or(flowloom_model::DEFAULT_VPC)) else {
        return Ok(());
    };
    let (start, mut passes) = (Instant::now(), core.passes());
    loop {
        passes.borrow_and_update();
        let (vpc, args) = (vpc.clone(), request.args.clone());
        let (known, limit) = core
            .ask(move |core| {
                (core.pod_for(&vpc, &args), Duration::from_secs(core.config.kubernetes.pod_wait_seconds))
            })
            .await?;
        let Err(e) = known else { return Ok(()) };
        let left = limit.saturating_sub(start.elapsed());
        match tokio::time::timeout(left, passes.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(ApiError::new(ErrorCode::NotReady, "the agent is going down")),
            Err(_) => {
                let message = format!("{}; waited {} ms", e.message, limit.as_millis());
                return Err(ApiError::new(e.code, message));
            }
        }
    }
}
