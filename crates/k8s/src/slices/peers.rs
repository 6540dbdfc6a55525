//! What slices say, Pod by Pod, with changes of slices turned into changes of Pods.

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

#[derive(Debug)]
struct Held {
    rank: (i64, i64),
    workloads: BTreeMap<ObjectName, Arc<Workload>>,
    faults: Vec<WorkloadFault>,
}

/// The Pods of all slices. While a Pod moves, two slices name it; the younger one is right, and readers see no gap.
#[derive(Debug, Default)]
pub struct PeerView {
    slices: BTreeMap<String, Held>,
    /// Slices that name a Pod; nearly always one.
    homes: BTreeMap<ObjectName, Vec<String>>,
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
        let home = self.homes.get(pod)?.iter().filter_map(|s| self.slices.get(s));
        home.filter(|s| s.workloads.contains_key(pod)).max_by_key(|s| s.rank)?.workloads.get(pod)
    }

    /// All Pods.
    pub fn pods(&self) -> impl Iterator<Item = &Arc<Workload>> {
        self.homes.keys().filter_map(|p| self.pod(p))
    }

    /// Entries that are not used, by slice.
    pub fn faults(&self) -> impl Iterator<Item = (&str, &WorkloadFault)> {
        self.slices.iter().flat_map(|(name, s)| s.faults.iter().map(move |f| (name.as_str(), f)))
    }

    /// A slice is new or changed.
    pub fn apply(&mut self, slice: &str, spec: &WorkloadSliceSpec) -> Vec<PeerChange> {
        let mut held =
            Held { rank: (spec.epoch, spec.sequence), workloads: BTreeMap::new(), faults: Vec::new() };
        for entry in spec.workloads() {
            match entry {
                Ok(w) => drop(held.workloads.insert(w.pod.clone(), Arc::new(w))),
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
        let gone: Vec<String> = self.slices.keys().filter(|s| !listed.contains(*s)).cloned().collect();
        gone.iter().flat_map(|s| self.remove(s)).collect()
    }

    fn replace(&mut self, slice: &str, held: Option<Held>) -> Vec<PeerChange> {
        let names = |h: Option<&Held>| -> BTreeSet<ObjectName> {
            h.iter().flat_map(|h| h.workloads.keys().cloned()).collect()
        };
        let touched: BTreeSet<ObjectName> =
            names(self.slices.get(slice)).union(&names(held.as_ref())).cloned().collect();
        let before: Vec<Option<Arc<Workload>>> = touched.iter().map(|p| self.pod(p).cloned()).collect();
        for pod in &touched {
            let homes = self.homes.entry(pod.clone()).or_default();
            homes.retain(|s| s != slice);
            if held.as_ref().is_some_and(|h| h.workloads.contains_key(pod)) {
                homes.push(slice.to_owned());
            }
            if homes.is_empty() {
                self.homes.remove(pod);
            }
        }
        match held {
            Some(held) => drop(self.slices.insert(slice.to_owned(), held)),
            None => drop(self.slices.remove(slice)),
        }
        touched
            .into_iter()
            .zip(before)
            .filter_map(|(pod, before)| {
                let now = self.pod(&pod).cloned();
                (now != before).then_some(PeerChange { pod, now })
            })
            .collect()
    }
}
