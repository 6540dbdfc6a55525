//! Counters and gauges, in the OpenMetrics text format.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::publish::{Counts, Outcome};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabel {
    source: &'static str,
}

/// The numbers. Clones are the same numbers.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    leader: Gauge,
    epoch: Gauge,
    workloads: Gauge,
    slices: Gauge,
    pending: Gauge,
    refused: Gauge,
    writes: Family<ResultLabel, Counter<u64, AtomicU64>>,
    events: Family<SourceLabel, Counter<u64, AtomicU64>>,
    interruptions: Family<SourceLabel, Counter<u64, AtomicU64>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("flowloom_controller");
        let mut gauge = |name: &str, help: &str| {
            let gauge: Gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        let leader = gauge("leader", "1 while this process leads");
        let epoch = gauge("epoch", "Epoch of this process's leadership, 0 without");
        let workloads = gauge("workloads", "Pods with an address of the Pod network");
        let slices = gauge("slices", "Workload slices at the API server");
        let pending = gauge("slices_pending", "Slices that differ from what they are to say");
        let refused = gauge("objects_refused", "Objects that cannot be read; their last good version counts");
        let (writes, events, interruptions) = (Family::default(), Family::default(), Family::default());
        registry.register("writes", "Writes of slices by result", writes.clone());
        registry.register("events", "What sources said", events.clone());
        registry.register("interruptions", "Watches that were interrupted", interruptions.clone());
        Self {
            registry: Arc::new(registry),
            leader,
            epoch,
            workloads,
            slices,
            pending,
            refused,
            writes,
            events,
            interruptions,
        }
    }
}

fn number(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

impl Metrics {
    pub(crate) fn state(&self, counts: &Counts, refused: usize) {
        self.leader.set(i64::from(counts.leads));
        self.epoch.set(counts.epoch);
        self.workloads.set(number(counts.workloads));
        self.slices.set(number(counts.slices));
        self.pending.set(number(counts.pending));
        self.refused.set(number(refused));
    }

    pub(crate) fn written(&self, outcome: &Outcome) {
        let result = match outcome {
            Outcome::Written(_) => "written",
            Outcome::Conflict => "conflict",
            Outcome::NotSent => "not_sent",
            Outcome::Failed(_) => "failed",
        };
        self.writes.get_or_create(&ResultLabel { result }).inc();
    }

    pub(crate) fn heard(&self, source: &'static str, failed: bool) {
        let family = if failed { &self.interruptions } else { &self.events };
        family.get_or_create(&SourceLabel { source }).inc();
    }

    /// All of them as text.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut out, &self.registry);
        out
    }
}
