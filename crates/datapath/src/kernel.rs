//! The kernel's maps, typed, and the real [`Realise`].

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use flowloom_bpf_abi::{self as abi, map_name as name};
use flowloom_compiler::PolicyEntries;

use crate::error::{Context as _, Error, Result};
use crate::lower;
use crate::realise::{Realise, Write, WriteHook};
use crate::services::ServiceState;
use crate::state::KernelState;
use crate::sys::{self, Map, PerCpuMap};

/// Every pinned map of the datapath.
#[derive(Debug)]
pub(crate) struct Maps {
    pub(crate) devices: Map<u32, abi::DeviceRecord>,
    pub(crate) endpoints: Map<u32, abi::EndpointRecord>,
    pub(crate) addresses: Map<abi::AddressKey, abi::AddressRecord>,
    pub(crate) ipcache: Map<abi::PeerKey, abi::PeerRecord>,
    pub(crate) vpcs: Map<u32, abi::VpcRecord>,
    /// Written with descriptors, read as map ids.
    pub(crate) policy: Map<u32, u32>,
    pub(crate) conntrack_new: Map<abi::CtKey, abi::CtEntry>,
    pub(crate) conntrack: Map<abi::CtKey, abi::CtEntry>,
    pub(crate) quotas: Map<abi::QuotaKey, abi::QuotaValue>,
    pub(crate) nodes: Map<abi::Addr, abi::NodeRecord>,
    pub(crate) fragments: Map<abi::FragKey, abi::FragValue>,
    pub(crate) traffic: PerCpuMap<u32, abi::TrafficCounters>,
    pub(crate) drops: PerCpuMap<abi::DropKey, abi::Counter>,
    pub(crate) rule_hits: PerCpuMap<u32, abi::Counter>,
    pub(crate) events: OwnedFd,
    pub(crate) rates: Map<abi::RateKey, abi::RateValue>,
    pub(crate) config: Map<u32, abi::NodeConfig>,
    pub(crate) services: Map<abi::ServiceKey, abi::ServiceRecord>,
    pub(crate) backends: Map<abi::BackendKey, abi::BackendRecord>,
    pub(crate) members: Map<abi::MemberKey, abi::MemberRecord>,
    pub(crate) affinity: Map<abi::AffinityKey, abi::AffinityValue>,
    pub(crate) ranges: Map<abi::RangeKey, u32>,
    pub(crate) sockets: Map<abi::SocketKey, abi::SocketValue>,
    pub(crate) netns: Map<u64, abi::NetnsRecord>,
    pub(crate) flows: Map<abi::FlowKey, abi::FlowValue>,
}

impl Maps {
    /// Opens each by `open(name)`.
    pub(crate) fn open(mut open: impl FnMut(&str) -> Result<OwnedFd>) -> Result<Self> {
        fn typed<K: sys::Plain, V: sys::Plain>(name: &str, fd: OwnedFd) -> Result<Map<K, V>> {
            Map::from_fd(fd).in_map("opening", name)
        }
        fn per_cpu<K: sys::Plain, V: sys::Plain>(name: &str, fd: OwnedFd) -> Result<PerCpuMap<K, V>> {
            PerCpuMap::from_fd(fd).in_map("opening", name)
        }
        Ok(Self {
            devices: typed(name::DEVICES, open(name::DEVICES)?)?,
            endpoints: typed(name::ENDPOINTS, open(name::ENDPOINTS)?)?,
            addresses: typed(name::ADDRESSES, open(name::ADDRESSES)?)?,
            ipcache: typed(name::IPCACHE, open(name::IPCACHE)?)?,
            vpcs: typed(name::VPCS, open(name::VPCS)?)?,
            policy: typed(name::POLICY, open(name::POLICY)?)?,
            conntrack_new: typed(name::CONNTRACK_NEW, open(name::CONNTRACK_NEW)?)?,
            conntrack: typed(name::CONNTRACK, open(name::CONNTRACK)?)?,
            quotas: typed(name::QUOTAS, open(name::QUOTAS)?)?,
            nodes: typed(name::NODES, open(name::NODES)?)?,
            fragments: typed(name::FRAGMENTS, open(name::FRAGMENTS)?)?,
            traffic: per_cpu(name::TRAFFIC, open(name::TRAFFIC)?)?,
            drops: per_cpu(name::DROPS, open(name::DROPS)?)?,
            rule_hits: per_cpu(name::RULE_HITS, open(name::RULE_HITS)?)?,
            events: open(name::EVENTS)?,
            rates: typed(name::RATES, open(name::RATES)?)?,
            config: typed(name::CONFIG, open(name::CONFIG)?)?,
            services: typed(name::SERVICES, open(name::SERVICES)?)?,
            backends: typed(name::BACKENDS, open(name::BACKENDS)?)?,
            members: typed(name::MEMBERS, open(name::MEMBERS)?)?,
            affinity: typed(name::AFFINITY, open(name::AFFINITY)?)?,
            ranges: typed(name::SRV_RANGES, open(name::SRV_RANGES)?)?,
            sockets: typed(name::SOCKETS, open(name::SOCKETS)?)?,
            netns: typed(name::NETNS, open(name::NETNS)?)?,
            flows: typed(name::SRV_FLOWS, open(name::SRV_FLOWS)?)?,
        })
    }

