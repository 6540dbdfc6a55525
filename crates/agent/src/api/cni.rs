//! CNI requests. Each is one question to the core, which answers after enforcement.

use std::future::Future;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use flowloom_api::v1;

use super::{Answer, Context, Failure, body};
use crate::desk::Verb;
use crate::source::await_pod;
use crate::{collect, detach};

/// Answers and counts.
async fn counted<T>(
    context: &Context,
    verb: Verb,
    answer: impl Future<Output = Result<T, Failure>>,
) -> Answer<T> {
    let start = Instant::now();
    let answer = answer.await;
    context.core.desk().count(verb, start, answer.as_ref().err().map(|e| e.0.code));
    answer.map(Json)
}

pub(crate) async fn add(State(context): State<Context>, bytes: Bytes) -> Answer<v1::CniAddResult> {
    let answer = async {
        let request: v1::CniAddRequest = body(&bytes)?;
        await_pod(&context.core, &request).await?;
        Ok(context.core.add(request).await?)
    };
    counted(&context, Verb::Add, answer).await
}

pub(crate) async fn check(State(context): State<Context>, bytes: Bytes) -> Answer<v1::CniChecked> {
    let answer = async {
        let request: v1::CniCheckRequest = body(&bytes)?;
        Ok(context.core.ask(move |core| core.cni_check(&request)).await??)
    };
    counted(&context, Verb::Check, answer).await
}

pub(crate) async fn del(State(context): State<Context>, bytes: Bytes) -> Answer<v1::CniDeleted> {
    counted(&context, Verb::Del, async { Ok(detach::delete(&context.core, body(&bytes)?).await?) }).await
}

pub(crate) async fn gc(State(context): State<Context>, bytes: Bytes) -> Answer<v1::CniCollected> {
    counted(&context, Verb::Gc, async { Ok(collect::collect(&context.core, body(&bytes)?).await?) }).await
}

/// For the default VPC, for people; not counted.
pub(crate) async fn status(State(context): State<Context>) -> Answer<v1::CniStatus> {
    Ok(Json(context.core.ask(|core| core.cni_status(&v1::CniNetwork::default())).await?))
}

pub(crate) async fn status_of(State(context): State<Context>, bytes: Bytes) -> Answer<v1::CniStatus> {
    let answer = async {
        let request: v1::CniStatusRequest = body(&bytes)?;
        Ok(context.core.ask(move |core| core.cni_status(&request.network)).await?)
    };
    counted(&context, Verb::Status, answer).await
}

pub(crate) async fn report(State(context): State<Context>) -> Answer<v1::CniReport> {
    Ok(Json(context.core.ask(|core| core.cni_report()).await?))
}

pub(crate) async fn timing(State(context): State<Context>) -> Answer<v1::CniTimings> {
    Ok(Json(context.core.ask(|core| core.cni_timings()).await?))
}
