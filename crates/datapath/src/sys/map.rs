//! Maps: typed single and batch operations, creation, facts.

use std::collections::BTreeMap;
use std::io;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use flowloom_bpf_abi as abi;

use super::{Command, bpf, fd_by_id, name_text, object_info, object_name, owned};

/// Values that may be read from and written to maps byte for byte.
///
/// # Safety
/// `repr(C)`, no implicit padding, every bit pattern valid.
pub unsafe trait Plain: Copy + Default + 'static {}

macro_rules! plain {
    ($($t:ty),* $(,)?) => {
        // SAFETY: integers, or structs of `flowloom-bpf-abi`, whose layout and padding are asserted there.
        $(unsafe impl Plain for $t {})*
    };
}
plain!(
    u32,
    u64,
    abi::Addr,
    abi::AddressKey,
    abi::AddressRecord,
    abi::AffinityKey,
    abi::AffinityValue,
    abi::BackendKey,
    abi::BackendRecord,
    abi::Counter,
    abi::CtEntry,
    abi::CtKey,
    abi::DeviceRecord,
    abi::DropKey,
    abi::EndpointRecord,
    abi::FlowKey,
    abi::FlowValue,
    abi::FragKey,
    abi::FragValue,
    abi::MemberKey,
    abi::MemberRecord,
    abi::NetnsRecord,
    abi::NodeConfig,
    abi::NodeRecord,
    abi::PeerKey,
    abi::PeerRecord,
    abi::PolicyKey,
    abi::PolicyValue,
    abi::QuotaKey,
    abi::QuotaValue,
    abi::RangeKey,
    abi::RateKey,
    abi::RateValue,
    abi::ServiceKey,
    abi::ServiceRecord,
    abi::SocketKey,
    abi::SocketValue,
    abi::TraceLog,
    abi::TrafficCounters,
    abi::VpcRecord,
);

/// Entries per batch call: bounds the memory of one call, large enough that the call's cost vanishes.
const BATCH: usize = 4096;

/// What the kernel says about a map.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MapFacts {
    /// Kernel id.
    pub id: u32,
    /// `BPF_MAP_TYPE_*`.
    pub kind: u32,
    /// Bytes.
    pub key_size: u32,
    /// Bytes.
    pub value_size: u32,
    /// Entries (bytes for a ring buffer).
    pub max_entries: u32,
    /// `BPF_F_*` given at creation.
    pub flags: u32,
    /// First 15 bytes of its name.
    pub name: String,
}

#[repr(C)]
#[derive(Default)]
struct KernelMapInfo {
    kind: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    name: [u8; 16],
}

/// Facts of a map.
///
/// # Errors
/// When the descriptor is no map.
pub fn map_facts(fd: BorrowedFd<'_>) -> io::Result<MapFacts> {
    let mut info = KernelMapInfo::default();
    // SAFETY: the struct is the prefix of `struct bpf_map_info`, plain integers, no pointers.
    unsafe { object_info(fd, &mut info) }?;
    Ok(MapFacts {
        id: info.id,
        kind: info.kind,
        key_size: info.key_size,
        value_size: info.value_size,
        max_entries: info.max_entries,
        flags: info.flags,
        name: name_text(&info.name),
    })
}

/// Opens a map by its kernel id.
///
/// # Errors
/// `NotFound` when it is gone.
pub fn map_by_id(id: u32) -> io::Result<OwnedFd> {
    fd_by_id(Command::MapById, id)
}

/// Bytes of kernel memory that a map is charged for (`memlock` of its fdinfo).
///
/// # Errors
/// When procfs cannot be read.
pub fn map_memory(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    text.lines()
        .find_map(|l| l.strip_prefix("memlock:")?.trim().parse().ok())
        .ok_or_else(|| io::Error::other("fdinfo has no memlock line"))
}

#[repr(C)]
#[derive(Default)]
struct CreateAttr {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner_fd: u32,
    numa_node: u32,
    name: [u8; 16],
}

/// `BPF_MAP_TYPE_LPM_TRIE`.
const KIND_LPM: u32 = 11;
/// `BPF_F_NO_PREALLOC`.
pub(crate) const NO_PREALLOC: u32 = 1;

/// Creates an LPM map: the only kind that user space makes by itself (inner policy maps).
///
/// # Errors
/// `E2BIG`, `ENOMEM`, `EPERM` as the kernel says.
pub fn map_create<K: Plain, V: Plain>(name: &str, max_entries: u32) -> io::Result<Map<K, V>> {
    let mut attr = CreateAttr {
        kind: KIND_LPM,
        key_size: std::mem::size_of::<K>() as u32,
        value_size: std::mem::size_of::<V>() as u32,
        max_entries,
        flags: NO_PREALLOC,
        name: object_name(name),
        ..CreateAttr::default()
    };
    // SAFETY: no pointers.
    let fd = owned(unsafe { bpf(Command::MapCreate, &mut attr) }?)?;
    Map::from_fd(fd)
}

