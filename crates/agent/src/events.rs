//! Events with names: a bounded history, and a broadcast to every open stream.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use flowloom_api::v1;
use flowloom_bpf_abi as abi;
use flowloom_model::{EndpointKey, VpcName};
use tokio::sync::broadcast;

use crate::names;
use crate::sides::Who;

/// Events a slow stream may be behind before it loses some.
const STREAM_BACKLOG: usize = 4096;

/// Names of the numbers in force, for the event reader.
#[derive(Debug, Default)]
pub(crate) struct Names {
    /// VNI to VPC.
    pub vpcs: BTreeMap<u32, VpcName>,
    /// Local endpoints by id.
    pub endpoints: BTreeMap<u32, EndpointKey>,
    /// Rules by number.
    pub rules: Arc<BTreeMap<u32, String>>,
    /// Endpoints of the document by address, every node's.
    pub addresses: Arc<HashMap<(u32, IpAddr), EndpointKey>>,
    /// Endpoints that CNI requests made on this node, by address.
    pub attached: HashMap<(u32, IpAddr), EndpointKey>,
}

impl Names {
    fn at(&self, vpc: u32, ip: IpAddr) -> Option<&EndpointKey> {
        self.attached.get(&(vpc, ip)).or_else(|| self.addresses.get(&(vpc, ip)))
    }

    fn by_id(&self, id: u32) -> Option<v1::Named> {
        (id != 0).then(|| v1::Named::new(self.endpoints.get(&id).map_or("", |k| k.name.as_str()), id))
    }
}

/// History and streams.
#[derive(Debug)]
pub(crate) struct EventLog {
    names: ArcSwap<Names>,
    history: Mutex<VecDeque<Arc<v1::Event>>>,
    capacity: usize,
    streams: broadcast::Sender<Arc<v1::Event>>,
    read: AtomicU64,
    open: AtomicU32,
}

impl EventLog {
    /// Keeps the newest `capacity` events.
    #[must_use]
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            names: ArcSwap::default(),
            history: Mutex::new(VecDeque::with_capacity(capacity.min(1024))),
            capacity,
            streams: broadcast::Sender::new(STREAM_BACKLOG),
            read: AtomicU64::new(0),
            open: AtomicU32::new(0),
        }
    }

    /// Replaces the names that later events get.
    pub(crate) fn set_names(&self, names: Names) {
        self.names.store(Arc::new(names));
    }

    /// Takes an event of the ring buffer. `now` is (nanoseconds since the epoch, nanoseconds of `CLOCK_MONOTONIC`) of one instant.
    pub(crate) fn push(&self, raw: &abi::Event, now: (u64, u64)) {
        let seq = self.read.fetch_add(1, Ordering::Relaxed) + 1;
        let event = Arc::new(named(&self.names.load(), raw, seq, now));
        {
            let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
            while history.len() >= self.capacity.max(1) {
                history.pop_front();
            }
            history.push_back(event.clone());
        }
        // An error only says that nobody listens.
        let _ = self.streams.send(event);
    }

    /// The newest `last` events of the history that pass (all when `None`), and what comes after them.
    pub(crate) fn subscribe(
        &self,
        passes: impl Fn(&v1::Event) -> bool,
        last: Option<usize>,
    ) -> (Vec<Arc<v1::Event>>, broadcast::Receiver<Arc<v1::Event>>) {
        // Under the lock nothing is pushed: no event is in both or in neither.
        let history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let receiver = self.streams.subscribe();
        let mut old: Vec<_> =
            history.iter().rev().filter(|e| passes(e)).take(last.unwrap_or(usize::MAX)).cloned().collect();
        old.reverse();
        (old, receiver)
    }

    /// Counts an open stream until the value is dropped.
    #[must_use]
    pub(crate) fn open_stream(self: &Arc<Self>) -> OpenStream {
        self.open.fetch_add(1, Ordering::Relaxed);
        OpenStream(self.clone())
    }

    /// Counters.
    #[must_use]
    pub(crate) fn status(&self) -> v1::EventStatus {
        v1::EventStatus {
            read: self.read.load(Ordering::Relaxed),
            lost: 0,
            streams: self.open.load(Ordering::Relaxed),
        }
    }
}

/// A filter whose sides are found.
#[derive(Debug, Default)]
pub(crate) struct Passes {
    pub(crate) vpc: Option<String>,
    pub(crate) verdict: Option<v1::Verdict>,
    pub(crate) reason: Option<String>,
    pub(crate) either: Option<Who>,
    pub(crate) from: Option<Who>,
    pub(crate) to: Option<Who>,
}

impl Passes {
    /// All but the sides.
    pub(crate) fn of(filter: &v1::EventFilter) -> Self {
        Self {
            vpc: filter.vpc.clone(),
            verdict: filter.verdict,
            reason: filter.reason.clone(),
            ..Self::default()
        }
    }

    /// Whether an event passes.
    pub(crate) fn event(&self, e: &v1::Event) -> bool {
        self.vpc.as_ref().is_none_or(|v| *v == e.vpc.name)
            && self.verdict.is_none_or(|v| v == e.verdict)
            && self.reason.as_ref().is_none_or(|r| e.reason.as_ref() == Some(r))
            && self.either.as_ref().is_none_or(|who| who.is_either(e))
            && self.from.as_ref().is_none_or(|who| who.is(e, true))
            && self.to.as_ref().is_none_or(|who| who.is(e, false))
    }
}

