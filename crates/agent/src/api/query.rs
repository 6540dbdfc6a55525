//! Questions: explain, trace, and waiting for a policy.

use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::Uri;
use flowloom_api::v1::{self, ErrorCode};
use serde::Deserialize;

use super::{Answer, Context, body, both, failure, invalid, query};

/// Longest time that one request may wait.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WaitQuery {
    vpc: Option<String>,
    endpoint: Option<String>,
    revision: Option<u32>,
    generation: Option<u64>,
    #[serde(default = "default_timeout")]
    timeout_ms: u64,
}

fn default_timeout() -> u64 {
    10_000
}

pub(crate) async fn explain(State(context): State<Context>, bytes: Bytes) -> Answer<v1::Explanation> {
    let request: v1::ExplainRequest = body(&bytes)?;
    Ok(Json(context.core.ask(move |core| core.explain(&request)).await??))
}

pub(crate) async fn trace(State(context): State<Context>, bytes: Bytes) -> Answer<v1::TraceReport> {
    let request: v1::TraceRequest = body(&bytes)?;
    Ok(Json(crate::trace::trace(&context.core, request).await?))
}

/// The core is asked once, and again after each of its passes: nothing polls.
pub(crate) async fn wait(State(context): State<Context>, uri: Uri) -> Answer<v1::PolicyWait> {
    let q: WaitQuery = query(&uri)?;
    let pair = both(q.vpc, q.endpoint)?;
    if q.revision.is_some() && pair.is_none() {
        return Err(invalid("revision needs vpc and endpoint: revisions belong to endpoints"));
    }
    let start = Instant::now();
    let limit = Duration::from_millis(q.timeout_ms).min(LONGEST_WAIT);
    let mut passes = context.core.passes();
    let until = async {
        loop {
            passes.borrow_and_update();
            let pair = pair.clone();
            let (revision, generation) = (q.revision, q.generation);
            let asked = context.core.ask(move |core| {
                let key = pair.map(|(vpc, name)| core.endpoint_meant(&vpc, &name)).transpose()?;
                core.in_force(key.as_ref(), revision, generation)
            });
            let state = asked.await??;
            if state.reached {
                return Ok(state);
            }
            if passes.changed().await.is_err() {
                return Err(failure(ErrorCode::NotReady, "the agent is going down"));
            }
        }
    };
    let state = tokio::time::timeout(limit, until).await.map_err(|_| {
        failure(
            ErrorCode::Timeout,
            format!("not in force after {} ms; see `flowloom status`", limit.as_millis()),
        )
    })??;
    Ok(Json(v1::PolicyWait {
        generation: state.generation,
        revision: state.revision,
        waited_us: u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX),
    }))
}
