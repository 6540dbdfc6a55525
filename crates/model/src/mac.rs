//! Hardware addresses: the gateway's, and those of endpoints that pin none.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::{Endpoint, VpcName};

/// A hardware address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// What workloads see as their gateway and every neighbour, on every node, so that a moved workload keeps its neighbour cache. Locally administered.
    pub const GATEWAY: Self = Self([0x0a, 0x66, 0x6c, 0x00, 0x00, 0x01]);

    /// The MAC of an endpoint that pins none. Deterministic, locally administered, and different for different IPv4 addresses of a VPC.
    #[must_use]
    pub fn derive(vpc: &VpcName, first: IpAddr) -> Self {
        let hash = |extra: &[u8]| {
            // FNV-1a, 64 bits: spread, not secrecy.
            let bytes = vpc.as_str().bytes().chain([0]).chain(extra.iter().copied());
            bytes.fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
                (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3)
            })
        };
        // The first octet keeps IPv4 (02), IPv6 (06) and the gateway (0a) apart.
        match first {
            IpAddr::V4(a) => {
                let [b, c, d, e] = a.octets();
                let [.., tag] = hash(&[]).to_be_bytes();
                Self([0x02, tag, b, c, d, e])
            }
            IpAddr::V6(a) => {
                let h = hash(&a.octets());
                let [_, _, _, b, c, d, e, f] = (h ^ (h >> 40)).to_be_bytes();
                Self([0x06, b, c, d, e, f])
            }
        }
    }
}

impl Endpoint {
    /// The pinned MAC, or the one derived from the first address; none while the endpoint has neither.
    #[must_use]
    pub fn effective_mac(&self) -> Option<Mac> {
        self.mac.or_else(|| self.ips.first().map(|ip| Mac::derive(&self.vpc, *ip)))
    }
}

impl std::fmt::Display for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl std::fmt::Debug for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for Mac {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let error = || format!("{s:?} is not a unicast MAC address (six hex pairs with colons)");
        let mut mac = [0u8; 6];
        let mut parts = s.split(':');
        for byte in &mut mac {
            // Digits are checked apart: `from_str_radix` takes a sign, too.
            let hex = |p: &&str| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit());
            let part = parts.next().filter(hex).ok_or_else(error)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| error())?;
        }
        if parts.next().is_some() || mac[0] & 1 == 1 || mac == [0; 6] { Err(error()) } else { Ok(Self(mac)) }
    }
}

impl TryFrom<String> for Mac {
    type Error = String;
    fn try_from(s: String) -> Result<Self, String> {
        s.parse()
    }
}

impl From<Mac> for String {
    fn from(m: Mac) -> Self {
        m.to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_derived_mac_is_stable_local_unicast_and_never_the_gateways() {
        let red = VpcName::new("red").unwrap();
        let mut seen = BTreeSet::new();
        for i in 0..20_000u32 {
            for ip in [IpAddr::from(i.to_be_bytes()), IpAddr::from(u128::from(i).to_be_bytes())] {
                let mac = Mac::derive(&red, ip);
                assert_eq!(mac, Mac::derive(&red, ip));
                assert_eq!(mac.0[0] & 0b11, 0b10, "{mac}");
                assert_ne!(mac, Mac::GATEWAY);
                assert!(seen.insert(mac), "{ip} {mac}");
            }
        }
        let ip: IpAddr = "10.0.0.1".parse().unwrap();
        assert_ne!(Mac::derive(&red, ip), Mac::derive(&VpcName::new("blue").unwrap(), ip));
        // The value is part of running workloads: it must not change between versions.
        assert_eq!(Mac::derive(&red, ip).to_string(), "02:94:0a:00:00:01");
    }

    #[test]
    fn a_mac_is_six_hex_pairs_of_a_unicast_address() {
        assert_eq!("0A:66:6c:00:00:01".parse(), Ok(Mac::GATEWAY));
        for bad in [
            "",
            "01:00:5e:00:00:01",
            "ff:ff:ff:ff:ff:ff",
            "00:00:00:00:00:00",
            "2:0:0:0:0:1",
            "+2:00:00:00:00:01",
            "02:00:00:00:00:01:02",
            "02-00-00-00-00-01",
        ] {
            assert!(bad.parse::<Mac>().is_err(), "{bad}");
        }
    }
}
