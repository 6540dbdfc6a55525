//! An agent for tests: HTTP/1.1 on a Unix socket of a temporary directory, answers from a closure, requests recorded.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use serde_json::{Value, json};

/// A request as it came.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Request {
    /// `GET` ...
    pub(crate) method: String,
    /// Path without the query.
    pub(crate) path: String,
    /// Query, still encoded.
    pub(crate) query: String,
    /// Decoded body; null when there is none.
    pub(crate) body: Value,
}

/// An answer.
pub(crate) enum Reply {
    /// Status and JSON.
    Json(u16, Value),
    /// Status 200 and lines of JSON.
    Lines(Vec<Value>),
    /// The connection is closed without an answer: an agent that dies.
    HangUp,
}

/// The error shape of the API.
pub(crate) fn error(status: u16, code: &str, message: &str) -> Reply {
    Reply::Json(status, json!({"error": {"code": code, "message": message}}))
}

/// Success.
pub(crate) fn ok(value: impl serde::Serialize) -> Reply {
    Reply::Json(200, serde_json::to_value(value).unwrap())
}

/// Stops when dropped.
pub(crate) struct FakeAgent {
    directory: tempfile::TempDir,
    requests: Arc<Mutex<Vec<Request>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FakeAgent {
    /// Starts one that answers with `answer`.
    pub(crate) fn start(answer: impl Fn(&Request) -> Reply + Send + 'static) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("agent.sock")).unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (requests, stop) = (requests.clone(), stop.clone());
            move || {
                for stream in listener.incoming() {
                    if stop.load(Ordering::Acquire) {
                        return;
                    }
                    serve(&stream.unwrap(), &requests, &answer);
                }
            }
        });
        Self { directory, requests, stop, thread: Some(thread) }
    }

    /// Its socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("agent.sock")
    }

    /// Requests so far.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// Paths asked for so far.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.requests().into_iter().map(|r| r.path).collect()
    }
}

impl Drop for FakeAgent {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Wakes the accept call.
        drop(UnixStream::connect(self.socket()));
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the fake agent panicked");
        }
    }
}

fn serve(stream: &UnixStream, requests: &Mutex<Vec<Request>>, answer: &dyn Fn(&Request) -> Reply) {
    let Some(request) = read_request(&mut BufReader::new(stream)) else {
        return;
    };
    requests.lock().unwrap().push(request.clone());
    let (status, kind, body) = match answer(&request) {
        Reply::Json(status, value) => (status, "application/json", value.to_string()),
        Reply::Lines(lines) => {
            (200, "application/x-ndjson", lines.iter().map(|l| format!("{l}\n")).collect::<String>())
        }
        Reply::HangUp => return,
    };
    let head = format!(
        "HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let mut out = stream;
    // A client that went away is the client's business.
    let _ = out.write_all(head.as_bytes()).and_then(|()| out.write_all(body.as_bytes()));
}

fn read_request(reader: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    if reader.read_line(&mut line).ok()? == 0 {
        return None;
    }
    let mut words = line.split_whitespace();
    let method = words.next()?.to_owned();
    let target = words.next()?.to_owned();
    let mut length = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let header = header.trim();
        if header.is_empty() {
            break;
        }
        if let Some((name, value)) = header.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let body = if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() };
    Some(Request { method, path: path.to_owned(), query: query.to_owned(), body })
}
