//! Links: reading, changing, deleting.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, LinkAttribute, LinkFlags, LinkInfo,
    LinkMessage,
};
use nix::errno::Errno;

use crate::error::{Action, Error, Result};
use crate::handle::Handle;
use crate::socket::Request;
use crate::types::{IfIndex, LinkName, Mac};
use crate::vxlan::VxlanInfo;
use crate::{ALIAS_PREFIX, LINK_GROUP};

/// Link groups from here on are used while several links are deleted together.
const GROUPS: u32 = 0xf10e_0000;

/// A link as the kernel shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Index in its namespace.
    pub index: IfIndex,
    /// Name.
    pub name: String,
    /// Hardware address, when it is an Ethernet address.
    pub mac: Option<Mac>,
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Switched on (`IFF_UP`).
    pub up: bool,
    /// Has carrier (`IFF_LOWER_UP`).
    pub carrier: bool,
    /// Operational (`IFF_RUNNING`): the kernel has acted on the carrier, which may be up to a second after it came.
    pub running: bool,
    /// Its alias, flowloom's mark when it begins with [`ALIAS_PREFIX`].
    pub alias: Option<String>,
    /// Its group, [`LINK_GROUP`] when flowloom made it.
    pub group: u32,
    /// `veth`, `vxlan`, `bridge` ..., none for hardware and loopback.
    pub kind: Option<String>,
    /// veth: the other end's index, in *its* namespace.
    pub peer: Option<IfIndex>,
    /// The other end is in another namespace: what this one calls that.
    pub peer_netns: Option<i32>,
    /// The bridge (or other controller) it belongs to.
    pub master: Option<IfIndex>,
    /// VXLAN: how it is set up.
    pub vxlan: Option<VxlanInfo>,
    /// How its IPv6 link-local address is made; `Some(true)` = not at all.
    pub addr_gen_none: Option<bool>,
}

