//! One kind of objects: list, watch, bookmarks, and what goes wrong on the way.
//!
//! The list streams (`sendInitialEvents`) where the server can; else it comes in pages. What a list no longer has is reported as
//! gone when the list is complete, never before. After a cut the watch goes on from the last version seen; a server that has
//! forgotten that version (410) is listed again.

use std::time::Duration;

use futures::{AsyncBufRead, AsyncBufReadExt};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::{Instant, timeout};

use crate::client::{Client, ClientError};
use crate::{Kind, ObjectName, wire};

/// Objects per page of a list.
const PAGE: u32 = 500;
/// Seconds after which the server ends a watch; each adds its own part of this again, so that they do not end together.
const WATCH_SECONDS: u64 = 300;
/// A watch on which nothing comes for so long, not even a bookmark (one a minute), is dead.
const SILENCE: Duration = Duration::from_secs(180);
/// Largest object: etcd's limit is 1.5 MiB, servers may raise it.
const MOST_BYTES: usize = 16 << 20;
/// First pause after an error.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Between questions for a kind that the server need not have: it may learn it.
const ABSENT_PAUSE: Duration = Duration::from_secs(300);

/// Which objects of a kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Field selector (`spec.nodeName=n1`).
    pub fields: String,
    /// Label selector.
    pub labels: String,
}

/// What a watch says.
#[derive(Debug)]
pub enum Happening<T> {
    /// All objects there are.
    Listed(Vec<(ObjectName, Result<T, String>)>),
    /// One is new or different.
    Put(ObjectName, Result<T, String>),
    /// One is gone.
    Gone(ObjectName),
    /// The connection is well: an answer began, or a bookmark came.
    Alive,
    /// Something went wrong; it is tried again.
    Failed(WatchError),
}

/// Why a watch was interrupted.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The server, or the way there.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The stream broke.
    #[error("the watch broke off: {0}")]
    Broken(String),
    /// A line that is no event.
    #[error("the watch said something that is no event: {0}")]
    Nonsense(String),
    /// Nothing came for too long.
    #[error("the watch was silent for {} s", SILENCE.as_secs())]
    Silent,
    /// The server no longer knows the version that the watch was at.
    #[error("the server no longer knows version {0}: listing again")]
    Expired(String),
    /// The server ended it with an error.
    #[error("the server ended the watch with {code}: {message}")]
    Ended {
        /// HTTP status.
        code: u16,
        /// For people.
        message: String,
    },
}

