//! What load balancers and people ask a node over HTTP: whether it serves, who serves Services here, and how many backends of a Service
//! with external traffic policy Local run here (its health-check node port).
//!
//! Shapes and codes are those that clients of such ports read (Kubernetes, `Service.spec.healthCheckNodePort`).

use std::collections::BTreeMap;
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use flowloom_model::{ServiceName, Timestamp, VpcName};
use flowloom_serve::{Limits, listen, serve_tcp, with_fallbacks};
use serde_json::json;
use tokio::sync::watch;

use crate::config::Kubernetes;
use crate::core::{Core, Handle};

/// Of each listener.
const LIMITS: Limits = Limits { connections: 64, header: Duration::from_secs(5) };
/// A core that does not answer for this long is not well.
const ANSWER: Duration = Duration::from_secs(2);
/// Ports follow the plan this often at most.
const PACE: Duration = Duration::from_millis(200);
/// Between attempts to get a port that another process has.
const AGAIN: Duration = Duration::from_secs(5);
/// Read by balancers that weigh nodes.
const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");

/// A Service's local backends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Check {
    /// Full name of the Service.
    service: String,
    namespace: String,
    name: String,
    local: usize,
}

type Checks = BTreeMap<u16, Check>;

/// A health-check port that another process has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unserved {
    /// Full name of the Service.
    pub(crate) service: String,
    /// For people.
    pub(crate) message: String,
}

impl Core {
    /// Whether the maps hold what they are to hold. An object that is refused alone changes nothing here.
    fn in_sync(&self) -> bool {
        self.applied_generation > 0 && self.sources_spoke() && self.refused.is_some()
    }

    /// What each health-check port answers, of the plan in force.
    fn checks(&self) -> Checks {
        let check = |(vpc, name, port, local): (&VpcName, &ServiceName, u16, usize)| {
            let service = format!("{vpc}/{name}");
            let (namespace, name) = name.as_str().split_once('.').unwrap_or(("", name.as_str()));
            (port, Check { service, namespace: namespace.to_owned(), name: name.to_owned(), local })
        };
        self.plan.services.health_checks().map(check).collect()
    }
}

/// Whether this node serves.
#[derive(Clone)]
struct Node {
    core: Handle,
    /// When it was last known to.
    well: Arc<Mutex<Option<SystemTime>>>,
}

struct Standing {
    well: bool,
    /// The cluster is about to remove it.
    leaving: bool,
}

impl Node {
    async fn standing(&self) -> Standing {
        let asked = self.core.ask(|core| Standing {
            well: core.in_sync(),
            leaving: core.kubernetes.as_ref().is_some_and(|k| k.leaving),
        });
        let standing = match tokio::time::timeout(ANSWER, asked).await {
            Ok(Ok(standing)) => standing,
            Ok(Err(_)) | Err(_) => Standing { well: false, leaving: false },
        };
        if standing.well {
            *self.well.lock().unwrap_or_else(PoisonError::into_inner) = Some(SystemTime::now());
        }
        standing
    }

    async fn answer(&self, alive: bool) -> Response {
        let Standing { well, leaving } = self.standing().await;
        let last = *self.well.lock().unwrap_or_else(PoisonError::into_inner);
        let mut body = json!({ "lastUpdated": last.map(rfc3339), "currentTime": rfc3339(SystemTime::now()) });
        if !alive {
            body["nodeEligible"] = json!(!leaving);
        }
        answer(well && (alive || !leaving), None, &body)
    }
}

fn rfc3339(at: SystemTime) -> String {
    Timestamp(at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()).to_string()
}

