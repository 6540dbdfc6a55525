//! Waiting with a bound, as a `Result`: a lab that does not come up is taken down by its guard, not by a panic.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

const PAUSE: Duration = Duration::from_millis(50);

/// An error that waiting does not mend.
#[derive(Debug)]
pub struct Hopeless(pub String);

impl std::fmt::Display for Hopeless {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Hopeless {}

/// Tries until `f` is `Ok`; its last error when `timeout` is over, or a [`Hopeless`] one at once.
///
/// # Errors
/// The last one of `f`, with what was waited for.
#[expect(clippy::disallowed_methods, reason = "this is the bounded poll that others use")]
pub fn until<T>(timeout: Duration, what: &str, mut f: impl FnMut() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        match f() {
            Ok(value) => return Ok(value),
            Err(e) if e.is::<Hopeless>() => return Err(e).context(what.to_owned()),
            Err(e) if start.elapsed() >= timeout => {
                return Err(e).with_context(|| format!("{what}: not within {timeout:?}"));
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_is_kept() {
        let mut n = 0;
        let e = until(Duration::from_millis(1), "luck", || -> Result<()> {
            n += 1;
            anyhow::bail!("try {n}")
        })
        .unwrap_err();
        let text = format!("{e:#}");
        assert!(text.starts_with("luck: not within 1ms: try "), "{text}");
    }

    #[test]
    fn what_cannot_be_mended_is_not_waited_for() {
        let start = Instant::now();
        let hopeless = || -> Result<()> { Err(Hopeless("gone".into()).into()) };
        let e = until(Duration::from_secs(60), "it", hopeless).unwrap_err();
        assert_eq!(format!("{e:#}"), "it: gone");
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
