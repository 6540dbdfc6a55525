//! What a CNI request means: which endpoint, which addresses; CHECK; what is answered.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use flowloom_api::v1::{self, ApiError, CniAttachment, CniNetwork, ErrorCode};
use flowloom_compiler::EndpointPlan;
use flowloom_model::{
    Attachment, DEFAULT_VPC, Endpoint, EndpointKey, EndpointName, GroupName, Mac, SubnetName, VpcName,
};
use ipnet::IpNet;

use crate::core::Core;
use crate::record::{CniRecord, OwnEndpoint, Record, device_name, endpoint_name, labels};
use crate::wiring::{Wire, WireSpec};

/// Timings kept.
const TIMINGS: usize = 256;

pub(crate) fn error(code: ErrorCode, message: impl Into<String>) -> ApiError {
    ApiError::new(code, message)
}

/// Microseconds per stage.
pub(crate) struct Stages {
    start: Instant,
    last: Instant,
    list: Vec<(String, u64)>,
}

impl Stages {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self { start: now, last: now, list: Vec::with_capacity(8) }
    }

    pub(crate) fn done(&mut self, stage: &str) {
        let now = Instant::now();
        self.list.push((stage.to_owned(), micros(now - self.last)));
        self.last = now;
    }
}

fn micros(d: std::time::Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(u64::MAX)
}

impl Core {
    pub(crate) fn require_document(&self) -> Result<(), ApiError> {
        if self.applied_generation > 0 {
            return Ok(());
        }
        let why =
            if self.document_error.is_empty() { "no document is in force yet" } else { &self.document_error };
        Err(error(ErrorCode::NotReady, format!("the node is not ready: {why}")))
    }

    pub(crate) fn attached_as(&self, attachment: &CniAttachment) -> Option<&Record> {
        self.records.values().find(|r| r.cni.as_ref().is_some_and(|c| c.attachment == *attachment))
    }

    pub(crate) fn time(&mut self, command: &str, attachment: &impl ToString, ok: bool, stages: &Stages) {
        while self.timings.len() >= TIMINGS {
            self.timings.pop_front();
        }
        self.timings.push_back(v1::CniTiming {
            command: command.to_owned(),
            attachment: attachment.to_string(),
            ok,
            total_us: micros(stages.start.elapsed()),
            stages: stages.list.clone(),
        });
    }

    /// The attachment exists: the same request gets the same answer, after making sure that it is still so.
    pub(crate) fn add_again(
        &mut self,
        record: &Record,
        request: &v1::CniAddRequest,
    ) -> Result<v1::CniAddResult, ApiError> {
        let Some(cni) = &record.cni else {
            return Err(error(ErrorCode::Internal, "an attachment without itself"));
        };
        if cni.netns != request.netns
            || cni.network != request.network
            || cni.args != request.args
            || cni.runtime != request.runtime
        {
            let message = format!(
                "{} is attached as endpoint {} already, with another namespace, network, arguments or runtime configuration; DEL it first",
                request.attachment, record.key
            );
            return Err(error(ErrorCode::AttachmentConflict, message));
        }
        if !self.attached.contains_key(&record.key) || !self.plan.endpoints.contains_key(&record.key) {
            self.pass();
        }
        match self.plan.endpoints.get(&record.key).cloned() {
            Some(plan) if self.attached.contains_key(&record.key) => Ok(self.result(record, &plan)),
            _ => Err(error(ErrorCode::Realise, self.why_not(&record.key))),
        }
    }

    pub(crate) fn why_not(&self, key: &EndpointKey) -> String {
        if let Some(e) = self.wiring_errors.get(key) {
            return format!("endpoint {key}: {e}");
        }
        let about = |c: &&flowloom_compiler::Condition| matches!(&c.object, flowloom_compiler::ObjectRef::Endpoint { endpoint } if endpoint == key);
        match self.compiled.iter().find(about) {
            Some(c) => format!("endpoint {key}: {}", c.message),
            None => format!("endpoint {key} is not in force: {}", self.last.errors.join("; ")),
        }
    }

