//! Quarantine, freeze and rollback: what somebody has an endpoint judged by, whatever the sources say. On the disk before it is in force, so that
//! neither a restart nor the next change of rules ends it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_compiler::{DefaultVerdict, Held, Pins, PolicySpec, RuleId, RuleRef, SpecRule, world_spec};
use flowloom_k8s::ObjectName;
use flowloom_model::{Direction, EndpointKey, World};
use serde::{Deserialize, Serialize};

use crate::core::{Core, now_ms};
use crate::store::{Store, StoreError};

/// File in the state directory.
pub(crate) const FILE: &str = "policy-pins.json";
/// Most endpoints held at once.
const MOST: usize = 1024;
/// Longest reason, bytes: it stands in conditions and in a line of the record each time.
const LONGEST_REASON: usize = 1024;
/// Most rules named in a condition.
const NAMED: usize = 5;
/// Label that tells lives of a Pod apart.
const POD_UID: &str = "k8s.pod.uid";

/// How one endpoint is held.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Pin {
    endpoint: EndpointKey,
    life: Life,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    quarantine: Option<v1::Quarantine>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    frozen: Option<Freeze>,
}

/// What a pin ends with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Life {
    /// Nothing: an endpoint of the document may go and come back.
    Name,
    /// A Pod: its sandbox may be another one by tomorrow.
    Pod { namespace: String, name: String, uid: String },
    /// An attachment.
    Attachment(v1::CniAttachment),
}

/// A policy as it was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Freeze {
    revision: u32,
    reason: String,
    since_ms: u64,
    policy: Held,
    /// The revision is not the one that was in force then.
    #[serde(default)]
    rolled_back: bool,
}

/// Every endpoint held.
#[derive(Clone, Debug, Default)]
pub(crate) struct Holds {
    pins: BTreeMap<EndpointKey, Pin>,
    /// The same as the compiler takes it.
    compiled: Pins,
}

impl Pin {
    fn new(endpoint: EndpointKey, life: Life) -> Self {
        Self { endpoint, life, quarantine: None, frozen: None }
    }

    fn compiled(&self) -> Held {
        let of = |direction| {
            let closed = self.quarantine.as_ref().is_some_and(|q| covers(q, direction));
            let deny = || Arc::new(PolicySpec::deny_all(self.endpoint.vpc.clone(), direction));
            let frozen = || self.frozen.as_ref().and_then(|f| f.policy.of(direction).cloned());
            if closed { Some(deny()) } else { frozen() }
        };
        Held { egress: of(Direction::Egress), ingress: of(Direction::Ingress) }
    }
}

impl Freeze {
    fn word(&self) -> &'static str {
        if self.rolled_back { "rollback" } else { "freeze" }
    }
}

fn covers(quarantine: &v1::Quarantine, direction: Direction) -> bool {
    match direction {
        Direction::Egress => quarantine.egress,
        Direction::Ingress => quarantine.ingress,
    }
}

impl Holds {
    /// What a life before this one held.
    ///
    /// # Errors
    /// When the file is damaged: who is in quarantine is not let out by that.
    pub(crate) fn load(store: &Store) -> Result<Self, StoreError> {
        let list: Vec<Pin> = store.read(FILE)?.unwrap_or_default();
        Ok(Self::of(list.into_iter().map(|pin| (pin.endpoint.clone(), pin)).collect()))
    }

    fn of(pins: BTreeMap<EndpointKey, Pin>) -> Self {
        let compiled = pins.iter().map(|(key, pin)| (key.clone(), pin.compiled())).collect();
        Self { pins, compiled }
    }

    /// For the compiler.
    pub(crate) fn compiled(&self) -> &Pins {
        &self.compiled
    }

    /// Whether an endpoint is in quarantine in that direction.
    pub(crate) fn quarantined(&self, key: &EndpointKey, direction: Direction) -> bool {
        let quarantine = self.pins.get(key).and_then(|pin| pin.quarantine.as_ref());
        quarantine.is_some_and(|q| covers(q, direction))
    }

