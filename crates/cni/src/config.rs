//! The network configuration on stdin.

use std::collections::BTreeMap;
use std::io::Read;

use flowloom_api::v1::{CniAttachment, CniRuntime, MAX_VALID_ATTACHMENTS};
use serde_json::{Map, Value};

use crate::environment::is_identifier;
use crate::error::{CniError, code};
use crate::version::Version;
use crate::{queue, runtime};

/// Most bytes read from stdin.
pub const MAX_STDIN: u64 = 1 << 20;

/// Where the agent listens when the configuration does not say.
pub const DEFAULT_SOCKET: &str = "/run/flowloom/agent.sock";

/// Reads stdin, at most [`MAX_STDIN`] bytes.
///
/// # Errors
/// Code 5 when reading fails, code 6 when there is more.
pub fn read_stdin(input: &mut dyn Read) -> Result<Vec<u8>, CniError> {
    let mut bytes = Vec::new();
    input
        .take(MAX_STDIN + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| CniError::new(code::IO, format!("reading the network configuration from stdin: {e}")))?;
    if bytes.len() as u64 > MAX_STDIN {
        return Err(CniError::new(
            code::DECODE,
            format!("the network configuration is larger than {MAX_STDIN} bytes"),
        ));
    }
    Ok(bytes)
}

/// A configuration's JSON and version: what every verb needs before it may complain in the right version.
#[derive(Debug, Clone)]
pub struct RawConfig {
    /// The version answers are written in.
    pub version: Version,
    fields: Map<String, Value>,
}

impl RawConfig {
    /// Decodes.
    ///
    /// # Errors
    /// Code 6 when it is not a JSON object or `cniVersion` is not text, code 1 when the version is not supported.
    pub fn decode(bytes: &[u8]) -> Result<Self, CniError> {
        let fields: Map<String, Value> = serde_json::from_slice(bytes).map_err(|e| {
            CniError::new(code::DECODE, "the network configuration is not a JSON object")
                .with_details(e.to_string())
        })?;
        let loopback = is_loopback(&fields);
        let version = match fields.get("cniVersion") {
            Some(Value::String(text)) => Version::parse(text, loopback)?,
            Some(other) => {
                return Err(CniError::new(code::DECODE, format!("cniVersion must be a string, not {other}")));
            }
            // Configurations without the key are from before 0.4.0 (specification 0.1.0).
            None => Version::parse("0.1.0", loopback)?,
        };
        Ok(Self { version, fields })
    }

    /// Whether the plugin is called as `loopback`.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        is_loopback(&self.fields)
    }

    /// The agent's socket; wrong values count as absent (DEL asks this before it may judge the configuration).
    #[must_use]
    pub fn socket(&self) -> &str {
        self.fields
            .get("socket")
            .and_then(Value::as_str)
            .filter(|s| s.starts_with('/'))
            .unwrap_or(DEFAULT_SOCKET)
    }

    /// The agent's queue; wrong values count as absent, as in [`Self::socket`].
    #[must_use]
    pub fn queue(&self) -> &str {
        self.fields
            .get("queue")
            .and_then(Value::as_str)
            .filter(|s| s.starts_with('/'))
            .unwrap_or(queue::DEFAULT)
    }

    /// The attachments that GC must keep; `None` when the runtime gave no list. (The specification's examples named the second key for a while.)
    ///
    /// # Errors
    /// Code 7 when it is not a list of attachments, or a list longer than any node's.
    pub fn valid_attachments(&self) -> Result<Option<Vec<CniAttachment>>, CniError> {
        let given = |key: &&str| self.fields.get(*key).is_some_and(|v| !v.is_null());
        let Some(key) = ["cni.dev/valid-attachments", "cni.dev/attachments"].into_iter().find(given) else {
            return Ok(None);
        };
        let list =
            self.fields[key].as_array().filter(|l| l.len() <= MAX_VALID_ATTACHMENTS).ok_or_else(|| {
                CniError::config(format!(
                    "{key}: is not a list of at most {MAX_VALID_ATTACHMENTS} attachments"
                ))
            })?;
        let read = |item: &Value| {
            let field = |name: &str| item[name].as_str().filter(|s| !s.is_empty()).map(str::to_owned);
            Some(CniAttachment { container_id: field("containerID")?, ifname: field("ifname")? })
        };
        let mut valid = Vec::with_capacity(list.len());
        for (i, item) in list.iter().enumerate() {
            valid.push(read(item).ok_or_else(|| {
                CniError::config(format!(
                    "{key}[{i}]: {item} has no containerID and ifname; nothing is removed"
                ))
            })?);
        }
        Ok(Some(valid))
    }

    /// `prevResult`, when there is one.
    #[must_use]
    pub fn prev_result(&self) -> Option<&Value> {
        self.fields.get("prevResult").filter(|v| !v.is_null())
    }
}

