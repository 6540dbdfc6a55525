//! One endpoint's device and what the workload sees.

use std::net::IpAddr;
use std::path::Path;

use flowloom_netlink::{
    Address, Batch, Error, Handle, IfIndex, Link, LinkChange, LinkName, Mac, Netns, NetnsCookie, Route,
    VethEnd, VethSpec,
};
use ipnet::IpNet;

use super::{Wire, WireSpec, WiringError};
use crate::writes;

/// How the alias of an endpoint's device begins.
pub(super) const ALIAS: &str = "flowloom:endpoint:";

/// Makes or completes; see [`super::Wiring::wire`].
pub(super) fn wire(host: &mut Handle, spec: &WireSpec) -> Result<Option<NetnsCookie>, WiringError> {
    let (path, interface, managed) = match &spec.wire {
        Wire::Device { device } => {
            let link = host.expect_link(&LinkName::new(device.clone())?)?;
            writes::before("host device");
            writes::made(usize::from(host.ensure_link(link.index, &host_side(None))?));
            return Ok(None);
        }
        Wire::Managed { netns, interface, .. } => (netns, interface, true),
        Wire::Netns { netns, interface, .. } => (netns, interface, false),
    };
    let (netns, fresh) = open(path, managed)?;
    let result = wire_veth(host, spec, &netns, &LinkName::new(interface.clone())?);
    if result.is_err() && fresh {
        // This call's own.
        let _ = Netns::remove(path);
    }
    result
}

fn open(path: &Path, managed: bool) -> Result<(Netns, bool), WiringError> {
    match Netns::open(path) {
        Ok(netns) => return Ok((netns, false)),
        Err(e) if !managed => return Err(e.into()),
        // A reboot leaves the name and nothing mounted on it.
        Err(Error::NotANetns { .. }) => {
            writes::before("namespace leftover");
            Netns::remove(path)?;
        }
        Err(Error::Missing { .. }) => {}
        Err(e) => return Err(e.into()),
    }
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    writes::before("namespace");
    let netns = Netns::create(path.parent().unwrap_or(Path::new("/")), name)?;
    writes::made(1);
    Ok((netns, true))
}

fn wire_veth(
    host: &mut Handle,
    spec: &WireSpec,
    netns: &Netns,
    interface: &LinkName,
) -> Result<Option<NetnsCookie>, WiringError> {
    let device = LinkName::new(spec.wire.device().to_owned())?;
    let alias = format!("{ALIAS}{}", spec.name);
    match host.link(&device)? {
        Some(link) if !link.is_ours() => {
            return Err(WiringError::Mismatch(format!(
                "link {device} exists and is not flowloom's; remove it"
            )));
        }
        Some(link) => match complete(host, &link, netns, interface, spec)? {
            Some(cookie) => return Ok(Some(cookie)),
            // A pair whose other end is in a namespace that this endpoint no longer has, or is half made.
            None => {
                writes::before("stale device");
                writes::made(usize::from(host.delete_link(link.index)?));
            }
        },
        None => {}
    }
    writes::before("device");
    let pair = host.create_veth(&VethSpec {
        near: VethEnd { name: &device, mac: None },
        far: VethEnd { name: interface, mac: Some(mac(spec)) },
        far_netns: Some(netns),
        mtu: spec.mtu,
        alias: Some(&alias),
        near_addr_gen_none: true,
        // Not before programs are on it: until then the host's stack would take whatever the workload sends.
        near_up: false,
        queues: Some(1),
    })?;
    writes::made(1);
    let filled = fill(netns, pair.far, spec);
    if filled.is_err() {
        // This call's own.
        let _ = host.delete_link(pair.near);
    }
    filled.map(Some)
}

/// The namespace of an existing pair that is what the spec wants, after writing what can be completed in place.
fn complete(
    host: &mut Handle,
    link: &Link,
    netns: &Netns,
    interface: &LinkName,
    spec: &WireSpec,
) -> Result<Option<NetnsCookie>, WiringError> {
    let mut inside = Handle::in_netns(netns)?;
    let Some(far) = inside.link(interface)? else { return Ok(None) };
    if link.peer != Some(far.index) || link.peer_netns.is_none() {
        return Ok(None);
    }
    let near =
        LinkChange { mtu: Some(spec.mtu), alias: Some(format!("{ALIAS}{}", spec.name)), ..host_side(None) };
    writes::before("device settings");
    writes::made(usize::from(host.ensure_link(link.index, &near)?));
    let wanted =
        LinkChange { up: Some(true), mtu: Some(spec.mtu), mac: Some(mac(spec)), ..LinkChange::default() };
    writes::made(usize::from(inside.ensure_link(far.index, &wanted)?));
    writes::made(usize::from(inside.ensure_link(IfIndex::LOOPBACK, &LinkChange::up())?));
    let addresses = addresses(far.index, spec);
    for old in inside.addresses(Some(far.index))? {
        let link_local = matches!(old.net.addr(), IpAddr::V6(a) if a.is_unicast_link_local());
        if !link_local && !addresses.iter().any(|a| a.net == old.net) {
            writes::made(usize::from(inside.delete_address(&old)?));
        }
    }
    for address in addresses {
        writes::made(usize::from(inside.ensure_address(&address)?));
    }
    for route in routes(far.index, spec) {
        writes::made(usize::from(inside.ensure_route(&route)?));
    }
    Ok(Some(inside.netns_cookie()?))
}

