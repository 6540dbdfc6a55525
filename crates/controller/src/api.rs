//! The HTTP API on the Unix socket; metrics and probes on the listener.

use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use flowloom_api::v1::{ControllerHealth, ControllerStatus, ErrorCode, route};
use flowloom_serve::{Answer, failure, with_fallbacks};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::core::Question;
use crate::metrics::Metrics;

/// The core answers between two events.
const PATIENCE: Duration = Duration::from_secs(5);

type Ask = mpsc::Sender<Question>;

async fn ask<T: Send>(core: Ask, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Answer<T> {
    let (to, answer) = oneshot::channel();
    let both = async {
        core.send(question(to)).await.ok()?;
        answer.await.ok()
    };
    match timeout(PATIENCE, both).await {
        Ok(Some(answer)) => Ok(axum::Json(answer)),
        Ok(None) => Err(failure(ErrorCode::NotReady, "the controller is stopping")),
        Err(_) => Err(failure(ErrorCode::Timeout, "the controller is busy")),
    }
}

async fn health(State(core): State<Ask>) -> Answer<ControllerHealth> {
    ask(core, Question::Health).await
}

async fn status(State(core): State<Ask>) -> Answer<ControllerStatus> {
    ask(core, Question::Status).await
}

/// Of the Unix socket.
pub(crate) fn router(core: Ask) -> Router {
    with_fallbacks(Router::new().route(route::HEALTH, get(health)).route(route::STATUS, get(status)))
        .with_state(core)
}

/// Of the listener: nothing that names a workload.
pub(crate) fn metrics_router(core: Ask, metrics: Metrics) -> Router {
    let ready = |State(core): State<Ask>| async move {
        match ask(core, Question::Health).await {
            Ok(health) if health.ready => (StatusCode::OK, "ready\n".to_owned()),
            Ok(health) => {
                (StatusCode::SERVICE_UNAVAILABLE, format!("waits for {}\n", health.waiting_for.join(", ")))
            }
            Err(e) => (StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", e.0)),
        }
    };
    let alive = |State(core): State<Ask>| async move {
        match ask(core, Question::Health).await {
            Ok(_) => (StatusCode::OK, "ok\n".to_owned()),
            Err(e) => (StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", e.0)),
        }
    };
    let text = move || {
        let metrics = metrics.clone();
        async move {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(CONTENT_TYPE, kind)], metrics.text()).into_response()
        }
    };
    with_fallbacks(
        Router::new().route("/metrics", get(text)).route("/healthz", get(alive)).route("/readyz", get(ready)),
    )
    .with_state(core)
}