fn is_loopback(fields: &Map<String, Value>) -> bool {
    fields.get("type").and_then(Value::as_str) == Some("loopback")
}

/// A checked configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkConfig {
    /// `name`.
    pub name: String,
    /// `vpc`; the default VPC when absent.
    pub vpc: Option<String>,
    /// `subnet`; chosen by the agent when absent.
    pub subnet: Option<String>,
    /// `security_groups`.
    pub security_groups: Vec<String>,
    /// `labels`.
    pub labels: BTreeMap<String, String>,
    /// `socket`.
    pub socket: String,
    /// `queue`.
    pub queue: String,
    /// `dns`, handed through to the result.
    pub dns: Value,
    /// `runtimeConfig`.
    pub runtime: CniRuntime,
}

/// Keys of the specification that carry nothing this plugin must act on.
const PASSED_OVER: &[&str] = &["cniVersion", "type", "args", "prevResult"];

impl NetworkConfig {
    /// Checks every key. Keys the specification does not define and this plugin does not know are refused, except below `args` and under `cni.dev/`:
    /// a misspelt `security_groups` must not attach an open workload.
    ///
    /// # Errors
    /// Code 2 for a key that is not supported, code 7 for a wrong value.
    pub fn check(raw: &RawConfig) -> Result<Self, CniError> {
        let mut config = Self {
            name: String::new(),
            vpc: None,
            subnet: None,
            security_groups: Vec::new(),
            labels: BTreeMap::new(),
            socket: DEFAULT_SOCKET.to_owned(),
            queue: queue::DEFAULT.to_owned(),
            runtime: CniRuntime::default(),
            dns: Value::Object(Map::new()),
        };
        for (key, value) in &raw.fields {
            match key.as_str() {
                "name" => config.name = text(key, value)?,
                "vpc" => config.vpc = Some(text(key, value)?),
                "subnet" => config.subnet = Some(text(key, value)?),
                "security_groups" => config.security_groups = text_list(key, value)?,
                "labels" => config.labels = text_map(key, value)?,
                "socket" => config.socket = path(key, value)?,
                "queue" => config.queue = path(key, value)?,
                "dns" if value.is_object() => config.dns = value.clone(),
                "dns" => return Err(CniError::config(format!("dns: {value} is not an object"))),
                "ipam" if value.get("type").is_some_and(|t| t.as_str() != Some("")) => {
                    return Err(CniError::unsupported(
                        key,
                        value,
                        "the agent allocates addresses; remove it",
                    ));
                }
                "ipMasq" if *value != Value::Bool(false) => {
                    return Err(CniError::unsupported(
                        key,
                        value,
                        "masquerade is set in the agent's configuration",
                    ));
                }
                "runtimeConfig" => config.runtime = runtime::read(value)?,
                "capabilities" => runtime::check_capabilities(value)?,
                "ipam" | "ipMasq" => {}
                known if PASSED_OVER.contains(&known) => {}
                reserved if reserved.starts_with("cni.dev/") => {}
                _ => {
                    return Err(CniError::unsupported(
                        key,
                        value,
                        "known keys are vpc, subnet, security_groups, labels, socket, queue",
                    ));
                }
            }
        }
        if config.name.is_empty() {
            return Err(CniError::config("name: is required"));
        }
        if !is_identifier(&config.name) {
            return Err(CniError::config(format!(
                "name: {:?} must start with a letter or digit and hold only letters, digits, '_', '.', '-'",
                config.name
            )));
        }
        Ok(config)
    }
}

