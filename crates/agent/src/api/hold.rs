//! Quarantine, freeze, rollback, release.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use flowloom_api::v1;

use super::{Answer, Context, body};

pub(crate) async fn quarantine(State(context): State<Context>, bytes: Bytes) -> Answer<v1::PolicyHold> {
    let request: v1::QuarantineRequest = body(&bytes)?;
    Ok(Json(context.core.ask(move |core| core.quarantine(&request)).await??))
}

pub(crate) async fn freeze(State(context): State<Context>, bytes: Bytes) -> Answer<v1::PolicyHold> {
    let request: v1::HoldRequest = body(&bytes)?;
    Ok(Json(context.core.ask(move |core| core.freeze(&request)).await??))
}

pub(crate) async fn rollback(State(context): State<Context>, bytes: Bytes) -> Answer<v1::PolicyHold> {
    let request: v1::RollbackRequest = body(&bytes)?;
    Ok(Json(context.core.ask(move |core| core.rollback(&request)).await??))
}

pub(crate) async fn release(State(context): State<Context>, bytes: Bytes) -> Answer<v1::PolicyHold> {
    let request: v1::HoldRequest = body(&bytes)?;
    Ok(Json(context.core.ask(move |core| core.release(&request)).await??))
}