impl Link {
    /// Whether flowloom made it.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.group == LINK_GROUP || self.alias.as_deref().is_some_and(|a| a.starts_with(ALIAS_PREFIX))
    }

    pub(crate) fn from_message(m: &LinkMessage) -> Self {
        let mut link = Self {
            index: IfIndex(m.header.index),
            name: String::new(),
            mac: None,
            mtu: 0,
            up: m.header.flags.contains(LinkFlags::Up),
            carrier: m.header.flags.contains(LinkFlags::LowerUp),
            running: m.header.flags.contains(LinkFlags::Running),
            alias: None,
            group: 0,
            kind: None,
            peer: None,
            peer_netns: None,
            master: None,
            vxlan: None,
            addr_gen_none: None,
        };
        for a in &m.attributes {
            match a {
                LinkAttribute::IfName(n) => link.name.clone_from(n),
                LinkAttribute::Address(b) => link.mac = Mac::from_slice(b),
                LinkAttribute::Mtu(n) => link.mtu = *n,
                LinkAttribute::IfAlias(s) => link.alias = Some(s.clone()),
                LinkAttribute::Group(n) => link.group = *n,
                LinkAttribute::Link(i) => link.peer = Some(IfIndex(*i)),
                LinkAttribute::LinkNetNsId(id) => link.peer_netns = Some(*id),
                LinkAttribute::Controller(i) => link.master = Some(IfIndex(*i)),
                LinkAttribute::AfSpecUnspec(list) => {
                    for inet6 in list
                        .iter()
                        .filter_map(|s| if let AfSpecUnspec::Inet6(l) = s { Some(l) } else { None })
                    {
                        for spec in inet6 {
                            if let AfSpecInet6::AddrGenMode(mode) = spec {
                                link.addr_gen_none = Some(*mode == In6AddrGenMode::None);
                            }
                        }
                    }
                }
                LinkAttribute::LinkInfo(infos) => {
                    for info in infos {
                        match info {
                            LinkInfo::Kind(k) => link.kind = Some(k.to_string()),
                            LinkInfo::Data(InfoData::Vxlan(v)) => {
                                link.vxlan = Some(VxlanInfo::from_attributes(v))
                            }
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        link
    }
}

/// What to change about a link; `None` leaves it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkChange {
    /// Switch on or off.
    pub up: Option<bool>,
    /// Largest IP packet, bytes.
    pub mtu: Option<u32>,
    /// Hardware address.
    pub mac: Option<Mac>,
    /// New name; the kernel refuses it for some links that are up.
    pub name: Option<LinkName>,
    /// Alias.
    pub alias: Option<String>,
    /// Make no IPv6 link-local address (set before the link goes up).
    pub addr_gen_none: Option<bool>,
    /// Put into a bridge; index 0 takes it out.
    pub master: Option<IfIndex>,
}

impl LinkChange {
    /// Only: switch on.
    #[must_use]
    pub fn up() -> Self {
        Self { up: Some(true), ..Self::default() }
    }

    /// What of this is not so already.
    #[must_use]
    pub fn missing_from(&self, link: &Link) -> Self {
        let differs = |wanted: Option<bool>, is: bool| wanted.filter(|w| *w != is);
        Self {
            up: differs(self.up, link.up),
            mtu: self.mtu.filter(|m| *m != link.mtu),
            mac: self.mac.filter(|m| Some(*m) != link.mac),
            name: self.name.clone().filter(|n| n.as_str() != link.name),
            alias: self.alias.clone().filter(|a| Some(a) != link.alias.as_ref()),
            addr_gen_none: self.addr_gen_none.filter(|w| Some(*w) != link.addr_gen_none),
            master: self.master.filter(|m| *m != link.master.unwrap_or(IfIndex(0))),
        }
    }

    /// Nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// At most two requests: the kernel switches a link on *before* it looks at the IPv6 part of the same request.
    pub(crate) fn requests(&self, index: IfIndex) -> Vec<Request> {
        let mut requests = Vec::with_capacity(2);
        let request = |m| Request {
            message: RouteNetlinkMessage::SetLink(m),
            flags: 0,
            action: Action::Change,
            object: format!("link {index}"),
            already: &[],
        };
        let mut m = message(index);
        let down_first = self.up == Some(false);
        if down_first {
            m.header.change_mask = LinkFlags::Up;
        }
        let a = &mut m.attributes;
        a.extend(self.mtu.map(LinkAttribute::Mtu));
        a.extend(self.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
        a.extend(self.name.as_ref().map(|n| LinkAttribute::IfName(n.to_string())));
        a.extend(self.alias.clone().map(LinkAttribute::IfAlias));
        a.extend(self.master.map(|i| LinkAttribute::Controller(i.0)));
        if let Some(none) = self.addr_gen_none {
            let mode = if none { In6AddrGenMode::None } else { In6AddrGenMode::Eui64 };
            let inet6 = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(mode)]);
            a.push(LinkAttribute::AfSpecUnspec(vec![inet6]));
        }
        if down_first || !m.attributes.is_empty() {
            requests.push(request(m));
        }
        if self.up == Some(true) {
            let mut m = message(index);
            m.header.flags = LinkFlags::Up;
            m.header.change_mask = LinkFlags::Up;
            requests.push(request(m));
        }
        requests
    }
}

pub(crate) fn message(index: IfIndex) -> LinkMessage {
    let mut m = LinkMessage::default();
    m.header.index = index.0;
    m
}

pub(crate) fn delete_request(index: IfIndex) -> Request {
    Request {
        message: RouteNetlinkMessage::DelLink(message(index)),
        flags: 0,
        action: Action::Delete,
        object: format!("link {index}"),
        already: &[Errno::ENODEV],
    }
}

impl Handle {
    /// The link of that name, if there is one.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub fn link(&mut self, name: &LinkName) -> Result<Option<Link>> {
        let mut m = LinkMessage::default();
        m.attributes.push(LinkAttribute::IfName(name.to_string()));
        self.read_link(m, format!("link {:?}", name.as_str()))
    }

    /// The link with that index, if there is one.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub fn link_by_index(&mut self, index: IfIndex) -> Result<Option<Link>> {
        self.read_link(message(index), format!("link {index}"))
    }

    /// The link of that name, which must exist.
    ///
    /// # Errors
    /// [`Error::Missing`] when it does not.
    pub fn expect_link(&mut self, name: &LinkName) -> Result<Link> {
        self.link(name)?.ok_or_else(|| Error::Missing { object: format!("link {:?}", name.as_str()) })
    }

    /// Has the kernel act on the carrier of a pair's other end, which came with this one's being switched on. By itself it gets to
    /// that some time later; until then the other end swallows what it is given to send (Linux 6.8 and later act before they tell).
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub fn settle_peer(&mut self, near: IfIndex) -> Result<()> {
        let Some(link) = self.link_by_index(near)? else { return Ok(()) };
        let Some(peer) = link.peer else { return Ok(()) };
        let mut m = message(peer);
        m.attributes.extend(link.peer_netns.map(LinkAttribute::IfNetnsId));
        self.read_link(m, format!("the other end of link {near}")).map(drop)
    }

    fn read_link(&mut self, m: LinkMessage, object: String) -> Result<Option<Link>> {
        let request = Request {
            message: RouteNetlinkMessage::GetLink(m),
            flags: 0,
            action: Action::Read,
            object,
            already: &[Errno::ENODEV],
        };
        Ok(match self.read(request)? {
            Some(RouteNetlinkMessage::NewLink(m)) => Some(Link::from_message(&m)),
            _ => None,
        })
    }

    /// All links.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub fn links(&mut self) -> Result<Vec<Link>> {
        let list = self.dump(&RouteNetlinkMessage::GetLink(LinkMessage::default()), "links")?;
        Ok(list
            .iter()
            .filter_map(|m| {
                if let RouteNetlinkMessage::NewLink(m) = m { Some(Link::from_message(m)) } else { None }
            })
            .collect())
    }

    /// Changes a link.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn change_link(&mut self, index: IfIndex, change: &LinkChange) -> Result<()> {
        self.transact(change.requests(index)).map(drop)
    }

    /// Reads the link and changes what differs; whether anything was written.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such link.
    pub fn ensure_link(&mut self, index: IfIndex, wanted: &LinkChange) -> Result<bool> {
        let link =
            self.link_by_index(index)?.ok_or_else(|| Error::Missing { object: format!("link {index}") })?;
        let change = wanted.missing_from(&link);
        if change.is_empty() {
            return Ok(false);
        }
        self.change_link(index, &change)?;
        Ok(true)
    }

    /// Deletes; `Ok(false)` when it was gone already.
    ///
    /// # Errors
    /// When the kernel refuses (hardware, loopback).
    pub fn delete_link(&mut self, index: IfIndex) -> Result<bool> {
        Ok(self.request(delete_request(index))?.wrote)
    }

    /// Deletes several at once; returns how many were still there. Taking a link down for good makes the kernel wait
    /// for every CPU, so one by one each pays what all of them together pay once.
    ///
    /// # Errors
    /// When one of them cannot be deleted (hardware, loopback); then none is.
    pub fn delete_links(&mut self, indices: &[IfIndex]) -> Result<usize> {
        if let [] | [_] = indices {
            return indices.iter().try_fold(0, |n, i| Ok(n + usize::from(self.delete_link(*i)?)));
        }
        let group = self.free_group()?;
        let mut joined = Vec::with_capacity(indices.len());
        for index in indices {
            let mut m = message(*index);
            m.attributes.push(LinkAttribute::Group(group));
            joined.push(Request {
                message: RouteNetlinkMessage::SetLink(m),
                flags: 0,
                action: Action::Delete,
                object: format!("link {index}"),
                already: &[Errno::ENODEV],
            });
        }
        let n = self.transact(joined)?.iter().filter(|a| a.wrote).count();
        let mut m = LinkMessage::default();
        m.attributes.push(LinkAttribute::Group(group));
        self.request(Request {
            message: RouteNetlinkMessage::DelLink(m),
            flags: 0,
            action: Action::Delete,
            object: format!("{n} links"),
            already: &[Errno::ENODEV],
        })?;
        Ok(n)
    }

    /// A link group that no link is in.
    fn free_group(&mut self) -> Result<u32> {
        let list = self.dump(&RouteNetlinkMessage::GetLink(LinkMessage::default()), "links")?;
        let used: std::collections::BTreeSet<u32> = list
            .iter()
            .filter_map(|m| if let RouteNetlinkMessage::NewLink(m) = m { Some(&m.attributes) } else { None })
            .flatten()
            .filter_map(|a| if let LinkAttribute::Group(g) = a { Some(*g) } else { None })
            .collect();
        // Two handles that delete at the same time must not choose the same one: the port number differs per socket.
        let first = GROUPS | (self.port() & 0xffff);
        (first..=u32::MAX)
            .find(|g| !used.contains(g))
            .ok_or(Error::Missing { object: "a free link group".into() })
    }

    /// Deletes the link of that name only if it carries flowloom's mark; `Ok(false)` when there is none.
    ///
    /// # Errors
    /// [`Error::NotOurs`] when somebody else made it.
    pub fn delete_our_link(&mut self, name: &LinkName) -> Result<bool> {
        match self.link(name)? {
            None => Ok(false),
            Some(link) if link.is_ours() => self.delete_link(link.index),
            Some(link) => Err(not_ours(&link)),
        }
    }

    /// Makes a bridge, switched off.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn create_bridge(&mut self, name: &LinkName) -> Result<Link> {
        let mut m = LinkMessage::default();
        m.attributes.push(LinkAttribute::IfName(name.to_string()));
        m.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]));
        self.create_link(m, name.as_str())
    }

    /// Creates and returns what was made, from the kernel's echo of the same request.
    pub(crate) fn create_link(&mut self, m: LinkMessage, name: &str) -> Result<Link> {
        use netlink_packet_core::{NLM_F_CREATE, NLM_F_ECHO, NLM_F_EXCL};
        let object = format!("link {name:?}");
        let answer = self.request(Request {
            message: RouteNetlinkMessage::NewLink(m),
            flags: NLM_F_CREATE | NLM_F_EXCL | NLM_F_ECHO,
            action: Action::Create,
            object: object.clone(),
            already: &[],
        })?;
        match answer.message {
            Some(RouteNetlinkMessage::NewLink(m)) => Ok(Link::from_message(&m)),
            // Some drivers (VXLAN) announce the link themselves, and then there is no echo.
            _ => {
                let mut m = LinkMessage::default();
                m.attributes.push(LinkAttribute::IfName(name.into()));
                self.read_link(m, object.clone())?.ok_or(Error::Missing { object })
            }
        }
    }
}

pub(crate) fn not_ours(link: &Link) -> Error {
    Error::NotOurs {
        object: format!("link {:?}", link.name),
        found: match (&link.kind, &link.alias) {
            (Some(k), Some(a)) => format!("a {k} with alias {a:?}"),
            (Some(k), None) => format!("a {k} without alias"),
            (None, _) => "a device".into(),
        },
    }
}
