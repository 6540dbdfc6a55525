//! Which addresses of a subnet may be used.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::ranges::{Family, Ranges, bits, net_bits};
use crate::{NodeName, Subnet};

/// Addresses of a CIDR that nothing may use: network and broadcast (RFC 1122; not in a /31 or /32, RFC 3021), the subnet-router anycast (RFC 4291; not in a /127 or /128, RFC 6164).
pub(crate) fn reserved(net: &IpNet) -> Vec<(u128, u128)> {
    let (first, last) = net_bits(net);
    match net {
        IpNet::V4(n) if n.prefix_len() < 31 => vec![(first, first), (last, last)],
        IpNet::V6(n) if n.prefix_len() < 127 => vec![(first, first)],
        _ => Vec::new(),
    }
}

/// The lowest address that is neither reserved nor excluded: the gateway of a subnet that names none.
pub(crate) fn first_usable(net: &IpNet, exclude: &[(IpAddr, IpAddr)]) -> Option<IpAddr> {
    let family = Family::of_net(net);
    // A subnet of one address has room for a gateway or an endpoint, not both.
    if net.prefix_len() == net.max_prefix_len() {
        return None;
    }
    let mut holes = reserved(net);
    holes.extend(of_family(exclude, family));
    let free = Ranges::new(vec![net_bits(net)]).minus(&Ranges::new(holes));
    free.parts().first().map(|&(a, _)| family.address(a))
}

fn of_family(ranges: &[(IpAddr, IpAddr)], family: Family) -> impl Iterator<Item = (u128, u128)> {
    ranges.iter().filter(move |(a, _)| Family::of(*a) == family).map(|&(a, b)| (bits(a), bits(b)))
}

impl Subnet {
    /// The gateway of a subnet that names none and excludes nothing: the lowest usable address.
    #[must_use]
    pub fn default_gateway(cidr: &IpNet) -> Option<IpAddr> {
        first_usable(cidr, &[])
    }

    /// The subnet's CIDR of a family.
    #[must_use]
    pub fn cidr(&self, family: Family) -> Option<&IpNet> {
        self.cidrs.iter().find(|n| Family::of_net(n) == family)
    }

    /// The subnet's gateway of a family.
    #[must_use]
    pub fn gateway(&self, family: Family) -> Option<IpAddr> {
        self.gateways.iter().copied().find(|g| Family::of(*g) == family)
    }

    /// Excluded and reserved addresses, without the gateway.
    pub(crate) fn closed(&self, family: Family) -> Ranges {
        let mut parts: Vec<_> = of_family(&self.exclude, family).collect();
        parts.extend(self.cidr(family).into_iter().flat_map(reserved));
        Ranges::new(parts)
    }

    /// What is never handed out: excluded, reserved, the gateway and what is given.
    pub(crate) fn barred(&self, family: Family, more: impl IntoIterator<Item = IpAddr>) -> Ranges {
        let points =
            more.into_iter().chain(self.gateways.iter().copied()).filter(|ip| Family::of(*ip) == family);
        let mut parts: Vec<_> = points.map(|ip| (bits(ip), bits(ip))).collect();
        parts.extend_from_slice(self.closed(family).parts());
        Ranges::new(parts)
    }

    /// What a node's agent may hand out to CNI attachments.
    pub(crate) fn cni_parts(&self, node: &NodeName, family: Family) -> Ranges {
        let own = self.cni_ranges.iter().filter(|r| &r.node == node).map(|r| &r.cidr);
        let whole = self.cidr(family).filter(|_| self.node.as_ref() == Some(node));
        Ranges::new(own.chain(whole).filter(|n| Family::of_net(n) == family).map(net_bits).collect())
    }

    /// What any agent may hand out to CNI attachments: not for the document's allocator.
    pub(crate) fn all_cni_parts(&self, family: Family) -> Ranges {
        let whole = self.cidr(family).filter(|_| self.node.is_some());
        let parts = self.cni_ranges.iter().map(|r| &r.cidr).chain(whole);
        Ranges::new(parts.filter(|n| Family::of_net(n) == family).map(net_bits).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(net: &str, exclude: &[(&str, &str)]) -> Option<String> {
        let exclude: Vec<_> = exclude.iter().map(|(a, b)| (a.parse().unwrap(), b.parse().unwrap())).collect();
        first_usable(&net.parse().unwrap(), &exclude).map(|a| a.to_string())
    }

    #[test]
    fn tiny_subnets_follow_rfc_3021_and_6164() {
        assert_eq!(first("10.0.0.0/30", &[]).as_deref(), Some("10.0.0.1"));
        assert_eq!(first("10.0.0.0/31", &[]).as_deref(), Some("10.0.0.0"));
        assert_eq!(first("10.0.0.0/32", &[]), None);
        assert_eq!(first("fd00::/126", &[]).as_deref(), Some("fd00::1"));
        assert_eq!(first("fd00::/127", &[]).as_deref(), Some("fd00::"));
        assert_eq!(first("fd00::/128", &[]), None);
    }

    #[test]
    fn the_default_gateway_is_never_an_excluded_address() {
        assert_eq!(first("10.0.0.0/24", &[("10.0.0.1", "10.0.0.9")]).as_deref(), Some("10.0.0.10"));
        assert_eq!(first("10.0.0.0/30", &[("10.0.0.0", "10.0.0.3")]), None);
        assert_eq!(first("0.0.0.0/0", &[]).as_deref(), Some("0.0.0.1"));
        assert_eq!(first("::/0", &[]).as_deref(), Some("::1"));
    }
}
