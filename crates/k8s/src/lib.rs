//! Kubernetes: what the API server says, as parts of a world; what a node owes the API server.
//!
//! | module | job |
//! |---|---|
//! | `wire` | the fields of the API's objects that matter here, as JSON has them |
//! | `object` | the same, parsed once: after that a value cannot be wrong |
//! | `watch` | one kind: list, watch, bookmarks, what goes wrong on the way |
//! | `cache` | decoded objects of one kind, and those that were refused |
//! | `translate` | objects to nodes, subnets, endpoints, groups and services; pure |
//! | `source` | all watches together, debounced |
//! | `client` | connection, credentials, rate of requests |
//! | `node` | what a node writes: its condition, its taint, events |
#![forbid(unsafe_code)]

pub mod access;
mod cache;
mod client;
mod node;
mod object;
pub mod slices;
mod source;
mod translate;
mod watch;
mod wire;

pub use cache::{Cache, Refused};
pub use client::{Client, ClientError, ClientOptions};
pub use node::{NodeDuties, PodEvent, Recorder, perform};
pub use object::*;
pub use source::{KindStatus, Peers, SourceStatus, Update, run, run_with};
pub use translate::{
    Changes, Common, Delta, Held, LocalPod, ObjectFault, Options, POD_NAME, POD_NAMESPACE,
    POD_SERVICE_ACCOUNT, POD_UID, Translator, host_ports, namespace_label,
};
pub use watch::{Happening, Selection, WatchError, follow};