    /// `quarantine`, `freeze` or `rollback`, where one of them decides.
    pub(crate) fn word(&self, key: &EndpointKey, direction: Direction) -> Option<&'static str> {
        if self.quarantined(key, direction) {
            return Some("quarantine");
        }
        self.pins.get(key)?.frozen.as_ref().map(Freeze::word)
    }

    /// As conditions of the endpoint.
    pub(crate) fn conditions(&self, key: &EndpointKey, world: &World, generation: u64) -> Vec<v1::Condition> {
        let Some(pin) = self.pins.get(key) else { return Vec::new() };
        let condition = |kind: &str, reason: &str, message: String, since_ms| v1::Condition {
            kind: kind.to_owned(),
            status: true,
            reason: reason.to_owned(),
            message,
            observed_generation: generation,
            last_transition_ms: since_ms,
        };
        let given = |reason: &str| if reason.is_empty() { String::new() } else { format!(" ({reason})") };
        let quarantine = pin.quarantine.as_ref().map(|q| {
            let message = format!(
                "nothing passes in {}{}; `flowloom policy release {key}` ends it",
                directions(q),
                given(&q.reason)
            );
            condition("Quarantined", "Quarantine", message, q.since_ms)
        });
        let frozen = pin.frozen.as_ref().map(|f| {
            let withheld = match withheld(world, key, &f.policy) {
                none if none.is_empty() => "nothing is withheld so far".to_owned(),
                some => format!("withheld: {some}"),
            };
            let (stay, reason) =
                if f.rolled_back { ("are in force again", "Rollback") } else { ("stay in force", "Freeze") };
            let message = format!(
                "the rules of revision {} {stay}{}; {withheld}; `flowloom policy release {key}` ends it",
                f.revision,
                given(&f.reason)
            );
            condition("Frozen", reason, message, f.since_ms)
        });
        quarantine.into_iter().chain(frozen).collect()
    }
}

/// In words.
fn directions(quarantine: &v1::Quarantine) -> &'static str {
    match (quarantine.ingress, quarantine.egress) {
        (true, true) => "ingress and egress",
        (true, false) => "ingress",
        _ => "egress",
    }
}

/// What the world says otherwise than a policy that is held, in words.
fn withheld(world: &World, key: &EndpointKey, held: &Held) -> String {
    let mut parts = Vec::new();
    for direction in [Direction::Egress, Direction::Ingress] {
        let Some((held, wanted)) = held.of(direction).zip(world_spec(world, key, direction)) else {
            continue;
        };
        // Numbers say nothing here.
        let plain = |rule: &SpecRule| (rule.name.clone(), SpecRule { id: RuleId(0), ..rule.clone() });
        let old: BTreeMap<Arc<RuleRef>, SpecRule> = held.rules.iter().map(plain).collect();
        let new: BTreeMap<Arc<RuleRef>, SpecRule> = wanted.rules.iter().map(plain).collect();
        let mut said = |what: &str, names: Vec<&Arc<RuleRef>>| {
            if names.is_empty() {
                return;
            }
            let mut text: Vec<String> = names.iter().take(NAMED).map(ToString::to_string).collect();
            if names.len() > NAMED {
                text.push(format!("{} more", names.len() - NAMED));
            }
            parts.push(format!("{what} {}", text.join(", ")));
        };
        said("new", new.keys().filter(|name| !old.contains_key(*name)).collect());
        said("gone", old.keys().filter(|name| !new.contains_key(*name)).collect());
        let differs = |name: &&Arc<RuleRef>| old.get(*name).is_some_and(|rule| new.get(*name) != Some(rule));
        said("changed", new.keys().filter(differs).collect());
        if held.default != wanted.default {
            let default = if wanted.default == DefaultVerdict::Allow { "allow" } else { "drop" };
            let direction = if direction == Direction::Egress { "egress" } else { "ingress" };
            parts.push(format!("{direction} without a matching rule: {default}"));
        }
    }
    parts.join("; ")
}

