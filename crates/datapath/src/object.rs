//! The BPF object: what it declares, and loading it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use aya::programs::{ProgramError, ProgramFd};
use aya::{Ebpf, EbpfLoader};
use flowloom_bpf_abi::map_name::{self, PINNED, TRACE};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::links::Hook;
use crate::loading::{Loading, Programs};
use crate::sockets::SocketHook;
use crate::sys::MapFacts;

/// Name of the constant that turns a load into a trace.
const DRY_RUN: &str = "DRY_RUN";

/// A map as the object (and the configuration) declares it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Declared {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
}

impl Declared {
    /// How a live map differs from the declaration; empty when it does not.
    pub(crate) fn difference(&self, live: &MapFacts) -> String {
        let fields = [
            ("type", live.kind, self.kind),
            ("key size", live.key_size, self.key_size),
            ("value size", live.value_size, self.value_size),
            ("max entries", live.max_entries, self.max_entries),
            ("flags", live.flags, self.flags),
        ];
        let differing = fields.iter().filter(|(_, found, want)| found != want);
        differing
            .map(|(what, found, want)| format!("{what} {found}, expected {want}"))
            .collect::<Vec<_>>()
            .join("; ")
    }
}

/// A parsed object.
#[derive(Debug)]
pub(crate) struct Object {
    bytes: &'static [u8],
    /// Of the bytes: programs pinned under the same digest are the same programs.
    pub(crate) digest: String,
    /// Pinned maps.
    pub(crate) declared: BTreeMap<&'static str, Declared>,
    sizes: BTreeMap<&'static str, u32>,
}

/// Programs and the private map of a load that follows packets only.
#[derive(Debug)]
pub(crate) struct Dry {
    pub(crate) programs: Programs<Hook>,
    pub(crate) trace: OwnedFd,
}

pub(crate) fn failed(doing: impl Into<String>, error: &dyn std::error::Error) -> Error {
    let mut detail = error.to_string();
    let mut source = error.source();
    while let Some(e) = source {
        detail = format!("{detail}: {e}");
        source = e.source();
    }
    Error::Load { doing: doing.into(), detail }
}

impl Object {
    /// Parses `bytes` and compares what it declares with what this crate needs.
    pub(crate) fn parse(bytes: &'static [u8], config: &Config) -> Result<Self> {
        let parsed = aya_obj::Object::parse(bytes).map_err(|e| failed("parsing it", &e))?;
        let mut sizes = BTreeMap::from([
            (map_name::CONNTRACK, config.conntrack_entries),
            (map_name::CONNTRACK_NEW, config.conntrack_new_entries),
            (map_name::SERVICES, config.service_entries),
            (map_name::BACKENDS, config.service_entries.saturating_mul(2)),
            (map_name::MEMBERS, config.service_entries.saturating_mul(2)),
            (map_name::AFFINITY, config.conntrack_new_entries.saturating_mul(2)),
            (map_name::SOCKETS, config.conntrack_new_entries.saturating_mul(2)),
            (map_name::SRV_FLOWS, config.conntrack_new_entries.saturating_mul(2)),
        ]);
        if let Some(bytes) = config.event_bytes {
            sizes.insert(map_name::EVENTS, bytes);
        }
        let mut declared = BTreeMap::new();
        for name in PINNED {
            let map =
                parsed.maps.get(name).ok_or_else(|| Error::Missing { kind: "map", name: name.to_owned() })?;
            let ring = name == map_name::EVENTS;
            declared.insert(
                name,
                Declared {
                    kind: map.map_type(),
                    key_size: if ring { 0 } else { map.key_size() },
                    value_size: if ring { 0 } else { map.value_size() },
                    max_entries: sizes.get(name).copied().unwrap_or_else(|| map.max_entries()),
                    flags: map.map_flags(),
                },
            );
        }
        let names = Hook::ALL.map(Hook::name).into_iter().chain(SocketHook::ALL.map(SocketHook::name));
        for name in names {
            if !parsed.programs.contains_key(name) {
                return Err(Error::Missing { kind: "program", name: name.to_owned() });
            }
        }
        Ok(Self { bytes, digest: digest(bytes), declared, sizes })
    }

    /// Makes the programs ready for the verifier; maps are taken from, or made and pinned in, `maps`.
    pub(crate) fn prepare(&self, maps: &Path, dry_run: bool) -> Result<Ebpf> {
        let flag = u32::from(dry_run);
        let mut loader = EbpfLoader::new();
        // Nothing is relocated against the kernel's types: the programs read packets and maps only.
        loader.btf(None).override_global(DRY_RUN, &flag, true);
        for name in PINNED {
            loader.map_pin_path(name, maps.join(name));
        }
        for (name, size) in &self.sizes {
            loader.map_max_entries(name, *size);
        }
        loader.load(self.bytes).map_err(|e| failed("creating its maps", &e))
    }

    /// Loads the programs of devices once more, for traces.
    pub(crate) fn load_dry(&self, maps: &Path) -> Result<Dry> {
        let ebpf = self.prepare(maps, true)?;
        let trace = match ebpf.map(TRACE) {
            Some(aya::maps::Map::Array(data)) => data.fd().as_fd().try_clone_to_owned(),
            _ => return Err(Error::Missing { kind: "map", name: TRACE.to_owned() }),
        };
        let trace = trace.map_err(|e| failed("keeping fl_trace", &e))?;
        let loading = Loading::start(ebpf, Hook::ALL.map(Hook::name).to_vec())?;
        loading.progress().end()?;
        let programs = Programs::coming(Hook::ALL.map(|h| (h, h.name())), &loading);
        Ok(Dry { programs, trace })
    }
}

/// A descriptor of a loaded program that outlives the loader.
pub(crate) fn keep(name: &str, fd: std::result::Result<&ProgramFd, ProgramError>) -> Result<OwnedFd> {
    let fd = fd.map_err(|e| failed(format!("opening {name}"), &e))?;
    fd.as_fd().try_clone_to_owned().map_err(|e| failed(format!("keeping {name}"), &e))
}

/// FNV-1a, 128 bits (parameters: draft-eastlake-fnv): tells builds apart, guards against no one.
fn digest(bytes: &[u8]) -> String {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    format!("{:032x}", bytes.iter().fold(OFFSET, |h, b| (h ^ u128::from(*b)).wrapping_mul(PRIME)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_fnv_1a_128() {
        assert_eq!(digest(b""), "6c62272e07bb014262b821756295c58d");
        assert_eq!(digest(b"a"), "d228cb696f1a8caf78912b704e4a8964");
    }

    #[test]
    fn every_differing_field_of_a_pinned_map_is_named() {
        let want = Declared { kind: 1, key_size: 4, value_size: 8, max_entries: 100, flags: 0 };
        let live = MapFacts {
            id: 5,
            kind: 1,
            key_size: 4,
            value_size: 8,
            max_entries: 100,
            flags: 0,
            name: "x".into(),
        };
        assert_eq!(want.difference(&live), "");
        let other = MapFacts { value_size: 16, flags: 1, ..live };
        assert_eq!(want.difference(&other), "value size 16, expected 8; flags 1, expected 0");
    }
}
