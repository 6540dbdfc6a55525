//! The one task that knows everything: hears the sources, follows the election, gives out writes, answers questions.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::time::SystemTime;

use flowloom_api::v1::{
    Condition, ControllerHealth, ControllerStatus, LeaderStatus, ObjectConditions, SliceCounts, SourceStatus,
};
use flowloom_k8s::slices::{Limits, PublishedSlice, Workload, WorkloadSlice};
use flowloom_k8s::{Happening, ObjectName, Pod};
use futures::future::join_all;
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use crate::lease::{Candidate, Seen, Standing};
use crate::metrics::Metrics;
use crate::publish::{Outcome, Pace, Publisher, Write};
use crate::source::{News, Source, Tell};

/// What the API asks.
#[derive(Debug)]
pub enum Question {
    /// Whether all is well.
    Health(oneshot::Sender<ControllerHealth>),
    /// Everything.
    Status(oneshot::Sender<ControllerStatus>),
}

/// What the core stands on.
pub struct Outside {
    /// Slices at the API server.
    pub slices: Api<WorkloadSlice>,
    /// The lease.
    pub candidate: Candidate,
    /// Whether this process leads.
    pub standing: watch::Receiver<Standing>,
    /// Who does.
    pub seen: watch::Receiver<Seen>,
    /// Questions.
    pub questions: mpsc::Receiver<Question>,
    /// Counters.
    pub metrics: Metrics,
}

impl std::fmt::Debug for Outside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outside").field("candidate", &self.candidate).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct SourceState {
    name: &'static str,
    listed: bool,
    heard_ms: u64,
    failures: u64,
    error: String,
}

type Batch = Pin<Box<dyn Future<Output = Vec<(String, Outcome)>> + Send>>;

/// The core.
pub struct Core {
    outside: Outside,
    publisher: Publisher,
    sources: Vec<SourceState>,
    /// Ends with the core.
    _following: JoinSet<()>,
    /// Objects that could not be read: their last good version counts.
    refused: BTreeMap<(&'static str, ObjectName), (String, u64)>,
    /// Since when the writes of a slice fail.
    failing: BTreeMap<String, u64>,
    started_ms: u64,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("publisher", &self.publisher.counts()).finish_non_exhaustive()
    }
}

