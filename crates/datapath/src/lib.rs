//! Plans to map entries ([`lower`], pure); loader, pins, attachment, conntrack, counters, events, traces.
//!
//! [`Datapath`] owns the kernel state of one node. Programs, maps and links are pinned: it may die at any write and the next one adopts what it finds.

pub mod adopt;
pub mod apply;
pub mod config;
pub mod device;
mod error;
mod kernel;
pub mod lower;
pub mod packet;
pub mod realise;
pub mod state;
pub mod sys;

pub use apply::{ApplyReport, Devices, Failure, Object};
pub use config::{Config, Forwarding, NodeSettings};
pub use device::{Delivery, DeviceInfo};
pub use error::{Error, Result};
pub use state::KernelState;