/// Whoever asks opens a connection each time: it is given back at once.
fn answer(well: bool, weight: Option<usize>, body: &serde_json::Value) -> Response {
    let status = if well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut response = (
        status,
        [(header::CONNECTION, "close"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")],
        axum::Json(body),
    )
        .into_response();
    if let Some(weight) = weight {
        response.headers_mut().insert(WEIGHT, weight.into());
    }
    response
}

fn node_router(node: Node) -> Router {
    let routes = Router::new()
        .route("/healthz", get(|State(node): State<Node>| async move { node.answer(false).await }))
        .route("/livez", get(|State(node): State<Node>| async move { node.answer(true).await }));
    with_fallbacks(routes).with_state(node)
}

fn mode_router() -> Router {
    with_fallbacks(Router::new().route("/proxyMode", get(|| async { "flowloom" })))
}

/// Of one port; balancers are told any path.
fn check_router(node: Node, check: watch::Receiver<Check>) -> Router {
    Router::new().fallback(move |_: Request| {
        let (node, check) = (node.clone(), check.clone());
        async move {
            let well = node.standing().await.well;
            let Check { namespace, name, local, .. } = check.borrow().clone();
            let service = json!({ "namespace": namespace, "name": name });
            let body = json!({ "service": service, "localEndpoints": local, "serviceProxyHealthy": well });
            answer(well && local > 0, Some(local), &body)
        }
    })
}

/// A port that is served.
struct Port {
    check: watch::Sender<Check>,
    /// Ends it when dropped.
    _stop: watch::Sender<bool>,
}

/// Keeps every listener until `stop` turns true.
pub(crate) async fn run(config: Kubernetes, core: Handle, stop: watch::Receiver<bool>) {
    let node = Node { core: core.clone(), well: Arc::default() };
    match config.listeners() {
        Ok([health, mode]) => {
            let (health_router, mode_router) = (node_router(node.clone()), mode_router());
            for ((key, at), router) in [(health, health_router), (mode, mode_router)] {
                if let Some(at) = at {
                    tokio::spawn(keep(key, at, router, stop.clone()));
                }
            }
        }
        // The configuration was checked when it was read.
        Err(e) => tracing::error!(error = %e, "no health listener"),
    }
    follow(core, node, stop).await;
}

/// One listener; whoever has its port may give it back.
async fn keep(key: &'static str, at: SocketAddr, router: Router, mut stop: watch::Receiver<bool>) {
    let mut told = false;
    let listener = loop {
        match listen(at) {
            Ok(listener) => break listener,
            Err(e) if !told => {
                tracing::error!(error = %e, key, "a health listener waits; does another process serve Services here?");
                told = true;
            }
            Err(_) => {}
        }
        tokio::select! {
            () = tokio::time::sleep(AGAIN) => {}
            _ = stop.wait_for(|s| *s) => return,
        }
    };
    serve_tcp(listener, router, LIMITS, stop).await;
}

/// Health-check ports come and go with their Services.
async fn follow(core: Handle, node: Node, mut stop: watch::Receiver<bool>) {
    let mut passes = core.passes();
    let mut ports: BTreeMap<u16, Port> = BTreeMap::new();
    let mut refused: BTreeMap<u16, (Instant, Unserved)> = BTreeMap::new();
    let mut told = Vec::new();
    loop {
        passes.borrow_and_update();
        // A core that is gone has nothing to say any more.
        let Ok(checks) = core.ask(|core| core.checks()).await else { return };
        ports.retain(|port, _| checks.contains_key(port));
        refused.retain(|port, _| checks.contains_key(port));
        for (number, check) in checks {
            if let Some(port) = ports.get(&number) {
                port.check.send_if_modified(|old| {
                    let changed = *old != check;
                    *old = check;
                    changed
                });
                continue;
            }
            if refused.get(&number).is_some_and(|(at, _)| at.elapsed() < AGAIN) {
                continue;
            }
            let service = check.service.clone();
            match open(number, check, &node) {
                Ok(port) => {
                    refused.remove(&number);
                    ports.insert(number, port);
                }
                Err(e) => {
                    let message = format!("health-check port {number} is not served until it is free: {e}");
                    let unserved = Unserved { service, message };
                    if refused.insert(number, (Instant::now(), unserved)).is_none() {
                        tracing::error!(error = %e, "a Service's health-check port is not served: another process has it");
                    }
                }
            }
        }
        let unserved: Vec<Unserved> = refused.values().map(|(_, unserved)| unserved.clone()).collect();
        if unserved != told {
            told.clone_from(&unserved);
            core.tell(|core| core.unserved = unserved);
        }
        let again = if refused.is_empty() { Duration::from_secs(3600) } else { AGAIN };
        tokio::select! {
            changed = passes.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(again) => {}
            _ = stop.wait_for(|s| *s) => return,
        }
        tokio::select! {
            () = tokio::time::sleep(PACE) => {}
            _ = stop.wait_for(|s| *s) => return,
        }
    }
}

fn open(port: u16, check: Check, node: &Node) -> std::io::Result<Port> {
    let listener = listen((Ipv6Addr::UNSPECIFIED, port).into())?;
    let (check, shown) = watch::channel(check);
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(serve_tcp(listener, check_router(node.clone(), shown), LIMITS, stopped));
    Ok(Port { check, _stop: stop })
}

#[cfg(test)]
mod tests;
