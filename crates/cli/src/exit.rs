//! Exit codes and failures.

use std::process::ExitCode;

use flowloom_api::ClientError;
use flowloom_api::v1::ErrorCode;

/// How the process ends. The numbers are an interface: scripts rely on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done; for `policy explain` and `trace`: the packet passes.
    Ok = 0,
    /// Something is wrong: a document, an object that does not exist, a refusal.
    Error = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The agent cannot be reached: not running, still starting, or its socket may not be opened.
    Unavailable = 3,
    /// `policy explain` and `trace` answered, and the answer is that the packet does not pass.
    Denied = 4,
    /// What was waited for did not happen in time.
    TimedOut = 5,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a command ends early.
#[derive(Debug)]
pub struct Failure {
    /// How the process ends.
    pub exit: Exit,
    /// What stderr shows; empty when everything has been said already.
    pub message: String,
}

impl Failure {
    /// Something is wrong.
    pub(crate) fn error(message: impl Into<String>) -> Self {
        Self { exit: Exit::Error, message: message.into() }
    }

    /// The command line is wrong.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, message: message.into() }
    }

    /// It took too long.
    pub(crate) fn timed_out(message: impl Into<String>) -> Self {
        Self { exit: Exit::TimedOut, message: message.into() }
    }
}

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Self {
        let exit = match &e {
            ClientError::Unavailable { .. } | ClientError::Permission { .. } | ClientError::Broken { .. } => {
                Exit::Unavailable
            }
            ClientError::Timeout { .. } => Exit::TimedOut,
            ClientError::Api { error, .. } if error.code == ErrorCode::Timeout => Exit::TimedOut,
            ClientError::Api { .. } | ClientError::Protocol { .. } => Exit::Error,
        };
        let message = match &e {
            ClientError::Api { error, .. } => format!("{} [{}]", error.message, error.code.name()),
            _ => e.to_string(),
        };
        Self { exit, message }
    }
}

impl From<std::io::Error> for Failure {
    /// A reader that had enough (`flowloom observe | head`) is no failure.
    fn from(e: std::io::Error) -> Self {
        if e.kind() == std::io::ErrorKind::BrokenPipe {
            Self { exit: Exit::Ok, message: String::new() }
        } else {
            Self::error(e.to_string())
        }
    }
}
