//! Versions of the CNI specification that are spoken.

use crate::error::{CniError, code};

/// A supported version; results are written in the version of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// 0.4.0: CHECK; `ips[].version`.
    V0_4_0,
    /// 1.0.0.
    V1_0_0,
    /// 1.1.0: STATUS, GC; MTU in results.
    V1_1_0,
}

impl Version {
    /// Every version, oldest first.
    pub const ALL: [Self; 3] = [Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];
    /// What answers are written in when the request's version is not known.
    pub const NEWEST: Self = Self::V1_1_0;

    /// Its text.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    /// The version with this text.
    ///
    /// # Errors
    /// Code 1 when it is not one of [`Self::ALL`].
    pub fn parse(text: &str) -> Result<Self, CniError> {
        Self::ALL.into_iter().find(|v| v.as_str() == text).ok_or_else(|| {
            CniError::new(
                code::INCOMPATIBLE_VERSION,
                format!("cniVersion {text:?} is not supported: use 0.4.0, 1.0.0 or 1.1.0"),
            )
        })
    }

    /// Whether STATUS and GC exist in it.
    #[must_use]
    pub const fn has_status(self) -> bool {
        matches!(self, Self::V1_1_0)
    }
}
