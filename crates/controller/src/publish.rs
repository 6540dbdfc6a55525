//! What is to be written to which slice, and when. Pure: time is passed in.
//!
//! Nothing is decided before Pods and slices had their first list. A standby only remembers; a leader takes over the placement it finds.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use flowloom_k8s::ObjectName;
use flowloom_k8s::slices::{Limits, Packer, PublishedSlice, Workload, WorkloadSliceSpec};
use tokio::time::Instant;

/// Writes in flight at once.
const BATCH: usize = 8;
/// First pause after a write that failed.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// When slices are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// After the first change of a quiet slice: what comes meanwhile goes with it.
    pub settle: Duration,
    /// Between writes of one slice.
    pub interval: Duration,
    /// Writes of all slices together.
    pub per_second: u32,
    /// Between steps of tidying.
    pub tidy: Duration,
}

/// One write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The slice.
    pub slice: String,
    /// Uid and version of what is replaced or deleted; `None`: created.
    pub base: Option<(String, String)>,
    /// What it is to say; `None`: deleted.
    pub spec: Option<WorkloadSliceSpec>,
}

/// How a write went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The slice is so now; `None`: gone.
    Written(Option<PublishedSlice>),
    /// It was another version. The watch tells which.
    Conflict,
    /// It was not sent.
    NotSent,
    /// The server refused it, or cannot be reached.
    Failed(String),
}

#[derive(Debug, Default)]
struct Pending {
    since: Option<Instant>,
    not_before: Option<Instant>,
    failures: u32,
    error: String,
}

#[derive(Debug)]
struct Lead {
    packer: Packer,
    epoch: i64,
    sequence: i64,
    pending: BTreeMap<String, Pending>,
    written: BTreeMap<String, Instant>,
    in_flight: BTreeSet<String>,
    /// A slice that lost Pods waits for the one that has them now.
    after: BTreeMap<String, String>,
    tokens: f64,
    counted: Instant,
    tidied: Instant,
}

/// Numbers for status and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pods with an address.
    pub workloads: usize,
    /// Slices at the API server.
    pub slices: usize,
    /// Slices that differ from what they are to say.
    pub pending: usize,
    /// Whether it leads.
    pub leads: bool,
    /// Epoch of this leadership; 0 without.
    pub epoch: i64,
}

/// Pods on one side, slices on the other.
#[derive(Debug)]
pub struct Publisher {
    limits: Limits,
    pace: Pace,
    pods: Option<BTreeMap<ObjectName, Workload>>,
    published: Option<BTreeMap<String, PublishedSlice>>,
    lead: Option<Lead>,
}

impl Publisher {
    /// Knows nothing yet.
    #[must_use]
    pub fn new(limits: Limits, pace: Pace) -> Self {
        Self { limits, pace, pods: None, published: None, lead: None }
    }

    /// Whether both sides had their first list.
    #[must_use]
    pub fn listed(&self) -> bool {
        self.pods.is_some() && self.published.is_some()
    }

