//! A point in time, passed in from outside: this crate has no clock.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Seconds since 1970-01-01T00:00:00Z; written as RFC 3339 in UTC.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Timestamp(pub u64);

/// Why a text is no timestamp.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a time like 2026-01-31T23:59:59Z")]
pub struct TimestampError(String);

const DAY: u64 = 86_400;

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_of_month(year: u64, month: u64) -> u64 {
    match month {
        2 => 28 + u64::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days from 1970-01-01 to the first of January of a year.
fn days_before_year(year: u64) -> u64 {
    let leaps = |y: u64| y / 4 - y / 100 + y / 400;
    (year - 1970) * 365 + leaps(year - 1) - leaps(1969)
}

impl Timestamp {
    /// Seconds from `earlier` to this; 0 when the clock went back.
    #[must_use]
    pub fn seconds_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Four digits of year: RFC 3339 has no more.
        let seconds = self.0.min(days_before_year(10_000) * DAY - 1);
        let (mut days, time) = (seconds / DAY, seconds % DAY);
        let mut year = 1970 + days / 366;
        while days_before_year(year + 1) <= days {
            year += 1;
        }
        days -= days_before_year(year);
        let mut month = 1;
        while days >= days_of_month(year, month) {
            days -= days_of_month(year, month);
            month += 1;
        }
        let (h, m, s) = (time / 3600, time / 60 % 60, time % 60);
        write!(f, "{year:04}-{month:02}-{:02}T{h:02}:{m:02}:{s:02}Z", days + 1)
    }
}

impl FromStr for Timestamp {
    type Err = TimestampError;

    fn from_str(text: &str) -> Result<Self, TimestampError> {
        let error = || TimestampError(text.chars().take(40).collect());
        let b = text.as_bytes();
        let shape = b.len() == 20
            && b.iter()
                .zip(b"0000-00-00T00:00:00Z")
                .all(|(c, p)| if *p == b'0' { c.is_ascii_digit() } else { c == p });
        if !shape {
            return Err(error());
        }
        let number =
            |at: std::ops::Range<usize>| text.get(at).and_then(|t| t.parse::<u64>().ok()).ok_or_else(error);
        let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
        let (h, m, s) = (number(11..13)?, number(14..16)?, number(17..19)?);
        let real = year >= 1970
            && (1..=12).contains(&month)
            && (1..=days_of_month(year, month)).contains(&day)
            && h < 24
            && m < 60
            && s < 60;
        if !real {
            return Err(error());
        }
        let days = days_before_year(year) + (1..month).map(|m| days_of_month(year, m)).sum::<u64>() + day - 1;
        Ok(Self(days * DAY + h * 3600 + m * 60 + s))
    }
}

impl TryFrom<String> for Timestamp {
    type Error = TimestampError;
    fn try_from(s: String) -> Result<Self, TimestampError> {
        s.parse()
    }
}

impl From<Timestamp> for String {
    fn from(t: Timestamp) -> Self {
        t.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_moments() {
        for (n, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_000_000_000, "2001-09-09T01:46:40Z"),
            (4_107_542_399, "2100-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(Timestamp(n).to_string(), text);
            assert_eq!(text.parse(), Ok(Timestamp(n)));
        }
        assert_eq!(Timestamp(u64::MAX).to_string(), "9999-12-31T23:59:59Z");
        for bad in [
            "",
            "2026-02-30T00:00:00Z",
            "1969-01-01T00:00:00Z",
            "2026-01-01T24:00:00Z",
            "2026-01-01 00:00:00Z",
            "2026-01-01T00:00:00+00:00",
        ] {
            assert!(bad.parse::<Timestamp>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn text_and_number_agree(n in 0u64..253_402_300_800) {
            prop_assert_eq!(Timestamp(n).to_string().parse(), Ok(Timestamp(n)));
        }
    }
}
