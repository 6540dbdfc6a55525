//! Decoded objects of one kind, and those that were refused.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::{Kind, ObjectName};

/// Why an object is not in use, or not in its newest version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Field and what is wrong with it.
    pub reason: String,
    /// An older version of it stays in use.
    pub last_good: bool,
}

/// Objects of one kind. A refused object keeps its last good version.
#[derive(Debug)]
pub struct Cache<T> {
    objects: BTreeMap<ObjectName, Arc<T>>,
    refused: BTreeMap<ObjectName, String>,
    listed: bool,
}

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), refused: BTreeMap::new(), listed: false }
    }
}

impl<T: Kind> Cache<T> {
    /// Whether a first list was complete.
    #[must_use]
    pub fn is_listed(&self) -> bool {
        self.listed
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// One of them.
    #[must_use]
    pub fn object(&self, name: &ObjectName) -> Option<&Arc<T>> {
        self.objects.get(name)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&ObjectName, &Arc<T>)> {
        self.objects.iter()
    }

    /// Those of one namespace.
    pub fn of_namespace<'a>(
        &'a self,
        namespace: &'a str,
    ) -> impl Iterator<Item = (&'a ObjectName, &'a Arc<T>)> {
        self.objects
            .range(ObjectName::new(namespace, "")..)
            .take_while(move |(name, _)| name.namespace == namespace)
    }

    /// What was refused.
    pub fn refused(&self) -> impl Iterator<Item = (&ObjectName, Refused)> {
        self.refused.iter().map(|(name, reason)| {
            let held = self.objects.get(name);
            (name, Refused { reason: reason.clone(), last_good: held.is_some_and(|o| o.fault().is_none()) })
        })
    }

    /// Takes a new version; returns whether anything that matters changed.
    pub fn put(&mut self, name: &ObjectName, object: Result<T, String>) -> bool {
        let reason = object.as_ref().ok().and_then(|o| o.fault().map(str::to_owned));
        match object {
            Ok(object) if reason.is_some() => {
                let told = self.refused.get(name) != reason.as_ref();
                self.refused.extend(reason.map(|reason| (name.clone(), reason)));
                // In place of nothing only.
                let held = self.objects.get(name);
                if held.is_some_and(|held| held.fault().is_none() || **held == object) {
                    return told;
                }
                self.objects.insert(name.clone(), Arc::new(object));
                true
            }
            Ok(object) => {
                let cleared = self.refused.remove(name).is_some();
                if self.objects.get(name).is_some_and(|old| **old == object) {
                    return cleared;
                }
                self.objects.insert(name.clone(), Arc::new(object));
                true
            }
            Err(reason) => self.refused.insert(name.clone(), reason.clone()) != Some(reason),
        }
    }

    /// Forgets an object.
    pub fn remove(&mut self, name: &ObjectName) -> bool {
        let refused = self.refused.remove(name).is_some();
        self.objects.remove(name).is_some() || refused
    }

    /// Takes a complete list; returns the names of what changed.
    pub fn replace(&mut self, list: Vec<(ObjectName, Result<T, String>)>) -> BTreeSet<ObjectName> {
        self.listed = true;
        let there: BTreeSet<&ObjectName> = list.iter().map(|(name, _)| name).collect();
        let known = self.objects.keys().chain(self.refused.keys());
        let gone: Vec<ObjectName> = known.filter(|name| !there.contains(name)).cloned().collect();
        let mut changed: BTreeSet<ObjectName> = gone.into_iter().filter(|name| self.remove(name)).collect();
        for (name, object) in list {
            if self.put(&name, object) {
                changed.insert(name);
            }
        }
        changed
    }
}
