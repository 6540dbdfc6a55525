//! All watches together. A burst of changes becomes one update; before every kind's first list is complete there is none.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use flowloom_model::NodeName;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::slices::{Join, Step};
use crate::translate::Held;
use crate::watch::{Happening, Selection, follow};
use crate::{
    Client, Delta, EndpointSlice, Kind, LoadBalancer, Namespace, NetworkPolicy, Node, ObjectFault,
    ObjectName, Pod, ServiceCidr, Translator,
};

/// In the long run one update per this long: a burst is gathered, and what it costs is bounded.
const PACE: Duration = Duration::from_millis(5);
/// Updates that go out at once before that holds, after as much calm.
const AHEAD: u32 = 16;

/// What changed.
#[derive(Debug)]
pub struct Update {
    /// When the first of it came from the server.
    pub heard: std::time::Instant,
    /// Parts of the world.
    pub delta: Delta,
    /// Everything that is wrong now.
    pub faults: Vec<ObjectFault>,
    /// Addresses of this node.
    pub node_addresses: Vec<IpAddr>,
    /// This node's object.
    pub own_node: Option<Arc<Node>>,
}

/// How the watch of one kind stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KindStatus {
    /// Whether its first list is complete.
    pub listed: bool,
    /// Objects known.
    pub objects: usize,
    /// Objects refused.
    pub refused: usize,
    /// When the server was last heard of.
    pub heard: Option<SystemTime>,
    /// When an object last changed.
    pub changed: Option<SystemTime>,
    /// Lists received.
    pub lists: u64,
    /// Times it was interrupted.
    pub failures: u64,
    /// Why, if it is now.
    pub error: Option<String>,
    /// The server need not have it: nothing waits for its list.
    pub optional: bool,
}

