//! A node of namespaces with the programs attached and the maps filled by hand: program tests without agent or compiler.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, Result};
use aya::programs::TcAttachType;
use flowloom_bpf_abi::{
    self as abi, Addr, delivery, endpoint_flags, map_name, peer_flags, verdict, vpc_flags,
};
use flowloom_netlink::LinkName;
use flowloom_testkit::{
    EchoServer, Mode, Netfilter, Ns, Outcome, PATIENCE, Probe, TcpClient, TcpServer, connect,
};

use crate::programs::{Programs, entry};

/// Slot that allows everything.
pub const ALLOW: u32 = 1;
/// Slot that drops everything.
pub const DENY: u32 = 2;
/// Slot that rejects everything.
pub const REJECT: u32 = 3;
/// VPC that may use the stack.
pub const DEFAULT_VPC: u32 = 100;
/// VPCs that may not; both use the same addresses.
pub const RED: u32 = 201;
/// See [`RED`].
pub const BLUE: u32 = 202;

/// Programs on one node.
#[derive(Debug)]
pub struct Lab {
    /// Maps and programs.
    pub programs: Programs,
    /// Node number, part of nothing but names.
    pub number: u8,
}

/// A workload.
#[derive(Debug)]
pub struct Workload {
    /// Its namespace.
    pub ns: Ns,
    /// Its endpoint id.
    pub id: u32,
    /// Its record.
    pub record: abi::EndpointRecord,
    /// Its addresses.
    pub ip4: Ipv4Addr,
    /// See `ip4`.
    pub ip6: Ipv6Addr,
}

impl Workload {
    /// Its address of a family.
    #[must_use]
    pub fn ip(&self, v6: bool) -> IpAddr {
        if v6 { self.ip6.into() } else { self.ip4.into() }
    }
}

/// Address number `host` of subnet `net` in every VPC.
#[must_use]
pub fn ip4(net: u8, host: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 1, net, host)
}

/// See [`ip4`].
#[must_use]
pub fn ip6(net: u8, host: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 1, u16::from(net), 0, 0, 0, 0, u16::from(host))
}

/// Identity of an endpoint in these tests.
#[must_use]
pub const fn identity(id: u32) -> u32 {
    256 + id
}

