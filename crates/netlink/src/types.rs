//! Names, indices and hardware addresses of links.

use std::fmt;
use std::str::FromStr;

/// Index of a link in its namespace; 0 is no link.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct IfIndex(pub u32);

impl IfIndex {
    /// Loopback's index in every namespace.
    pub const LOOPBACK: Self = Self(1);

    /// The number.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }
}

impl fmt::Display for IfIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why a link's name was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} is not a link name: 1..15 bytes without '/', ':', '%', white space, and not '.' or '..'")]
pub struct LinkNameError {
    /// What was given.
    pub value: String,
}

/// A link's name: what the kernel's `dev_valid_name` accepts, and no `%` (a pattern the kernel would fill in).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LinkName(String);

impl LinkName {
    /// Most bytes (`IFNAMSIZ` without the zero).
    pub const MAX: usize = 15;

    /// Checks and wraps.
    ///
    /// # Errors
    /// When the kernel would refuse it.
    pub fn new(s: impl Into<String>) -> Result<Self, LinkNameError> {
        let s = s.into();
        let ok = !s.is_empty()
            && s.len() <= Self::MAX
            && s != "."
            && s != ".."
            && !s
                .bytes()
                .any(|b| matches!(b, b'/' | b':' | b'%' | 0) || b.is_ascii_whitespace() || b == 0x0b);
        if ok { Ok(Self(s)) } else { Err(LinkNameError { value: s.chars().take(80).collect() }) }
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LinkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl AsRef<str> for LinkName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl FromStr for LinkName {
    type Err = LinkNameError;
    fn from_str(s: &str) -> Result<Self, LinkNameError> {
        Self::new(s)
    }
}

/// Why a hardware address was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} is not a MAC address: six two-digit hexadecimal bytes with ':' between them")]
pub struct MacError {
    /// What was given.
    pub value: String,
}

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Whether one host can have it: not all zero and not a group address.
    #[must_use]
    pub fn is_unicast(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }

    pub(crate) fn from_slice(b: &[u8]) -> Option<Self> {
        b.try_into().ok().map(Self)
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Mac {
    type Err = MacError;
    fn from_str(s: &str) -> Result<Self, MacError> {
        let fail = || MacError { value: s.chars().take(80).collect() };
        let mut out = [0u8; 6];
        let mut parts = s.split(':');
        for byte in &mut out {
            let part = parts.next().filter(|p| p.len() == 2).ok_or_else(fail)?;
            if !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(fail());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| fail())?;
        }
        if parts.next().is_some() { Err(fail()) } else { Ok(Self(out)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_names_are_those_the_kernel_takes() {
        for good in ["eth0", "a", "fl-12345.6789ab", "lo"] {
            assert!(LinkName::new(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "a:1", "eth%d", "a b", "a\tb", "sixteen-bytes-xx"] {
            assert!(LinkName::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn mac_text_survives_a_round_trip_and_odd_forms_are_refused() {
        let mac: Mac = "02:00:5E:00:53:0a".parse().unwrap();
        assert_eq!(mac.to_string(), "02:00:5e:00:53:0a");
        assert!(mac.is_unicast());
        assert!(!Mac([1, 0, 0, 0, 0, 0]).is_unicast());
        for bad in [
            "",
            "02:00:5e:00:53",
            "02:00:5e:00:53:0a:01",
            "2:0:5e:0:53:a",
            "02:00:5e:00:53:+a",
            "0200.5e00.530a",
        ] {
            assert!(bad.parse::<Mac>().is_err(), "{bad}");
        }
    }
}