    /// Decides what the endpoint is and takes its addresses. Only memory changes.
    pub(crate) fn reserve(&mut self, request: &v1::CniAddRequest) -> Result<Record, ApiError> {
        let network = &request.network;
        let vpc = self.vpc_of(network)?;
        self.check_ports(request)?;
        let (key, own) = match request.args.get("FLOWLOOM_ENDPOINT").filter(|v| !v.is_empty()) {
            Some(name) => (self.bind(&vpc, name, &request.runtime)?, None),
            None => self.own(&vpc, request)?,
        };
        let record = Record {
            wire: Wire::Netns {
                device: device_name(&key),
                netns: PathBuf::from(&request.netns),
                interface: request.attachment.ifname.clone(),
            },
            key: key.clone(),
            cni: Some(CniRecord {
                attachment: request.attachment.clone(),
                netns: request.netns.clone(),
                network: network.clone(),
                args: request.args.clone(),
                runtime: request.runtime.clone(),
                added: flowloom_cni::clock::now().ok(),
                endpoint: own,
            }),
        };
        self.host_ports_follow(&record);
        if let Some(endpoint) = self.endpoint_of(&record) {
            self.world.endpoints.insert(key.clone(), endpoint.into());
        }
        self.records.insert(key, record.clone());
        Ok(record)
    }

    /// An endpoint of the document that waits for a CNI request.
    fn bind(&self, vpc: &VpcName, name: &str, runtime: &v1::CniRuntime) -> Result<EndpointKey, ApiError> {
        let name: EndpointName =
            name.parse().map_err(|e| error(ErrorCode::InvalidRequest, format!("FLOWLOOM_ENDPOINT: {e}")))?;
        let key = EndpointKey { vpc: vpc.clone(), name };
        let Some(endpoint) = self.world.endpoints.get(&key) else {
            return Err(error(ErrorCode::NotFound, format!("endpoint {key} does not exist in the document")));
        };
        if endpoint.node != self.config.node {
            let message =
                format!("endpoint {key} belongs to node {}, this is {}", endpoint.node, self.config.node);
            return Err(error(ErrorCode::Conflict, message));
        }
        if endpoint.attachment != Attachment::Cni {
            let message = format!("endpoint {key} is wired by the document; give it `cni: true` to bind it");
            return Err(error(ErrorCode::Conflict, message));
        }
        if !runtime.ips.is_empty() || runtime.mac.is_some() {
            let message = format!("endpoint {key} has its addresses from the document: ask for none");
            return Err(error(ErrorCode::Conflict, message));
        }
        if let Some(other) = self.records.get(&key).and_then(|r| r.cni.as_ref()) {
            return Err(error(ErrorCode::InUse, format!("endpoint {key} is bound to {}", other.attachment)));
        }
        Ok(key)
    }

    /// An endpoint of this request's making.
    fn own(
        &mut self,
        vpc: &VpcName,
        request: &v1::CniAddRequest,
    ) -> Result<(EndpointKey, Option<OwnEndpoint>), ApiError> {
        let network = &request.network;
        let mut groups = self.groups_of(vpc, network)?;
        let pod = self.pod_for(vpc, &request.args)?;
        let wanted = subnet_of(network)?;
        let mac = self.mac_of(vpc, request)?;
        let taken = |name: &EndpointName| {
            self.world.endpoints.contains_key(&EndpointKey { vpc: vpc.clone(), name: name.clone() })
        };
        let name = endpoint_name(&request.attachment, &request.args, taken).ok_or_else(|| {
            error(ErrorCode::InUse, "another endpoint has the name that this attachment would get")
        })?;
        let (asked, now) = (&request.runtime.ips, Self::now());
        let acquired = self.ipam.acquire(vpc, wanted.as_ref(), asked, &request.attachment, now);
        let (subnet, ips) = acquired.map_err(|e| self.with_own_fault(vpc, e))?;
        let mut labels = labels(network, &request.args);
        if let Some(pod) = pod {
            // For a life of the agent that begins after the Pod's object went.
            groups.extend(pod.security_groups.iter().cloned());
            labels.extend(pod.labels.clone());
        }
        let own = OwnEndpoint { subnet, ips, mac, security_groups: groups, labels };
        Ok((EndpointKey { vpc: vpc.clone(), name }, Some(own)))
    }

    /// The MAC that the runtime asks for.
    fn mac_of(&self, vpc: &VpcName, request: &v1::CniAddRequest) -> Result<Option<Mac>, ApiError> {
        let Some(text) = &request.runtime.mac else { return Ok(None) };
        let mac: Mac = text.parse().map_err(|e| error(ErrorCode::InvalidRequest, format!("mac: {e}")))?;
        let has_it = |e: &&Arc<Endpoint>| e.vpc == *vpc && e.effective_mac() == Some(mac);
        if mac == Mac::GATEWAY || mac.0[0] & 1 != 0 {
            return Err(error(ErrorCode::InvalidRequest, format!("mac: {mac} is no workload's to have")));
        }
        match self.world.endpoints.values().find(has_it) {
            Some(other) => {
                Err(error(ErrorCode::InUse, format!("mac {mac} belongs to endpoint {}", other.key())))
            }
            None => Ok(Some(mac)),
        }
    }

