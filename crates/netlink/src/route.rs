//! Routes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::errno::Errno;

use crate::PROTOCOL;
use crate::error::{Action, Error, Result};
use crate::handle::Handle;
use crate::socket::Request;
use crate::types::IfIndex;

/// A routing table's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteTable(pub u32);

impl RouteTable {
    /// The table that rules name when nobody changed them.
    pub const MAIN: Self = Self(254);
    /// The kernel's own table of local addresses.
    pub const LOCAL: Self = Self(255);
}

/// What happens to a packet that the route matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouteKind {
    /// It is sent on.
    Unicast,
    /// It is for this host.
    Local,
    /// Dropped silently.
    Blackhole,
    /// Dropped, answered "host unreachable".
    Unreachable,
    /// Dropped, answered "prohibited".
    Prohibit,
    /// Anything else the kernel shows (broadcast, anycast, multicast, throw).
    Other(u8),
}

/// The kernel's metric for IPv6 routes that were given none.
const DEFAULT_METRIC_V6: u32 = 1024;

/// One route with at most one next hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// Destination, masked.
    pub destination: IpNet,
    /// Next hop; without one the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// Link; none for blackhole and the like.
    pub link: Option<IfIndex>,
    /// Source address that the host's own packets get.
    pub source: Option<IpAddr>,
    /// The gateway is on the link whatever its address says.
    pub onlink: bool,
    /// Path MTU, bytes.
    pub mtu: Option<u32>,
    /// Lower wins among equal destinations; none = the kernel's default.
    pub metric: Option<u32>,
    /// Table.
    pub table: RouteTable,
    /// What it does.
    pub kind: RouteKind,
    /// Who made it: [`PROTOCOL`] for flowloom's.
    pub protocol: u8,
}

impl Route {
    /// Of flowloom's, in the main table; on the link.
    #[must_use]
    pub fn on_link(destination: IpNet, link: IfIndex) -> Self {
        Self {
            destination: destination.trunc(),
            gateway: None,
            link: Some(link),
            source: None,
            onlink: false,
            mtu: None,
            metric: None,
            table: RouteTable::MAIN,
            kind: RouteKind::Unicast,
            protocol: PROTOCOL,
        }
    }

    /// Of flowloom's, in the main table; through a next hop.
    #[must_use]
    pub fn via(destination: IpNet, gateway: IpAddr, link: IfIndex) -> Self {
        Self { gateway: Some(gateway), ..Self::on_link(destination, link) }
    }

    /// Of flowloom's, in the main table: everything of the gateway's family through it.
    #[must_use]
    pub fn default_via(gateway: IpAddr, link: IfIndex) -> Self {
        Self::via(everything(gateway.is_ipv4()), gateway, link)
    }

