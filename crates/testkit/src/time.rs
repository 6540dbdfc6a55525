//! Waiting with a bound.

use std::fmt::Debug;
use std::time::{Duration, Instant};

const FIRST_PAUSE: Duration = Duration::from_micros(200);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// How long what must happen may take, on a machine that does much else: nothing that passes waits for it.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Tries until `f` is `Ok`; panics with its last error when `timeout` is over. The pauses grow from 0.2 to 50 ms.
///
/// # Panics
/// When it never was.
#[track_caller]
pub fn eventually<T, E: Debug>(timeout: Duration, f: impl FnMut() -> Result<T, E>) -> T {
    match within(timeout, f) {
        Ok(value) => value,
        Err(e) => panic!("not within {timeout:?}: {e:?}"),
    }
}

/// Tries until `f` is `Ok` or `timeout` is over, then its last error.
#[expect(clippy::disallowed_methods, reason = "this is the bounded poll that others use")]
pub(crate) fn within<T, E>(timeout: Duration, mut f: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let start = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        match f() {
            Err(_) if start.elapsed() < timeout => std::thread::sleep(pause),
            done => return done,
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// The coarse monotonic clock, which programs read in whole seconds: at a moment when its second goes on for a tenth at least, so that a program that is
/// run now reads the same.
///
/// # Panics
/// When there is no such clock.
#[must_use]
pub fn settled_second() -> Duration {
    eventually(Duration::from_secs(5), || {
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC_COARSE)
            .map_err(|e| e.to_string())?;
        let now = Duration::from(now);
        if now.subsec_millis() < 900 { Ok(now) } else { Err("the second ends".to_owned()) }
    })
}

/// Watches that `f` is `Ok` all the time for `duration`; panics with its first error.
///
/// # Panics
/// When it ever was not.
#[track_caller]
#[expect(clippy::disallowed_methods, reason = "this is the bounded poll that others use")]
pub fn never<E: Debug>(duration: Duration, mut f: impl FnMut() -> Result<(), E>) {
    let start = Instant::now();
    loop {
        if let Err(e) = f() {
            panic!("after {:?}: {e:?}", start.elapsed());
        }
        if start.elapsed() >= duration {
            return;
        }
        std::thread::sleep(Duration::from_millis(5).min(duration));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eventually_returns_the_first_success() {
        let mut n = 0;
        let got = eventually(Duration::from_secs(5), || {
            n += 1;
            if n < 4 { Err("not yet") } else { Ok(n) }
        });
        assert_eq!(got, 4);
    }

    #[test]
    #[should_panic(expected = "no such luck")]
    fn eventually_gives_up_with_the_last_error() {
        eventually(Duration::from_millis(5), || Err::<(), _>("no such luck"));
    }

    #[test]
    #[should_panic(expected = "it happened")]
    fn never_notices() {
        let mut n = 0;
        never(Duration::from_secs(5), || {
            n += 1;
            if n > 3 { Err("it happened") } else { Ok(()) }
        });
    }
}
