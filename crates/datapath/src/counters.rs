//! What the programs counted, summed over the processors.

use flowloom_bpf_abi::{self as abi, DropReason, map_name as name};
use flowloom_compiler::{EndpointId, RuleId};

use std::os::fd::AsFd as _;

use crate::error::{Context as _, Result};
use crate::kernel::Maps;
use crate::sys;

/// Packets and bytes that an endpoint sent and received.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    /// From the endpoint.
    pub egress: abi::Counter,
    /// To the endpoint.
    pub ingress: abi::Counter,
}

/// Drops of one kind.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Drops {
    /// Whose; `None` = no endpoint is known.
    pub endpoint: Option<EndpointId>,
    /// `flowloom_bpf_abi::direction`.
    pub direction: u8,
    /// Why; `None` = a number that this build does not know.
    pub reason: Option<DropReason>,
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Events (or answers) that a rate limit refused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Refused {
    /// Whose.
    pub endpoint: Option<EndpointId>,
    /// [`DropReason`] number for events, 255 for answers, 0 for verdicts.
    pub what: u32,
    /// How many since the bucket exists.
    pub count: u64,
}

/// Kernel memory of a map.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MapMemory {
    /// Map name; `fl_policy inner maps` for all inner maps together.
    pub name: &'static str,
    /// Bytes charged.
    pub bytes: u64,
}

fn some_endpoint(id: u32) -> Option<EndpointId> {
    (id != 0).then_some(EndpointId(id))
}

fn sum(values: &[abi::Counter]) -> abi::Counter {
    values.iter().fold(abi::Counter::default(), |a, v| abi::Counter {
        packets: a.packets + v.packets,
        bytes: a.bytes + v.bytes,
    })
}

fn sum_traffic(values: &[abi::TrafficCounters]) -> Traffic {
    let one = |pick: fn(&abi::TrafficCounters) -> [u64; 2]| {
        sum(&values
            .iter()
            .map(pick)
            .map(|[packets, bytes]| abi::Counter { packets, bytes })
            .collect::<Vec<_>>())
    };
    Traffic { egress: one(|c| c.egress), ingress: one(|c| c.ingress) }
}

impl Maps {
    pub(crate) fn traffic_of(&self, endpoint: EndpointId) -> Result<Traffic> {
        let values = self.traffic.get(&endpoint.0).in_map("reading", name::TRAFFIC)?;
        Ok(sum_traffic(&values))
    }

    pub(crate) fn traffic_all(&self) -> Result<Vec<(EndpointId, Traffic)>> {
        let mut out = Vec::new();
        let keep = |id: &u32, values: &[abi::TrafficCounters]| {
            let traffic = sum_traffic(values);
            if *id != 0 && traffic != Traffic::default() {
                out.push((EndpointId(*id), traffic));
            }
        };
        self.traffic.for_each(keep).in_map("reading", name::TRAFFIC)?;
        Ok(out)
    }

    pub(crate) fn drops_all(&self) -> Result<Vec<Drops>> {
        let mut out = Vec::new();
        let keep = |k: &abi::DropKey, values: &[abi::Counter]| {
            let abi::Counter { packets, bytes } = sum(values);
            let endpoint = some_endpoint(k.endpoint);
            out.push(Drops {
                endpoint,
                direction: k.direction,
                reason: DropReason::from_u8(k.reason),
                packets,
                bytes,
            });
        };
        self.drops.for_each(keep).in_map("reading", name::DROPS)?;
        out.sort_unstable();
        Ok(out)
    }

    pub(crate) fn rule_hits_all(&self) -> Result<Vec<(RuleId, abi::Counter)>> {
        let mut out = Vec::new();
        self.rule_hits.for_each(|k, v| out.push((RuleId(*k), sum(v)))).in_map("reading", name::RULE_HITS)?;
        out.sort_unstable_by_key(|(k, _)| *k);
        Ok(out)
    }

