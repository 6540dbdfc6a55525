//! What a backend that is gone leaves behind: connections through its service, and sockets that were connected to it.

use std::collections::BTreeSet;

use flowloom_bpf_abi::{self as abi, ct_flags, flow_kind, map_name as name, socket_kind};
use flowloom_compiler::EndedBackend;

use crate::conntrack::Conntrack;
use crate::error::{Context as _, Result};
use crate::sys;

/// Protocol number of UDP.
const UDP: u8 = 17;

/// What was ended.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Ended {
    /// Connections of the packet path.
    pub connections: u64,
    /// Cookies of UDP sockets that were connected to a backend through its service, and of sockets whose last datagram went there. They
    /// have to be ended where they are (`flowloom_netlink::Diag`): nothing tells them otherwise.
    pub sockets: BTreeSet<u64>,
}

/// (service, protocol, backend).
type Name = (u32, u8, abi::Addr, [u8; 2]);

/// Removes every translation to these backends, of their services only.
pub(crate) fn end(conntrack: &Conntrack<'_>, ended: &[EndedBackend]) -> Result<Ended> {
    let mut out = Ended::default();
    if ended.is_empty() {
        return Ok(out);
    }
    let names: BTreeSet<Name> = ended
        .iter()
        .map(|e| (e.service.0, e.protocol, e.backend.0.into(), e.backend.1.to_be_bytes()))
        .collect();
    let maps = conntrack.maps;
    // Flows first: no packet finds its way to the backend again.
    remove_if(&maps.flows, name::SRV_FLOWS, |key: &abi::FlowKey, value: &abi::FlowValue| {
        key.kind == flow_kind::FORWARD
            && names.contains(&(value.service, key.protocol, value.addr, value.port))
    })?;
    out.connections = conntrack.flush_if(|key, entry| {
        let (addr, port) = if entry.flags & ct_flags::ORIG_IS_LO != 0 {
            (key.hi, key.hi_port)
        } else {
            (key.lo, key.lo_port)
        };
        entry.rev_nat != 0 && names.contains(&(entry.rev_nat, key.protocol, addr, port))
    })?;
    // A connected TCP socket learns the end of its peer by itself.
    let mut forward = |key: &abi::SocketKey, value: &abi::SocketValue| {
        let hit = match key.kind {
            socket_kind::FORWARD => names.contains(&(value.service, key.protocol, value.addr, value.port)),
            _ => false,
        };
        if key.kind == socket_kind::REVERSE
            && key.protocol == UDP
            && names.contains(&(value.service, key.protocol, key.addr, key.port))
        {
            out.sockets.insert(key.cookie);
        }
        hit
    };
    remove_if(&maps.sockets, name::SOCKETS, &mut forward)?;
    Ok(out)
}

fn remove_if<K: sys::Plain, V: sys::Plain>(
    map: &sys::Map<K, V>,
    name: &str,
    mut hit: impl FnMut(&K, &V) -> bool,
) -> Result<()> {
    let mut keys = Vec::new();
    map.for_each(|k, v| {
        if hit(k, v) {
            keys.push(*k);
        }
    })
    .in_map("reading", name)?;
    map.remove_batch(&keys).in_map("removing from", name).map(drop)
}