/// How all of them stand; shared with whoever shows it.
#[derive(Clone, Debug, Default)]
pub struct SourceStatus(Arc<Mutex<BTreeMap<&'static str, KindStatus>>>);

impl SourceStatus {
    /// By kind, as in manifests.
    #[must_use]
    pub fn kinds(&self) -> BTreeMap<&'static str, KindStatus> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that no kind can be watched at all.
    pub fn failed(&self, error: String) {
        self.with(<Node as Kind>::NAME, |s| {
            s.failures += 1;
            s.error = Some(error);
        });
    }

    fn with(&self, kind: &'static str, f: impl FnOnce(&mut KindStatus)) {
        f(self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(kind).or_default());
    }
}

/// One thing that a watch said.
enum Said {
    Alive,
    Failed(String),
    /// The server does not have the kind, or does not show it.
    Absent(String),
    Listed(Change),
    Changed(Change),
}

/// Kind, when it was heard, what.
type Word = (&'static str, Instant, Said);

type Change = Box<dyn FnOnce(&mut Translator) + Send>;

/// When updates may go out.
#[derive(Debug)]
struct Pace {
    /// The next one not before.
    opens: Instant,
}

impl Pace {
    fn new(now: Instant) -> Self {
        Self { opens: now }
    }

    /// One went out.
    fn went(&mut self, now: Instant) {
        // Calm that is longer than this counts for no more.
        let earliest = now.checked_sub(PACE * AHEAD).unwrap_or(now);
        self.opens = self.opens.max(earliest) + PACE;
    }
}

/// Where Pods of other nodes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peers {
    /// Every Pod of the cluster is watched.
    Pods,
    /// This node's Pods are watched, the others come from workload slices.
    Slices,
}

/// Follows every kind and hands updates to `deliver`, until that returns false.
pub async fn run(
    client: Client,
    translator: Translator,
    status: SourceStatus,
    deliver: impl FnMut(Update) -> bool + Send,
) {
    run_with(Peers::Pods, client, translator, status, deliver).await;
}

/// The same, with a choice.
pub async fn run_with(
    peers: Peers,
    client: Client,
    mut translator: Translator,
    status: SourceStatus,
    mut deliver: impl FnMut(Update) -> bool + Send,
) {
    let own = ObjectName::new("", translator.options().node.as_str());
    let (sender, mut said) = mpsc::unbounded_channel();
    let mut tasks = tokio::task::JoinSet::new();
    follow_kind::<Node>(&mut tasks, &client, &sender);
    follow_kind::<Namespace>(&mut tasks, &client, &sender);
    match peers {
        Peers::Pods => follow_kind::<Pod>(&mut tasks, &client, &sender),
        Peers::Slices => follow_slices(&mut tasks, &client, &sender, &translator.options().node),
    }
    follow_kind::<LoadBalancer>(&mut tasks, &client, &sender);
    follow_kind::<EndpointSlice>(&mut tasks, &client, &sender);
    follow_kind::<NetworkPolicy>(&mut tasks, &client, &sender);
    follow_kind::<ServiceCidr>(&mut tasks, &client, &sender);
    status.with(ServiceCidr::NAME, |s| s.optional = true);
    // One answer is waited for, whatever it is: what these say may refuse a node's pod CIDR, and what was in use once stays.
    let mut silent = BTreeSet::from([ServiceCidr::NAME]);
    drop(sender);
    let mut pace = Pace::new(Instant::now());
    let mut heard: Option<Instant> = None;
    while let Some(first) = said.recv().await {
        let at = first.1;
        let mut take = |word: Word, translator: &mut Translator| {
            let answered = !matches!(word.2, Said::Alive) && silent.remove(word.0);
            take(word, translator, &status) | answered
        };
        let mut changed = take(first, &mut translator);
        if changed && Instant::now() < pace.opens {
            while let Ok(Some(next)) = timeout_at(pace.opens, said.recv()).await {
                take(next, &mut translator);
            }
        }
        while let Ok(next) = said.try_recv() {
            changed |= take(next, &mut translator);
        }
        if !changed {
            continue;
        }
        heard.get_or_insert(at);
        count(&translator, &status);
        if !translator.waiting_for().is_empty() || !silent.is_empty() {
            continue;
        }
        let delta = translator.delta();
        let update = Update {
            heard: heard.take().unwrap_or(at).into_std(),
            delta,
            faults: translator.faults(),
            node_addresses: translator.node_addresses(),
            own_node: translator.cache::<Node>().object(&own).cloned(),
        };
        if !deliver(update) {
            return;
        }
        pace.went(Instant::now());
    }
}

/// Returns whether objects may have changed.
fn take((kind, _, said): Word, translator: &mut Translator, status: &SourceStatus) -> bool {
    let now = Some(SystemTime::now());
    match said {
        Said::Alive => {
            status.with(kind, |s| (s.heard, s.error) = (now, None));
            false
        }
        Said::Failed(error) => {
            status.with(kind, |s| {
                s.failures += 1;
                s.error = Some(error);
            });
            false
        }
        Said::Absent(error) => {
            status.with(kind, |s| (s.heard, s.error) = (now, Some(error)));
            false
        }
        Said::Listed(change) => {
            change(translator);
            status.with(kind, |s| {
                s.lists += 1;
                (s.listed, s.heard, s.changed, s.error) = (true, now, now, None);
            });
            true
        }
        Said::Changed(change) => {
            change(translator);
            status.with(kind, |s| (s.heard, s.changed) = (now, now));
            true
        }
    }
}

fn count(translator: &Translator, status: &SourceStatus) {
    fn of<T: Held>(translator: &Translator, status: &SourceStatus) {
        let cache = translator.cache::<T>();
        status.with(T::NAME, |s| (s.objects, s.refused) = (cache.len(), cache.refused().count()));
    }
    of::<Node>(translator, status);
    of::<Namespace>(translator, status);
    of::<Pod>(translator, status);
    of::<LoadBalancer>(translator, status);
    of::<EndpointSlice>(translator, status);
    of::<NetworkPolicy>(translator, status);
    of::<ServiceCidr>(translator, status);
}

/// Own Pods and slices, joined: to the translator they are Pods.
fn follow_slices(
    tasks: &mut tokio::task::JoinSet<()>,
    client: &Client,
    sender: &mpsc::UnboundedSender<Word>,
    node: &NodeName,
) {
    let join = Arc::new(Mutex::new(Join::new(node.clone())));
    let own = Selection { fields: format!("spec.nodeName={node}"), ..Selection::default() };
    follow_joined(tasks, client, sender, join.clone(), own, Join::local);
    follow_joined(tasks, client, sender, join, Selection::default(), Join::slices);
}

fn follow_joined<T: Kind>(
    tasks: &mut tokio::task::JoinSet<()>,
    client: &Client,
    sender: &mpsc::UnboundedSender<Word>,
    join: Arc<Mutex<Join>>,
    selection: Selection,
    take: fn(&mut Join, Happening<T>) -> Vec<Step>,
) {
    let (client, sender) = (client.clone(), sender.clone());
    let jitter = RandomState::new().hash_one(T::NAME);
    tasks.spawn(async move {
        let tell = |happening: Happening<T>| {
            let heard = Instant::now();
            let first = match &happening {
                Happening::Failed(e) => {
                    tracing::warn!(kind = T::NAME, error = %e, "watch interrupted");
                    Said::Failed(e.to_string())
                }
                Happening::Listed(_) => Said::Listed(Box::new(|_| {})),
                _ => Said::Alive,
            };
            // What follows from it goes out in the order in which the two watches spoke.
            let mut join = join.lock().unwrap_or_else(PoisonError::into_inner);
            let mut open = sender.send((T::NAME, heard, first)).is_ok();
            for step in take(&mut join, happening) {
                let change: Change = match step {
                    Step::Replace(all) => Box::new(move |t| t.replace::<Pod>(all)),
                    Step::Put(name, pod) => Box::new(move |t| t.put::<Pod>(&name, pod)),
                    Step::Gone(name) => Box::new(move |t| t.remove::<Pod>(&name)),
                };
                open = sender.send((T::NAME, heard, Said::Changed(change))).is_ok();
            }
            open
        };
        follow::<T>(&client, &selection, jitter, tell).await;
    });
}

fn follow_kind<T: Held>(
    tasks: &mut tokio::task::JoinSet<()>,
    client: &Client,
    sender: &mpsc::UnboundedSender<Word>,
) {
    let (client, sender) = (client.clone(), sender.clone());
    // Seeds of the hasher are random; nothing here needs to be secret.
    let jitter = RandomState::new().hash_one(T::NAME);
    tasks.spawn(async move {
        let selection = Selection::default();
        let mut absent = false;
        let tell = |happening: Happening<T>| {
            let said = match happening {
                Happening::Alive => Said::Alive,
                Happening::Failed(e) if T::OPTIONAL && e.is_absent() => {
                    // Said once: it is the same every few minutes.
                    if !std::mem::replace(&mut absent, true) {
                        tracing::info!(kind = T::NAME, error = %e, "the server does not show this kind");
                    }
                    Said::Absent(format!("the server does not show them: {e}"))
                }
                Happening::Failed(e) => {
                    tracing::warn!(kind = T::NAME, error = %e, "watch interrupted");
                    Said::Failed(e.to_string())
                }
                Happening::Listed(list) => {
                    for (name, e) in list.iter().filter_map(|(name, o)| Some((name, o.as_ref().err()?))) {
                        tracing::warn!(kind = T::NAME, %name, error = %e, "object refused");
                    }
                    Said::Listed(Box::new(move |t| t.replace::<T>(list)))
                }
                Happening::Put(name, object) => {
                    if let Err(e) = &object {
                        tracing::warn!(kind = T::NAME, %name, error = %e, "object refused");
                    }
                    Said::Changed(Box::new(move |t| t.put::<T>(&name, object)))
                }
                Happening::Gone(name) => Said::Changed(Box::new(move |t| t.remove::<T>(&name))),
            };
            sender.send((T::NAME, Instant::now(), said)).is_ok()
        };
        follow::<T>(&client, &selection, jitter, tell).await;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many updates changes make that come at these times, and the longest that one of them waits.
    fn paced(changes: impl Iterator<Item = Duration>) -> (u32, Duration) {
        let start = Instant::now() + Duration::from_secs(3600);
        let mut pace = Pace::new(start);
        let (mut updates, mut longest, mut covered) = (0, Duration::ZERO, start);
        for at in changes.map(|after| start + after) {
            // The update before went out after this change came, and has it.
            if updates > 0 && at <= covered {
                continue;
            }
            covered = at.max(pace.opens);
            pace.went(covered);
            (updates, longest) = (updates + 1, longest.max(covered - at));
        }
        (updates, longest)
    }

    const CALM: Duration = Duration::from_secs(1);

    #[test]
    fn a_lone_change_waits_for_nothing_and_a_burst_is_few_updates() {
        let every = |gap: Duration, n: u32| (0..n).map(move |i| CALM + gap * i);
        let (updates, longest) = paced(every(Duration::from_millis(5), 1000));
        assert_eq!((updates, longest), (1000, Duration::ZERO), "200 changes a second go out one by one");
        let (updates, longest) = paced(every(Duration::from_micros(100), 10_000));
        assert!(updates <= 16 + 200 + 1, "{updates} updates in a second");
        assert!(longest <= PACE, "{longest:?}");
        // Some changes that follow each other closely are no burst yet.
        assert_eq!(paced(every(Duration::from_millis(1), 16)), (16, Duration::ZERO));
        let after_calm = every(Duration::from_millis(1), 16)
            .chain(every(Duration::from_millis(1), 16).map(|at| at + CALM));
        assert_eq!(paced(after_calm), (32, Duration::ZERO));
    }
}
