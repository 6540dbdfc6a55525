//! Times and durations in words. UTC throughout: nodes and people sit in different zones.

use std::time::{SystemTime, UNIX_EPOCH};

use flowloom_model::Timestamp;

const DAY: u64 = 86_400;

/// `2026-11-30T05:44:29Z` (RFC 3339) from milliseconds since the Unix epoch; empty for 0.
pub(crate) fn date_time(ms: u64) -> String {
    if ms == 0 {
        return String::new();
    }
    Timestamp(ms / 1000).to_string()
}

/// `05:44:29.123` from nanoseconds since the Unix epoch.
pub(crate) fn clock(ns: u64) -> String {
    let ms = ns / 1_000_000;
    let t = ms / 1000 % DAY;
    format!("{:02}:{:02}:{:02}.{:03}", t / 3600, t / 60 % 60, t % 60, ms % 1000)
}

/// `5s`, `3m12s`, `2h5m`, `4d3h`.
pub(crate) fn span(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{}s", seconds / 60, seconds % 60),
        3600..DAY => format!("{}h{}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{}h", seconds / DAY, seconds / 3600 % 24),
    }
}

/// `850us`, `12.3ms`, `1.50s`.
pub(crate) fn micros(us: u64) -> String {
    match us {
        0..1000 => format!("{us}us"),
        1000..1_000_000 => format!("{:.1}ms", us as f64 / 1e3),
        _ => format!("{:.2}s", us as f64 / 1e6),
    }
}

/// Milliseconds since the Unix epoch, now.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!(date_time(1_796_017_469_999), "2026-11-30T05:44:29Z");
        assert_eq!(date_time(0), "");
        assert_eq!(clock(1_796_017_469_012_000_000), "05:44:29.012");
    }

    #[test]
    fn spans() {
        assert_eq!([5, 192, 7500, 356_400].map(span), ["5s", "3m12s", "2h5m", "4d3h"]);
        assert_eq!([850, 12_300, 1_500_000].map(micros), ["850us", "12.3ms", "1.50s"]);
    }
}
