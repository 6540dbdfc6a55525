//! The one writer: owns the world, the plan and everything outside, takes commands one after the other.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_compiler::{
    CompileOptions, CompilerCache, EndpointId, NodePlan, Numbers, PolicySlot, RuleId, RuleRef, VpcId,
};
use flowloom_datapath::{DeviceInfo, Object, View};
use flowloom_model::{Edited, EndpointKey, Fault, Timestamp, World};
use tokio::sync::{oneshot, watch};

use crate::attach::Added;
use crate::backoff::Backoff;
use crate::config::{Config, Routes};
use crate::desk::Desk;
use crate::events::EventLog;
use crate::history::History;
use crate::ipam::Ipam;
use crate::keeper::Keeper;
use crate::pins::Holds;
use crate::plane::Plane;
use crate::record::Record;
use crate::replay::Replays;
use crate::source::{DocumentFile, Kept, KubernetesWorld, Loaded, Read};
use crate::store::{Store, StoreError};
use crate::wiring::{HostRoute, NodeSpec, NodeState, WireSpec, Wiring};

/// Series of files of the numbers in the state directory.
pub(crate) const NUMBERS: &str = "numbers";
/// File of the last good document there.
const KEPT: &str = "document.json";
/// How long a retired number rests after its last use: longer than any packet, event or half-open connection lives.
const QUARANTINE: Duration = Duration::from_secs(90);
/// A look at everything, in case a notification was lost.
const SAFETY: Duration = Duration::from_secs(300);

/// What the core is told.
pub(crate) enum Command {
    /// Something happened in the document's directory, noticed at that time.
    Document(Instant),
    /// Links or addresses of the node changed.
    Network(Vec<NetworkChange>),
    /// The sweeper finished a round.
    Swept(v1::ConntrackStatus),
    /// Something changed in Kubernetes.
    Kubernetes(Box<flowloom_k8s::Update>),
    /// A CNI ADD; those that wait together are handled together.
    Add(Box<v1::CniAddRequest>, oneshot::Sender<Added>),
    /// A question or request.
    Ask(Box<dyn FnOnce(&mut Core) + Send>),
    /// End.
    Stop,
}

/// A change of the node's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NetworkChange {
    /// A link is gone.
    LinkGone(String),
    /// Addresses or foreign links changed, or notifications were lost.
    Other,
}

/// How everybody else reaches the core.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    commands: mpsc::Sender<Command>,
    passes: watch::Receiver<u64>,
    events: Arc<EventLog>,
    health: Arc<Mutex<v1::Health>>,
    desk: Arc<Desk>,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Document(_) => "Document",
            Self::Network(_) => "Network",
            Self::Swept(_) => "Swept",
            Self::Kubernetes(_) => "Kubernetes",
            Self::Add(..) => "Add",
            Self::Ask(_) => "Ask",
            Self::Stop => "Stop",
        })
    }
}

impl Handle {
    /// Sends a command; a core that is gone needs none.
    pub(crate) fn send(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    /// Runs `f` on the core's thread some time; nobody waits.
    pub(crate) fn tell(&self, f: impl FnOnce(&mut Core) + Send + 'static) {
        self.send(Command::Ask(Box::new(f)));
    }

    /// Runs `f` on the core's thread.
    ///
    /// # Errors
    /// [`ErrorCode::NotReady`] when the core has stopped.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Core) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let stopped = || ApiError::new(ErrorCode::NotReady, "the agent is going down");
        let (sender, receiver) = oneshot::channel();
        let question = Command::Ask(Box::new(move |core| {
            // A client that went away needs no answer.
            let _ = sender.send(f(core));
        }));
        self.commands.send(question).map_err(|_| stopped())?;
        receiver.await.map_err(|_| stopped())
    }

