//! Faults planted on purpose: each must turn the comparison with the oracle red. Shipped code has none of them.

/// A fault to plant.
#[cfg_attr(not(any(test, feature = "oracle")), expect(unreachable_pub, reason = "public for tests only"))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fault {
    /// None.
    #[default]
    None,
    /// Ports written little endian into keys.
    #[cfg(any(test, feature = "oracle"))]
    PortByteOrder,
    /// The last port of a range is left out.
    #[cfg(any(test, feature = "oracle"))]
    RangeOffByOne,
    /// Port prefixes one bit too short.
    #[cfg(any(test, feature = "oracle"))]
    PrefixOffByOne,
    /// The higher priority number wins.
    #[cfg(any(test, feature = "oracle"))]
    PriorityFlip,
    /// Tiers in the wrong order.
    #[cfg(any(test, feature = "oracle"))]
    TierFlip,
    /// Allow before drop at equal priority.
    #[cfg(any(test, feature = "oracle"))]
    AllowFirst,
    /// Drop before reject at equal priority.
    #[cfg(any(test, feature = "oracle"))]
    DropBeforeReject,
    /// The any-identity entries are asked only when the exact identity has none.
    #[cfg(any(test, feature = "oracle"))]
    AnyIdentityIgnored,
    /// `pass` decides like `allow`.
    #[cfg(any(test, feature = "oracle"))]
    PassAllows,
    /// Holes of a CIDR do not count.
    #[cfg(any(test, feature = "oracle"))]
    ExceptIgnored,
    /// A CIDR never matches a workload.
    #[cfg(any(test, feature = "oracle"))]
    CidrSparesWorkloads,
    /// Only the longest prefix becomes a fact.
    #[cfg(any(test, feature = "oracle"))]
    CoveringForgotten,
    /// An empty selector selects everything.
    #[cfg(any(test, feature = "oracle"))]
    EmptySelectorMatches,
    /// Rules of the other direction.
    #[cfg(any(test, feature = "oracle"))]
    DirectionSwapped,
    /// A group without rules leaves its direction open.
    #[cfg(any(test, feature = "oracle"))]
    DefaultFlip,
    /// Every ICMP code of a type.
    #[cfg(any(test, feature = "oracle"))]
    IcmpCodeIgnored,
    /// UDP rules written as TCP.
    #[cfg(any(test, feature = "oracle"))]
    UdpAsTcp,
    /// Egress looks named ports up in the endpoint's own list.
    #[cfg(any(test, feature = "oracle"))]
    OwnPortForEgress,
}

#[cfg(any(test, feature = "oracle"))]
impl Fault {
    /// Every fault that can be planted.
    pub const ALL: [Self; 18] = [
        Self::PortByteOrder,
        Self::RangeOffByOne,
        Self::PrefixOffByOne,
        Self::PriorityFlip,
        Self::TierFlip,
        Self::AllowFirst,
        Self::DropBeforeReject,
        Self::AnyIdentityIgnored,
        Self::PassAllows,
        Self::ExceptIgnored,
        Self::CidrSparesWorkloads,
        Self::CoveringForgotten,
        Self::EmptySelectorMatches,
        Self::DirectionSwapped,
        Self::DefaultFlip,
        Self::IcmpCodeIgnored,
        Self::UdpAsTcp,
        Self::OwnPortForEgress,
    ];
}

/// Whether a fault is planted; constant false in shipped code.
macro_rules! planted {
    ($fault:expr, $name:ident) => {{
        #[cfg(any(test, feature = "oracle"))]
        let planted = $fault == $crate::fault::Fault::$name;
        #[cfg(not(any(test, feature = "oracle")))]
        let planted = {
            let _ = $fault;
            false
        };
        planted
    }};
}
pub(crate) use planted;
