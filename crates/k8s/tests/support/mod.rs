//! An API server that lists and watches, and misbehaves when it is told to.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flowloom_k8s::{Client, ClientOptions};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What a request meets instead of an answer.
#[derive(Clone, Debug)]
pub(crate) enum Trouble {
    /// An HTTP error with a Status; the last is `retryAfterSeconds`.
    Status(u16, u64),
    /// A watch answers this many events, then half of the next, then the connection ends.
    CutAfter(usize),
    /// A watch answers with an ERROR event of this code.
    ErrorEvent(u16),
    /// A watch says what there is, then a bookmark of this version, and ends.
    Bookmark(u64),
}

#[derive(Debug, Default)]
struct State {
    version: u64,
    /// By collection path and `namespace/name`.
    objects: BTreeMap<String, BTreeMap<String, Value>>,
    /// Path, version, type, object.
    history: Vec<(String, u64, &'static str, Value)>,
    /// Versions before this one are forgotten.
    oldest: u64,
    trouble: BTreeMap<String, VecDeque<Trouble>>,
    requests: Vec<String>,
    streams_lists: bool,
    page: usize,
}

#[derive(Clone)]
pub(crate) struct Server {
    state: Arc<Mutex<State>>,
    changed: watch::Sender<u64>,
    /// Raised to end every watch.
    epoch: watch::Sender<u64>,
    port: u16,
}

impl Server {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let state = State { streams_lists: true, page: 2, version: 10, ..State::default() };
        let server = Self {
            state: Arc::new(Mutex::new(state)),
            changed: watch::Sender::new(0),
            epoch: watch::Sender::new(0),
            port: listener.local_addr().unwrap().port(),
        };
        let accepting = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = accepting.clone();
                tokio::spawn(async move { server.connection(stream).await });
            }
        });
        server
    }

    pub(crate) async fn client(&self) -> Client {
        let dir = tempfile::tempdir().unwrap();
        let path: PathBuf = dir.path().join("kubeconfig");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://127.0.0.1:{}", self.port)}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
        });
        std::fs::write(&path, config.to_string()).unwrap();
        Client::new(&ClientOptions { kubeconfig: Some(path), qps: 1000, burst: 1000 }).await.unwrap()
    }

    pub(crate) fn without_streaming_lists(&self) {
        self.state.lock().unwrap().streams_lists = false;
    }

    pub(crate) fn put(&self, path: &str, mut object: Value) {
        let mut state = self.state.lock().unwrap();
        state.version += 1;
        let version = state.version;
        object["metadata"]["resourceVersion"] = version.to_string().into();
        let key = format!("{}/{}", object["metadata"]["namespace"], object["metadata"]["name"]);
        let known = state.objects.entry(path.to_owned()).or_default().insert(key, object.clone());
        let kind = if known.is_some() { "MODIFIED" } else { "ADDED" };
        state.history.push((path.to_owned(), version, kind, object));
        self.changed.send_replace(version);
    }

    pub(crate) fn remove(&self, path: &str, namespace: &str, name: &str) {
        let mut state = self.state.lock().unwrap();
        state.version += 1;
        let version = state.version;
        let key = if namespace.is_empty() {
            format!("null/\"{name}\"")
        } else {
            format!("\"{namespace}\"/\"{name}\"")
        };
        let mut object = state.objects.entry(path.to_owned()).or_default().remove(&key).unwrap();
        object["metadata"]["resourceVersion"] = version.to_string().into();
        state.history.push((path.to_owned(), version, "DELETED", object));
        self.changed.send_replace(version);
    }

    /// Forgets history: who asks for an older version is told 410.
    pub(crate) fn compact(&self) {
        let mut state = self.state.lock().unwrap();
        state.oldest = state.version;
        state.history.clear();
    }

    /// Ends every watch.
    pub(crate) fn hang_up(&self) {
        self.epoch.send_modify(|n| *n += 1);
    }

    /// The next requests for a collection meet these.
    pub(crate) fn trouble(&self, path: &str, list: &[Trouble]) {
        self.state.lock().unwrap().trouble.entry(path.to_owned()).or_default().extend(list.iter().cloned());
    }

    /// The version of the last change.
    pub(crate) fn version(&self) -> u64 {
        self.state.lock().unwrap().version
    }

    pub(crate) fn requests(&self, path: &str) -> Vec<String> {
        let state = self.state.lock().unwrap();
        state.requests.iter().filter(|r| r.split('?').next() == Some(path)).cloned().collect()
    }

    async fn connection(&self, stream: TcpStream) {
        let (read, mut write) = stream.into_split();
        let mut read = BufReader::new(read);
        loop {
            let mut first = String::new();
            if read.read_line(&mut first).await.unwrap_or(0) == 0 {
                return;
            }
            loop {
                let mut line = String::new();
                if read.read_line(&mut line).await.unwrap_or(0) == 0 {
                    return;
                }
                if line == "\r\n" {
                    break;
                }
            }
            let target = first.split(' ').nth(1).unwrap_or_default().to_owned();
            if self.answer(&target, &mut write).await.is_err() {
                return;
            }
        }
    }

    async fn answer(&self, target: &str, write: &mut (impl AsyncWriteExt + Unpin)) -> std::io::Result<()> {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let query: BTreeMap<&str, &str> = query.split('&').filter_map(|p| p.split_once('=')).collect();
        let (trouble, streams) = {
            let mut state = self.state.lock().unwrap();
            state.requests.push(target.to_owned());
            (state.trouble.get_mut(path).and_then(VecDeque::pop_front), state.streams_lists)
        };
        if let Some(Trouble::Status(code, after)) = trouble {
            return error(write, code, after).await;
        }
        if !query.contains_key("watch") {
            return self.list(path, &query, write).await;
        }
        let initial = query.contains_key("sendInitialEvents");
        if initial && !streams {
            return error(write, 422, 0).await;
        }
        self.watch(path, &query, initial, trouble, write).await
    }

    async fn list(
        &self,
        path: &str,
        query: &BTreeMap<&str, &str>,
        write: &mut (impl AsyncWriteExt + Unpin),
    ) -> std::io::Result<()> {
        let body = {
            let state = self.state.lock().unwrap();
            let all: Vec<Value> =
                state.objects.get(path).into_iter().flatten().map(|(_, o)| o.clone()).collect();
            let from: usize = query.get("continue").map_or(0, |c| c.parse().unwrap());
            let page: Vec<Value> = all.iter().skip(from).take(state.page).cloned().collect();
            let next = from + page.len();
            let more = if next < all.len() { next.to_string() } else { String::new() };
            json!({"kind": "List", "metadata": {"resourceVersion": state.version.to_string(), "continue": more},
                "items": page})
            .to_string()
        };
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        write.write_all(head.as_bytes()).await?;
        write.write_all(body.as_bytes()).await
    }

    async fn watch(
        &self,
        path: &str,
        query: &BTreeMap<&str, &str>,
        initial: bool,
        trouble: Option<Trouble>,
        write: &mut (impl AsyncWriteExt + Unpin),
    ) -> std::io::Result<()> {
        let (mut changed, mut epoch) = (self.changed.subscribe(), self.epoch.subscribe());
        epoch.borrow_and_update();
        let line = |kind: &str, object: &Value| format!("{}\n", json!({"type": kind, "object": object}));
        let mut lines: VecDeque<String> = VecDeque::new();
        let mut at;
        {
            let state = self.state.lock().unwrap();
            at = query.get("resourceVersion").and_then(|v| v.parse().ok()).unwrap_or(0);
            if initial {
                at = state.version;
                lines.extend(state.objects.get(path).into_iter().flatten().map(|(_, o)| line("ADDED", o)));
                lines.push_back(line(
                    "BOOKMARK",
                    &json!({"metadata": {"resourceVersion": at.to_string(),
                    "annotations": {"k8s.io/initial-events-end": "true"}}}),
                ));
            } else if at < state.oldest {
                lines.push_back(line("ERROR", &json!({"code": 410, "message": "too old resource version"})));
            }
        }
        if let Some(Trouble::ErrorEvent(code)) = trouble {
            lines.push_back(line("ERROR", &json!({"code": code, "message": "told to"})));
        }
        write
            .write_all(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n",
            )
            .await?;
        let mut sent = 0;
        loop {
            while let Some(text) = lines.pop_front() {
                if let Some(Trouble::CutAfter(n)) = trouble
                    && sent == n
                {
                    chunk(write, &text[..text.len() / 2]).await?;
                    return Err(std::io::Error::other("cut"));
                }
                chunk(write, &text).await?;
                sent += 1;
                if text.contains("\"ERROR\"") {
                    return write.write_all(b"0\r\n\r\n").await;
                }
            }
            {
                let state = self.state.lock().unwrap();
                let from = at;
                for (_, version, kind, object) in
                    state.history.iter().filter(|(p, v, ..)| p == path && *v > from)
                {
                    lines.push_back(line(kind, object));
                    at = *version;
                }
            }
            if lines.is_empty() {
                if let Some(Trouble::Bookmark(version)) = trouble {
                    let mark = json!({"metadata": {"resourceVersion": version.to_string()}});
                    chunk(write, &line("BOOKMARK", &mark)).await?;
                    return write.write_all(b"0\r\n\r\n").await;
                }
                tokio::select! {
                    _ = changed.changed() => {}
                    _ = epoch.changed() => return write.write_all(b"0\r\n\r\n").await,
                    () = tokio::time::sleep(Duration::from_secs(60)) => return write.write_all(b"0\r\n\r\n").await,
                }
            }
        }
    }
}

async fn chunk(write: &mut (impl AsyncWriteExt + Unpin), text: &str) -> std::io::Result<()> {
    write.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes()).await?;
    write.flush().await
}

async fn error(write: &mut (impl AsyncWriteExt + Unpin), code: u16, after: u64) -> std::io::Result<()> {
    let body =
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "Told",
        "message": "told to", "details": {"retryAfterSeconds": after}})
        .to_string();
    let head = format!(
        "HTTP/1.1 {code} Told\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    write.write_all(head.as_bytes()).await?;
    write.write_all(body.as_bytes()).await
}
