//! The record of changes of policies: who changed what of which endpoint, and whether it came into force. Bounded, and there after a restart.
//!
//! A change is noted down when it is made; what it did to the entries is counted, and the line written, when nobody waits for the core.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_compiler::{
    CompiledPolicy, EndpointPlan, Identity, IdentityFacts, NodePlan, Numbers, PolicyEntries, PolicySlot,
    PolicySpec,
};
use flowloom_model::{EndpointKey, SharedMap};

use crate::core::{Core, now_ms};
use crate::revisions::Revisions;
use crate::store::{Store, StoreError};

/// File in the state directory.
pub(crate) const FILE: &str = "policy-history.jsonl";
/// Most changes kept.
const CAPACITY: usize = 2000;
/// More batches than this wait for nobody.
const MOST_WAITING: usize = 64;

/// What an endpoint is judged by.
#[derive(Clone, Debug)]
struct Decided {
    revision: u32,
    slots: [PolicySlot; 2],
    /// Egress, ingress; unknown where a life before this one knew.
    specs: [Option<Arc<PolicySpec>>; 2],
}

/// A change whose entries are not counted yet.
#[derive(Debug)]
struct Noted {
    change: v1::PolicyChange,
    /// Before and after, for each of the change's directions; absent for a first policy.
    policies: Vec<Option<(Arc<PolicySpec>, Arc<CompiledPolicy>)>>,
}

/// Changes of one pass.
#[derive(Debug, Default)]
struct Batch {
    /// Whom policies are compiled for.
    identities: SharedMap<Identity, Arc<IdentityFacts>>,
    noted: Vec<Noted>,
}

/// See the module's comment.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// On whose behalf policies change now.
    pub(crate) source: v1::ChangeSource,
    /// The endpoint that an operator's word is about.
    about: Option<EndpointKey>,
    changes: VecDeque<v1::PolicyChange>,
    /// Number of the next one.
    next: u64,
    /// Lines in the file.
    lines: usize,
    decided: BTreeMap<EndpointKey, Decided>,
    /// What was refused last, by endpoint: it is tried again and noted once.
    refused: BTreeMap<EndpointKey, (u32, String)>,
    waiting: Vec<Batch>,
    /// The rules of earlier revisions.
    pub(crate) revisions: Revisions,
}

/// Endpoints that a plan decides differently.
pub(crate) type Changes = Vec<(EndpointKey, v1::ChangeSource)>;

