//! Every write to the outside world passes here: counted for the status, and a place where tests can end the process.

use std::sync::atomic::{AtomicU64, Ordering};

static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// Name of the variable that ends the process before write n (feature `kill-points` only).
pub const ABORT_VARIABLE: &str = "FLOWLOOM_TEST_ABORT_AT_WRITE";

/// Called before anything that may write. With the feature `kill-points`, counts calls and ends the process before the
/// n-th, as a kill would: no destructor runs.
pub fn before(what: &str) {
    #[cfg(feature = "kill-points")]
    {
        static CALLS: AtomicU64 = AtomicU64::new(0);
        static LIMIT: std::sync::OnceLock<Option<u64>> = std::sync::OnceLock::new();
        let limit = *LIMIT.get_or_init(|| std::env::var(ABORT_VARIABLE).ok().and_then(|n| n.parse().ok()));
        let call = CALLS.fetch_add(1, Ordering::SeqCst) + 1;
        if limit == Some(call) {
            // A test reads this line to know which write it was.
            eprintln!("kill point {call}: before {what}");
            std::process::abort();
        }
    }
    tracing::trace!(what, "write");
}

/// Called with the number of writes that were made.
pub fn made(n: usize) {
    WRITTEN.fetch_add(n as u64, Ordering::Relaxed);
}

/// Writes since the process started.
#[must_use]
pub fn total() -> u64 {
    WRITTEN.load(Ordering::Relaxed)
}
