//! Addresses of a lab. Every lab has the same: its networks are its own.
//!
//! ```text
//! net  one bridge, nobody's address on it
//! cp   .10    etcd, API server, controller manager, scheduler, a name server that knows nothing
//! ext  .20    everybody's default gateway; WORLD on its loopback stands for the rest of the world
//! n1   .101   containerd, kubelet and what wires Pods
//! n2   .102   ...
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::options::Families;

/// Pods of all nodes; each node gets a /24 and a /64.
pub const POD_CIDRS: [&str; 2] = ["10.71.0.0/16", "fd71:1::/48"];
/// `ClusterIP`s.
pub const SERVICE_CIDRS: [&str; 2] = ["10.72.0.0/16", "fd71:2::/112"];
/// The API server's Service.
pub const API_SERVICE: [&str; 2] = ["10.72.0.1", "fd71:2::1"];
/// The cluster's DNS.
pub const DNS_SERVICE: &str = "10.72.0.10";
/// Addresses beyond the outside host.
pub const WORLD: [&str; 2] = ["203.0.113.1", "2001:db8:113::1"];
/// Prefix lengths of the underlay.
pub(crate) const UNDERLAY_LENGTHS: [u8; 2] = [24, 64];

/// IPv4 and IPv6 of a host of the underlay.
#[must_use]
pub(crate) fn underlay(host: u8) -> [IpAddr; 2] {
    let v6 = Ipv6Addr::new(0xfd71, 0, 0, 0, 0, 0, 0, u16::from(host));
    [IpAddr::V4(Ipv4Addr::new(192, 168, 71, host)), IpAddr::V6(v6)]
}

/// The control plane's.
#[must_use]
pub fn control_plane() -> [IpAddr; 2] {
    underlay(10)
}

/// The outside host's.
#[must_use]
pub fn outside() -> [IpAddr; 2] {
    underlay(20)
}

/// Node `index`'s, from 1.
#[must_use]
pub fn node(index: u8) -> [IpAddr; 2] {
    underlay(100 + index)
}

/// The first, or both with a comma, as most of Kubernetes' flags want them.
pub(crate) fn list<T: ToString>(families: Families, both: [T; 2]) -> String {
    let [v4, v6] = both.map(|x| x.to_string());
    match families {
        Families::Dual => format!("{v4},{v6}"),
        Families::Ipv4 => v4,
    }
}