impl History {
    /// What a life before this one left.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn load(store: &Store, numbers: &Numbers) -> Result<Self, StoreError> {
        let mut changes: VecDeque<v1::PolicyChange> = store.lines(FILE)?.into();
        let lines = changes.len();
        changes.drain(..lines.saturating_sub(CAPACITY));
        let mut in_force: HashMap<&str, u32> = HashMap::new();
        for change in changes.iter().filter(|c| c.error.is_empty()) {
            in_force.insert(&change.endpoint, change.attempted_revision);
        }
        let mut decided = BTreeMap::new();
        for (key, revision, slots) in numbers.decided() {
            let known = match in_force.get(key.to_string().as_str()) {
                // It was to be in force, and the agent did not live to say so.
                Some(recorded) if *recorded < revision => {
                    Decided { revision: *recorded, slots: [PolicySlot(0); 2], specs: [None, None] }
                }
                _ => Decided { revision, slots, specs: slots.map(|slot| numbers.spec(slot).cloned()) },
            };
            decided.insert((**key).clone(), known);
        }
        let next = changes.back().map_or(1, |c| c.number + 1);
        let revisions = Revisions::load(store, |key| decided.contains_key(key))?;
        Ok(Self { changes, next, lines, decided, revisions, ..Self::default() })
    }

    /// Notes down what became of the changes. `refusal` says why an endpoint is not judged as planned.
    pub(crate) fn note(
        &mut self,
        plan: &NodePlan,
        changes: Changes,
        refusal: impl Fn(&EndpointPlan) -> Option<String>,
    ) {
        let (mut noted, time_ms) = (Vec::new(), now_ms());
        for (key, source) in changes {
            let Some(planned) = plan.endpoints.get(&key) else { continue };
            let error = refusal(planned).unwrap_or_default();
            if error.is_empty() {
                self.refused.remove(&key);
            } else {
                let refused = (planned.revision, error.clone());
                if self.refused.get(&key) == Some(&refused) {
                    continue;
                }
                self.refused.insert(key.clone(), refused);
            }
            let slots = [planned.egress_slot, planned.ingress_slot];
            let policies = slots.map(|slot| plan.policies.get(&slot));
            let before = self.decided.get(&key);
            let (mut directions, mut pairs) = (Vec::new(), Vec::new());
            for (at, direction) in [v1::Direction::Egress, v1::Direction::Ingress].into_iter().enumerate() {
                if before.is_some_and(|b| b.slots[at] == slots[at]) {
                    continue;
                }
                let spec = before.and_then(|b| b.specs[at].clone());
                pairs.push(spec.zip(policies[at].cloned()));
                directions.push(v1::DirectionChange { direction, slot: slots[at].0, entries: None });
            }
            let change = v1::PolicyChange {
                number: self.next,
                time_ms,
                endpoint: key.to_string(),
                source,
                previous_revision: before.map_or(0, |b| b.revision),
                attempted_revision: planned.revision,
                directions,
                error,
            };
            self.next += 1;
            if change.error.is_empty() {
                let specs = policies.map(|policy| policy.map(|p| p.spec().clone()));
                if let [Some(egress), Some(ingress)] = &specs {
                    self.revisions.note(&key, planned.revision, [egress.clone(), ingress.clone()]);
                }
                self.decided.insert(key, Decided { revision: planned.revision, slots, specs });
            }
            noted.push(Noted { change, policies: pairs });
        }
        if !noted.is_empty() {
            self.waiting.push(Batch { identities: plan.identities.clone(), noted });
        }
    }

    /// What changes of the endpoint next, an operator wants.
    pub(crate) fn by_operator(&mut self, key: &EndpointKey, source: v1::ChangeSource) {
        (self.source, self.about) = (source, Some(key.clone()));
    }

    /// Who changes an endpoint now.
    fn source_for(&self, key: &EndpointKey) -> v1::ChangeSource {
        match &self.source {
            v1::ChangeSource::Operator { .. } if self.about.as_ref() != Some(key) => v1::ChangeSource::Agent,
            source => source.clone(),
        }
    }

    /// Number of the next change.
    pub(crate) fn next_number(&self) -> u64 {
        self.next
    }

    /// Notes down that something was said of an endpoint, where no change from number `first` on is about it.
    pub(crate) fn note_action(
        &mut self,
        key: &EndpointKey,
        first: u64,
        source: v1::ChangeSource,
        [previous_revision, attempted_revision]: [u32; 2],
        error: String,
    ) {
        let endpoint = key.to_string();
        let waiting = self.waiting.iter().flat_map(|batch| &batch.noted).map(|noted| &noted.change);
        if waiting.chain(&self.changes).any(|c| c.number >= first && c.endpoint == endpoint) {
            return;
        }
        let change = v1::PolicyChange {
            number: self.next,
            time_ms: now_ms(),
            endpoint,
            source,
            previous_revision,
            attempted_revision,
            directions: Vec::new(),
            error,
        };
        self.next += 1;
        let noted = vec![Noted { change, policies: Vec::new() }];
        self.waiting.push(Batch { noted, ..Batch::default() });
    }

    /// Whether [`Self::write`] has something to do.
    pub(crate) fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Counts entries and writes the lines.
    pub(crate) fn write(&mut self, store: &Store) {
        let mut text = Vec::new();
        for Batch { identities, noted } in std::mem::take(&mut self.waiting) {
            let mut counted = HashMap::new();
            for Noted { change, policies } in &noted {
                let mut change = change.clone();
                for (direction, pair) in change.directions.iter_mut().zip(policies) {
                    direction.entries = pair.as_ref().map(|(before, after)| {
                        // Endpoints with the same rules change together.
                        let key = (Arc::as_ptr(before), Arc::as_ptr(after));
                        *counted.entry(key).or_insert_with(|| {
                            let before = CompiledPolicy::new(before.clone());
                            compare(&before.entries(&identities), &after.entries(&identities))
                        })
                    });
                }
                // These types have string keys only: serialising cannot fail.
                text.extend(serde_json::to_vec(&change).unwrap_or_default());
                text.push(b'\n');
                self.lines += 1;
                self.changes.push_back(change);
            }
        }
        let surplus = self.changes.len().saturating_sub(CAPACITY);
        self.changes.drain(..surplus);
        let written = if self.lines > 2 * CAPACITY {
            let mut all = Vec::new();
            for change in &self.changes {
                all.extend(serde_json::to_vec(change).unwrap_or_default());
                all.push(b'\n');
            }
            self.lines = self.changes.len();
            store.replace_lines(FILE, &all)
        } else {
            store.append(FILE, &text)
        };
        if let Err(e) = written.and_then(|()| self.revisions.write(store)) {
            tracing::warn!(error = %e, "changes of policies are not kept for a restart");
        }
    }
}

