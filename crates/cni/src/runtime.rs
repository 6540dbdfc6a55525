//! `runtimeConfig`: what the runtime asks for beside the network configuration (CNI conventions, "Dynamic Plugin specific Fields").

use std::net::IpAddr;

use flowloom_api::v1::{CniPortMapping, CniRuntime, PortProtocol};
use serde_json::Value;

use crate::conflist::Capability;
use crate::error::CniError;

/// Most host ports of one container.
const MAX_PORTS: usize = 4096;

/// Reads `runtimeConfig`. What asks for nothing is passed over, whatever its name.
///
/// # Errors
/// Code 2 for a capability that is not served, 7 for a wrong value.
pub(crate) fn read(value: &Value) -> Result<CniRuntime, CniError> {
    let mut runtime = CniRuntime::default();
    let fields = match value {
        Value::Null => return Ok(runtime),
        Value::Object(fields) => fields,
        _ => return Err(CniError::config(format!("runtimeConfig: {value} is not an object"))),
    };
    for (key, value) in fields.iter().filter(|(_, v)| !asks_nothing(v)) {
        match key.as_str() {
            "portMappings" => runtime.port_mappings = ports(value)?,
            "ips" => runtime.ips = addresses(value)?,
            "mac" => runtime.mac = Some(mac(value)?),
            "bandwidth" => {
                let why = "traffic is not shaped; remove the capability and the pod's bandwidth annotations";
                return Err(CniError::unsupported("runtimeConfig.bandwidth", value, why));
            }
            _ => {
                let why = "the capabilities are portMappings, ips and mac";
                return Err(CniError::unsupported(&format!("runtimeConfig.{key}"), value, why));
            }
        }
    }
    Ok(runtime)
}

/// Checks `capabilities`: a runtime hands over what they name.
///
/// # Errors
/// Code 2 for one that is not served, 7 when it is not an object.
pub(crate) fn check_capabilities(value: &Value) -> Result<(), CniError> {
    let fields = match value {
        Value::Null => return Ok(()),
        Value::Object(fields) => fields,
        _ => return Err(CniError::config(format!("capabilities: {value} is not an object"))),
    };
    let unknown = |(key, value): &(&String, &Value)| !asks_nothing(value) && Capability::parse(key).is_none();
    match fields.iter().find(unknown) {
        None => Ok(()),
        Some((key, value)) => {
            let why = if key == "bandwidth" {
                "traffic is not shaped"
            } else {
                "known are portMappings, ips and mac"
            };
            Err(CniError::unsupported(&format!("capabilities.{key}"), value, why))
        }
    }
}

fn asks_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::String(s) => s.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.values().all(asks_nothing),
        Value::Bool(true) => false,
    }
}

fn ports(value: &Value) -> Result<Vec<CniPortMapping>, CniError> {
    let list = value.as_array().filter(|l| l.len() <= MAX_PORTS);
    let list = list.ok_or_else(|| {
        CniError::config(format!("runtimeConfig.portMappings: is not a list of at most {MAX_PORTS} entries"))
    })?;
    let mut out: Vec<CniPortMapping> = Vec::with_capacity(list.len());
    for (i, item) in list.iter().enumerate() {
        let wrong = |what: &str| CniError::config(format!("runtimeConfig.portMappings[{i}]: {item}: {what}"));
        // containerd before 2.0 writes its own field names (`HostPort`): Go reads JSON keys in any case.
        let field = |key: &str| {
            let named = item.as_object().into_iter().flatten().find(|(k, _)| k.eq_ignore_ascii_case(key));
            named.map_or(&Value::Null, |(_, value)| value)
        };
        let port = |key: &str| {
            let port = field(key).as_u64().and_then(|n| u16::try_from(n).ok()).filter(|n| *n != 0);
            port.ok_or_else(|| wrong(&format!("{key} is not a port 1..65535")))
        };
        let text = |key: &str| match field(key) {
            Value::Null => Ok(""),
            Value::String(s) => Ok(s.as_str()),
            _ => Err(wrong(&format!("{key} is not text"))),
        };
        let protocol = match text("protocol")?.to_ascii_lowercase().as_str() {
            "" | "tcp" => PortProtocol::Tcp,
            "udp" => PortProtocol::Udp,
            "sctp" => PortProtocol::Sctp,
            _ => return Err(wrong("protocol is none of tcp, udp, sctp")),
        };
        let host_ip = match text("hostIP")? {
            "" => None,
            ip => Some(ip.parse::<IpAddr>().map_err(|_| wrong("hostIP is not an address"))?),
        };
        let mapping = CniPortMapping {
            host_port: port("hostPort")?,
            container_port: port("containerPort")?,
            protocol,
            host_ip,
        };
        let same = |o: &&CniPortMapping| {
            (o.host_port, o.protocol, o.host_ip) == (mapping.host_port, mapping.protocol, mapping.host_ip)
        };
        match out.iter().find(same) {
            Some(other) if *other == mapping => {}
            Some(_) => return Err(wrong("the host port leads to another container port already")),
            None => out.push(mapping),
        }
    }
    Ok(out)
}

