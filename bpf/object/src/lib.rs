//! The compiled kernel programs, embedded when they were built (`cargo xtask bpf`).
//!
//! Check, lints and unit tests need no BPF toolchain: without an object this crate holds a stub, and a stub has no bytes that could be loaded.

use std::fmt;

/// Bytes at an address that an ELF parser may read as 64-bit words.
#[repr(C, align(32))]
struct Aligned<T: ?Sized>(T);

static OBJECT: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/flowloom.o")));

/// This build has no kernel programs in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StubObject;

impl fmt::Display for StubObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this build embeds no BPF object: run `cargo xtask bpf` and build again")
    }
}

impl std::error::Error for StubObject {}

/// Whether this build embeds no programs. A release refuses to be made of such a build.
#[must_use]
pub const fn is_stub() -> bool {
    cfg!(flowloom_bpf_stub)
}

/// The ELF object, aligned for the loader.
///
/// # Errors
/// When the crate was built without an object.
pub fn object() -> Result<&'static [u8], StubObject> {
    if is_stub() || !OBJECT.0.starts_with(b"\x7fELF") { Err(StubObject) } else { Ok(&OBJECT.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_an_aligned_elf_and_a_stub_says_what_to_run() {
        match object() {
            Ok(bytes) => {
                assert!(!is_stub());
                assert_eq!(bytes.as_ptr().addr() % 8, 0);
                assert_eq!(bytes[..4], *b"\x7fELF");
            }
            Err(e) => {
                assert!(is_stub());
                assert!(e.to_string().contains("cargo xtask bpf"));
            }
        }
    }
}
