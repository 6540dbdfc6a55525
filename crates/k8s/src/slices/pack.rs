//! Which Pod stands in which slice. Pure; a Pod stays where it is, so that its change rewrites one slice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use flowloom_model::NodeName;

use super::wire::{SliceProfile, SliceWorkload, WorkloadSliceSpec};
use super::{Profile, Workload};
use crate::ObjectName;

/// How much a slice takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Pods. The resource's schema ends at 250.
    pub workloads: usize,
    /// Bytes of the spec as JSON. A single Pod with more has a slice of its own.
    pub bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { workloads: 250, bytes: 100_000 }
    }
}

/// Pods that went from one slice to another: the second is to be written before the first, or the Pods are in none for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Where they were.
    pub from: String,
    /// Where they are.
    pub to: String,
}

/// The JSON around the lists, and the largest epoch and sequence.
const FRAME: usize = 120;

#[derive(Debug, Default)]
struct Slice {
    members: BTreeMap<ObjectName, (Arc<Workload>, usize)>,
    profiles: BTreeMap<Arc<Profile>, (usize, usize)>,
    nodes: BTreeMap<NodeName, usize>,
    bytes: usize,
}

/// Upper bound of an entry's JSON with its comma.
fn entry_bytes(w: &Workload) -> usize {
    json_bytes(&SliceWorkload::of(w, 249, 249))
}

fn json_bytes(value: &impl serde::Serialize) -> usize {
    // Plain data of strings and numbers always serialises.
    serde_json::to_vec(value).map_or(0, |v| v.len()) + 1
}

impl Slice {
    /// What a workload would add.
    fn price(&self, w: &Workload) -> usize {
        let profile = if self.profiles.contains_key(&w.profile) {
            0
        } else {
            json_bytes(&SliceProfile::of(&w.profile))
        };
        let node = if self.nodes.contains_key(&w.node) { 0 } else { w.node.as_str().len() + 3 };
        entry_bytes(w) + profile + node
    }

    fn takes(&self, w: &Workload, limits: Limits) -> bool {
        self.members.is_empty()
            || self.members.len() < limits.workloads && FRAME + self.bytes + self.price(w) <= limits.bytes
    }

    fn insert(&mut self, mut w: Arc<Workload>) {
        self.remove(&w.pod);
        // Pods of one template share it in memory, too.
        if let Some((profile, _)) = self.profiles.get_key_value(&w.profile) {
            Arc::make_mut(&mut w).profile = profile.clone();
        }
        self.bytes += self.price(&w);
        let entry = entry_bytes(&w);
        let profile = || json_bytes(&SliceProfile::of(&w.profile));
        self.profiles.entry(w.profile.clone()).or_insert_with(|| (0, profile())).0 += 1;
        *self.nodes.entry(w.node.clone()).or_default() += 1;
        self.members.insert(w.pod.clone(), (w, entry));
    }

    fn remove(&mut self, pod: &ObjectName) -> Option<Arc<Workload>> {
        let (w, entry) = self.members.remove(pod)?;
        self.bytes -= entry;
        if let Some((users, bytes)) = self.profiles.get_mut(&w.profile) {
            *users -= 1;
            if *users == 0 {
                self.bytes -= *bytes;
                self.profiles.remove(&w.profile);
            }
        }
        if let Some(users) = self.nodes.get_mut(&w.node) {
            *users -= 1;
            if *users == 0 {
                self.bytes -= w.node.as_str().len() + 3;
                self.nodes.remove(&w.node);
            }
        }
        Some(w)
    }

    fn too_large(&self, limits: Limits) -> bool {
        self.members.len() > 1 && (self.members.len() > limits.workloads || FRAME + self.bytes > limits.bytes)
    }

    /// Parts of `limit` in `parts`: whether the slice is within.
    fn within(&self, limits: Limits, parts: usize, of: usize) -> bool {
        self.members.len() * of <= limits.workloads * parts && self.bytes * of <= limits.bytes * parts
    }
}

/// Places Pods in slices.
#[derive(Debug)]
pub struct Packer {
    limits: Limits,
    slices: BTreeMap<String, Slice>,
    place: BTreeMap<ObjectName, String>,
    changed: BTreeSet<String>,
    next: u64,
}

