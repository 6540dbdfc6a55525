//! The node daemon: sources to world, world to plan, plan to kernel; CNI requests; the API.
//!
//! | module | job |
//! |---|---|
//! | `core` | the one writer: takes commands, owns world, plan and numbers |
//! | `reconcile`, `duties` | one pass; what the node itself owes (pure) |
//! | `cni`, `attach`, `detach`, `ipam`, `record` | what a CNI request means; ADD; DEL; addresses; what is kept of them |
//! | `wiring`, `plane` | the outside world behind traits: network and datapath |
//! | `source` | the document on disk |
//! | `store`, `writes` | durable state; every write counted |
//! | `events`, `threads` | the event log; what waits beside the core |
//! | `api`, `views`, `connections`, `explain`, `trace`, `names`, `conditions` | the HTTP API and what it shows |
#![forbid(unsafe_code)]

pub mod agent;
mod api;
mod attach;
mod backoff;
mod cni;
mod conditions;
pub mod config;
mod connections;
mod core;
mod detach;
mod duties;
mod events;
mod explain;
mod ipam;
mod names;
mod plane;
mod reconcile;
mod record;
mod source;
mod store;
#[cfg(test)]
mod tests;
mod threads;
mod trace;
mod uninstall;
mod views;
mod wiring;
pub mod writes;
