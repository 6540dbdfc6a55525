//! A Kubernetes API server in memory: lists (paged and streamed), watches with bookmarks and 410, versions with conflicts, preconditions,
//! merge patches, rights per client, and what goes wrong on the way. It validates nothing: the real one does, in the lab.

mod path;
mod state;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use http::{Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use serde_json::{Value, json};

use path::Target;
use state::{Event, State};

/// A request as RBAC sees it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Asked {
    /// Name given to [`ApiServer::client`].
    pub client: String,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`.
    pub verb: &'static str,
    /// API group; empty for core.
    pub group: String,
    /// Plural, with the subresource (`nodes/status`).
    pub resource: String,
    /// Namespace; empty for none.
    pub namespace: String,
    /// Name; empty for none.
    pub name: String,
}

impl Asked {
    /// Whether it changes anything.
    #[must_use]
    pub fn writes(&self) -> bool {
        !matches!(self.verb, "get" | "list" | "watch")
    }
}

/// What goes wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// This status; nothing is done.
    Refuse(u16),
    /// It is done after a while.
    Slow(Duration),
    /// It is done, and the answer never comes.
    Swallow,
    /// The answer (a watch, too) ends in the middle of a line after so many bytes.
    Cut(usize),
    /// Waits for [`ApiServer::thaw`], then does it: a client that was paused after it asked and before it was served.
    Freeze,
}

type Rule = Box<dyn FnMut(&Asked) -> Option<Trouble> + Send>;
type Rights = Arc<dyn Fn(&Asked) -> bool + Send + Sync>;
type Body = UnsyncBoxBody<Bytes, std::io::Error>;

#[derive(Default)]
struct Shared {
    state: State,
    asked: Vec<Asked>,
    refused: Vec<Asked>,
    rules: Vec<Rule>,
    frozen: Vec<futures::channel::oneshot::Sender<()>>,
}

/// The server. Clones are the same server.
#[derive(Clone, Default)]
pub struct ApiServer {
    shared: Arc<Mutex<Shared>>,
}

impl std::fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiServer").finish_non_exhaustive()
    }
}

impl ApiServer {
    /// Empty.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// A client that may do what `rights` says.
    pub fn client(
        &self,
        name: &str,
        rights: impl Fn(&Asked) -> bool + Send + Sync + 'static,
    ) -> kube::Client {
        let connection = Connection { server: self.clone(), name: name.to_owned(), rights: Arc::new(rights) };
        kube::Client::new(connection, "default")
    }

    /// Creates or replaces an object as an administrator would. `path` is its collection (`/api/v1/namespaces/shop/pods`).
    ///
    /// # Panics
    /// When the path is no collection or the object has no name.
    pub fn put(&self, path: &str, object: Value) {
        let target = Target::parse(path).unwrap_or_else(|| panic!("{path} is no path"));
        self.lock().state.put(&target.collection(), &target.namespace, object);
    }

    /// Deletes an object; whether it was there.
    ///
    /// # Panics
    /// When the path is no path.
    pub fn delete(&self, path: &str) -> bool {
        let target = Target::parse(path).unwrap_or_else(|| panic!("{path} is no path"));
        self.lock().state.remove(&target.collection(), &target.namespace, &target.name).is_some()
    }

    /// An object.
    #[must_use]
    pub fn object(&self, path: &str) -> Option<Value> {
        let target = Target::parse(path)?;
        self.lock().state.object(&target.collection(), &target.namespace, &target.name).cloned()
    }

    /// All objects of a collection (`/api/v1/pods`: of all namespaces), by namespace and name.
    #[must_use]
    pub fn objects(&self, path: &str) -> Vec<Value> {
        let Some(target) = Target::parse(path) else { return Vec::new() };
        self.lock().state.list(&target.collection(), &target.namespace).cloned().collect()
    }

    /// Every request so far, in the order of arrival.
    #[must_use]
    pub fn asked(&self) -> Vec<Asked> {
        self.lock().asked.clone()
    }

    /// Requests that a client had no right to.
    #[must_use]
    pub fn refused(&self) -> Vec<Asked> {
        self.lock().refused.clone()
    }

    /// Forgets history: watches of older versions get 410.
    pub fn forget(&self) {
        self.lock().state.forget();
    }

    /// Ends every watch.
    pub fn end_watches(&self) {
        self.lock().state.end_watches();
    }

    /// Sends every watch an event that no client can use (`ERROR` with this code, or any type of event).
    pub fn say(&self, kind: &str, object: &Value) {
        self.lock().state.say(kind, object);
    }

    /// From now on, every request goes through `rule` before anything else; the first rule with an answer decides.
    pub fn trouble(&self, rule: impl FnMut(&Asked) -> Option<Trouble> + Send + 'static) {
        self.lock().rules.push(Box::new(rule));
    }

    /// No trouble any more.
    pub fn calm(&self) {
        self.lock().rules.clear();
    }

    /// Lets requests go on that [`Trouble::Freeze`] holds.
    pub fn thaw(&self) {
        for waiting in self.lock().frozen.drain(..) {
            // A client that gave up has nothing to be told.
            let _ = waiting.send(());
        }
    }

    async fn serve(
        self,
        client: String,
        rights: Rights,
        request: Request<kube::client::Body>,
    ) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let body = match body.collect().await {
            Ok(body) => body.to_bytes(),
            Err(e) => return status(400, "BadRequest", &e.to_string()),
        };
        let query: Vec<(String, String)> = path::query(parts.uri.query().unwrap_or_default());
        let Some(target) = Target::parse(parts.uri.path()) else {
            return status(404, "NotFound", "no such path");
        };
        let has = |key: &str, value: &str| query.iter().any(|(k, v)| k == key && v == value);
        let watching = has("watch", "true") || has("watch", "1");
        let Some(verb) = verb(&parts.method, &target, watching) else {
            return status(405, "MethodNotAllowed", parts.method.as_str());
        };
        let asked = Asked {
            client,
            verb,
            group: target.group.clone(),
            resource: target.resource(),
            namespace: target.namespace.clone(),
            name: target.name.clone(),
        };
        let (trouble, frozen) = {
            let mut shared = self.lock();
            shared.asked.push(asked.clone());
            if !rights(&asked) {
                shared.refused.push(asked.clone());
                return status(403, "Forbidden", &format!("{asked:?} is not allowed"));
            }
            let trouble = shared.rules.iter_mut().find_map(|r| r(&asked));
            let frozen = (trouble == Some(Trouble::Freeze)).then(|| {
                let (thaw, frozen) = futures::channel::oneshot::channel();
                shared.frozen.push(thaw);
                frozen
            });
            (trouble, frozen)
        };
        match trouble {
            Some(Trouble::Refuse(code)) => return status(code, "Trouble", "as the test wants it"),
            Some(Trouble::Slow(pause)) => tokio::time::sleep(pause).await,
            _ => {}
        }
        if let Some(frozen) = frozen {
            // Dropped by a server that goes away: the request dies with it.
            let _ = frozen.await;
        }
        let answer =
            if watching { self.watch(&target, &query) } else { self.one(verb, &target, &query, &body) };
        match trouble {
            Some(Trouble::Swallow) => std::future::pending().await,
            Some(Trouble::Cut(most)) => answer.map(|b| cut(b, most)),
            _ => answer,
        }
    }

    fn watch(&self, target: &Target, query: &[(String, String)]) -> Response<Body> {
        let value =
            |key: &str| query.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str()).unwrap_or_default();
        let since = value("resourceVersion").parse().unwrap_or(0);
        let from_list = value("sendInitialEvents") == "true";
        let selector = value("fieldSelector").to_owned();
        let mut shared = self.lock();
        let Some(events) =
            shared.state.watch(&target.collection(), &target.namespace, &selector, since, from_list)
        else {
            return status(410, "Expired", "too old resource version");
        };
        let lines = events.map(|e: Event| Ok(Frame::data(Bytes::from(e.line))));
        Response::new(StreamBody::new(lines).boxed_unsync())
    }

    fn one(&self, verb: &str, target: &Target, query: &[(String, String)], body: &[u8]) -> Response<Body> {
        let value =
            |key: &str| query.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str()).unwrap_or_default();
        let sent: Value = if body.is_empty() {
            Value::Null
        } else {
            match serde_json::from_slice(body) {
                Ok(sent) => sent,
                Err(e) => return status(400, "BadRequest", &e.to_string()),
            }
        };
        let mut shared = self.lock();
        let state = &mut shared.state;
        let collection = target.collection();
        let result = match verb {
            "list" => {
                Ok(state.page(&collection, target, value("limit"), value("continue"), value("fieldSelector")))
            }
            "get" => state.object(&collection, &target.namespace, &target.name).cloned().ok_or(404),
            "create" => state.create(&collection, &target.namespace, sent),
            "update" => state.update(&collection, target, sent),
            "patch" => state.patch(&collection, target, &sent),
            _ => state.delete(&collection, target, &sent),
        };
        match result {
            Ok(object) => {
                let code = if verb == "create" { StatusCode::CREATED } else { StatusCode::OK };
                let mut response = Response::new(full(object.to_string()));
                *response.status_mut() = code;
                response
            }
            Err(404) => {
                status(404, "NotFound", &format!("{} {} is not there", target.resource(), target.name))
            }
            Err(409) if verb == "create" => status(409, "AlreadyExists", &target.resource()),
            Err(409) => status(409, "Conflict", "the object has been modified"),
            Err(code) => status(code, "Invalid", "what was sent makes no sense"),
        }
    }
}

fn verb(method: &Method, target: &Target, watching: bool) -> Option<&'static str> {
    let named = !target.name.is_empty();
    match (method.as_str(), named) {
        ("GET", false) if watching => Some("watch"),
        ("GET", false) => Some("list"),
        ("GET", true) => Some("get"),
        ("POST", false) => Some("create"),
        ("PUT", true) => Some("update"),
        ("PATCH", true) => Some("patch"),
        ("DELETE", true) => Some("delete"),
        _ => None,
    }
}

fn full(text: String) -> Body {
    Full::new(Bytes::from(text)).map_err(|never: Infallible| match never {}).boxed_unsync()
}

fn status(code: u16, reason: &str, message: &str) -> Response<Body> {
    let text = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code,
        "reason": reason, "message": message});
    let mut response = Response::new(full(text.to_string()));
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response
}

/// The first bytes, then the end.
fn cut(body: Body, most: usize) -> Body {
    let frames = body.into_data_stream().scan(most, |left, chunk| {
        let out = match chunk {
            Ok(chunk) if *left > 0 => {
                let part = chunk.slice(..chunk.len().min(*left));
                *left -= part.len();
                Some(Ok(Frame::data(part)))
            }
            _ => None,
        };
        futures::future::ready(out)
    });
    StreamBody::new(frames).boxed_unsync()
}

#[derive(Clone)]
struct Connection {
    server: ApiServer,
    name: String,
    rights: Rights,
}

impl tower_service::Service<Request<kube::client::Body>> for Connection {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<kube::client::Body>) -> Self::Future {
        let Self { server, name, rights } = self.clone();
        Box::pin(async move { Ok(server.serve(name, rights, request).await) })
    }
}

/// Distinct (client, verb, group, resource) of a list of requests.
#[must_use]
pub fn rights_used(asked: &[Asked]) -> BTreeSet<(String, &'static str, String, String)> {
    asked.iter().map(|a| (a.client.clone(), a.verb, a.group.clone(), a.resource.clone())).collect()
}
