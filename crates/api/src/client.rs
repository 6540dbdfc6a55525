//! A blocking client: one connection per request, one deadline per request.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::http;
use crate::v1::{self, ApiError, ErrorBody, ErrorCode, route};

/// Largest answer read.
const MAX_ANSWER: u64 = 256 * 1024 * 1024;
/// Longest line of an event stream.
const MAX_STREAM_LINE: u64 = 64 * 1024;

/// Why a request got no answer of the wanted type.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens, or the agent says that it cannot serve yet: try again later, nothing is wrong with the request.
    #[error("the agent at {} is not available: {why}; is flowloom-agent running and this its socket?", socket.display())]
    Unavailable {
        /// The socket tried.
        socket: PathBuf,
        /// What was met.
        why: String,
    },
    /// The caller may not open the socket.
    #[error("the socket {} may not be opened: {source}; it belongs to the agent's user, mode 0600", socket.display())]
    Permission {
        /// The socket tried.
        socket: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The agent answered with an error.
    #[error("{error}")]
    Api {
        /// HTTP status.
        status: u16,
        /// The error.
        #[source]
        error: ApiError,
    },
    /// The deadline passed. The agent may still have done what was asked.
    #[error("no answer within {} ms", after.as_millis())]
    Timeout {
        /// The whole request's limit.
        after: Duration,
    },
    /// The connection broke in the middle. The agent may have done what was asked.
    #[error("the connection to the agent broke: {source}")]
    Broken {
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The answer is not what this version understands.
    #[error("the agent's answer is not understood: {why}")]
    Protocol {
        /// What was wrong with it.
        why: String,
    },
}

impl ClientError {
    /// The agent does not serve (not running, starting): the request had no effect.
    #[must_use]
    pub const fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }

    /// The API's error code, when the agent answered with one.
    #[must_use]
    pub const fn code(&self) -> Option<ErrorCode> {
        if let Self::Api { error, .. } = self { Some(error.code) } else { None }
    }

    /// Whether the same request may succeed later without anything being changed by a person.
    #[must_use]
    pub const fn retryable(&self) -> bool {
        match self {
            Self::Unavailable { .. } | Self::Timeout { .. } | Self::Broken { .. } => true,
            Self::Api { error, .. } => error.code.retryable(),
            Self::Permission { .. } | Self::Protocol { .. } => false,
        }
    }
}

/// Talks to one agent.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    timeout: Duration,
}

