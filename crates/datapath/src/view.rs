//! Reading side of a datapath: cheap to clone, usable from any thread, never in the way of changes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use flowloom_bpf_abi as abi;
use flowloom_compiler::{EndedBackend, EndpointId, PolicyEntries, PolicySlot, RuleId, VpcId};

use crate::conntrack::{Conntrack, ConntrackRow, CtFilter, Named, QuotaProgram, SweepReport};
use crate::counters::{Drops, MapMemory, Refused, Traffic};
use crate::datapath::locked;
use crate::ended::{self, Ended};
use crate::error::{Context as _, Result};
use crate::events::Events;
use crate::kernel::Maps;
use crate::object::Object;
use crate::services::ServiceState;
use crate::state::KernelState;
use crate::trace::{TraceReport, TraceRequest, Tracer};

use std::os::fd::AsFd as _;

/// What a [`crate::Datapath`] and its views share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) maps: Maps,
    pub(crate) object: Object,
    maps_dir: PathBuf,
    quota: OnceLock<QuotaProgram>,
    tracer: Mutex<Option<Tracer>>,
}

impl Shared {
    pub(crate) fn new(maps: Maps, object: Object, maps_dir: PathBuf) -> Self {
        Self { maps, object, maps_dir, quota: OnceLock::new(), tracer: Mutex::new(None) }
    }

    fn conntrack(&self) -> Conntrack<'_> {
        Conntrack { maps: &self.maps, quota: &self.quota }
    }
}

/// A handle for reading counters, connections and policies, and for traces.
#[derive(Clone, Debug)]
pub struct View {
    shared: Arc<Shared>,
}

impl View {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Everything that plans decide.
    ///
    /// # Errors
    /// When a map cannot be read.
    pub fn state(&self) -> Result<KernelState> {
        self.shared.maps.read()
    }

    /// The entries of a slot; `None` = no such slot.
    ///
    /// # Errors
    /// When a map cannot be read.
    pub fn policy(&self, slot: PolicySlot) -> Result<Option<PolicyEntries>> {
        let Some(inner) = self.shared.maps.inner(slot.0)? else { return Ok(None) };
        inner.entries().in_map("reading", &format!("policy slot {slot}")).map(Some)
    }

