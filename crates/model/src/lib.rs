//! Objects, newtypes, parsing and whole-world validation. Pure: no I/O, no clock, no randomness.
//!
//! From bytes to a world:
//!
//! | who | calls | gets |
//! |---|---|---|
//! | `flowloom validate` | [`parse`], then [`validate`] | every fault at once, or a [`Parsed`] whose world is right |
//! | `flowloom apply` | the same, then [`allocate`] with the [`Lock`] beside the file | the completed world and the next lock |
//! | the agent | [`load`] with document and lock | what is right of the world, and a condition for every object that is not |
//!
//! [`parse`] refuses a document with any fault; [`load`] leaves out the bad objects and what depends on them ([`degrade`]).
//! [`AddressPool`] is the address arithmetic that [`allocate`] and the agent's CNI allocation share.
#![forbid(unsafe_code)]
#![expect(
    clippy::result_large_err,
    reason = "a fault is made once per mistake of a person, never on a path that counts"
)]

mod allocate;
mod degrade;
mod document;
mod fault;
mod mac;
mod names;
mod packed;
mod ranges;
mod service;
mod shared;
mod status;
mod subnet;
mod timestamp;
mod validate;
mod world;

pub use allocate::{AddressPool, Allocation, COOL_DOWN, Lock, PoolError, PoolStats, allocate, complete};
pub use degrade::{Degraded, Loaded, degrade, load};
pub use document::*;
pub use fault::{Fault, ObjectRef, Reason};
pub use mac::Mac;
pub use names::*;
pub use packed::PackedMap;
pub use ranges::Family;
pub use service::*;
pub use shared::SharedMap;
pub use status::{Condition, ConditionStatus, ConditionType, Conditions, conditions};
pub use timestamp::{Timestamp, TimestampError};
pub use validate::{limits, validate};
pub use world::*;