    /// Host ports are taken when they are served, and by one attachment each.
    fn check_ports(&self, request: &v1::CniAddRequest) -> Result<(), ApiError> {
        let asked = &request.runtime.port_mappings;
        if asked.is_empty() {
            return Ok(());
        }
        if !self.config.cni.port_mappings {
            let message = "host ports are not served on this node: set cni.port_mappings in the agent's configuration, or remove the capability portMappings from the network's";
            return Err(error(ErrorCode::InvalidRequest, message));
        }
        for (record, cni) in self.records.values().filter_map(|r| Some((r, r.cni.as_ref()?))) {
            let meets = |a: &v1::CniPortMapping| cni.runtime.port_mappings.iter().any(|b| collide(a, b));
            if let Some(port) = asked.iter().find(|a| meets(a)) {
                let message = format!("host port {} belongs to endpoint {}", port.host_port, record.key);
                return Err(error(ErrorCode::InUse, message));
            }
        }
        Ok(())
    }

    pub(crate) fn result(&self, record: &Record, plan: &EndpointPlan) -> v1::CniAddResult {
        let spec: WireSpec = self.wire_spec(plan, record.wire.clone());
        let device = self.attached.get(&record.key);
        let (sandbox, ifname) = record
            .wire
            .inside()
            .map_or((String::new(), ""), |(path, name)| (path.display().to_string(), name));
        let same_family = |a: &IpAddr, b: &IpAddr| a.is_ipv4() == b.is_ipv4();
        v1::CniAddResult {
            endpoint: record.key.to_string(),
            interfaces: vec![
                v1::CniInterface {
                    name: record.wire.device().to_owned(),
                    mac: device.map(|d| d.mac.to_string()).unwrap_or_default(),
                    sandbox: String::new(),
                },
                v1::CniInterface { name: ifname.to_owned(), mac: spec.mac.to_string(), sandbox },
            ],
            ips: spec
                .addresses
                .iter()
                .map(|net| v1::CniIp {
                    address: net.to_string(),
                    gateway: spec.gateways.iter().find(|g| same_family(g, &net.addr())).copied(),
                    interface: 1,
                })
                .collect(),
            routes: spec
                .gateways
                .iter()
                .map(|g| v1::CniRoute {
                    dst: if g.is_ipv4() { "0.0.0.0/0".into() } else { "::/0".into() },
                    gw: Some(*g),
                })
                .collect(),
            mtu: spec.mtu,
            revision: plan.revision,
        }
    }

    /// Compares what is there with what ADD made.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`] for what was never attached, [`ErrorCode::CheckFailed`] with the first difference.
    pub(crate) fn cni_check(&mut self, request: &v1::CniCheckRequest) -> Result<v1::CniChecked, ApiError> {
        self.require_document()?;
        let failed = |message: String| error(ErrorCode::CheckFailed, message);
        let Some(record) = self.attached_as(&request.attachment).cloned() else {
            return Err(error(ErrorCode::NotFound, format!("{} is not attached", request.attachment)));
        };
        if record.cni.as_ref().is_some_and(|c| c.netns != request.netns) {
            return Err(failed(format!("{} is attached in another namespace", request.attachment)));
        }
        let Some(plan) = self.plan.endpoints.get(&record.key).cloned() else {
            return Err(failed(self.why_not(&record.key)));
        };
        let spec = self.wire_spec(&plan, record.wire.clone());
        for text in &request.addresses {
            let net: IpNet = text
                .parse()
                .map_err(|_| error(ErrorCode::InvalidRequest, format!("{text:?} is not an address")))?;
            if !spec.addresses.iter().any(|a| a.addr() == net.addr()) {
                return Err(failed(format!("endpoint {} does not have address {net}", record.key)));
            }
        }
        self.wiring.check(&spec).map_err(|e| failed(format!("endpoint {}: {e}", record.key)))?;
        Ok(v1::CniChecked { endpoint: record.key.to_string() })
    }

    /// Whether an ADD that names this network can be served.
    pub(crate) fn cni_status(&self, network: &CniNetwork) -> v1::CniStatus {
        let judged = self.require_document().and_then(|()| self.grantable(network));
        match judged {
            Ok(available_addresses) => {
                v1::CniStatus { ready: true, message: String::new(), limited: false, available_addresses }
            }
            Err(e) => v1::CniStatus {
                ready: false,
                message: e.message,
                limited: self.is_limited(),
                available_addresses: 0,
            },
        }
    }

