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
    /// Services: lists go before the frontends that name them move on.
    #[cfg(any(test, feature = "oracle"))]
    ListsRemovedFirst,
    /// Services: frontends name lists that are not there yet.
    #[cfg(any(test, feature = "oracle"))]
    FrontendsFirst,
    /// Services: source ranges go before frontends stop asking for them.
    #[cfg(any(test, feature = "oracle"))]
    RangesRemovedFirst,
    /// Services: frontends of what is gone stay.
    #[cfg(any(test, feature = "oracle"))]
    FrontendsLeft,
    /// Services: a list gets new contents under its old number.
    #[cfg(any(test, feature = "oracle"))]
    ListChangedInPlace,
    /// Services: the last of several changes is not seen.
    #[cfg(any(test, feature = "oracle"))]
    ServiceForgotten,
    /// Services: source ranges are not asked for.
    #[cfg(any(test, feature = "oracle"))]
    RangesIgnored,
    /// Services: a Local policy is not one.
    #[cfg(any(test, feature = "oracle"))]
    LocalIgnored,
    /// Services: backends that are not ready are used.
    #[cfg(any(test, feature = "oracle"))]
    NotReadyUsed,
    /// Services: backends that are ending are never used.
    #[cfg(any(test, feature = "oracle"))]
    NoLastResort,
    /// Services: hints count even when some backend has none.
    #[cfg(any(test, feature = "oracle"))]
    HintsWithoutFallback,
    /// Services: of two that want an address the last one has it.
    #[cfg(any(test, feature = "oracle"))]
    LastClaimWins,
}

#[cfg(any(test, feature = "oracle"))]
impl Fault {
    /// Every fault of services.
    pub const SERVICES: [Self; 12] = [
        Self::ListsRemovedFirst,
        Self::FrontendsFirst,
        Self::RangesRemovedFirst,
        Self::FrontendsLeft,
        Self::ListChangedInPlace,
        Self::ServiceForgotten,
        Self::RangesIgnored,
        Self::LocalIgnored,
        Self::NotReadyUsed,
        Self::NoLastResort,
        Self::HintsWithoutFallback,
        Self::LastClaimWins,
    ];

    /// Every fault of policies.
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
