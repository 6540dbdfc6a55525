//! The CNI plugin: environment and stdin in, one request to the agent, CNI JSON out.
//!
//! It runs once per container and must start in milliseconds, so it is blocking, small and free of an async runtime, BPF and Kubernetes.
//! The specification is CNI 1.1.0; 0.4.0 and 1.0.0 differ in the shape of results only. `docs/cni.md` lists keys, variables and error codes.
#![forbid(unsafe_code)]

mod agent;
pub mod clock;
pub mod config;
pub mod conflist;
pub mod environment;
pub mod error;
pub mod files;
pub mod install;
mod kernel;
mod loopback;
pub mod queue;
pub mod result;
mod retry;
mod runtime;
pub mod sandbox;
mod verbs;
pub mod version;

pub use kernel::KernelSandbox;
pub use verbs::{Limits, Outcome, run};
