//! Measures from samples: medians, ratios, goals.

use std::os::fd::{AsFd, AsRawFd as _};

use anyhow::{Context as _, Result};

use crate::report::Measure;
use crate::stats::{self, Median};

/// What a measure shall be.
#[derive(Clone, Copy, Debug)]
pub enum Goal {
    /// This or less.
    AtMost(f64),
    /// This or more.
    AtLeast(f64),
}

impl Goal {
    /// In words.
    #[must_use]
    pub fn text(self) -> String {
        match self {
            Self::AtMost(v) => format!("at most {v}"),
            Self::AtLeast(v) => format!("at least {v}"),
        }
    }

    /// Whether a value is so.
    #[must_use]
    pub fn met(self, v: f64) -> bool {
        match self {
            Self::AtMost(limit) => v <= limit,
            Self::AtLeast(limit) => v >= limit,
        }
    }
}

/// A measure against a peer of the same run: the goal is one of the ratio.
#[must_use]
pub fn against(
    bench: &str,
    measure: &str,
    unit: &str,
    ours: &[f64],
    peer: &str,
    theirs: &[f64],
    goal: Option<Goal>,
) -> Measure {
    let ratio = stats::ratio(ours, theirs);
    Measure {
        bench: bench.to_owned(),
        measure: measure.to_owned(),
        unit: unit.to_owned(),
        ours: stats::median(ours).map_or(0.0, |m| m.value),
        peer: Some(peer.to_owned()),
        peer_value: stats::median(theirs).map(|m| m.value),
        ratio: ratio.map(|r| r.value),
        interval: ratio.map(|r| [r.low, r.high]),
        goal: goal.map(|g| format!("ratio {}", g.text())),
        met: ratio.and_then(|r| goal.map(|g| g.met(r.value))),
        left_out: None,
    }
}

/// A measure of its own.
#[must_use]
pub fn alone(bench: &str, measure: &str, samples: &[f64], unit: &str, goal: Option<Goal>) -> Measure {
    let median = stats::median(samples).unwrap_or(Median { value: 0.0, low: 0.0, high: 0.0, samples: 0 });
    Measure {
        bench: bench.to_owned(),
        measure: measure.to_owned(),
        unit: unit.to_owned(),
        ours: median.value,
        peer: None,
        peer_value: None,
        ratio: None,
        interval: Some([median.low, median.high]),
        goal: goal.map(|g| format!("{} {unit}", g.text())),
        met: goal.map(|g| g.met(median.value)),
        left_out: None,
    }
}

/// The 99th percentile of times in milliseconds.
#[must_use]
pub fn p99(bench: &str, measure: &str, samples: &[f64]) -> Measure {
    p99_within(bench, measure, samples, None)
}

/// The same with a goal.
#[must_use]
pub fn p99_within(bench: &str, measure: &str, samples: &[f64], goal: Option<Goal>) -> Measure {
    let value = stats::percentile(samples, 99.0).unwrap_or(0.0);
    Measure { interval: None, ..alone(bench, measure, &[value], "ms", goal) }
}

/// Bytes that the kernel accounts to a map.
///
/// # Errors
/// When its `fdinfo` does not say.
pub fn memlock(map: &impl AsFd) -> Result<f64> {
    let path = format!("/proc/self/fdinfo/{}", map.as_fd().as_raw_fd());
    let text = std::fs::read_to_string(&path)?;
    let bytes = text.lines().find_map(|l| l.strip_prefix("memlock:")).context("no memlock in fdinfo")?;
    Ok(bytes.trim().parse()?)
}

/// Memory of a process, MiB: a line of `/proc/PID/status`.
///
/// # Errors
/// When there is no such process.
pub fn resident(pid: u32, line: &str) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = text.lines().find_map(|l| l.strip_prefix(line)).context("no such line")?;
    Ok(kib.trim().trim_end_matches(" kB").parse::<f64>()? / 1024.0)
}
