//! Why a packet was dropped, and what a program decided: one enum for programs, events, metrics and the command line.

macro_rules! reasons {
    ($($name:ident = $n:literal, $text:literal;)*) => {
        /// Why a packet was dropped (or answered instead of delivered). Numbers are stable; never reuse one.
        #[repr(u8)]
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum DropReason { $(#[doc = $text] $name = $n,)* }

        impl DropReason {
            /// Every reason, by number.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The stable CamelCase name shown by every tool.
            #[must_use]
            pub const fn name(self) -> &'static str { match self { $(Self::$name => stringify!($name),)* } }

            /// One line for people.
            #[must_use]
            pub const fn text(self) -> &'static str { match self { $(Self::$name => $text,)* } }

            /// The reason with this number.
            #[must_use]
            pub const fn from_u8(n: u8) -> Option<Self> { match n { $($n => Some(Self::$name),)* _ => None } }
        }
    };
}

reasons! {
    UnknownDevice = 1, "the device belongs to no endpoint";
    UnknownEndpoint = 2, "the device's endpoint has no record";
    NotReady = 3, "the endpoint's policy is not in force yet";
    UnsupportedEtherType = 4, "neither IPv4, IPv6 nor ARP";
    Truncated = 5, "the packet ends inside a header";
    InvalidHeader = 6, "a header field contradicts its specification";
    InvalidAddress = 7, "an address that may not be on the wire here";
    SpoofedSource = 8, "source address or MAC is not the endpoint's";
    SpoofedNeighbour = 9, "ARP or neighbour discovery speaks for an address the endpoint does not own";
    RouterAdvertisement = 10, "router advertisements and redirects from workloads are never passed";
    Multicast = 11, "multicast is not forwarded";
    Broadcast = 12, "broadcast is not forwarded";
    LinkLocal = 13, "link-local traffic stays on its link";
    PolicyEgress = 14, "denied by the sender's egress policy";
    PolicyIngress = 15, "denied by the receiver's ingress policy";
    NoPolicyEntry = 16, "no policy entry answered: failed closed";
    ConntrackFull = 17, "connection table or the endpoint's or VPC's quota is full";
    ConntrackInvalid = 18, "no tracked connection and not the start of one";
    NoRoute = 19, "no route in this VPC";
    Blackhole = 20, "a blackhole route covers the destination";
    TtlExceeded = 21, "TTL or hop limit ran out";
    MtuExceeded = 22, "larger than the path's MTU and not to be fragmented";
    TunnelFromWorkload = 23, "a workload sent to a node's tunnel port";
    WrongTunnelSource = 24, "the tunnel source is not the node that owns the inner source";
    UnknownVni = 25, "no VPC has this VNI";
    LocalSourceFromOutside = 26, "a local endpoint's address as source arrived from outside";
    UnknownDestination = 27, "the destination is no local endpoint";
    FragmentUnknown = 28, "a later fragment whose first one was not seen";
    UnsupportedProtocol = 29, "no answer is defined for this protocol";
    DeliveryFailed = 30, "the kernel refused to redirect";
    EncapFailed = 31, "the tunnel key could not be set";
    RateLimited = 32, "an answer was not sent: rate limit";
    ToSelf = 33, "a packet to the endpoint's own address left it";
    InternalError = 34, "a program met a state it must not meet";
    ForeignVpcToHost = 36, "only the default VPC reaches this host's stack";
    ServiceNoBackend = 37, "the service has no backend that may be used from here";
    ServiceSourceRange = 38, "the sender is outside the service's source ranges";
    ServiceNoPort = 39, "the service address has no such protocol and port";
    ServiceTupleInUse = 40, "the client's port already speaks to this backend in another way";
    ServiceConnectionUnknown = 41, "part of a connection to a service whose beginning was not seen";
    ServiceUnsupported = 42, "this translation is not possible for the packet's protocol";
    GroupMembership = 43, "IGMP and MLD: multicast is not forwarded, so nobody has to know who listens; counted, never an event";
}

/// What a policy entry says. Zero is never valid: a zeroed value must not allow.
pub mod verdict {
    /// Pass.
    pub const ALLOW: u8 = 1;
    /// Drop silently.
    pub const DROP: u8 = 2;
    /// Drop and answer (TCP RST, ICMP administratively prohibited).
    pub const REJECT: u8 = 3;
}

/// Direction of a policy decision, relative to the endpoint.
pub mod direction {
    /// What the endpoint sends.
    pub const EGRESS: u8 = 0;
    /// What the endpoint receives.
    pub const INGRESS: u8 = 1;
}
