//! Plans to map entries ([`lower`], pure); loader, pins, attachment, conntrack, counters, events, traces.
//!
//! [`Datapath`] owns the kernel state of one node; [`View`]s of it read, sweep and trace from any thread. Programs, maps and links are pinned:
//! the owner may die at any write and the next one adopts what it finds.

pub mod adopt;
pub mod apply;
pub mod config;
pub mod conntrack;
pub mod counters;
mod datapath;
pub mod device;
mod ended;
mod error;
pub mod events;
mod kernel;
pub mod links;
mod loading;
pub mod lower;
mod object;
pub mod packet;
mod pins;
pub mod realise;
pub mod services;
mod sockets;
pub mod state;
pub mod sys;
pub mod trace;
mod view;

pub use apply::{ApplyReport, Devices, Failure, Object};
pub use config::{Config, Forwarding, NodeSettings, Receive};
pub use conntrack::{ConntrackRow, CtFilter, Named, SweepReport};
pub use datapath::{Datapath, Opened, uninstall};
pub use device::{Delivery, DeviceInfo};
pub use ended::Ended;
pub use error::{Error, Result};
pub use events::Events;
pub use links::{Attached, Finding, Hook, Problem};
pub use loading::Verified;
pub use sockets::SocketHook;
pub use state::KernelState;
pub use trace::{TraceReport, TraceRequest};
pub use view::View;