fn addresses(value: &Value) -> Result<Vec<IpAddr>, CniError> {
    let wrong = || CniError::config(format!("runtimeConfig.ips: {value} is not a list of addresses"));
    let mut out: Vec<IpAddr> = Vec::new();
    for item in value.as_array().ok_or_else(wrong)? {
        let text = item.as_str().ok_or_else(wrong)?;
        // The prefix length is the subnet's, whatever the runtime says.
        let (address, length) = text.split_once('/').unwrap_or((text, "0"));
        let ip: IpAddr = address.parse().map_err(|_| wrong())?;
        if length.parse::<u8>().is_err() {
            return Err(wrong());
        }
        if let Some(other) = out.iter().find(|o| o.is_ipv4() == ip.is_ipv4()) {
            let message = format!(
                "runtimeConfig.ips: {other} and {ip} are of one family; an interface gets one address of each"
            );
            return Err(CniError::config(message));
        }
        out.push(ip);
    }
    out.sort_unstable();
    Ok(out)
}

fn mac(value: &Value) -> Result<String, CniError> {
    let wrong = |what: &str| CniError::config(format!("runtimeConfig.mac: {value} {what}"));
    let text = value.as_str().ok_or_else(|| wrong("is not text"))?.to_ascii_lowercase();
    let octet = |part: &str| (part.len() == 2).then(|| u8::from_str_radix(part, 16).ok()).flatten();
    let octets: Option<Vec<u8>> = text.split(':').map(octet).collect();
    match octets.as_deref() {
        Some([first, _, _, _, _, _]) if first & 1 == 0 => Ok(text),
        Some([_, _, _, _, _, _]) => Err(wrong("is a group address")),
        _ => Err(wrong("is not aa:bb:cc:dd:ee:ff")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn host_ports_become_typed_and_a_repeated_one_is_one() {
        let read = read(&json!({"portMappings": [
            {"hostPort": 8080, "containerPort": 80},
            {"HostPort": 53, "ContainerPort": 5353, "Protocol": "UDP", "HostIP": "192.0.2.1"},
            {"hostPort": 53, "containerPort": 5353, "protocol": "sctp", "hostIP": ""},
            {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}))
        .unwrap();
        let of = |host_port, container_port, protocol, host_ip: Option<&str>| CniPortMapping {
            host_port,
            container_port,
            protocol,
            host_ip: host_ip.map(|ip| ip.parse().unwrap()),
        };
        let wanted = [
            of(8080, 80, PortProtocol::Tcp, None),
            of(53, 5353, PortProtocol::Udp, Some("192.0.2.1")),
            of(53, 5353, PortProtocol::Sctp, None),
        ];
        assert_eq!(read.port_mappings, wanted);
    }

    #[test]
    fn what_asks_for_nothing_is_passed_over() {
        for nothing in [
            json!(null),
            json!({}),
            json!({"portMappings": [], "ips": [], "mac": "", "dns": {"servers": []}}),
            json!({"bandwidth": {"ingressRate": 0, "ingressBurst": 0}, "ipRanges": null, "anything": false}),
        ] {
            assert!(read(&nothing).unwrap().is_empty(), "{nothing}");
        }
    }

    #[test]
    fn what_cannot_be_served_is_refused_with_its_name() {
        for (value, code, needle) in [
            (json!({"bandwidth": {"ingressRate": 1000}}), 2, "shaped"),
            (json!({"dns": {"servers": ["10.0.0.1"]}}), 2, "runtimeConfig.dns"),
            (json!([]), 7, "not an object"),
            (json!({"portMappings": {"hostPort": 1}}), 7, "not a list"),
            (json!({"portMappings": [{"hostPort": 0, "containerPort": 80}]}), 7, "hostPort"),
            (json!({"portMappings": [{"hostPort": 80, "containerPort": 70000}]}), 7, "containerPort"),
            (json!({"portMappings": [{"hostPort": 80, "containerPort": 80, "protocol": "icmp"}]}), 7, "icmp"),
            (json!({"portMappings": [{"hostPort": 80, "containerPort": 80, "hostIP": "x"}]}), 7, "hostIP"),
            (
                json!({"portMappings": [{"hostPort": 1, "containerPort": 2}, {"hostPort": 1, "containerPort": 3}]}),
                7,
                "another container port",
            ),
            (json!({"ips": ["10.0.0.5", "10.0.0.6/24"]}), 7, "one family"),
            (json!({"ips": "10.0.0.5"}), 7, "runtimeConfig.ips"),
            (json!({"ips": ["10.0.0.5/x"]}), 7, "runtimeConfig.ips"),
            (json!({"mac": "01:00:00:00:00:01"}), 7, "group"),
            (json!({"mac": "02-00-00-00-00-01"}), 7, "runtimeConfig.mac"),
        ] {
            let e = read(&value).unwrap_err();
            assert!(e.code == code && e.message.contains(needle), "{value}: {e:?}");
        }
    }

    #[test]
    fn addresses_and_mac() {
        let read = read(&json!({"ips": ["fd00::5/64", "10.0.0.5"], "mac": "02:AA:00:00:00:01"})).unwrap();
        assert_eq!(read.ips, ["10.0.0.5".parse::<IpAddr>().unwrap(), "fd00::5".parse().unwrap()]);
        assert_eq!(read.mac.as_deref(), Some("02:aa:00:00:00:01"));
    }

    #[test]
    fn a_capability_that_is_not_served_may_not_be_declared() {
        check_capabilities(&json!({"portMappings": true, "ips": true, "mac": true, "bandwidth": false}))
            .unwrap();
        assert_eq!(check_capabilities(&json!({"bandwidth": true})).unwrap_err().code, 2);
        assert_eq!(check_capabilities(&json!({"aliases": true})).unwrap_err().code, 2);
    }
}
