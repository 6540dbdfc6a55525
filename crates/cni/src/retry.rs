//! Waiting between tries, inside a deadline.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(20);
const LARGEST: Duration = Duration::from_secs(1);

/// Exponential pauses with jitter: many plugins that were refused together come back apart.
#[derive(Debug)]
pub(crate) struct Backoff {
    deadline: Instant,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(deadline: Instant) -> Self {
        Self { deadline, next: FIRST }
    }

    /// Time left.
    pub(crate) fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Sleeps between half and all of the next pause; `false` without sleeping when the deadline would pass.
    pub(crate) fn pause(&mut self) -> bool {
        let pause = jittered(self.next, RandomState::new().hash_one(0));
        if self.remaining() <= pause {
            return false;
        }
        // Nothing to wait on: the agent that will answer may not run yet.
        #[expect(clippy::disallowed_methods, reason = "a bounded pause between tries of a one-shot process")]
        std::thread::sleep(pause);
        self.next = (self.next * 2).min(LARGEST);
        true
    }
}

fn jittered(pause: Duration, random: u64) -> Duration {
    let half = pause / 2;
    half + half.mul_f64((random >> 11) as f64 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_stay_between_half_and_whole() {
        for random in [0, 1, u64::MAX / 2, u64::MAX] {
            let p = jittered(FIRST, random);
            assert!(p >= FIRST / 2 && p <= FIRST, "{p:?}");
        }
    }

    #[test]
    fn a_passed_deadline_ends_the_tries() {
        let mut b = Backoff::new(Instant::now());
        assert!(!b.pause());
        assert_eq!(b.remaining(), Duration::ZERO);
    }
}
