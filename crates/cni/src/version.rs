//! Versions of the CNI specification that are spoken.

use crate::error::{CniError, code};

/// A supported version; results are written in the version of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// 0.3.0: for the loopback device only.
    V0_3_0,
    /// 0.3.1: for the loopback device only; some runtimes ask for it whatever the network's version is.
    V0_3_1,
    /// 0.4.0: CHECK; `ips[].version`.
    V0_4_0,
    /// 1.0.0.
    V1_0_0,
    /// 1.1.0: STATUS, GC; MTU in results.
    V1_1_0,
}

impl Version {
    /// Every version of a network, oldest first.
    pub const ALL: [Self; 3] = [Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];
    /// Every version of the loopback plugin, oldest first.
    pub const LOOPBACK: [Self; 5] = [Self::V0_3_0, Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];
    /// What answers are written in when the request's version is not known.
    pub const NEWEST: Self = Self::V1_1_0;

    /// Its text.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    /// The version with this text, of those a network or the loopback device may have.
    ///
    /// # Errors
    /// Code 1 when it is none of them.
    pub fn parse(text: &str, loopback: bool) -> Result<Self, CniError> {
        let known: &[Self] = if loopback { &Self::LOOPBACK } else { &Self::ALL };
        known.iter().copied().find(|v| v.as_str() == text).ok_or_else(|| {
            let known: Vec<_> = known.iter().map(|v| v.as_str()).collect();
            CniError::new(
                code::INCOMPATIBLE_VERSION,
                format!("cniVersion {text:?} is not supported: use one of {}", known.join(", ")),
            )
        })
    }

    /// Whether CHECK exists in it.
    #[must_use]
    pub fn has_check(self) -> bool {
        self >= Self::V0_4_0
    }

    /// Whether STATUS and GC exist in it.
    #[must_use]
    pub const fn has_status(self) -> bool {
        matches!(self, Self::V1_1_0)
    }
}