impl Client {
    /// A client with a limit of 10 s per request.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), timeout: Duration::from_secs(10) }
    }

    /// Sets the limit for a whole request. (Connecting to a Unix socket is immediate unless the agent's backlog is full.)
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The socket's path.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// `GET /v1/health`. # Errors: [`ClientError`], as for every request below.
    pub fn health(&self) -> Result<v1::Health, ClientError> {
        self.get(route::HEALTH)
    }

    /// `GET /v1/status`.
    pub fn status(&self) -> Result<v1::Status, ClientError> {
        self.get(route::STATUS)
    }

    /// `GET /v1/endpoints`.
    pub fn endpoints(&self) -> Result<v1::EndpointList, ClientError> {
        self.get(route::ENDPOINTS)
    }

    /// `GET /v1/endpoints/{vpc}/{name}`.
    pub fn endpoint(&self, vpc: &str, name: &str) -> Result<v1::EndpointInfo, ClientError> {
        self.get(&format!("{}/{}/{}", route::ENDPOINTS, http::encode(vpc), http::encode(name)))
    }

    /// `GET /v1/services` of one VPC or of all.
    pub fn services(&self, vpc: Option<&str>) -> Result<v1::ServiceList, ClientError> {
        let query: Vec<_> = vpc.map(|v| ("vpc", v.to_owned())).into_iter().collect();
        self.get(&with_query(route::SERVICES, &query))
    }

    /// `GET /v1/services/{vpc}/{name}`.
    pub fn service(&self, vpc: &str, name: &str) -> Result<v1::ServiceInfo, ClientError> {
        self.get(&format!("{}/{}/{}", route::SERVICES, http::encode(vpc), http::encode(name)))
    }

    /// `GET /v1/services/{vpc}/{name}/explain`.
    pub fn service_explain(&self, vpc: &str, name: &str) -> Result<v1::ServiceExplanation, ClientError> {
        self.get(&format!("{}/{}/{}/explain", route::SERVICES, http::encode(vpc), http::encode(name)))
    }

    /// `GET /v1/ipam`.
    pub fn ipam(&self) -> Result<v1::IpamReport, ClientError> {
        self.get(route::IPAM)
    }

    /// `GET /v1/kubernetes`.
    ///
    /// # Errors
    /// As for every request.
    pub fn kubernetes(&self) -> Result<v1::KubernetesStatus, ClientError> {
        self.get(route::KUBERNETES)
    }

    /// `GET /v1/identities`.
    pub fn identities(&self) -> Result<v1::IdentityList, ClientError> {
        self.get(route::IDENTITIES)
    }

    /// `GET /v1/policy/entries` of one endpoint (`vpc`, `name`) or of all.
    pub fn policy_entries(&self, endpoint: Option<(&str, &str)>) -> Result<v1::PolicyEntryList, ClientError> {
        let query = match endpoint {
            Some((vpc, name)) => vec![("vpc", vpc.to_owned()), ("endpoint", name.to_owned())],
            None => Vec::new(),
        };
        self.get(&with_query(route::POLICY_ENTRIES, &query))
    }

    /// `GET /v1/policy/rules` of one VPC or of all.
    pub fn policy_rules(&self, vpc: Option<&str>) -> Result<v1::RuleList, ClientError> {
        let query: Vec<_> = vpc.map(|v| ("vpc", v.to_owned())).into_iter().collect();
        self.get(&with_query(route::POLICY_RULES, &query))
    }

    /// `POST /v1/policy/explain`.
    pub fn explain(&self, request: &v1::ExplainRequest) -> Result<v1::Explanation, ClientError> {
        self.post(route::POLICY_EXPLAIN, request)
    }

    /// `GET /v1/policy/wait`: until the document's `generation` and the endpoint's `revision` (each when given) are in
    /// force. With neither, until everything the agent knows of is applied. [`ErrorCode::Timeout`] after `timeout`.
    pub fn policy_wait(
        &self,
        endpoint: Option<(&str, &str)>,
        revision: Option<u32>,
        generation: Option<u64>,
        timeout: Duration,
    ) -> Result<v1::PolicyWait, ClientError> {
        let mut query = vec![("timeout_ms", timeout.as_millis().to_string())];
        if let Some((vpc, name)) = endpoint {
            query.push(("vpc", vpc.to_owned()));
            query.push(("endpoint", name.to_owned()));
        }
        query.extend(revision.map(|r| ("revision", r.to_string())));
        query.extend(generation.map(|g| ("generation", g.to_string())));
        // The agent's own limit ends first, with a better message.
        let patient = self.clone().with_timeout(timeout.saturating_add(Duration::from_secs(5)));
        patient.get(&with_query(route::POLICY_WAIT, &query))
    }

    /// `POST /v1/policy/quarantine`; in force on return.
    pub fn quarantine(&self, request: &v1::QuarantineRequest) -> Result<v1::PolicyHold, ClientError> {
        self.post(route::POLICY_QUARANTINE, request)
    }

    /// `POST /v1/policy/freeze`; in force on return.
    pub fn freeze(&self, request: &v1::HoldRequest) -> Result<v1::PolicyHold, ClientError> {
        self.post(route::POLICY_FREEZE, request)
    }

    /// `POST /v1/policy/rollback`; in force on return.
    pub fn rollback(&self, request: &v1::RollbackRequest) -> Result<v1::PolicyHold, ClientError> {
        self.post(route::POLICY_ROLLBACK, request)
    }

    /// `POST /v1/policy/release`; in force on return.
    pub fn release(&self, request: &v1::HoldRequest) -> Result<v1::PolicyHold, ClientError> {
        self.post(route::POLICY_RELEASE, request)
    }

    /// `GET /v1/policy/history` of one endpoint (`vpc`, `name`) or of all: the `last` changes, all that are kept when absent.
    pub fn policy_history(
        &self,
        endpoint: Option<(&str, &str)>,
        last: Option<u32>,
    ) -> Result<v1::PolicyHistory, ClientError> {
        let mut query = Vec::new();
        if let Some((vpc, name)) = endpoint {
            query.push(("vpc", vpc.to_owned()));
            query.push(("endpoint", name.to_owned()));
        }
        query.extend(last.map(|n| ("last", n.to_string())));
        self.get(&with_query(route::POLICY_HISTORY, &query))
    }

    /// `GET /v1/conntrack`.
    pub fn conntrack(&self, filter: &v1::ConntrackFilter) -> Result<v1::ConntrackList, ClientError> {
        self.get(&with_query(route::CONNTRACK, &conntrack_query(filter)))
    }

    /// `DELETE /v1/conntrack`.
    pub fn conntrack_flush(&self, filter: &v1::ConntrackFilter) -> Result<v1::ConntrackFlushed, ClientError> {
        self.call("DELETE", &with_query(route::CONNTRACK, &conntrack_query(filter)), None)
    }

    /// `GET /v1/drops`.
    pub fn drops(&self, filter: &v1::DropFilter) -> Result<v1::DropList, ClientError> {
        let mut query = Vec::new();
        query.extend(filter.vpc.clone().map(|v| ("vpc", v)));
        query.extend(filter.endpoint.clone().map(|v| ("endpoint", v)));
        query.extend(filter.reason.clone().map(|v| ("reason", v)));
        self.get(&with_query(route::DROPS, &query))
    }

    /// `GET /v1/events`. With `follow` the stream has no deadline and ends when the agent does.
    pub fn events(&self, filter: &v1::EventFilter) -> Result<EventStream, ClientError> {
        let mut query = Vec::new();
        query.extend(filter.vpc.clone().map(|v| ("vpc", v)));
        query.extend(filter.endpoint.clone().map(|v| ("endpoint", v)));
        query.extend(filter.from.clone().map(|v| ("from", v)));
        query.extend(filter.to.clone().map(|v| ("to", v)));
        query.extend(filter.verdict.map(|v| ("verdict", v.name().to_owned())));
        query.extend(filter.reason.clone().map(|v| ("reason", v)));
        query.extend(filter.last.map(|v| ("last", v.to_string())));
        if filter.follow {
            query.push(("follow", "true".to_owned()));
        }
        let (head, mut body) = self.open("GET", &with_query(route::EVENTS, &query), None)?;
        if head.status != 200 {
            return Err(self.failed(head.status, &self.read_all(&mut body)?));
        }
        if filter.follow {
            let deadline = body.get_ref().get_ref();
            deadline.stream.set_read_timeout(None).map_err(|source| ClientError::Broken { source })?;
            deadline.endless.set(true);
        }
        Ok(EventStream { lines: BufReader::new(body), timeout: self.timeout, broken: false })
    }

    /// `POST /v1/trace`.
    pub fn trace(&self, request: &v1::TraceRequest) -> Result<v1::TraceReport, ClientError> {
        self.post(route::TRACE, request)
    }

    /// `POST /v1/cni/add`.
    pub fn cni_add(&self, request: &v1::CniAddRequest) -> Result<v1::CniAddResult, ClientError> {
        self.post(route::CNI_ADD, request)
    }

    /// `POST /v1/cni/check`.
    pub fn cni_check(&self, request: &v1::CniCheckRequest) -> Result<v1::CniChecked, ClientError> {
        self.post(route::CNI_CHECK, request)
    }

    /// `POST /v1/cni/del`.
    pub fn cni_del(&self, request: &v1::CniDelRequest) -> Result<v1::CniDeleted, ClientError> {
        self.post(route::CNI_DEL, request)
    }

    /// `POST /v1/cni/gc`.
    pub fn cni_gc(&self, request: &v1::CniGcRequest) -> Result<v1::CniCollected, ClientError> {
        self.post(route::CNI_GC, request)
    }

    /// `POST /v1/cni/status`.
    pub fn cni_status(&self, request: &v1::CniStatusRequest) -> Result<v1::CniStatus, ClientError> {
        self.post(route::CNI_STATUS, request)
    }

    /// `GET /v1/cni`.
    pub fn cni_report(&self) -> Result<v1::CniReport, ClientError> {
        self.get(route::CNI)
    }

    /// `GET /v1/cni/timing`.
    pub fn cni_timing(&self) -> Result<v1::CniTimings, ClientError> {
        self.get(route::CNI_TIMING)
    }

    fn get<T: DeserializeOwned>(&self, target: &str) -> Result<T, ClientError> {
        self.call("GET", target, None)
    }

    fn post<T: DeserializeOwned>(&self, target: &str, body: &impl Serialize) -> Result<T, ClientError> {
        let body = serde_json::to_vec(body).map_err(|e| ClientError::Protocol { why: e.to_string() })?;
        self.call("POST", target, Some(&body))
    }

    fn call<T: DeserializeOwned>(
        &self,
        method: &str,
        target: &str,
        body: Option<&[u8]>,
    ) -> Result<T, ClientError> {
        let (head, mut reader) = self.open(method, target, body)?;
        let bytes = self.read_all(&mut reader)?;
        if !(200..300).contains(&head.status) {
            return Err(self.failed(head.status, &bytes));
        }
        serde_json::from_slice(&bytes)
            .map_err(|e| ClientError::Protocol { why: format!("{method} {target}: {e}") })
    }

    fn open(
        &self,
        method: &str,
        target: &str,
        body: Option<&[u8]>,
    ) -> Result<(http::Head, Reader), ClientError> {
        let until = Instant::now() + self.timeout;
        let stream = UnixStream::connect(&self.socket).map_err(|e| self.not_connected(e))?;
        let mut io = Deadline { stream, until, endless: std::cell::Cell::new(false) };
        let request = http::request(method, target, body);
        // An agent that refuses a request early (413) has answered and closed before reading all of it: the answer counts.
        match io.write_all(&request) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {}
            other => other.map_err(|e| self.io(e))?,
        }
        let mut reader = BufReader::new(io);
        let head = http::head(&mut reader).map_err(|e| self.io(e))?;
        let kind = head.body;
        Ok((head, http::Body::new(reader, kind)))
    }

    fn read_all(&self, body: &mut Reader) -> Result<Vec<u8>, ClientError> {
        let mut bytes = Vec::new();
        body.take(MAX_ANSWER + 1).read_to_end(&mut bytes).map_err(|e| self.io(e))?;
        if bytes.len() as u64 > MAX_ANSWER {
            return Err(ClientError::Protocol { why: format!("longer than {MAX_ANSWER} bytes") });
        }
        Ok(bytes)
    }

    fn failed(&self, status: u16, body: &[u8]) -> ClientError {
        let parsed: Result<ErrorBody, _> = serde_json::from_slice(body);
        if status == 503 {
            let why = parsed.map_or_else(|_| "HTTP status 503".to_owned(), |b| b.error.message);
            return ClientError::Unavailable { socket: self.socket.clone(), why };
        }
        let error = parsed.map_or_else(
            |_| {
                let text: String = String::from_utf8_lossy(body).chars().take(200).collect();
                ApiError::new(ErrorCode::Other, format!("HTTP status {status}: {}", text.trim()))
            },
            |b| b.error,
        );
        ClientError::Api { status, error }
    }

    fn not_connected(&self, source: io::Error) -> ClientError {
        match source.kind() {
            io::ErrorKind::PermissionDenied => {
                ClientError::Permission { socket: self.socket.clone(), source }
            }
            _ => ClientError::Unavailable { socket: self.socket.clone(), why: source.to_string() },
        }
    }

    fn io(&self, source: io::Error) -> ClientError {
        io_error(source, self.timeout)
    }
}

