//! Growing, jittered pauses.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Doubles from `least` to `most`; each pause is between half and all of it.
#[derive(Debug)]
pub(crate) struct Backoff {
    least: Duration,
    most: Duration,
    next: Duration,
}

impl Backoff {
    /// Starts with `least`.
    #[must_use]
    pub(crate) fn new(least: Duration, most: Duration) -> Self {
        Self { least, most, next: least }
    }

    /// The next pause.
    pub(crate) fn pause(&mut self) -> Duration {
        let whole = self.next;
        self.next = (self.next * 2).min(self.most);
        // A fresh hasher's keys are random: enough to keep agents out of step.
        let random = RandomState::new().hash_one(0u8) % 1024;
        whole / 2 + whole.mul_f64(random as f64 / 2048.0)
    }

    /// Something succeeded.
    pub(crate) fn reset(&mut self) {
        self.next = self.least;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_within_bounds_and_start_anew() {
        let (least, most) = (Duration::from_millis(100), Duration::from_secs(1));
        let mut b = Backoff::new(least, most);
        let mut bound = least;
        for _ in 0..10 {
            let p = b.pause();
            assert!(p >= bound / 2 && p <= bound, "{p:?} against {bound:?}");
            bound = (bound * 2).min(most);
        }
        b.reset();
        assert!(b.pause() <= least);
    }
}
