//! Devices, namespaces, routes and the masquerade table: what the agent asks of the node's network.

mod host;
mod remover;
mod workload;

pub(crate) use host::Host;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;

use flowloom_model::Mac;
use flowloom_netlink::NetnsCookie;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::detach::Remover;

/// How one endpoint is wired; stored, so that it can be taken away after a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub(crate) enum Wire {
    /// A namespace of the agent's making, and a veth into it.
    Managed {
        /// Host-side device.
        device: String,
        /// Path of the namespace.
        netns: PathBuf,
        /// Interface inside.
        interface: String,
    },
    /// A veth into somebody's namespace.
    Netns {
        /// Host-side device.
        device: String,
        /// Path of the namespace.
        netns: PathBuf,
        /// Interface inside.
        interface: String,
    },
    /// Somebody's device on the host.
    Device {
        /// Its name.
        device: String,
    },
}

impl Wire {
    /// Host-side device.
    #[must_use]
    pub(crate) fn device(&self) -> &str {
        match self {
            Self::Managed { device, .. } | Self::Netns { device, .. } | Self::Device { device } => device,
        }
    }

    /// Path of the workload's namespace and the interface inside.
    #[must_use]
    pub(crate) fn inside(&self) -> Option<(&PathBuf, &str)> {
        match self {
            Self::Managed { netns, interface, .. } | Self::Netns { netns, interface, .. } => {
                Some((netns, interface))
            }
            Self::Device { .. } => None,
        }
    }
}

/// An endpoint's device and what is inside the workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WireSpec {
    /// `vpc/name`, for the alias and messages.
    pub name: String,
    /// How.
    pub wire: Wire,
    /// Addresses with the prefix length of the subnet.
    pub addresses: Vec<IpNet>,
    /// Gateways, one per family of `addresses`.
    pub gateways: Vec<IpAddr>,
    /// MAC of the interface inside.
    pub mac: Mac,
    /// MTU.
    pub mtu: u32,
}

/// Why an endpoint cannot be wired or is not as it should be.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WiringError {
    /// The network refused.
    #[error(transparent)]
    Net(#[from] flowloom_netlink::Error),
    /// A name the kernel does not take.
    #[error(transparent)]
    Name(#[from] flowloom_netlink::LinkNameError),
    /// Found, but not as wanted.
    #[error("{0}")]
    Mismatch(String),
}

/// What the node itself needs besides endpoints. Compared and written as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeSpec {
    /// This node's underlay addresses.
    pub underlay: Vec<IpAddr>,
    /// Configured uplinks; empty = the links that have `underlay`.
    pub uplinks: Vec<String>,
    /// Name and UDP port of the overlay device; `None` = no other node, no device.
    pub overlay: Option<(String, u16)>,
    /// Gateway addresses of the default VPC, on the overlay device or loopback.
    pub gateways: Vec<IpAddr>,
    /// IPv4 packets are forwarded by the stack.
    pub forward4: bool,
    /// IPv6 packets are forwarded by the stack.
    pub forward6: bool,
    /// MTU asked for by the configuration, 0 = what fits.
    pub mtu: u16,
}

/// What the node has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeState {
    /// Uplinks: name, ifindex.
    pub uplinks: Vec<(String, u32)>,
    /// The overlay device: name, ifindex.
    pub overlay: Option<(String, u32)>,
    /// Smallest MTU of the uplinks.
    pub uplink_mtu: u16,
    /// Largest inner IP packet of the overlay.
    pub overlay_mtu: u16,
}

/// Where a destination of the default VPC lies.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Via {
    /// A local endpoint's device; its MAC is kept as a permanent neighbour.
    Device {
        /// Name.
        name: String,
        /// Workload's MAC.
        mac: Mac,
    },
    /// The overlay device.
    Overlay,
    /// Another node's underlay address.
    Node(IpAddr),
    /// Nowhere: answered "unreachable".
    Nowhere,
}

/// A route of the default VPC.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HostRoute {
    /// Destination.
    pub destination: IpNet,
    /// Where it lies.
    pub via: Via,
    /// The host's own source address towards it.
    pub source: Option<IpAddr>,
}

/// Sources and exceptions of the masquerade.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MasqueradeSpec {
    /// The default VPC's subnets.
    pub sources: Vec<IpNet>,
    /// Destinations that keep the source.
    pub except: Vec<IpNet>,
    /// Uplinks.
    pub uplinks: Vec<String>,
}

/// The node's network behind a trait: [`Host`] is the real one, tests have one in memory.
pub(crate) trait Wiring: Send {
    /// Makes an endpoint's device, or completes what is there. Writes nothing when everything is as wanted.
    /// When it fails, what this call made is gone again. Returns the cookie of the workload's namespace where that was entered.
    ///
    /// # Errors
    /// What the kernel refuses.
    fn wire(&mut self, spec: &WireSpec) -> Result<Option<NetnsCookie>, WiringError>;

    /// Switches a device on, once it is guarded: what [`Self::wire`] makes is down.
    ///
    /// # Errors
    /// What the kernel refuses.
    fn raise(&mut self, ifindex: u32) -> Result<(), WiringError>;

    /// Switches the overlay device on, once its programs are in place: [`Self::node`] leaves a new one down.
    ///
    /// # Errors
    /// What the kernel refuses.
    fn open_overlay(&mut self, ifindex: u32) -> Result<(), WiringError>;

    /// Takes a device (and a managed namespace) away; what is gone already is a success.
    ///
    /// # Errors
    /// What the kernel refuses.
    fn unwire(&mut self, wire: &Wire) -> Result<(), WiringError>;

    /// As [`Self::unwire`], for any thread of the process.
    fn remover(&self) -> Remover;

    /// Whether the endpoint's device is there.
    ///
    /// # Errors
    /// When that cannot be found out.
    fn is_wired(&mut self, wire: &Wire) -> Result<bool, WiringError>;

    /// Compares without writing.
    ///
    /// # Errors
    /// [`WiringError::Mismatch`] with the first difference.
    fn check(&mut self, spec: &WireSpec) -> Result<(), WiringError>;

    /// The node's own devices, addresses and settings.
    ///
    /// # Errors
    /// What the kernel refuses.
    fn node(&mut self, spec: &NodeSpec) -> Result<NodeState, WiringError>;

    /// Adds routes of one endpoint, beside what is there.
    ///
    /// # Errors
    /// The first refusal.
    fn add_routes(&mut self, routes: &[HostRoute]) -> Result<(), WiringError>;

    /// Makes flowloom's routes exactly these.
    ///
    /// # Errors
    /// The first refusal; the others are tried.
    fn routes(&mut self, routes: &[HostRoute]) -> Result<(), WiringError>;

    /// Makes the masquerade table this; `None` removes it.
    ///
    /// # Errors
    /// What nft says.
    fn masquerade(&mut self, spec: Option<&MasqueradeSpec>) -> Result<(), WiringError>;

    /// Removes devices of flowloom's endpoints that `known` does not list.
    ///
    /// # Errors
    /// The first refusal; the others are tried.
    fn remove_strangers(&mut self, known: &BTreeSet<String>) -> Result<(), WiringError>;

    /// Removes every link, route, rule and table of flowloom's making in this namespace.
    /// Goes on after errors.
    ///
    /// # Errors
    /// All of them.
    fn purge(&mut self) -> Result<(), Vec<WiringError>>;
}
