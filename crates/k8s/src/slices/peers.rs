//! What slices say, Pod by Pod, with changes of slices turned into changes of Pods.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Workload, WorkloadFault, WorkloadSliceSpec};
use crate::ObjectName;

/// A Pod that is new, different or gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerChange {
    /// The Pod.
    pub pod: ObjectName,
    /// What it is now; `None`: gone.
    pub now: Option<Arc<Workload>>,
}

/// A workload by its name: a large cluster's names are held once.
#[derive(Clone, Debug)]
struct Named(Arc<Workload>);

impl Borrow<ObjectName> for Named {
    fn borrow(&self) -> &ObjectName {
        &self.0.pod
    }
}

impl PartialEq for Named {
    fn eq(&self, other: &Self) -> bool {
        self.0.pod == other.0.pod
    }
}

impl Eq for Named {}

impl PartialOrd for Named {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Named {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.pod.cmp(&other.0.pod)
    }
}

#[derive(Debug)]
struct Held {
    rank: (i64, i64),
    workloads: BTreeSet<Named>,
    faults: Vec<WorkloadFault>,
}

impl Held {
    fn get(&self, pod: &ObjectName) -> Option<&Arc<Workload>> {
        self.workloads.get(pod).map(|named| &named.0)
    }
}

/// The Pods of all slices. While a Pod moves, two slices name it; the younger one is right, and readers see no gap.
#[derive(Debug, Default)]
pub struct PeerView {
    slices: BTreeMap<Arc<str>, Held>,
    /// Slices that name a Pod; nearly always one. The key is what is right of them.
    homes: BTreeMap<Named, Vec<Arc<str>>>,
}

impl PeerView {
    /// Pods known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.homes.len()
    }

    /// Whether no Pod is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.homes.is_empty()
    }

    /// A Pod.
    #[must_use]
    pub fn pod(&self, pod: &ObjectName) -> Option<&Arc<Workload>> {
        self.homes.get_key_value(pod).map(|(named, _)| &named.0)
    }

    /// All Pods.
    pub fn pods(&self) -> impl Iterator<Item = &Arc<Workload>> {
        self.homes.keys().map(|named| &named.0)
    }

    /// Entries that are not used, by slice.
    pub fn faults(&self) -> impl Iterator<Item = (&str, &WorkloadFault)> {
        self.slices.iter().flat_map(|(name, s)| s.faults.iter().map(move |f| (&**name, f)))
    }

    /// A slice is new or changed.
    pub fn apply(&mut self, slice: &str, spec: &WorkloadSliceSpec) -> Vec<PeerChange> {
        let mut held =
            Held { rank: (spec.epoch, spec.sequence), workloads: BTreeSet::new(), faults: Vec::new() };
        for entry in spec.workloads() {
            match entry {
                // The last of several of one name counts.
                Ok(w) => drop(held.workloads.replace(Named(Arc::new(w)))),
                Err(fault) => held.faults.push(fault),
            }
        }
        self.replace(slice, Some(held))
    }

    /// A slice is gone.
    pub fn remove(&mut self, slice: &str) -> Vec<PeerChange> {
        self.replace(slice, None)
    }

    /// After a list: every slice that is not in it is gone.
    pub fn retain(&mut self, listed: &BTreeSet<String>) -> Vec<PeerChange> {
        let gone: Vec<Arc<str>> = self.slices.keys().filter(|s| !listed.contains(&***s)).cloned().collect();
        gone.iter().flat_map(|s| self.remove(s)).collect()
    }

    fn replace(&mut self, slice: &str, held: Option<Held>) -> Vec<PeerChange> {
        let slice: Arc<str> = slice.into();
        let mut touched = held.as_ref().map(|h| h.workloads.clone()).unwrap_or_default();
        let old = match held {
            Some(held) => self.slices.insert(slice.clone(), held),
            None => self.slices.remove(&slice),
        };
        touched.extend(old.into_iter().flat_map(|old| old.workloads));
        touched.into_iter().filter_map(|named| self.look_again(&named.0.pod, &slice)).collect()
    }

    /// A slice says something else of a Pod, or nothing any more.
    fn look_again(&mut self, pod: &ObjectName, slice: &Arc<str>) -> Option<PeerChange> {
        let (before, mut homes) = match self.homes.remove_entry(pod) {
            Some((named, homes)) => (Some(named.0), homes),
            // Nearly always it stays the only one.
            None => (None, Vec::with_capacity(1)),
        };
        homes.retain(|s| s != slice);
        if self.slices.get(slice).is_some_and(|held| held.workloads.contains(pod)) {
            homes.push(slice.clone());
        }
        let held = homes.iter().filter_map(|s| self.slices.get(s));
        let now = held.max_by_key(|h| h.rank).and_then(|h| h.get(pod)).cloned();
        if let Some(now) = &now {
            self.homes.insert(Named(now.clone()), homes);
        }
        (now != before).then(|| PeerChange { pod: pod.clone(), now })
    }
}
