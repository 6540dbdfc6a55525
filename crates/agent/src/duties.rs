//! What the node itself owes: devices, gateway addresses, routes, masquerade. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use flowloom_compiler::{EndpointPlan, NodePlan};
use flowloom_datapath::DeviceInfo;
use flowloom_model::{Endpoint, EndpointKey, Mac, NodeName, Subnet, SubnetName, World};
use ipnet::IpNet;

use crate::config::{Config, Routes};
use crate::wiring::{HostRoute, MasqueradeSpec, NodeSpec, NodeState, Via};

fn default_subnets(world: &World) -> impl Iterator<Item = &Subnet> {
    world.subnets.values().filter(|s| s.vpc.is_default())
}

fn same_family(a: &IpAddr, b: &IpAddr) -> bool {
    a.is_ipv4() == b.is_ipv4()
}

/// Devices, addresses and settings.
#[must_use]
pub(crate) fn node_spec(config: &Config, world: &World) -> NodeSpec {
    let has = |v4: bool| default_subnets(world).flat_map(|s| &s.cidrs).any(|c| c.addr().is_ipv4() == v4);
    let gateways: BTreeSet<IpAddr> =
        default_subnets(world).flat_map(|s| s.gateways.iter().copied()).collect();
    NodeSpec {
        underlay: world.nodes.get(&config.node).map(|n| n.addresses.clone()).unwrap_or_default(),
        uplinks: config.uplinks.clone(),
        overlay: Some((config.overlay_device.clone(), config.tunnel_port)),
        gateways: gateways.into_iter().collect(),
        forward4: has(true),
        forward6: has(false),
        mtu: config.mtu,
    }
}

/// The masquerade table, when the configuration wants one.
#[must_use]
pub(crate) fn masquerade_spec(config: &Config, world: &World, node: &NodeState) -> Option<MasqueradeSpec> {
    if !config.masquerade.enabled {
        return None;
    }
    let sources: BTreeSet<IpNet> = default_subnets(world).flat_map(|s| s.cidrs.iter().copied()).collect();
    let nodes = world.nodes.values().flat_map(|n| n.addresses.iter().map(|a| IpNet::from(*a)));
    let except: BTreeSet<IpNet> =
        sources.iter().copied().chain(nodes).chain(config.masquerade.except.iter().copied()).collect();
    Some(MasqueradeSpec {
        sources: sources.into_iter().collect(),
        except: except.into_iter().collect(),
        uplinks: node.uplinks.iter().map(|(name, _)| name.clone()).collect(),
    })
}

/// MTU of a workload's interface.
#[must_use]
pub(crate) fn workload_mtu(config: &Config, node: &NodeState, plan: &EndpointPlan) -> u32 {
    let direct = config.routes == Routes::Direct && plan.key.vpc.is_default();
    // The overlay device may come later; what fits it is known.
    let path = if direct { node.uplink_mtu } else { node.overlay_mtu };
    let path = if path == 0 { 1500 } else { path };
    let asked = [config.mtu, plan.mtu.unwrap_or(0)].into_iter().filter(|m| *m != 0).min();
    u32::from(asked.map_or(path, |m| m.min(path)))
}

/// Routes to one local endpoint of the default VPC.
pub(crate) fn endpoint_routes(plan: &EndpointPlan, device: &DeviceInfo) -> Vec<HostRoute> {
    let mac = Mac(plan.mac.0);
    plan.ips
        .iter()
        .map(|ip| HostRoute {
            destination: IpNet::from(*ip),
            via: Via::Device { name: device.name.clone(), mac },
            source: plan.gateways.iter().find(|g| same_family(g, ip)).copied(),
        })
        .collect()
}

/// Every route of the default VPC: local endpoints, and what lies on other nodes.
#[must_use]
pub(crate) fn routes(
    config: &Config,
    world: &World,
    plan: &NodePlan,
    devices: &BTreeMap<EndpointKey, DeviceInfo>,
) -> BTreeSet<HostRoute> {
    let mut routes = BTreeSet::new();
    for endpoint in plan.endpoints.values().filter(|e| e.key.vpc.is_default()) {
        if let Some(device) = devices.get(&endpoint.key) {
            routes.extend(endpoint_routes(endpoint, device));
        }
    }
    let node_address = |node, family: &IpAddr| {
        let addresses = &world.nodes.get(node)?.addresses;
        addresses.iter().find(|a| same_family(a, family)).copied()
    };
    for subnet in default_subnets(world) {
        for cidr in &subnet.cidrs {
            // A node's own address is what the other node's programs accept from its host, and answers come back for it.
            let source = node_address(&config.node, &cidr.addr());
            let via = match config.routes {
                Routes::Vxlan => Via::Overlay,
                Routes::Direct => subnet
                    .node
                    .as_ref()
                    .filter(|n| **n != config.node)
                    .and_then(|n| node_address(n, &cidr.addr()))
                    .map_or(Via::Nowhere, Via::Node),
            };
            routes.insert(HostRoute { destination: *cidr, via, source });
        }
        if config.routes == Routes::Direct {
            for range in subnet.cni_ranges.iter().filter(|r| r.node != config.node) {
                if let Some(address) = node_address(&range.node, &range.cidr.addr()) {
                    routes.insert(HostRoute {
                        destination: range.cidr,
                        via: Via::Node(address),
                        source: None,
                    });
                }
            }
        }
    }
    if config.routes == Routes::Direct {
        // Where a subnet is its node's, the subnet's route leads to all of it.
        let of_nodes: HashMap<&SubnetName, &NodeName> =
            default_subnets(world).filter_map(|s| Some((&s.name, s.node.as_ref()?))).collect();
        let covered = |e: &Endpoint| of_nodes.get(&e.subnet).is_some_and(|node| **node == e.node);
        let elsewhere = |e: &&Arc<Endpoint>| e.vpc.is_default() && e.node != config.node;
        for endpoint in world.endpoints.values().filter(elsewhere).filter(|e| !covered(e)) {
            for ip in &endpoint.ips {
                if let Some(address) = node_address(&endpoint.node, ip) {
                    routes.insert(HostRoute {
                        destination: IpNet::from(*ip),
                        via: Via::Node(address),
                        source: None,
                    });
                }
            }
        }
    }
    routes
}

#[cfg(test)]
mod tests;
