//! The HTTP API on a Unix socket: bounded in connections, header, body and time; one slow client stalls nobody.

mod cni;
mod hold;
mod observe;
mod query;
mod service;
mod stream;
mod view;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use flowloom_api::v1::{ErrorCode, route};
pub(crate) use flowloom_serve::{Answer, Failure, Socket, bind, failure};
use flowloom_serve::{Limits, with_fallbacks};
use tokio::sync::watch;

use crate::config;
use crate::core::Handle;

/// Largest list of valid attachments: the plugin reads 1 MiB.
const GC_BYTES: usize = 2 << 20;

/// What every handler gets.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) core: Handle,
    pub(crate) limits: Arc<config::Api>,
}

fn router(context: Context) -> Router {
    let routes = Router::new()
        .route(route::HEALTH, get(view::health))
        .route(route::STATUS, get(view::status))
        .route(route::ENDPOINTS, get(view::endpoints))
        .route("/v1/endpoints/{vpc}/{name}", get(view::endpoint))
        .route(route::SERVICES, get(service::list))
        .route("/v1/services/{vpc}/{name}", get(service::one))
        .route("/v1/services/{vpc}/{name}/explain", get(service::explain))
        .route(route::IPAM, get(view::ipam))
        .route(route::KUBERNETES, get(view::kubernetes))
        .route(route::IDENTITIES, get(view::identities))
        .route(route::POLICY_ENTRIES, get(view::policy_entries))
        .route(route::POLICY_RULES, get(view::policy_rules))
        .route(route::POLICY_EXPLAIN, post(query::explain))
        .route(route::POLICY_WAIT, get(query::wait))
        .route(route::POLICY_QUARANTINE, post(hold::quarantine))
        .route(route::POLICY_FREEZE, post(hold::freeze))
        .route(route::POLICY_ROLLBACK, post(hold::rollback))
        .route(route::POLICY_RELEASE, post(hold::release))
        .route(route::POLICY_HISTORY, get(view::policy_history))
        .route(route::CONNTRACK, get(observe::conntrack).delete(observe::flush))
        .route(route::DROPS, get(observe::drops))
        .route(route::EVENTS, get(stream::events))
        .route(route::TRACE, post(query::trace))
        .route(route::CNI_ADD, post(cni::add))
        .route(route::CNI_CHECK, post(cni::check))
        .route(route::CNI_DEL, post(cni::del))
        .route(route::CNI_GC, post(cni::gc))
        .route(route::CNI_STATUS, get(cni::status).post(cni::status_of))
        .route(route::CNI, get(cni::report))
        .route(route::CNI_TIMING, get(cni::timing));
    with_fallbacks(routes)
        .layer(middleware::from_fn_with_state(context.clone(), read_body))
        .with_state(context)
}

/// Reads the body before anything else happens, within limits of size and time.
async fn read_body(State(context): State<Context>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let most = match parts.uri.path() {
        route::CNI_GC => context.limits.body_bytes.max(GC_BYTES),
        _ => context.limits.body_bytes,
    };
    let patience = Duration::from_secs(context.limits.header_seconds);
    let announced =
        parts.headers.get(axum::http::header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
    if announced.is_some_and(|n: u64| n > most as u64) {
        return failure(ErrorCode::TooLarge, format!("the body is larger than {most} bytes")).into_response();
    }
    match tokio::time::timeout(patience, to_bytes(body, most)).await {
        Ok(Ok(bytes)) => next.run(Request::from_parts(parts, Body::from(bytes))).await,
        Ok(Err(_)) => {
            failure(ErrorCode::TooLarge, format!("the body is larger than {most} bytes")).into_response()
        }
        Err(_) => failure(ErrorCode::InvalidRequest, "the body did not arrive in time").into_response(),
    }
}

/// Serves until `stop` turns true.
pub(crate) async fn serve(socket: Socket, core: Handle, limits: config::Api, stop: watch::Receiver<bool>) {
    let bounds =
        Limits { connections: limits.connections, header: Duration::from_secs(limits.header_seconds) };
    let router = router(Context { core, limits: Arc::new(limits) });
    flowloom_serve::serve(socket, router, bounds, stop).await;
}

/// A query or body that could not be parsed.
pub(crate) fn invalid(e: impl std::fmt::Display) -> Failure {
    failure(ErrorCode::InvalidRequest, e.to_string())
}

/// Parses a query by name of its type.
pub(crate) fn query<T: serde::de::DeserializeOwned>(uri: &axum::http::Uri) -> Result<T, Failure> {
    axum::extract::Query::<T>::try_from_uri(uri).map(|q| q.0).map_err(|e| invalid(e.body_text()))
}

/// Parses a JSON body.
pub(crate) fn body<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(bytes).map_err(|e| invalid(format!("the body is not what this path takes: {e}")))
}

/// `vpc` (or namespace) and `endpoint` of a query: both or neither.
pub(crate) fn both(
    vpc: Option<String>,
    endpoint: Option<String>,
) -> Result<Option<(String, String)>, Failure> {
    match (vpc, endpoint) {
        (None, None) => Ok(None),
        (Some(vpc), Some(name)) => Ok(Some((vpc, name))),
        _ => Err(invalid("vpc and endpoint go together: an endpoint's name is unique in its vpc only")),
    }
}

#[cfg(test)]
mod tests;
