//! The cluster daemon: follows sources, takes part in the election, publishes what every node needs, tells how it stands.
//!
//! | module | job |
//! |---|---|
//! | `config` | the configuration file |
//! | `source` | the outside world behind one trait |
//! | `lease` | who leads, until when |
//! | `publish` | what is to be written to which slice, and when; pure |
//! | `core` | the one task that knows everything |
//! | `api`, `metrics` | what it shows |
//! | `run` | puts the parts together |
#![forbid(unsafe_code)]

mod api;
pub mod config;
pub mod core;
pub mod lease;
pub mod metrics;
pub mod publish;
pub mod run;
pub mod source;
#[cfg(test)]
mod tests;
