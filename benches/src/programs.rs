//! The programs alone, by `BPF_PROG_TEST_RUN` over real maps of any size: what one packet costs without devices, stacks and sockets around it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use aya::programs::{TestRun as _, TestRunOptions};
use flowloom_bpf_abi::{self as abi, Addr, delivery, endpoint_flags, map_name, mark, peer_flags, verdict};
use flowloom_netlink::{LinkName, Mac};
use flowloom_testkit::{Ns, Packet};
use flowloom_tests_netns::programs::{Programs, entry};

const VPC: u32 = 201;
const DEFAULT_VPC: u32 = 100;
/// This node, on the underlay.
const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const TUNNEL_PORT: u16 = 4789;
const SLOT: u32 = 1;
const PORT: u16 = 5201;
/// Connections that fit, as an agent has them by default.
const CONNECTIONS: [u32; 2] = [abi::MAX_CONNTRACK, abi::MAX_CONNTRACK_NEW];
/// `TCX_REDIRECT` and `TCX_NEXT`.
const VERDICT_REDIRECT: u32 = 7;
const VERDICT_NEXT: u32 = u32::MAX;

const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;

/// What the maps hold besides the two endpoints that talk.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scale {
    /// Rules of the policy that both endpoints have, beyond the one that allows.
    pub rules: u32,
    /// Peers known by their addresses.
    pub peers: u32,
}

/// A packet of [`World::life`] and what it is called.
pub const LIFE: [&str; 7] = ["SYN", "SYN-ACK", "ACK", "request", "reply", "ACK of the reply", "RST"];

/// A hook that can be run alone (`from_overlay` wants a tunnel that a test run cannot have), with the packet it mostly sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hook {
    /// See `from_endpoint`.
    FromEndpoint,
    /// See `to_endpoint`.
    ToEndpoint,
    /// See `to_overlay`.
    ToOverlay,
    /// See `to_uplink`.
    ToUplink,
    /// See `from_uplink`.
    FromUplink,
    /// See `from_uplink`.
    FromUplinkTunnel,
}

impl Hook {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::FromEndpoint,
        Self::ToEndpoint,
        Self::ToOverlay,
        Self::ToUplink,
        Self::FromUplink,
        Self::FromUplinkTunnel,
    ];

    /// The program.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FromEndpoint => "from_endpoint",
            Self::ToEndpoint => "to_endpoint",
            Self::ToOverlay => "to_overlay",
            Self::ToUplink => "to_uplink",
            Self::FromUplink | Self::FromUplinkTunnel => "from_uplink",
        }
    }

    /// What it is given.
    #[must_use]
    pub const fn packet(self) -> &'static str {
        match self {
            Self::FromEndpoint => "open connection to the neighbour",
            Self::ToEndpoint => "judged by the sender's hook",
            Self::ToOverlay => "wrapped by the sender's hook",
            Self::ToUplink => "the host's own",
            Self::FromUplink => "for the host",
            Self::FromUplinkTunnel => "the outside of a tunnel's packet",
        }
    }
}

/// Two endpoints of one node and the programs between them.
#[derive(Debug)]
pub struct World {
    programs: Programs,
    ns: Ns,
    devices: [u32; 2],
    next_port: u16,
}

fn host(n: usize) -> IpAddr {
    Ipv4Addr::new(10, 1, 0, if n == 0 { 10 } else { 20 }).into()
}

fn mac(n: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, n as u8]
}