    /// The inner map of a slot.
    pub(crate) fn inner(&self, slot: u32) -> Result<Option<Map<abi::PolicyKey, abi::PolicyValue>>> {
        let Some(id) = self.policy.get(&slot).in_map("reading", name::POLICY)? else { return Ok(None) };
        self.inner_by_id(slot, id).map(Some)
    }

    fn inner_by_id(&self, slot: u32, id: u32) -> Result<Map<abi::PolicyKey, abi::PolicyValue>> {
        sys::map_by_id(id).and_then(Map::from_fd).in_map("opening", &inner_name(slot))
    }

    pub(crate) fn read_services(&self) -> Result<ServiceState> {
        Ok(ServiceState {
            services: all(&self.services, name::SERVICES)?,
            backends: all(&self.backends, name::BACKENDS)?,
            members: all(&self.members, name::MEMBERS)?,
            ranges: all(&self.ranges, name::SRV_RANGES)?.into_keys().collect(),
        })
    }

    pub(crate) fn read(&self) -> Result<KernelState> {
        let mut endpoints = all(&self.endpoints, name::ENDPOINTS)?;
        endpoints.retain(|_, r| lower::is_valid(r));
        let mut policies = BTreeMap::new();
        for (slot, id) in all(&self.policy, name::POLICY)? {
            policies.insert(slot, all(&self.inner_by_id(slot, id)?, &inner_name(slot))?);
        }
        Ok(KernelState {
            config: self.config.get(&0).in_map("reading", name::CONFIG)?.unwrap_or_default(),
            devices: all(&self.devices, name::DEVICES)?,
            endpoints,
            addresses: all(&self.addresses, name::ADDRESSES)?,
            peers: all(&self.ipcache, name::IPCACHE)?,
            vpcs: all(&self.vpcs, name::VPCS)?,
            nodes: all(&self.nodes, name::NODES)?,
            policies,
            namespaces: all(&self.netns, name::NETNS)?,
            services: self.read_services()?,
        })
    }
}

fn all<K: sys::Plain + Ord, V: sys::Plain>(map: &Map<K, V>, name: &str) -> Result<BTreeMap<K, V>> {
    map.entries().in_map("reading", name)
}

fn inner_name(slot: u32) -> String {
    format!("fl_pol_{slot}")
}

/// Entries that an inner map is made for: twice what it needs now, so that peers fit in place.
fn inner_capacity(needed: usize) -> u32 {
    u32::try_from(needed.saturating_mul(2)).unwrap_or(u32::MAX).max(abi::POLICY_MIN_ENTRIES)
}

/// Counts writes and lets the owner end a run before one.
#[derive(Default)]
pub(crate) struct Writes {
    done: u64,
    hook: Option<WriteHook>,
}

impl fmt::Debug for Writes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writes").field("done", &self.done).field("hook", &self.hook.is_some()).finish()
    }
}

impl Writes {
    pub(crate) fn step(&mut self) -> Result<()> {
        if let Some(hook) = &mut self.hook {
            hook(self.done + 1).map_err(Error::Aborted)?;
        }
        self.done += 1;
        Ok(())
    }

    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    pub(crate) fn set_hook(&mut self, hook: Option<WriteHook>) {
        self.hook = hook;
    }
}

/// Writes to the kernel's maps.
#[derive(Debug)]
pub(crate) struct Kernel<'a> {
    pub(crate) maps: &'a Maps,
    pub(crate) writes: &'a mut Writes,
}

