//! The HTTP API on a Unix socket: bounded in connections, header, body and time; one slow client stalls nobody.

mod cni;
mod observe;
mod query;
mod service;
mod stream;
mod view;

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use flowloom_api::v1::{ApiError, ErrorBody, ErrorCode, route};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, watch};

use crate::config;
use crate::core::Handle;

/// Largest request head.
const HEAD_BYTES: usize = 16 * 1024;

/// Largest list of valid attachments: the plugin reads 1 MiB.
const GC_BYTES: usize = 2 << 20;

/// What every handler gets.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) core: Handle,
    pub(crate) limits: Arc<config::Api>,
}

/// An error as a response.
pub(crate) struct Failure(pub(crate) ApiError);

impl From<ApiError> for Failure {
    fn from(e: ApiError) -> Self {
        Self(e)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.0.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, axum::Json(ErrorBody { error: self.0 })).into_response()
    }
}

/// What handlers return.
pub(crate) type Answer<T> = Result<axum::Json<T>, Failure>;

pub(crate) fn failure(code: ErrorCode, message: impl Into<String>) -> Failure {
    Failure(ApiError::new(code, message))
}

fn router(context: Context) -> Router {
    Router::new()
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
        .route(route::CNI_TIMING, get(cni::timing))
        .fallback(|request: Request| async move {
            failure(ErrorCode::UnknownPath, format!("{} is not a path of this API", request.uri().path()))
        })
        .method_not_allowed_fallback(|request: Request| async move {
            let message = format!("{} does not take {}", request.uri().path(), request.method());
            failure(ErrorCode::MethodNotAllowed, message)
        })
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

/// The bound socket; its file is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Best effort: the next agent replaces a dead socket.
        let _ = fs::remove_file(&self.path);
    }
}

/// Binds the socket with mode 0600. A socket that somebody answers on is left alone.
///
/// # Errors
/// When the path is taken by a live socket or another file, or cannot be made.
pub(crate) fn bind(path: &Path) -> io::Result<Socket> {
    let at = |e: io::Error| io::Error::new(e.kind(), format!("socket {}: {e}", path.display()));
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(at)?;
    }
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(at(e)),
        Ok(m) if !m.file_type().is_socket() => {
            return Err(at(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "a file that is no socket is in the way",
            )));
        }
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => {
                return Err(at(io::Error::new(io::ErrorKind::AddrInUse, "another process listens on it")));
            }
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(at)?,
            Err(e) => return Err(at(e)),
        },
    }
    // Under another name first, so that nobody connects before the mode is right.
    let hidden = path.with_extension(format!("{}.tmp", std::process::id()));
    let _ = fs::remove_file(&hidden);
    let listener = std::os::unix::net::UnixListener::bind(&hidden).map_err(at)?;
    let ready = fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600))
        .and_then(|()| fs::rename(&hidden, path))
        .and_then(|()| listener.set_nonblocking(true));
    if let Err(e) = ready {
        let _ = fs::remove_file(&hidden);
        return Err(at(e));
    }
    Ok(Socket { listener: UnixListener::from_std(listener).map_err(at)?, path: path.to_owned() })
}

/// Serves until `stop` turns true.
pub(crate) async fn serve(
    socket: Socket,
    core: Handle,
    limits: config::Api,
    mut stop: watch::Receiver<bool>,
) {
    let slots = Arc::new(Semaphore::new(limits.connections));
    let patience = Duration::from_secs(limits.header_seconds);
    let service = TowerToHyperService::new(router(Context { core, limits: Arc::new(limits) }));
    // Only root and the agent's own user may speak, whatever the file's mode became.
    let own = nix::unistd::geteuid().as_raw();
    loop {
        let slot = tokio::select! {
            slot = slots.clone().acquire_owned() => slot,
            _ = stop.wait_for(|s| *s) => return,
        };
        let accepted = tokio::select! {
            accepted = socket.listener.accept() => accepted,
            _ = stop.wait_for(|s| *s) => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(e) => {
                // Out of descriptors: the connections that end give some back.
                tracing::warn!(error = %e, "the API socket refuses to accept");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        match stream.peer_cred() {
            Ok(peer) if peer.uid() == 0 || peer.uid() == own => {}
            other => {
                tracing::warn!(peer = ?other, "refused an API client of another user");
                continue;
            }
        }
        let service = service.clone();
        tokio::spawn(async move {
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(patience)
                .max_buf_size(HEAD_BYTES)
                .serve_connection(TokioIo::new(stream), service);
            if let Err(e) = connection.await {
                tracing::debug!(error = %e, "API connection ended");
            }
            drop(slot);
        });
    }
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

/// `vpc` and `endpoint` of a query: both or neither.
pub(crate) fn both(
    vpc: Option<String>,
    endpoint: Option<String>,
) -> Result<Option<flowloom_model::EndpointKey>, Failure> {
    match (vpc, endpoint) {
        (None, None) => Ok(None),
        (Some(vpc), Some(name)) => format!("{vpc}/{name}").parse().map(Some).map_err(invalid),
        _ => Err(invalid("vpc and endpoint go together: an endpoint's name is unique in its vpc only")),
    }
}

#[cfg(test)]
mod tests;