/// See [`EventLog::open_stream`].
#[derive(Debug)]
pub(crate) struct OpenStream(Arc<EventLog>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

fn named(names: &Names, e: &abi::Event, seq: u64, (wall, monotonic): (u64, u64)) -> v1::Event {
    let (src, dst) = (IpAddr::from(e.src), IpAddr::from(e.dst));
    let icmp = matches!(e.protocol, 1 | 58);
    let ports = [u16::from_be_bytes(e.sport), u16::from_be_bytes(e.dport)];
    let by_address = |ip: IpAddr| {
        let key = names.at(e.vpc, ip)?;
        let id = names.endpoints.iter().find(|(_, k)| *k == key).map_or(0, |(id, _)| *id);
        Some(v1::Named::new(key.name.as_str(), id))
    };
    let kind = if e.kind == abi::event_kind::DROP { v1::EventKind::Drop } else { v1::EventKind::Verdict };
    let decided = kind == v1::EventKind::Verdict
        || matches!(
            abi::DropReason::from_u8(e.reason),
            Some(abi::DropReason::PolicyEgress | abi::DropReason::PolicyIngress)
        );
    v1::Event {
        seq,
        time_ns: wall.saturating_sub(monotonic.saturating_sub(e.time_ns)),
        kind,
        verdict: names::verdict(e.verdict).unwrap_or(v1::Verdict::Drop),
        reason: (e.reason != 0).then(|| names::reason(e.reason)),
        vpc: v1::Named::new(names.vpcs.get(&e.vpc).map_or("", VpcName::as_str), e.vpc),
        endpoint: names.by_id(e.endpoint),
        peer_endpoint: names.by_id(e.peer_endpoint),
        direction: names::direction(e.direction),
        hook: names::hook(e.hook).to_owned(),
        family: e.family,
        protocol: names::protocol(e.protocol),
        src,
        src_port: if icmp { 0 } else { ports[0] },
        src_endpoint: by_address(src),
        src_identity: e.src_identity,
        dst,
        dst_port: if icmp { 0 } else { ports[1] },
        dst_endpoint: by_address(dst),
        dst_identity: e.dst_identity,
        icmp: icmp.then(|| (e.sport[0], e.sport[1])),
        tcp_flags: (e.protocol == 6).then(|| names::tcp_flags(e.tcp_flags)),
        rule: decided.then(|| names::rule(&names.rules, e.rule)),
        len: e.len,
        rate_limited: e.lost,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(endpoint: u32, reason: abi::DropReason) -> abi::Event {
        abi::Event {
            time_ns: 400,
            vpc: 7,
            endpoint,
            src: abi::Addr::v4([10, 0, 0, 1]),
            dst: abi::Addr::v4([10, 0, 0, 2]),
            sport: 4000u16.to_be_bytes(),
            dport: 80u16.to_be_bytes(),
            kind: abi::event_kind::DROP,
            reason: reason as u8,
            verdict: abi::verdict::DROP,
            protocol: 6,
            tcp_flags: 0x12,
            rule: 3,
            family: 4,
            ..Default::default()
        }
    }

    fn log() -> EventLog {
        let log = EventLog::new(3);
        log.set_names(Names {
            vpcs: [(7, "red".parse().unwrap())].into(),
            endpoints: [(1, "red/web".parse().unwrap()), (2, "red/db".parse().unwrap())].into(),
            rules: Arc::new([(3, "red/web/no-http".to_owned())].into()),
            addresses: Arc::new([((7, "10.0.0.2".parse().unwrap()), "red/db".parse().unwrap())].into()),
            attached: HashMap::new(),
        });
        log
    }

    #[test]
    fn numbers_get_the_names_that_people_wrote() {
        let log = log();
        log.push(&raw(1, abi::DropReason::PolicyEgress), (1_000, 500));
        let (events, _) = log.subscribe(|_| true, None);
        let e = &events[0];
        assert_eq!((e.vpc.name.as_str(), e.time_ns), ("red", 900));
        assert_eq!(e.endpoint, Some(v1::Named::new("web", 1)));
        assert_eq!(e.dst_endpoint, Some(v1::Named::new("db", 2)));
        assert_eq!(e.rule, Some(v1::Named::new("red/web/no-http", 3)));
        assert_eq!(e.reason.as_deref(), Some("PolicyEgress"));
        assert_eq!(e.tcp_flags.as_deref(), Some("SA"));
    }

    #[test]
    fn the_same_address_in_another_vpc_is_nobody() {
        let log = log();
        log.push(&abi::Event { vpc: 8, ..raw(0, abi::DropReason::NoRoute) }, (0, 0));
        let (events, _) = log.subscribe(|_| true, None);
        assert_eq!((events[0].vpc.name.as_str(), &events[0].dst_endpoint), ("", &None));
    }

    #[test]
    fn the_history_is_bounded_and_filters_before_it_counts() {
        let log = log();
        for id in [1, 2, 2, 1, 2] {
            log.push(&raw(id, abi::DropReason::NoRoute), (0, 0));
        }
        let of = |name: &str, last| {
            let passes =
                Passes { either: Some(Who::Name(Some("red".into()), name.into())), ..Passes::default() };
            log.subscribe(|e| passes.event(e), last).0.iter().map(|e| e.seq).collect::<Vec<_>>()
        };
        assert_eq!(of("web", None), vec![4]);
        assert_eq!(of("db", Some(1)), vec![5]);
    }

    #[test]
    fn a_slow_stream_loses_and_is_told_how_many() {
        let log = log();
        let (_, mut receiver) = log.subscribe(|_| true, Some(0));
        for _ in 0..STREAM_BACKLOG + 10 {
            log.push(&raw(1, abi::DropReason::NoRoute), (0, 0));
        }
        assert_eq!(receiver.try_recv().unwrap_err(), broadcast::error::TryRecvError::Lagged(10));
        assert_eq!(receiver.try_recv().unwrap().seq, 11);
    }
}
