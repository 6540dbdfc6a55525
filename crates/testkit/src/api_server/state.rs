//! Objects, versions, history and watches.

use std::collections::BTreeMap;

use futures::StreamExt as _;
use futures::channel::mpsc;
use futures::stream::{self, BoxStream};
use serde_json::{Value, json};

use super::path::Target;

/// A line of a watch.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) line: String,
}

fn event(kind: &str, object: &Value) -> Event {
    Event { line: format!("{}\n", json!({"type": kind, "object": object})) }
}

struct Past {
    version: u64,
    collection: String,
    namespace: String,
    kind: &'static str,
    object: Value,
}

struct Watcher {
    collection: String,
    namespace: String,
    selector: String,
    send: mpsc::UnboundedSender<Event>,
}

type Key = (String, String, String);

#[derive(Default)]
pub(super) struct State {
    objects: BTreeMap<Key, Value>,
    version: u64,
    uids: u64,
    forgotten: u64,
    past: Vec<Past>,
    watchers: Vec<Watcher>,
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// `spec.nodeName=n1`, `metadata.name=x`; all must hold.
fn selected(selector: &str, object: &Value) -> bool {
    selector.split(',').filter(|s| !s.is_empty()).all(|s| {
        let (field, value) = s.split_once('=').unwrap_or((s, ""));
        text(object, &format!("/{}", field.replace('.', "/"))) == value.trim_start_matches('=')
    })
}

impl State {
    pub(super) fn object(&self, collection: &str, namespace: &str, name: &str) -> Option<&Value> {
        self.objects.get(&(collection.into(), namespace.into(), name.into()))
    }

