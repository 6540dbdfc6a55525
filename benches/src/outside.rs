//! A peer that cannot be had from here: a program of the user's measures it, in turns with ours.

use std::ffi::OsString;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Names that program.
const VARIABLE: &str = "FLOWLOOM_BENCH_PEER";
/// What it measures, in the tables.
pub const NAME: &str = "a live peer";

/// Measures a peer: called with the name of a measure, it prints so many times in milliseconds, separated by blanks.
#[derive(Clone, Debug)]
pub struct Outside(OsString);

impl Outside {
    /// The program that the environment names, if it does.
    #[must_use]
    pub fn named() -> Option<Self> {
        std::env::var_os(VARIABLE).filter(|v| !v.is_empty()).map(Self)
    }

    /// One round.
    ///
    /// # Errors
    /// When the program fails, or does not print exactly `N` times.
    pub fn times<const N: usize>(&self, measure: &str) -> Result<[f64; N]> {
        let output = Command::new(&self.0)
            .arg(measure)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("{VARIABLE}={}", self.0.display()))?;
        ensure!(output.status.success(), "{} {measure}: {}", self.0.display(), output.status);
        times(&String::from_utf8_lossy(&output.stdout))
            .with_context(|| format!("{} {measure}", self.0.display()))
    }
}

fn times<const N: usize>(printed: &str) -> Result<[f64; N]> {
    let times = printed.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>();
    times
        .ok()
        .filter(|t| t.iter().all(|ms| ms.is_finite() && *ms > 0.0))
        .and_then(|t| t.try_into().ok())
        .with_context(|| format!("printed {printed:?} where {N} times in milliseconds were expected"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_says_as_many_times_as_it_was_asked_for_or_is_refused() {
        assert_eq!(times::<2>("221.5 230\n").unwrap(), [221.5, 230.0]);
        for wrong in ["", "1", "1 2 3", "1 two", "1 -2", "1 NaN", "1 inf"] {
            assert!(times::<2>(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(
            Outside("echo".into()).times::<1>("12").unwrap(),
            [12.0],
            "it is called with the measure's name"
        );
        for fails in ["false", "/nowhere/at/all"] {
            let error = format!("{:#}", Outside(fails.into()).times::<1>("x").unwrap_err());
            assert!(error.contains(fails), "{error}");
        }
    }
}
