//! An API server in memory, as far as watches need one: lists that stream (or come whole), then whatever the benchmark says.

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
pub(crate) struct Server {
    state: Arc<Mutex<State>>,
    address: SocketAddr,
}

fn key(object: &Value) -> String {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    format!("{}/{}", text("namespace"), text("name"))
}

/// Version and kind of a collection's objects.
fn kind_of(path: &str) -> (&'static str, &'static str) {
    let plural = path.rsplit('/').next().unwrap_or_default();
    match plural {
        "nodes" => ("v1", "Node"),
        "namespaces" => ("v1", "Namespace"),
        "pods" => ("v1", "Pod"),
        "services" => ("v1", "Service"),
        "endpointslices" => ("discovery.k8s.io/v1", "EndpointSlice"),
        "networkpolicies" => ("networking.k8s.io/v1", "NetworkPolicy"),
        "workloadslices" => ("flowloom.io/v1alpha1", "WorkloadSlice"),
        "servicecidrs" => ("networking.k8s.io/v1", "ServiceCIDR"),
        _ => ("v1", "Unknown"),
    }
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

const NOT_HERE: &str = "{\"apiVersion\":\"v1\",\"kind\":\"Status\",\"status\":\"Failure\",\"reason\":\"NotFound\",\"code\":404,\"message\":\"not here\"}";

fn answer(stream: &mut TcpStream, status: &str, body: &str) -> Option<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).ok()
}

impl Server {
    /// Serves on a listener that is bound already (in whatever namespace).
    pub(crate) fn start(listener: TcpListener) -> Result<Self> {
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
    pub(crate) fn kubeconfig(&self) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{}", self.address)}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
        })
    }

    /// Adds or changes an object.
    pub(crate) fn put(&self, path: &str, object: Value) {
        self.change(path, object, false);
    }

    /// Removes an object.
    pub(crate) fn remove(&self, path: &str, object: Value) {
        self.change(path, object, true);
    }

    fn change(&self, path: &str, mut object: Value, gone: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.version += 1;
        object["metadata"]["resourceVersion"] = state.version.to_string().into();
        let (version, kind) = kind_of(path);
        object["apiVersion"] = version.into();
        object["kind"] = kind.into();
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

    /// A list as it stands, or one object that no namespace has.
    fn read(&self, path: &str) -> Option<String> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(collection) = state.collections.get(path) {
            let (api, kind) = kind_of(path);
            let items: Vec<&str> = collection.objects.values().map(String::as_str).collect();
            return Some(format!(
                "{{\"apiVersion\":\"{api}\",\"kind\":\"{kind}List\",\"metadata\":{{\"resourceVersion\":\"{}\"}},\"items\":[{}]}}",
                state.version,
                items.join(",")
            ));
        }
        let (collection, name) = path.rsplit_once('/')?;
        state.collections.get(collection)?.objects.get(&format!("/{name}")).cloned()
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
        if !first.starts_with("GET") {
            return answer(&mut stream, "404 Not Found", NOT_HERE);
        }
        if !query.contains("watch=true") {
            return match self.read(path) {
                Some(body) => answer(&mut stream, "200 OK", &body),
                None => answer(&mut stream, "404 Not Found", NOT_HERE),
            };
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
            // In one piece: a call per object would take as long as a client takes to read it.
            let list: String = collection.objects.values().map(|object| event("ADDED", object)).collect();
            if !list.is_empty() {
                chunk(&mut stream, &list).ok()?;
            }
            let (api, kind) = kind_of(path);
            let mark = json!({"apiVersion": api, "kind": kind, "metadata": {"resourceVersion": version.to_string(),
                "annotations": {"k8s.io/initial-events-end": "true"}}});
            chunk(&mut stream, &event("BOOKMARK", &mark.to_string())).ok()?;
        }
        collection.watchers.push(stream);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    const NODES: &str = "/api/v1/nodes";

    fn get(server: &Server, target: &str, until: &str) -> String {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        write!(stream, "GET {target} HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        let (mut text, mut buffer) = (String::new(), [0; 4096]);
        while !text.contains(until) {
            let n = stream.read(&mut buffer).unwrap();
            assert!(n > 0, "{target} ended with {text}");
            text.push_str(std::str::from_utf8(&buffer[..n]).unwrap());
        }
        text
    }

    #[test]
    fn lists_single_objects_and_watches_tell_kind_and_version() {
        let server = Server::start(TcpListener::bind("127.0.0.1:0").unwrap()).unwrap();
        server.put(NODES, json!({"metadata": {"name": "n1"}}));
        let list = get(&server, NODES, "]}");
        assert!(list.starts_with("HTTP/1.1 200") && list.contains(r#""kind":"NodeList""#), "{list}");
        assert!(list.contains(r#""name":"n1""#), "{list}");
        let one = get(&server, "/api/v1/nodes/n1", "}}");
        assert!(one.starts_with("HTTP/1.1 200") && one.contains(r#""kind":"Node""#), "{one}");
        assert!(get(&server, "/api/v1/nodes/n2", "}").starts_with("HTTP/1.1 404"));
        let watch = get(&server, &format!("{NODES}?watch=true&sendInitialEvents=true"), "BOOKMARK");
        assert!(watch.contains("ADDED") && watch.contains("initial-events-end"), "{watch}");
    }
}