#[repr(C)]
struct ElemAttr {
    fd: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    fd: u32,
    elem_flags: u64,
    flags: u64,
}

fn elem<K>(fd: &OwnedFd, command: Command, key: *const K, value: u64, flags: u64) -> io::Result<()> {
    let mut attr = ElemAttr { fd: fd.as_raw_fd() as u32, pad: 0, key: key as u64, value, flags };
    // SAFETY: callers in this file pass a key of the map's key size (or null where the command allows it) and a value buffer of the map's value size
    // (times the possible CPUs, rounded, for per-CPU maps); both live over the call.
    unsafe { bpf(command, &mut attr) }.map(drop)
}

/// A map with plain keys and values.
#[derive(Debug)]
pub struct Map<K, V> {
    fd: OwnedFd,
    kinds: PhantomData<fn(K) -> V>,
}

/// `BPF_ANY`.
const ANY: u64 = 0;
/// `BPF_NOEXIST`.
const NOEXIST: u64 = 1;

fn size_error(what: &str, facts: &MapFacts, key: usize, value: usize) -> io::Error {
    io::Error::other(format!(
        "{what} {:?} has keys of {} and values of {} bytes, expected {key} and {value}",
        facts.name, facts.key_size, facts.value_size
    ))
}

impl<K: Plain, V: Plain> Map<K, V> {
    /// Wraps a descriptor after comparing its sizes with the types'.
    ///
    /// # Errors
    /// When it is no map or the sizes differ.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        let facts = map_facts(fd.as_fd())?;
        let (key, value) = (std::mem::size_of::<K>(), std::mem::size_of::<V>());
        if (facts.key_size as usize, facts.value_size as usize) != (key, value) {
            return Err(size_error("map", &facts, key, value));
        }
        Ok(Self { fd, kinds: PhantomData })
    }

    /// The value of a key (for LPM maps: of exactly this prefix or the longest one covering it).
    ///
    /// # Errors
    /// Whatever the kernel says, except a missing key.
    pub fn get(&self, key: &K) -> io::Result<Option<V>> {
        let mut value = V::default();
        match elem(&self.fd, Command::MapLookup, key, std::ptr::from_mut(&mut value) as u64, 0) {
            Ok(()) => Ok(Some(value)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Writes one entry.
    ///
    /// # Errors
    /// `E2BIG` or `ENOSPC` when full.
    pub fn set(&self, key: &K, value: &V) -> io::Result<()> {
        elem(&self.fd, Command::MapUpdate, key, std::ptr::from_ref(value) as u64, ANY)
    }

    /// Writes one entry that must not exist yet. Returns whether it was written.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub fn insert_new(&self, key: &K, value: &V) -> io::Result<bool> {
        match elem(&self.fd, Command::MapUpdate, key, std::ptr::from_ref(value) as u64, NOEXIST) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Removes one entry. Returns whether it was there.
    ///
    /// # Errors
    /// Whatever the kernel says, except a missing key.
    pub fn remove(&self, key: &K) -> io::Result<bool> {
        match elem(&self.fd, Command::MapDelete, key, 0, 0) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Writes many entries, [`BATCH`] per call. Returns the number of calls.
    ///
    /// # Errors
    /// The first refusal; entries before it are written.
    pub fn set_batch(&self, keys: &[K], values: &[V]) -> io::Result<u32> {
        if keys.len() != values.len() {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let mut calls = 0;
        for (keys, values) in keys.chunks(BATCH).zip(values.chunks(BATCH)) {
            let mut attr = self.batch_attr(keys.as_ptr() as u64, values.as_ptr() as u64, keys.len());
            // SAFETY: both slices hold `count` elements of the map's key and value size; the kernel only reads them.
            unsafe { bpf(Command::MapUpdateBatch, &mut attr) }?;
            calls += 1;
        }
        Ok(calls)
    }

    /// Removes many entries; missing ones are skipped. Returns, per key, whether it was removed.
    ///
    /// # Errors
    /// Whatever the kernel says, except missing keys.
    pub fn remove_batch(&self, keys: &[K]) -> io::Result<Vec<bool>> {
        let mut removed = Vec::with_capacity(keys.len());
        while removed.len() < keys.len() {
            let rest = &keys[removed.len()..];
            let rest = &rest[..rest.len().min(BATCH)];
            let mut attr = self.batch_attr(rest.as_ptr() as u64, 0, rest.len());
            // SAFETY: the slice holds `count` keys of the map's key size; the kernel only reads them.
            let result = unsafe { bpf(Command::MapDeleteBatch, &mut attr) };
            // The kernel stops at the first missing key and says how many it removed.
            let done = (attr.count as usize).min(rest.len());
            removed.extend(std::iter::repeat_n(true, done));
            match result {
                Ok(_) if done == rest.len() => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound && done < rest.len() => removed.push(false),
                Ok(_) => return Err(io::Error::other("a batch removal ended early without an error")),
                Err(e) => return Err(e),
            }
        }
        Ok(removed)
    }

    fn batch_attr(&self, keys: u64, values: u64, count: usize) -> BatchAttr {
        BatchAttr {
            in_batch: 0,
            out_batch: 0,
            keys,
            values,
            count: count as u32,
            fd: self.fd.as_raw_fd() as u32,
            elem_flags: 0,
            flags: 0,
        }
    }

    /// Calls `f` with every entry, read in batches. Entries that come or go meanwhile may or may not be seen.
    ///
    /// # Errors
    /// Whatever the kernel says.
    pub fn for_each(&self, mut f: impl FnMut(&K, &V)) -> io::Result<()> {
        walk_batches::<K, V>(&self.fd, 1, |keys, values| {
            for (k, v) in keys.iter().zip(values) {
                f(k, v);
            }
            Ok(ControlFlow::Continue(()))
        })
    }

    /// Whether some key is one of those that `wanted` means; reads no further than that.
    ///
    /// # Errors
    /// Whatever the kernel says.
    pub fn any_key(&self, wanted: impl Fn(&K) -> bool) -> io::Result<bool> {
        let mut found = false;
        walk_batches::<K, V>(&self.fd, 1, |keys, _| {
            found = keys.iter().any(&wanted);
            Ok(if found { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        Ok(found)
    }

    /// Every entry, in the order of the keys.
    ///
    /// # Errors
    /// Whatever the kernel says.
    pub fn entries(&self) -> io::Result<BTreeMap<K, V>>
    where
        K: Ord,
    {
        let mut out = BTreeMap::new();
        self.for_each_batch(|keys, values| {
            out.extend(keys.iter().copied().zip(values.iter().copied()));
            Ok(())
        })?;
        Ok(out)
    }

    /// Calls `f` with slices of entries as the kernel returned them; `f` may write to the map.
    ///
    /// # Errors
    /// Whatever the kernel or `f` says.
    pub fn for_each_batch(&self, mut f: impl FnMut(&[K], &[V]) -> io::Result<()>) -> io::Result<()> {
        walk_batches::<K, V>(&self.fd, 1, |keys, values| f(keys, values).map(ControlFlow::Continue))
    }

    /// The key after `key` (the first one for `None`).
    ///
    /// # Errors
    /// Whatever the kernel says, except the end.
    pub fn next_key(&self, key: Option<&K>) -> io::Result<Option<K>> {
        let mut next = K::default();
        let from = key.map_or(std::ptr::null(), std::ptr::from_ref);
        match elem(&self.fd, Command::MapNextKey, from, std::ptr::from_mut(&mut next) as u64, 0) {
            Ok(()) => Ok(Some(next)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Facts of the map.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn facts(&self) -> io::Result<MapFacts> {
        map_facts(self.fd.as_fd())
    }
}

impl<K, V> AsFd for Map<K, V> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Reads a whole map; `per_key` values of `V` stand behind each key.
fn walk_batches<K: Plain, V: Plain>(
    fd: &OwnedFd,
    per_key: usize,
    mut f: impl FnMut(&[K], &[V]) -> io::Result<ControlFlow<()>>,
) -> io::Result<()> {
    let mut size = BATCH;
    // The position is a hash bucket (4 bytes) or a key, whichever the map type uses.
    let mut position = vec![0u64; std::mem::size_of::<K>().max(8).div_ceil(8)];
    let mut next = position.clone();
    let mut first = true;
    loop {
        let mut keys = vec![K::default(); size];
        let mut values = vec![V::default(); size * per_key];
        let mut attr = BatchAttr {
            in_batch: if first { 0 } else { position.as_ptr() as u64 },
            out_batch: next.as_mut_ptr() as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: size as u32,
            fd: fd.as_raw_fd() as u32,
            elem_flags: 0,
            flags: 0,
        };
        // SAFETY: the buffers hold `count` keys and values (times the CPUs) of the sizes compared at construction; the positions hold a key or a bucket number.
        let result = unsafe { bpf(Command::MapLookupBatch, &mut attr) };
        let end = match &result {
            Ok(_) => false,
            Err(e) if e.kind() == io::ErrorKind::NotFound => true,
            // One bucket holds more than the buffer: larger buffer, same position.
            Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => {
                size *= 2;
                continue;
            }
            Err(_) => return result.map(drop),
        };
        let count = (attr.count as usize).min(size);
        if f(&keys[..count], &values[..count * per_key])?.is_break() || end {
            return Ok(());
        }
        std::mem::swap(&mut position, &mut next);
        first = false;
    }
}

/// A per-CPU map with plain keys and values whose size is a multiple of 8.
#[derive(Debug)]
pub struct PerCpuMap<K, V> {
    fd: OwnedFd,
    cpus: usize,
    kinds: PhantomData<fn(K) -> V>,
}

impl<K: Plain, V: Plain> PerCpuMap<K, V> {
    /// Wraps a descriptor after comparing its sizes with the types'.
    ///
    /// # Errors
    /// When it is no map, the sizes differ, or the CPUs cannot be counted.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        const {
            assert!(
                std::mem::size_of::<V>().is_multiple_of(8),
                "the kernel rounds per-CPU values up to 8 bytes"
            )
        };
        let facts = map_facts(fd.as_fd())?;
        let (key, value) = (std::mem::size_of::<K>(), std::mem::size_of::<V>());
        if (facts.key_size as usize, facts.value_size as usize) != (key, value) {
            return Err(size_error("per-CPU map", &facts, key, value));
        }
        Ok(Self { fd, cpus: possible_cpus()?, kinds: PhantomData })
    }

    /// The values of a key, one per possible CPU; empty when the key is missing.
    ///
    /// # Errors
    /// Whatever the kernel says, except a missing key.
    pub fn get(&self, key: &K) -> io::Result<Vec<V>> {
        let mut values = vec![V::default(); self.cpus];
        match elem(&self.fd, Command::MapLookup, key, values.as_mut_ptr() as u64, 0) {
            Ok(()) => Ok(values),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(e),
        }
    }

    /// Writes the same kind of value for every CPU.
    ///
    /// # Errors
    /// As the kernel says.
    pub fn set(&self, key: &K, value: V) -> io::Result<()> {
        let values = vec![value; self.cpus];
        elem(&self.fd, Command::MapUpdate, key, values.as_ptr() as u64, ANY)
    }

    /// Removes one entry. Returns whether it was there.
    ///
    /// # Errors
    /// Whatever the kernel says, except a missing key.
    pub fn remove(&self, key: &K) -> io::Result<bool> {
        match elem(&self.fd, Command::MapDelete, key, 0, 0) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Calls `f` with every key and its values, one per possible CPU.
    ///
    /// # Errors
    /// Whatever the kernel says.
    pub fn for_each(&self, mut f: impl FnMut(&K, &[V])) -> io::Result<()> {
        let cpus = self.cpus;
        walk_batches::<K, V>(&self.fd, cpus, |keys, values| {
            for (k, v) in keys.iter().zip(values.chunks(cpus)) {
                f(k, v);
            }
            Ok(ControlFlow::Continue(()))
        })
    }
}

impl<K, V> AsFd for PerCpuMap<K, V> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// CPUs that the kernel keeps per-CPU values for (`/sys/devices/system/cpu/possible`).
///
/// # Errors
/// When sysfs cannot be read.
pub fn possible_cpus() -> io::Result<usize> {
    static CPUS: OnceLock<usize> = OnceLock::new();
    if let Some(n) = CPUS.get() {
        return Ok(*n);
    }
    let text = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let n = parse_cpus(text.trim()).ok_or_else(|| io::Error::other(format!("possible CPUs {text:?}")))?;
    Ok(*CPUS.get_or_init(|| n))
}

fn parse_cpus(text: &str) -> Option<usize> {
    text.split(',')
        .map(|range| {
            let (a, b) = range.split_once('-').unwrap_or((range, range));
            let (a, b): (usize, usize) = (a.parse().ok()?, b.parse().ok()?);
            (a <= b).then(|| b - a + 1)
        })
        .sum::<Option<usize>>()
        .filter(|n| *n > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_counted() {
        assert_eq!(parse_cpus("0"), Some(1));
        assert_eq!(parse_cpus("0-3"), Some(4));
        assert_eq!(parse_cpus("0-1,4-7"), Some(6));
        assert_eq!(parse_cpus("3-1"), None);
        assert_eq!(parse_cpus(""), None);
    }
}