    /// Whether flowloom made it.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.protocol == PROTOCOL
    }

    /// What the kernel allows once: table, destination and metric.
    fn key(&self) -> (RouteTable, IpNet, Option<u32>) {
        (self.table, self.destination, self.metric)
    }

    fn object(&self) -> String {
        let mut s = format!("route {} in table {}", self.destination, self.table.0);
        if let Some(g) = self.gateway {
            s.push_str(&format!(" via {g}"));
        }
        if let Some(l) = self.link {
            s.push_str(&format!(" on link {l}"));
        }
        s
    }

    fn message(&self) -> RouteMessage {
        let mut m = RouteMessage::default();
        let h = &mut m.header;
        h.address_family = family(self.destination.addr().is_ipv4());
        h.destination_prefix_length = self.destination.prefix_len();
        h.protocol = self.protocol.into();
        h.table = u8::try_from(self.table.0).unwrap_or(0);
        h.kind = match self.kind {
            RouteKind::Unicast => RouteType::Unicast,
            RouteKind::Local => RouteType::Local,
            RouteKind::Blackhole => RouteType::BlackHole,
            RouteKind::Unreachable => RouteType::Unreachable,
            RouteKind::Prohibit => RouteType::Prohibit,
            RouteKind::Other(n) => n.into(),
        };
        h.scope = match self.kind {
            RouteKind::Local => RouteScope::Host,
            RouteKind::Unicast if self.gateway.is_none() && self.destination.addr().is_ipv4() => {
                RouteScope::Link
            }
            _ => RouteScope::Universe,
        };
        if self.onlink {
            h.flags |= RouteFlags::Onlink;
        }
        let a = &mut m.attributes;
        if self.destination.prefix_len() > 0 {
            a.push(RouteAttribute::Destination(self.destination.addr().into()));
        }
        a.extend(self.gateway.map(|g| RouteAttribute::Gateway(g.into())));
        a.extend(self.link.map(|l| RouteAttribute::Oif(l.0)));
        a.extend(self.source.map(|s| RouteAttribute::PrefSource(s.into())));
        a.extend(self.metric.map(RouteAttribute::Priority));
        if u8::try_from(self.table.0).is_err() {
            a.push(RouteAttribute::Table(self.table.0));
        }
        a.extend(self.mtu.map(|n| RouteAttribute::Metrics(vec![RouteMetric::Mtu(n)])));
        m
    }

    /// `None` for what this type cannot express: several next hops, MPLS, other families.
    pub(crate) fn from_message(m: &RouteMessage) -> Option<Self> {
        let v4 = match m.header.address_family {
            AddressFamily::Inet => true,
            AddressFamily::Inet6 => false,
            _ => return None,
        };
        let kind = match m.header.kind {
            RouteType::Unicast => RouteKind::Unicast,
            RouteType::Local => RouteKind::Local,
            RouteType::BlackHole => RouteKind::Blackhole,
            RouteType::Unreachable => RouteKind::Unreachable,
            RouteType::Prohibit => RouteKind::Prohibit,
            other => RouteKind::Other(other.into()),
        };
        let mut destination = everything(v4).addr();
        let (mut gateway, mut link, mut source, mut metric, mut mtu) = (None, None, None, None, None);
        let mut table = u32::from(m.header.table);
        for a in &m.attributes {
            match a {
                RouteAttribute::Destination(d) => destination = ip(d)?,
                RouteAttribute::Gateway(g) => gateway = Some(ip(g)?),
                RouteAttribute::Oif(i) => link = Some(IfIndex(*i)),
                RouteAttribute::PrefSource(s) => source = Some(ip(s)?),
                RouteAttribute::Priority(n) => metric = Some(*n),
                RouteAttribute::Table(n) => table = *n,
                RouteAttribute::Metrics(list) => {
                    mtu = list.iter().find_map(|x| if let RouteMetric::Mtu(n) = x { Some(*n) } else { None });
                }
                RouteAttribute::MultiPath(_) | RouteAttribute::Via(_) => return None,
                _ => {}
            }
        }
        // The kernel shows what it filled in: its default metric, and loopback as the link of "blackhole" for IPv6.
        metric = metric.filter(|n| *n != if v4 { 0 } else { DEFAULT_METRIC_V6 });
        if matches!(kind, RouteKind::Blackhole | RouteKind::Unreachable | RouteKind::Prohibit) {
            link = None;
        }
        Some(Self {
            destination: IpNet::new(destination, m.header.destination_prefix_length).ok()?,
            gateway,
            link,
            source,
            onlink: m.header.flags.contains(RouteFlags::Onlink),
            mtu,
            metric,
            table: RouteTable(table),
            kind,
            protocol: m.header.protocol.into(),
        })
    }

    pub(crate) fn create_request(&self, already: &'static [Errno]) -> Request {
        Request {
            message: RouteNetlinkMessage::NewRoute(self.message()),
            flags: NLM_F_CREATE | NLM_F_EXCL,
            action: Action::Create,
            object: self.object(),
            already,
        }
    }

    fn replace_request(&self) -> Request {
        Request { flags: NLM_F_CREATE | NLM_F_REPLACE, action: Action::Change, ..self.create_request(&[]) }
    }

    fn delete_request(&self) -> Request {
        let mut m = self.message();
        m.attributes.retain(|a| !matches!(a, RouteAttribute::Metrics(_)));
        Request {
            message: RouteNetlinkMessage::DelRoute(m),
            flags: 0,
            action: Action::Delete,
            object: self.object(),
            already: &[Errno::ESRCH, Errno::ENODEV],
        }
    }
}

/// What [`Handle::sync_routes`] wrote.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RouteChanges {
    /// Routes made.
    pub added: usize,
    /// Routes replaced by one with the same destination, table and metric.
    pub replaced: usize,
    /// Routes removed.
    pub removed: usize,
}

impl RouteChanges {
    /// Writes in all.
    #[must_use]
    pub fn writes(&self) -> usize {
        self.added + self.replaced + self.removed
    }
}

impl Handle {
    /// Makes the route, or replaces flowloom's own with the same destination, table and metric; whether anything
    /// was written.
    ///
    /// # Errors
    /// [`Error::NotOurs`] when somebody else's route has that destination, table and metric.
    pub fn ensure_route(&mut self, route: &Route) -> Result<bool> {
        match self.request(route.create_request(&[])) {
            Ok(_) => return Ok(true),
            Err(e) if e.errno() == Some(Errno::EEXIST) => {}
            Err(e) => return Err(e),
        }
        let there = self.routes(route.destination.addr().is_ipv4(), None)?;
        let same_key: Vec<_> = there.iter().filter(|r| r.key() == route.key()).collect();
        if same_key.contains(&route) {
            return Ok(false);
        }
        if let Some(other) = same_key.iter().find(|r| r.protocol != route.protocol) {
            return Err(Error::NotOurs {
                object: other.object(),
                found: format!("protocol {}", other.protocol),
            });
        }
        self.request(route.replace_request())?;
        Ok(true)
    }

