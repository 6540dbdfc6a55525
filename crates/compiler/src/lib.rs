//! World to plans, diff and explain. Pure: no I/O, no clock, no randomness that is not passed in.
#![forbid(unsafe_code)]

mod compile;
mod condition;
mod diff;
mod explain;
mod fault;
mod lookup;
mod numbers;
mod ops;
#[cfg(any(test, feature = "oracle"))]
pub mod oracle;
mod pins;
mod plan;
mod policy;
mod ports;
mod questions;
#[cfg(any(test, feature = "oracle"))]
pub mod service_oracle;
mod services;
mod spec;
#[cfg(test)]
mod tests;
#[cfg(any(test, feature = "oracle"))]
pub mod worldgen;

pub use compile::*;
pub use condition::*;
pub use diff::*;
pub use explain::*;
#[cfg(any(test, feature = "oracle"))]
pub use fault::Fault;
pub use lookup::lookup;
pub use numbers::Numbers;
pub use ops::*;
pub use pins::*;
pub use plan::*;
pub use policy::*;
pub use services::*;
pub use spec::*;