    /// An endpoint's record; `None` = not in use.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn endpoint(&self, id: EndpointId) -> Result<Option<abi::EndpointRecord>> {
        let record = self.shared.maps.endpoints.get(&id.0).in_map("reading", abi::map_name::ENDPOINTS)?;
        Ok(record.filter(crate::lower::is_valid))
    }

    /// A VPC's record.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn vpc(&self, id: VpcId) -> Result<Option<abi::VpcRecord>> {
        self.shared.maps.vpcs.get(&id.0).in_map("reading", abi::map_name::VPCS)
    }

    /// What the service maps hold.
    ///
    /// # Errors
    /// When a map cannot be read.
    pub fn services(&self) -> Result<ServiceState> {
        self.shared.maps.read_services()
    }

    /// Clients that a service remembers, and what they were given last.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn affinities(&self) -> Result<BTreeMap<abi::AffinityKey, abi::AffinityValue>> {
        self.shared.maps.affinity.entries().in_map("reading", abi::map_name::AFFINITY)
    }

    /// Translations of packets in use, at most `limit`.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn service_flows(&self, limit: usize) -> Result<Vec<(abi::FlowKey, abi::FlowValue)>> {
        let mut flows = Vec::new();
        let note = |k: &abi::FlowKey, v: &abi::FlowValue| {
            if flows.len() < limit {
                flows.push((*k, *v));
            }
        };
        self.shared.maps.flows.for_each(note).in_map("reading", abi::map_name::SRV_FLOWS)?;
        Ok(flows)
    }

    /// Ends what goes through services to backends that are gone, and nothing else.
    ///
    /// # Errors
    /// When a map cannot be read or written.
    pub fn end_backends(&self, ended: &[EndedBackend]) -> Result<Ended> {
        ended::end(&self.shared.conntrack(), ended)
    }

    /// Live connections that match, at most `limit`.
    ///
    /// # Errors
    /// When a map cannot be read.
    pub fn conntrack(&self, filter: &CtFilter, limit: usize) -> Result<Vec<ConntrackRow>> {
        self.shared.conntrack().list(filter, limit)
    }

    /// Removes the connections that match and gives their quotas back. Returns how many.
    ///
    /// # Errors
    /// When a map cannot be read or written.
    pub fn flush(&self, filter: &CtFilter) -> Result<u64> {
        self.shared.conntrack().flush(filter)
    }

    /// Removes every connection of an endpoint: before its id stands for another.
    ///
    /// # Errors
    /// As [`Self::flush`].
    pub fn flush_endpoint(&self, id: EndpointId) -> Result<u64> {
        self.flush(&CtFilter { endpoint: Some(id), ..CtFilter::default() })
    }

    /// Removes expired connections and gives their quotas back. `now`: [`crate::conntrack::now_seconds`].
    ///
    /// # Errors
    /// As [`Self::flush`].
    pub fn sweep(&self, now: u32) -> Result<SweepReport> {
        self.shared.conntrack().sweep(now)
    }

    /// Numbers that connections name.
    ///
    /// # Errors
    /// When a map cannot be read.
    pub fn named(&self) -> Result<Named> {
        self.shared.conntrack().named()
    }

    /// The quota of an endpoint, or of the whole VPC.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn quota(&self, vpc: VpcId, endpoint: Option<EndpointId>) -> Result<Option<abi::QuotaValue>> {
        self.shared.conntrack().quota(vpc, endpoint)
    }

    /// Limits established connections; 0 = counted without limit. Returns whether anything changed.
    ///
    /// # Errors
    /// When the map is full or the kernel refuses.
    pub fn set_quota(&self, vpc: VpcId, endpoint: Option<EndpointId>, limit: u32) -> Result<bool> {
        self.shared.conntrack().set_quota(vpc, endpoint, limit)
    }

    /// As [`Self::set_quota`] for an endpoint whose number no connection names yet: none is looked for, which takes as long as the
    /// table is large.
    ///
    /// # Errors
    /// As there.
    pub fn start_quota(&self, vpc: VpcId, endpoint: EndpointId, limit: u32) -> Result<bool> {
        self.shared.conntrack().start_quota(vpc, endpoint, limit)
    }

    /// Stops counting. Returns whether there was a quota.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remove_quota(&self, vpc: VpcId, endpoint: Option<EndpointId>) -> Result<bool> {
        self.shared.conntrack().remove_quota(vpc, endpoint)
    }

    /// Packets and bytes of an endpoint.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn traffic(&self, id: EndpointId) -> Result<Traffic> {
        self.shared.maps.traffic_of(id)
    }

    /// Packets and bytes of every endpoint that had any.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn traffic_all(&self) -> Result<Vec<(EndpointId, Traffic)>> {
        self.shared.maps.traffic_all()
    }

    /// Drops per endpoint, direction and reason, sorted.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn drops(&self) -> Result<Vec<Drops>> {
        self.shared.maps.drops_all()
    }

    /// Decisions per rule, sorted.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn rule_hits(&self) -> Result<Vec<(RuleId, abi::Counter)>> {
        self.shared.maps.rule_hits_all()
    }

    /// Events and answers that rate limits refused, sorted.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn refused(&self) -> Result<Vec<Refused>> {
        self.shared.maps.refused()
    }

    /// Zeroes an endpoint's counters, drops and token buckets: before its id stands for another.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn clear_counters(&self, id: EndpointId) -> Result<()> {
        self.shared.maps.clear_counters(id)
    }

    /// Kernel memory per map.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn memory(&self) -> Result<Vec<MapMemory>> {
        self.shared.maps.memory()
    }

    /// The event ring. One reader at a time.
    ///
    /// # Errors
    /// When the ring cannot be mapped.
    pub fn events(&self) -> Result<Events> {
        let fd = self.shared.maps.events.as_fd().try_clone_to_owned();
        Events::new(fd.in_map("opening", abi::map_name::EVENTS)?)
    }

    /// Runs the programs on a frame over the live maps without writing them. The first trace loads the dry-run programs.
    ///
    /// # Errors
    /// When the load or the run is refused (a frame shorter than its headers, an ifindex that the caller's namespace does not have).
    pub fn trace(&self, request: &TraceRequest) -> Result<TraceReport> {
        let mut tracer = locked(&self.shared.tracer);
        if tracer.is_none() {
            *tracer = Some(Tracer::new(self.shared.object.load_dry(&self.shared.maps_dir)?)?);
        }
        match tracer.as_mut() {
            Some(t) => t.run(request),
            None => Err(crate::Error::Missing { kind: "program", name: "trace".to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_may_cross_threads() {
        fn send_and_sync<T: Send + Sync>() {}
        fn send<T: Send>() {}
        send_and_sync::<View>();
        send_and_sync::<crate::Datapath>();
        send::<Events>();
    }
}