impl Kernel<'_> {
    fn put<K: sys::Plain, V: sys::Plain>(
        &mut self,
        map: &Map<K, V>,
        name: &str,
        key: &K,
        value: Option<&V>,
    ) -> Result<()> {
        self.writes.step()?;
        match value {
            Some(v) => map.set(key, v).in_map("writing", name),
            None => map.remove(key).map(drop).in_map("removing from", name),
        }
    }

    fn put_all<K: sys::Plain, V: sys::Plain>(
        &mut self,
        map: &Map<K, V>,
        name: &str,
        entries: impl Iterator<Item = (K, V)>,
    ) -> Result<()> {
        let (keys, values): (Vec<_>, Vec<_>) = entries.unzip();
        if keys.is_empty() {
            return Ok(());
        }
        self.writes.step()?;
        map.set_batch(&keys, &values).in_map("writing", name).map(drop)
    }

    fn remove_all<K: sys::Plain, V: sys::Plain>(
        &mut self,
        map: &Map<K, V>,
        name: &str,
        keys: &[K],
    ) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        self.writes.step()?;
        map.remove_batch(keys).in_map("removing from", name).map(drop)
    }

    fn fill(
        &mut self,
        slot: u32,
        entries: &PolicyEntries,
        capacity: u32,
    ) -> Result<Map<abi::PolicyKey, abi::PolicyValue>> {
        let name = inner_name(slot);
        self.writes.step()?;
        let inner = sys::map_create(&name, capacity).in_map("creating", &name)?;
        let (keys, values): (Vec<_>, Vec<_>) = entries.iter().map(|(k, v)| (*k, *v)).unzip();
        if !keys.is_empty() {
            self.writes.step()?;
            inner.set_batch(&keys, &values).in_map("filling", &name)?;
        }
        Ok(inner)
    }

    fn create_policies(&mut self, policies: &[(u32, &PolicyEntries)]) -> Result<()> {
        let mut inners = Vec::with_capacity(policies.len());
        for (slot, entries) in policies {
            inners.push(self.fill(*slot, entries, inner_capacity(entries.len()))?);
        }
        let slots: Vec<u32> = policies.iter().map(|(s, _)| *s).collect();
        let fds: Vec<u32> = inners.iter().map(|m| m.as_fd().as_raw_fd() as u32).collect();
        self.writes.step()?;
        self.maps.policy.set_batch(&slots, &fds).in_map("writing", name::POLICY).map(drop)
    }

    fn add_entries(&mut self, slot: u32, entries: &PolicyEntries) -> Result<()> {
        let inner = self.maps.inner(slot)?.ok_or_else(|| Error::Invalid {
            object: format!("policy slot {slot}"),
            detail: "it has no inner map to add entries to".to_owned(),
        })?;
        let (keys, values): (Vec<_>, Vec<_>) = entries.iter().map(|(k, v)| (*k, *v)).unzip();
        self.writes.step()?;
        match inner.set_batch(&keys, &values) {
            Ok(_) => Ok(()),
            Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => self.grow(slot, &inner, entries),
            Err(e) => Err(e).in_map("writing", &inner_name(slot)),
        }
    }

    /// The inner map is full: a larger copy with the new entries takes its place in one pointer write.
    fn grow(
        &mut self,
        slot: u32,
        inner: &Map<abi::PolicyKey, abi::PolicyValue>,
        entries: &PolicyEntries,
    ) -> Result<()> {
        let mut all = inner.entries().in_map("reading", &inner_name(slot))?;
        all.extend(entries.iter().map(|(k, v)| (*k, *v)));
        let larger = self.fill(slot, &all, inner_capacity(all.len()))?;
        self.writes.step()?;
        self.maps.policy.set(&slot, &(larger.as_fd().as_raw_fd() as u32)).in_map("writing", name::POLICY)
    }
}

