//! Nodes as namespaces, joined by an underlay.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::{Context, Result};
use flowloom_netlink::sysctl::{Key, Scope, Setting};
use flowloom_netlink::{
    Address, Handle, IfIndex, LinkChange, LinkName, Netns, Route, VethEnd, VethPair, VethSpec,
};
use ipnet::IpNet;

use crate::exec::Cmd;
use crate::ns::Ns;
use crate::time::eventually;

/// What stands in the way of packets that the stack forwards: with it, nothing but eBPF can carry them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Netfilter {
    /// Nothing.
    #[default]
    Open,
    /// nft `forward` chain with policy drop.
    ForwardDrop,
    /// That, and `ct state invalid drop` in prerouting, input, forward and output.
    InvalidDrop,
}

/// A node: its namespace and its uplink into the underlay.
#[derive(Debug)]
pub struct Node {
    /// The node's namespace.
    pub ns: Ns,
    /// Number, from 1.
    pub number: u8,
    /// Name of the uplink inside.
    pub uplink: LinkName,
    /// Its index.
    pub uplink_index: IfIndex,
    /// 198.51.100.(10 + number).
    pub ip4: Ipv4Addr,
    /// 2001:db8:ffff::(10 + number).
    pub ip6: Ipv6Addr,
}

/// A host of the underlay that is no node: "the world".
#[derive(Debug)]
pub struct External {
    /// Its namespace; it knows the underlay only, no route to any workload.
    pub ns: Ns,
    /// 198.51.100.200.
    pub ip4: Ipv4Addr,
    /// 2001:db8:ffff::200.
    pub ip6: Ipv6Addr,
}

/// Nodes (and, when asked for, the world) on one underlay segment, IPv4 and IPv6.
#[derive(Debug)]
pub struct Topology {
    /// The nodes, number 1 first.
    pub nodes: Vec<Node>,
    /// The world.
    pub external: Option<External>,
    /// Holds the bridge.
    pub underlay: Ns,
}

/// How a [`Topology`] is made.
#[derive(Debug, Clone)]
pub struct TopologyBuilder {
    nodes: u8,
    mtu: u32,
    netfilter: Netfilter,
    external: bool,
    forwarding: bool,
}

impl Topology {
    /// Two nodes, MTU 1500, no packet filter, forwarding on.
    #[must_use]
    pub fn builder() -> TopologyBuilder {
        TopologyBuilder { nodes: 2, mtu: 1500, netfilter: Netfilter::Open, external: false, forwarding: true }
    }
}

impl TopologyBuilder {
    /// How many nodes, at most 100.
    #[must_use]
    pub fn nodes(mut self, n: u8) -> Self {
        self.nodes = n.min(100);
        self
    }

    /// MTU of the underlay, bytes.
    #[must_use]
    pub fn mtu(mut self, mtu: u32) -> Self {
        self.mtu = mtu;
        self
    }

    /// Packet filter in every node.
    #[must_use]
    pub fn netfilter(mut self, netfilter: Netfilter) -> Self {
        self.netfilter = netfilter;
        self
    }

    /// With a host outside.
    #[must_use]
    pub fn external(mut self) -> Self {
        self.external = true;
        self
    }

    /// Leave the nodes' forwarding sysctls as the kernel has them.
    #[must_use]
    pub fn no_forwarding(mut self) -> Self {
        self.forwarding = false;
        self
    }

    /// Makes it.
    ///
    /// # Errors
    /// When the kernel refuses; what was made is undone.
    pub fn build(self) -> Result<Topology> {
        let underlay = Ns::new("underlay")?;
        let mut handle = underlay.handle()?;
        let bridge = handle.create_bridge(&LinkName::new("br0")?)?.index;
        handle.change_link(bridge, &LinkChange { mtu: Some(self.mtu), ..LinkChange::up() })?;
        let join = |ns: &Ns, name: &LinkName, port: &str, ips: [IpAddr; 2]| -> Result<IfIndex> {
            let pair = connect(&underlay, &LinkName::new(port)?, ns, name, self.mtu)?;
            underlay
                .handle()?
                .change_link(pair.near, &LinkChange { master: Some(bridge), ..LinkChange::default() })?;
            let mut inner = ns.handle()?;
            for ip in ips {
                let length = if ip.is_ipv4() { 24 } else { 64 };
                inner.ensure_address(&Address::new(pair.far, IpNet::new(ip, length)?))?;
            }
            Ok(pair.far)
        };
        let uplink = LinkName::new("uplink")?;
        let mut nodes = Vec::new();
        for number in 1..=self.nodes {
            let ns = Ns::new(&format!("node{number}"))?;
            let ip4 = Ipv4Addr::new(198, 51, 100, 10 + number);
            let ip6 = underlay6(10 + u16::from(number));
            let index = join(&ns, &uplink, &format!("node{number}"), [ip4.into(), ip6.into()])?;
            if self.forwarding {
                let on = |scope, key| Setting { scope, key, value: 1 };
                ns.handle()?.ensure_sysctls(&[
                    on(Scope::All, Key::Forwarding4),
                    on(Scope::All, Key::Forwarding6),
                    on(Scope::Default, Key::Forwarding4),
                    on(Scope::Default, Key::Forwarding6),
                ])?;
            }
            let node = Node { ns, number, uplink: uplink.clone(), uplink_index: index, ip4, ip6 };
            node.set_netfilter(self.netfilter)?;
            nodes.push(node);
        }
        let external = if self.external {
            let ns = Ns::new("world")?;
            let (ip4, ip6) = (Ipv4Addr::new(198, 51, 100, 200), underlay6(0x200));
            join(&ns, &LinkName::new("eth0")?, "world", [ip4.into(), ip6.into()])?;
            Some(External { ns, ip4, ip6 })
        } else {
            None
        };
        Ok(Topology { nodes, external, underlay })
    }
}

