//! What each verb does.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use flowloom_api::v1::{
    CniAddRequest, CniAddResult, CniAttachment, CniCheckRequest, CniDelRequest, CniGcRequest, CniNetwork,
    CniStatusRequest, ErrorCode, Moment,
};
use flowloom_api::{Client, ClientError};
use serde_json::{Value, json};

use crate::agent::{Patience, ask};
use crate::clock;
use crate::config::{NetworkConfig, RawConfig, read_stdin};
use crate::environment::{Args, Attachment, Lookup, Verb};
use crate::error::{CniError, code};
use crate::loopback;
use crate::queue::{self, Entry};
use crate::result::{AddResult, Interface, IpConfig, Route};
use crate::sandbox::Sandbox;
use crate::version::Version;

/// How long each verb keeps asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// ADD: outlasts an agent that starts; runtimes give two minutes and more.
    pub add: Duration,
    /// CHECK.
    pub check: Duration,
    /// DEL, once an agent serves it, or when it cannot be queued.
    pub del: Duration,
    /// DEL, while no agent serves: outlasts one that restarts; then the queue takes it.
    pub del_absent: Duration,
    /// GC.
    pub gc: Duration,
    /// STATUS: one question.
    pub status: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            add: Duration::from_secs(60),
            check: Duration::from_secs(15),
            del: Duration::from_secs(15),
            del_absent: Duration::from_secs(1),
            gc: Duration::from_secs(60),
            status: Duration::from_secs(5),
        }
    }
}

/// What the process prints and how it exits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Goes to stdout.
    pub stdout: String,
    /// Goes to stderr: for the runtime's log, not for the runtime.
    pub note: String,
    /// 0 or 1.
    pub exit_code: u8,
}

/// Serves one call of a runtime. `program` is the path it was called by: as `loopback` it is the loopback plugin.
pub fn run(
    program: &str,
    env: &dyn Lookup,
    stdin: &mut dyn Read,
    sandbox: &dyn Sandbox,
    limits: &Limits,
) -> Outcome {
    let mut said = Said { version: Version::NEWEST, note: String::new() };
    let (stdout, exit_code) = match serve(program, env, stdin, sandbox, limits, &mut said) {
        Ok(stdout) => (stdout, 0),
        Err(e) => (e.to_json(said.version), 1),
    };
    Outcome { stdout, note: said.note, exit_code }
}

/// What is known beside the answer.
struct Said {
    /// Version the answer is in.
    version: Version,
    /// For the log.
    note: String,
}

fn serve(
    program: &str,
    env: &dyn Lookup,
    stdin: &mut dyn Read,
    sandbox: &dyn Sandbox,
    limits: &Limits,
    said: &mut Said,
) -> Result<String, CniError> {
    let started = clock::now();
    let verb = Verb::from_environment(env)?;
    let bytes = read_stdin(stdin)?;
    if verb == Verb::Version {
        return supported_versions(program, &bytes);
    }
    let raw = RawConfig::decode(&bytes)?;
    said.version = raw.version;
    let started = started.map_err(|e| CniError::new(code::IO, e.to_string()));
    let plugin = Plugin { raw: &raw, sandbox, limits };
    match verb {
        Verb::Check if !raw.version.has_check() => Err(CniError::new(
            code::INCOMPATIBLE_VERSION,
            format!("cniVersion {} has no CHECK: use 0.4.0 or newer", raw.version.as_str()),
        )),
        Verb::Status | Verb::Gc if !raw.version.has_status() => Err(CniError::new(
            code::INCOMPATIBLE_VERSION,
            format!("cniVersion {} has no {}: use 1.1.0", raw.version.as_str(), verb.as_str()),
        )),
        // It owns nothing outside the containers.
        Verb::Status | Verb::Gc if raw.is_loopback() => Ok(String::new()),
        Verb::Gc => plugin.gc(started?, &mut said.note),
        Verb::Status => plugin.status(),
        Verb::Add | Verb::Check | Verb::Del => {
            let attachment = Attachment::from_environment(env, verb)?;
            match (verb, raw.is_loopback()) {
                (_, true) => loopback::serve(verb, &raw, &attachment, sandbox),
                (Verb::Add, _) => plugin.add(attachment),
                (Verb::Check, _) => plugin.check(attachment),
                _ => plugin.del(attachment, started, &mut said.note),
            }
        }
        Verb::Version => supported_versions(program, &bytes),
    }
}