impl Packer {
    /// Without slices.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, slices: BTreeMap::new(), place: BTreeMap::new(), changed: BTreeSet::new(), next: 1 }
    }

    /// Takes over a published slice. A Pod that another slice has already stays there, so the right slice (see [`WorkloadSliceSpec`]) comes first.
    pub fn adopt(&mut self, slice: &str, workloads: impl IntoIterator<Item = Workload>) {
        if let Some(number) = number(slice) {
            self.next = self.next.max(number.saturating_add(1));
        }
        let into = self.slices.entry(slice.to_owned()).or_default();
        for w in workloads {
            if !self.place.contains_key(&w.pod) {
                self.place.insert(w.pod.clone(), slice.to_owned());
                into.insert(Arc::new(w));
            }
        }
        self.changed.insert(slice.to_owned());
    }

    /// Number of Pods.
    #[must_use]
    pub fn len(&self) -> usize {
        self.place.len()
    }

    /// Whether there is no Pod.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.place.is_empty()
    }

    /// Names of the slices that hold Pods.
    pub fn slices(&self) -> impl Iterator<Item = &str> {
        self.slices.iter().filter(|(_, s)| !s.members.is_empty()).map(|(n, _)| n.as_str())
    }

    /// The slice that holds a Pod.
    #[must_use]
    pub fn slice_of(&self, pod: &ObjectName) -> Option<&str> {
        self.place.get(pod).map(String::as_str)
    }

    /// Sets a Pod; whether anything changed.
    pub fn upsert(&mut self, w: Workload) -> bool {
        let slice = match self.place.get(&w.pod) {
            Some(slice) => {
                let held = self.slices.get(slice).and_then(|s| s.members.get(&w.pod));
                if held.is_some_and(|(old, _)| **old == w) {
                    return false;
                }
                slice.clone()
            }
            None => self.room_for(&w, |_| true),
        };
        self.put(slice, Arc::new(w));
        true
    }

    /// Removes a Pod; whether it was there.
    pub fn remove(&mut self, pod: &ObjectName) -> bool {
        let Some(slice) = self.place.remove(pod) else { return false };
        if let Some(s) = self.slices.get_mut(&slice) {
            s.remove(pod);
        }
        self.changed.insert(slice);
        true
    }

    /// Removes every Pod for which `keep` is false.
    pub fn retain(&mut self, keep: impl Fn(&ObjectName) -> bool) {
        let gone: Vec<ObjectName> = self.place.keys().filter(|p| !keep(p)).cloned().collect();
        for pod in gone {
            self.remove(&pod);
        }
    }

    /// Names of the slices touched since the last call.
    pub fn take_changed(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.changed)
    }

    /// What a slice is to say; `None`: it is not to exist.
    #[must_use]
    pub fn content(&self, slice: &str, epoch: i64, sequence: i64) -> Option<WorkloadSliceSpec> {
        let slice = self.slices.get(slice).filter(|s| !s.members.is_empty())?;
        Some(WorkloadSliceSpec::of(epoch, sequence, slice.members.values().map(|(w, _)| &**w)))
    }

    /// Forgets a slice without Pods, when its object is gone.
    pub fn forget(&mut self, slice: &str) {
        if self.slices.get(slice).is_some_and(|s| s.members.is_empty()) {
            self.slices.remove(slice);
        }
    }

    /// One step towards few, full slices: a Pod out of a slice that grew too large, or a nearly empty slice into another. Only slices that
    /// `settled` holds for take part, so that no two moves wait for each other. `None`: nothing to do.
    pub fn tidy(&mut self, settled: impl Fn(&str) -> bool) -> Option<Move> {
        self.split(&settled).or_else(|| self.merge(&settled))
    }

    fn split(&mut self, settled: &impl Fn(&str) -> bool) -> Option<Move> {
        let (from, slice) = self.slices.iter().find(|(n, s)| s.too_large(self.limits) && settled(n))?;
        let from = from.clone();
        let (w, _) = slice.members.values().max_by_key(|(w, entry)| (slice_price(slice, w), *entry))?;
        let w = w.clone();
        let to = self.room_for(&w, |name| name != from && settled(name));
        self.shift(&from, &to, vec![w]);
        Some(Move { from, to })
    }

    fn merge(&mut self, settled: &impl Fn(&str) -> bool) -> Option<Move> {
        let live = |(n, s): &(&String, &Slice)| !s.members.is_empty() && settled(n);
        let (from, small) = self
            .slices
            .iter()
            .filter(live)
            .filter(|(_, s)| s.within(self.limits, 1, 4))
            .min_by_key(|(_, s)| s.members.len())?;
        // Bytes of both are an upper bound of the union's. A quarter stays free, so that the next Pods do not split it again.
        let (to, _) = self
            .slices
            .iter()
            .filter(live)
            .filter(|(n, s)| {
                *n != from
                    && (s.members.len() + small.members.len()) * 4 <= self.limits.workloads * 3
                    && (s.bytes + small.bytes) * 4 <= self.limits.bytes * 3
            })
            .max_by_key(|(_, s)| s.members.len())?;
        let (from, to) = (from.clone(), to.clone());
        let all = small.members.values().map(|(w, _)| w.clone()).collect();
        self.shift(&from, &to, all);
        Some(Move { from, to })
    }

    fn shift(&mut self, from: &str, to: &str, workloads: Vec<Arc<Workload>>) {
        for w in workloads {
            if let Some(s) = self.slices.get_mut(from) {
                s.remove(&w.pod);
            }
            self.put(to.to_owned(), w);
        }
        self.changed.insert(from.to_owned());
    }

    fn put(&mut self, slice: String, w: Arc<Workload>) {
        self.place.insert(w.pod.clone(), slice.clone());
        self.slices.entry(slice.clone()).or_default().insert(w);
        self.changed.insert(slice);
    }

    /// The slice with room that knows the workload's profile, else the fullest with room, else a new one.
    fn room_for(&mut self, w: &Workload, may: impl Fn(&str) -> bool) -> String {
        let best = self
            .slices
            .iter()
            .filter(|(n, s)| !s.members.is_empty() && s.takes(w, self.limits) && may(n))
            .max_by_key(|(_, s)| (s.profiles.contains_key(&w.profile), s.members.len()))
            .map(|(n, _)| n.clone());
        best.unwrap_or_else(|| {
            let name = format!("w-{:06}", self.next);
            self.next += 1;
            name
        })
    }
}

/// What a slice saves without a member, near enough to choose by.
fn slice_price(slice: &Slice, w: &Workload) -> usize {
    slice.profiles.get(&w.profile).filter(|(users, _)| *users == 1).map_or(0, |(_, bytes)| *bytes)
}

fn number(slice: &str) -> Option<u64> {
    slice.strip_prefix("w-")?.parse().ok()
}
