//! World to plans, diff and explain. Pure: no I/O, no clock, no randomness that is not passed in.
#![forbid(unsafe_code)]

mod plan;

pub use plan::*;
