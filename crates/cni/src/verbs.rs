//! What each verb does.

use std::collections::BTreeMap;
use std::io::Read;
use std::time::Duration;

use flowloom_api::v1::{
    CniAddRequest, CniAddResult, CniAttachment, CniCheckRequest, CniDelRequest, CniNetwork, ErrorCode,
};
use flowloom_api::{Client, ClientError};
use serde_json::{Value, json};

use crate::agent::ask;
use crate::config::{NetworkConfig, RawConfig, read_stdin};
use crate::environment::{Args, Attachment, Lookup, Verb};
use crate::error::{CniError, code};
use crate::loopback;
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
    /// DEL: the runtime repeats it.
    pub del: Duration,
    /// STATUS: one question.
    pub status: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            add: Duration::from_secs(60),
            check: Duration::from_secs(15),
            del: Duration::from_secs(15),
            status: Duration::from_secs(5),
        }
    }
}

/// What the process prints and how it exits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Goes to stdout.
    pub stdout: String,
    /// 0 or 1.
    pub exit_code: u8,
}

/// Serves one call of a runtime.
pub fn run(env: &dyn Lookup, stdin: &mut dyn Read, sandbox: &dyn Sandbox, limits: &Limits) -> Outcome {
    let mut version = Version::NEWEST;
    match serve(env, stdin, sandbox, limits, &mut version) {
        Ok(stdout) => Outcome { stdout, exit_code: 0 },
        Err(e) => Outcome { stdout: e.to_json(version), exit_code: 1 },
    }
}

fn serve(
    env: &dyn Lookup,
    stdin: &mut dyn Read,
    sandbox: &dyn Sandbox,
    limits: &Limits,
    version: &mut Version,
) -> Result<String, CniError> {
    let verb = Verb::from_environment(env)?;
    let bytes = read_stdin(stdin)?;
    if verb == Verb::Version {
        return supported_versions(&bytes);
    }
    let raw = RawConfig::decode(&bytes)?;
    *version = raw.version;
    let plugin = Plugin { raw: &raw, sandbox, limits };
    match verb {
        Verb::Status | Verb::Gc if !raw.version.has_status() => Err(CniError::new(
            code::INCOMPATIBLE_VERSION,
            format!("cniVersion {} has no {}: use 1.1.0", raw.version.as_str(), verb.as_str()),
        )),
        Verb::Gc => {
            Err(CniError::environment("CNI_COMMAND", "GC is not served by this version of the plugin"))
        }
        Verb::Status if raw.is_loopback() => Ok(String::new()),
        Verb::Status => plugin.status(),
        Verb::Add | Verb::Check | Verb::Del => {
            let attachment = Attachment::from_environment(env, verb)?;
            match (verb, raw.is_loopback()) {
                (_, true) => loopback::serve(verb, &raw, &attachment, sandbox),
                (Verb::Add, _) => plugin.add(attachment),
                (Verb::Check, _) => plugin.check(attachment),
                _ => plugin.del(attachment),
            }
        }
        Verb::Version => supported_versions(&bytes),
    }
}

/// The answer to VERSION is the same whatever the configuration says; the specification wants its `cniVersion` back.
fn supported_versions(bytes: &[u8]) -> Result<String, CniError> {
    let asked = if bytes.iter().all(u8::is_ascii_whitespace) {
        None
    } else {
        let value: Value = serde_json::from_slice(bytes).map_err(|e| {
            CniError::new(code::DECODE, "the input of VERSION is not JSON").with_details(e.to_string())
        })?;
        value.get("cniVersion").and_then(Value::as_str).map(str::to_owned)
    };
    let asked = asked.unwrap_or_else(|| Version::NEWEST.as_str().to_owned());
    Ok(json!({ "cniVersion": asked, "supportedVersions": Version::ALL.map(Version::as_str) }).to_string())
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

    /// The configuration is not judged: whatever is wrong with it, the container must go.
    fn del(&self, attachment: Attachment) -> Result<String, CniError> {
        let request = CniDelRequest {
            attachment: wire_attachment(&attachment),
            netns: attachment.netns.clone(),
            args: wire_args(&attachment.args),
        };
        ask(Verb::Del, self.raw.socket(), self.limits.del, |c| match c.cni_del(&request) {
            Err(ClientError::Api { error, .. }) if error.code == ErrorCode::NotFound => Ok(()),
            other => other.map(drop),
        })?;
        Ok(String::new())
    }

    fn status(&self) -> Result<String, CniError> {
        let config = NetworkConfig::check(self.raw)?;
        let not_available = |why: String| CniError::new(code::NOT_AVAILABLE, why);
        let status = Client::new(&config.socket)
            .with_timeout(self.limits.status)
            .cni_status()
            .map_err(|e| not_available(e.to_string()))?;
        if status.ready { Ok(String::new()) } else { Err(not_available(status.message)) }
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
