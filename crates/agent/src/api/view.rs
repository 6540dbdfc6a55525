//! What is: health, status, endpoints, addresses, identities, policies.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::Uri;
use flowloom_api::v1::{self, ErrorCode};
use serde::Deserialize;

use super::{Answer, Context, both, failure, query};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfEndpoint {
    vpc: Option<String>,
    endpoint: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfVpc {
    vpc: Option<String>,
}

pub(crate) async fn health(State(context): State<Context>) -> Answer<v1::Health> {
    Ok(Json(context.core.health()))
}

pub(crate) async fn status(State(context): State<Context>) -> Answer<v1::Status> {
    Ok(Json(context.core.ask(|core| core.status()).await?))
}

pub(crate) async fn endpoints(State(context): State<Context>) -> Answer<v1::EndpointList> {
    Ok(Json(v1::EndpointList { endpoints: context.core.ask(|core| core.endpoint_infos(None)).await? }))
}

pub(crate) async fn endpoint(
    State(context): State<Context>,
    Path((vpc, name)): Path<(String, String)>,
) -> Answer<v1::EndpointInfo> {
    let (found, near) = context
        .core
        .ask(move |core| {
            let key = core.endpoint_meant(&vpc, &name)?;
            let found = core.endpoint_infos(Some(&key)).pop();
            let near = found.is_none().then(|| core.not_here(&vpc, &name, &key));
            Ok::<_, v1::ApiError>((found, near))
        })
        .await??;
    found.map(Json).ok_or_else(|| failure(ErrorCode::NotFound, near.unwrap_or_default()))
}

pub(crate) async fn ipam(State(context): State<Context>) -> Answer<v1::IpamReport> {
    Ok(Json(context.core.ask(|core| core.ipam_report()).await?))
}

pub(crate) async fn kubernetes(State(context): State<Context>) -> Answer<v1::KubernetesStatus> {
    Ok(Json(context.core.ask(|core| core.kubernetes_status()).await?))
}

pub(crate) async fn identities(State(context): State<Context>) -> Answer<v1::IdentityList> {
    Ok(Json(context.core.ask(|core| core.identity_list()).await?))
}

pub(crate) async fn policy_entries(State(context): State<Context>, uri: Uri) -> Answer<v1::PolicyEntryList> {
    let of: OfEndpoint = query(&uri)?;
    let pair = both(of.vpc, of.endpoint)?;
    let list = context.core.ask(move |core| {
        let key = pair.map(|(vpc, name)| core.endpoint_meant(&vpc, &name)).transpose()?;
        core.policy_entries(key.as_ref())
    });
    Ok(Json(list.await??))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HistoryQuery {
    vpc: Option<String>,
    endpoint: Option<String>,
    last: Option<usize>,
}

pub(crate) async fn policy_history(State(context): State<Context>, uri: Uri) -> Answer<v1::PolicyHistory> {
    let of: HistoryQuery = query(&uri)?;
    let pair = both(of.vpc, of.endpoint)?;
    Ok(Json(context.core.ask(move |core| core.policy_history(pair.as_ref(), of.last)).await??))
}

pub(crate) async fn policy_rules(State(context): State<Context>, uri: Uri) -> Answer<v1::RuleList> {
    let of: OfVpc = query(&uri)?;
    Ok(Json(context.core.ask(move |core| core.rule_hits(of.vpc.as_deref())).await??))
}
