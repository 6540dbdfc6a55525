//! Times and durations in words. UTC throughout: nodes and people sit in different zones.

use std::time::{SystemTime, UNIX_EPOCH};

const DAY: u64 = 86_400;

/// `2026-11-30T05:44:29Z` (RFC 3339) from milliseconds since the Unix epoch; empty for 0.
pub(crate) fn date_time(ms: u64) -> String {
    if ms == 0 {
        return String::new();
    }
    let seconds = ms / 1000;
    let (year, month, day) = date(seconds / DAY);
    let t = seconds % DAY;
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", t / 3600, t / 60 % 60, t % 60)
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

/// Gregorian date of a day number since 1970-01-01. Years are counted from March, so the leap day is a year's last.
fn date(days: u64) -> (u64, u64, u64) {
    const ERA: u64 = 146_097; // days of 400 years
    let since_march = days + 719_468; // days from 0000-03-01
    let era = since_march / ERA;
    let in_era = since_march % ERA;
    let year_of_era = (in_era - in_era / 1460 + in_era / 36_524 - in_era / 146_096) / 365;
    let in_year = in_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * in_year + 2) / 153; // 0 = March
    let day = in_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (seconds, text) in [
            (1, "1970-01-01T00:00:01Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (1_796_017_469, "2026-11-30T05:44:29Z"),
        ] {
            assert_eq!(date_time(seconds * 1000), text);
        }
        assert_eq!(date_time(0), "");
        assert_eq!(clock(1_796_017_469_012_000_000), "05:44:29.012");
    }

    #[test]
    fn spans() {
        assert_eq!([5, 192, 7500, 356_400].map(span), ["5s", "3m12s", "2h5m", "4d3h"]);
        assert_eq!([850, 12_300, 1_500_000].map(micros), ["850us", "12.3ms", "1.50s"]);
    }
}
