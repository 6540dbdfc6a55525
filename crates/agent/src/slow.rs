//! What takes so long that an operator asks why is named in the log: the core does one thing at a time, and everybody waits.

use std::time::{Duration, Instant};

/// Far more than any step takes on a machine that is not starved of disk or processor.
const SLOW: Duration = Duration::from_secs(2);

/// Runs `f`, and says so when it took long.
pub(crate) fn watched<T>(step: &str, f: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let result = f();
    let took = begin.elapsed();
    tracing::debug!(step, micros = took.as_micros(), "done");
    if let Some(millis) = too_long(took) {
        tracing::warn!(step, millis, "this took long, and everything else waited: check disk and processor");
    }
    result
}

fn too_long(took: Duration) -> Option<u64> {
    (took > SLOW).then(|| u64::try_from(took.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_took_long_is_named() {
        assert_eq!(too_long(SLOW), None);
        assert_eq!(too_long(Duration::from_secs(30)), Some(30_000));
        assert_eq!(watched("nothing", || 5), 5);
    }
}
