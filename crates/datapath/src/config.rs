//! What the datapath is told by its owner.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use flowloom_bpf_abi as abi;

/// Who forwards what the programs have judged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Forwarding {
    /// The programs (default).
    #[default]
    Ebpf,
    /// The host's stack, for hosts whose other tools must see every packet.
    Stack,
}

/// Who takes packets of open connections out of their tunnel. All others are the tunnel's device's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Receive {
    /// The stack, by the tunnel's device (default).
    #[default]
    Device,
    /// The programs, where they arrive; nothing of the stack sees their outside.
    Uplink,
}

/// Fixed for the life of a [`crate::Datapath`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Directory on a bpffs (mounted when missing); pins live in `<pin_root>/v<ABI>/`.
    pub pin_root: PathBuf,
    /// Who forwards.
    pub forwarding: Forwarding,
    /// UDP port of the tunnel.
    pub tunnel_port: u16,
    /// Who takes packets of open connections out of their tunnel; with [`Forwarding::Stack`] the device always does.
    pub receive: Receive,
    /// Established connections (preallocated). A pinned map of another size is refused.
    pub conntrack_entries: u32,
    /// Half-open connections; translations of sockets and packets, and clients with affinity, have room for twice as many each.
    pub conntrack_new_entries: u32,
    /// Frontends of services; there is room for twice as many backends.
    pub service_entries: u32,
    /// Bytes of the event ring, a power of two and a multiple of the page size; `None` = as the object declares.
    pub event_bytes: Option<u32>,
    /// Events per second and (endpoint, reason); 0 = unlimited.
    pub event_rate: u32,
    /// Answers (RST, ICMP) per second and endpoint; 0 = unlimited.
    pub answer_rate: u32,
    /// An event for every new connection, not only logged ones.
    pub verdict_events: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            pin_root: PathBuf::from("/sys/fs/bpf/flowloom"),
            forwarding: Forwarding::Ebpf,
            tunnel_port: 4789,
            receive: Receive::Device,
            conntrack_entries: abi::MAX_CONNTRACK,
            conntrack_new_entries: abi::MAX_CONNTRACK_NEW,
            service_entries: abi::MAX_SERVICES,
            event_bytes: None,
            event_rate: 100,
            answer_rate: 100,
            verdict_events: false,
        }
    }
}

/// What the agent knows only after it made or found the node's devices; see [`crate::Datapath::set_node`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NodeSettings {
    /// VXLAN device, 0 = none.
    pub overlay_ifindex: u32,
    /// Main uplink, 0 = none.
    pub uplink_ifindex: u32,
    /// Largest inner IP packet that fits the tunnel, bytes.
    pub overlay_mtu: u16,
    /// Largest IP packet on the uplink, bytes.
    pub uplink_mtu: u16,
    /// VPC of this host's stack (its VNI); 0 = none.
    pub default_vpc: u32,
    /// Underlay address, IPv4: what backends on other nodes see in the place of clients outside.
    pub node4: Option<Ipv4Addr>,
    /// The same, IPv6.
    pub node6: Option<Ipv6Addr>,
}

impl Config {
    /// The one entry of the config map.
    #[must_use]
    pub fn record(&self, node: &NodeSettings) -> abi::NodeConfig {
        let mut flags = 0;
        if self.forwarding == Forwarding::Stack {
            flags |= abi::config_flags::FORWARD_STACK;
        }
        if self.verdict_events {
            flags |= abi::config_flags::VERDICT_EVENTS;
        }
        if self.receive == Receive::Uplink && self.forwarding == Forwarding::Ebpf {
            flags |= abi::config_flags::RECEIVE_AT_UPLINK;
        }
        abi::NodeConfig {
            flags,
            overlay_ifindex: node.overlay_ifindex,
            uplink_ifindex: node.uplink_ifindex,
            overlay_mtu: node.overlay_mtu,
            uplink_mtu: node.uplink_mtu,
            tunnel_port: self.tunnel_port.to_be_bytes(),
            pad: [0; 2],
            default_vpc: node.default_vpc,
            event_rate: self.event_rate,
            answer_rate: self.answer_rate,
            node4: node.node4.map_or(abi::Addr::ZERO, |ip| IpAddr::from(ip).into()),
            node6: node.node6.map_or(abi::Addr::ZERO, |ip| IpAddr::from(ip).into()),
        }
    }
}

/// The settings inside a config record.
#[must_use]
pub fn node_settings(record: &abi::NodeConfig) -> NodeSettings {
    NodeSettings {
        overlay_ifindex: record.overlay_ifindex,
        uplink_ifindex: record.uplink_ifindex,
        overlay_mtu: record.overlay_mtu,
        uplink_mtu: record.uplink_mtu,
        default_vpc: record.default_vpc,
        node4: (!record.node4.is_zero()).then(|| record.node4.v4_octets().into()),
        node6: (!record.node6.is_zero()).then(|| record.node6.0.into()),
    }
}