fn io_error(source: io::Error, timeout: Duration) -> ClientError {
    match source.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => ClientError::Timeout { after: timeout },
        io::ErrorKind::InvalidData => ClientError::Protocol { why: source.to_string() },
        _ => ClientError::Broken { source },
    }
}

fn conntrack_query(f: &v1::ConntrackFilter) -> Vec<(&'static str, String)> {
    let mut query = Vec::new();
    query.extend(f.vpc.clone().map(|v| ("vpc", v)));
    query.extend(f.endpoint.clone().map(|v| ("endpoint", v)));
    query.extend(f.address.map(|v| ("address", v.to_string())));
    query.extend(f.port.map(|v| ("port", v.to_string())));
    query.extend(f.protocol.clone().map(|v| ("protocol", v)));
    query.extend(f.limit.map(|v| ("limit", v.to_string())));
    query
}

fn with_query(path: &str, query: &[(&str, String)]) -> String {
    let mut out = path.to_owned();
    for (i, (key, value)) in query.iter().enumerate() {
        out.push(if i == 0 { '?' } else { '&' });
        out.push_str(key);
        out.push('=');
        out.push_str(&http::encode(value));
    }
    out
}

type Reader = http::Body<BufReader<Deadline>>;

/// A stream whose every read and write ends at one instant.
#[derive(Debug)]
struct Deadline {
    stream: UnixStream,
    until: Instant,
    endless: std::cell::Cell<bool>,
}

