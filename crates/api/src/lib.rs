//! The agent's HTTP API over its Unix socket: versioned types ([`v1`]) and a small blocking client ([`Client`]).
//!
//! Nothing here reaches tokio, BPF or Kubernetes: the CNI plugin links this crate.
#![forbid(unsafe_code)]

mod client;
pub mod config;
mod http;
mod near;
mod side;
pub mod v1;

pub use client::{Client, ClientError, EventStream};
pub use near::nearest;
pub use side::{Side, SideKind};

/// Where the agent listens unless its configuration says otherwise.
pub const DEFAULT_SOCKET: &str = "/run/flowloom/agent.sock";
