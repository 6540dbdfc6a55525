//! What a node writes to the API server: its network condition, its start-up taint, and events about Pods.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::client::{Client, ClientError};
use crate::{Node, ObjectName};

/// Reason of the condition that this agent writes.
const READY_REASON: &str = "FlowloomIsUp";
/// The same event is sent again after this long at the earliest.
const EVENT_PAUSE: Duration = Duration::from_secs(60);
/// Events remembered, and at most sent per [`EVENT_PAUSE`].
const EVENTS: usize = 64;

/// What is left to write for a node whose agent is ready. Pure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeDuties {
    /// `NetworkUnavailable` has to become false.
    pub condition: bool,
    /// Places of the taint in the node's list, of each effect it has: they have to go.
    pub taints: Vec<usize>,
}

impl NodeDuties {
    /// Compares the node's object with what it should be.
    #[must_use]
    pub fn of(node: &Node, taint: &str) -> Self {
        Self {
            condition: node.network_unavailable.as_ref().is_none_or(|(status, _)| status != "False"),
            taints: (0..)
                .zip(&node.taints)
                .filter(|(_, (key, ..))| !taint.is_empty() && key == taint)
                .map(|(at, _)| at)
                .collect(),
        }
    }

    /// Whether nothing is left.
    #[must_use]
    pub fn is_done(&self) -> bool {
        *self == Self::default()
    }
}

fn patch(path: &str, kind: &str, body: &Value) -> Result<http::Request<Vec<u8>>, ClientError> {
    http::Request::patch(path)
        .header(http::header::CONTENT_TYPE, format!("application/{kind}+json"))
        .body(body.to_string().into_bytes())
        .map_err(|e| ClientError::Transport(e.to_string()))
}

/// Writes what is left.
///
/// # Errors
/// What the server answered; the caller tries again.
pub async fn perform(
    client: &Client,
    node: &str,
    taint: &str,
    duties: &NodeDuties,
) -> Result<(), ClientError> {
    if duties.condition {
        let now = rfc3339(SystemTime::now());
        let condition = json!({
            "type": "NetworkUnavailable", "status": "False", "reason": READY_REASON,
            "message": "flowloom is running on this node", "lastHeartbeatTime": now, "lastTransitionTime": now,
        });
        let body = json!({"status": {"conditions": [condition]}});
        let path = format!("/api/v1/nodes/{node}/status");
        client.json::<Value>(patch(&path, "strategic-merge-patch", &body)?).await?;
    }
    if !duties.taints.is_empty() {
        let body = without_taints(&duties.taints, taint);
        client.json::<Value>(patch(&format!("/api/v1/nodes/{node}"), "json-patch", &body)?).await?;
    }
    Ok(())
}

/// Removes the taint from these places and nothing else. Taints are one value to a merge; where others changed the list meanwhile the test
/// fails, and the node's next version says the new places.
fn without_taints(places: &[usize], taint: &str) -> Value {
    let one = |at: &usize| {
        let path = format!("/spec/taints/{at}");
        [
            json!({"op": "test", "path": format!("{path}/key"), "value": taint}),
            json!({"op": "remove", "path": path}),
        ]
    };
    // From the end: the places before stay what they are.
    places.iter().rev().flat_map(one).collect()
}

/// An event about a Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodEvent {
    /// The Pod.
    pub pod: ObjectName,
    /// Which life of it.
    pub uid: String,
    /// CamelCase.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// Sends events, each of them once a minute at most, with a count.
#[derive(Debug)]
pub struct Recorder {
    client: Client,
    node: String,
    sent: BTreeMap<(String, String), Sent>,
}

#[derive(Debug)]
struct Sent {
    name: String,
    at: Instant,
    count: u32,
}

impl Recorder {
    /// For events of this node.
    #[must_use]
    pub fn new(client: Client, node: impl Into<String>) -> Self {
        Self { client, node: node.into(), sent: BTreeMap::new() }
    }

