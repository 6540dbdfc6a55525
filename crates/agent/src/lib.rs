//! The node daemon: sources to world, world to plan, plan to kernel; CNI requests; the API.
//!
//! | module | job |
//! |---|---|
//! | `core` | the one writer: takes commands, owns world, plan and numbers |
//! | `reconcile`, `duties` | one pass; what the node itself owes (pure) |
//! | `cni`, `attach`, `detach`, `collect`, `replay` | what a CNI request means; ADD; DEL; GC; DELs that waited for the agent |
//! | `ipam`, `record`, `desk`, `keeper` | addresses; what is kept of an attachment; requests going on, counted; the runtime's configuration |
//! | `wiring`, `plane` | the outside world behind traits: network and datapath |
//! | `reserve` | ports of Services that sockets do not get by themselves |
//! | `source` | the document on disk |
//! | `store`, `writes` | durable state; every write counted |
//! | `history`, `revisions`, `pins` | the record of changes of policies; earlier rules; quarantine, freeze and rollback |
//! | `events`, `threads` | the event log; what waits beside the core |
//! | `health` | health over TCP: of the node, of Services' health-check ports |
//! | `sides` | what people mean by `namespace/pod`, `svc/namespace/name`, `vpc/name` |
//! | `api`, `views`, `connections`, `explain`, `trace`, `names`, `conditions` | the HTTP API and what it shows |
#![forbid(unsafe_code)]

pub mod agent;
mod api;
mod attach;
mod backoff;
mod cni;
mod collect;
mod conditions;
pub mod config;
mod connections;
mod core;
mod desk;
mod detach;
mod duties;
mod ended;
mod events;
mod explain;
mod health;
mod history;
mod ipam;
mod keeper;
mod names;
mod pins;
mod plane;
mod reconcile;
mod record;
mod replay;
mod reserve;
mod revisions;
mod services;
mod sides;
mod slow;
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