impl Core {
    /// Ends what was held of lives that are over. Before each compilation: the next life of a name is not judged by it.
    pub(crate) fn end_holds(&mut self) {
        let over: Vec<EndpointKey> = self
            .holds
            .pins
            .values()
            .filter(|pin| self.is_over(pin))
            .map(|pin| pin.endpoint.clone())
            .collect();
        if over.is_empty() {
            return;
        }
        let mut pins = self.holds.pins.clone();
        for key in over {
            tracing::info!(endpoint = %key, "what it was held at ends with it");
            pins.remove(&key);
        }
        // Where the disk has it still, the next start comes to the same end.
        if let Err(e) = self.keep_holds(pins.clone()) {
            self.note_error(e.message);
            self.holds = Holds::of(pins);
        }
    }

    fn is_over(&self, pin: &Pin) -> bool {
        let key = &pin.endpoint;
        match &pin.life {
            Life::Name => false,
            Life::Attachment(attachment) => {
                let now = self.records.get(key).and_then(|r| r.cni.as_ref());
                now.is_none_or(|cni| cni.attachment != *attachment)
            }
            Life::Pod { namespace, name, uid } => match self.world.endpoints.get(key) {
                Some(now) => now.labels.get(POD_UID) != Some(uid),
                // Between two sandboxes. Without an API server nobody knows whether there will be another.
                None => self.kubernetes.as_ref().is_some_and(|k| {
                    k.local(&ObjectName::new(namespace.as_str(), name.as_str()), Some(uid)).is_none()
                }),
            },
        }
    }

    /// What the endpoint of a name lives as long as.
    fn life_of(&self, key: &EndpointKey) -> Life {
        if self.document.as_ref().is_some_and(|d| d.world.endpoints.contains_key(key)) {
            return Life::Name;
        }
        let labels = self.world.endpoints.get(key).map(|e| &e.labels);
        let label = |name: &str| labels.and_then(|l| l.get(name)).cloned();
        let cni = self.records.get(key).and_then(|r| r.cni.as_ref());
        match (label("k8s.pod.namespace"), label("k8s.pod.name"), label(POD_UID), cni) {
            (Some(namespace), Some(name), Some(uid), _) => Life::Pod { namespace, name, uid },
            (.., Some(cni)) => Life::Attachment(cni.attachment.clone()),
            _ => Life::Name,
        }
    }

    /// On the disk first.
    fn keep_holds(&mut self, pins: BTreeMap<EndpointKey, Pin>) -> Result<(), ApiError> {
        let list: Vec<&Pin> = pins.values().collect();
        self.store
            .write(FILE, &list)
            .map_err(|e| ApiError::new(ErrorCode::Internal, format!("nothing is changed: {e}")))?;
        self.holds = Holds::of(pins);
        Ok(())
    }

    fn held_endpoint(&self, vpc: &str, name: &str) -> Result<EndpointKey, ApiError> {
        if !self.sources_spoke() {
            return Err(ApiError::new(ErrorCode::NotReady, "the agent does not know its endpoints yet"));
        }
        let key = self.endpoint_meant(vpc, name)?;
        let here = |key: &EndpointKey| {
            self.world.endpoints.get(key).is_some_and(|e| e.node == self.config.node)
                || self.holds.pins.contains_key(key)
        };
        if here(&key) {
            return Ok(key);
        }
        // One that is gone and held still.
        match format!("{vpc}/{name}").parse::<EndpointKey>() {
            Ok(own) if here(&own) => Ok(own),
            _ => Err(ApiError::new(ErrorCode::NotFound, self.not_here(vpc, name, &key))),
        }
    }