fn underlay6(n: u16) -> Ipv6Addr {
    Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0, 0, 0, 0, n)
}

impl Node {
    /// Both underlay addresses, IPv4 first.
    #[must_use]
    pub fn ips(&self) -> [IpAddr; 2] {
        [self.ip4.into(), self.ip6.into()]
    }

    /// Replaces the packet filter of this node (nft table `inet testkit`).
    ///
    /// # Errors
    /// When `nft` is missing or refuses.
    pub fn set_netfilter(&self, netfilter: Netfilter) -> Result<()> {
        // Adding first makes the deletion legal when there is no such table.
        let mut rules = String::from("table inet testkit {}\ndelete table inet testkit\n");
        if netfilter != Netfilter::Open {
            rules.push_str("table inet testkit {\n chain forward { type filter hook forward priority 0; policy drop; }\n");
            if netfilter == Netfilter::InvalidDrop {
                for hook in ["prerouting", "input", "output"] {
                    rules.push_str(&format!(
                        " chain {hook} {{ type filter hook {hook} priority 0; ct state invalid drop; }}\n"
                    ));
                }
                rules.push_str(
                    " chain invalid { type filter hook forward priority -1; ct state invalid drop; }\n",
                );
            }
            rules.push_str("}\n");
        }
        Cmd::new(&["nft", "-f", "-"]).in_netns(&self.ns)?.input(rules).run()?.success().map(drop)
    }

    /// Lets what the stack forwards to and from these links pass in spite of [`Netfilter`] (for tests of masquerade).
    ///
    /// # Errors
    /// When `nft` refuses; there must be a filter.
    pub fn exempt_from_netfilter(&self, source: IpNet) -> Result<()> {
        let family = if source.addr().is_ipv4() { "ip" } else { "ip6" };
        let rules = format!(
            "add rule inet testkit forward {family} saddr {source} accept\n\
             add rule inet testkit forward {family} daddr {source} accept\n"
        );
        Cmd::new(&["nft", "-f", "-"]).in_netns(&self.ns)?.input(rules).run()?.success().map(drop)
    }

    /// A workload wired by the kernel alone, without flowloom: a veth named `near` here, `eth0` in a new namespace
    /// with the addresses, on-link gateways, and host routes back. For peers of comparisons and for tests of the kit.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn plain_workload(
        &self,
        label: &str,
        near: &LinkName,
        nets: &[IpNet],
        gateways: &[IpAddr],
    ) -> Result<Ns> {
        let ns = Ns::new(label)?;
        let pair = connect(&self.ns, near, &ns, &LinkName::new("eth0")?, 1500)?;
        let (mut outer, mut inner) = (self.ns.handle()?, ns.handle()?);
        for gateway in gateways {
            outer.ensure_address(&Address::new(pair.near, IpNet::from(*gateway)))?;
        }
        for net in nets {
            inner.ensure_address(&Address { noprefixroute: true, ..Address::new(pair.far, *net) })?;
            outer.ensure_route(&Route::on_link(IpNet::from(net.addr()), pair.near))?;
            let gateway = gateways
                .iter()
                .find(|g| g.is_ipv4() == net.addr().is_ipv4())
                .with_context(|| format!("no gateway for {net}"))?;
            inner.ensure_route(&Route { onlink: true, ..Route::default_via(*gateway, pair.far) })?;
        }
        Ok(ns)
    }
}

/// A veth pair between two namespaces, both ends up and running.
///
/// # Errors
/// When a name is taken.
pub fn connect(a: &Netns, a_name: &LinkName, b: &Netns, b_name: &LinkName, mtu: u32) -> Result<VethPair> {
    let spec = VethSpec {
        near: VethEnd { name: a_name, mac: None },
        far: VethEnd { name: b_name, mac: None },
        far_netns: Some(b),
        mtu,
        alias: None,
        near_addr_gen_none: false,
        near_up: true,
        queues: None,
    };
    let pair = Handle::in_netns(a)?.create_veth(&spec)?;
    let (mut near, mut far) = (Handle::in_netns(a)?, Handle::in_netns(b)?);
    far.change_link(pair.far, &LinkChange::up())?;
    // Multicast groups are joined and bridge ports forward only once the kernel has noticed the carrier.
    let running = |h: &mut Handle, index| h.link_by_index(index).is_ok_and(|l| l.is_some_and(|l| l.running));
    eventually(Duration::from_secs(10), || {
        match (running(&mut near, pair.near), running(&mut far, pair.far)) {
            (true, true) => Ok(()),
            other => Err(other),
        }
    });
    Ok(pair)
}