    /// Removes the route if it is there and its protocol is the given one; `Ok(false)` when it was gone.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn delete_route(&mut self, route: &Route) -> Result<bool> {
        Ok(self.request(route.delete_request())?.wrote)
    }

    /// All routes of a family, in every table; of one protocol only when it is given. Routes with several next hops
    /// are left out (flowloom makes none).
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub fn routes(&mut self, v4: bool, protocol: Option<u8>) -> Result<Vec<Route>> {
        let mut m = RouteMessage::default();
        m.header.address_family = family(v4);
        m.header.protocol = protocol.map_or(RouteProtocol::Unspec, Into::into);
        let list = self.dump(&RouteNetlinkMessage::GetRoute(m), "routes")?;
        Ok(list
            .iter()
            .filter_map(
                |m| if let RouteNetlinkMessage::NewRoute(m) = m { Route::from_message(m) } else { None },
            )
            .filter(|r| protocol.is_none_or(|p| p == r.protocol))
            .collect())
    }

    /// flowloom's own routes, both families.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub fn our_routes(&mut self) -> Result<Vec<Route>> {
        let mut list = self.routes(true, Some(PROTOCOL))?;
        list.extend(self.routes(false, Some(PROTOCOL))?);
        Ok(list)
    }

    /// Makes flowloom's routes for which `mine` holds exactly the wanted ones: additions and replacements first,
    /// removals last, so that no wanted destination is without a route meanwhile.
    ///
    /// # Errors
    /// The first refusal; the others are still tried.
    pub fn sync_routes(&mut self, wanted: &[Route], mine: impl Fn(&Route) -> bool) -> Result<RouteChanges> {
        let there: Vec<Route> = self.our_routes()?.into_iter().filter(|r| mine(r)).collect();
        let mut changes = RouteChanges::default();
        let mut first_error = None;
        for route in wanted.iter().filter(|r| !there.contains(r)) {
            match self.ensure_route(route) {
                Ok(false) => {}
                Ok(true) if there.iter().any(|r| r.key() == route.key()) => changes.replaced += 1,
                Ok(true) => changes.added += 1,
                Err(e) => {
                    first_error.get_or_insert(e);
                }
            }
        }
        for route in there.iter().filter(|r| !wanted.iter().any(|w| w.key() == r.key())) {
            match self.delete_route(route) {
                Ok(wrote) => changes.removed += usize::from(wrote),
                Err(e) => {
                    first_error.get_or_insert(e);
                }
            }
        }
        first_error.map_or(Ok(changes), Err)
    }
}

pub(crate) fn family(v4: bool) -> AddressFamily {
    if v4 { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

fn everything(v4: bool) -> IpNet {
    let addr: IpAddr = if v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    IpNet::new_assert(addr, 0)
}

fn ip(a: &RouteAddress) -> Option<IpAddr> {
    match a {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(destination: &str) -> Route {
        Route::on_link(destination.parse().unwrap(), IfIndex(7))
    }

    #[test]
    fn what_is_written_is_what_is_read_back() {
        let base = route("10.1.0.0/16");
        let variants = [
            base,
            Route { gateway: Some("10.9.9.9".parse().unwrap()), onlink: true, mtu: Some(1400), ..base },
            Route {
                table: RouteTable(70_000),
                metric: Some(5),
                source: Some("10.0.0.1".parse().unwrap()),
                ..base
            },
            Route { kind: RouteKind::Blackhole, link: None, ..base },
            route("fd00::/64"),
            Route::default_via("fe80::1".parse().unwrap(), IfIndex(3)),
            Route::default_via("10.0.0.1".parse().unwrap(), IfIndex(3)),
        ];
        for r in variants {
            assert_eq!(Route::from_message(&r.message()), Some(r));
        }
    }

    #[test]
    fn the_metric_that_the_kernel_fills_in_is_no_difference() {
        let mut m = route("fd00::/64").message();
        m.attributes.push(RouteAttribute::Priority(DEFAULT_METRIC_V6));
        assert_eq!(Route::from_message(&m), Some(route("fd00::/64")));
    }

    #[test]
    fn a_destination_is_masked() {
        assert_eq!(route("10.1.2.3/16").destination.to_string(), "10.1.0.0/16");
    }
}
