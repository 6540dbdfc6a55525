//! `docs/benchmarks.json` and the page made from it.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Unit of what is counted, not timed: the same everywhere with the same compiler and kernel.
pub const INSTRUCTIONS: &str = "instructions";
/// Another such unit.
pub const STATES: &str = "states";
/// Units that are compared as they are.
pub const COUNTED: [&str; 2] = [INSTRUCTIONS, STATES];

/// One measured thing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measure {
    /// Which benchmark.
    pub bench: String,
    /// What was measured.
    pub measure: String,
    /// Unit of `ours` and `peer_value`.
    pub unit: String,
    /// flowloom's median.
    pub ours: f64,
    /// What it was measured against, in the same run.
    pub peer: Option<String>,
    /// The peer's median.
    pub peer_value: Option<f64>,
    /// Median of pairwise ratios.
    pub ratio: Option<f64>,
    /// Interval of the ratio (or of `ours` where there is no peer).
    pub interval: Option<[f64; 2]>,
    /// The goal in words.
    pub goal: Option<String>,
    /// Whether it was met.
    pub met: Option<bool>,
    /// Why the peer is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_out: Option<String>,
}

/// All measures of a machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Kernel release it ran on.
    pub kernel: String,
    /// Processors.
    pub cpus: usize,
    /// Measures.
    pub measures: Vec<Measure>,
}

impl Report {
    /// Reads a report; an absent file is an empty one.
    ///
    /// # Errors
    /// When the file is there and no report.
    pub fn read(path: &Path) -> Result<Self> {
        match std::fs::read_to_string(path) {
            Ok(text) => serde_json::from_str(&text).with_context(|| path.display().to_string()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(e).with_context(|| path.display().to_string()),
        }
    }

    /// Replaces the measures of the benchmarks that `new` has.
    pub fn merge(&mut self, new: Self) {
        self.measures.retain(|m| !new.measures.iter().any(|n| n.bench == m.bench));
        self.measures.extend(new.measures);
        self.measures.sort_by(|a, b| (&a.bench, &a.measure).cmp(&(&b.bench, &b.measure)));
        self.kernel = new.kernel;
        self.cpus = new.cpus;
    }

    /// The page.
    #[must_use]
    pub fn page(&self) -> String {
        let mut out = format!(
            "# Benchmarks\n\nWritten by `cargo xtask bench` from [benchmarks.json](benchmarks.json); do not edit. Kernel {}, {} processors, shared: read the ratios.\n\
             Medians of interleaved runs; the ratio is the median of pairwise ratios, ours over the peer's, with its interval. What each bench does: [CONTRIBUTING.md](../CONTRIBUTING.md#benchmarks).\n\n\
             | bench | measure | ours | peer | peer's | ratio | goal | met |\n|---|---|---|---|---|---|---|---|\n",
            self.kernel, self.cpus
        );
        for m in &self.measures {
            let interval =
                m.interval.map_or_else(String::new, |[l, h]| format!(" ({}..{})", short(l), short(h)));
            let (ratio, ours_interval) = match (m.ratio, &m.left_out) {
                (Some(r), _) => (format!("{}{interval}", short(r)), String::new()),
                (None, Some(reason)) => (format!("left out: {reason}"), interval),
                (None, None) => ("-".to_owned(), interval),
            };
            let _ = writeln!(
                out,
                "| {} | {} | {} {}{ours_interval} | {} | {} | {ratio} | {} | {} |",
                m.bench,
                m.measure,
                short(m.ours),
                m.unit,
                m.peer.as_deref().unwrap_or("-"),
                m.peer_value.map_or_else(|| "-".to_owned(), short),
                m.goal.as_deref().unwrap_or("reported"),
                m.met.map_or("-", |m| if m { "yes" } else { "**no**" }),
            );
        }
        out
    }

    /// Writes both files.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write(&self, dir: &Path) -> Result<()> {
        std::fs::write(dir.join("benchmarks.json"), serde_json::to_string_pretty(self)? + "\n")?;
        std::fs::write(dir.join("benchmarks.md"), self.page())?;
        Ok(())
    }

