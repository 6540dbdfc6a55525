//! Kubernetes as a source beside the document: the core's copy of what it says, and how Pods and attachments become one endpoint.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_k8s::{
    Changes, Delta, LocalPod, ObjectFault, ObjectName, PodEvent, SourceStatus, Update, host_ports,
};
use flowloom_model::{
    Endpoint, EndpointKey, GroupName, Node, NodeName, SecurityGroup, Service, ServiceName, Subnet,
    SubnetName, VpcName, World,
};
use tokio::sync::mpsc;

use crate::conditions::Complaint;
use crate::core::{Core, Handle};
use crate::record::Record;

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
    /// Objects that a name of the document stands in the way of.
    pub(crate) hidden: Vec<Complaint>,
    /// Where events about Pods go.
    pub(crate) events: Option<mpsc::UnboundedSender<PodEvent>>,
    nodes: BTreeMap<NodeName, Node>,
    subnets: BTreeMap<(VpcName, SubnetName), Subnet>,
    endpoints: BTreeMap<EndpointKey, Arc<Endpoint>>,
    security_groups: BTreeMap<(VpcName, GroupName), SecurityGroup>,
    services: BTreeMap<(VpcName, ServiceName), Arc<Service>>,
    local_pods: BTreeMap<ObjectName, Arc<LocalPod>>,
    /// The last that was known of the Pod of an attachment: its object may go before its DEL comes.
    attached: BTreeMap<EndpointKey, Arc<LocalPod>>,
    node_addresses: Vec<IpAddr>,
    /// An attachment with ports of the node came or went.
    stale: bool,
    /// The cluster is about to remove this node.
    pub(crate) leaving: bool,
}

