//! veth pairs, made in one request with the far end already in its namespace.

use std::os::fd::{AsFd, AsRawFd};

use netlink_packet_route::link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, LinkMessage};

use crate::error::Result;
use crate::handle::Handle;
use crate::link::LinkChange;
use crate::netns::Netns;
use crate::types::{IfIndex, LinkName, Mac};

/// One end of a pair.
#[derive(Debug, Clone, Copy)]
pub struct VethEnd<'a> {
    /// Name.
    pub name: &'a LinkName,
    /// Hardware address; the kernel makes one up when absent.
    pub mac: Option<Mac>,
}

/// A pair to be made: `near` in the handle's namespace, `far` in `far_netns` (or beside `near`).
#[derive(Debug, Clone, Copy)]
pub struct VethSpec<'a> {
    /// The end in the handle's namespace.
    pub near: VethEnd<'a>,
    /// The other end.
    pub far: VethEnd<'a>,
    /// Where the other end goes.
    pub far_netns: Option<&'a Netns>,
    /// Largest IP packet of both, bytes.
    pub mtu: u32,
    /// Alias of the near end.
    pub alias: Option<&'a str>,
    /// The near end makes no IPv6 link-local address.
    pub near_addr_gen_none: bool,
    /// Switch the near end on. The kernel refuses to do so for the far end at creation: do it in the batch that
    /// gives it its addresses.
    pub near_up: bool,
    /// Transmit and receive queues of each end; the kernel's default is one per CPU.
    pub queues: Option<u32>,
}

/// What was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VethPair {
    /// The near end's index.
    pub near: IfIndex,
    /// The far end's index, in its namespace.
    pub far: IfIndex,
    /// The near end's hardware address.
    pub near_mac: Option<Mac>,
}

impl Handle {
    /// Makes the pair: one round trip, and a second one (several requests in one message) for alias, address
    /// generation and switching on, which the kernel does not take at creation. Undone when the second fails.
    ///
    /// # Errors
    /// `EEXIST` when either name is taken.
    pub fn create_veth(&mut self, spec: &VethSpec<'_>) -> Result<VethPair> {
        let mut far = LinkMessage::default();
        end(&mut far, spec, spec.far);
        if let Some(ns) = spec.far_netns {
            far.attributes.push(LinkAttribute::NetNsFd(ns.as_fd().as_raw_fd()));
        }
        let mut near = LinkMessage::default();
        end(&mut near, spec, spec.near);
        if spec.alias.is_some_and(|a| a.starts_with(crate::ALIAS_PREFIX)) {
            near.attributes.push(LinkAttribute::Group(crate::LINK_GROUP));
        }
        near.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(far))),
        ]));
        let link = self.create_link(near, spec.near.name.as_str())?;
        let rest = LinkChange {
            up: spec.near_up.then_some(true),
            alias: spec.alias.map(str::to_owned),
            addr_gen_none: spec.near_addr_gen_none.then_some(true),
            ..LinkChange::default()
        };
        if let Err(e) = self.change_link(link.index, &rest) {
            // The pair is this call's own; the reason of the failure is what the caller needs.
            let _ = self.delete_link(link.index);
            return Err(e);
        }
        Ok(VethPair { near: link.index, far: link.peer.unwrap_or(IfIndex(0)), near_mac: link.mac })
    }
}

fn end(m: &mut LinkMessage, spec: &VethSpec<'_>, end: VethEnd<'_>) {
    let a = &mut m.attributes;
    a.push(LinkAttribute::IfName(end.name.to_string()));
    a.push(LinkAttribute::Mtu(spec.mtu));
    a.extend(end.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
    if let Some(n) = spec.queues {
        a.push(LinkAttribute::NumTxQueues(n));
        a.push(LinkAttribute::NumRxQueues(n));
    }
}
