//! Medians with an interval; machines are shared, so nothing else is worth quoting.

use serde::{Deserialize, Serialize};

/// A median and the interval that holds it with about 95 % confidence (order statistics, no distribution assumed).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Median {
    /// The median.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Samples.
    pub samples: usize,
}

/// The median of some samples; `None` when there are none.
#[must_use]
pub fn median(samples: &[f64]) -> Option<Median> {
    let mut s: Vec<f64> = samples.iter().copied().filter(|v| v.is_finite()).collect();
    s.sort_by(f64::total_cmp);
    let n = s.len();
    let at = |i: usize| s.get(i.min(n.saturating_sub(1))).copied();
    let value = if n % 2 == 1 { at(n / 2)? } else { f64::midpoint(at((n / 2).checked_sub(1)?)?, at(n / 2)?) };
    // Ranks n/2 -+ 0.98 sqrt(n): the usual binomial interval.
    let half = 0.98 * (n as f64).sqrt();
    let low = (n as f64 / 2.0 - half).floor().max(0.0) as usize;
    let high = (n as f64 / 2.0 + half).ceil() as usize;
    Some(Median { value, low: at(low)?, high: at(high)?, samples: n })
}

/// A percentile by nearest rank.
#[must_use]
pub fn percentile(samples: &[f64], p: f64) -> Option<f64> {
    let mut s: Vec<f64> = samples.to_vec();
    s.sort_by(f64::total_cmp);
    let rank = ((p / 100.0 * s.len() as f64).ceil() as usize).max(1) - 1;
    s.get(rank.min(s.len().checked_sub(1)?)).copied()
}

/// The median of pairwise ratios `ours / peer`: drift of the machine cancels inside a pair.
#[must_use]
pub fn ratio(ours: &[f64], peer: &[f64]) -> Option<Median> {
    let ratios: Vec<f64> = ours.iter().zip(peer).filter(|(_, p)| **p > 0.0).map(|(o, p)| o / p).collect();
    median(&ratios)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_even_and_empty() {
        assert_eq!(median(&[3.0, 1.0, 2.0]).unwrap().value, 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]).unwrap().value, 2.5);
        assert!(median(&[]).is_none());
        let m = median(&(1..=100).map(f64::from).collect::<Vec<_>>()).unwrap();
        assert!(m.low < m.value && m.value < m.high);
    }

    #[test]
    fn percentile_is_a_sample() {
        assert_eq!(percentile(&[1.0, 2.0, 3.0, 4.0], 99.0), Some(4.0));
        assert_eq!(percentile(&[1.0, 2.0, 3.0, 4.0], 50.0), Some(2.0));
        assert_eq!(percentile(&[], 50.0), None);
    }

    #[test]
    fn ratios_are_taken_pair_by_pair() {
        // The second pair ran on a machine half as fast; the ratio stays.
        assert_eq!(ratio(&[1.0, 2.0], &[2.0, 4.0]).unwrap().value, 0.5);
    }
}