/// A fresh interface: everything in one message.
fn fill(netns: &Netns, far: IfIndex, spec: &WireSpec) -> Result<NetnsCookie, WiringError> {
    let mut inside = Handle::in_netns(netns)?;
    let mut batch = Batch::new().link(IfIndex::LOOPBACK, &LinkChange::up()).link(far, &LinkChange::up());
    for address in addresses(far, spec) {
        batch = batch.address(&address);
    }
    for route in routes(far, spec) {
        batch = batch.route(&route);
    }
    writes::before("inside the namespace");
    writes::made(inside.apply(batch)?);
    Ok(inside.netns_cookie()?)
}

fn host_side(mtu: Option<u32>) -> LinkChange {
    LinkChange { addr_gen_none: Some(true), mtu, ..LinkChange::default() }
}

fn mac(spec: &WireSpec) -> Mac {
    Mac(spec.mac.0)
}

fn addresses(link: IfIndex, spec: &WireSpec) -> Vec<Address> {
    spec.addresses.iter().map(|net| Address::new(link, *net)).collect()
}

/// A default route per family, and one to the gateway itself where the prefix does not cover it.
fn routes(link: IfIndex, spec: &WireSpec) -> Vec<Route> {
    let mut routes = Vec::with_capacity(2);
    for gateway in &spec.gateways {
        if !spec.addresses.iter().any(|net| net.contains(gateway)) {
            routes.push(Route::on_link(IpNet::from(*gateway), link));
        }
        routes.push(Route::default_via(*gateway, link));
    }
    routes
}

/// See [`super::Wiring::unwire`].
pub(super) fn unwire(host: &mut Handle, wire: &Wire) -> Result<(), WiringError> {
    let device = LinkName::new(wire.device().to_owned())?;
    if let Wire::Device { .. } = wire {
        // Somebody's device, and without programs it would pass everything: down, not gone.
        writes::before("device down");
        if let Some(link) = host.link(&device)? {
            let down = LinkChange { up: Some(false), ..LinkChange::default() };
            writes::made(usize::from(host.ensure_link(link.index, &down)?));
        }
        return Ok(());
    }
    writes::before("device removal");
    if let Some(link) = host.link(&device)?
        && link.is_ours()
    {
        writes::made(usize::from(host.delete_link(link.index)?));
    }
    if let Wire::Managed { netns, .. } = wire {
        writes::before("namespace removal");
        writes::made(usize::from(Netns::remove(netns)?));
    }
    Ok(())
}

/// See [`super::Wiring::check`].
pub(super) fn check(host: &mut Handle, spec: &WireSpec) -> Result<(), WiringError> {
    let missing = |what: String| Err(WiringError::Mismatch(what));
    let device = LinkName::new(spec.wire.device().to_owned())?;
    let Some(link) = host.link(&device)? else { return missing(format!("host device {device} is gone")) };
    if !link.up {
        return missing(format!("host device {device} is down"));
    }
    let Some((path, interface)) = spec.wire.inside() else { return Ok(()) };
    let netns = Netns::open(path)?;
    let mut inside = Handle::in_netns(&netns)?;
    let Some(far) = inside.link(&LinkName::new(interface.to_owned())?)? else {
        return missing(format!("interface {interface} is gone from {}", path.display()));
    };
    if link.peer != Some(far.index) {
        return missing(format!(
            "interface {interface} in {} is not the other end of {device}",
            path.display()
        ));
    }
    if !far.up {
        return missing(format!("interface {interface} in {} is down", path.display()));
    }
    if far.mac != Some(mac(spec)) {
        return missing(format!(
            "interface {interface} in {} has another MAC than {}",
            path.display(),
            spec.mac
        ));
    }
    let there = inside.addresses(Some(far.index))?;
    for net in &spec.addresses {
        if !there.iter().any(|a| a.net == *net) {
            return missing(format!("address {net} is gone from {interface} in {}", path.display()));
        }
    }
    for route in routes(far.index, spec) {
        let v4 = route.destination.addr().is_ipv4();
        if !inside
            .routes(v4, None)?
            .iter()
            .any(|r| r.destination == route.destination && r.gateway == route.gateway)
        {
            return missing(format!("route to {} is gone from {}", route.destination, path.display()));
        }
    }
    Ok(())
}
