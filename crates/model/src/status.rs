//! Conditions: what a person reads about an object (semantics.md section 6).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Fault, ObjectRef, Reason, Timestamp};

/// What a condition is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum ConditionType {
    /// The object is well formed and fits the others. False: it, or its new version, is not in force.
    Accepted,
    /// Everything it names exists. False: what is missing matches nothing.
    Resolved,
    /// It has its addresses and numbers.
    Allocated,
    /// It is wired on its node.
    Attached,
    /// Its policy is in the kernel.
    Enforced,
    /// It does what it is for.
    Ready,
}

/// Whether the condition holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum ConditionStatus {
    /// It holds.
    True,
    /// It does not.
    False,
    /// Not known yet.
    Unknown,
}

/// One condition of an object.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Condition {
    /// What it is about.
    #[serde(rename = "type")]
    pub kind: ConditionType,
    /// Whether it holds.
    pub status: ConditionStatus,
    /// Why, as a constant.
    pub reason: Reason,
    /// Why, and what to do.
    pub message: String,
    /// Generation of the object that was looked at.
    pub observed_generation: u64,
    /// When `status` last changed.
    pub last_transition: Timestamp,
}

/// The conditions of one object, at most one of each type, in order of types.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Conditions(Vec<Condition>);

impl Conditions {
    /// Sets a condition. `last_transition` moves only when the status changes. Returns whether anything but the generation changed.
    pub fn set(&mut self, new: Condition) -> bool {
        match self.0.binary_search_by_key(&new.kind, |c| c.kind) {
            Err(at) => {
                self.0.insert(at, new);
                true
            }
            Ok(at) => {
                let old = &mut self.0[at];
                let same = (old.status, old.reason, &old.message) == (new.status, new.reason, &new.message);
                let since = if old.status == new.status { old.last_transition } else { new.last_transition };
                *old = Condition { last_transition: since, ..new };
                !same
            }
        }
    }

    /// The condition of a type.
    #[must_use]
    pub fn find(&self, kind: ConditionType) -> Option<&Condition> {
        self.0.iter().find(|c| c.kind == kind)
    }

    /// Takes a condition away.
    pub fn remove(&mut self, kind: ConditionType) -> bool {
        let before = self.0.len();
        self.0.retain(|c| c.kind != kind);
        self.0.len() != before
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Condition> {
        self.0.iter()
    }
}

impl Fault {
    /// The condition that the fault's object gets.
    #[must_use]
    pub fn condition(&self, observed_generation: u64, now: Timestamp) -> Condition {
        let kind = match self.code {
            Reason::UndefinedNamedPort => ConditionType::Resolved,
            Reason::AwaitingAddress
            | Reason::AwaitingVni
            | Reason::AddressPoolExhausted
            | Reason::VniExhausted => ConditionType::Allocated,
            _ => ConditionType::Accepted,
        };
        Condition {
            kind,
            status: ConditionStatus::False,
            reason: self.code,
            message: format!("{}: {}", self.path, self.message),
            observed_generation,
            last_transition: now,
        }
    }
}

/// The conditions of every object that has a fault; of several of one type the first is shown, with their number.
#[must_use]
pub fn conditions(
    faults: &[Fault],
    observed_generation: u64,
    now: Timestamp,
) -> BTreeMap<ObjectRef, Conditions> {
    let mut counted: BTreeMap<(&ObjectRef, ConditionType), (Condition, usize)> = BTreeMap::new();
    for f in faults {
        let Some(object) = &f.object else { continue };
        let condition = f.condition(observed_generation, now);
        counted.entry((object, condition.kind)).or_insert((condition, 0)).1 += 1;
    }
    let mut out: BTreeMap<ObjectRef, Conditions> = BTreeMap::new();
    for ((object, _), (mut condition, n)) in counted {
        if n > 1 {
            condition.message.push_str(&format!(" (and {} more)", n - 1));
        }
        out.entry(object.clone()).or_default().set(condition);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition(status: ConditionStatus, at: u64) -> Condition {
        Condition {
            kind: ConditionType::Ready,
            status,
            reason: Reason::Ok,
            message: String::new(),
            observed_generation: at,
            last_transition: Timestamp(at),
        }
    }

    #[test]
    fn the_time_of_a_condition_moves_only_with_its_status() {
        let mut c = Conditions::default();
        assert!(c.set(condition(ConditionStatus::True, 1)));
        assert!(!c.set(condition(ConditionStatus::True, 2)));
        let now = c.find(ConditionType::Ready).unwrap();
        assert_eq!((now.last_transition, now.observed_generation), (Timestamp(1), 2));
        assert!(c.set(condition(ConditionStatus::False, 3)));
        assert_eq!(c.find(ConditionType::Ready).unwrap().last_transition, Timestamp(3));
        assert!(c.remove(ConditionType::Ready) && !c.remove(ConditionType::Ready));
    }

    #[test]
    fn conditions_in_json_read_like_those_of_kubernetes() {
        let object = ObjectRef::Vpc("red".parse().unwrap());
        let f = Fault::new(Reason::DuplicateVni, "vpcs[red].vni", 5, "taken").on(object.clone());
        let all = conditions(&[f.clone(), f], 7, Timestamp(0));
        assert_eq!(
            serde_json::to_string(&all[&object]).unwrap(),
            r#"[{"type":"Accepted","status":"False","reason":"DuplicateVni","message":"vpcs[red].vni: taken (and 1 more)","observed_generation":7,"last_transition":"1970-01-01T00:00:00Z"}]"#
        );
    }
}
