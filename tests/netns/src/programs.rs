//! The BPF object, loaded with private maps.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use aya::maps::{Array, HashMap, HashOfMaps, LpmTrie, MapData, PerCpuHashMap, lpm_trie};
use aya::programs::{CgroupSockAddr, ProgramInfo, SchedClassifier};
use aya::{Ebpf, EbpfLoader, Pod};
use flowloom_bpf_abi::{self as abi, Addr, map_name};

/// Names of the programs.
pub const PROGRAMS: [&str; 6] =
    ["from_endpoint", "to_endpoint", "from_overlay", "to_overlay", "from_uplink", "to_uplink"];

/// Names of the programs that cgroups run.
pub const SOCKET_PROGRAMS: [&str; 8] =
    ["connect4", "connect6", "sendmsg4", "sendmsg6", "recvmsg4", "recvmsg6", "getpeername4", "getpeername6"];

/// A policy entry: key and value of an inner map.
pub type Entry = (abi::PolicyKey, abi::PolicyValue);

/// The programs and their maps. Nothing is pinned: all goes when the value does.
#[derive(Debug)]
pub struct Programs {
    /// aya's view.
    pub ebpf: Ebpf,
}

impl Programs {
    /// Loads the object and every program.
    ///
    /// # Errors
    /// When the crate was built with a stub, or the kernel refuses a program (the message holds the verifier's log).
    pub fn load(dry_run: bool) -> Result<Self> {
        // Small tables: tests load many times.
        let mut loaded = Self::classifiers(flowloom_bpf_object::object()?, dry_run, [4096; 2])?;
        for name in SOCKET_PROGRAMS {
            let program = loaded.socket_program(name)?;
            program.load().map_err(|e| anyhow::anyhow!("{name}: {}", full(&e)))?;
        }
        Ok(loaded)
    }

    /// [`PROGRAMS`] of any object, with tables for this many connections (established, half open).
    ///
    /// # Errors
    /// When the kernel refuses a program (the message holds the verifier's log).
    pub fn classifiers(object: &[u8], dry_run: bool, connections: [u32; 2]) -> Result<Self> {
        let mut loader = EbpfLoader::new();
        let flag = u32::from(dry_run);
        loader.override_global("DRY_RUN", &flag, true);
        loader
            .map_max_entries(map_name::CONNTRACK, connections[0])
            .map_max_entries(map_name::CONNTRACK_NEW, connections[1])
            .map_max_entries(map_name::IPCACHE, 65_536);
        let mut ebpf = loader.load(object).context("cannot load the BPF object")?;
        for name in PROGRAMS {
            let program: &mut SchedClassifier =
                ebpf.program_mut(name).with_context(|| format!("no program {name}"))?.try_into()?;
            program.load().map_err(|e| anyhow::anyhow!("{name}: {}", full(&e)))?;
        }
        Ok(Self { ebpf })
    }