    /// Whether it leads.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.lead.is_some()
    }

    /// Numbers.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts {
            workloads: self.pods.as_ref().map_or(0, BTreeMap::len),
            slices: self.published.as_ref().map_or(0, BTreeMap::len),
            pending: self.lead.as_ref().map_or(0, |l| l.pending.len()),
            leads: self.lead.is_some(),
            epoch: self.lead.as_ref().map_or(0, |l| l.epoch),
        }
    }

    /// Slices whose writes fail, and why.
    pub fn failing(&self) -> impl Iterator<Item = (&str, &str)> {
        let pending = self.lead.iter().flat_map(|l| &l.pending);
        pending.filter(|(_, p)| !p.error.is_empty()).map(|(n, p)| (n.as_str(), p.error.as_str()))
    }

    /// What is known of a Pod.
    #[must_use]
    pub fn workload(&self, name: &ObjectName) -> Option<&Workload> {
        self.pods.as_ref()?.get(name)
    }

    /// A complete list of Pods. Those that are not in it are gone.
    pub fn pods_listed(&mut self, pods: BTreeMap<ObjectName, Workload>, now: Instant) {
        if let Some(lead) = &mut self.lead {
            lead.packer.retain(|p| pods.contains_key(p));
            for w in pods.values() {
                lead.packer.upsert(w.clone());
            }
        }
        self.pods = Some(pods);
        self.settle(now);
    }

    /// A Pod is new or different; `None`: gone. Before the first list that means nothing.
    pub fn pod(&mut self, name: &ObjectName, workload: Option<Workload>, now: Instant) {
        let Some(pods) = &mut self.pods else { return };
        match workload {
            Some(w) => {
                if let Some(lead) = &mut self.lead {
                    lead.packer.upsert(w.clone());
                }
                pods.insert(name.clone(), w);
            }
            None => {
                pods.remove(name);
                if let Some(lead) = &mut self.lead {
                    lead.packer.remove(name);
                }
            }
        }
        self.settle(now);
    }

    /// A complete list of slices.
    pub fn slices_listed(&mut self, slices: BTreeMap<String, PublishedSlice>, now: Instant) {
        let before = self.published.replace(slices).unwrap_or_default();
        let names: BTreeSet<String> =
            before.into_keys().chain(self.published.iter().flat_map(|p| p.keys().cloned())).collect();
        for name in names {
            self.compare(&name, now);
        }
    }

    /// A slice changed at the API server; `None`: it is gone.
    pub fn slice(&mut self, name: &str, is: Option<PublishedSlice>, now: Instant) {
        let Some(published) = &mut self.published else { return };
        match is {
            Some(is) => {
                // The answer to a write may come before what the watch says of an older one.
                let older = published.get(name).is_some_and(|known| older(&is.version, &known.version));
                if !older {
                    published.insert(name.to_owned(), is);
                }
            }
            None => drop(published.remove(name)),
        }
        self.compare(name, now);
    }

    /// Begins to lead, once both lists are there. Takes over the placement that is published.
    pub fn take_over(&mut self, term: i64, now: Instant) {
        let (Some(pods), Some(published)) = (&self.pods, &self.published) else { return };
        let mut packer = Packer::new(self.limits);
        let mut by_rank: Vec<_> = published.iter().collect();
        by_rank.sort_by_key(|(_, s)| std::cmp::Reverse((s.spec.epoch, s.spec.sequence)));
        for (name, slice) in &by_rank {
            packer.adopt(name, slice.spec.workloads().filter_map(Result::ok));
        }
        packer.retain(|p| pods.contains_key(p));
        for w in pods.values() {
            packer.upsert(w.clone());
        }
        // A lease that somebody deleted counts from 0 again; epochs never fall.
        let last = by_rank.first().map_or(-1, |(_, s)| s.spec.epoch);
        self.lead = Some(Lead {
            packer,
            epoch: term.max(last + 1),
            sequence: 0,
            pending: BTreeMap::new(),
            written: BTreeMap::new(),
            in_flight: BTreeSet::new(),
            after: BTreeMap::new(),
            tokens: f64::from(self.pace.per_second),
            counted: now,
            tidied: now,
        });
        self.settle(now);
    }

    /// Leads no more: nothing is written.
    pub fn stand_by(&mut self) {
        self.lead = None;
    }

    fn settle(&mut self, now: Instant) {
        let changed = self.lead.as_mut().map(|l| l.packer.take_changed()).unwrap_or_default();
        for name in changed {
            self.compare(&name, now);
        }
    }

    /// Whether a slice says what it is to say.
    fn compare(&mut self, name: &str, now: Instant) {
        let (Some(lead), Some(published)) = (&mut self.lead, &self.published) else { return };
        let (want, is) = (lead.packer.content(name, 0, 0), published.get(name));
        let same = match (&want, is) {
            (None, None) => true,
            (Some(want), Some(is)) => want.same_content(&is.spec),
            _ => false,
        };
        if same {
            lead.pending.remove(name);
            lead.after.retain(|_, to| to != name);
            if want.is_none() {
                lead.packer.forget(name);
                lead.written.remove(name);
            }
        } else {
            lead.pending.entry(name.to_owned()).or_default().since.get_or_insert(now);
        }
    }

    /// When a slice may be written; `None`: not before something else happens.
    fn due(&self, lead: &Lead, name: &str, pending: &Pending) -> Option<Instant> {
        let waits = lead.after.get(name).is_some_and(|to| lead.pending.contains_key(to));
        if waits || lead.in_flight.contains(name) {
            return None;
        }
        let settled = pending.since.map(|s| s + self.pace.settle);
        let quiet = lead.written.get(name).map(|w| *w + self.pace.interval);
        [settled, quiet, pending.not_before].into_iter().flatten().max()
    }

    /// When [`Self::batch`] has something to give, or there is to be tidied.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        let lead = self.lead.as_ref()?;
        let earliest = lead.pending.iter().filter_map(|(n, p)| self.due(lead, n, p)).min();
        let lacking = (1.0 - lead.tokens).max(0.0) / f64::from(self.pace.per_second.max(1));
        let affordable = lead.counted + Duration::from_secs_f64(lacking);
        let tidy = lead.tidied + self.pace.tidy;
        Some(earliest.map_or(tidy, |e| e.max(affordable).min(tidy)))
    }

    /// Writes that are due.
    pub fn batch(&mut self, now: Instant) -> Vec<Write> {
        self.tidy(now);
        let Some(lead) = &self.lead else { return Vec::new() };
        let rate = f64::from(self.pace.per_second.max(1));
        let tokens = (lead.tokens + now.duration_since(lead.counted).as_secs_f64() * rate).min(rate);
        let room = BATCH.saturating_sub(lead.in_flight.len()).min(tokens as usize);
        let mut due: Vec<(Instant, String)> = lead
            .pending
            .iter()
            .filter_map(|(n, p)| Some((self.due(lead, n, p).filter(|d| *d <= now)?, n.clone())))
            .collect();
        due.sort();
        due.truncate(room);
        let (Some(lead), Some(published)) = (&mut self.lead, &self.published) else { return Vec::new() };
        lead.tokens = tokens - due.len() as f64;
        lead.counted = now;
        let mut writes = Vec::new();
        for (_, slice) in due {
            lead.sequence += 1;
            let base = published.get(&slice).map(|p| (p.uid.clone(), p.version.clone()));
            let spec = lead.packer.content(&slice, lead.epoch, lead.sequence);
            lead.in_flight.insert(slice.clone());
            lead.written.insert(slice.clone(), now);
            writes.push(Write { slice, base, spec });
        }
        writes
    }

    /// How a write of [`Self::batch`] went.
    pub fn done(&mut self, slice: &str, outcome: Outcome, now: Instant) {
        let Some(lead) = &mut self.lead else { return };
        lead.in_flight.remove(slice);
        if let Outcome::Written(is) = outcome {
            if let Some(pending) = lead.pending.get_mut(slice) {
                *pending = Pending::default();
            }
            self.slice(slice, is, now);
            return;
        }
        let pending = lead.pending.entry(slice.to_owned()).or_default();
        pending.since.get_or_insert(now);
        pending.failures += 1;
        let pause = PAUSE * 2_u32.saturating_pow(pending.failures.min(8) - 1);
        pending.not_before = Some(now + pause.min(LONGEST_PAUSE));
        match outcome {
            Outcome::Failed(error) => pending.error = error,
            _ => pending.error.clear(),
        }
        // Meanwhile the watch may have said that all is well.
        self.compare(slice, now);
    }

    fn tidy(&mut self, now: Instant) {
        let Some(lead) = &mut self.lead else { return };
        if now < lead.tidied + self.pace.tidy {
            return;
        }
        lead.tidied = now;
        let (pending, in_flight) = (&lead.pending, &lead.in_flight);
        if let Some(step) = lead.packer.tidy(|n| !pending.contains_key(n) && !in_flight.contains(n)) {
            tracing::debug!(from = step.from, to = step.to, "slices tidied");
            lead.after.insert(step.from, step.to);
            // More may be left to do.
            lead.tidied = now - self.pace.tidy + self.pace.interval.min(self.pace.tidy);
            self.settle(now);
        }
    }
}

/// Versions are numbers that grow (KEP-5504); what is no number is compared with nothing.
fn older(a: &str, b: &str) -> bool {
    matches!((a.parse::<u64>(), b.parse::<u64>()), (Ok(a), Ok(b)) if a < b)
}
