//! Addresses of links.

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::errno::Errno;

use crate::error::{Action, Result};
use crate::handle::Handle;
use crate::socket::Request;
use crate::types::IfIndex;

/// An address of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Address {
    /// Whose.
    pub link: IfIndex,
    /// Address and length of its on-link prefix.
    pub net: IpNet,
    /// IPv6: usable at once, without duplicate address detection. Always false for IPv4.
    pub nodad: bool,
    /// Make no on-link route for the prefix.
    pub noprefixroute: bool,
}

impl Address {
    /// Usable at once, with the usual on-link route.
    #[must_use]
    pub fn new(link: IfIndex, net: IpNet) -> Self {
        Self { link, net, nodad: matches!(net, IpNet::V6(_)), noprefixroute: false }
    }

    fn message(&self) -> AddressMessage {
        let mut m = AddressMessage::default();
        m.header.index = self.link.0;
        m.header.prefix_len = self.net.prefix_len();
        m.header.scope = AddressScope::Universe;
        let addr = self.net.addr();
        m.attributes.push(AddressAttribute::Local(addr));
        m.attributes.push(AddressAttribute::Address(addr));
        let mut flags = AddressFlags::empty();
        match addr {
            IpAddr::V4(_) => m.header.family = AddressFamily::Inet,
            IpAddr::V6(_) => {
                m.header.family = AddressFamily::Inet6;
                if self.nodad {
                    flags |= AddressFlags::Nodad;
                    m.header.flags = AddressHeaderFlags::Nodad;
                }
            }
        }
        if self.noprefixroute {
            flags |= AddressFlags::Noprefixroute;
        }
        if !flags.is_empty() {
            m.attributes.push(AddressAttribute::Flags(flags));
        }
        m
    }

    pub(crate) fn from_message(m: &AddressMessage) -> Option<Self> {
        let (mut local, mut address, mut flags) = (None, None, AddressFlags::empty());
        for a in &m.attributes {
            match a {
                AddressAttribute::Local(ip) => local = Some(*ip),
                AddressAttribute::Address(ip) => address = Some(*ip),
                AddressAttribute::Flags(f) => flags = *f,
                _ => {}
            }
        }
        // On a point-to-point link `address` is the far end.
        let net = IpNet::new(local.or(address)?, m.header.prefix_len).ok()?;
        Some(Self {
            link: IfIndex(m.header.index),
            net,
            nodad: flags.contains(AddressFlags::Nodad),
            noprefixroute: flags.contains(AddressFlags::Noprefixroute),
        })
    }

    pub(crate) fn add_request(&self) -> Request {
        Request {
            message: RouteNetlinkMessage::NewAddress(self.message()),
            flags: NLM_F_CREATE | NLM_F_EXCL,
            action: Action::Create,
            object: format!("address {} on link {}", self.net, self.link),
            already: &[Errno::EEXIST],
        }
    }
}

impl Handle {
    /// Adds; `Ok(false)` when the link has it already.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn ensure_address(&mut self, address: &Address) -> Result<bool> {
        Ok(self.request(address.add_request())?.wrote)
    }

    /// Removes; `Ok(false)` when it (or the link) was gone already.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn delete_address(&mut self, address: &Address) -> Result<bool> {
        let request = Request {
            message: RouteNetlinkMessage::DelAddress(address.message()),
            flags: 0,
            action: Action::Delete,
            object: format!("address {} on link {}", address.net, address.link),
            already: &[Errno::EADDRNOTAVAIL, Errno::ENODEV],
        };
        Ok(self.request(request)?.wrote)
    }

    /// The addresses of one link, or of all.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub fn addresses(&mut self, link: Option<IfIndex>) -> Result<Vec<Address>> {
        let mut m = AddressMessage::default();
        m.header.index = link.map_or(0, |i| i.0);
        let list = match self.dump(&RouteNetlinkMessage::GetAddress(m), "addresses") {
            // The kernel refuses the filter when the link is gone.
            Err(e) if link.is_some() && e.errno() == Some(Errno::ENODEV) => Vec::new(),
            other => other?,
        };
        Ok(list
            .iter()
            .filter_map(|m| {
                if let RouteNetlinkMessage::NewAddress(m) = m { Address::from_message(m) } else { None }
            })
            .filter(|a| link.is_none_or(|l| l == a.link))
            .collect())
    }
}
