//! An API server in memory, as far as watches need one: lists that stream, then whatever the benchmark says.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::Result;
use serde_json::{Value, json};

/// One kind's objects and who watches them.
#[derive(Default)]
struct Collection {
    /// By `namespace/name`, as they are sent.
    objects: BTreeMap<String, String>,
    watchers: Vec<TcpStream>,
}

#[derive(Default)]
struct State {
    version: u64,
    collections: BTreeMap<String, Collection>,
}

/// See the module's comment. Lives as long as the process.
#[derive(Clone)]
pub(super) struct Server {
    state: Arc<Mutex<State>>,
    address: SocketAddr,
}

fn key(object: &Value) -> String {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    format!("{}/{}", text("namespace"), text("name"))
}

fn event(kind: &str, object: &str) -> String {
    format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n")
}

fn chunk(stream: &mut TcpStream, text: &str) -> std::io::Result<()> {
    let mut whole = format!("{:x}\r\n", text.len()).into_bytes();
    whole.extend_from_slice(text.as_bytes());
    whole.extend_from_slice(b"\r\n");
    stream.write_all(&whole)
}

impl Server {
    /// Serves on a listener that is bound already (in whatever namespace).
    pub(super) fn start(listener: TcpListener) -> Result<Self> {
        let server = Self { state: Arc::default(), address: listener.local_addr()? };
        let accepting = server.clone();
        thread::Builder::new().name("api-server".into()).spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = accepting.clone();
                // A client that breaks off comes again.
                thread::spawn(move || server.connection(stream));
            }
        })?;
        Ok(server)
    }

    /// What a client's configuration file says.
    pub(super) fn kubeconfig(&self) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{}", self.address)}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
        })
    }

    /// Adds or changes an object.
    pub(super) fn put(&self, path: &str, object: Value) {
        self.change(path, object, false);
    }

    /// Removes an object.
    pub(super) fn remove(&self, path: &str, object: Value) {
        self.change(path, object, true);
    }

    fn change(&self, path: &str, mut object: Value, gone: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.version += 1;
        object["metadata"]["resourceVersion"] = state.version.to_string().into();
        let (key, text) = (key(&object), object.to_string());
        let collection = state.collections.entry(path.to_owned()).or_default();
        let known = if gone {
            collection.objects.remove(&key).is_some()
        } else {
            collection.objects.insert(key, text.clone()).is_some()
        };
        let kind = match (gone, known) {
            (true, _) => "DELETED",
            (false, true) => "MODIFIED",
            (false, false) => "ADDED",
        };
        let line = event(kind, &text);
        collection.watchers.retain_mut(|watcher| chunk(watcher, &line).is_ok());
    }

    /// One request: a list that streams and goes on as a watch.
    fn connection(&self, stream: TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream.try_clone().ok()?);
        let mut first = String::new();
        reader.read_line(&mut first).ok()?;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).ok()? == 0 || line == "\r\n" {
                break;
            }
        }
        let target = first.split(' ').nth(1)?;
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let mut stream = stream;
        stream.set_nodelay(true).ok()?;
        if !first.starts_with("GET") || !query.contains("watch=true") {
            let body = "{\"kind\":\"Status\",\"code\":404,\"message\":\"only watches are here\"}";
            let head = format!(
                "HTTP/1.1 404 Not Found\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                body.len()
            );
            return stream.write_all((head + body).as_bytes()).ok();
        }
        stream
            .write_all(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n",
            )
            .ok()?;
        // Nothing changes while the list goes out: the watch begins where it ends.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let version = state.version;
        let collection = state.collections.entry(path.to_owned()).or_default();
        if query.contains("sendInitialEvents") {
            for object in collection.objects.values() {
                chunk(&mut stream, &event("ADDED", object)).ok()?;
            }
            let mark = json!({"metadata": {"resourceVersion": version.to_string(),
                "annotations": {"k8s.io/initial-events-end": "true"}}});
            chunk(&mut stream, &event("BOOKMARK", &mark.to_string())).ok()?;
        }
        collection.watchers.push(stream);
        Some(())
    }
}
