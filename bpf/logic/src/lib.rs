//! Everything a hook decides, as functions over two traits: [`Frame`] (the packet) and [`Tables`] (the maps).
//!
//! The same code runs in the kernel (`bpf/programs`) and under `cargo test` (`fake`). It is written for the verifier: one never-inlined
//! function per stage, no recursion, bounded loops, no panicking path, and everything large in the per-CPU [`Packet`].
//!
//! A stage returns a [`Step`]: go on, done (the verdict is in the packet) or drop for a reason.
#![cfg_attr(not(any(test, feature = "fake")), no_std)]
#![forbid(unsafe_code)]

mod answer;
mod conntrack;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod frame;
mod guard;
mod hooks;
mod nat;
mod neighbour;
mod packet;
mod parse;
mod policy;
mod receive;
mod report;
mod route;
mod service;
pub mod socket;
mod sum;
mod tables;
#[cfg(test)]
mod tests;
mod track;

pub use conntrack::{CtCell, DecisionCell, expired, timeout};
pub use frame::{Frame, TunnelKey, Verdict};
pub use hooks::{from_endpoint, from_overlay, from_uplink, to_endpoint, to_overlay, to_uplink};
pub use packet::{Packet, Zero};
pub use service::{Query, Random, Selector};
pub use sum::{MAX_SUMMED, fold};
pub use tables::{Inserted, Tables};

use flowloom_bpf_abi::DropReason;

/// What a stage says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
#[must_use]
pub(crate) struct Step(u32);

impl Step {
    /// The next stage goes on.
    pub(crate) const GO: Self = Self(0);
    /// Finished: the verdict is in the packet.
    pub(crate) const DONE: Self = Self(256);

    /// Drop for a reason.
    #[inline(always)]
    pub(crate) const fn drop(reason: DropReason) -> Self {
        Self(reason as u32)
    }

    /// Drop for a reason and answer by a reset or "administratively prohibited".
    #[inline(always)]
    pub(crate) const fn reject(reason: DropReason) -> Self {
        Self(512 | reason as u32)
    }

    /// Drop for a reason and tell the sender by the ICMP error that goes with it.
    #[inline(always)]
    pub(crate) const fn error(reason: DropReason) -> Self {
        Self(1024 | reason as u32)
    }

    /// The number of the reason, 0 when this is none.
    #[inline(always)]
    pub(crate) const fn reason(self) -> u8 {
        self.0 as u8
    }

    #[inline(always)]
    pub(crate) const fn is_reject(self) -> bool {
        self.0 & 512 != 0
    }

    #[inline(always)]
    pub(crate) const fn is_error(self) -> bool {
        self.0 & 1024 != 0
    }
}

/// Leaves the stage unless the expression says [`Step::GO`].
macro_rules! go {
    ($e:expr) => {{
        let step: $crate::Step = $e;
        if step != $crate::Step::GO {
            return step;
        }
    }};
}
pub(crate) use go;

/// Leaves the stage with a reason.
macro_rules! bail {
    ($reason:ident) => {
        return $crate::Step::drop(flowloom_bpf_abi::DropReason::$reason)
    };
}
pub(crate) use bail;
