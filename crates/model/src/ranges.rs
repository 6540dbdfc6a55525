//! Sorted, disjoint, inclusive ranges of addresses of one family, as integers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// Address family.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// The family of an address.
    #[must_use]
    pub fn of(ip: IpAddr) -> Self {
        if ip.is_ipv4() { Self::V4 } else { Self::V6 }
    }
    /// The family of a CIDR.
    #[must_use]
    pub fn of_net(net: &IpNet) -> Self {
        Self::of(net.network())
    }
    pub(crate) fn address(self, bits: u128) -> IpAddr {
        match self {
            // Truncation cannot happen: ranges of this family hold 32-bit values.
            Self::V4 => IpAddr::V4(Ipv4Addr::from(u32::try_from(bits).unwrap_or(u32::MAX))),
            Self::V6 => IpAddr::V6(Ipv6Addr::from(bits)),
        }
    }
}

impl std::fmt::Display for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Self::V4 { "IPv4" } else { "IPv6" })
    }
}

pub(crate) fn bits(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(a) => u32::from(a).into(),
        IpAddr::V6(a) => a.into(),
    }
}

pub(crate) fn net_bits(net: &IpNet) -> (u128, u128) {
    (bits(net.network()), bits(net.broadcast()))
}

/// Whether the larger CIDR covers the smaller one. Families differ = no.
pub(crate) fn covers(outer: &IpNet, inner: &IpNet) -> bool {
    outer.contains(inner)
}

/// A set of addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<(u128, u128)>);

impl Ranges {
    /// Sorts and merges.
    pub(crate) fn new(mut parts: Vec<(u128, u128)>) -> Self {
        parts.retain(|(a, b)| a <= b);
        parts.sort_unstable();
        let mut merged: Vec<(u128, u128)> = Vec::with_capacity(parts.len());
        for (a, b) in parts {
            match merged.last_mut() {
                Some(last) if a <= last.1.saturating_add(1) => last.1 = last.1.max(b),
                _ => merged.push((a, b)),
            }
        }
        Self(merged)
    }

    pub(crate) fn parts(&self) -> &[(u128, u128)] {
        &self.0
    }

    pub(crate) fn contains(&self, x: u128) -> bool {
        let i = self.0.partition_point(|&(a, _)| a <= x);
        i > 0 && self.0[i - 1].1 >= x
    }

    /// Number of addresses; saturates at the size of the whole IPv6 space.
    pub(crate) fn count(&self) -> u128 {
        self.0.iter().fold(0u128, |n, (a, b)| n.saturating_add((b - a).saturating_add(1)))
    }

    /// What is in `self` and not in `other`.
    pub(crate) fn minus(&self, other: &Self) -> Self {
        let mut out = Vec::new();
        let mut holes = other.0.iter().peekable();
        for &(start, end) in &self.0 {
            let mut at = Some(start);
            while let (Some(from), Some(&&(a, b))) = (at, holes.peek()) {
                if b < from {
                    holes.next();
                } else if a > end {
                    break;
                } else {
                    if a > from {
                        out.push((from, a - 1));
                    }
                    if b >= end {
                        at = None;
                    } else {
                        at = Some(b + 1);
                        holes.next();
                    }
                }
            }
            if let Some(from) = at {
                out.push((from, end));
            }
        }
        Self(out)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts() -> impl Strategy<Value = Vec<(u128, u128)>> {
        proptest::collection::vec((0u128..60, 0u128..60), 0..8)
    }

    proptest! {
        #[test]
        fn set_operations_agree_with_membership(a in parts(), b in parts()) {
            let holds = |p: &[(u128, u128)], x: u128| p.iter().any(|&(lo, hi)| lo <= x && x <= hi);
            let (ra, rb) = (Ranges::new(a.clone()), Ranges::new(b.clone()));
            let minus = ra.minus(&rb);
            for x in 0..64 {
                prop_assert_eq!(ra.contains(x), holds(&a, x));
                prop_assert_eq!(minus.contains(x), holds(&a, x) && !holds(&b, x));
            }
            prop_assert_eq!(ra.count(), (0..64).filter(|&x| holds(&a, x)).count() as u128);
            prop_assert_eq!(Ranges::new(minus.parts().to_vec()), minus);
        }
    }

    #[test]
    fn the_whole_space_does_not_overflow() {
        let all = Ranges::new(vec![(0, u128::MAX)]);
        assert_eq!(all.count(), u128::MAX);
        assert_eq!(all.minus(&Ranges::new(vec![(5, u128::MAX)])).parts(), [(0, 4)]);
        assert_eq!(Ranges::new(vec![(3, u128::MAX), (u128::MAX, u128::MAX)]).parts(), [(3, u128::MAX)]);
    }
}