/// The answer to VERSION is the same whatever the configuration says; the specification wants its `cniVersion` back.
fn supported_versions(program: &str, bytes: &[u8]) -> Result<String, CniError> {
    let loopback = Path::new(program).file_name().is_some_and(|name| name == "loopback");
    let versions: &[Version] = if loopback { &Version::LOOPBACK } else { &Version::ALL };
    let versions: Vec<&str> = versions.iter().map(|v| v.as_str()).collect();
    let asked = if bytes.iter().all(u8::is_ascii_whitespace) {
        None
    } else {
        let value: Value = serde_json::from_slice(bytes).map_err(|e| {
            CniError::new(code::DECODE, "the input of VERSION is not JSON").with_details(e.to_string())
        })?;
        value.get("cniVersion").and_then(Value::as_str).map(str::to_owned)
    };
    let asked = asked.unwrap_or_else(|| Version::NEWEST.as_str().to_owned());
    Ok(json!({ "cniVersion": asked, "supportedVersions": versions }).to_string())
}

struct Plugin<'a> {
    raw: &'a RawConfig,
    sandbox: &'a dyn Sandbox,
    limits: &'a Limits,
}

impl Plugin<'_> {
    fn add(&self, attachment: Attachment) -> Result<String, CniError> {
        let config = NetworkConfig::check(self.raw)?;
        if let Some(prev) = self.raw.prev_result() {
            return Err(CniError::unsupported(
                "prevResult",
                prev,
                "this plugin makes the interface and must be the first of its list",
            ));
        }
        let request = CniAddRequest {
            attachment: wire_attachment(&attachment),
            // Checked above for every verb but DEL.
            netns: attachment.netns.clone().unwrap_or_default(),
            network: wire_network(&config),
            args: wire_args(&attachment.args),
            runtime: config.runtime.clone(),
        };
        let made = ask(Verb::Add, &config.socket, self.limits.add, |c| c.cni_add(&request))?;
        Ok(to_result(made, config.dns).to_json(self.raw.version))
    }

    fn check(&self, attachment: Attachment) -> Result<String, CniError> {
        let config = NetworkConfig::check(self.raw)?;
        let prev =
            self.raw.prev_result().ok_or_else(|| CniError::config("prevResult: is required by CHECK"))?;
        let prev = AddResult::from_prev(prev)?;
        let netns = attachment.netns.clone().unwrap_or_default();
        let index = prev.interface(&attachment.ifname, &netns).ok_or_else(|| {
            CniError::new(
                code::CHECK_FAILED,
                format!("prevResult has no interface {:?} in {netns:?}", attachment.ifname),
            )
        })?;
        // Addresses without an interface belong to the only one that this plugin makes in the container.
        let addresses: Vec<String> = prev
            .ips
            .iter()
            .filter(|ip| ip.interface.is_none_or(|i| i == index))
            .map(|ip| ip.address.clone())
            .collect();
        let request = CniCheckRequest {
            attachment: wire_attachment(&attachment),
            netns: netns.clone(),
            network: wire_network(&config),
            addresses: addresses.clone(),
        };
        let checked = ask(Verb::Check, &config.socket, self.limits.check, |c| c.cni_check(&request))?;
        let label = format!("endpoint {} (interface {} in {netns})", checked.endpoint, attachment.ifname);
        let differs = |what: String| CniError::new(code::CHECK_FAILED, format!("{label}: {what}"));
        let found = self
            .sandbox
            .interface(&netns, &attachment.ifname)?
            .ok_or_else(|| differs("the interface is gone".to_owned()))?;
        if !found.up {
            return Err(differs("the interface is down".to_owned()));
        }
        let expected = &prev.interfaces[index].mac;
        if !expected.is_empty() && !expected.eq_ignore_ascii_case(&found.mac) {
            return Err(differs(format!("its MAC is {}, ADD gave it {expected}", found.mac)));
        }
        let missing: Vec<_> = addresses
            .iter()
            .filter(|a| !found.addresses.iter().any(|f| same_address(f, a)))
            .cloned()
            .collect();
        if missing.is_empty() {
            Ok(String::new())
        } else {
            Err(differs(format!("it lacks {}", missing.join(", "))))
        }
    }

    /// The configuration is not judged: whatever is wrong with it, the container must go. While no agent serves, the queue takes the request.
    fn del(
        &self,
        attachment: Attachment,
        started: Result<Moment, CniError>,
        note: &mut String,
    ) -> Result<String, CniError> {
        let request = CniDelRequest {
            attachment: wire_attachment(&attachment),
            netns: attachment.netns.clone(),
            args: wire_args(&attachment.args),
        };
        let ask_for = |patience: Patience| {
            ask(Verb::Del, self.raw.socket(), patience, |c| match c.cni_del(&request) {
                Err(ClientError::Api { error, .. }) if error.code == ErrorCode::NotFound => Ok(()),
                other => other.map(drop),
            })
        };
        let (absent, whole) = (self.limits.del_absent.min(self.limits.del), self.limits.del);
        let error = match ask_for(Patience { absent, whole }) {
            Err(e) if e.code == code::TRY_LATER => e,
            other => return other.map(|()| String::new()),
        };
        let directory = Path::new(self.raw.queue());
        let queued = started.map_err(|e| e.to_string()).and_then(|started| {
            queue::put(directory, &Entry { request: request.clone(), started }).map_err(|e| e.to_string())
        });
        match queued {
            Ok(()) => {
                *note = format!("{error}; DEL of {} waits in {}", request.attachment, directory.display());
                Ok(String::new())
            }
            Err(not_queued) => {
                let rest = whole.saturating_sub(absent);
                ask_for(rest.into()).map_err(|e| e.with_details(not_queued)).map(|()| String::new())
            }
        }
    }

    fn gc(&self, started: Moment, note: &mut String) -> Result<String, CniError> {
        let config = NetworkConfig::check(self.raw)?;
        let Some(valid) = self.raw.valid_attachments()? else {
            "no cni.dev/valid-attachments were given: nothing is known to be stale, nothing is removed"
                .clone_into(note);
            return Ok(String::new());
        };
        let request = CniGcRequest { network: config.name.clone(), valid, started };
        let done = ask(Verb::Gc, &config.socket, self.limits.gc, |c| c.cni_gc(&request))?;
        if !done.removed.is_empty() || !done.spared.is_empty() {
            *note = format!("removed: {}; spared: {}", done.removed.join(", "), done.spared.join(", "));
        }
        if done.errors.is_empty() {
            return Ok(String::new());
        }
        let message = format!("{} attachments are stale and could not be removed", done.errors.len());
        Err(CniError::new(code::REFUSED, message).with_details(done.errors.join("; ")))
    }

    fn status(&self) -> Result<String, CniError> {
        let config = NetworkConfig::check(self.raw)?;
        let request = CniStatusRequest { network: wire_network(&config) };
        let status = Client::new(&config.socket)
            .with_timeout(self.limits.status)
            .cni_status(&request)
            // Programs and maps stay when the agent goes: existing containers keep their connectivity.
            .map_err(|e| CniError::new(code::NOT_AVAILABLE, e.to_string()))?;
        match (status.ready, status.limited) {
            (true, _) => Ok(String::new()),
            (false, false) => Err(CniError::new(code::NOT_AVAILABLE, status.message)),
            (false, true) => Err(CniError::new(code::NOT_AVAILABLE_LIMITED, status.message)),
        }
    }
}

