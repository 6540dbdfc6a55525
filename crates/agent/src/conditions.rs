//! What is wrong with which object, and since when.

use std::collections::BTreeMap;

use flowloom_api::v1::{Condition, ObjectConditions};

/// One complaint, as the sources of conditions give it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Complaint {
    /// `endpoint`, `vpc` ...
    pub kind: String,
    /// Full name.
    pub name: String,
    /// CamelCase.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// Remembers when each condition began.
#[derive(Debug, Default)]
pub(crate) struct Conditions {
    since: BTreeMap<(String, String, String), u64>,
}

impl Conditions {
    /// The conditions of now, grouped by object.
    pub(crate) fn update(
        &mut self,
        complaints: Vec<Complaint>,
        generation: u64,
        now_ms: u64,
    ) -> Vec<ObjectConditions> {
        let mut since = BTreeMap::new();
        let mut objects: BTreeMap<(String, String), Vec<Condition>> = BTreeMap::new();
        for c in complaints {
            let key = (c.kind.clone(), c.name.clone(), c.reason.clone());
            let began = self.since.get(&key).copied().unwrap_or(now_ms);
            since.insert(key, began);
            objects.entry((c.kind, c.name)).or_default().push(Condition {
                kind: "Ready".into(),
                status: false,
                reason: c.reason,
                message: c.message,
                observed_generation: generation,
                last_transition_ms: began,
            });
        }
        self.since = since;
        objects
            .into_iter()
            .map(|((kind, name), conditions)| ObjectConditions { kind, name, conditions })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_keeps_its_time_while_its_reason_stays() {
        let complaint = |reason: &str, message: &str| Complaint {
            kind: "endpoint".into(),
            name: "red/web".into(),
            reason: reason.into(),
            message: message.into(),
        };
        let mut c = Conditions::default();
        let at = |list: &[ObjectConditions]| list[0].conditions[0].last_transition_ms;
        assert_eq!(at(&c.update(vec![complaint("A", "1")], 1, 10)), 10);
        assert_eq!(at(&c.update(vec![complaint("A", "2")], 2, 20)), 10);
        assert_eq!(at(&c.update(vec![complaint("B", "2")], 2, 30)), 30);
        assert!(c.update(Vec::new(), 3, 40).is_empty());
        assert_eq!(at(&c.update(vec![complaint("B", "2")], 3, 50)), 50);
    }
}
