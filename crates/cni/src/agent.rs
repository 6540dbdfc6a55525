//! Requests to the agent inside a deadline, and its errors as CNI errors.

use std::time::{Duration, Instant};

use flowloom_api::v1::ErrorCode;
use flowloom_api::{Client, ClientError};

use crate::environment::Verb;
use crate::error::{CniError, code};
use crate::retry::Backoff;

/// How long to ask.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// While no agent serves.
    pub(crate) absent: Duration,
    /// In all.
    pub(crate) whole: Duration,
}

impl From<Duration> for Patience {
    fn from(whole: Duration) -> Self {
        Self { absent: whole, whole }
    }
}

/// Asks until there is an answer or the deadline is over. Every request of this plugin is idempotent for its attachment, so one that may have been served
/// (the agent died while it answered) is asked again.
pub(crate) fn ask<T>(
    verb: Verb,
    socket: &str,
    patience: impl Into<Patience>,
    request: impl Fn(&Client) -> Result<T, ClientError>,
) -> Result<T, CniError> {
    let (patience, start) = (patience.into(), Instant::now());
    let mut backoff = Backoff::new(start + patience.absent);
    loop {
        let left = (start + patience.whole).saturating_duration_since(Instant::now());
        let client = Client::new(socket).with_timeout(left);
        match request(&client) {
            Ok(answer) => return Ok(answer),
            Err(e) if passes_soon(&e) && backoff.pause() => {}
            Err(e) => return Err(translate(verb, &e)),
        }
    }
}

/// Worth asking again within a second: the agent starts, restarts or is busy. A full pool is not: the runtime's own retry is slower and cheaper.
fn passes_soon(e: &ClientError) -> bool {
    match e {
        ClientError::Unavailable { .. } | ClientError::Broken { .. } => true,
        ClientError::Api { error, .. } => {
            matches!(error.code, ErrorCode::Busy | ErrorCode::NotReady | ErrorCode::Timeout)
        }
        ClientError::Permission { .. } | ClientError::Timeout { .. } | ClientError::Protocol { .. } => false,
    }
}

fn translate(verb: Verb, e: &ClientError) -> CniError {
    let number = match e {
        ClientError::Unavailable { .. } | ClientError::Timeout { .. } | ClientError::Broken { .. } => {
            code::TRY_LATER
        }
        ClientError::Permission { .. } => code::IO,
        ClientError::Protocol { .. } => code::DECODE,
        ClientError::Api { error, .. } => match error.code {
            ErrorCode::Busy | ErrorCode::NotReady | ErrorCode::Timeout => code::TRY_LATER,
            ErrorCode::InvalidRequest => code::INVALID_CONFIG,
            // For ADD what is missing is something the configuration names; for CHECK it is the attachment itself.
            ErrorCode::NotFound if verb == Verb::Add => code::INVALID_CONFIG,
            ErrorCode::NotFound => code::UNKNOWN_CONTAINER,
            ErrorCode::AttachmentConflict | ErrorCode::InUse | ErrorCode::Conflict => code::CONFLICT,
            ErrorCode::CheckFailed => code::CHECK_FAILED,
            ErrorCode::AddressesExhausted => code::NO_ADDRESS,
            _ => code::REFUSED,
        },
    };
    let error = CniError::new(number, e.to_string());
    match e.code() {
        Some(api) => error.with_details(api.name()),
        None => error,
    }
}
