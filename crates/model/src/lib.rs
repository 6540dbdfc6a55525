//! Objects, newtypes, parsing and whole-world validation. Pure: no I/O, no clock, no randomness.
#![forbid(unsafe_code)]

mod names;
mod world;

pub use names::*;
pub use world::*;