    /// Measures of `self` that left what is recorded by more than `tolerance` (0.2 = 20 %), in the worse direction or the better: of ratios the
    /// median and the whole interval of the run (on a busy machine a short run's median alone wanders that far), of [`COUNTED`] things the
    /// number. What takes time of its own says something about one machine only and is not compared. A measure that only one side has is one, too.
    #[must_use]
    pub fn strays(&self, recorded: &Self, tolerance: f64) -> Vec<String> {
        let mut out = Vec::new();
        for m in &self.measures {
            let Some(old) = recorded
                .measures
                .iter()
                .find(|o| (&o.bench, &o.measure, &o.peer) == (&m.bench, &m.measure, &m.peer))
            else {
                out.push(format!("{} {}: not recorded", m.bench, m.measure));
                continue;
            };
            if COUNTED.contains(&m.unit.as_str()) && (m.ours / old.ours - 1.0).abs() > tolerance {
                out.push(format!("{} {}: {} was {}", m.bench, m.measure, short(m.ours), short(old.ours)));
            }
            let (Some(now), Some(then)) = (m.ratio, old.ratio) else { continue };
            let [low, high] = m.interval.unwrap_or([now, now]).map(|r| r / then);
            if (now / then - 1.0).abs() > tolerance && (low > 1.0 + tolerance || high < 1.0 - tolerance) {
                out.push(format!(
                    "{} {} against {}: ratio {} was {}",
                    m.bench,
                    m.measure,
                    m.peer.as_deref().unwrap_or("-"),
                    short(now),
                    short(then)
                ));
            }
        }
        for old in &recorded.measures {
            let same =
                |m: &&Measure| (&m.bench, &m.measure, &m.peer) == (&old.bench, &old.measure, &old.peer);
            if self.measures.iter().any(|m| m.bench == old.bench) && !self.measures.iter().any(|m| same(&m)) {
                out.push(format!("{} {}: recorded, but no longer measured", old.bench, old.measure));
            }
        }
        out
    }
}

fn short(v: f64) -> String {
    if v == 0.0 || v.abs() >= 1000.0 {
        format!("{v:.0}")
    } else if v.abs() >= 10.0 {
        format!("{v:.1}")
    } else if v.abs() >= 0.01 {
        format!("{v:.3}")
    } else {
        format!("{v:.5}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measure(ratio: f64) -> Measure {
        Measure {
            bench: "node".into(),
            measure: "x".into(),
            unit: "us".into(),
            ours: 1.0,
            peer: Some("p".into()),
            peer_value: Some(2.0),
            ratio: Some(ratio),
            interval: Some([ratio - 0.05, ratio + 0.05]),
            goal: None,
            met: Some(true),
            left_out: None,
        }
    }

    #[test]
    fn a_ratio_outside_of_the_tolerance_is_a_stray() {
        let recorded = Report { measures: vec![measure(0.5)], ..Report::default() };
        let same = Report { measures: vec![measure(0.55)], ..Report::default() };
        let worse = Report { measures: vec![measure(0.7)], ..Report::default() };
        assert!(same.strays(&recorded, 0.2).is_empty());
        assert_eq!(worse.strays(&recorded, 0.2).len(), 1);
        assert_eq!(same.strays(&Report::default(), 0.2).len(), 1);
        // Its rounds disagree: that says nothing.
        let noisy = Report {
            measures: vec![Measure { interval: Some([0.45, 0.9]), ..measure(0.7) }],
            ..Report::default()
        };
        assert!(noisy.strays(&recorded, 0.2).is_empty());
        let renamed =
            Report { measures: vec![Measure { measure: "y".into(), ..measure(0.5) }], ..Report::default() };
        assert_eq!(renamed.strays(&recorded, 0.2).len(), 2);
        let other =
            Report { measures: vec![Measure { bench: "cni".into(), ..measure(0.5) }], ..Report::default() };
        assert_eq!(other.strays(&recorded, 0.2).len(), 1);
    }

    #[test]
    fn what_is_counted_is_compared_without_a_peer() {
        let counted = |ours: f64| Report {
            measures: vec![Measure {
                unit: INSTRUCTIONS.into(),
                ours,
                ratio: None,
                peer: None,
                ..measure(0.5)
            }],
            ..Report::default()
        };
        assert!(counted(110.0).strays(&counted(100.0), 0.2).is_empty());
        assert_eq!(counted(130.0).strays(&counted(100.0), 0.2).len(), 1);
    }

    #[test]
    fn a_peer_that_is_not_there_is_told_with_the_reason() {
        let absent = Measure {
            ratio: None,
            peer_value: None,
            met: None,
            left_out: Some("not built".into()),
            ..measure(0.5)
        };
        let report = Report { measures: vec![absent], ..Report::default() };
        assert!(report.page().contains("| left out: not built |"), "{}", report.page());
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
        // Neither one that moved nor one that is no longer measured.
        let recorded = Report { measures: vec![measure(0.5)], ..Report::default() };
        assert_eq!(report.strays(&recorded, 0.2), Vec::<String>::new());
    }

    #[test]
    fn merging_replaces_a_bench_whole() {
        let mut report = Report { measures: vec![measure(0.5)], ..Report::default() };
        report.merge(Report { measures: vec![measure(0.6), measure(0.7)], ..Report::default() });
        assert_eq!(report.measures.len(), 2);
        assert!(report.page().contains("| node | x |"));
    }
}