    /// A document is there and could not be put in force: what an earlier life left there may be less than what is wanted.
    fn is_limited(&self) -> bool {
        self.applied_generation == 0
            && self.document.is_some()
            && self.records.values().any(|r| r.cni.is_some())
            && !self.last.errors.is_empty()
    }

    /// Addresses that the network's next ADD may get; never 0.
    fn grantable(&self, network: &CniNetwork) -> Result<u64, ApiError> {
        let vpc = self.vpc_of(network)?;
        self.groups_of(&vpc, network)?;
        let subnet = subnet_of(network)?;
        match self.ipam.grantable(&vpc, subnet.as_ref()) {
            Ok(0) => {
                let which = subnet
                    .map_or_else(|| format!("every subnet of vpc {vpc}"), |s| format!("subnet {vpc}/{s}"));
                Err(error(
                    ErrorCode::AddressesExhausted,
                    format!("no address is free on this node: {which} is full"),
                ))
            }
            // Endpoints of the document bring their addresses.
            Err(_)
                if self.world.endpoints.values().any(|e| {
                    e.vpc == vpc && e.node == self.config.node && e.attachment == Attachment::Cni
                }) =>
            {
                Ok(1)
            }
            other => other,
        }
    }

    fn vpc_of(&self, network: &CniNetwork) -> Result<VpcName, ApiError> {
        let text = network.vpc.as_deref().unwrap_or(DEFAULT_VPC);
        let vpc: VpcName = text.parse().map_err(|e| error(ErrorCode::InvalidRequest, format!("vpc: {e}")))?;
        if self.world.vpcs.contains_key(&vpc) {
            return Ok(vpc);
        }
        Err(error(ErrorCode::NotFound, format!("vpc {vpc} does not exist in the document")))
    }

    fn groups_of(&self, vpc: &VpcName, network: &CniNetwork) -> Result<Vec<GroupName>, ApiError> {
        let mut groups = Vec::new();
        for group in &network.security_groups {
            let name: GroupName = group
                .parse()
                .map_err(|e| error(ErrorCode::InvalidRequest, format!("security_groups: {e}")))?;
            if !self.world.security_groups.contains_key(&(vpc.clone(), name.clone())) {
                let message = format!("security group {vpc}/{name} does not exist");
                return Err(error(ErrorCode::NotFound, message));
            }
            groups.push(name);
        }
        Ok(groups)
    }

    /// Everything about the requests of runtimes.
    pub(crate) fn cni_report(&self) -> v1::CniReport {
        let status = self.cni_status(&CniNetwork::default());
        let (adding, verbs) = self.desk.report();
        v1::CniReport {
            ready: status.ready,
            message: status.message,
            attachments: self.records.values().filter(|r| r.cni.is_some()).count() as u64,
            adding,
            verbs,
            queue: self.replays.report(),
            conflist: self.keeper.report(),
        }
    }

    pub(crate) fn cni_timings(&self) -> v1::CniTimings {
        v1::CniTimings { requests: self.timings.iter().cloned().collect() }
    }
}

fn subnet_of(network: &CniNetwork) -> Result<Option<SubnetName>, ApiError> {
    let parsed = network.subnet.as_ref().map(|s| s.parse()).transpose();
    parsed.map_err(|e| error(ErrorCode::InvalidRequest, format!("subnet: {e}")))
}

/// Whether two host ports are one. No address, and an unspecified one, mean every address (of the family).
fn collide(a: &v1::CniPortMapping, b: &v1::CniPortMapping) -> bool {
    let addresses = match (a.host_ip, b.host_ip) {
        (Some(a), Some(b)) => {
            a == b || a.is_ipv4() == b.is_ipv4() && (a.is_unspecified() || b.is_unspecified())
        }
        _ => true,
    };
    a.host_port == b.host_port && a.protocol == b.protocol && addresses
}

pub(crate) fn check_request(request: &v1::CniAddRequest) -> Result<(), ApiError> {
    let invalid = |message: &str| Err(error(ErrorCode::InvalidRequest, message));
    if request.attachment.container_id.is_empty() || request.attachment.container_id.len() > 256 {
        return invalid("container_id: 1..256 bytes are needed");
    }
    if flowloom_netlink::LinkName::new(request.attachment.ifname.clone()).is_err() {
        return invalid("ifname is not a name for a link");
    }
    if !request.netns.starts_with('/') {
        return invalid("netns is not an absolute path");
    }
    Ok(())
}
