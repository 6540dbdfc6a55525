//! Lets aya copy these types in and out of maps.
#![expect(unsafe_code, reason = "aya::Pod is an unsafe trait and may only be implemented beside the type")]

use crate::*;

macro_rules! pod {
    ($($t:ty),* $(,)?) => {
        // SAFETY: `repr(C)`, fixed-width integers and arrays of them only, no implicit padding (asserted layouts), valid for every bit pattern.
        $(unsafe impl aya::Pod for $t {})*
    };
}

pod!(
    Addr,
    AddressKey,
    AddressRecord,
    AffinityKey,
    AffinityValue,
    BackendKey,
    BackendRecord,
    Counter,
    CtDecision,
    CtEntry,
    CtKey,
    DeviceRecord,
    DropKey,
    EndpointRecord,
    Event,
    FlowKey,
    FlowValue,
    FragKey,
    FragValue,
    MemberKey,
    MemberRecord,
    NetnsRecord,
    NodeConfig,
    NodeRecord,
    PeerKey,
    PeerRecord,
    PolicyKey,
    PolicyValue,
    QuotaKey,
    QuotaValue,
    RangeKey,
    RateKey,
    RateValue,
    ServiceKey,
    ServiceRecord,
    SocketKey,
    SocketValue,
    TraceLog,
    TraceStep,
    TrafficCounters,
    VpcRecord,
);
