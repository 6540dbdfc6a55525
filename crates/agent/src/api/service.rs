//! Services.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::Uri;
use flowloom_api::v1;
use serde::Deserialize;

use super::{Answer, Context, query};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfVpc {
    vpc: Option<String>,
}

pub(crate) async fn list(State(context): State<Context>, uri: Uri) -> Answer<v1::ServiceList> {
    let of: OfVpc = query(&uri)?;
    Ok(Json(context.core.ask(move |core| core.service_list(of.vpc.as_deref())).await?))
}

pub(crate) async fn one(
    State(context): State<Context>,
    Path((vpc, name)): Path<(String, String)>,
) -> Answer<v1::ServiceInfo> {
    Ok(Json(context.core.ask(move |core| core.service(&vpc, &name)).await??))
}

pub(crate) async fn explain(
    State(context): State<Context>,
    Path((vpc, name)): Path<(String, String)>,
) -> Answer<v1::ServiceExplanation> {
    Ok(Json(context.core.ask(move |core| core.service_explanation(&vpc, &name)).await??))
}
