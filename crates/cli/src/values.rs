//! Values of options.

use std::time::Duration;

use flowloom_api::{Side, SideKind};
use flowloom_bpf_abi::DropReason;

/// `30s`, `500ms`, `2m`; a number alone is seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| "write it as 500ms, 30s or 2m".to_owned())?;
    let millis = match unit {
        "ms" => Some(number),
        "" | "s" => number.checked_mul(1000),
        "m" => number.checked_mul(60_000),
        _ => return Err(format!("{unit:?} is no unit: write it as 500ms, 30s or 2m")),
    };
    let day = 24 * 3600 * 1000;
    millis.filter(|m| *m <= day).map(Duration::from_millis).ok_or_else(|| "at most a day (1440m)".to_owned())
}

/// A drop reason by its CamelCase name, written in any case.
pub(crate) fn reason(text: &str) -> Result<String, String> {
    DropReason::ALL
        .iter()
        .map(|r| r.name())
        .find(|n| n.eq_ignore_ascii_case(text))
        .map(str::to_owned)
        .ok_or_else(|| {
            let names: Vec<_> = DropReason::ALL.iter().map(|r| r.name()).collect();
            format!("no such reason; one of {}", names.join(", "))
        })
}

/// A protocol's name or number as the agent reads it.
pub(crate) fn protocol(text: &str) -> Result<String, String> {
    let lower = text.to_ascii_lowercase();
    if ["tcp", "udp", "icmp", "icmpv6", "sctp"].contains(&lower.as_str()) || lower.parse::<u8>().is_ok() {
        Ok(lower)
    } else {
        Err("one of tcp, udp, icmp, icmpv6, sctp or a number below 256".to_owned())
    }
}

/// An address family.
pub(crate) fn family(text: &str) -> Result<u8, String> {
    match text {
        "4" => Ok(4),
        "6" => Ok(6),
        _ => Err("4 or 6".to_owned()),
    }
}

/// What a packet is: `tcp/80`, `udp/53`, `icmp`, `icmp/8/0`, `47`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Traffic {
    pub(crate) protocol: String,
    pub(crate) port: Option<u16>,
    pub(crate) icmp_type: Option<u8>,
    pub(crate) icmp_code: Option<u8>,
}

/// The packet of a question: `tcp/80`, or in words.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct PacketArgs {
    /// What: tcp/80, udp/53, sctp/9, icmp, icmp/TYPE/CODE, or a protocol number.
    what: Option<Traffic>,
    /// The same in words, with --port.
    #[arg(long, conflicts_with = "what", value_parser = protocol)]
    protocol: Option<String>,
    /// Destination port.
    #[arg(long, requires = "protocol", conflicts_with = "what")]
    port: Option<u16>,
}

impl PacketArgs {
    /// What is sent to `to`: a Service may have one port only, which then need not be said.
    pub(crate) fn traffic_to(&self, to: &Side) -> Result<Traffic, crate::Failure> {
        match (&self.what, &self.protocol, to.kind) {
            (None, protocol, SideKind::Service) => Ok(Traffic {
                protocol: protocol.clone().unwrap_or_else(|| "tcp".to_owned()),
                port: self.port,
                icmp_type: None,
                icmp_code: None,
            }),
            _ => self.traffic(),
        }
    }

    pub(crate) fn traffic(&self) -> Result<Traffic, crate::Failure> {
        let text = match (&self.what, &self.protocol, self.port) {
            (Some(what), ..) => return Ok(what.clone()),
            (None, Some(protocol), Some(port)) => format!("{protocol}/{port}"),
            (None, Some(protocol), None) => protocol.clone(),
            (None, None, _) => return Err(crate::Failure::usage("say what: tcp/80, udp/53, icmp, ...")),
        };
        text.parse().map_err(|e| crate::Failure::usage(format!("--protocol, --port: {e}")))
    }
}

impl std::str::FromStr for Traffic {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split('/');
        let mut traffic = Self {
            protocol: protocol(parts.next().unwrap_or_default())?,
            port: None,
            icmp_type: None,
            icmp_code: None,
        };
        let rest: Vec<&str> = parts.collect();
        let number = |s: &str| s.parse::<u8>().map_err(|_| format!("{s:?} is not a number below 256"));
        match (traffic.protocol.as_str(), rest.as_slice()) {
            ("icmp" | "icmpv6", []) => {}
            ("icmp" | "icmpv6", [kind]) => traffic.icmp_type = Some(number(kind)?),
            ("icmp" | "icmpv6", [kind, code]) => {
                traffic.icmp_type = Some(number(kind)?);
                traffic.icmp_code = Some(number(code)?);
            }
            ("tcp" | "udp" | "sctp", [port]) => {
                let port = port.parse::<u16>().ok().filter(|p| *p != 0);
                traffic.port = Some(port.ok_or("a port is 1 to 65535")?);
            }
            ("tcp" | "udp" | "sctp", []) => {
                return Err(format!("{0} needs a port: {0}/80", traffic.protocol));
            }
            (_, []) => {}
            _ => return Err("write it as tcp/80, udp/53, icmp, icmp/8/0 or a protocol number".to_owned()),
        }
        Ok(traffic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("30"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        for bad in ["", "s", "-1s", "1h", "1.5s", "99999999999999999999", "18446744073709551615m", "1441m"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn reasons_in_any_case() {
        assert_eq!(reason("policyingress"), Ok("PolicyIngress".to_owned()));
        assert!(reason("policy").unwrap_err().contains("PolicyIngress"));
    }

    #[test]
    fn traffic() {
        let t = |s: &str| s.parse::<Traffic>();
        assert_eq!(t("TCP/80").unwrap().port, Some(80));
        assert_eq!(t("icmp/3/4").unwrap().icmp_code, Some(4));
        assert_eq!(t("47").unwrap().protocol, "47");
        for bad in
            ["", "tcp", "tcp/0", "tcp/65536", "tcp/http", "icmp/256", "icmp/1/2/3", "47/1", "256", "web"]
        {
            assert!(t(bad).is_err(), "{bad}");
        }
    }
}
