//! The maps: [`Tables`] over helpers.

use core::ffi::c_void;
use core::ptr::{self, NonNull};

use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use aya_ebpf::helpers as bpf;
use flowloom_bpf_abi::{
    Addr, AddressKey, AddressRecord, AffinityKey, AffinityValue, BackendKey, BackendRecord, Counter, CtEntry,
    CtKey, DeviceRecord, DropKey, EndpointRecord, Event, FlowKey, FlowValue, FragKey, FragValue,
    MAX_TRACE_STEPS, MemberKey, NetnsRecord, NodeConfig, PeerKey, PeerRecord, PolicyKey, PolicyValue,
    QuotaKey, QuotaValue, RangeKey, RateKey, RateValue, ServiceKey, ServiceRecord, SocketKey, SocketValue,
    TraceStep, VpcRecord, direction,
};
use flowloom_bpf_logic::{CtCell, Inserted, Tables, Zero};

use crate::maps;

const EEXIST: i64 = -17;
/// How often a value is read that is exchanged meanwhile.
const READS: u32 = 3;

/// The maps of this load.
#[derive(Clone, Copy)]
pub struct Kernel;

#[inline(always)]
fn map<M>(m: &'static M) -> *mut c_void {
    ptr::from_ref(m).cast_mut().cast()
}

#[inline(always)]
fn find<K, V>(m: *mut c_void, key: &K) -> Option<NonNull<V>> {
    // SAFETY: `m` is a map whose key type is K; the helper reads a key and answers null or a value of the map's type.
    NonNull::new(unsafe { bpf::bpf_map_lookup_elem(m.cast(), ptr::from_ref(key).cast()) }.cast())
}

#[inline(always)]
fn get<K, V>(m: *mut c_void, key: &K) -> Option<&'static V> {
    // SAFETY: a value lives as long as the program runs (RCU); readers tolerate that it changes.
    find(m, key).map(|v: NonNull<V>| unsafe { &*v.as_ptr().cast_const() })
}

/// Copies a value out that still belongs to its key afterwards: the element of a hash goes to another key as soon as it is removed.
#[inline(always)]
fn whole<K, V: Copy>(m: *mut c_void, key: &K, into: &mut V) -> bool {
    let mut tries = 0;
    while tries < READS {
        tries += 1;
        let Some(value) = find::<K, V>(m, key) else { return false };
        // SAFETY: a live value; volatile: it may change while it is read, which the second lookup shows.
        *into = unsafe { ptr::read_volatile(value.as_ptr()) };
        let Some(again) = find::<K, V>(m, key) else { return false };
        if again == value {
            return true;
        }
    }
    false
}

#[inline(always)]
fn put<K, V>(m: *mut c_void, key: &K, value: &V, flags: u32) -> i64 {
    // SAFETY: `m` is a map of K and V; the helper copies both.
    unsafe {
        bpf::bpf_map_update_elem(
            m.cast(),
            ptr::from_ref(key).cast(),
            ptr::from_ref(value).cast(),
            flags as u64,
        )
    }
}

#[inline(always)]
fn inserted(code: i64) -> Inserted {
    match code {
        0 => Inserted::Yes,
        EEXIST => Inserted::Exists,
        _ => Inserted::Full,
    }
}

#[inline(always)]
fn count(c: NonNull<Counter>, bytes: u32) {
    // SAFETY: this processor's own value.
    unsafe {
        let c = c.as_ptr();
        (*c).packets = (*c).packets.wrapping_add(1);
        (*c).bytes = (*c).bytes.wrapping_add(bytes as u64);
    }
}

/// Adds to `used` for every processor to see; what the value was before. (`core` offers no atomic addition on this target.)
#[inline(always)]
fn add(quota: NonNull<QuotaValue>, n: u64) -> u64 {
    let mut value = n;
    // SAFETY: a live value of 8 bytes, aligned to 8 by the map (its key has 8 bytes).
    unsafe {
        core::arch::asm!("{v} = atomic_fetch_add((u64 *)({p} + 0), {v})", p = in(reg) quota.as_ptr(), v = inout(reg) value);
    }
    value
}

impl Tables for Kernel {
    type Slot = NonNull<c_void>;