/// Milliseconds since the Unix epoch.
fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Core {
    /// Starts the sources.
    #[must_use]
    pub fn new(
        outside: Outside,
        sources: Vec<Box<dyn Source>>,
        pace: Pace,
    ) -> (Self, mpsc::UnboundedReceiver<(usize, News)>) {
        let (tell, news): (Tell, _) = mpsc::unbounded_channel();
        let mut states = Vec::new();
        let mut following = JoinSet::new();
        for (number, source) in sources.into_iter().enumerate() {
            states.push(SourceState { name: source.name(), ..SourceState::default() });
            following.spawn(source.follow(number, tell.clone()));
        }
        let core = Self {
            outside,
            publisher: Publisher::new(Limits::default(), pace),
            sources: states,
            _following: following,
            refused: BTreeMap::new(),
            failing: BTreeMap::new(),
            started_ms: now_ms(),
        };
        (core, news)
    }

    /// Runs until `stop` turns true; writes that are under way are finished.
    pub async fn run(
        mut self,
        mut news: mpsc::UnboundedReceiver<(usize, News)>,
        mut stop: watch::Receiver<bool>,
    ) {
        let mut batch: Option<Batch> = None;
        loop {
            let now = Instant::now();
            let leads = self.stand(now);
            if batch.is_none()
                && !*stop.borrow()
                && let Some(until) = leads
            {
                let writes = self.publisher.batch(now);
                if !writes.is_empty() {
                    let outside = &self.outside;
                    batch = Some(Box::pin(perform(
                        outside.slices.clone(),
                        outside.candidate.clone(),
                        until,
                        writes,
                    )));
                }
            }
            self.measure();
            let next = if batch.is_none() { self.publisher.next() } else { None };
            let sleep = async {
                match next {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let under_way = batch.is_some();
            let done = async {
                match &mut batch {
                    Some(batch) => batch.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                _ = stop.wait_for(|s| *s), if !under_way => return,
                outcomes = done => {
                    batch = None;
                    self.done(outcomes);
                }
                _ = self.outside.standing.changed() => {}
                question = self.outside.questions.recv() => match question {
                    Some(question) => self.answer(question),
                    // The API is gone: so is the process.
                    None => return,
                },
                item = news.recv() => match item {
                    Some((number, item)) => self.hear(number, item),
                    None => return,
                },
                () = sleep => {}
            }
        }
    }

    /// Follows the election; until when this process may write.
    fn stand(&mut self, now: Instant) -> Option<Instant> {
        let standing = *self.outside.standing.borrow_and_update();
        match standing.leads_at(now) {
            Some((term, until)) => {
                if !self.publisher.leads() && self.publisher.listed() {
                    self.publisher.take_over(term, now);
                    tracing::info!(epoch = self.publisher.counts().epoch, "publishes workload slices");
                }
                Some(until)
            }
            None => {
                self.publisher.stand_by();
                None
            }
        }
    }

    fn done(&mut self, outcomes: Vec<(String, Outcome)>) {
        let now = Instant::now();
        for (slice, outcome) in outcomes {
            self.outside.metrics.written(&outcome);
            if let Outcome::Failed(error) = &outcome {
                tracing::warn!(slice, error, "a slice cannot be written");
            }
            self.publisher.done(&slice, outcome, now);
        }
        let failing: BTreeSet<String> = self.publisher.failing().map(|(n, _)| n.to_owned()).collect();
        self.failing.retain(|n, _| failing.contains(n));
        for name in failing {
            self.failing.entry(name).or_insert_with(now_ms);
        }
    }

    fn hear(&mut self, number: usize, news: News) {
        let now = Instant::now();
        let Some(state) = self.sources.get_mut(number) else { return };
        let failed = match &news {
            News::Pods(Happening::Failed(e)) | News::Slices(Happening::Failed(e)) => Some(e.to_string()),
            _ => None,
        };
        self.outside.metrics.heard(state.name, failed.is_some());
        if let Some(error) = failed {
            tracing::warn!(source = state.name, error, "a watch was interrupted");
            state.failures += 1;
            state.error = error;
            return;
        }
        state.heard_ms = now_ms();
        state.error.clear();
        if matches!(&news, News::Pods(Happening::Listed(_)) | News::Slices(Happening::Listed(_))) {
            state.listed = true;
        }
        match news {
            News::Pods(happening) => self.pods(happening, now),
            News::Slices(happening) => self.slices(happening, now),
        }
    }

    fn pods(&mut self, happening: Happening<Pod>, now: Instant) {
        match happening {
            Happening::Listed(all) => {
                self.refused.retain(|(kind, _), _| *kind != "pod");
                let mut pods = BTreeMap::new();
                for (name, pod) in all {
                    let workload = match pod {
                        Ok(pod) => Workload::of(&name, &pod),
                        Err(why) => {
                            self.refuse("pod", &name, why);
                            self.publisher.workload(&name).cloned()
                        }
                    };
                    pods.extend(workload.map(|w| (name, w)));
                }
                self.publisher.pods_listed(pods, now);
            }
            Happening::Put(name, Ok(pod)) => {
                self.refused.remove(&("pod", name.clone()));
                self.publisher.pod(&name, Workload::of(&name, &pod), now);
            }
            Happening::Put(name, Err(why)) => self.refuse("pod", &name, why),
            Happening::Gone(name) => {
                self.refused.remove(&("pod", name.clone()));
                self.publisher.pod(&name, None, now);
            }
            Happening::Alive | Happening::Failed(_) => {}
        }
    }

    fn slices(&mut self, happening: Happening<PublishedSlice>, now: Instant) {
        match happening {
            Happening::Listed(all) => {
                self.refused.retain(|(kind, _), _| *kind != "workloadslice");
                let mut slices = BTreeMap::new();
                for (name, slice) in all {
                    match slice {
                        Ok(slice) => drop(slices.insert(name.name, slice)),
                        Err(why) => self.refuse("workloadslice", &name, why),
                    }
                }
                self.publisher.slices_listed(slices, now);
            }
            Happening::Put(name, Ok(slice)) => {
                self.refused.remove(&("workloadslice", name.clone()));
                self.publisher.slice(&name.name, Some(slice), now);
            }
            Happening::Put(name, Err(why)) => self.refuse("workloadslice", &name, why),
            Happening::Gone(name) => {
                self.refused.remove(&("workloadslice", name.clone()));
                self.publisher.slice(&name.name, None, now);
            }
            Happening::Alive | Happening::Failed(_) => {}
        }
    }

    fn refuse(&mut self, kind: &'static str, name: &ObjectName, why: String) {
        tracing::warn!(kind, %name, why, "an object cannot be read; its last good version counts");
        let since = self.refused.get(&(kind, name.clone())).map_or_else(now_ms, |(_, since)| *since);
        self.refused.insert((kind, name.clone()), (why, since));
    }

    fn measure(&self) {
        let counts = self.publisher.counts();
        self.outside.metrics.state(&counts, self.refused.len());
    }

    fn answer(&self, question: Question) {
        // Whoever asked may be gone.
        match question {
            Question::Health(to) => drop(to.send(self.health())),
            Question::Status(to) => drop(to.send(self.status())),
        }
    }

    fn health(&self) -> ControllerHealth {
        let lists = self.sources.iter().filter(|s| !s.listed).map(|s| match s.error.as_str() {
            "" => format!("the first list of {}", s.name),
            error => format!("the first list of {}: {error}", s.name),
        });
        let seen = self.outside.seen.borrow();
        let lease = match (seen.error.as_str(), seen.holder.as_str()) {
            ("", "") => Some("somebody who leads".to_owned()),
            ("", _) => None,
            (error, _) => Some(format!("the lease: {error}")),
        };
        let waiting_for: Vec<String> = lists.chain(lease).collect();
        ControllerHealth {
            ready: waiting_for.is_empty(),
            identity: self.outside.candidate.me.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            leads: self.publisher.leads(),
            waiting_for,
        }
    }

    fn status(&self) -> ControllerStatus {
        let counts = self.publisher.counts();
        let seen = self.outside.seen.borrow().clone();
        let source = |s: &SourceState| SourceStatus {
            name: s.name.into(),
            listed: s.listed,
            heard_ms: s.heard_ms,
            failures: s.failures,
            error: s.error.clone(),
        };
        let refused = self.refused.iter().map(|((kind, name), (why, since))| {
            degraded(kind, name.to_string(), "Accepted", "Unreadable", why, *since)
        });
        let failing = self.publisher.failing().map(|(name, why)| {
            let since = self.failing.get(name).copied().unwrap_or_default();
            degraded("workloadslice", name.to_owned(), "Published", "WriteFailed", why, since)
        });
        ControllerStatus {
            identity: self.outside.candidate.me.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            started_ms: self.started_ms,
            ready: self.health().ready,
            leader: LeaderStatus {
                leads: self.publisher.leads(),
                holder: seen.holder,
                epoch: counts.epoch,
                error: seen.error,
            },
            sources: self.sources.iter().map(source).collect(),
            slices: SliceCounts {
                workloads: counts.workloads as u64,
                slices: counts.slices as u64,
                pending: counts.pending as u64,
            },
            degraded: refused.chain(failing).collect(),
        }
    }
}

fn degraded(
    kind: &str,
    name: String,
    condition: &str,
    reason: &str,
    message: &str,
    since: u64,
) -> ObjectConditions {
    let condition = Condition {
        kind: condition.into(),
        status: false,
        reason: reason.into(),
        message: message.into(),
        observed_generation: 0,
        last_transition_ms: since,
    };
    ObjectConditions { kind: kind.into(), name, conditions: vec![condition] }
}

/// Sends a batch, if the lease is still this process's.
async fn perform(
    slices: Api<WorkloadSlice>,
    candidate: Candidate,
    until: Instant,
    writes: Vec<Write>,
) -> Vec<(String, Outcome)> {
    if let Err(why) = candidate.holds().await {
        tracing::warn!(why, "nothing is written: this process may lead no more");
        return writes.into_iter().map(|w| (w.slice, Outcome::NotSent)).collect();
    }
    let limit = candidate.times.write_limit();
    let one = |w: Write| {
        let slices = slices.clone();
        async move {
            let name = w.slice.clone();
            // A process that was paused since the lease was read stops here.
            if Instant::now() >= until {
                return (name, Outcome::NotSent);
            }
            let outcome = match timeout(limit, send(&slices, w)).await {
                Ok(Ok(is)) => Outcome::Written(is),
                Ok(Err(kube::Error::Api(s))) if s.code == 409 => Outcome::Conflict,
                Ok(Err(e)) => Outcome::Failed(e.to_string()),
                Err(_) => Outcome::Failed(format!("no answer within {limit:?}")),
            };
            (name, outcome)
        }
    };
    join_all(writes.into_iter().map(one)).await
}

async fn send(slices: &Api<WorkloadSlice>, write: Write) -> Result<Option<PublishedSlice>, kube::Error> {
    let name = write.slice;
    match (write.base, write.spec) {
        (None, Some(spec)) => {
            let made = slices.create(&PostParams::default(), &WorkloadSlice::new(&name, spec)).await?;
            Ok(Some(PublishedSlice::of(made)))
        }
        (Some((uid, version)), Some(spec)) => {
            let mut slice = WorkloadSlice::new(&name, spec);
            slice.metadata.uid = Some(uid);
            slice.metadata.resource_version = Some(version);
            let is = slices.replace(&name, &PostParams::default(), &slice).await?;
            Ok(Some(PublishedSlice::of(is)))
        }
        (Some((uid, version)), None) => {
            let only = Preconditions { uid: Some(uid), resource_version: Some(version) };
            let parameters = DeleteParams { preconditions: Some(only), ..DeleteParams::default() };
            match slices.delete(&name, &parameters).await {
                Ok(_) => Ok(None),
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
                Err(e) => Err(e),
            }
        }
        (None, None) => Ok(None),
    }
}
