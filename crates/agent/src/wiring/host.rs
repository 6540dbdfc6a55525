//! The real network, by netlink and nft.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use flowloom_netlink::nft::{Masquerade, Nft};
use flowloom_netlink::sysctl::{self, Key, Scope, Setting};
use flowloom_netlink::{
    ALIAS_PREFIX, Address, Handle, IfIndex, LinkName, Mac, Neighbour, NetnsCookie, Route, RouteKind,
    VxlanSpec,
};
use ipnet::IpNet;

use super::remover::Queue;
use super::{
    HostRoute, MasqueradeSpec, NodeSpec, NodeState, Via, Wire, WireSpec, Wiring, WiringError, workload,
};
use crate::detach::Remover;
use crate::writes;

/// Next hop of the routes through the overlay device: never on a wire, only a name for a permanent neighbour.
const NEXT_HOP_V4: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(169, 254, 241, 1));
/// The same for IPv6.
const NEXT_HOP_V6: IpAddr = IpAddr::V6(std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0xf1));
/// Its hardware address: programs write the real one.
const NEXT_HOP_MAC: Mac = Mac([0x02, 0xf1, 0, 0, 0, 1]);
/// Outer headers (RFC 7348): inner Ethernet 14, VXLAN 8, UDP 8, IPv4 20 or IPv6 40.
const OVERHEAD_V4: u16 = 50;
/// As above.
const OVERHEAD_V6: u16 = 70;

/// The calling thread's network namespace.
#[derive(Debug)]
pub(crate) struct Host {
    netlink: Handle,
    nft: Nft,
    overlay_name: String,
    /// Last table written or found right; nft is slow.
    masquerade: Option<Option<MasqueradeSpec>>,
    overlay: Option<IfIndex>,
    uplinks: Vec<(String, u32)>,
    /// Without it (no thread to be had) devices are removed one by one.
    removals: Option<Queue>,
    /// Permanent neighbours made or found right, per device and address.
    neighbours: BTreeMap<(u32, IpAddr), Mac>,
}

impl Host {
    /// Opens netlink in the calling thread's namespace.
    ///
    /// # Errors
    /// When the socket cannot be opened.
    pub(crate) fn open(table: &str, overlay_name: &str) -> Result<Self, WiringError> {
        Ok(Self {
            netlink: Handle::new()?,
            nft: Nft::new(table)?,
            overlay_name: overlay_name.to_owned(),
            masquerade: None,
            overlay: None,
            uplinks: Vec::new(),
            removals: Queue::start().ok(),
            neighbours: BTreeMap::new(),
        })
    }

    fn find_uplinks(&mut self, spec: &NodeSpec) -> Result<Vec<(String, u32, u32)>, WiringError> {
        let mut found = Vec::new();
        if spec.uplinks.is_empty() {
            for address in self.netlink.addresses(None)? {
                if spec.underlay.contains(&address.net.addr())
                    && let Some(link) = self.netlink.link_by_index(address.link)?
                    && !found.iter().any(|(_, i, _)| *i == link.index.0)
                    && link.index != IfIndex::LOOPBACK
                {
                    found.push((link.name, link.index.0, link.mtu));
                }
            }
        } else {
            for name in &spec.uplinks {
                let link = self.netlink.expect_link(&LinkName::new(name.clone())?)?;
                found.push((link.name, link.index.0, link.mtu));
            }
        }
        Ok(found)
    }

    fn ensure_overlay(&mut self, spec: &NodeSpec, mtu: u16) -> Result<Option<(String, u32)>, WiringError> {
        let Some((name, port)) = &spec.overlay else { return Ok(None) };
        let name = LinkName::new(name.clone())?;
        writes::before("overlay device");
        let ensured = self.netlink.ensure_vxlan(&VxlanSpec {
            name: name.clone(),
            port: *port,
            mtu: u32::from(mtu),
            mac: None,
            alias: format!("{ALIAS_PREFIX}overlay"),
        })?;
        writes::made(usize::from(ensured.wrote));
        let index = ensured.link.index;
        writes::before("overlay sysctls");
        writes::made(self.netlink.ensure_sysctls(&[Setting::link(&name, Key::AcceptRa, 0)])?);
        for next_hop in [NEXT_HOP_V4, NEXT_HOP_V6] {
            self.neighbour(index, next_hop, NEXT_HOP_MAC)?;
        }
        Ok(Some((name.to_string(), index.0)))
    }

    fn neighbour(&mut self, link: IfIndex, ip: IpAddr, mac: Mac) -> Result<(), WiringError> {
        if self.neighbours.get(&(link.0, ip)) == Some(&mac) {
            return Ok(());
        }
        writes::before("neighbour");
        writes::made(usize::from(self.netlink.ensure_neighbour(&Neighbour { link, ip, mac })?));
        self.neighbours.insert((link.0, ip), mac);
        Ok(())
    }

