//! Every map of `flowloom_bpf_abi::map_name`, declared once.

use aya_ebpf::Global;
use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::btf_maps::{
    Array, HashMap, HashOfMaps, LpmTrie, LruHashMap, LruPerCpuHashMap, PerCpuArray, PerCpuHashMap, RingBuf,
};
use aya_ebpf::macros::btf_map;
use flowloom_bpf_abi as abi;

const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

/// Set to [`DRY`] by the loader of a trace: no map but `fl_trace` is written. Starts as a value that no other constant has: equal ones are merged.
#[unsafe(no_mangle)]
pub static DRY_RUN: Global<u32> = Global::new(0xf10e_0d27);
/// A trace.
pub const DRY: u32 = 1;

#[btf_map(name = "fl_devices")]
pub static DEVICES: HashMap<u32, abi::DeviceRecord, { abi::MAX_DEVICES as usize }> = HashMap::new();

#[btf_map(name = "fl_endpoints")]
pub static ENDPOINTS: Array<abi::EndpointRecord, { abi::MAX_ENDPOINTS as usize }> = Array::new();

#[btf_map(name = "fl_addresses")]
pub static ADDRESSES: HashMap<abi::AddressKey, abi::AddressRecord, { abi::MAX_ADDRESSES as usize }> =
    HashMap::new();

#[btf_map(name = "fl_ipcache")]
pub static IPCACHE: LpmTrie<[u8; 20], abi::PeerRecord, { abi::MAX_IPCACHE as usize }> = LpmTrie::new();

#[btf_map(name = "fl_vpcs")]
pub static VPCS: HashMap<u32, abi::VpcRecord, { abi::MAX_VPCS as usize }> = HashMap::new();

/// Template of the inner maps: user space makes them as large as they need to be.
pub type PolicyInner = LpmTrie<[u8; 8], abi::PolicyValue, { abi::POLICY_MIN_ENTRIES as usize }>;

#[btf_map(name = "fl_policy")]
pub static POLICY: HashOfMaps<u32, PolicyInner, { abi::MAX_SLOTS as usize }> = HashOfMaps::new();

#[btf_map(name = "fl_ct_new")]
pub static CONNTRACK_NEW: LruHashMap<abi::CtKey, abi::CtEntry, { abi::MAX_CONNTRACK_NEW as usize }> =
    LruHashMap::new();

#[btf_map(name = "fl_conntrack")]
pub static CONNTRACK: HashMap<abi::CtKey, abi::CtEntry, { abi::MAX_CONNTRACK as usize }> = HashMap::new();

#[btf_map(name = "fl_quotas")]
pub static QUOTAS: HashMap<abi::QuotaKey, abi::QuotaValue, { abi::MAX_QUOTAS as usize }> = HashMap::new();

#[btf_map(name = "fl_nodes")]
pub static NODES: HashMap<abi::Addr, abi::NodeRecord, { abi::MAX_NODES as usize }, NO_PREALLOC> =
    HashMap::new();

#[btf_map(name = "fl_fragments")]
pub static FRAGMENTS: LruHashMap<abi::FragKey, abi::FragValue, { abi::MAX_FRAGMENTS as usize }> =
    LruHashMap::new();

#[btf_map(name = "fl_traffic")]
pub static TRAFFIC: PerCpuArray<abi::TrafficCounters, { abi::MAX_ENDPOINTS as usize }> = PerCpuArray::new();

#[btf_map(name = "fl_drops")]
pub static DROPS: PerCpuHashMap<abi::DropKey, abi::Counter, { abi::MAX_DROPS as usize }> =
    PerCpuHashMap::new();

#[btf_map(name = "fl_rule_hits")]
pub static RULE_HITS: LruPerCpuHashMap<u32, abi::Counter, { abi::MAX_RULE_HITS as usize }> =
    LruPerCpuHashMap::new();

#[btf_map(name = "fl_events")]
pub static EVENTS: RingBuf<abi::Event, { abi::EVENTS_BYTES as usize }> = RingBuf::new();

#[btf_map(name = "fl_rates")]
pub static RATES: LruHashMap<abi::RateKey, abi::RateValue, { abi::MAX_RATES as usize }> = LruHashMap::new();

#[btf_map(name = "fl_config")]
pub static CONFIG: Array<abi::NodeConfig, 1> = Array::new();

#[btf_map(name = "fl_services")]
pub static SERVICES: HashMap<
    abi::ServiceKey,
    abi::ServiceRecord,
    { abi::MAX_SERVICES as usize },
    NO_PREALLOC,
> = HashMap::new();

#[btf_map(name = "fl_backends")]
pub static BACKENDS: HashMap<
    abi::BackendKey,
    abi::BackendRecord,
    { abi::MAX_BACKENDS as usize },
    NO_PREALLOC,
> = HashMap::new();

#[btf_map(name = "fl_members")]
pub static MEMBERS: HashMap<abi::MemberKey, abi::MemberRecord, { abi::MAX_BACKENDS as usize }, NO_PREALLOC> =
    HashMap::new();

#[btf_map(name = "fl_affinity")]
pub static AFFINITY: LruHashMap<abi::AffinityKey, abi::AffinityValue, { abi::MAX_AFFINITY as usize }> =
    LruHashMap::new();

#[btf_map(name = "fl_srv_ranges")]
pub static SRV_RANGES: LpmTrie<[u8; 20], u32, { abi::MAX_SRV_RANGES as usize }> = LpmTrie::new();

#[btf_map(name = "fl_sockets")]
pub static SOCKETS: LruHashMap<abi::SocketKey, abi::SocketValue, { abi::MAX_SOCKETS as usize }> =
    LruHashMap::new();

#[btf_map(name = "fl_netns")]
pub static NETNS: HashMap<u64, abi::NetnsRecord, { abi::MAX_NETNS as usize }, NO_PREALLOC> = HashMap::new();

#[btf_map(name = "fl_srv_flows")]
pub static SRV_FLOWS: LruHashMap<abi::FlowKey, abi::FlowValue, { abi::MAX_SRV_FLOWS as usize }> =
    LruHashMap::new();

#[btf_map(name = "fl_scratch")]
pub static SCRATCH: PerCpuArray<flowloom_bpf_logic::Packet, 1> = PerCpuArray::new();

#[btf_map(name = "fl_trace")]
pub static TRACE: Array<abi::TraceLog, 1> = Array::new();