fn wire_attachment(a: &Attachment) -> CniAttachment {
    CniAttachment { container_id: a.container_id.clone(), ifname: a.ifname.clone() }
}

fn wire_network(c: &NetworkConfig) -> CniNetwork {
    CniNetwork {
        name: c.name.clone(),
        vpc: c.vpc.clone(),
        subnet: c.subnet.clone(),
        security_groups: c.security_groups.clone(),
        labels: c.labels.clone(),
    }
}

fn wire_args(args: &Args) -> BTreeMap<String, String> {
    [
        ("FLOWLOOM_ENDPOINT", &args.endpoint),
        ("K8S_POD_NAMESPACE", &args.pod_namespace),
        ("K8S_POD_NAME", &args.pod_name),
        ("K8S_POD_UID", &args.pod_uid),
    ]
    .into_iter()
    .filter_map(|(k, v)| Some((k.to_owned(), v.clone()?)))
    .collect()
}

fn to_result(made: CniAddResult, dns: Value) -> AddResult {
    AddResult {
        interfaces: made
            .interfaces
            .into_iter()
            .map(|i| Interface {
                mtu: (!i.sandbox.is_empty()).then_some(made.mtu),
                name: i.name,
                mac: i.mac,
                sandbox: i.sandbox,
            })
            .collect(),
        ips: made
            .ips
            .into_iter()
            .map(|ip| IpConfig {
                address: ip.address,
                gateway: ip.gateway.map(|g| g.to_string()),
                interface: Some(ip.interface as usize),
            })
            .collect(),
        routes: made
            .routes
            .into_iter()
            .map(|r| Route { dst: r.dst, gw: r.gw.map(|g| g.to_string()), mtu: None })
            .collect(),
        dns,
    }
}

/// Compares as addresses, never as text.
fn same_address(a: &str, b: &str) -> bool {
    let parse = |s: &str| {
        let (ip, len) = s.split_once('/')?;
        Some((ip.parse::<std::net::IpAddr>().ok()?, len.parse::<u8>().ok()?))
    };
    parse(a).is_some_and(|a| Some(a) == parse(b))
}
