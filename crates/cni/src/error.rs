//! Failures as the CNI specification reports them: a code, a message, details.

use serde::Serialize;

use crate::version::Version;

/// Error codes. 1..=11, 50 and 51 are the specification's (CNI 1.1.0, section 2 "Error" and "STATUS"); from 100 on they are this plugin's own.
pub mod code {
    /// The `cniVersion` is not supported.
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    /// A field of the network configuration is not supported; the message holds key and value.
    pub const UNSUPPORTED_FIELD: u32 = 2;
    /// The container is unknown: nothing of it is left, so the runtime has nothing to clean up.
    pub const UNKNOWN_CONTAINER: u32 = 3;
    /// An environment variable is missing or wrong; the message names it.
    pub const INVALID_ENVIRONMENT: u32 = 4;
    /// Reading or writing failed.
    pub const IO: u32 = 5;
    /// Content could not be decoded.
    pub const DECODE: u32 = 6;
    /// The network configuration is not valid.
    pub const INVALID_CONFIG: u32 = 7;
    /// Something that passes: call again later.
    pub const TRY_LATER: u32 = 11;
    /// `STATUS`: no ADD can be served now.
    pub const NOT_AVAILABLE: u32 = 50;
    /// `STATUS`: as 50, and attachments that exist may be cut off.
    pub const NOT_AVAILABLE_LIMITED: u32 = 51;
    /// The agent refused the request.
    pub const REFUSED: u32 = 100;
    /// The attachment exists already and differs from the request.
    pub const CONFLICT: u32 = 101;
    /// `CHECK` found something that is not as `ADD` left it.
    pub const CHECK_FAILED: u32 = 102;
    /// No address is free.
    pub const NO_ADDRESS: u32 = 103;
    /// `install` or `uninstall` failed.
    pub const INSTALL: u32 = 104;
}

/// One failure.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CniError {
    /// One of [`code`].
    pub code: u32,
    /// One line that names the object and what to check.
    pub message: String,
    /// More, where there is more.
    pub details: String,
}

impl CniError {
    /// An error without details.
    #[must_use]
    pub fn new(code: u32, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: String::new() }
    }

    /// The same error with details.
    #[must_use]
    pub fn with_details(mut self, details: impl Into<String>) -> Self {
        self.details = details.into();
        self
    }

    /// Wrong or missing environment variable.
    #[must_use]
    pub fn environment(variable: &str, problem: impl std::fmt::Display) -> Self {
        Self::new(code::INVALID_ENVIRONMENT, format!("{variable}: {problem}"))
    }

    /// A configuration key that this plugin does not support.
    #[must_use]
    pub fn unsupported(key: &str, value: &serde_json::Value, why: &str) -> Self {
        Self::new(code::UNSUPPORTED_FIELD, format!("unsupported field {key:?} with value {value}: {why}"))
    }

    /// A configuration value that is wrong.
    #[must_use]
    pub fn config(message: impl Into<String>) -> Self {
        Self::new(code::INVALID_CONFIG, message)
    }

    /// The JSON that goes to stdout, in the request's version.
    #[must_use]
    pub fn to_json(&self, version: Version) -> String {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Wire<'a> {
            cni_version: &'a str,
            code: u32,
            msg: &'a str,
            #[serde(skip_serializing_if = "str::is_empty")]
            details: &'a str,
        }
        let wire = Wire {
            cni_version: version.as_str(),
            code: self.code,
            msg: &self.message,
            details: &self.details,
        };
        // Serialising strings and a number cannot fail; an empty line would only lose the message, not the exit code.
        serde_json::to_string(&wire).unwrap_or_default()
    }
}