    /// The default VPC's gateway addresses are this host's, on the overlay device.
    fn ensure_gateways(&mut self, spec: &NodeSpec, overlay: IfIndex) -> Result<(), WiringError> {
        let wanted: Vec<IpNet> = spec.gateways.iter().map(|g| IpNet::from(*g)).collect();
        for old in self.netlink.addresses(Some(overlay))? {
            let link_local = matches!(old.net.addr(), IpAddr::V6(a) if a.is_unicast_link_local());
            if !link_local && !wanted.contains(&old.net) {
                writes::before("gateway address removal");
                writes::made(usize::from(self.netlink.delete_address(&old)?));
            }
        }
        for net in wanted {
            let address = Address { noprefixroute: true, ..Address::new(overlay, net) };
            writes::before("gateway address");
            writes::made(usize::from(self.netlink.ensure_address(&address)?));
        }
        Ok(())
    }

    fn route(
        &mut self,
        wish: &HostRoute,
        devices: &BTreeMap<String, u32>,
    ) -> Result<Option<Route>, WiringError> {
        let destination = wish.destination;
        let v4 = destination.addr().is_ipv4();
        let source = wish.source;
        Ok(match &wish.via {
            Via::Device { name, mac } => {
                // A device that vanished in this moment: the next pass has another list.
                let Some(index) = devices.get(name) else { return Ok(None) };
                self.neighbour(IfIndex(*index), destination.addr(), Mac(mac.0))?;
                Some(Route { source, ..Route::on_link(destination, IfIndex(*index)) })
            }
            Via::Overlay => self.overlay.map(|overlay| {
                let next_hop = if v4 { NEXT_HOP_V4 } else { NEXT_HOP_V6 };
                Route { source, onlink: true, ..Route::via(destination, next_hop, overlay) }
            }),
            Via::Node(address) => self.uplinks.first().map(|(_, index)| Route {
                source: None,
                onlink: true,
                ..Route::via(destination, *address, IfIndex(*index))
            }),
            // IPv6 puts such routes on loopback by itself.
            Via::Nowhere => Some(Route {
                kind: RouteKind::Unreachable,
                link: (!v4).then_some(IfIndex::LOOPBACK),
                ..Route::on_link(destination, IfIndex::LOOPBACK)
            }),
        })
    }
}

impl Wiring for Host {
    fn wire(&mut self, spec: &WireSpec) -> Result<Option<NetnsCookie>, WiringError> {
        workload::wire(&mut self.netlink, spec)
    }

    fn raise(&mut self, ifindex: u32) -> Result<(), WiringError> {
        writes::before("device up");
        let up = flowloom_netlink::LinkChange::up();
        let raised = self.netlink.ensure_link(IfIndex(ifindex), &up)?;
        writes::made(usize::from(raised));
        if raised {
            // What the workload sends first is not lost: the answer that lets it start comes after this.
            self.netlink.settle_peer(IfIndex(ifindex))?;
        }
        Ok(())
    }

    fn open_overlay(&mut self, ifindex: u32) -> Result<(), WiringError> {
        writes::before("overlay up");
        writes::made(usize::from(
            self.netlink.ensure_link(IfIndex(ifindex), &flowloom_netlink::LinkChange::up())?,
        ));
        Ok(())
    }

    fn unwire(&mut self, wire: &Wire) -> Result<(), WiringError> {
        workload::unwire(&mut self.netlink, wire)
    }

    fn remover(&self) -> Remover {
        match &self.removals {
            Some(queue) => {
                let queue = queue.clone();
                Box::new(move |wire| queue.remove(wire))
            }
            None => Box::new(|wire| workload::unwire(&mut Handle::new()?, wire)),
        }
    }

    fn is_wired(&mut self, wire: &Wire) -> Result<bool, WiringError> {
        Ok(self.netlink.link(&LinkName::new(wire.device().to_owned())?)?.is_some())
    }

    fn check(&mut self, spec: &WireSpec) -> Result<(), WiringError> {
        workload::check(&mut self.netlink, spec)
    }