    fn pin_of(&self, key: &EndpointKey) -> Result<Pin, ApiError> {
        match self.holds.pins.get(key) {
            Some(pin) => Ok(pin.clone()),
            None if self.holds.pins.len() >= MOST => {
                let message = format!("{MOST} endpoints of this node are held already: release some first");
                Err(ApiError::new(ErrorCode::CapacityExceeded, message))
            }
            None => Ok(Pin::new(key.clone(), self.life_of(key))),
        }
    }

    /// Lets nothing pass in the directions; returns once that is in force.
    ///
    /// # Errors
    /// For an endpoint that is not here; when it could not be kept on the disk, or put in force.
    pub(crate) fn quarantine(&mut self, request: &v1::QuarantineRequest) -> Result<v1::PolicyHold, ApiError> {
        if !request.ingress && !request.egress {
            let message = "a quarantine needs a direction: ingress, egress or both";
            return Err(ApiError::new(ErrorCode::InvalidRequest, message));
        }
        let key = self.held_endpoint(&request.vpc, &request.endpoint)?;
        let mut pin = self.pin_of(&key)?;
        let since_ms = pin.quarantine.as_ref().map_or_else(now_ms, |q| q.since_ms);
        let (ingress, egress, reason) = (request.ingress, request.egress, request.reason.clone());
        pin.quarantine = Some(v1::Quarantine { ingress, egress, reason, since_ms });
        self.hold(&key, Some(pin), "quarantine", &request.reason)
    }

    /// Keeps the rules that are in force now.
    ///
    /// # Errors
    /// As [`Self::quarantine`]; for an endpoint in quarantine, one that is frozen already, or one whose policy is not in force.
    pub(crate) fn freeze(&mut self, request: &v1::HoldRequest) -> Result<v1::PolicyHold, ApiError> {
        let key = self.held_endpoint(&request.vpc, &request.endpoint)?;
        let mut pin = self.pin_of(&key)?;
        let conflict = |message: String| Err(ApiError::new(ErrorCode::Conflict, message));
        if pin.quarantine.is_some() {
            return conflict(format!("endpoint {key} is in quarantine: release it first"));
        }
        if let Some(frozen) = &pin.frozen {
            let revision = frozen.revision;
            return conflict(format!(
                "endpoint {key} is frozen at revision {revision} already: release it first"
            ));
        }
        let plan = self.plan.endpoints.get(&key).filter(|plan| self.is_in_force(plan));
        let spec = |slot| self.plan.policies.get(&slot).map(|policy| policy.spec().clone());
        let policy =
            plan.map(|plan| Held { egress: spec(plan.egress_slot), ingress: spec(plan.ingress_slot) });
        let Some((plan, policy)) = plan.zip(policy) else {
            return conflict(format!(
                "endpoint {key} has no policy in force that could stay; see `flowloom endpoint get {key}`"
            ));
        };
        let (revision, reason, since_ms) = (plan.revision, request.reason.clone(), now_ms());
        pin.frozen = Some(Freeze { revision, reason, since_ms, policy, rolled_back: false });
        self.hold(&key, Some(pin), "freeze", &request.reason)
    }

    /// Puts the rules of an earlier revision in force, and keeps them.
    ///
    /// # Errors
    /// As [`Self::quarantine`]; for an endpoint in quarantine, or a revision that is not kept.
    pub(crate) fn rollback(&mut self, request: &v1::RollbackRequest) -> Result<v1::PolicyHold, ApiError> {
        let key = self.held_endpoint(&request.vpc, &request.endpoint)?;
        let mut pin = self.pin_of(&key)?;
        let conflict = |message: String| Err(ApiError::new(ErrorCode::Conflict, message));
        if pin.quarantine.is_some() {
            return conflict(format!("endpoint {key} is in quarantine: release it first"));
        }
        if self.history.waits() {
            self.history.write(&self.store);
        }
        let revision = request.revision;
        let found = self.history.revisions.find(&self.store, &key, revision);
        let found = found.map_err(|e| ApiError::new(ErrorCode::Internal, e.to_string()))?;
        let Some(policy) = found else {
            let kept: Vec<String> = self.history.revisions.kept(&key).iter().map(u32::to_string).collect();
            let kept = if kept.is_empty() { "none".to_owned() } else { kept.join(", ") };
            return conflict(format!(
                "revision {revision} of endpoint {key} is not kept; there is a way back to: {kept}"
            ));
        };
        let (reason, since_ms) = (request.reason.clone(), now_ms());
        pin.frozen = Some(Freeze { revision, reason, since_ms, policy, rolled_back: true });
        self.hold(&key, Some(pin), "rollback", &request.reason)
    }