impl Deadline {
    fn left(&self) -> io::Result<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for Deadline {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if !self.endless.get() {
            self.stream.set_read_timeout(Some(self.left()?))?;
        }
        self.stream.read(buf)
    }
}

impl Write for Deadline {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(buf)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Items of `GET /v1/events`, oldest first. Ends when the agent ends the stream, and after an error other than an idle timeout.
#[derive(Debug)]
pub struct EventStream {
    lines: BufReader<Reader>,
    timeout: Duration,
    broken: bool,
}

impl EventStream {
    /// Makes `next` give up (as [`ClientError::Timeout`]) when nothing comes for this long; `None` waits for ever.
    ///
    /// # Errors
    /// When the socket refuses the option.
    pub fn set_idle_timeout(&mut self, limit: Option<Duration>) -> Result<(), ClientError> {
        let io = self.lines.get_ref().get_ref().get_ref();
        io.endless.set(true);
        self.timeout = limit.unwrap_or(self.timeout);
        io.stream.set_read_timeout(limit).map_err(|source| ClientError::Broken { source })
    }
}

impl Iterator for EventStream {
    type Item = Result<v1::StreamItem, ClientError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.broken {
            return None;
        }
        let item = self.item();
        self.broken = matches!(&item, Some(Err(e)) if !matches!(e, ClientError::Timeout { .. }));
        item
    }
}

impl EventStream {
    fn item(&mut self) -> Option<Result<v1::StreamItem, ClientError>> {
        loop {
            let mut text = String::new();
            let read = (&mut self.lines).take(MAX_STREAM_LINE).read_line(&mut text);
            return match read {
                Ok(0) => None,
                Ok(_) if text.trim().is_empty() => continue,
                Ok(_) if !text.ends_with('\n') => {
                    Some(Err(ClientError::Protocol { why: "an event line is cut or too long".into() }))
                }
                Ok(_) => Some(
                    serde_json::from_str(&text)
                        .map_err(|e| ClientError::Protocol { why: format!("event: {e}") }),
                ),
                Err(e) => Some(Err(io_error(e, self.timeout))),
            };
        }
    }
}

#[cfg(test)]
mod tests;