    /// Hands in a CNI ADD.
    ///
    /// # Errors
    /// Those of the request; [`ErrorCode::NotReady`] when the core has stopped.
    pub(crate) async fn add(&self, request: v1::CniAddRequest) -> Added {
        let stopped = || ApiError::new(ErrorCode::NotReady, "the agent is going down");
        let (sender, receiver) = oneshot::channel();
        let _adding = self.desk.adding(&request.attachment);
        self.commands.send(Command::Add(Box::new(request), sender)).map_err(|_| stopped())?;
        receiver.await.map_err(|_| stopped())?
    }

    /// Changes after each pass.
    #[must_use]
    pub(crate) fn passes(&self) -> watch::Receiver<u64> {
        self.passes.clone()
    }

    /// The event log.
    #[must_use]
    pub(crate) fn events(&self) -> &Arc<EventLog> {
        &self.events
    }

    /// Requests of container runtimes.
    #[must_use]
    pub(crate) fn desk(&self) -> &Desk {
        &self.desk
    }

    /// Answered without asking the core.
    #[must_use]
    pub(crate) fn health(&self) -> v1::Health {
        self.health.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The document in force.
#[derive(Debug)]
pub(crate) struct Document {
    pub(crate) world: World,
    pub(crate) faults: Vec<Fault>,
    pub(crate) generation: u64,
    pub(crate) loaded_ms: u64,
    pub(crate) digest: String,
}

/// A number that waits until nothing names it.
#[derive(Debug)]
pub(crate) struct Retired {
    pub(crate) since: Instant,
    pub(crate) epoch: u64,
    pub(crate) endpoints: Vec<(Option<VpcId>, EndpointId)>,
}

/// Results of the last pass.
#[derive(Debug, Default)]
pub(crate) struct LastPass {
    pub(crate) count: u64,
    pub(crate) writes: u64,
    pub(crate) micros: u64,
    pub(crate) errors: Vec<String>,
}

/// See the module's comment.
pub(crate) struct Core {
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(crate) wiring: Box<dyn Wiring>,
    pub(crate) plane: Box<dyn Plane>,
    pub(crate) view: Option<View>,
    pub(crate) file: DocumentFile,
    /// Why the file on disk is not in force.
    pub(crate) document_error: String,
    /// What Kubernetes says, where it is asked.
    pub(crate) kubernetes: Option<KubernetesWorld>,
    pub(crate) document: Option<Document>,
    /// [`Loaded::digest`] of the document that is kept for the next life; empty when there is none, unknown before the first load.
    kept: Option<String>,
    /// When the change that is under way was noticed.
    pub(crate) noticed: Option<Instant>,
    /// From there until it was in force, for the last one.
    pub(crate) applied_us: u64,
    pub(crate) records: BTreeMap<EndpointKey, Record>,
    /// Attachments between the parts of their DEL.
    pub(crate) leaving: BTreeSet<EndpointKey>,
    pub(crate) ipam: Ipam,
    /// Document and attachments together.
    pub(crate) world: World,
    pub(crate) numbers: Numbers,
    /// Endpoints in quarantine, and those whose policy is frozen.
    pub(crate) holds: Holds,
    /// What changed in policies.
    pub(crate) history: History,
    /// Version of the numbers on the disk.
    pub(crate) stored_numbers: u64,
    pub(crate) cache: CompilerCache,
    pub(crate) options: CompileOptions,
    /// What the world compiles to.
    pub(crate) wanted: NodePlan,
    /// What the datapath holds.
    pub(crate) plan: NodePlan,
    /// Set until the datapath is known to hold `plan`.
    pub(crate) unsure: bool,
    /// What the datapath refused of it; `None` when that is not known.
    pub(crate) refused: Option<Vec<Object>>,
    pub(crate) compiled: Vec<flowloom_compiler::Condition>,
    /// Why programs are missing that the kernel was given.
    pub(crate) unloaded: String,
    /// Why an endpoint is not wired.
    pub(crate) wiring_errors: BTreeMap<EndpointKey, String>,
    /// Health-check ports that others have.
    pub(crate) unserved: Vec<crate::health::Unserved>,
    /// Devices with programs on them.
    pub(crate) attached: BTreeMap<EndpointKey, DeviceInfo>,
    /// How each of them was wired when it was last looked at.
    pub(crate) wired_as: BTreeMap<EndpointKey, (EndpointId, WireSpec)>,
    /// Guarded by the classic path so far; their links follow at `settle_at`.
    pub(crate) unsettled: BTreeSet<EndpointKey>,
    pub(crate) settle_at: Option<Instant>,
    /// Endpoints of the document by address, for events.
    pub(crate) address_names: Arc<HashMap<(u32, IpAddr), EndpointKey>>,
    /// The document in force that is not kept yet, by its digest.
    unkept: Option<String>,
    /// Everything was looked at since memory was given back.
    pub(crate) swollen: bool,
    /// What came of reading the document before the core ran.
    early: Option<Result<Read, String>>,
    /// Slots that nothing in force names any more; given back at `free_at`.
    pub(crate) unused_slots: BTreeSet<PolicySlot>,
    pub(crate) free_at: Option<Instant>,
    pub(crate) node_spec: Option<NodeSpec>,
    /// Whether the overlay device of [`Self::node_spec`] is on: its programs come first.
    pub(crate) overlay_open: bool,
    pub(crate) node: NodeState,
    pub(crate) routes: Option<BTreeSet<HostRoute>>,
    pub(crate) retired: VecDeque<Retired>,
    pub(crate) applied_generation: u64,
    pub(crate) applied_digest: String,
    pub(crate) last: LastPass,
    pub(crate) conntrack: v1::ConntrackStatus,
    pub(crate) conditions: crate::conditions::Conditions,
    pub(crate) timings: VecDeque<v1::CniTiming>,
    pub(crate) desk: Arc<Desk>,
    pub(crate) replays: Replays,
    pub(crate) keeper: Keeper,
    /// When this life of the agent began.
    pub(crate) born: v1::Moment,
    pub(crate) started_ms: u64,
    pub(crate) events: Arc<EventLog>,
    /// `address_names` are of another document.
    pub(crate) moved: bool,
    /// Rules whose names `rule_names` holds.
    pub(crate) named_rules: Arc<BTreeMap<RuleId, RuleRef>>,
    pub(crate) rule_names: Arc<BTreeMap<u32, String>>,
    pub(crate) backoff: Backoff,
    pub(crate) retry_at: Option<Instant>,
    health: Arc<Mutex<v1::Health>>,
    pub(crate) passes: watch::Sender<u64>,
    commands: mpsc::Receiver<Command>,
    stop: Arc<AtomicBool>,
}

/// The outside world, handed in.
pub(crate) struct Outside {
    /// The state directory.
    pub store: Store,
    /// The network.
    pub wiring: Box<dyn Wiring>,
    /// The datapath.
    pub plane: Box<dyn Plane>,
}

/// The core's end of its [`Handle`]s: sources may speak before there is a core, which hears them when it runs.
pub(crate) struct Line {
    handle: Handle,
    passes: watch::Sender<u64>,
    commands: mpsc::Receiver<Command>,
}

impl Line {
    /// A line for the core to come.
    pub(crate) fn new(config: &Config, events: Arc<EventLog>) -> Self {
        let health = Arc::new(Mutex::new(v1::Health {
            ready: false,
            node: config.node.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            waiting_for: vec!["document".to_owned()],
        }));
        let (sender, commands) = mpsc::channel();
        let (passes, watched) = watch::channel(0);
        let desk = Arc::new(Desk::default());
        Self { handle: Handle { commands: sender, passes: watched, events, health, desk }, passes, commands }
    }

    /// The other end.
    pub(crate) fn handle(&self) -> Handle {
        self.handle.clone()
    }
}

impl Core {
    /// Reads what survived. Nothing outside is changed before the first document is loaded.
    ///
    /// # Errors
    /// When the numbers are damaged or the state directory cannot be read.
    pub(crate) fn new(config: Config, outside: Outside, line: Line) -> Result<Self, StoreError> {
        let Line { handle: Handle { events, health, desk, .. }, passes, commands } = line;
        let Outside { store, wiring, plane } = outside;
        let mut numbers: Numbers = store.read_series(NUMBERS)?.unwrap_or_default();
        // Those of services live in the maps. Without them everything of services is written anew, in the safe order.
        match plane.view().map(|view| view.services()) {
            Some(Ok(state)) => numbers.adopt_services(flowloom_datapath::services::held_services(&state)),
            Some(Err(e)) => tracing::warn!(error = %e, "the numbers of services are not known any more"),
            None => {}
        }
        let (records, damaged) = store.endpoints::<Record>()?;
        for e in &damaged {
            tracing::error!(error = %e, "an endpoint's record is left out");
        }
        Ok(Self {
            file: DocumentFile::new(&config.document, &config.lock_file()),
            options: CompileOptions { direct_routes: config.routes == Routes::Direct },
            wiring,
            view: plane.view(),
            plane,
            document_error: String::new(),
            kubernetes: config.kubernetes.enabled.then(KubernetesWorld::default),
            document: None,
            kept: None,
            noticed: None,
            applied_us: 0,
            records: records.into_iter().map(|r| (r.key.clone(), r)).collect(),
            leaving: BTreeSet::new(),
            ipam: Ipam::default(),
            world: World::default(),
            holds: Holds::load(&store)?,
            history: History::load(&store, &numbers)?,
            stored_numbers: numbers.version(),
            numbers,
            cache: CompilerCache::default(),
            wanted: NodePlan::default(),
            plan: NodePlan::default(),
            unsure: true,
            refused: None,
            compiled: Vec::new(),
            unloaded: String::new(),
            wiring_errors: BTreeMap::new(),
            unserved: Vec::new(),
            attached: BTreeMap::new(),
            wired_as: BTreeMap::new(),
            unsettled: BTreeSet::new(),
            settle_at: None,
            address_names: Arc::default(),
            unkept: None,
            swollen: false,
            early: None,
            unused_slots: BTreeSet::new(),
            free_at: None,
            node_spec: None,
            overlay_open: false,
            node: NodeState::default(),
            routes: None,
            retired: VecDeque::new(),
            applied_generation: 0,
            applied_digest: String::new(),
            last: LastPass::default(),
            conntrack: v1::ConntrackStatus::default(),
            conditions: crate::conditions::Conditions::default(),
            timings: VecDeque::new(),
            desk,
            replays: store.queue()?,
            keeper: Keeper::new(&config),
            born: store.clock()?,
            started_ms: now_ms(),
            events,
            moved: true,
            named_rules: Arc::default(),
            rule_names: Arc::default(),
            backoff: Backoff::new(Duration::from_millis(200), Duration::from_secs(60)),
            retry_at: None,
            health,
            passes,
            commands,
            store,
            stop: Arc::new(AtomicBool::new(false)),
            config,
        })
    }

    /// Takes over a document that was read while something else took its time.
    pub(crate) fn begin_with(&mut self, (file, read): (DocumentFile, Option<Result<Read, String>>)) {
        (self.file, self.early) = (file, read);
    }

    /// Loads the document and makes it so, then serves commands until told to stop.
    pub(crate) fn run(mut self) {
        self.plane.begin();
        if self.early.is_some() {
            self.reload();
        }
        // It may have changed since, before anybody watched it.
        self.reload();
        while !self.stop.load(Ordering::Relaxed) {
            let until =
                |at: Option<Instant>| at.map_or(SAFETY, |at| at.saturating_duration_since(Instant::now()));
            let (retry, settle, free) = (until(self.retry_at), until(self.settle_at), until(self.free_at));
            match self.commands.try_recv() {
                Ok(command) => {
                    self.take(command);
                    continue;
                }
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) if self.tidy_at_once() => continue,
                Err(TryRecvError::Empty) => {}
            }
            match self.commands.recv_timeout(retry.min(settle).min(free).min(SAFETY)) {
                Ok(command) => self.take(command),
                Err(RecvTimeoutError::Timeout) if free < retry.min(settle) => self.free_slots(),
                Err(RecvTimeoutError::Timeout) if settle < retry => self.settle_one(),
                Err(RecvTimeoutError::Timeout) => self.timer(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        while self.tidy() {}
    }

    /// Takes a command, and with it everything that needs no more than the same look at the world.
    fn take(&mut self, first: Command) {
        let (mut document, mut network, mut kubernetes) = (false, Vec::new(), Vec::new());
        let (mut adds, mut waiting) = (Vec::new(), Vec::new());
        let mut next = Some(first);
        while let Some(command) = next {
            match command {
                Command::Document(at) => {
                    document = true;
                    self.noticed.get_or_insert(at);
                }
                Command::Network(changes) => network.extend(changes),
                Command::Swept(status) => self.swept(status),
                Command::Kubernetes(update) => kubernetes.push(*update),
                Command::Add(request, answer) => {
                    adds.push(*request);
                    waiting.push(answer);
                }
                Command::Ask(f) => f(self),
                Command::Stop => self.stop.store(true, Ordering::Relaxed),
            }
            next = self.commands.try_recv().ok();
        }
        // Before the ADDs: one of them may have waited for this.
        if !kubernetes.is_empty() {
            self.kubernetes_changed(kubernetes);
        }
        if !adds.is_empty() {
            for (answer, result) in waiting.into_iter().zip(self.cni_add_all(&adds)) {
                // A client that went away finds its attachment with the next request.
                let _ = answer.send(result);
            }
        }
        // What DEL retired; nothing waits for it.
        if self.sources_spoke() {
            self.store_numbers();
        }
        if !network.is_empty() {
            self.network_changed(&network);
        }
        if document {
            self.reload();
            self.noticed = None;
        }
        self.refresh_stale();
    }

    /// One thing that nobody waits for; whether there was one.
    pub(crate) fn tidy(&mut self) -> bool {
        let slots = !self.unused_slots.is_empty();
        if slots {
            self.free_slots();
        }
        slots || self.tidy_at_once()
    }

    /// The same, but for what makes whoever comes next wait for the kernel.
    pub(crate) fn tidy_at_once(&mut self) -> bool {
        if self.history.waits() {
            self.history.write(&self.store);
        } else if self.file.unprepared() {
            self.file.prepare();
        } else if let Some(document) = self.unkept.take() {
            self.keep(&document);
        } else if std::mem::take(&mut self.swollen) {
            flowloom_datapath::sys::release_memory();
        } else {
            return false;
        }
        true
    }

    /// What [`Self::tidy`] still has to do.
    pub(crate) fn quiet_work(&self) -> u64 {
        let (unprepared, unkept) = (u64::from(self.file.unprepared()), u64::from(self.unkept.is_some()));
        let (noted, swollen) = (u64::from(self.history.waits()), u64::from(self.swollen));
        self.unused_slots.len() as u64 + noted + unprepared + unkept + swollen
    }

    fn timer(&mut self) {
        // The safety net: what inotify or netlink did not tell.
        if !self.sources_spoke() || self.retry_at.is_none() {
            self.node_spec = None;
            self.routes = None;
            self.keeper.doubt();
        }
        self.retry_at = None;
        self.reload();
        if self.sources_spoke() && self.retry_at.is_none() {
            self.pass();
        }
    }

    /// The last good document of a life before this one.
    fn kept_document(&self) -> Option<Loaded> {
        let kept = self.store.read::<Kept>(KEPT).unwrap_or_default()?;
        kept.load().inspect_err(|e| tracing::warn!(error = %e, "the kept document is of no use")).ok()
    }

    /// Reads the document when it changed, and makes it so.
    pub(crate) fn reload(&mut self) {
        let early = self.early.take();
        match early.or_else(|| self.file.load(self.document.as_mut().map(|d| &mut d.world))) {
            None => {}
            // A cluster's node needs no document. One that vanishes is another matter: the last good one stays.
            Some(Err(_))
                if self.kubernetes.is_some()
                    && self.document.as_ref().is_none_or(|d| d.digest.is_empty())
                    && !self.config.document.exists() =>
            {
                match Loaded::empty() {
                    Ok(empty) if self.document.is_none() => self.enforce(empty, false),
                    Ok(_) => {}
                    Err(e) => self.note_error(e),
                }
            }
            Some(Err(e)) => {
                if self.document_error != e {
                    tracing::error!(error = %e, "the document is not in force; the last good one stays");
                }
                self.document_error = e;
                match self.document.is_none().then(|| self.kept_document()).flatten() {
                    Some(kept) => self.enforce(kept, false),
                    None => self.publish(),
                }
            }
            Some(Ok(Read::Edited(edited, digest))) => {
                self.document_error.clear();
                self.edit(&edited, digest);
            }
            Some(Ok(Read::Whole(mut loaded))) => {
                self.document_error.clear();
                // What is not right is as it was before, and that another life of the agent knew.
                if self.document.is_none()
                    && !loaded.self_contained
                    && let Some(kept) = self.kept_document()
                    && let Some(Ok(again)) = self.file.again(&kept.world)
                {
                    *loaded = again;
                }
                self.enforce(*loaded, true);
            }
        }
    }

    fn enforce(&mut self, loaded: Loaded, from_file: bool) {
        for fault in &loaded.faults {
            tracing::warn!(%fault, "an object of the document is degraded");
        }
        self.document = Some(Document {
            world: loaded.world,
            faults: loaded.faults,
            generation: self.document.as_ref().map_or(1, |d| d.generation + 1),
            loaded_ms: now_ms(),
            digest: loaded.digest,
        });
        if from_file && self.kept.is_none() {
            // Before anybody hears that the node is ready: what comes after that is a change's own work.
            self.file.prepare();
            let kept = self.store.read::<Kept>(KEPT).ok().flatten();
            self.kept = Some(kept.map(|kept| kept.digest()).unwrap_or_default());
        }
        self.rebuild_world();
        self.moved = true;
        self.blame_document();
        self.pass();
        if from_file {
            self.unkept = self.document.as_ref().map(|d| d.digest.clone());
        }
    }

    /// The same after a small edit, which `document.world` has already: what did not change is not looked at.
    fn edit(&mut self, edited: &Edited, digest: String) {
        let Some(document) = &mut self.document else { return };
        document.generation += 1;
        document.loaded_ms = now_ms();
        document.digest.clone_from(&digest);
        self.blame_document();
        if self.kubernetes.is_some() {
            // What it says of the same names is put together anew.
            self.rebuild_world();
            self.moved = true;
            self.pass();
        } else {
            self.follow_edit(edited);
            self.pass_over((!edited.rules).then_some(&edited.endpoints));
        }
        self.unkept = Some(digest);
    }

    /// What the next pass changes, the document has changed.
    fn blame_document(&mut self) {
        if let Some(document) = &self.document {
            let (generation, digest) = (document.generation, document.digest.clone());
            self.history.source = v1::ChangeSource::Document { generation, digest };
        }
    }

    /// Keeps the document for the next life of the agent, once it is in force.
    fn keep(&mut self, digest: &str) {
        if self.applied_digest != digest || self.kept.as_deref() == Some(digest) {
            return;
        }
        let Some(contents) = self.file.contents() else { return };
        match self.store.write(KEPT, &contents) {
            Ok(()) => self.kept = Some(digest.to_owned()),
            Err(e) => tracing::warn!(error = %e, "the last good document is not kept for a restart"),
        }
    }

    pub(crate) fn network_changed(&mut self, changes: &[NetworkChange]) {
        let mut gone = Vec::new();
        for (key, record) in self.records.iter().filter(|(key, _)| !self.leaving.contains(*key)) {
            let device = record.wire.device();
            if changes.iter().any(|c| matches!(c, NetworkChange::LinkGone(name) if name == device)) {
                gone.push(key.clone());
            }
        }
        let duty = |name: &String| {
            self.node.overlay.iter().chain(&self.node.uplinks).any(|(device, _)| device == name)
        };
        let other = changes.iter().any(|c| match c {
            NetworkChange::Other => true,
            NetworkChange::LinkGone(name) => duty(name),
        });
        if !self.sources_spoke() || (gone.is_empty() && !other) {
            return;
        }
        for key in gone {
            // Another device of that name may be there already.
            let there = self.records.get(&key).map(|r| self.wiring.is_wired(&r.wire));
            if matches!(there, Some(Ok(true))) {
                continue;
            }
            tracing::warn!(endpoint = %key, "its device is gone");
            self.attached.remove(&key);
            if self.records.get(&key).is_some_and(|r| r.cni.is_some()) {
                self.forget_attachment(&key);
            }
        }
        if other {
            self.node_spec = None;
        }
        self.pass();
    }

    fn swept(&mut self, status: v1::ConntrackStatus) {
        self.conntrack = status;
        self.release_numbers();
    }

    /// Numbers that have rested are free again, once no connection names them.
    fn release_numbers(&mut self) {
        let mut released = None;
        while let Some(oldest) = self.retired.front()
            && oldest.since.elapsed() >= QUARANTINE
        {
            if let Some(view) = &self.view {
                for (vpc, id) in &oldest.endpoints {
                    if self.plan.endpoints.values().any(|e| e.id == *id) {
                        continue;
                    }
                    if let Err(e) = forget_number(view, *vpc, *id) {
                        tracing::warn!(error = %e, "a retired endpoint number stays reserved");
                        return;
                    }
                }
            }
            released = self.retired.pop_front().map(|r| r.epoch);
        }
        if let Some(epoch) = released {
            self.numbers.release_before(epoch);
            self.store_numbers();
        }
    }

    /// Writes the numbers when they changed; a failure is noted and the pass is tried again.
    pub(crate) fn store_numbers(&mut self) -> bool {
        if self.numbers.version() == self.stored_numbers {
            return true;
        }
        match self.store.write_next(NUMBERS, &self.numbers) {
            Ok(()) => {
                self.stored_numbers = self.numbers.version();
                true
            }
            Err(e) => {
                self.note_error(format!("numbers: {e}"));
                false
            }
        }
    }

    pub(crate) fn note_error(&mut self, error: String) {
        tracing::error!(%error, "reconcile");
        self.last.errors.push(error);
    }

    /// Tells the world how it stands: health, names for events, waiting requests.
    pub(crate) fn publish(&mut self) {
        let mut waiting = Vec::new();
        if self.document.is_none() {
            waiting.push(if self.document_error.is_empty() {
                "document".to_owned()
            } else {
                format!("document: {}", self.document_error)
            });
        } else if self.sources_spoke() && self.applied_generation == 0 {
            waiting.push(match self.unloaded.as_str() {
                "" => "datapath".to_owned(),
                why => format!("datapath: {why}"),
            });
        }
        waiting.extend(self.silent_kubernetes());
        let ready;
        {
            let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
            health.ready = waiting.is_empty();
            health.waiting_for = waiting;
            ready = health.ready;
        }
        // After the health says so: who reads the one finds the other.
        self.keeper.follow(ready);
        self.publish_names();
        let count = self.last.count;
        self.passes.send_replace(count);
    }

    /// The time for the address pools.
    pub(crate) fn now() -> Timestamp {
        Timestamp(now_ms() / 1000)
    }
}

/// Connections, counters and quota of an endpoint's number, before it stands for another endpoint.
fn forget_number(view: &View, vpc: Option<VpcId>, id: EndpointId) -> flowloom_datapath::Result<()> {
    view.flush_endpoint(id)?;
    if let Some(vpc) = vpc {
        view.remove_quota(vpc, Some(id))?;
    }
    view.clear_counters(id)
}

/// Milliseconds since the Unix epoch.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
