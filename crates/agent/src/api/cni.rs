//! CNI requests. Each is one question to the core, which answers after enforcement.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use flowloom_api::v1;

use super::{Answer, Context, body};
use crate::detach;

pub(crate) async fn add(State(context): State<Context>, bytes: Bytes) -> Answer<v1::CniAddResult> {
    let request: v1::CniAddRequest = body(&bytes)?;
    Ok(Json(context.core.add(request).await?))
}

pub(crate) async fn check(State(context): State<Context>, bytes: Bytes) -> Answer<v1::CniChecked> {
    let request: v1::CniCheckRequest = body(&bytes)?;
    Ok(Json(context.core.ask(move |core| core.cni_check(&request)).await??))
}

pub(crate) async fn del(State(context): State<Context>, bytes: Bytes) -> Answer<v1::CniDeleted> {
    let request: v1::CniDelRequest = body(&bytes)?;
    Ok(Json(detach::delete(&context.core, request).await?))
}

pub(crate) async fn status(State(context): State<Context>) -> Answer<v1::CniStatus> {
    Ok(Json(context.core.ask(|core| core.cni_status()).await?))
}

pub(crate) async fn timing(State(context): State<Context>) -> Answer<v1::CniTimings> {
    Ok(Json(context.core.ask(|core| core.cni_timings()).await?))
}