impl Lab {
    /// Loads the programs and writes what every test needs: three VPCs, three slots, the configuration.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn new(number: u8) -> Result<Self> {
        let mut programs = Programs::load(false)?;
        for vpc in [DEFAULT_VPC, RED, BLUE] {
            let flags = if vpc == DEFAULT_VPC { vpc_flags::DEFAULT } else { 0 };
            programs.put(map_name::VPCS, vpc, abi::VpcRecord { vni: vpc, generation: 1, flags, pad: 0 })?;
        }
        for (slot, verdict) in [(ALLOW, verdict::ALLOW), (DENY, verdict::DROP), (REJECT, verdict::REJECT)] {
            programs.policy(slot, &[entry(0, 0, None, 10, verdict)])?;
        }
        let mut lab = Self { programs, number };
        lab.configure(|_| ())?;
        Ok(lab)
    }

    /// Changes the configuration.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn configure(&mut self, change: impl FnOnce(&mut abi::NodeConfig)) -> Result<()> {
        let mut config: abi::NodeConfig = self.programs.get(map_name::CONFIG, 0)?;
        config.tunnel_port = 4789u16.to_be_bytes();
        config.default_vpc = DEFAULT_VPC;
        change(&mut config);
        self.programs.set(map_name::CONFIG, 0, config)
    }

    /// A node's namespace where nothing is forwarded by the stack.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn closed_node(&self) -> Result<Ns> {
        self.filtered_node(Netfilter::ForwardDrop)
    }

    /// A node's namespace with a packet filter.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn filtered_node(&self, filter: Netfilter) -> Result<Ns> {
        let ns = Ns::new(&format!("n{}", self.number))?;
        close(&ns, filter)?;
        Ok(ns)
    }

    /// A workload with one address per family in subnet `net`, attached.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn workload(&mut self, node: &Ns, id: u32, vpc: u32, net: u8, host: u8) -> Result<Workload> {
        let (a4, a6) = (ip4(net, host), ip6(net, host));
        let ns = Ns::new(&format!("w{id}"))?;
        let name = LinkName::new(format!("ep{id}"))?;
        let pair = connect(node, &name, &ns, &LinkName::new("eth0")?, 1500)?;
        let (gateway4, gateway6) = (ip4(net, 1), ip6(net, 1));
        for argv in [
            format!("ip addr add {a4}/24 dev eth0"),
            format!("ip addr add {a6}/64 dev eth0 nodad"),
            format!("ip route add default via {gateway4}"),
            format!("ip -6 route add default via {gateway6}"),
        ] {
            ns.exec_ok(&argv.split(' ').collect::<Vec<_>>())?;
        }
        let mac = |ns: &Ns, dev: &str| -> Result<[u8; 6]> {
            let link = ns.handle()?.link(&LinkName::new(dev)?)?;
            Ok(link.and_then(|l| l.mac).with_context(|| format!("{dev} has no address"))?.0)
        };
        let record = abi::EndpointRecord {
            vpc,
            identity: identity(id),
            ifindex: pair.near.number(),
            revision: 1,
            egress_slot: ALLOW,
            ingress_slot: ALLOW,
            flags: endpoint_flags::VALID | endpoint_flags::MAC_PINNED,
            delivery: delivery::PEER,
            plen4: 24,
            mac: mac(&ns, "eth0")?,
            host_mac: mac(node, name.as_str())?,
            plen6: 64,
            pad: 0,
            mtu: 1500,
            ip4: Addr::from(IpAddr::from(a4)),
            ip6: Addr::from(IpAddr::from(a6)),
            gateway4: Addr::from(IpAddr::from(gateway4)),
            gateway6: Addr::from(IpAddr::from(gateway6)),
        };
        let workload = Workload { ns, id, record, ip4: a4, ip6: a6 };
        self.enter(&workload)?;
        for (ip, gateway) in [(IpAddr::from(a4), IpAddr::from(gateway4)), (a6.into(), gateway6.into())] {
            self.local(vpc, ip, id, 0)?;
            self.local(vpc, gateway, 0, abi::address_flags::GATEWAY)?;
            self.endpoint_peer(vpc, ip, identity(id))?;
        }
        self.programs.put(map_name::DEVICES, record.ifindex, abi::DeviceRecord { endpoint: id, flags: 0 })?;
        self.attach(node, name.as_str(), "from_endpoint", TcAttachType::Ingress)?;
        self.attach(node, name.as_str(), "to_endpoint", TcAttachType::Egress)?;
        Ok(workload)
    }

    /// Writes the workload's record.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn enter(&mut self, w: &Workload) -> Result<()> {
        self.programs.set(map_name::ENDPOINTS, w.id, w.record)
    }

    /// Switches the workload's slots: a new revision.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn switch(&mut self, w: &mut Workload, egress: u32, ingress: u32) -> Result<()> {
        w.record.egress_slot = egress;
        w.record.ingress_slot = ingress;
        w.record.revision += 1;
        self.enter(w)
    }

    /// An address of this node.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn local(&mut self, vpc: u32, ip: IpAddr, endpoint: u32, flags: u32) -> Result<()> {
        self.programs.put(
            map_name::ADDRESSES,
            abi::AddressKey { vpc, addr: ip.into() },
            abi::AddressRecord { endpoint, flags },
        )
    }

    /// A local endpoint in the ipcache.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn endpoint_peer(&mut self, vpc: u32, ip: IpAddr, identity: u32) -> Result<()> {
        let full = if ip.is_ipv4() { 32 } else { 128 };
        self.programs.peer(
            vpc,
            ip,
            full,
            abi::PeerRecord { identity, flags: peer_flags::ENDPOINT, tunnel: Addr::ZERO },
        )
    }

    /// An endpoint of another node in the ipcache.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remote_peer(
        &mut self,
        vpc: u32,
        ip: IpAddr,
        identity: u32,
        tunnel: IpAddr,
        flags: u32,
    ) -> Result<()> {
        let full = if ip.is_ipv4() { 32 } else { 128 };
        let flags = peer_flags::ENDPOINT | peer_flags::REMOTE | flags;
        self.programs.peer(vpc, ip, full, abi::PeerRecord { identity, flags, tunnel: tunnel.into() })
    }

    /// A VXLAN device on the node, with its programs; `mtu` is what fits the tunnel.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn overlay(&mut self, node: &Ns, mtu: u16) -> Result<()> {
        let name = "flvx";
        for argv in [
            format!("ip link add {name} type vxlan external dstport 4789 nolearning"),
            format!("ip link set {name} addrgenmode none mtu {mtu} arp off up"),
        ] {
            node.exec_ok(&argv.split(' ').collect::<Vec<_>>())?;
        }
        let link = node.handle()?.link(&LinkName::new(name)?)?.context("no overlay device")?;
        self.configure(|c| {
            c.overlay_ifindex = link.index.number();
            c.overlay_mtu = mtu;
        })?;
        self.attach(node, name, "from_overlay", TcAttachType::Ingress)?;
        self.attach(node, name, "to_overlay", TcAttachType::Egress)
    }

    /// A node of the underlay.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn node(&mut self, ip: IpAddr, flags: u32) -> Result<()> {
        let tunnel = Addr::from(ip);
        self.programs.put(map_name::NODES, tunnel, abi::NodeRecord { flags, pad: 0, tunnel })
    }

    /// Lets the host's stack speak with a workload of the default VPC: the gateway's addresses on the device, a route to it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn host(&mut self, node: &Ns, w: &Workload, net: u8) -> Result<()> {
        let device = format!("ep{}", w.id);
        for argv in [
            format!("ip addr replace {}/32 dev {device}", ip4(net, 1)),
            format!("ip addr replace {}/128 dev {device} nodad", ip6(net, 1)),
            format!("ip route add {} dev {device} src {}", w.ip4, ip4(net, 1)),
            format!("ip -6 route add {} dev {device} src {}", w.ip6, ip6(net, 1)),
        ] {
            node.exec_ok(&argv.split(' ').collect::<Vec<_>>())?;
        }
        for ip in [IpAddr::from(ip4(net, 1)), ip6(net, 1).into()] {
            self.local(w.record.vpc, ip, 0, abi::address_flags::GATEWAY | abi::address_flags::HOST)?;
            self.endpoint_peer(w.record.vpc, ip, abi::identity::HOST)?;
        }
        Ok(())
    }

    /// Attaches a program to a device of the node.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn attach(&mut self, node: &Ns, device: &str, program: &str, at: TcAttachType) -> Result<()> {
        let program = self.programs.program(program)?;
        node.run_in(|| program.attach(device, at).map(drop))?
            .with_context(|| format!("attaching to {device}"))
    }
}

