//! Results of ADD, written in the version of the request, and read back from `prevResult`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::CniError;
use crate::version::Version;

/// What ADD answers; the newest version's shape.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct AddResult {
    /// Interfaces, host side first.
    #[serde(default)]
    pub interfaces: Vec<Interface>,
    /// Addresses.
    #[serde(default)]
    pub ips: Vec<IpConfig>,
    /// Routes.
    #[serde(default)]
    pub routes: Vec<Route>,
    /// Name service, as configured.
    #[serde(default)]
    pub dns: Value,
}

/// An interface that ADD made.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its MAC address.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mac: String,
    /// Largest IP packet (1.1.0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Path of its namespace; empty for the host's.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sandbox: String,
}

/// An address on one of the interfaces.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct IpConfig {
    /// With prefix length.
    pub address: String,
    /// Default gateway of its family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    /// Index into `interfaces`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
}

/// A route in the namespace.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Route {
    /// Destination.
    pub dst: String,
    /// Next hop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<String>,
    /// MTU of the path (1.1.0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
}

impl AddResult {
    /// The JSON for stdout.
    #[must_use]
    pub fn to_json(&self, version: Version) -> String {
        // Plain strings and numbers: conversion to a value cannot fail.
        let mut value = serde_json::to_value(self).unwrap_or_default();
        value["cniVersion"] = version.as_str().into();
        if value["dns"].is_null() {
            value["dns"] = Value::Object(serde_json::Map::new());
        }
        let each = |value: &mut Value, list: &str, edit: &dyn Fn(&mut serde_json::Map<String, Value>)| {
            for item in value[list].as_array_mut().into_iter().flatten() {
                if let Some(item) = item.as_object_mut() {
                    edit(item);
                }
            }
        };
        if version < Version::V1_1_0 {
            for list in ["interfaces", "routes"] {
                each(&mut value, list, &|item| {
                    item.remove("mtu");
                });
            }
        }
        if version < Version::V1_0_0 {
            each(&mut value, "ips", &|item| {
                let v6 = item.get("address").and_then(Value::as_str).is_some_and(|a| a.contains(':'));
                item.insert("version".to_owned(), if v6 { "6" } else { "4" }.into());
            });
        }
        value.to_string()
    }

    /// Reads a `prevResult` of any supported version; fields of other plugins are passed over.
    ///
    /// # Errors
    /// Code 7 when it has not the shape of a result.
    pub fn from_prev(value: &Value) -> Result<Self, CniError> {
        serde_json::from_value(value.clone())
            .map_err(|e| CniError::config("prevResult is not a result of ADD").with_details(e.to_string()))
    }

    /// Index of the interface with this name in this namespace.
    #[must_use]
    pub fn interface(&self, name: &str, sandbox: &str) -> Option<usize> {
        self.interfaces.iter().position(|i| i.name == name && i.sandbox == sandbox)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> AddResult {
        AddResult {
            interfaces: vec![
                Interface {
                    name: "fl0".into(),
                    mac: "02:00:00:00:00:01".into(),
                    mtu: Some(1450),
                    sandbox: String::new(),
                },
                Interface {
                    name: "eth0".into(),
                    mac: "02:00:00:00:00:02".into(),
                    mtu: Some(1450),
                    sandbox: "/run/netns/c".into(),
                },
            ],
            ips: vec![
                IpConfig {
                    address: "10.0.0.5/24".into(),
                    gateway: Some("10.0.0.1".into()),
                    interface: Some(1),
                },
                IpConfig {
                    address: "fd00::5/64".into(),
                    gateway: Some("fd00::1".into()),
                    interface: Some(1),
                },
            ],
            routes: vec![Route { dst: "0.0.0.0/0".into(), gw: Some("10.0.0.1".into()), mtu: Some(1450) }],
            dns: Value::Null,
        }
    }

    #[test]
    fn each_version_has_its_fields_and_no_others() {
        let json = |v| serde_json::from_str::<Value>(&sample().to_json(v)).unwrap();
        let v04 = json(Version::V0_4_0);
        assert_eq!(v04["cniVersion"], "0.4.0");
        assert_eq!(v04["ips"][0]["version"], "4");
        assert_eq!(v04["ips"][1]["version"], "6");
        assert!(v04["interfaces"][0].get("mtu").is_none() && v04["routes"][0].get("mtu").is_none());
        let v10 = json(Version::V1_0_0);
        assert!(v10["ips"][0].get("version").is_none());
        assert!(v10["interfaces"][1].get("mtu").is_none() && v10["routes"][0].get("mtu").is_none());
        let v11 = json(Version::V1_1_0);
        assert!(v11["ips"][0].get("version").is_none());
        assert_eq!(v11["interfaces"][1]["mtu"], 1450);
        assert_eq!(v11["routes"][0]["mtu"], 1450);
        assert!(v11["interfaces"][0].get("sandbox").is_none());
        assert_eq!(v11["dns"], serde_json::json!({}));
    }

    #[test]
    fn what_was_written_is_read_back_in_every_version() {
        for v in Version::ALL {
            let read = AddResult::from_prev(&serde_json::from_str(&sample().to_json(v)).unwrap()).unwrap();
            assert_eq!(read.ips, sample().ips);
            assert_eq!(read.interface("eth0", "/run/netns/c"), Some(1));
            assert_eq!(read.interface("eth0", ""), None);
        }
        assert_eq!(AddResult::from_prev(&serde_json::json!({"ips": 1})).unwrap_err().code, 7);
    }
}
