//! Permanent neighbours.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use nix::errno::Errno;

use crate::error::{Action, Result};
use crate::handle::Handle;
use crate::route::family;
use crate::socket::Request;
use crate::types::{IfIndex, Mac};

/// A neighbour that never expires and is never probed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Neighbour {
    /// On which link.
    pub link: IfIndex,
    /// Its address.
    pub ip: IpAddr,
    /// Its hardware address.
    pub mac: Mac,
}

impl Neighbour {
    fn message(&self) -> NeighbourMessage {
        let mut m = NeighbourMessage::default();
        m.header.family = family(self.ip.is_ipv4());
        m.header.ifindex = self.link.0;
        m.header.state = NeighbourState::Permanent;
        m.attributes.push(NeighbourAttribute::Destination(self.ip.into()));
        m.attributes.push(NeighbourAttribute::LinkLayerAddress(self.mac.0.to_vec()));
        m
    }

    fn from_message(m: &NeighbourMessage) -> Option<Self> {
        if m.header.state != NeighbourState::Permanent {
            return None;
        }
        let (mut ip, mut mac) = (None, None);
        for a in &m.attributes {
            match a {
                NeighbourAttribute::Destination(NeighbourAddress::Inet(a)) => ip = Some(IpAddr::from(*a)),
                NeighbourAttribute::Destination(NeighbourAddress::Inet6(a)) => ip = Some(IpAddr::from(*a)),
                NeighbourAttribute::LinkLayerAddress(b) => mac = Mac::from_slice(b),
                _ => {}
            }
        }
        Some(Self { link: IfIndex(m.header.ifindex), ip: ip?, mac: mac? })
    }

    pub(crate) fn replace_request(&self) -> Request {
        Request {
            message: RouteNetlinkMessage::NewNeighbour(self.message()),
            flags: NLM_F_CREATE | NLM_F_REPLACE,
            action: Action::Create,
            object: format!("neighbour {} on link {}", self.ip, self.link),
            already: &[],
        }
    }
}

impl Handle {
    /// Writes it unless it is there.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn ensure_neighbour(&mut self, neighbour: &Neighbour) -> Result<bool> {
        if self.neighbours(neighbour.link)?.contains(neighbour) {
            return Ok(false);
        }
        Ok(self.request(neighbour.replace_request())?.wrote)
    }

    /// Removes it, whatever its hardware address; `Ok(false)` when it was gone.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn delete_neighbour(&mut self, link: IfIndex, ip: IpAddr) -> Result<bool> {
        let mut m = NeighbourMessage::default();
        m.header.family = family(ip.is_ipv4());
        m.header.ifindex = link.0;
        m.attributes.push(NeighbourAttribute::Destination(ip.into()));
        let request = Request {
            message: RouteNetlinkMessage::DelNeighbour(m),
            flags: 0,
            action: Action::Delete,
            object: format!("neighbour {ip} on link {link}"),
            already: &[Errno::ENOENT, Errno::ENODEV],
        };
        Ok(self.request(request)?.wrote)
    }

    /// The permanent neighbours of a link, both families.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub fn neighbours(&mut self, link: IfIndex) -> Result<Vec<Neighbour>> {
        let mut m = NeighbourMessage::default();
        m.attributes.push(NeighbourAttribute::IfIndex(link.0));
        let list = self.dump(&RouteNetlinkMessage::GetNeighbour(m), "neighbours")?;
        Ok(list
            .iter()
            .filter_map(|m| match m {
                RouteNetlinkMessage::NewNeighbour(m) => Neighbour::from_message(m),
                _ => None,
            })
            .filter(|n| n.link == link)
            .collect())
    }
}