fn apply<K: Ord, V: PartialEq>(map: &mut BTreeMap<K, V>, changes: Changes<K, V>) -> bool {
    let mut changed = false;
    for (key, value) in changes {
        changed |= match value {
            None => map.remove(&key).is_some(),
            Some(value) if map.get(&key) == Some(&value) => false,
            Some(value) => {
                map.insert(key, value);
                true
            }
        };
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
    /// Takes over a change; returns whether anything is different.
    fn take(&mut self, update: Update) -> bool {
        let Delta { nodes, subnets, endpoints, security_groups, services, local_pods } = update.delta;
        let first = !self.listed;
        self.listed = true;
        self.faults = update.faults;
        self.leaving = update.own_node.is_some_and(|n| n.taints.iter().any(|(key, ..)| key == LEAVING));
        let moved = self.node_addresses != update.node_addresses;
        self.node_addresses = update.node_addresses;
        let local_pods = local_pods.into_iter().map(|(k, v)| (k, v.map(Arc::new))).collect();
        let changes = [
            first,
            moved,
            apply(&mut self.nodes, nodes),
            apply(&mut self.subnets, subnets),
            apply(&mut self.endpoints, endpoints),
            apply(&mut self.security_groups, security_groups),
            apply(&mut self.services, services),
            apply(&mut self.local_pods, local_pods),
        ];
        changes.contains(&true)
    }

    /// A Pod of this node by its runtime's words.
    pub(crate) fn local(&self, name: &ObjectName, uid: Option<&str>) -> Option<&Arc<LocalPod>> {
        self.local_pods.get(name).filter(|p| p.is(uid))
    }

    /// Adds everything to a world; what the document has already stays the document's.
    pub(crate) fn add_to(&mut self, world: &mut World) {
        self.hidden.clear();
        let hidden = &mut self.hidden;
        let mut hide = |kind: &str, name: String| {
            let message = format!("the document has a {kind} of this name, which stays: rename one of them");
            hidden.push(Complaint { kind: kind.into(), name, reason: "Hidden".into(), message });
        };
        for (key, node) in &self.nodes {
            match world.nodes.get(key) {
                Some(theirs) if theirs != node => hide("node", key.to_string()),
                Some(_) => {}
                None => drop(world.nodes.insert(key.clone(), node.clone())),
            }
        }
        macro_rules! add {
            ($field:ident, $kind:literal, $show:expr) => {
                for (key, value) in &self.$field {
                    if world.$field.contains_key(key) {
                        let show: fn(&_) -> String = $show;
                        hide($kind, show(key));
                    } else {
                        world.$field.insert(key.clone(), value.clone());
                    }
                }
            };
        }
        add!(subnets, "subnet", |(vpc, name): &(VpcName, SubnetName)| format!("{vpc}/{name}"));
        add!(endpoints, "endpoint", |key: &EndpointKey| key.to_string());
        add!(security_groups, "security_group", |(vpc, name): &(VpcName, GroupName)| format!("{vpc}/{name}"));
        add!(services, "service", |(vpc, name): &(VpcName, ServiceName)| format!("{vpc}/{name}"));
    }

    /// What is wrong, as conditions show it.
    pub(crate) fn complaints(&self) -> impl Iterator<Item = Complaint> {
        let of = |f: &ObjectFault| Complaint {
            kind: f.kind.to_owned(),
            name: f.name.to_string(),
            reason: f.reason.to_owned(),
            message: f.message.clone(),
        };
        self.faults.iter().map(of).chain(self.hidden.iter().cloned())
    }

    /// Labels and policies of the Pod join the attachment's own.
    fn join(&self, endpoint: &mut Endpoint, pod: &LocalPod) {
        endpoint.labels.extend(pod.labels.clone());
        endpoint.security_groups.extend(pod.security_groups.iter().cloned());
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
        let error = kinds.values().find_map(|k| k.error.as_deref());
        Some(error.map_or_else(|| "kubernetes".to_owned(), |e| format!("kubernetes: {e}")))
    }

    /// Takes what changed in Kubernetes and makes it so.
    pub(crate) fn kubernetes_changed(&mut self, updates: Vec<Update>) {
        let Some(kubernetes) = &mut self.kubernetes else { return };
        let mut changed = false;
        for update in updates {
            changed |= kubernetes.take(update);
        }
        if changed && self.sources_spoke() {
            self.rebuild_world();
            self.pass();
        } else {
            self.publish();
        }
    }

    /// An attachment as an endpoint of the world, joined with its Pod.
    pub(crate) fn endpoint_of(&self, record: &Record) -> Option<Endpoint> {
        let mut endpoint = record.endpoint(&self.config.node)?;
        if let Some(kubernetes) = &self.kubernetes {
            let known = record.pod().and_then(|(name, uid)| kubernetes.local(&name, uid));
            if let Some(pod) = known.or_else(|| kubernetes.attached.get(&record.key)) {
                kubernetes.join(&mut endpoint, pod);
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
        if self.kubernetes.as_mut().is_some_and(|k| std::mem::take(&mut k.stale)) && self.sources_spoke() {
            self.rebuild_world();
            self.pass();
        }
    }

    /// Kubernetes' part of the world, and what attachments bring along.
    pub(crate) fn add_kubernetes(&mut self, world: &mut World) {
        let Some(kubernetes) = &mut self.kubernetes else { return };
        kubernetes.follow(&self.records);
        kubernetes.add_to(world);
        for (key, pod) in &kubernetes.attached {
            let Some(own) = self.records.get(key).and_then(|r| r.cni.as_ref()?.endpoint.as_ref()) else {
                continue;
            };
            let made = host_ports(&key.vpc, &self.config.node, &kubernetes.node_addresses, pod, &own.ips);
            if let Some(service) = made {
                world.services.entry((service.vpc.clone(), service.name.clone())).or_insert(service.into());
            }
        }
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

    /// Tells the Pod's owner that its network could not be made.
    pub(crate) fn pod_event(&self, args: &BTreeMap<String, String>, error: &ApiError) {
        let Some(events) = self.kubernetes.as_ref().and_then(|k| k.events.as_ref()) else { return };
        let Some((pod, Some(uid))) = pod_of(args) else { return };
        // Without the task nobody sends events; then there is no API server either.
        let _ = events.send(PodEvent {
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
            faults: kubernetes.complaints().map(fault).collect(),
            local_pods: kubernetes.local_pods.len() as u64,
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
