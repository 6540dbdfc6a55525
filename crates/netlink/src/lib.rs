//! The host's network as flowloom changes it: namespaces, links, addresses, routes, neighbours, rules, per-device
//! sysctls and one nftables table; and how soon the calling thread gets the processor.
//!
//! Everything blocks and nothing needs a runtime. Each request is answered by its sequence number, deleting what is
//! already gone is a success that reports "nothing written", and each `ensure_*` reads first and writes only what
//! differs, so that a second pass over the same wish writes nothing. What flowloom makes carries its mark (a link's
//! alias, a route's or rule's protocol number, a table's name); nothing without it is ever changed or removed by
//! the `ensure_*` and `sync_*` functions.

mod address;
mod batch;
mod classic;
mod diag;
mod error;
mod handle;
mod link;
mod monitor;
mod neighbour;
mod netns;
pub mod nft;
mod route;
mod rule;
mod sched;
mod socket;
pub mod sysctl;
mod types;
mod veth;
mod vxlan;

pub use address::Address;
pub use batch::Batch;
pub use classic::PREFERENCE as CLASSIC_PREFERENCE;
pub use diag::{Diag, UdpSocket};
pub use error::{Action, Error, Result};
pub use handle::Handle;
pub use link::{Link, LinkChange};
pub use monitor::{Event, Interest, Monitor};
pub use neighbour::Neighbour;
pub use netns::{DEFAULT_DIR, Netns, NetnsCookie, NetnsId};
pub use route::{Route, RouteChanges, RouteKind, RouteTable};
pub use rule::{Rule, RuleFamily};
pub use sched::small_slices;
pub use types::{IfIndex, LinkName, LinkNameError, Mac, MacError};
pub use veth::{VethEnd, VethPair, VethSpec};
pub use vxlan::{Ensured, VxlanInfo, VxlanSpec};

/// Protocol number of flowloom's routes and rules (`ip route show proto 241`); unassigned in the kernel's and
/// iproute2's lists, so only flowloom's carry it.
pub const PROTOCOL: u8 = 0xf1;

/// How the alias of every link that flowloom made begins.
pub const ALIAS_PREFIX: &str = "flowloom:";
/// Link group of what flowloom makes. The kernel takes it at creation, the alias only afterwards: a process that dies in between leaves a link that
/// is known by its group.
pub const LINK_GROUP: u32 = 0xf10e;
