//! Waiting for the agent.

use std::time::{Duration, Instant};

use flowloom_api::{Client, ClientError};

use crate::exit::Failure;

/// Between two looks at what has no event to wait for.
const PAUSE: Duration = Duration::from_millis(25);

/// Until the agent says ready.
///
/// # Errors
/// Timed out, with what is missing; whatever cannot pass by waiting at once.
pub(crate) fn ready(client: &Client, limit: Duration) -> Result<(), Failure> {
    poll(limit, |left| match client.clone().with_timeout(left).health() {
        Ok(h) if h.ready => Ok(Some(())),
        Ok(h) if h.waiting_for.is_empty() => Err(Wait::Not("the agent is not ready".to_owned())),
        Ok(h) => Err(Wait::Not(format!("the agent waits for {}", h.waiting_for.join(", ")))),
        Err(e) => Err(passing(e)),
    })
}

/// A look's answer that is not the wanted one.
pub(crate) enum Wait {
    /// Look again; this is what was met.
    Not(String),
    /// Waiting will not help.
    Never(Failure),
}

/// What an agent that starts or restarts answers passes; the rest does not.
pub(crate) fn passing(e: ClientError) -> Wait {
    if e.retryable() { Wait::Not(e.to_string()) } else { Wait::Never(e.into()) }
}

/// Looks until there is an answer. `look` gets the time that is left.
pub(crate) fn poll<T>(
    limit: Duration,
    mut look: impl FnMut(Duration) -> Result<Option<T>, Wait>,
) -> Result<T, Failure> {
    let deadline = Instant::now() + limit;
    let mut met = String::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match look(left.max(PAUSE)) {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => {}
            Err(Wait::Not(what)) => met = what,
            Err(Wait::Never(failure)) => return Err(failure),
        }
        if left <= PAUSE {
            return Err(Failure::timed_out(format!("not within {} ms: {met}", limit.as_millis())));
        }
        #[expect(
            clippy::disallowed_methods,
            reason = "a bounded pause: the agent may not run yet, so there is no event"
        )]
        std::thread::sleep(PAUSE);
    }
}