    pub(crate) fn refused(&self) -> Result<Vec<Refused>> {
        let mut out = Vec::new();
        let keep = |k: &abi::RateKey, v: &abi::RateValue| {
            if v.refused > 0 {
                out.push(Refused { endpoint: some_endpoint(k.endpoint), what: k.what, count: v.refused });
            }
        };
        self.rates.for_each(keep).in_map("reading", name::RATES)?;
        out.sort_unstable();
        Ok(out)
    }

    /// Zeroes what an id counted, before the id stands for another endpoint.
    pub(crate) fn clear_counters(&self, endpoint: EndpointId) -> Result<()> {
        self.traffic.set(&endpoint.0, abi::TrafficCounters::default()).in_map("writing", name::TRAFFIC)?;
        let mut keys = Vec::new();
        let of_it =
            |k: &abi::DropKey, _: &[abi::Counter]| keys.extend((k.endpoint == endpoint.0).then_some(*k));
        self.drops.for_each(of_it).in_map("reading", name::DROPS)?;
        for key in keys {
            self.drops.remove(&key).in_map("removing from", name::DROPS)?;
        }
        let mut keys = Vec::new();
        let of_it =
            |k: &abi::RateKey, _: &abi::RateValue| keys.extend((k.endpoint == endpoint.0).then_some(*k));
        self.rates.for_each(of_it).in_map("reading", name::RATES)?;
        self.rates.remove_batch(&keys).in_map("removing from", name::RATES).map(drop)
    }

    pub(crate) fn memory(&self) -> Result<Vec<MapMemory>> {
        let maps = [
            (name::DEVICES, self.devices.as_fd()),
            (name::ENDPOINTS, self.endpoints.as_fd()),
            (name::ADDRESSES, self.addresses.as_fd()),
            (name::IPCACHE, self.ipcache.as_fd()),
            (name::VPCS, self.vpcs.as_fd()),
            (name::POLICY, self.policy.as_fd()),
            (name::CONNTRACK_NEW, self.conntrack_new.as_fd()),
            (name::CONNTRACK, self.conntrack.as_fd()),
            (name::QUOTAS, self.quotas.as_fd()),
            (name::NODES, self.nodes.as_fd()),
            (name::FRAGMENTS, self.fragments.as_fd()),
            (name::TRAFFIC, self.traffic.as_fd()),
            (name::DROPS, self.drops.as_fd()),
            (name::RULE_HITS, self.rule_hits.as_fd()),
            (name::EVENTS, self.events.as_fd()),
            (name::RATES, self.rates.as_fd()),
            (name::CONFIG, self.config.as_fd()),
            (name::SERVICES, self.services.as_fd()),
            (name::BACKENDS, self.backends.as_fd()),
            (name::MEMBERS, self.members.as_fd()),
            (name::AFFINITY, self.affinity.as_fd()),
            (name::SRV_RANGES, self.ranges.as_fd()),
            (name::SOCKETS, self.sockets.as_fd()),
            (name::NETNS, self.netns.as_fd()),
            (name::SRV_FLOWS, self.flows.as_fd()),
        ];
        let mut out = Vec::with_capacity(maps.len() + 1);
        for (name, fd) in maps {
            out.push(MapMemory { name, bytes: sys::map_memory(fd).in_map("measuring", name)? });
        }
        let mut slots = Vec::new();
        self.policy.for_each(|slot, _| slots.push(*slot)).in_map("reading", name::POLICY)?;
        let mut bytes = 0;
        for slot in slots {
            if let Some(inner) = self.inner(slot)? {
                bytes += sys::map_memory(inner.as_fd()).in_map("measuring", name::POLICY)?;
            }
        }
        out.push(MapMemory { name: "fl_policy inner maps", bytes });
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_summed_per_direction() {
        let cpu = |n| abi::TrafficCounters { egress: [n, 10 * n], ingress: [2 * n, 20 * n] };
        let counter = |packets, bytes| abi::Counter { packets, bytes };
        let want = Traffic { egress: counter(6, 60), ingress: counter(12, 120) };
        assert_eq!(sum_traffic(&[cpu(1), cpu(2), cpu(3)]), want);
        assert_eq!(sum_traffic(&[]), Traffic::default());
    }
}