    /// What the kernel says about a program of any kind.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn info(&mut self, name: &str) -> Result<ProgramInfo> {
        Ok(self.ebpf.program_mut(name).with_context(|| format!("no program {name}"))?.info()?)
    }

    /// A program that a cgroup runs.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn socket_program(&mut self, name: &str) -> Result<&mut CgroupSockAddr> {
        Ok(self.ebpf.program_mut(name).with_context(|| format!("no program {name}"))?.try_into()?)
    }

    /// A program.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn program(&mut self, name: &str) -> Result<&mut SchedClassifier> {
        Ok(self.ebpf.program_mut(name).with_context(|| format!("no program {name}"))?.try_into()?)
    }

    fn hash<K: Pod, V: Pod>(&mut self, name: &str) -> Result<HashMap<&mut MapData, K, V>> {
        Ok(self.ebpf.map_mut(name).with_context(|| format!("no map {name}"))?.try_into()?)
    }

    /// Writes an entry of a hash.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn put<K: Pod, V: Pod>(&mut self, name: &str, key: K, value: V) -> Result<()> {
        self.hash::<K, V>(name)?.insert(key, value, 0).with_context(|| format!("writing {name}"))
    }

    /// Removes an entry of a hash.
    ///
    /// # Errors
    /// When there is none.
    pub fn remove<K: Pod, V: Pod>(&mut self, name: &str, key: &K) -> Result<()> {
        self.hash::<K, V>(name)?.remove(key).with_context(|| format!("removing from {name}"))
    }

    /// Every entry of a hash.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn dump<K: Pod, V: Pod>(&mut self, name: &str) -> Result<Vec<(K, V)>> {
        Ok(self.hash::<K, V>(name)?.iter().collect::<Result<_, _>>()?)
    }

    /// Writes an element of an array.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set<V: Pod>(&mut self, name: &str, index: u32, value: V) -> Result<()> {
        let mut array: Array<_, V> =
            self.ebpf.map_mut(name).with_context(|| format!("no map {name}"))?.try_into()?;
        array.set(index, value, 0).with_context(|| format!("writing {name}"))
    }

    /// Reads an element of an array.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn get<V: Pod>(&self, name: &str, index: u32) -> Result<V> {
        let array: Array<_, V> = self.ebpf.map(name).with_context(|| format!("no map {name}"))?.try_into()?;
        array.get(&index, 0).with_context(|| format!("reading {name}"))
    }

    /// Writes a peer of the ipcache; `prefix` counts the bits of the address in its own family.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn peer(&mut self, vpc: u32, ip: IpAddr, prefix: u8, record: abi::PeerRecord) -> Result<()> {
        let mut trie: LpmTrie<_, [u8; 20], abi::PeerRecord> =
            self.ebpf.map_mut(map_name::IPCACHE).context("no ipcache")?.try_into()?;
        let bits = 32 + u32::from(prefix) + if ip.is_ipv4() { 96 } else { 0 };
        let mut data = [0; 20];
        data[..4].copy_from_slice(&vpc.to_ne_bytes());
        data[4..].copy_from_slice(&Addr::from(ip).0);
        trie.insert(&lpm_trie::Key::new(bits, data), record, 0).context("writing the ipcache")
    }

    /// Lets an address use a service with source ranges.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn admit(&mut self, service: u32, ip: IpAddr) -> Result<()> {
        let mut trie: LpmTrie<_, [u8; 20], u32> =
            self.ebpf.map_mut(map_name::SRV_RANGES).context("no ranges")?.try_into()?;
        let mut data = [0; 20];
        data[..4].copy_from_slice(&service.to_ne_bytes());
        data[4..].copy_from_slice(&Addr::from(ip).0);
        trie.insert(&lpm_trie::Key::new(abi::RangeKey::FULL_BITS, data), 1, 0).context("writing the ranges")
    }

    /// Fills a slot with a new inner map.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn policy(&mut self, slot: u32, entries: &[Entry]) -> Result<()> {
        let size = abi::POLICY_MIN_ENTRIES.max(entries.len() as u32 * 2);
        let mut inner = LpmTrie::<MapData, [u8; 8], abi::PolicyValue>::create(size, 1)?;
        for (key, value) in entries {
            let mut data = [0; 8];
            data[..4].copy_from_slice(&key.identity.to_ne_bytes());
            data[4] = key.protocol;
            data[5..7].copy_from_slice(&key.port);
            inner.insert(&lpm_trie::Key::new(key.prefixlen, data), value, 0)?;
        }
        let mut outer: HashOfMaps<_, u32, LpmTrie<MapData, [u8; 8], abi::PolicyValue>> =
            self.ebpf.map_mut(map_name::POLICY).context("no policy map")?.try_into()?;
        outer.insert(slot, &inner, 0).context("writing a slot")
    }

    /// Bumps the generation of a VPC.
    ///
    /// # Errors
    /// When there is no such VPC.
    pub fn bump(&mut self, vpc: u32) -> Result<()> {
        self.change_vpc(vpc, |record| record.generation += 1)
    }

    /// Changes the record of a VPC.
    ///
    /// # Errors
    /// When there is no such VPC.
    pub fn change_vpc(&mut self, vpc: u32, change: impl FnOnce(&mut abi::VpcRecord)) -> Result<()> {
        let mut map = self.hash::<u32, abi::VpcRecord>(map_name::VPCS)?;
        let mut record = map.get(&vpc, 0)?;
        change(&mut record);
        Ok(map.insert(vpc, record, 0)?)
    }

    /// Packets dropped so far by reason, all endpoints and processors together, but for what a workload's kernel sends
    /// unasked and at a time of its own (it reports the groups of a new device): no test can count on those.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn drops(&self) -> Result<std::collections::BTreeMap<String, u64>> {
        let mut drops = self.every_drop()?;
        drops.remove(abi::DropReason::GroupMembership.name());
        Ok(drops)
    }

    /// [`Self::drops`], all of them: for programs that are only run by hand, with no device.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn every_drop(&self) -> Result<std::collections::BTreeMap<String, u64>> {
        let map: PerCpuHashMap<_, abi::DropKey, abi::Counter> =
            self.ebpf.map(map_name::DROPS).context("no drops map")?.try_into()?;
        let mut sums = std::collections::BTreeMap::new();
        for entry in map.iter() {
            let (key, values) = entry?;
            let name = abi::DropReason::from_u8(key.reason).map_or("?", abi::DropReason::name);
            *sums.entry(name.to_owned()).or_default() += values.iter().map(|v| v.packets).sum::<u64>();
        }
        Ok(sums)
    }
}

/// An entry for `identity` (0 = any), a protocol (0 = any) and a port prefix.
#[must_use]
pub fn entry(identity: u32, protocol: u8, port: Option<(u16, u32)>, precedence: u32, verdict: u8) -> Entry {
    let (port, bits) = port.unwrap_or((0, 0));
    let prefixlen = if protocol == 0 { 32 } else { 40 + bits };
    (
        abi::PolicyKey { prefixlen, identity, protocol, port: port.to_be_bytes(), pad: 0 },
        abi::PolicyValue { precedence, rule: precedence, verdict, flags: 0, pad: [0; 2] },
    )
}

/// An error with its causes: the verifier's log is one of them.
fn full(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut next = e.source();
    while let Some(e) = next {
        text.push_str(": ");
        text.push_str(&e.to_string());
        next = e.source();
    }
    text
}