impl WatchError {
    /// The server has no such kind, or does not show it.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Client(e) if matches!(e.code(), 403 | 404))
    }
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct BookmarkLine {
    metadata: BookmarkMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BookmarkMeta {
    resource_version: String,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StatusLine {
    code: u16,
    message: String,
}

#[derive(Deserialize)]
struct Page<'a> {
    metadata: PageMeta,
    #[serde(borrow)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMeta {
    resource_version: String,
    #[serde(rename = "continue", default)]
    next: Option<String>,
}

enum State {
    /// Nothing is known.
    Start,
    /// Everything up to this version is known.
    At(String),
}

/// Follows a kind until the receiver of `tell` is gone (`tell` returns false).
pub async fn follow<T: Kind>(
    client: &Client,
    selection: &Selection,
    jitter: u64,
    mut tell: impl FnMut(Happening<T>) -> bool + Send,
) {
    let mut follower =
        Follower { client, selection, seconds: WATCH_SECONDS + jitter % WATCH_SECONDS, pages: false };
    let mut state = State::Start;
    let mut pause = PAUSE;
    loop {
        let began = Instant::now();
        let (next, error) = follower.step::<T>(state, &mut tell).await;
        state = next;
        let Some(error) = error else {
            // The server ended a healthy watch, as it does every few minutes. One that ends at once is no such thing.
            if began.elapsed() > Duration::from_secs(1) {
                pause = PAUSE;
            } else {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            continue;
        };
        if began.elapsed() > LONGEST_PAUSE {
            pause = PAUSE;
        }
        let asked = match &error {
            WatchError::Client(ClientError::Answer { retry_after, .. }) => retry_after.unwrap_or_default(),
            _ => Duration::ZERO,
        };
        let expired = matches!(error, WatchError::Expired(_));
        let absent = T::OPTIONAL && error.is_absent();
        if !tell(Happening::Failed(error)) {
            return;
        }
        if expired && pause == PAUSE {
            pause *= 2;
            continue;
        }
        // Agents of a thousand nodes do not come back in step.
        let spread = |pause: Duration| pause.mul_f64(0.5 + (jitter % 1024) as f64 / 1024.0);
        if absent {
            tokio::time::sleep(spread(ABSENT_PAUSE)).await;
            continue;
        }
        let spread = spread(pause);
        tokio::time::sleep(spread.max(asked).min(2 * LONGEST_PAUSE)).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

struct Follower<'a> {
    client: &'a Client,
    selection: &'a Selection,
    seconds: u64,
    /// The server does not stream lists.
    pages: bool,
}

impl Follower<'_> {
    /// One request's worth.
    async fn step<T: Kind>(
        &mut self,
        state: State,
        tell: &mut (impl FnMut(Happening<T>) -> bool + Send),
    ) -> (State, Option<WatchError>) {
        match state {
            State::Start if self.pages => match self.list(tell).await {
                Ok(version) => (State::At(version), None),
                Err(e) => (State::Start, Some(e)),
            },
            State::Start => {
                let initial = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=";
                match self.open::<T>(initial).await {
                    // Servers that do not know the parameter refuse it by name (422), or as a bad request.
                    Err(e) if matches!(e.code(), 400 | 422) => {
                        tracing::debug!(kind = T::NAME, error = %e, "the server streams no lists: pages it is");
                        self.pages = true;
                        (State::Start, None)
                    }
                    Err(e) => (State::Start, Some(e.into())),
                    Ok(stream) => {
                        let (state, error) = self.events(stream, None, tell).await;
                        // Some notice too late that they cannot (an etcd without progress requests): 500, within the list.
                        self.pages |=
                            matches!((&state, &error), (State::Start, Some(WatchError::Ended { .. })));
                        (state, error)
                    }
                }
            }
            State::At(version) => {
                match self.open::<T>(&format!("resourceVersion={}", escape(&version))).await {
                    Err(e) if e.code() == 410 => (State::Start, Some(WatchError::Expired(version))),
                    Err(e) => (State::At(version), Some(e.into())),
                    Ok(stream) => self.events(stream, Some(version), tell).await,
                }
            }
        }
    }

    fn selectors(&self) -> String {
        let mut out = String::new();
        for (key, value) in
            [("fieldSelector", &self.selection.fields), ("labelSelector", &self.selection.labels)]
        {
            if !value.is_empty() {
                out.push_str(&format!("&{key}={}", escape(value)));
            }
        }
        out
    }

    async fn open<T: Kind>(
        &self,
        parameters: &str,
    ) -> Result<impl AsyncBufRead + Unpin + Send + use<T>, ClientError> {
        let path = format!(
            "{}?watch=true&allowWatchBookmarks=true&timeoutSeconds={}&{parameters}{}",
            T::PATH,
            self.seconds,
            self.selectors()
        );
        self.client.stream(&path).await
    }

    /// A whole list in pages. Between pages other objects may change: the watch starts at the first page's version.
    async fn list<T: Kind>(
        &self,
        tell: &mut (impl FnMut(Happening<T>) -> bool + Send),
    ) -> Result<String, WatchError> {
        let mut all = Vec::new();
        let mut next = String::new();
        loop {
            let mut path = format!("{}?limit={PAGE}{}", T::PATH, self.selectors());
            if !next.is_empty() {
                path.push_str(&format!("&continue={}", escape(&next)));
            }
            let text = self.client.text(&path).await.map_err(|e| match e.code() {
                410 => WatchError::Expired("of the list's next page".into()),
                _ => e.into(),
            })?;
            let page: Page<'_> =
                serde_json::from_str(&text).map_err(|e| WatchError::Nonsense(e.to_string()))?;
            for item in page.items.into_iter().flatten() {
                if let Some((name, _, object)) = decode::<T>(item.get()) {
                    all.push((name, object));
                }
            }
            match page.metadata.next.filter(|n| !n.is_empty()) {
                Some(n) => next = n,
                None => {
                    tell(Happening::Listed(all));
                    return Ok(page.metadata.resource_version);
                }
            }
        }
    }

    /// Reads events until the stream ends. Without a version they begin with a list.
    async fn events<T: Kind>(
        &self,
        mut stream: impl AsyncBufRead + Unpin + Send,
        mut version: Option<String>,
        tell: &mut (impl FnMut(Happening<T>) -> bool + Send),
    ) -> (State, Option<WatchError>) {
        let mut listing: Vec<(ObjectName, Result<T, String>)> = Vec::new();
        let mut line = Vec::new();
        let state = |version: Option<String>| version.map_or(State::Start, State::At);
        tell(Happening::Alive);
        loop {
            line.clear();
            match timeout(SILENCE, bounded_line(&mut stream, &mut line)).await {
                Err(_) => return (state(version), Some(WatchError::Silent)),
                Ok(Err(e)) => return (state(version), Some(WatchError::Broken(e.to_string()))),
                Ok(Ok(0)) if version.is_none() => {
                    // What came of the list is worth nothing.
                    return (State::Start, Some(WatchError::Broken("it ended within its list".into())));
                }
                Ok(Ok(0)) => return (state(version), None),
                Ok(Ok(_)) => {}
            }
            if line.last() != Some(&b'\n') {
                return (state(version), Some(WatchError::Broken("it ended within an object".into())));
            }
            let text = String::from_utf8_lossy(&line);
            let event: Line<'_> = match serde_json::from_str(&text) {
                Ok(event) => event,
                Err(_) if text.trim().is_empty() => continue,
                Err(e) => return (state(version), Some(WatchError::Nonsense(e.to_string()))),
            };
            match event.kind {
                "ADDED" | "MODIFIED" | "DELETED" => {
                    let Some((name, at, object)) = decode::<T>(event.object.get()) else { continue };
                    let going_on = match &mut version {
                        None => {
                            listing.push((name, object));
                            true
                        }
                        Some(version) => {
                            if !at.is_empty() {
                                *version = at;
                            }
                            tell(if event.kind == "DELETED" {
                                Happening::Gone(name)
                            } else {
                                Happening::Put(name, object)
                            })
                        }
                    };
                    if !going_on {
                        return (state(version), None);
                    }
                }
                "BOOKMARK" => {
                    let Ok(mark) = serde_json::from_str::<BookmarkLine>(event.object.get()) else { continue };
                    let ends = mark.metadata.annotations.contains_key("k8s.io/initial-events-end");
                    version = match version {
                        // Behind what was seen, from a proxy or a server that lags: going on from there would play old states again, an
                        // open policy among them.
                        Some(known) if is_older(&mark.metadata.resource_version, &known) => Some(known),
                        None if !ends => None,
                        _ => Some(mark.metadata.resource_version),
                    };
                    tell(if ends {
                        Happening::Listed(std::mem::take(&mut listing))
                    } else {
                        Happening::Alive
                    });
                }
                "ERROR" => {
                    let status: StatusLine = serde_json::from_str(event.object.get()).unwrap_or_default();
                    if status.code == 410 {
                        return (State::Start, Some(WatchError::Expired(version.unwrap_or_default())));
                    }
                    let error = WatchError::Ended { code: status.code, message: status.message };
                    return (state(version), Some(error));
                }
                other => {
                    return (state(version), Some(WatchError::Nonsense(format!("event type {other:?}"))));
                }
            }
        }
    }
}

/// Versions are numbers in every server that there is; of others nothing is known.
fn is_older(version: &str, known: &str) -> bool {
    matches!((version.parse::<u64>(), known.parse::<u64>()), (Ok(a), Ok(b)) if a < b)
}

/// `read_until`, with a limit.
async fn bounded_line(
    stream: &mut (impl AsyncBufRead + Unpin),
    line: &mut Vec<u8>,
) -> std::io::Result<usize> {
    loop {
        let available = stream.fill_buf().await?;
        if available.is_empty() {
            return Ok(line.len());
        }
        let (taken, ends) = match available.iter().position(|b| *b == b'\n') {
            Some(at) => (at + 1, true),
            None => (available.len(), false),
        };
        line.extend_from_slice(&available[..taken]);
        stream.consume_unpin(taken);
        if ends {
            return Ok(line.len());
        }
        if line.len() > MOST_BYTES {
            return Err(std::io::Error::other("an object is larger than 16 MiB"));
        }
    }
}

/// Name, version and contents. An object without a name is nobody's fault but its own: it is logged and left out.
fn decode<T: Kind>(json: &str) -> Option<(ObjectName, String, Result<T, String>)> {
    let named: wire::Named = match serde_json::from_str(json) {
        Ok(named) => named,
        Err(e) => {
            tracing::warn!(kind = T::NAME, error = %e, "an object without readable metadata is left out");
            return None;
        }
    };
    let meta = named.metadata;
    if meta.name.is_empty() {
        tracing::warn!(kind = T::NAME, "an object without a name is left out");
        return None;
    }
    Some((
        ObjectName { namespace: meta.namespace, name: meta.name },
        meta.resource_version,
        crate::object::decode_or_salvage(json),
    ))
}

/// Percent-encoding for a query's value.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for b in text.bytes() {
        if b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'~') {
            out.push(char::from(b));
        } else {
            out.push_str(&format!("%{b:02X}"));
        }
    }
    out
}
