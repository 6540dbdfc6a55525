//! Connections and drops.

use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use flowloom_api::v1;

use super::{Answer, Context, query};
use crate::connections;

pub(crate) async fn conntrack(State(context): State<Context>, uri: Uri) -> Answer<v1::ConntrackList> {
    let filter: v1::ConntrackFilter = query(&uri)?;
    Ok(Json(connections::list(&context.core, filter).await?))
}

pub(crate) async fn flush(State(context): State<Context>, uri: Uri) -> Answer<v1::ConntrackFlushed> {
    let filter: v1::ConntrackFilter = query(&uri)?;
    Ok(Json(connections::flush(&context.core, filter).await?))
}

pub(crate) async fn drops(State(context): State<Context>, uri: Uri) -> Answer<v1::DropList> {
    let filter: v1::DropFilter = query(&uri)?;
    Ok(Json(context.core.ask(move |core| core.drop_list(&filter)).await??))
}
