//! The overlay device: one VXLAN link in collect-metadata mode; programs choose VNI and remote per packet.

use netlink_packet_route::link::{InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkInfo, LinkMessage};

use crate::error::Result;
use crate::handle::Handle;
use crate::link::{Link, LinkChange, not_ours};
use crate::types::{LinkName, Mac};

/// How a VXLAN link is set up, as the kernel shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VxlanInfo {
    /// UDP port.
    pub port: u16,
    /// VNI and remote come from each packet's tunnel key.
    pub collect_metadata: bool,
    /// Learns addresses from traffic.
    pub learning: bool,
}

impl VxlanInfo {
    pub(crate) fn from_attributes(list: &[InfoVxlan]) -> Self {
        let mut info = Self { port: 0, collect_metadata: false, learning: true };
        for a in list {
            match a {
                InfoVxlan::Port(p) => info.port = *p,
                InfoVxlan::CollectMetadata(b) => info.collect_metadata = *b,
                InfoVxlan::Learning(b) => info.learning = *b,
                _ => {}
            }
        }
        info
    }
}

/// The overlay device that is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VxlanSpec {
    /// Name.
    pub name: LinkName,
    /// UDP port of the tunnel, both families.
    pub port: u16,
    /// Largest inner IP packet, bytes.
    pub mtu: u32,
    /// Hardware address; kept as it is when absent.
    pub mac: Option<Mac>,
    /// Alias with flowloom's mark.
    pub alias: String,
}

/// A link that is there now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ensured {
    /// The link.
    pub link: Link,
    /// Whether anything was written.
    pub wrote: bool,
}

impl Handle {
    /// Makes the device or adopts it; one of ours with another port is replaced (a port cannot be changed). A new one is down:
    /// what leaves the tunnel is for its programs to judge, and they come after the device.
    ///
    /// # Errors
    /// [`crate::Error::NotOurs`] when somebody else has the name; `EADDRINUSE`/`EEXIST` when another VXLAN link has
    /// the port.
    pub fn ensure_vxlan(&mut self, spec: &VxlanSpec) -> Result<Ensured> {
        let fixed = VxlanInfo { port: spec.port, collect_metadata: true, learning: false };
        let mut wrote = false;
        let link = match self.link(&spec.name)? {
            Some(link) if !link.is_ours() => return Err(not_ours(&link)),
            Some(link) if link.vxlan == Some(fixed) => link,
            other => {
                if let Some(old) = other {
                    self.delete_link(old.index)?;
                }
                wrote = true;
                self.create_vxlan(spec)?
            }
        };
        let change = LinkChange {
            mtu: Some(spec.mtu),
            mac: spec.mac,
            alias: Some(spec.alias.clone()),
            addr_gen_none: Some(true),
            ..LinkChange::default()
        };
        match self.ensure_link(link.index, &change) {
            Ok(more) => wrote |= more,
            Err(e) => {
                if wrote {
                    let _ = self.delete_link(link.index);
                }
                return Err(e);
            }
        }
        let link = if wrote { self.expect_link(&spec.name)? } else { link };
        Ok(Ensured { link, wrote })
    }

    fn create_vxlan(&mut self, spec: &VxlanSpec) -> Result<Link> {
        let mut m = LinkMessage::default();
        m.attributes.push(LinkAttribute::IfName(spec.name.to_string()));
        m.attributes.push(LinkAttribute::Mtu(spec.mtu));
        m.attributes.push(LinkAttribute::Group(crate::LINK_GROUP));
        m.attributes.extend(spec.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
        m.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Vxlan),
            LinkInfo::Data(InfoData::Vxlan(vec![
                InfoVxlan::CollectMetadata(true),
                InfoVxlan::Learning(false),
                InfoVxlan::Port(spec.port),
            ])),
        ]));
        self.create_link(m, spec.name.as_str())
    }
}