    #[inline(always)]
    fn clear<Z: Zero>(self, value: &mut Z) {
        const { assert!(align_of::<Z>() >= 8 && Z::CLEARED.is_multiple_of(8) && Z::CLEARED <= size_of::<Z>()) };
        let words = ptr::from_mut(value).cast::<u64>();
        let mut i = 0;
        while i < Z::CLEARED / 8 {
            // SAFETY: inside the value, aligned (checked above); zero is valid for `Zero`. Volatile, or it becomes a call of memset.
            unsafe { ptr::write_volatile(words.add(i), 0) };
            i += 1;
        }
    }

    #[inline(always)]
    fn dry(self) -> bool {
        maps::DRY_RUN.load() == maps::DRY
    }

    #[inline(always)]
    fn device(self, ifindex: u32) -> Option<u32> {
        let record: &DeviceRecord = get(map(&maps::DEVICES), &ifindex)?;
        Some(record.endpoint)
    }

    #[inline(always)]
    fn endpoint(self, id: u32) -> Option<&'static EndpointRecord> {
        get(map(&maps::ENDPOINTS), &id)
    }

    #[inline(always)]
    fn address(self, key: &AddressKey) -> Option<AddressRecord> {
        get::<_, AddressRecord>(map(&maps::ADDRESSES), key).copied()
    }

    #[inline(always)]
    fn peer(self, key: &PeerKey) -> Option<&'static PeerRecord> {
        get(map(&maps::IPCACHE), key)
    }

    #[inline(always)]
    fn vpc(self, id: u32) -> Option<&'static VpcRecord> {
        get(map(&maps::VPCS), &id)
    }

    #[inline(always)]
    fn slot(self, slot: u32) -> Option<Self::Slot> {
        find(map(&maps::POLICY), &slot)
    }

    #[inline(always)]
    fn policy(self, slot: Self::Slot, key: &PolicyKey) -> Option<&'static PolicyValue> {
        get(slot.as_ptr(), key)
    }

    #[inline(always)]
    fn established(self, key: &CtKey) -> Option<&'static CtCell> {
        get(map(&maps::CONNTRACK), key)
    }

    #[inline(always)]
    fn half_open(self, key: &CtKey) -> Option<&'static CtCell> {
        get(map(&maps::CONNTRACK_NEW), key)
    }

    #[inline(always)]
    fn insert_established(self, key: &CtKey, entry: &CtEntry) -> Inserted {
        if self.dry() {
            return Inserted::Exists;
        }
        inserted(put(map(&maps::CONNTRACK), key, entry, BPF_NOEXIST))
    }

    #[inline(always)]
    fn insert_half_open(self, key: &CtKey, entry: &CtEntry) -> Inserted {
        if self.dry() {
            return Inserted::Exists;
        }
        inserted(put(map(&maps::CONNTRACK_NEW), key, entry, BPF_NOEXIST))
    }

    #[inline(always)]
    fn remove_established(self, key: &CtKey) -> bool {
        // SAFETY: the helper reads a key of the map's type.
        !self.dry()
            && unsafe {
                bpf::bpf_map_delete_elem(map(&maps::CONNTRACK).cast(), ptr::from_ref(key).cast()) == 0
            }
    }

    #[inline(always)]
    fn remove_half_open(self, key: &CtKey) {
        if !self.dry() {
            // SAFETY: the helper reads a key of the map's type.
            unsafe {
                bpf::bpf_map_delete_elem(map(&maps::CONNTRACK_NEW).cast(), ptr::from_ref(key).cast());
            }
        }
    }

    #[inline(never)]
    fn take_quota(self, key: &QuotaKey) -> bool {
        if self.dry() {
            return true;
        }
        let Some(quota) = find::<_, QuotaValue>(map(&maps::QUOTAS), key) else { return true };
        // This target has 64-bit atomics only: `used` is the low half of the value, `limit` the high one.
        let before = add(quota, 1);
        let (used, limit) = (before as u32, (before >> 32) as u32);
        if limit != 0 && used >= limit {
            add(quota, u64::MAX);
            return false;
        }
        true
    }

    #[inline(never)]
    fn give_quota(self, key: &QuotaKey) {
        if self.dry() {
            return;
        }
        if let Some(quota) = find::<_, QuotaValue>(map(&maps::QUOTAS), key) {
            add(quota, u64::MAX);
        }
    }

    #[inline(always)]
    fn is_node(self, addr: &Addr) -> bool {
        find::<_, u8>(map(&maps::NODES), addr).is_some()
    }

    #[inline(always)]
    fn fragment(self, key: &FragKey) -> Option<FragValue> {
        get::<_, FragValue>(map(&maps::FRAGMENTS), key).copied()
    }

    #[inline(always)]
    fn learn_fragment(self, key: &FragKey, value: &FragValue) {
        if !self.dry() {
            put(map(&maps::FRAGMENTS), key, value, BPF_ANY);
        }
    }

    #[inline(never)]
    fn service(self, key: &ServiceKey, into: &mut ServiceRecord) -> bool {
        whole(map(&maps::SERVICES), key, into)
    }

    #[inline(never)]
    fn backend(self, key: &BackendKey, into: &mut BackendRecord) -> bool {
        whole(map(&maps::BACKENDS), key, into)
    }

    #[inline(always)]
    fn member(self, key: &MemberKey) -> Option<u32> {
        get::<_, u32>(map(&maps::MEMBERS), key).copied()
    }

    #[inline(always)]
    fn in_range(self, key: &RangeKey) -> bool {
        find::<_, u32>(map(&maps::SRV_RANGES), key).is_some()
    }

    #[inline(never)]
    fn affinity(self, key: &AffinityKey, into: &mut AffinityValue) -> bool {
        whole(map(&maps::AFFINITY), key, into)
    }

    #[inline(never)]
    fn learn_affinity(self, key: &AffinityKey, value: &AffinityValue) {
        if !self.dry() {
            put(map(&maps::AFFINITY), key, value, BPF_ANY);
        }
    }

    #[inline(always)]
    fn touch_affinity(self, key: &AffinityKey, second: u32) {
        if let Some(v) = find::<_, AffinityValue>(map(&maps::AFFINITY), key).filter(|_| !self.dry()) {
            // SAFETY: a live value; an aligned word is written whole.
            unsafe { ptr::write_volatile(&raw mut (*v.as_ptr()).last_used, second) };
        }
    }

    #[inline(always)]
    fn netns(self, cookie: u64) -> Option<NetnsRecord> {
        get::<_, NetnsRecord>(map(&maps::NETNS), &cookie).copied()
    }

    #[inline(never)]
    fn socket(self, key: &SocketKey, into: &mut SocketValue) -> bool {
        whole(map(&maps::SOCKETS), key, into)
    }

    #[inline(always)]
    fn learn_socket(self, key: &SocketKey, value: &SocketValue) {
        if !self.dry() {
            put(map(&maps::SOCKETS), key, value, BPF_ANY);
        }
    }

    #[inline(always)]
    fn touch_socket(self, key: &SocketKey, second: u32) {
        if let Some(v) = find::<_, SocketValue>(map(&maps::SOCKETS), key).filter(|_| !self.dry()) {
            // SAFETY: a live value; an aligned word is written whole.
            unsafe { ptr::write_volatile(&raw mut (*v.as_ptr()).last_used, second) };
        }
    }

    #[inline(never)]
    fn flow(self, key: &FlowKey, into: &mut FlowValue) -> bool {
        whole(map(&maps::SRV_FLOWS), key, into)
    }

    #[inline(always)]
    fn is_flow(self, key: &FlowKey) -> bool {
        find::<_, FlowValue>(map(&maps::SRV_FLOWS), key).is_some()
    }

    #[inline(always)]
    fn learn_flow(self, key: &FlowKey, value: &FlowValue) {
        if !self.dry() {
            put(map(&maps::SRV_FLOWS), key, value, BPF_ANY);
        }
    }

    #[inline(always)]
    fn touch_flow(self, key: &FlowKey, second: u32) {
        if let Some(v) = find::<_, FlowValue>(map(&maps::SRV_FLOWS), key).filter(|_| !self.dry()) {
            // SAFETY: a live value; an aligned word is written whole.
            unsafe { ptr::write_volatile(&raw mut (*v.as_ptr()).last_seen, second) };
        }
    }

    #[inline(always)]
    fn random(self) -> u32 {
        // SAFETY: takes nothing.
        unsafe { bpf::bpf_get_prandom_u32() }
    }

    #[inline(always)]
    fn config(self) -> Option<&'static NodeConfig> {
        // Not `&0`: a constant may be merged with another zero of the object, and one of them is the loader's to change.
        let key = 0u32;
        get(map(&maps::CONFIG), &key)
    }

    #[inline(always)]
    fn count_traffic(self, endpoint: u32, side: u8, bytes: u32) {
        if self.dry() {
            return;
        }
        if let Some(counters) = find::<_, flowloom_bpf_abi::TrafficCounters>(map(&maps::TRAFFIC), &endpoint) {
            // SAFETY: this processor's own value.
            unsafe {
                let c = counters.as_ptr();
                if side == direction::EGRESS {
                    (*c).egress[0] = (*c).egress[0].wrapping_add(1);
                    (*c).egress[1] = (*c).egress[1].wrapping_add(bytes as u64);
                } else {
                    (*c).ingress[0] = (*c).ingress[0].wrapping_add(1);
                    (*c).ingress[1] = (*c).ingress[1].wrapping_add(bytes as u64);
                }
            }
        }
    }

    #[inline(never)]
    fn count_drop(self, key: &DropKey, bytes: u32) {
        if self.dry() {
            return;
        }
        match find(map(&maps::DROPS), key) {
            Some(c) => count(c, bytes),
            None => {
                put(map(&maps::DROPS), key, &Counter { packets: 1, bytes: bytes as u64 }, BPF_NOEXIST);
            }
        }
    }

    #[inline(never)]
    fn count_rule(self, rule: u32, bytes: u32) {
        if self.dry() {
            return;
        }
        match find(map(&maps::RULE_HITS), &rule) {
            Some(c) => count(c, bytes),
            None => {
                put(map(&maps::RULE_HITS), &rule, &Counter { packets: 1, bytes: bytes as u64 }, BPF_NOEXIST);
            }
        }
    }

    #[inline(never)]
    fn take_token(self, key: &RateKey, limit: u32, second: u32, lost: &mut u32) -> bool {
        if limit == 0 || self.dry() {
            return true;
        }
        let Some(bucket) = find::<_, RateValue>(map(&maps::RATES), key) else {
            put(map(&maps::RATES), key, &RateValue { second, tokens: limit - 1, refused: 0 }, BPF_NOEXIST);
            return true;
        };
        // SAFETY: a live value; what two processors lose here is a token.
        unsafe {
            let b = bucket.as_ptr();
            if (*b).second != second {
                (*b).second = second;
                (*b).tokens = limit;
            }
            if (*b).tokens == 0 {
                (*b).refused = (*b).refused.wrapping_add(1);
                return false;
            }
            (*b).tokens = (*b).tokens.wrapping_sub(1);
            *lost = (*b).refused as u32;
        }
        true
    }

    #[inline(always)]
    fn emit(self, event: &Event) {
        if !self.dry() {
            // SAFETY: the helper copies the record. A full ring loses it; user space sees that by the counters.
            unsafe {
                bpf::bpf_ringbuf_output(
                    map(&maps::EVENTS).cast(),
                    ptr::from_ref(event).cast_mut().cast(),
                    size_of::<Event>() as u64,
                    0,
                );
            }
        }
    }

    #[inline(always)]
    fn step(self, kind: u32, a: u32, b: u32, c: u32) {
        if self.dry() {
            trace(kind, a, b, c);
        }
    }

    #[inline(always)]
    fn now_ns(self) -> u64 {
        // SAFETY: takes nothing.
        unsafe { bpf::bpf_ktime_get_coarse_ns() }
    }

    #[inline(always)]
    fn once(self, field: &u32) -> u32 {
        // SAFETY: a valid reference; volatile: user space may be writing.
        unsafe { ptr::read_volatile(field) }
    }

    #[inline(always)]
    fn barrier(self) {
        // SAFETY: no instruction, only an order for the compiler.
        unsafe { core::arch::asm!("") }
    }
}

#[inline(never)]
fn trace(kind: u32, a: u32, b: u32, c: u32) {
    let Some(log) = maps::TRACE.get_ptr_mut(0) else { return };
    // SAFETY: the only value of a private map; the index is masked to the array's size.
    unsafe {
        let n = (*log).count;
        (*log).count = n.wrapping_add(1);
        if (n as usize) < MAX_TRACE_STEPS {
            let step = (&raw mut (*log).steps).cast::<TraceStep>().add(n as usize & (MAX_TRACE_STEPS - 1));
            *step = TraceStep { kind, a, b, c };
        }
    }
}
