//! Which backends of a port are used, seen from one node, and why the others are not. One function for the maps and for `explain`.
//!
//! The rules are those of the Kubernetes API (`EndpointSlice` conditions and hints, `Service.spec.internalTrafficPolicy`,
//! `externalTrafficPolicy`, `trafficDistribution`) as every service proxy of the platform reads them:
//!
//! * ready backends; when there is none at all, those that are ending but still serve (KEP-1669);
//! * with a Local policy only those of this node, and hints do not count;
//! * else hints narrow the ready ones: to those for this node when every ready one has node hints and one names it, else to those for
//!   this zone when every ready one has zone hints and one names it, else not at all (KEP-2433, KEP-3015).

use std::net::IpAddr;

use flowloom_model::{Backend, BackendState, NodeName, PackedMap};
use serde::{Deserialize, Serialize};

use crate::fault::{Fault, planted};

/// The node from which backends are chosen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Here {
    pub(crate) node: NodeName,
    pub(crate) zone: Option<String>,
    /// Its own addresses, where node ports are.
    pub(crate) addresses: Vec<IpAddr>,
}

/// Which backends may be meant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Reach {
    /// All.
    Cluster,
    /// Those of this node.
    Local,
}

/// Why a backend is used, or not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendUse {
    /// Used: ready.
    Ready,
    /// Used: ending, but nothing that may be used is ready.
    LastResort,
    /// Takes no connections.
    NotReady,
    /// Ending, and others are ready.
    Terminating,
    /// A Local traffic policy, and it runs elsewhere.
    NotLocal,
    /// Meant for other nodes, and others are meant for this one.
    OtherNode,
    /// Meant for other zones, and others are meant for this one.
    OtherZone,
}

impl BackendUse {
    /// Whether new connections may go there.
    #[must_use]
    pub fn is_used(self) -> bool {
        matches!(self, Self::Ready | Self::LastResort)
    }

    /// The word in JSON.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::LastResort => "last-resort",
            Self::NotReady => "not-ready",
            Self::Terminating => "terminating",
            Self::NotLocal => "not-local",
            Self::OtherNode => "other-node",
            Self::OtherZone => "other-zone",
        }
    }

    /// For people.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::LastResort => "ending, used because nothing is ready",
            Self::NotReady => "not ready",
            Self::Terminating => "ending, others are ready",
            Self::NotLocal => "not on this node (traffic policy Local)",
            Self::OtherNode => "meant for other nodes (topology hints)",
            Self::OtherZone => "meant for another zone (topology hints)",
        }
    }
}

/// A backend and what came of it.
pub(crate) type Judged<'a> = ((IpAddr, u16), &'a Backend, BackendUse);

/// Hints that hold.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hints {
    None,
    Node,
    Zone,
}

/// Judges the backends of one family.
pub(crate) fn judge<'a>(
    backends: &'a PackedMap<(IpAddr, u16), Backend>,
    v4: bool,
    reach: Reach,
    here: &Here,
    fault: Fault,
) -> Vec<Judged<'a>> {
    let of_family = || backends.iter().filter(move |((ip, _), _)| ip.is_ipv4() == v4);
    let local = |b: &Backend| b.node.as_ref() == Some(&here.node);
    let near = |b: &Backend| reach == Reach::Cluster || local(b) || planted!(fault, LocalIgnored);
    let hints = match reach {
        Reach::Cluster => hints(of_family().map(|(_, b)| b), here, fault),
        Reach::Local => Hints::None,
    };
    let nothing_ready = !of_family().any(|(_, b)| b.state == BackendState::Ready && near(b));
    of_family()
        .map(|(at, b)| {
            let used = match b.state {
                BackendState::NotReady if !planted!(fault, NotReadyUsed) => BackendUse::NotReady,
                _ if !near(b) => BackendUse::NotLocal,
                BackendState::Terminating if nothing_ready && !planted!(fault, NoLastResort) => {
                    BackendUse::LastResort
                }
                BackendState::Terminating => BackendUse::Terminating,
                _ => match hints {
                    Hints::Node if !b.nodes.contains(&here.node) => BackendUse::OtherNode,
                    Hints::Zone if !here.zone.as_ref().is_some_and(|z| b.zones.contains(z)) => {
                        BackendUse::OtherZone
                    }
                    _ => BackendUse::Ready,
                },
            };
            (*at, b, used)
        })
        .collect()
}

fn hints<'a>(backends: impl Iterator<Item = &'a Backend> + Clone, here: &Here, fault: Fault) -> Hints {
    let ready = backends.filter(|b| b.state == BackendState::Ready);
    let (mut all_nodes, mut this_node, mut all_zones, mut this_zone) = (true, false, true, false);
    for b in ready {
        all_nodes &= !b.nodes.is_empty();
        this_node |= b.nodes.contains(&here.node);
        all_zones &= !b.zones.is_empty();
        this_zone |= here.zone.as_ref().is_some_and(|zone| b.zones.contains(zone));
    }
    if planted!(fault, HintsWithoutFallback) {
        (all_nodes, all_zones) = (true, true);
    }
    match (all_nodes && this_node, all_zones && this_zone) {
        (true, _) => Hints::Node,
        (false, true) => Hints::Zone,
        (false, false) => Hints::None,
    }
}