/// What the later entries differ in.
fn compare(before: &PolicyEntries, after: &PolicyEntries) -> v1::EntryCounts {
    let mut counts = v1::EntryCounts::default();
    for (key, value) in after {
        match before.get(key) {
            None => counts.added += 1,
            Some(old) if old != value => counts.updated += 1,
            Some(_) => {}
        }
    }
    counts.removed = before.keys().filter(|key| !after.contains_key(key)).count() as u64;
    counts
}

impl Core {
    /// Endpoints that are judged by another revision once `plan` is in force.
    pub(crate) fn changes_to(&mut self, plan: &NodePlan) -> Changes {
        let apart = self.plan.endpoints.apart(&plan.endpoints);
        let differ: BTreeSet<&EndpointKey> = apart.map(|(key, ..)| key).collect();
        let gone = |key: &&EndpointKey| !self.wanted.endpoints.contains_key(*key);
        for key in differ.iter().copied().filter(gone) {
            self.history.decided.remove(key);
            self.history.refused.remove(key);
            self.history.revisions.forget(key);
        }
        let (history, records) = (&self.history, &self.records);
        let looked_at = differ.into_iter().chain(history.refused.keys());
        let mut changes: Changes = looked_at
            .filter_map(|key| Some((key, plan.endpoints.get(key)?.revision)))
            .filter(|(key, revision)| history.decided.get(*key).is_none_or(|d| d.revision != *revision))
            .map(|(key, _)| {
                let attachment = records.get(key).and_then(|r| Some(&r.cni.as_ref()?.attachment));
                let source = match attachment.filter(|_| !history.decided.contains_key(key)) {
                    Some(new) => v1::ChangeSource::Cni {
                        container_id: new.container_id.clone(),
                        ifname: new.ifname.clone(),
                    },
                    None => history.source_for(key),
                };
                (key.clone(), source)
            })
            .collect();
        changes.sort_by(|a, b| a.0.cmp(&b.0));
        changes.dedup_by(|a, b| a.0 == b.0);
        if self.history.waiting.len() >= MOST_WAITING {
            self.history.write(&self.store);
        }
        changes
    }

    /// The last changes, of one endpoint or of all; of an endpoint that is gone, too.
    ///
    /// # Errors
    /// For a name that no endpoint has and no change is about.
    pub(crate) fn policy_history(
        &mut self,
        of: Option<&(String, String)>,
        last: Option<usize>,
    ) -> Result<v1::PolicyHistory, ApiError> {
        if self.history.waits() {
            self.history.write(&self.store);
        }
        let key = of.map(|(before, name)| self.endpoint_meant(before, name)).transpose()?;
        let name = key.as_ref().map(ToString::to_string);
        let of_name = |c: &&v1::PolicyChange| name.as_ref().is_none_or(|name| c.endpoint == *name);
        let mut changes: Vec<_> = self.history.changes.iter().filter(of_name).cloned().collect();
        if let (Some((before, name)), Some(key)) = (of, &key)
            && changes.is_empty()
            && self.world.endpoints.get(key).is_none_or(|e| e.node != self.config.node)
        {
            return Err(ApiError::new(ErrorCode::NotFound, self.not_here(before, name, key)));
        }
        let surplus = changes.len().saturating_sub(last.unwrap_or(usize::MAX));
        changes.drain(..surplus);
        Ok(v1::PolicyHistory { capacity: CAPACITY as u64, changes })
    }
}