    /// Ends a quarantine, or where there is none a freeze; returns once what the sources say (or what was frozen) is in force.
    ///
    /// # Errors
    /// As [`Self::quarantine`]; for an endpoint that is not held.
    pub(crate) fn release(&mut self, request: &v1::HoldRequest) -> Result<v1::PolicyHold, ApiError> {
        let key = self.held_endpoint(&request.vpc, &request.endpoint)?;
        let Some(mut pin) = self.holds.pins.get(&key).cloned() else {
            let message = format!(
                "endpoint {key} is neither in quarantine nor frozen nor rolled back: there is nothing to release"
            );
            return Err(ApiError::new(ErrorCode::Conflict, message));
        };
        let action = if pin.quarantine.take().is_some() {
            "release from quarantine"
        } else {
            let rolled_back = pin.frozen.take().is_some_and(|f| f.rolled_back);
            if rolled_back { "release from rollback" } else { "release from freeze" }
        };
        let pin = Some(pin).filter(|pin| pin.frozen.is_some());
        self.hold(&key, pin, action, &request.reason)
    }

    fn hold(
        &mut self,
        key: &EndpointKey,
        pin: Option<Pin>,
        action: &str,
        reason: &str,
    ) -> Result<v1::PolicyHold, ApiError> {
        if reason.len() > LONGEST_REASON {
            let message =
                format!("the reason has {} bytes, which may be {LONGEST_REASON} at most", reason.len());
            return Err(ApiError::new(ErrorCode::InvalidRequest, message));
        }
        let previous_revision = self.plan.endpoints.get(key).map_or(0, |plan| plan.revision);
        let mut pins = self.holds.pins.clone();
        match pin {
            Some(pin) => drop(pins.insert(key.clone(), pin)),
            None => drop(pins.remove(key)),
        }
        self.keep_holds(pins)?;
        let first = self.history.next_number();
        let source = v1::ChangeSource::Operator { action: action.to_owned(), reason: reason.to_owned() };
        self.history.by_operator(key, source.clone());
        self.pass_over(Some(&BTreeSet::from([key.clone()])));
        let planned = self.plan.endpoints.get(key).cloned();
        let revision = planned.as_ref().map_or(0, |plan| plan.revision);
        let in_force = planned.is_none_or(|plan| self.is_in_force(&plan));
        // Where the entries are what they were, or there is no device: that it was said is recorded all the same.
        let why_not = || format!("{action} of endpoint {key} is kept and tried again: {}", self.why_not(key));
        let error = if in_force { String::new() } else { why_not() };
        self.history.note_action(key, first, source, [previous_revision, revision], error.clone());
        self.history.write(&self.store);
        tracing::info!(endpoint = %key, action, reason, revision, "by an operator");
        if !in_force {
            return Err(ApiError::new(ErrorCode::Realise, error));
        }
        let pin = self.holds.pins.get(key);
        Ok(v1::PolicyHold {
            endpoint: key.to_string(),
            previous_revision,
            revision,
            quarantine: pin.and_then(|p| p.quarantine.clone()),
            frozen: pin.and_then(|p| p.frozen.as_ref()).map(|f| v1::Frozen {
                revision: f.revision,
                reason: f.reason.clone(),
                since_ms: f.since_ms,
                rolled_back: f.rolled_back,
                withheld: withheld(&self.world, key, &f.policy),
            }),
        })
    }
}