    pub(super) fn list<'a>(
        &'a self,
        collection: &'a str,
        namespace: &'a str,
    ) -> impl Iterator<Item = &'a Value> {
        self.objects
            .iter()
            .filter(move |((c, n, _), _)| c == collection && (namespace.is_empty() || n == namespace))
            .map(|(_, v)| v)
    }

    pub(super) fn page(
        &self,
        collection: &str,
        target: &Target,
        limit: &str,
        from: &str,
        selector: &str,
    ) -> Value {
        let limit = limit.parse().unwrap_or(usize::MAX);
        let skip: usize = from.parse().unwrap_or(0);
        let all: Vec<&Value> =
            self.list(collection, &target.namespace).filter(|o| selected(selector, o)).collect();
        let items: Vec<&&Value> = all.iter().skip(skip).take(limit).collect();
        let mut metadata = json!({"resourceVersion": self.version.to_string()});
        if skip.saturating_add(items.len()) < all.len() {
            metadata["continue"] = (skip + items.len()).to_string().into();
        }
        json!({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items})
    }

    /// As an administrator: whatever was there.
    pub(super) fn put(&mut self, collection: &str, namespace: &str, mut object: Value) {
        let name = text(&object, "/metadata/name").to_owned();
        assert!(!name.is_empty(), "an object without a name");
        if let Some(old) = self.object(collection, namespace, &name) {
            let uid = text(old, "/metadata/uid").to_owned();
            if text(&object, "/metadata/uid").is_empty() {
                object["metadata"]["uid"] = uid.into();
            }
            self.store("MODIFIED", collection, namespace, object);
        } else {
            self.add(collection, namespace, object);
        }
    }

    pub(super) fn create(&mut self, collection: &str, namespace: &str, object: Value) -> Result<Value, u16> {
        let name = text(&object, "/metadata/name").to_owned();
        if name.is_empty() {
            return Err(422);
        }
        if self.object(collection, namespace, &name).is_some() {
            return Err(409);
        }
        Ok(self.add(collection, namespace, object))
    }

    fn add(&mut self, collection: &str, namespace: &str, mut object: Value) -> Value {
        self.uids += 1;
        if text(&object, "/metadata/uid").is_empty() {
            object["metadata"]["uid"] = format!("00000000-0000-0000-0000-{:012}", self.uids).into();
        }
        object["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z".into();
        self.store("ADDED", collection, namespace, object)
    }

    pub(super) fn update(
        &mut self,
        collection: &str,
        target: &Target,
        mut sent: Value,
    ) -> Result<Value, u16> {
        let old = self.object(collection, &target.namespace, &target.name).ok_or(404_u16)?.clone();
        let version = text(&sent, "/metadata/resourceVersion");
        if !version.is_empty() && version != text(&old, "/metadata/resourceVersion") {
            return Err(409);
        }
        let uid = text(&sent, "/metadata/uid");
        if !uid.is_empty() && uid != text(&old, "/metadata/uid") {
            return Err(409);
        }
        for field in ["uid", "creationTimestamp", "resourceVersion"] {
            sent["metadata"][field] = old["metadata"][field].clone();
        }
        if sent == old {
            return Ok(old);
        }
        Ok(self.store("MODIFIED", collection, &target.namespace, sent))
    }

    /// JSON merge patch (RFC 7386).
    pub(super) fn patch(&mut self, collection: &str, target: &Target, patch: &Value) -> Result<Value, u16> {
        let mut object = self.object(collection, &target.namespace, &target.name).ok_or(404_u16)?.clone();
        merge(&mut object, patch);
        self.update(collection, target, object)
    }

    pub(super) fn delete(
        &mut self,
        collection: &str,
        target: &Target,
        options: &Value,
    ) -> Result<Value, u16> {
        let old = self.object(collection, &target.namespace, &target.name).ok_or(404_u16)?;
        for field in ["uid", "resourceVersion"] {
            let wanted = text(options, &format!("/preconditions/{field}"));
            if !wanted.is_empty() && wanted != text(old, &format!("/metadata/{field}")) {
                return Err(409);
            }
        }
        self.remove(collection, &target.namespace, &target.name).ok_or(404)
    }

    pub(super) fn remove(&mut self, collection: &str, namespace: &str, name: &str) -> Option<Value> {
        let mut object = self.objects.remove(&(collection.into(), namespace.into(), name.into()))?;
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.tell("DELETED", collection, namespace, object.clone());
        Some(object)
    }

    fn store(&mut self, kind: &'static str, collection: &str, namespace: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        if !namespace.is_empty() {
            object["metadata"]["namespace"] = namespace.into();
        }
        let name = text(&object, "/metadata/name").to_owned();
        self.objects.insert((collection.into(), namespace.into(), name), object.clone());
        self.tell(kind, collection, namespace, object.clone());
        object
    }

    fn tell(&mut self, kind: &'static str, collection: &str, namespace: &str, object: Value) {
        self.watchers.retain(|w| {
            let concerns = w.collection == collection
                && (w.namespace.is_empty() || w.namespace == namespace)
                && selected(&w.selector, &object);
            !w.send.is_closed() && (!concerns || w.send.unbounded_send(event(kind, &object)).is_ok())
        });
        self.past.push(Past {
            version: self.version,
            collection: collection.into(),
            namespace: namespace.into(),
            kind,
            object,
        });
    }

    pub(super) fn forget(&mut self) {
        // The version itself moves on, so that every watch before this moment is too old.
        self.version += 1;
        self.forgotten = self.version;
        self.past.clear();
    }

    pub(super) fn end_watches(&mut self) {
        self.watchers.clear();
    }

    pub(super) fn say(&mut self, kind: &str, object: &Value) {
        self.watchers.retain(|w| w.send.unbounded_send(event(kind, object)).is_ok());
    }

    /// `None`: the version is forgotten.
    pub(super) fn watch(
        &mut self,
        collection: &str,
        namespace: &str,
        selector: &str,
        since: u64,
        from_list: bool,
    ) -> Option<BoxStream<'static, Event>> {
        if !from_list && since < self.forgotten {
            return None;
        }
        let mut first = Vec::new();
        if from_list {
            first.extend(
                self.list(collection, namespace).filter(|o| selected(selector, o)).map(|o| event("ADDED", o)),
            );
            let version = self.version.to_string();
            let mark = json!({"metadata": {"resourceVersion": version, "annotations": {"k8s.io/initial-events-end": "true"}}});
            first.push(event("BOOKMARK", &mark));
        } else {
            let missed = self.past.iter().filter(|p| {
                p.version > since
                    && p.collection == collection
                    && (namespace.is_empty() || p.namespace == namespace)
                    && selected(selector, &p.object)
            });
            first.extend(missed.map(|p| event(p.kind, &p.object)));
        }
        let (send, receive) = mpsc::unbounded();
        self.watchers.push(Watcher {
            collection: collection.into(),
            namespace: namespace.into(),
            selector: selector.into(),
            send,
        });
        Some(stream::iter(first).chain(receive).boxed())
    }
}

fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (key, value) in fields {
        if value.is_null() {
            if let Some(object) = into.as_object_mut() {
                object.remove(key);
            }
        } else {
            merge(&mut into[key], value);
        }
    }
}
