//! The outside world of [`crate::apply`]: one real implementation (the kernel's maps), one in memory.

use std::collections::BTreeMap;

use flowloom_bpf_abi as abi;
use flowloom_compiler::PolicyEntries;

use crate::error::{Error, Result};
use crate::state::KernelState;

/// One change of the maps. `None` removes; removing what is missing succeeds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Write<'a> {
    /// The node's settings.
    Config(abi::NodeConfig),
    /// A device.
    Device(u32, Option<abi::DeviceRecord>),
    /// A VPC.
    Vpc(u32, Option<abi::VpcRecord>),
    /// An address.
    Address(abi::AddressKey, Option<abi::AddressRecord>),
    /// A node.
    Node(abi::Addr, Option<abi::NodeRecord>),
    /// An endpoint's record; a zeroed one is no endpoint.
    Endpoint(u32, abi::EndpointRecord),
    /// ipcache entries, in batches.
    PutPeers(&'a [(abi::PeerKey, abi::PeerRecord)]),
    /// ipcache entries, in batches.
    RemovePeers(&'a [abi::PeerKey]),
    /// Inner maps, filled first, then written to the outer map in one batch. A slot that exists is replaced by one pointer write.
    CreatePolicies(&'a [(u32, &'a PolicyEntries)]),
    /// Slots.
    FreePolicies(&'a [u32]),
    /// Entries of a slot in force, in place.
    AddEntries(u32, &'a PolicyEntries),
    /// Entries of a slot in force, in place. A missing slot has none.
    RemoveEntries(u32, &'a [abi::PolicyKey]),
    /// Backends of lists that no frontend names yet, and the same as members; in batches.
    PutBackends(&'a [(abi::BackendKey, abi::BackendRecord)], &'a [(abi::MemberKey, abi::MemberRecord)]),
    /// Backends of lists that no frontend names any more, and members; in batches.
    RemoveBackends(&'a [abi::BackendKey], &'a [abi::MemberKey]),
    /// Frontends, in batches; each entry is written whole.
    PutServices(&'a [(abi::ServiceKey, abi::ServiceRecord)]),
    /// Frontends, in batches.
    RemoveServices(&'a [abi::ServiceKey]),
    /// Source ranges, in batches.
    PutRanges(&'a [abi::RangeKey]),
    /// Source ranges, in batches.
    RemoveRanges(&'a [abi::RangeKey]),
    /// Whose sockets a network namespace holds.
    Netns(u64, Option<abi::NetnsRecord>),
}

/// Where writes go and single records are read from.
pub trait Realise {
    /// Performs a write. After an error, batches may be done in part, single records are not.
    ///
    /// # Errors
    /// What the kernel refuses; [`Error::Aborted`] when the owner's hook ended the run.
    fn write(&mut self, write: &Write<'_>) -> Result<()>;

    /// Writes so far, counted as the kernel sees them (one per system call that changes something).
    fn writes(&self) -> u64;

    /// One VPC's record.
    ///
    /// # Errors
    /// When the kernel refuses the read.
    fn vpc(&self, id: u32) -> Result<Option<abi::VpcRecord>>;

    /// Whether a VPC has a frontend, or a flow that one has led.
    ///
    /// # Errors
    /// As above.
    fn serves(&self, vpc: u32) -> Result<bool>;

    /// One address.
    ///
    /// # Errors
    /// As above.
    fn address(&self, key: &abi::AddressKey) -> Result<Option<abi::AddressRecord>>;

    /// One node.
    ///
    /// # Errors
    /// As above.
    fn node(&self, addr: &abi::Addr) -> Result<Option<abi::NodeRecord>>;

    /// Underlay addresses of this node.
    ///
    /// # Errors
    /// As above.
    fn local_nodes(&self) -> Result<Vec<abi::Addr>>;

    /// One endpoint's record, zeroed when there is none.
    ///
    /// # Errors
    /// As above.
    fn endpoint(&self, id: u32) -> Result<abi::EndpointRecord>;

    /// Everything.
    ///
    /// # Errors
    /// As above.
    fn read(&self) -> Result<KernelState>;
}

/// Called before each write with its number (from 1); an error ends the run there, as a kill would.
pub type WriteHook = Box<dyn FnMut(u64) -> std::result::Result<(), String> + Send + Sync>;

/// Maps in memory, with capacities, for tests of what depends on order, failure and being killed.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// Contents.
    pub state: KernelState,
    /// Abort at this write (1 = the first).
    pub abort_at: Option<u64>,
    /// Most entries of a kind of map; absent = unlimited.
    pub capacity: BTreeMap<Kind, usize>,
    writes: u64,
}

/// Maps that [`Memory`] can limit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Kind {
    /// ipcache entries.
    Peers,
    /// Slots.
    Slots,
    /// Entries of one slot.
    Entries,
    /// Addresses.
    Addresses,
    /// VPCs.
    Vpcs,
    /// Frontends of services.
    Services,
    /// Backends of lists.
    Backends,
}

fn put<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) {
    match value {
        Some(v) => drop(map.insert(key, v)),
        None => drop(map.remove(&key)),
    }
}

impl Memory {
    fn step(&mut self) -> Result<()> {
        if self.abort_at == Some(self.writes + 1) {
            return Err(Error::Aborted(format!("told to stop at write {}", self.writes + 1)));
        }
        self.writes += 1;
        Ok(())
    }

    fn room(&self, kind: Kind, after: usize) -> Result<()> {
        match self.capacity.get(&kind) {
            Some(max) if after > *max => Err(Error::Map {
                doing: "writing",
                map: format!("{kind:?}"),
                source: std::io::Error::from_raw_os_error(libc::ENOSPC),
            }),
            _ => Ok(()),
        }
    }
}

impl Realise for Memory {
    fn write(&mut self, write: &Write<'_>) -> Result<()> {
        match write {
            Write::CreatePolicies(policies) => {
                for (_, entries) in *policies {
                    self.step()?; // the inner map
                    self.room(Kind::Entries, entries.len())?;
                }
                let new = policies.iter().filter(|(s, _)| !self.state.policies.contains_key(s)).count();
                self.step()?;
                self.room(Kind::Slots, self.state.policies.len() + new)?;
                for (slot, entries) in *policies {
                    self.state.policies.insert(*slot, (*entries).clone());
                }
                return Ok(());
            }
            Write::PutPeers(peers) => {
                self.step()?;
                for (key, record) in *peers {
                    let new = usize::from(!self.state.peers.contains_key(key));
                    self.room(Kind::Peers, self.state.peers.len() + new)?;
                    self.state.peers.insert(*key, *record);
                }
                return Ok(());
            }
            Write::PutBackends(backends, members) => {
                self.step()?;
                let new = backends.iter().filter(|(k, _)| !self.state.services.backends.contains_key(k));
                self.room(Kind::Backends, self.state.services.backends.len() + new.count())?;
                self.state.services.members.extend(members.iter().copied());
                self.step()?;
                self.state.services.backends.extend(backends.iter().copied());
                return Ok(());
            }
            Write::PutServices(services) => {
                self.step()?;
                for (key, record) in *services {
                    let new = usize::from(!self.state.services.services.contains_key(key));
                    self.room(Kind::Services, self.state.services.services.len() + new)?;
                    self.state.services.services.insert(*key, *record);
                }
                return Ok(());
            }
            _ => self.step()?,
        }
        let state = &mut self.state;
        match write {
            Write::Config(c) => state.config = *c,
            Write::Device(i, r) => put(&mut state.devices, *i, *r),
            Write::Vpc(id, r) => {
                let after = state.vpcs.len() + usize::from(r.is_some() && !state.vpcs.contains_key(id));
                self.room(Kind::Vpcs, after)?;
                put(&mut self.state.vpcs, *id, *r);
            }
            Write::Address(k, r) => {
                let after =
                    state.addresses.len() + usize::from(r.is_some() && !state.addresses.contains_key(k));
                self.room(Kind::Addresses, after)?;
                put(&mut self.state.addresses, *k, *r);
            }
            Write::Node(a, r) => put(&mut state.nodes, *a, *r),
            Write::Endpoint(id, r) => put(&mut state.endpoints, *id, crate::lower::is_valid(r).then_some(*r)),
            Write::RemovePeers(keys) => state.peers.retain(|k, _| !keys.contains(k)),
            Write::FreePolicies(slots) => state.policies.retain(|s, _| !slots.contains(s)),
            Write::AddEntries(slot, entries) => {
                let Some(have) = state.policies.get(slot) else {
                    return Err(Error::Invalid {
                        object: format!("policy slot {slot}"),
                        detail: "not there".into(),
                    });
                };
                let mut merged = have.clone();
                merged.extend(entries.iter().map(|(k, v)| (*k, *v)));
                self.room(Kind::Entries, merged.len())?;
                self.state.policies.insert(*slot, merged);
            }
            Write::RemoveEntries(slot, keys) => {
                if let Some(have) = state.policies.get_mut(slot) {
                    have.retain(|k, _| !keys.contains(k));
                }
            }
            Write::RemoveBackends(backends, members) => {
                for k in *backends {
                    state.services.backends.remove(k);
                }
                for k in *members {
                    state.services.members.remove(k);
                }
            }
            Write::RemoveServices(keys) => {
                for k in *keys {
                    state.services.services.remove(k);
                }
            }
            Write::PutRanges(keys) => state.services.ranges.extend(keys.iter().copied()),
            Write::RemoveRanges(keys) => {
                for k in *keys {
                    state.services.ranges.remove(k);
                }
            }
            Write::Netns(cookie, r) => put(&mut state.namespaces, *cookie, *r),
            Write::CreatePolicies(_)
            | Write::PutPeers(_)
            | Write::PutBackends(..)
            | Write::PutServices(_) => {}
        }
        Ok(())
    }

    fn writes(&self) -> u64 {
        self.writes
    }

    fn vpc(&self, id: u32) -> Result<Option<abi::VpcRecord>> {
        Ok(self.state.vpcs.get(&id).copied())
    }

    fn serves(&self, vpc: u32) -> Result<bool> {
        Ok(self.state.services.serves(vpc))
    }

    fn address(&self, key: &abi::AddressKey) -> Result<Option<abi::AddressRecord>> {
        Ok(self.state.addresses.get(key).copied())
    }

    fn node(&self, addr: &abi::Addr) -> Result<Option<abi::NodeRecord>> {
        Ok(self.state.nodes.get(addr).copied())
    }

    fn local_nodes(&self) -> Result<Vec<abi::Addr>> {
        let local = |r: &abi::NodeRecord| r.flags & abi::node_flags::LOCAL != 0;
        Ok(self.state.nodes.iter().filter(|(_, r)| local(r)).map(|(a, _)| *a).collect())
    }

    fn endpoint(&self, id: u32) -> Result<abi::EndpointRecord> {
        Ok(self.state.endpoints.get(&id).copied().unwrap_or_default())
    }

    fn read(&self) -> Result<KernelState> {
        Ok(self.state.clone())
    }
}