impl Realise for Kernel<'_> {
    fn write(&mut self, write: &Write<'_>) -> Result<()> {
        let maps = self.maps;
        match write {
            Write::Config(c) => self.put(&maps.config, name::CONFIG, &0, Some(c)),
            Write::Device(i, r) => self.put(&maps.devices, name::DEVICES, i, r.as_ref()),
            Write::Vpc(id, r) => self.put(&maps.vpcs, name::VPCS, id, r.as_ref()),
            Write::Address(k, r) => self.put(&maps.addresses, name::ADDRESSES, k, r.as_ref()),
            Write::Node(a, r) => self.put(&maps.nodes, name::NODES, a, r.as_ref()),
            Write::Endpoint(id, r) => self.put(&maps.endpoints, name::ENDPOINTS, id, Some(r)),
            Write::PutPeers(peers) => {
                let (keys, values): (Vec<_>, Vec<_>) = peers.iter().copied().unzip();
                self.writes.step()?;
                maps.ipcache.set_batch(&keys, &values).in_map("writing", name::IPCACHE).map(drop)
            }
            Write::RemovePeers(keys) => {
                self.writes.step()?;
                maps.ipcache.remove_batch(keys).in_map("removing from", name::IPCACHE).map(drop)
            }
            Write::CreatePolicies(policies) => self.create_policies(policies),
            Write::FreePolicies(slots) => {
                self.writes.step()?;
                maps.policy.remove_batch(slots).in_map("removing from", name::POLICY).map(drop)
            }
            Write::AddEntries(slot, entries) => self.add_entries(*slot, entries),
            Write::RemoveEntries(slot, keys) => {
                let Some(inner) = maps.inner(*slot)? else { return Ok(()) };
                self.writes.step()?;
                inner.remove_batch(keys).in_map("removing from", &inner_name(*slot)).map(drop)
            }
            Write::PutBackends(backends, members) => {
                self.put_all(&maps.members, name::MEMBERS, members.iter().copied())?;
                self.put_all(&maps.backends, name::BACKENDS, backends.iter().copied())
            }
            Write::RemoveBackends(backends, members) => {
                self.remove_all(&maps.backends, name::BACKENDS, backends)?;
                self.remove_all(&maps.members, name::MEMBERS, members)
            }
            Write::PutServices(s) => self.put_all(&maps.services, name::SERVICES, s.iter().copied()),
            Write::RemoveServices(keys) => self.remove_all(&maps.services, name::SERVICES, keys),
            Write::PutRanges(keys) => {
                self.put_all(&maps.ranges, name::SRV_RANGES, keys.iter().map(|k| (*k, 1)))
            }
            Write::RemoveRanges(keys) => self.remove_all(&maps.ranges, name::SRV_RANGES, keys),
            Write::Netns(cookie, r) => self.put(&maps.netns, name::NETNS, cookie, r.as_ref()),
        }
    }

    fn writes(&self) -> u64 {
        self.writes.done()
    }

    fn vpc(&self, id: u32) -> Result<Option<abi::VpcRecord>> {
        self.maps.vpcs.get(&id).in_map("reading", name::VPCS)
    }

    fn serves(&self, vpc: u32) -> Result<bool> {
        Ok(self.maps.services.any_key(|k| k.vpc == vpc).in_map("reading", name::SERVICES)?
            || self.maps.flows.any_key(|k| k.vpc == vpc).in_map("reading", name::SRV_FLOWS)?)
    }

    fn address(&self, key: &abi::AddressKey) -> Result<Option<abi::AddressRecord>> {
        self.maps.addresses.get(key).in_map("reading", name::ADDRESSES)
    }

    fn node(&self, addr: &abi::Addr) -> Result<Option<abi::NodeRecord>> {
        self.maps.nodes.get(addr).in_map("reading", name::NODES)
    }

    fn local_nodes(&self) -> Result<Vec<abi::Addr>> {
        let mut out = Vec::new();
        let local = |r: &abi::NodeRecord| r.flags & abi::node_flags::LOCAL != 0;
        let read: io::Result<()> = self.maps.nodes.for_each(|a, r| out.extend(local(r).then_some(*a)));
        read.in_map("reading", name::NODES)?;
        Ok(out)
    }

    fn endpoint(&self, id: u32) -> Result<abi::EndpointRecord> {
        Ok(self.maps.endpoints.get(&id).in_map("reading", name::ENDPOINTS)?.unwrap_or_default())
    }

    fn read(&self) -> Result<KernelState> {
        self.maps.read()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inner_maps_get_twice_what_they_need_and_never_less_than_the_minimum() {
        assert_eq!(inner_capacity(0), abi::POLICY_MIN_ENTRIES);
        assert_eq!(inner_capacity(32), 64);
        assert_eq!(inner_capacity(33), 66);
        assert_eq!(inner_capacity(usize::MAX), u32::MAX);
    }

    #[test]
    fn inner_names_fit_the_kernels_fifteen_bytes() {
        assert!(inner_name(abi::MAX_SLOTS).len() <= 15);
    }
}
