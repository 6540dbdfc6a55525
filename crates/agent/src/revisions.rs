//! The rules that endpoints were judged by, for a way back: the last few revisions of each. They lie on the disk; memory knows which.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use flowloom_compiler::{Held, PolicySpec, RuleId};
use flowloom_model::EndpointKey;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::store::{Store, StoreError};

/// File in the state directory.
pub(crate) const FILE: &str = "policy-revisions.jsonl";
/// Most revisions of an endpoint.
pub(crate) const KEPT: usize = 8;
/// The file may be this much larger than twice what it needs, in bytes.
const SLACK: usize = 1 << 20;

/// Stands for a policy's contents in the file.
type Id = [u64; 2];

/// A line of the file. A policy comes before the revisions that name it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line<P> {
    Policy { id: Id, policy: P },
    Revision { endpoint: EndpointKey, revision: u32, egress: Id, ingress: Id },
}

/// See the module's comment.
#[derive(Debug, Default)]
pub(crate) struct Revisions {
    of: BTreeMap<EndpointKey, VecDeque<(u32, [Id; 2])>>,
    /// Policies in the file.
    written: HashSet<Id>,
    bytes: usize,
    /// `bytes` when it held nothing more than it needs.
    needed: usize,
    waiting: Vec<(EndpointKey, u32, [Arc<PolicySpec>; 2])>,
}

/// Rules have other numbers in another life, and are the same.
fn plain(spec: &PolicySpec) -> PolicySpec {
    let mut spec = spec.clone();
    spec.rules.iter_mut().for_each(|rule| rule.id = RuleId(0));
    spec
}

fn id_of(plain: &PolicySpec) -> Id {
    [0_u8, 1].map(|salt| {
        let mut hasher = DefaultHasher::new();
        (salt, plain).hash(&mut hasher);
        hasher.finish()
    })
}

fn line<P: Serialize>(line: &Line<P>, text: &mut Vec<u8>) {
    // These types have string keys only: serialising cannot fail.
    text.extend(serde_json::to_vec(line).unwrap_or_default());
    text.push(b'\n');
}

impl Revisions {
    /// What a life before this one left of the endpoints that are still known.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn load(store: &Store, known: impl Fn(&EndpointKey) -> bool) -> Result<Self, StoreError> {
        let mut revisions = Self { bytes: store.size(FILE), ..Self::default() };
        for line in store.lines::<Line<IgnoredAny>>(FILE)? {
            match line {
                Line::Policy { id, .. } => drop(revisions.written.insert(id)),
                Line::Revision { endpoint, revision, egress, ingress } if known(&endpoint) => {
                    revisions.remember(endpoint, revision, [egress, ingress]);
                }
                Line::Revision { .. } => {}
            }
        }
        Ok(revisions)
    }

    fn remember(&mut self, endpoint: EndpointKey, revision: u32, ids: [Id; 2]) {
        let kept = self.of.entry(endpoint).or_default();
        kept.push_back((revision, ids));
        while kept.len() > KEPT {
            kept.pop_front();
        }
    }

    /// An endpoint is judged by these from now on: egress, ingress.
    pub(crate) fn note(&mut self, endpoint: &EndpointKey, revision: u32, specs: [Arc<PolicySpec>; 2]) {
        self.waiting.push((endpoint.clone(), revision, specs));
    }

    /// The endpoint is gone.
    pub(crate) fn forget(&mut self, endpoint: &EndpointKey) {
        self.of.remove(endpoint);
        self.waiting.retain(|(key, ..)| key != endpoint);
    }

    /// Writes what was noted.
    ///
    /// # Errors
    /// When the file system refuses; what was noted is then no way back.
    pub(crate) fn write(&mut self, store: &Store) -> Result<(), StoreError> {
        let waiting = std::mem::take(&mut self.waiting);
        if waiting.is_empty() {
            return Ok(());
        }
        let (mut text, mut known) = (Vec::new(), HashMap::new());
        for (endpoint, revision, specs) in &waiting {
            let ids = [&specs[0], &specs[1]].map(|spec| {
                // Endpoints with the same rules change together.
                *known.entry(Arc::as_ptr(spec)).or_insert_with(|| {
                    let policy = plain(spec);
                    let id = id_of(&policy);
                    if self.written.insert(id) {
                        line(&Line::Policy { id, policy }, &mut text);
                    }
                    id
                })
            });
            let [egress, ingress] = ids;
            let (endpoint, revision) = (endpoint.clone(), *revision);
            self.remember(endpoint.clone(), revision, ids);
            line(&Line::<()>::Revision { endpoint, revision, egress, ingress }, &mut text);
        }
        if let Err(e) = store.append(FILE, &text) {
            // What is on the disk of it, if anything, says so when a policy of it comes again.
            self.written.clear();
            for (endpoint, revision, _) in &waiting {
                if let Some(kept) = self.of.get_mut(endpoint) {
                    kept.retain(|(known, _)| known != revision);
                }
            }
            return Err(e);
        }
        self.bytes += text.len();
        if self.bytes > 2 * self.needed + SLACK { self.compact(store) } else { Ok(()) }
    }

    /// Leaves out what no revision that is kept names.
    fn compact(&mut self, store: &Store) -> Result<(), StoreError> {
        let live: HashSet<Id> = self.of.values().flatten().flat_map(|(_, ids)| *ids).collect();
        let mut text = Vec::new();
        for policy in store.lines::<Line<serde_json::Value>>(FILE)? {
            if matches!(&policy, Line::Policy { id, .. } if live.contains(id)) {
                line(&policy, &mut text);
            }
        }
        for (endpoint, kept) in &self.of {
            for (revision, [egress, ingress]) in kept {
                let (endpoint, revision) = (endpoint.clone(), *revision);
                let (egress, ingress) = (*egress, *ingress);
                line(&Line::<()>::Revision { endpoint, revision, egress, ingress }, &mut text);
            }
        }
        store.replace_lines(FILE, &text)?;
        (self.bytes, self.needed, self.written) = (text.len(), text.len(), live);
        Ok(())
    }

    /// Revisions of an endpoint that there is a way back to, oldest first.
    pub(crate) fn kept(&self, endpoint: &EndpointKey) -> Vec<u32> {
        self.of.get(endpoint).into_iter().flatten().map(|(revision, _)| *revision).collect()
    }

    /// The rules of a revision; `None` when it is not kept.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn find(
        &self,
        store: &Store,
        endpoint: &EndpointKey,
        revision: u32,
    ) -> Result<Option<Held>, StoreError> {
        let kept = self.of.get(endpoint).into_iter().flatten().rev();
        let Some((_, [egress, ingress])) = kept.into_iter().find(|(kept, _)| *kept == revision) else {
            return Ok(None);
        };
        let (mut out, mut into) = (None, None);
        for line in store.lines::<Line<PolicySpec>>(FILE)? {
            let Line::Policy { id, policy } = line else { continue };
            let policy = Arc::new(policy);
            if id == *egress {
                out = Some(policy.clone());
            }
            if id == *ingress {
                into = Some(policy);
            }
        }
        Ok(out.zip(into).map(|(egress, ingress)| Held { egress: Some(egress), ingress: Some(ingress) }))
    }
}
