//! Map keys, values and events shared by the kernel programs and user space.
//!
//! Every struct here is `repr(C)` with fixed-width fields, explicit zeroed padding and an asserted size: two
//! compilers (bpfel and the host's) must agree byte for byte, and pinned maps outlive the process that made them.
//! Any change of a size, a field's meaning or a constant bumps [`ABI_VERSION`]; `cargo xtask check abi` compares the
//! recorded layout and fails when one moves without the other.
#![cfg_attr(not(feature = "user"), no_std)]
#![cfg_attr(not(feature = "user"), forbid(unsafe_code))]
#![deny(unsafe_code)]

mod addr;
mod conntrack;
mod event;
mod maps;
#[cfg(feature = "user")]
mod pod;
mod policy;
mod reason;
mod service;

pub use addr::{Addr, FAMILY_V4, FAMILY_V6, V4_PREFIX_BITS};
pub use conntrack::*;
pub use event::*;
pub use maps::*;
pub use policy::*;
pub use reason::*;
pub use service::*;

/// Version of everything in this crate; part of the pin path (`<pin_root>/v<ABI_VERSION>/`).
pub const ABI_VERSION: u32 = 3;

/// Asserts size and the absence of implicit padding at compile time.
#[macro_export]
macro_rules! assert_layout {
    ($t:ty, $size:expr) => {
        const _: () = assert!(core::mem::size_of::<$t>() == $size);
    };
}