fn text(key: &str, value: &Value) -> Result<String, CniError> {
    match value.as_str() {
        Some(s) if !s.is_empty() => Ok(s.to_owned()),
        _ => Err(CniError::config(format!("{key}: {value} is not a non-empty string"))),
    }
}

fn path(key: &str, value: &Value) -> Result<String, CniError> {
    let path = text(key, value)?;
    if path.starts_with('/') {
        Ok(path)
    } else {
        Err(CniError::config(format!("{key}: {value} is not an absolute path")))
    }
}

fn text_list(key: &str, value: &Value) -> Result<Vec<String>, CniError> {
    let list = value
        .as_array()
        .ok_or_else(|| CniError::config(format!("{key}: {value} is not a list of strings")))?;
    let mut out = Vec::with_capacity(list.len());
    for (i, item) in list.iter().enumerate() {
        let item = text(&format!("{key}[{i}]"), item)?;
        if !out.contains(&item) {
            out.push(item);
        }
    }
    Ok(out)
}

fn text_map(key: &str, value: &Value) -> Result<BTreeMap<String, String>, CniError> {
    let map = value
        .as_object()
        .ok_or_else(|| CniError::config(format!("{key}: {value} is not an object of strings")))?;
    map.iter()
        .map(|(k, v)| match v.as_str() {
            Some(s) if !k.is_empty() => Ok((k.clone(), s.to_owned())),
            _ => Err(CniError::config(format!("{key}.{k}: {v} is not a string"))),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Result<NetworkConfig, CniError> {
        NetworkConfig::check(&RawConfig::decode(text.as_bytes())?)
    }

    #[test]
    fn every_key() {
        let c = check(
            r#"{"cniVersion":"1.0.0","name":"net","type":"flowloom-cni","vpc":"blue","subnet":"web",
                "security_groups":["a","b","a"],"labels":{"app":"x"},"socket":"/run/x.sock","dns":{"nameservers":["10.0.0.53"]},
                "queue":"/q","args":{"anything":[1]},"cni.dev/attachments":[],"ipMasq":false,"ipam":{},
                "capabilities":{"portMappings":true},"runtimeConfig":{"portMappings":[{"hostPort":1,"containerPort":2}]}}"#,
        )
        .unwrap();
        assert_eq!(c.vpc.as_deref(), Some("blue"));
        assert_eq!(c.subnet.as_deref(), Some("web"));
        assert_eq!(c.security_groups, ["a", "b"]);
        assert_eq!(c.labels["app"], "x");
        assert_eq!((c.socket.as_str(), c.queue.as_str()), ("/run/x.sock", "/q"));
        assert_eq!(c.runtime.port_mappings.len(), 1);
        assert_eq!(c.dns["nameservers"][0], "10.0.0.53");
    }

    #[test]
    fn refusals_name_key_and_value() {
        for (body, code, needle) in [
            (r#""security_group":["a"]"#, 2, r#""security_group" with value ["a"]"#),
            (r#""ipam":{"type":"host-local"}"#, 2, "host-local"),
            (r#""ipMasq":true"#, 2, "ipMasq"),
            (r#""runtimeConfig":{"bandwidth":{"ingressRate":1}}"#, 2, "bandwidth"),
            (r#""capabilities":{"bandwidth":true}"#, 2, "bandwidth"),
            (r#""queue":"x""#, 7, "queue"),
            (r#""vpc":7"#, 7, "vpc: 7"),
            (r#""vpc":"""#, 7, "vpc"),
            (r#""security_groups":"a""#, 7, "security_groups"),
            (r#""security_groups":[""]"#, 7, "security_groups[0]"),
            (r#""labels":{"a":1}"#, 7, "labels.a: 1"),
            (r#""socket":"x.sock""#, 7, "socket"),
            (r#""dns":[]"#, 7, "dns"),
        ] {
            let e =
                check(&format!(r#"{{"cniVersion":"1.0.0","name":"net","type":"t",{body}}}"#)).unwrap_err();
            assert_eq!(e.code, code, "{body}");
            assert!(e.message.contains(needle), "{} lacks {needle}", e.message);
        }
        assert_eq!(check(r#"{"cniVersion":"1.0.0"}"#).unwrap_err().code, 7);
        assert_eq!(check(r#"{"cniVersion":"1.0.0","name":"-"}"#).unwrap_err().code, 7);
    }

    fn valid(body: &str) -> Result<Option<Vec<CniAttachment>>, CniError> {
        RawConfig::decode(format!(r#"{{"cniVersion":"1.1.0","name":"n"{body}}}"#).as_bytes())?
            .valid_attachments()
    }

    // A list that is not there is no empty list: taken for one, it removed everything (field report 11).
    #[test]
    fn no_list_of_valid_attachments_is_not_an_empty_one() {
        assert_eq!(valid("").unwrap(), None);
        assert_eq!(valid(r#","cni.dev/valid-attachments":null"#).unwrap(), None);
        assert_eq!(valid(r#","cni.dev/valid-attachments":[]"#).unwrap(), Some(vec![]));
        let one = CniAttachment { container_id: "c".into(), ifname: "eth0".into() };
        for key in ["cni.dev/valid-attachments", "cni.dev/attachments"] {
            let body = format!(r#","{key}":[{{"containerID":"c","ifname":"eth0","more":1}}]"#);
            assert_eq!(valid(&body).unwrap(), Some(vec![one.clone()]));
        }
        for bad in [
            r#"{}"#,
            r#"["c"]"#,
            r#"[{"containerID":"c"}]"#,
            r#"[{"containerID":"","ifname":"eth0"}]"#,
            r#""x""#,
        ] {
            assert_eq!(
                valid(&format!(r#","cni.dev/valid-attachments":{bad}"#)).unwrap_err().code,
                7,
                "{bad}"
            );
        }
        let long = vec![r#"{"containerID":"c","ifname":"e"}"#; MAX_VALID_ATTACHMENTS + 1].join(",");
        assert_eq!(valid(&format!(r#","cni.dev/valid-attachments":[{long}]"#)).unwrap_err().code, 7);
    }

    #[test]
    fn versions_and_decoding() {
        let loopback = r#"{"cniVersion":"0.3.1","name":"n","type":"loopback"}"#;
        assert_eq!(RawConfig::decode(loopback.as_bytes()).unwrap().version, Version::V0_3_1);
        for (text, code) in [
            (r#"{"cniVersion":"0.3.1","name":"n"}"#, 1),
            (r#"{"cniVersion":"1.2.0","name":"n"}"#, 1),
            (r#"{"name":"n"}"#, 1),
            (r#"{"cniVersion":1,"name":"n"}"#, 6),
            ("[]", 6),
            ("", 6),
            ("{", 6),
        ] {
            assert_eq!(RawConfig::decode(text.as_bytes()).unwrap_err().code, code, "{text}");
        }
    }

    #[test]
    fn stdin_is_bounded() {
        let mut endless = std::io::repeat(b' ');
        assert_eq!(read_stdin(&mut endless).unwrap_err().code, code::DECODE);
        let mut exactly = std::io::repeat(b' ').take(MAX_STDIN);
        assert_eq!(read_stdin(&mut exactly).unwrap().len() as u64, MAX_STDIN);
    }
}