    fn node(&mut self, spec: &NodeSpec) -> Result<NodeState, WiringError> {
        let uplinks = self.find_uplinks(spec)?;
        let uplink_mtu = uplinks.iter().map(|(_, _, mtu)| *mtu).min().unwrap_or(1500);
        let uplink_mtu = u16::try_from(uplink_mtu).unwrap_or(u16::MAX);
        let overhead = if spec.underlay.iter().any(IpAddr::is_ipv6) { OVERHEAD_V6 } else { OVERHEAD_V4 };
        let fits = uplink_mtu.saturating_sub(overhead);
        let overlay_mtu = if spec.mtu == 0 { fits } else { fits.min(spec.mtu) };
        let overlay = self.ensure_overlay(spec, overlay_mtu)?;
        self.overlay = overlay.as_ref().map(|(_, i)| IfIndex(*i));
        if let Some(index) = self.overlay {
            self.ensure_gateways(spec, index)?;
        }
        let mut settings = Vec::new();
        if spec.forward4 {
            settings.push(Setting { scope: Scope::All, key: Key::Forwarding4, value: 1 });
        }
        if spec.forward6 {
            settings.push(Setting { scope: Scope::All, key: Key::Forwarding6, value: 1 });
        }
        writes::before("forwarding sysctls");
        writes::made(sysctl::ensure(&settings)?);
        self.uplinks = uplinks.iter().map(|(name, index, _)| (name.clone(), *index)).collect();
        Ok(NodeState { uplinks: self.uplinks.clone(), overlay, uplink_mtu, overlay_mtu })
    }

    fn add_routes(&mut self, routes: &[HostRoute]) -> Result<(), WiringError> {
        let mut devices = BTreeMap::new();
        for wish in routes {
            if let Via::Device { name, .. } = &wish.via
                && !devices.contains_key(name)
                && let Some(link) = self.netlink.link(&LinkName::new(name.clone())?)?
            {
                devices.insert(name.clone(), link.index.0);
            }
            if let Some(route) = self.route(wish, &devices)? {
                writes::before("endpoint route");
                writes::made(usize::from(self.netlink.ensure_route(&route)?));
            }
        }
        Ok(())
    }

    fn remove_strangers(&mut self, known: &BTreeSet<String>) -> Result<(), WiringError> {
        let mut first_error = None;
        for link in self.netlink.links()? {
            let stranger = link.alias.as_deref().is_some_and(|a| a.starts_with(workload::ALIAS))
                && !known.contains(&link.name);
            if stranger {
                writes::before("stray device");
                match self.netlink.delete_link(link.index) {
                    Ok(wrote) => writes::made(usize::from(wrote)),
                    Err(e) => {
                        first_error.get_or_insert(e);
                    }
                }
            }
        }
        first_error.map_or(Ok(()), |e| Err(e.into()))
    }

    fn routes(&mut self, routes: &[HostRoute]) -> Result<(), WiringError> {
        let devices: BTreeMap<String, u32> =
            self.netlink.links()?.into_iter().map(|l| (l.name, l.index.0)).collect();
        self.neighbours.retain(|(index, _), _| devices.values().any(|i| i == index));
        let mut wanted = Vec::with_capacity(routes.len());
        let mut first_error = None;
        for wish in routes {
            match self.route(wish, &devices) {
                Ok(route) => wanted.extend(route),
                Err(e) => {
                    first_error.get_or_insert(e);
                }
            }
        }
        writes::before("routes");
        match self.netlink.sync_routes(&wanted, |_| true) {
            Ok(changes) => writes::made(changes.writes()),
            Err(e) => {
                first_error.get_or_insert(e.into());
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    fn masquerade(&mut self, spec: Option<&MasqueradeSpec>) -> Result<(), WiringError> {
        if self.masquerade.as_ref().is_some_and(|known| known.as_ref() == spec) {
            return Ok(());
        }
        let mut uplinks = Vec::new();
        for name in spec.iter().flat_map(|s| &s.uplinks) {
            uplinks.push(LinkName::new(name.clone())?);
        }
        writes::before("masquerade table");
        let wrote = match spec {
            Some(spec) => self.nft.ensure(&Masquerade {
                sources: spec.sources.clone(),
                except: spec.except.clone(),
                uplinks,
            })?,
            // No table was ever ours to remove when nft is not installed.
            None => self.nft.remove().unwrap_or(false),
        };
        writes::made(usize::from(wrote));
        self.masquerade = Some(spec.cloned());
        Ok(())
    }

    fn purge(&mut self) -> Result<(), Vec<WiringError>> {
        let mut errors: Vec<WiringError> = Vec::new();
        if let Err(e) = self.netlink.sync_routes(&[], |_| true) {
            errors.push(e.into());
        }
        match self.netlink.our_rules() {
            Ok(rules) => {
                for rule in rules {
                    if let Err(e) = self.netlink.delete_rule(&rule) {
                        errors.push(e.into());
                    }
                }
            }
            Err(e) => errors.push(e.into()),
        }
        if let Err(e) = self.nft.remove() {
            errors.push(e.into());
        }
        if let Ok(name) = LinkName::new(self.overlay_name.clone())
            && let Err(e) = self.netlink.delete_our_link(&name)
        {
            errors.push(e.into());
        }
        match self.netlink.links() {
            Ok(links) => {
                for link in links.into_iter().filter(flowloom_netlink::Link::is_ours) {
                    if let Err(e) = self.netlink.delete_link(link.index) {
                        errors.push(e.into());
                    }
                }
            }
            Err(e) => errors.push(e.into()),
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }
}
