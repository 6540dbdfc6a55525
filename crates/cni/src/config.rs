//! The network configuration on stdin.

use std::collections::BTreeMap;
use std::io::Read;

use serde_json::{Map, Value};

use crate::environment::is_identifier;
use crate::error::{CniError, code};
use crate::version::Version;

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
        let version = match fields.get("cniVersion") {
            Some(Value::String(text)) => Version::parse(text)?,
            Some(other) => {
                return Err(CniError::new(code::DECODE, format!("cniVersion must be a string, not {other}")));
            }
            // Configurations without the key are from before 0.4.0 (specification 0.1.0).
            None => Version::parse("0.1.0")?,
        };
        Ok(Self { version, fields })
    }

    /// Whether the plugin is called as `loopback`.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        self.fields.get("type").and_then(Value::as_str) == Some("loopback")
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

    /// `prevResult`, when there is one.
    #[must_use]
    pub fn prev_result(&self) -> Option<&Value> {
        self.fields.get("prevResult").filter(|v| !v.is_null())
    }
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
    /// `dns`, handed through to the result.
    pub dns: Value,
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
            dns: Value::Object(Map::new()),
        };
        for (key, value) in &raw.fields {
            match key.as_str() {
                "name" => config.name = text(key, value)?,
                "vpc" => config.vpc = Some(text(key, value)?),
                "subnet" => config.subnet = Some(text(key, value)?),
                "security_groups" => config.security_groups = text_list(key, value)?,
                "labels" => config.labels = text_map(key, value)?,
                "socket" => {
                    config.socket = text(key, value)?;
                    if !config.socket.starts_with('/') {
                        return Err(CniError::config(format!("socket: {value} is not an absolute path")));
                    }
                }
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
                "runtimeConfig" | "capabilities" if !is_empty(value) => {
                    return Err(CniError::unsupported(key, value, "no capability is supported yet"));
                }
                "ipam" | "ipMasq" | "runtimeConfig" | "capabilities" => {}
                known if PASSED_OVER.contains(&known) => {}
                reserved if reserved.starts_with("cni.dev/") => {}
                _ => {
                    return Err(CniError::unsupported(
                        key,
                        value,
                        "known keys are vpc, subnet, security_groups, labels, socket",
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

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Object(map) => map.values().all(|v| matches!(v, Value::Null | Value::Bool(false))),
        _ => false,
    }
}

fn text(key: &str, value: &Value) -> Result<String, CniError> {
    match value.as_str() {
        Some(s) if !s.is_empty() => Ok(s.to_owned()),
        _ => Err(CniError::config(format!("{key}: {value} is not a non-empty string"))),
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
                "args":{"anything":[1]},"cni.dev/attachments":[],"ipMasq":false,"ipam":{},"runtimeConfig":{}}"#,
        )
        .unwrap();
        assert_eq!(c.vpc.as_deref(), Some("blue"));
        assert_eq!(c.subnet.as_deref(), Some("web"));
        assert_eq!(c.security_groups, ["a", "b"]);
        assert_eq!(c.labels["app"], "x");
        assert_eq!(c.socket, "/run/x.sock");
        assert_eq!(c.dns["nameservers"][0], "10.0.0.53");
    }

    #[test]
    fn refusals_name_key_and_value() {
        for (body, code, needle) in [
            (r#""security_group":["a"]"#, 2, r#""security_group" with value ["a"]"#),
            (r#""ipam":{"type":"host-local"}"#, 2, "host-local"),
            (r#""ipMasq":true"#, 2, "ipMasq"),
            (r#""runtimeConfig":{"portMappings":[]}"#, 2, "portMappings"),
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

    #[test]
    fn versions_and_decoding() {
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
