//! Errors on the wire.

use serde::{Deserialize, Serialize};

/// Body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ApiError,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{message}")]
pub struct ApiError {
    /// For programs.
    pub code: ErrorCode,
    /// For people.
    pub message: String,
}

impl ApiError {
    /// Makes one.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $status:literal,)*) => {
        /// What went wrong, for programs. Unknown codes of a newer agent read as `Other`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum ErrorCode {
            $($(#[$doc])* $name,)*
            /// A code this client does not know.
            #[serde(other)]
            Other,
        }
        impl ErrorCode {
            /// The HTTP status it travels with.
            #[must_use]
            pub const fn http_status(self) -> u16 { match self { $(Self::$name => $status,)* Self::Other => 500 } }
            /// The CamelCase name.
            #[must_use]
            pub const fn name(self) -> &'static str { match self { $(Self::$name => stringify!($name),)* Self::Other => "Other" } }
        }
    };
}

codes! {
    /// The request cannot be understood or contradicts itself.
    InvalidRequest = 400,
    /// The caller may not do this.
    Forbidden = 403,
    /// The object does not exist.
    NotFound = 404,
    /// The path does not exist.
    UnknownPath = 404,
    /// The path exists, with another method.
    MethodNotAllowed = 405,
    /// The request's body is larger than the agent reads.
    TooLarge = 413,
    /// (container id, interface) is attached already, differently.
    AttachmentConflict = 409,
    /// The address or endpoint belongs to something else.
    InUse = 409,
    /// The object exists and is not in the state the request needs.
    Conflict = 409,
    /// No free address in the subnets this node may allocate from.
    AddressesExhausted = 507,
    /// A table of the datapath or a limit of the node is full.
    CapacityExceeded = 507,
    /// More requests at once than the agent serves; try again.
    Busy = 429,
    /// The agent runs and cannot serve this yet (first document not loaded, datapath not loaded).
    NotReady = 503,
    /// What was waited for did not happen in time.
    Timeout = 504,
    /// The kernel refused something.
    Realise = 500,
    /// What CHECK found is not what ADD made.
    CheckFailed = 409,
    /// Everything else.
    Internal = 500,
}

impl ErrorCode {
    /// Whether the same request may succeed later without anything being changed by a person.
    #[must_use]
    pub const fn retryable(self) -> bool {
        matches!(self, Self::Busy | Self::NotReady | Self::Timeout | Self::AddressesExhausted)
    }
}