impl World {
    /// Loads the programs and fills the maps.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn new(object: &[u8], scale: Scale) -> Result<Self> {
        let ns = Ns::new("programs")?;
        ns.exec_ok(&["ip", "link", "add", "p0", "type", "veth", "peer", "name", "p1"])?;
        let mut handle = ns.handle()?;
        let mut index = |name: &str| -> Result<u32> {
            Ok(handle.link(&LinkName::new(name)?)?.context("no device")?.index.number())
        };
        let devices = [index("p0")?, index("p1")?];
        let mut programs = Programs::classifiers(object, false, CONNECTIONS)?;
        let config = abi::NodeConfig {
            tunnel_port: TUNNEL_PORT.to_be_bytes(),
            default_vpc: DEFAULT_VPC,
            node4: Addr::from(IpAddr::from(NODE)),
            ..abi::NodeConfig::default()
        };
        programs.set(map_name::CONFIG, 0, config)?;
        for (vpc, flags) in [(VPC, 0), (DEFAULT_VPC, abi::vpc_flags::DEFAULT)] {
            programs.put(map_name::VPCS, vpc, abi::VpcRecord { vni: vpc, generation: 1, flags, pad: 0 })?;
        }
        let own = abi::AddressKey { vpc: DEFAULT_VPC, addr: Addr::from(IpAddr::from(NODE)) };
        let record = abi::AddressRecord { endpoint: 0, flags: abi::address_flags::HOST };
        programs.put(map_name::ADDRESSES, own, record)?;
        let mut entries = vec![entry(0, 6, None, u32::MAX, verdict::ALLOW)];
        for i in 0..scale.rules {
            let v = if i % 2 == 0 { verdict::ALLOW } else { verdict::DROP };
            let port = (1 + i % 60_000) as u16;
            entries.push(entry(1000 + i, 6, Some((port, 16)), 1 + i, v));
        }
        programs.policy(SLOT, &entries)?;
        for i in 0..scale.peers {
            let ip = Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 2, 0, 0)) + i);
            let record = abi::PeerRecord {
                identity: 1000 + i,
                flags: peer_flags::ENDPOINT | peer_flags::REMOTE,
                tunnel: Addr::v4([198, 51, 100, (i % 250) as u8]),
            };
            programs.peer(VPC, ip.into(), 32, record)?;
        }
        for (n, ifindex) in devices.into_iter().enumerate() {
            let id = n as u32 + 1;
            let record = abi::EndpointRecord {
                vpc: VPC,
                identity: 256 + id,
                ifindex,
                revision: 1,
                egress_slot: SLOT,
                ingress_slot: SLOT,
                // Not pinned: a repeated run meets the frame as the run before left it.
                flags: endpoint_flags::VALID,
                delivery: delivery::PEER,
                plen4: 16,
                mac: mac(n),
                host_mac: mac(n + 10),
                plen6: 0,
                pad: 0,
                mtu: 1500,
                ip4: Addr::from(host(n)),
                ip6: Addr::ZERO,
                gateway4: Addr::v4([10, 1, 0, 1]),
                gateway6: Addr::ZERO,
            };
            programs.set(map_name::ENDPOINTS, id, record)?;
            programs.put(map_name::DEVICES, ifindex, abi::DeviceRecord { endpoint: id, flags: 0 })?;
            let key = abi::AddressKey { vpc: VPC, addr: Addr::from(host(n)) };
            programs.put(map_name::ADDRESSES, key, abi::AddressRecord { endpoint: id, flags: 0 })?;
            let peer =
                abi::PeerRecord { identity: 256 + id, flags: peer_flags::ENDPOINT, tunnel: Addr::ZERO };
            programs.peer(VPC, host(n), 32, peer)?;
        }
        Ok(Self { programs, ns, devices, next_port: 1024 })
    }

    /// One packet of endpoint `from` through its hook; nanoseconds per run.
    fn packet(&mut self, from: usize, port: u16, flags: u8, bytes: &[u8], repeat: u32) -> Result<f64> {
        let (client, server) = (SocketAddr::new(host(0), port), SocketAddr::new(host(1), PORT));
        let (source, target) = if from == 0 { (client, server) } else { (server, client) };
        let frame = Packet::tcp(source, target, flags)
            .macs(Mac(mac(from)), Mac(mac(from + 10)))
            .payload(bytes)
            .frame();
        let (verdict, ns) = self.run("from_endpoint", &frame, self.devices[from], 0, repeat)?;
        ensure!(verdict == VERDICT_REDIRECT, "flags {flags:#x}: verdict {verdict}");
        Ok(ns)
    }

    /// Nanoseconds per run of a hook.
    ///
    /// # Errors
    /// When the kernel refuses or the packet does not pass.
    pub fn hook(&mut self, hook: Hook, repeat: u32) -> Result<f64> {
        if hook == Hook::FromEndpoint {
            return self.established(repeat);
        }
        let (source, target) = (SocketAddr::new(host(0), 9), SocketAddr::new(host(1), 9));
        let (far, node) = (SocketAddr::from(([192, 0, 2, 2], 9)), SocketAddr::from((NODE, TUNNEL_PORT)));
        let (mark, frame) = match hook {
            Hook::ToUplink => (0, Packet::tcp(node, far, ACK).frame()),
            Hook::FromUplink => (0, Packet::tcp(far, node, ACK).frame()),
            Hook::FromUplinkTunnel => (0, Packet::udp(far, node, &[0; 64]).frame()),
            Hook::FromEndpoint | Hook::ToEndpoint | Hook::ToOverlay => {
                (mark::JUDGED, Packet::tcp(source, target, ACK).frame())
            }
        };
        // The program takes the mark off: only one run finds it.
        let repeat = if mark == 0 { repeat } else { 1 };
        let (verdict, ns) = self.run(hook.name(), &frame, self.devices[0], mark, repeat)?;
        ensure!(verdict == VERDICT_NEXT, "{}: verdict {verdict:#x}", hook.name());
        Ok(ns)
    }

    fn run(&mut self, name: &str, frame: &[u8], ifindex: u32, mark: u32, repeat: u32) -> Result<(u32, f64)> {
        // `mark` and `ifindex` of `struct __sk_buff`.
        let mut ctx = [0; 192];
        ctx[8..12].copy_from_slice(&mark.to_ne_bytes());
        ctx[40..44].copy_from_slice(&ifindex.to_ne_bytes());
        let mut out = vec![0; frame.len() + 64];
        let program = self.programs.program(name)?;
        let ran = self.ns.run_in(|| {
            program.test_run(TestRunOptions {
                data_in: Some(frame),
                data_out: Some(&mut out),
                ctx_in: Some(&ctx),
                repeat,
                ..TestRunOptions::new()
            })
        })??;
        Ok((ran.return_value, nanoseconds(ran.duration)))
    }

    fn port(&mut self) -> u16 {
        self.next_port = if self.next_port >= 29_000 { 1024 } else { self.next_port + 1 };
        self.next_port
    }

    /// Nanoseconds per packet of an open connection, averaged in the kernel over `repeat` runs.
    ///
    /// # Errors
    /// When the kernel refuses or a packet does not pass.
    pub fn established(&mut self, repeat: u32) -> Result<f64> {
        let port = self.port();
        self.packet(0, port, SYN, &[], 1)?;
        self.packet(1, port, SYN | ACK, &[], 1)?;
        self.packet(0, port, ACK, &[], 1)?;
        self.packet(0, port, ACK | PSH, &[0; 64], repeat)
    }

    /// Nanoseconds of a connection's packets, in the order of [`LIFE`]: it is opened, used once and reset.
    ///
    /// # Errors
    /// When the kernel refuses or a packet does not pass.
    pub fn life(&mut self) -> Result<[f64; LIFE.len()]> {
        let port = self.port();
        Ok([
            self.packet(0, port, SYN, &[], 1)?,
            self.packet(1, port, SYN | ACK, &[], 1)?,
            self.packet(0, port, ACK, &[], 1)?,
            self.packet(0, port, ACK | PSH, &[1], 1)?,
            self.packet(1, port, ACK | PSH, &[1], 1)?,
            self.packet(0, port, ACK, &[], 1)?,
            self.packet(0, port, RST | ACK, &[], 1)?,
        ])
    }
}

fn nanoseconds(d: Duration) -> f64 {
    d.as_secs_f64() * 1e9
}