/// Much more than one segment, and more than the kernel puts into one packet inside the machine.
const BULK: usize = 300_000;

/// Has `to` serve `at`, and `from` ask at `entry`: a handshake, a datagram, an echo where nothing is translated, and more than a segment each
/// way come through. The server goes on while it is held.
///
/// # Panics
/// When something does not; then with what the labs dropped.
pub fn passes(labs: &[&Lab], from: &Ns, entry: SocketAddr, to: &Ns, at: SocketAddr) -> TcpServer {
    let drops = || labs.iter().map(|l| l.programs.drops()).collect::<Vec<_>>();
    let tcp = TcpServer::start(to, at, Mode::Echo).expect("tcp server");
    let _udp = EchoServer::start(to, at).expect("udp server");
    let echo = (entry == at).then(|| Probe::icmp(from, at.ip()));
    for probe in [Probe::tcp(from, entry), Probe::udp(from, entry)].into_iter().chain(echo) {
        let outcome = probe.timeout(PATIENCE).run().expect("probe");
        assert_eq!(outcome, Outcome::Connected, "{:?} to {entry}: {:?}", probe.proto, drops());
    }
    let mut client = TcpClient::connect(from, entry, PATIENCE).expect("connect");
    let bulk = client.round_trip(&vec![7; BULK], PATIENCE);
    assert!(bulk.is_ok(), "{bulk:?} to {entry}: {:?}", drops());
    tcp
}

/// Sets the packet filter of a namespace.
///
/// # Errors
/// When nft refuses.
pub fn close(ns: &Ns, filter: Netfilter) -> Result<()> {
    let mut rules = String::from(
        "table inet lab { chain forward { type filter hook forward priority 0; policy drop; }\n",
    );
    if filter == Netfilter::InvalidDrop {
        for hook in ["prerouting", "input", "output"] {
            rules.push_str(&format!(
                " chain {hook} {{ type filter hook {hook} priority 0; ct state invalid drop; }}\n"
            ));
        }
    }
    rules.push_str("}\n");
    ns.exec_ok(&["nft", &rules]).map(drop)
}