    /// Sends an event, counts it when the same was sent just before, or leaves it out when there are too many.
    ///
    /// # Errors
    /// What the server answered. Events are a courtesy: nothing is tried again.
    pub async fn record(&mut self, event: &PodEvent) -> Result<(), ClientError> {
        let now = Instant::now();
        let key = (event.uid.clone(), event.reason.clone());
        let stamp = rfc3339(SystemTime::now());
        if let Some(sent) = self.sent.get_mut(&key) {
            sent.count += 1;
            if now.duration_since(sent.at) < EVENT_PAUSE {
                return Ok(());
            }
            sent.at = now;
            let body =
                json!({"count": sent.count, "lastTimestamp": stamp, "message": shorten(&event.message)});
            let path = format!("/api/v1/namespaces/{}/events/{}", event.pod.namespace, sent.name);
            let answer = self.client.json::<Value>(patch(&path, "strategic-merge-patch", &body)?).await;
            match answer {
                Err(e) if e.code() == 404 => drop(self.sent.remove(&key)),
                other => return other.map(drop),
            }
        }
        self.sent.retain(|_, s| now.duration_since(s.at) < 10 * EVENT_PAUSE);
        if self.sent.values().filter(|s| now.duration_since(s.at) < EVENT_PAUSE).count() >= EVENTS {
            return Ok(());
        }
        let unique = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let name = format!("{}.{unique:x}", event.pod.name.chars().take(200).collect::<String>());
        let body = json!({
            "apiVersion": "v1", "kind": "Event",
            "metadata": {"name": name, "namespace": event.pod.namespace},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": event.pod.namespace,
                "name": event.pod.name, "uid": event.uid},
            "type": "Warning", "reason": event.reason, "message": shorten(&event.message),
            "source": {"component": "flowloom-agent", "host": self.node},
            "reportingComponent": "flowloom-agent", "reportingInstance": self.node,
            "firstTimestamp": stamp, "lastTimestamp": stamp, "count": 1,
        });
        let request = http::Request::post(format!("/api/v1/namespaces/{}/events", event.pod.namespace))
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(body.to_string().into_bytes())
            .map_err(|e| ClientError::Transport(e.to_string()))?;
        self.sent.insert(key, Sent { name, at: now, count: 1 });
        self.client.json::<Value>(request).await.map(drop)
    }
}

/// The API takes 1024 bytes.
fn shorten(message: &str) -> String {
    message.chars().take(500).collect()
}

/// Seconds are exact enough for conditions and events.
fn rfc3339(at: SystemTime) -> String {
    let seconds = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    flowloom_model::Timestamp(seconds).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(condition: Option<&str>, taints: &[&str]) -> Node {
        Node {
            internal: Vec::new(),
            pod_cidrs: Vec::new(),
            zone: String::new(),
            taints: taints
                .iter()
                .map(|t| ((*t).to_owned(), String::new(), "NoSchedule".to_owned()))
                .collect(),
            network_unavailable: condition.map(|c| (c.to_owned(), "X".to_owned())),
            created: String::new(),
        }
    }

    #[test]
    fn only_what_is_missing_is_written() {
        let left = |n: &Node, taint: &str| NodeDuties::of(n, taint);
        assert!(left(&node(Some("False"), &["other"]), "mine").is_done());
        let duties = |places: &[usize]| NodeDuties { condition: true, taints: places.to_vec() };
        assert_eq!(left(&node(None, &["mine"]), "mine"), duties(&[0]));
        assert_eq!(left(&node(None, &["other", "mine", "mine"]), "mine"), duties(&[1, 2]));
        assert_eq!(left(&node(Some("True"), &["mine"]), ""), duties(&[]));
    }

    // Taints have no merge key: a merge patch that deletes one by its key was refused as a taint without an effect.
    #[test]
    fn a_taint_stayed_because_its_removal_was_refused() {
        let body = without_taints(&[1, 2], "mine");
        let op = |op: &str, path: &str| json!({"op": op, "path": path});
        let test = |path: &str| json!({"op": "test", "path": path, "value": "mine"});
        assert_eq!(
            body,
            json!([
                test("/spec/taints/2/key"),
                op("remove", "/spec/taints/2"),
                test("/spec/taints/1/key"),
                op("remove", "/spec/taints/1"),
            ])
        );
    }

    #[test]
    fn times_are_written_as_the_api_reads_them() {
        assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(1_700_000_000)), "2023-11-14T22:13:20Z");
    }
}
