//! The core's state as the API shows it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_compiler::{EndpointId, Identity, PolicySlot, VpcId};
use flowloom_datapath::View;
use flowloom_model::{Endpoint, EndpointKey, Family, VpcName};
use ipnet::IpNet;

use crate::conditions::Complaint;
use crate::core::{Core, now_ms};
use crate::names;

/// Whether what was waited for is in force.
#[derive(Debug)]
pub(crate) struct InForce {
    pub(crate) reached: bool,
    pub(crate) generation: u64,
    pub(crate) revision: u32,
}

pub(crate) fn not_found(what: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::NotFound, format!("{what} does not exist on this node"))
}

pub(crate) fn kernel(e: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Realise, e.to_string())
}

impl Core {
    pub(crate) fn kernel_view(&self) -> Result<&View, ApiError> {
        self.view.as_ref().ok_or_else(|| ApiError::new(ErrorCode::NotReady, "the datapath is not loaded"))
    }

    pub(crate) fn vpc_id(&self, name: &str) -> Result<VpcId, ApiError> {
        let found = self.wanted.vpcs.iter().find(|(_, v)| v.name.as_str() == name);
        found.map(|(id, _)| *id).ok_or_else(|| not_found(format!("vpc {name}")))
    }

    pub(crate) fn vpc_named(&self, id: u32) -> v1::Named {
        v1::Named::new(self.wanted.vpcs.get(&VpcId(id)).map_or("", |v| v.name.as_str()), id)
    }

    pub(crate) fn endpoint_named(&self, id: EndpointId) -> v1::Named {
        let live = self.wanted.endpoints.values().find(|e| e.id == id).map(|e| e.key.name.to_string());
        let name = live.or_else(|| self.numbers.endpoint(id).map(|k| k.name.to_string()));
        v1::Named::new(name.unwrap_or_default(), id.0)
    }

    pub(crate) fn rule_named(&self, number: u32) -> v1::Named {
        if number == 0 {
            return v1::Named::new("default", 0);
        }
        let rule = flowloom_compiler::RuleId(number);
        let live = self.wanted.rules.get(&rule).map(ToString::to_string);
        v1::Named::new(
            live.or_else(|| self.numbers.rule(rule).map(|r| r.to_string())).unwrap_or_default(),
            number,
        )
    }

    pub(crate) fn identity_named(&self, identity: Identity) -> v1::Named {
        if let Some(word) = names::reserved_identity(identity.0) {
            return v1::Named::new(word, identity.0);
        }
        let Some(facts) = self.numbers.facts(identity) else { return v1::Named::new("", identity.0) };
        let mut parts: Vec<String> = Vec::new();
        if let Some(e) = &facts.endpoint {
            parts.extend(e.labels.iter().map(|(k, v)| format!("{k}={v}")));
            parts.extend(e.groups.iter().map(|g| format!("group:{g}")));
            if parts.is_empty() {
                parts.push("endpoint".to_owned());
            }
        }
        parts.extend(
            names::reserved_identity(facts.reserved).filter(|_| facts.reserved != 0).map(str::to_owned),
        );
        parts.extend(facts.cidrs.iter().map(ToString::to_string));
        v1::Named::new(parts.join(","), identity.0)
    }

    /// Reads the file again first: who wrote it just before waits for what it says, not for what it said.
    pub(crate) fn in_force(
        &mut self,
        key: Option<&EndpointKey>,
        revision: Option<u32>,
        generation: Option<u64>,
    ) -> Result<InForce, ApiError> {
        self.reload();
        let loaded = self.document.as_ref().map_or(0, |d| d.generation);
        let applied = self.applied_generation;
        let mut reached = match generation {
            Some(g) => applied >= g,
            None => loaded > 0 && applied == loaded && (!self.unsure) && self.document_error.is_empty(),
        };
        let mut in_force = 0;
        if let Some(key) = key {
            if !self.world.endpoints.contains_key(key)
                && loaded > 0
                && generation.is_none_or(|g| applied >= g)
            {
                return Err(not_found(format!("endpoint {key}")));
            }
            let plan = self.plan.endpoints.get(key);
            in_force = plan.map_or(0, |p| p.revision);
            reached &= plan.is_some() && revision.is_none_or(|r| in_force >= r);
        }
        Ok(InForce { reached, generation: applied, revision: in_force })
    }

    pub(crate) fn status(&mut self) -> v1::Status {
        let mut counts = v1::EndpointCounts::default();
        for info in self.endpoint_infos(None) {
            counts.total += 1;
            match info.state {
                v1::EndpointState::Ready => counts.ready += 1,
                v1::EndpointState::Failed => counts.failed += 1,
                _ => counts.waiting += 1,
            }
        }
        let complaints = self.complaints();
        let generation = self.document.as_ref().map_or(0, |d| d.generation);
        v1::Status {
            node: self.config.node.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            abi_version: flowloom_bpf_abi::ABI_VERSION,
            started_ms: self.started_ms,
            ready: self.applied_generation > 0,
            forwarding: self.config.forwarding.name().to_owned(),
            document: v1::DocumentStatus {
                path: self.config.document.display().to_string(),
                generation,
                applied_generation: self.applied_generation,
                loaded_ms: self.document.as_ref().map_or(0, |d| d.loaded_ms),
                applied_digest: self.applied_digest.clone(),
                applied_us: self.applied_us,
                error: self.document_error.clone(),
            },
            reconcile: v1::ReconcileStatus {
                passes: self.last.count,
                last_writes: self.last.writes,
                total_writes: crate::writes::total(),
                last_duration_us: self.last.micros,
                errors: self.last.errors.clone(),
                quiet_work: self.quiet_work(),
            },
            endpoints: counts,
            conntrack: v1::ConntrackStatus {
                capacity: u64::from(self.config.conntrack.entries),
                ..self.conntrack
            },
            events: v1::EventStatus { lost: self.refused_events(), ..self.events.status() },
            degraded: self.conditions.update(complaints, generation, now_ms()),
        }
    }

    /// Events that rate limits refused since the datapath exists.
    fn refused_events(&self) -> u64 {
        let refused = self.view.as_ref().and_then(|v| v.refused().ok()).unwrap_or_default();
        refused.iter().filter(|r| r.what != 255).map(|r| r.count).sum()
    }

    pub(crate) fn complaints(&self) -> Vec<Complaint> {
        let mut list = Vec::new();
        if !self.document_error.is_empty() {
            list.push(Complaint {
                kind: "document".into(),
                name: self.config.document.display().to_string(),
                reason: "NotInForce".into(),
                message: self.document_error.clone(),
            });
        }
        for fault in self.document.iter().flat_map(|d| &d.faults) {
            let object = fault.object.as_ref();
            list.push(Complaint {
                kind: object.map_or("document", |o| singular(o.kind())).to_owned(),
                name: object.map_or_else(|| fault.path.clone(), flowloom_model::ObjectRef::full_name),
                reason: fault.code.to_string(),
                message: fault.to_string(),
            });
        }
        let document = self.document.as_ref().map(|d| &d.world);
        list.extend(self.kubernetes.iter().flat_map(|k| k.complaints(document)));
        for condition in &self.compiled {
            use flowloom_compiler::ObjectRef as O;
            let (kind, name) = match &condition.object {
                O::Node { node } => ("node", node.to_string()),
                O::Vpc { vpc } => ("vpc", vpc.to_string()),
                O::Subnet { vpc, subnet } => ("subnet", format!("{vpc}/{subnet}")),
                O::Endpoint { endpoint } => ("endpoint", endpoint.to_string()),
                O::Rule { vpc, group, rule } => ("rule", format!("{vpc}/{group}/{rule}")),
                O::CidrGroup { vpc, group } => ("cidr_group", format!("{vpc}/{group}")),
                O::Service { vpc, service } => ("service", format!("{vpc}/{service}")),
            };
            list.push(Complaint {
                kind: kind.into(),
                name,
                reason: format!("{:?}", condition.reason),
                message: condition.message.clone(),
            });
        }
        for (key, message) in &self.wiring_errors {
            list.push(Complaint {
                kind: "endpoint".into(),
                name: key.to_string(),
                reason: "NotWired".into(),
                message: message.clone(),
            });
        }
        list.extend(self.unserved.iter().map(|u| Complaint {
            kind: "service".into(),
            name: u.service.clone(),
            reason: "HealthCheckPortTaken".into(),
            message: u.message.clone(),
        }));
        list
    }

    /// Local endpoints; of one key or all.
    pub(crate) fn endpoint_infos(&mut self, only: Option<&EndpointKey>) -> Vec<v1::EndpointInfo> {
        let traffic: BTreeMap<EndpointId, v1::Traffic> = self
            .view
            .as_ref()
            .and_then(|v| match only.and_then(|k| self.wanted.endpoints.get(k)) {
                Some(plan) => v.traffic(plan.id).ok().map(|t| vec![(plan.id, t)]),
                None => v.traffic_all().ok(),
            })
            .unwrap_or_default()
            .into_iter()
            .map(|(id, t)| {
                (
                    id,
                    v1::Traffic {
                        egress_packets: t.egress.packets,
                        egress_bytes: t.egress.bytes,
                        ingress_packets: t.ingress.packets,
                        ingress_bytes: t.ingress.bytes,
                    },
                )
            })
            .collect();
        let generation = self.document.as_ref().map_or(0, |d| d.generation);
        let complaints = self.complaints();
        let conditions = self.conditions.update(complaints, generation, now_ms());
        self.world
            .endpoints
            .values()
            .filter(|e| e.node == self.config.node && only.is_none_or(|k| *k == e.key()))
            .map(|e| self.endpoint_info(e, &traffic, &conditions))
            .collect()
    }

    fn endpoint_info(
        &self,
        e: &Endpoint,
        traffic: &BTreeMap<EndpointId, v1::Traffic>,
        conditions: &[v1::ObjectConditions],
    ) -> v1::EndpointInfo {
        let key = e.key();
        let wanted = self.wanted.endpoints.get(&key);
        let in_force = self.plan.endpoints.get(&key);
        let record = self.records.get(&key);
        let device = self.attached.get(&key);
        let cni = record.and_then(|r| r.cni.as_ref());
        let state = if self.wiring_errors.contains_key(&key) {
            v1::EndpointState::Failed
        } else if in_force.is_some() && device.is_some() {
            v1::EndpointState::Ready
        } else if device.is_some() {
            v1::EndpointState::Creating
        } else {
            v1::EndpointState::Waiting
        };
        let name = key.to_string();
        let inside = record.and_then(|r| r.wire.inside());
        v1::EndpointInfo {
            vpc: v1::Named::new(e.vpc.as_str(), wanted.map_or(0, |p| p.vpc.0)),
            endpoint: v1::Named::new(e.name.as_str(), wanted.map_or(0, |p| p.id.0)),
            state,
            source: if cni.is_some_and(|c| c.endpoint.is_some()) {
                v1::EndpointSource::Cni
            } else {
                v1::EndpointSource::Document
            },
            subnet: e.subnet.to_string(),
            ips: e.ips.clone(),
            gateways: wanted.map(|p| p.gateways.clone()).unwrap_or_default(),
            mac: wanted.map(|p| p.mac.to_string()).unwrap_or_default(),
            device: device.map(|d| v1::Named::new(d.name.as_str(), d.ifindex)),
            delivery: device
                .map_or("", |d| match d.delivery {
                    flowloom_datapath::Delivery::Peer => "peer",
                    flowloom_datapath::Delivery::Redirect => "redirect",
                    flowloom_datapath::Delivery::Stack => "stack",
                })
                .to_owned(),
            netns: inside.map(|(path, _)| path.display().to_string()),
            interface: inside.map(|(_, name)| name.to_owned()),
            identity: in_force.map_or(0, |p| p.identity.0),
            labels: e.labels.clone(),
            security_groups: e.security_groups.iter().map(ToString::to_string).collect(),
            egress_slot: in_force.map_or(0, |p| p.egress_slot.0),
            ingress_slot: in_force.map_or(0, |p| p.ingress_slot.0),
            revision: in_force.map_or(0, |p| p.revision),
            traffic: in_force.and_then(|p| traffic.get(&p.id)).copied().unwrap_or_default(),
            attachment: cni.map(|c| v1::AttachmentInfo {
                container_id: c.attachment.container_id.clone(),
                ifname: c.attachment.ifname.clone(),
                netns: c.netns.clone(),
                network: c.network.name.clone(),
                runtime: c.runtime.clone(),
                pod: c.pod(),
            }),
            conditions: conditions
                .iter()
                .filter(|o| o.kind == "endpoint" && o.name == name)
                .flat_map(|o| o.conditions.iter().cloned())
                .chain(self.holds.conditions(
                    &key,
                    &self.world,
                    self.document.as_ref().map_or(0, |d| d.generation),
                ))
                .collect(),
        }
    }

    pub(crate) fn ipam_report(&self) -> v1::IpamReport {
        let mut pools = Vec::new();
        for subnet in self.world.subnets.values() {
            for cidr in &subnet.cidrs {
                let family = Family::of_net(cidr);
                let stats = self.ipam.stats(&subnet.vpc, &subnet.name, family);
                let mut used = self.used_addresses(&subnet.vpc, cidr);
                let resting = self.ipam.cooling(&subnet.vpc, &subnet.name, family, Self::now());
                used.extend(resting.into_iter().map(|(address, seconds)| v1::IpamAddress {
                    address,
                    endpoint: String::new(),
                    attachment: String::new(),
                    cooling_ms: Some(seconds * 1000),
                }));
                if stats.is_none() && used.is_empty() {
                    continue;
                }
                let clamp = |n: u128| u64::try_from(n).unwrap_or(u64::MAX);
                pools.push(v1::IpamPool {
                    vpc: subnet.vpc.to_string(),
                    subnet: subnet.name.to_string(),
                    cidr: cidr.to_string(),
                    gateway: subnet.gateways.iter().find(|g| cidr.contains(*g)).copied(),
                    allocates: stats.is_some(),
                    capacity: stats.map_or(0, |s| clamp(s.size - s.excluded)),
                    available: stats.map_or(0, |s| clamp(s.available)),
                    used,
                });
            }
        }
        v1::IpamReport { pools }
    }

    fn used_addresses(&self, vpc: &VpcName, cidr: &IpNet) -> Vec<v1::IpamAddress> {
        let local = self.world.endpoints.values().filter(|e| e.vpc == *vpc && e.node == self.config.node);
        local
            .flat_map(|e| e.ips.iter().map(move |ip| (e, *ip)))
            .filter(|(_, ip): &(_, IpAddr)| cidr.contains(ip))
            .map(|(e, ip)| {
                let key = e.key();
                let cni = self.records.get(&key).and_then(|r| r.cni.as_ref());
                v1::IpamAddress {
                    address: ip,
                    endpoint: key.to_string(),
                    attachment: cni.map(|c| c.attachment.to_string()).unwrap_or_default(),
                    cooling_ms: None,
                }
            })
            .collect()
    }

    pub(crate) fn identity_list(&self) -> v1::IdentityList {
        let mut endpoints: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        let vnis: BTreeMap<&str, VpcId> =
            self.wanted.vpcs.iter().map(|(id, v)| (v.name.as_str(), *id)).collect();
        for e in self.world.endpoints.values() {
            let Some(vpc) = vnis.get(e.vpc.as_str()) else { continue };
            for ip in &e.ips {
                if let Some(peer) = self.wanted.ipcache.get(&(*vpc, IpNet::from(*ip))) {
                    let list = endpoints.entry(peer.identity.0).or_default();
                    let name = e.key().to_string();
                    if list.last() != Some(&name) {
                        list.push(name);
                    }
                }
            }
        }
        let of = |identity: Identity, facts: Option<&flowloom_compiler::IdentityFacts>| v1::IdentityInfo {
            identity: identity.0,
            vpc: facts.map(|f| f.vpc.to_string()).unwrap_or_default(),
            reserved: names::reserved_identity(facts.map_or(identity.0, |f| f.reserved))
                .filter(|w| *w != "any")
                .map(str::to_owned),
            endpoint: facts.is_some_and(|f| f.endpoint.is_some()),
            labels: facts.and_then(|f| f.endpoint.as_ref()).map(|e| e.labels.clone()).unwrap_or_default(),
            security_groups: facts
                .and_then(|f| f.endpoint.as_ref())
                .map(|e| e.groups.iter().map(ToString::to_string).collect())
                .unwrap_or_default(),
            cidrs: facts.map(|f| f.cidrs.iter().map(ToString::to_string).collect()).unwrap_or_default(),
            endpoints: endpoints.get(&identity.0).cloned().unwrap_or_default(),
        };
        let reserved = (1..=8).map(|n| of(Identity(n), None));
        let user = self.wanted.identities.iter().map(|(id, facts)| of(*id, Some(facts)));
        v1::IdentityList { identities: reserved.chain(user).collect() }
    }

    /// As the kernel holds them, for one endpoint or for all.
    pub(crate) fn policy_entries(&self, only: Option<&EndpointKey>) -> Result<v1::PolicyEntryList, ApiError> {
        if let Some(key) = only
            && !self.plan.endpoints.contains_key(key)
        {
            return Err(not_found(format!("an enforced endpoint {key}")));
        }
        let view = self.kernel_view()?;
        let mut users: BTreeMap<(u32, v1::Direction), Vec<String>> = BTreeMap::new();
        let mut held: BTreeMap<(u32, v1::Direction), BTreeMap<String, String>> = BTreeMap::new();
        for (key, plan) in &self.plan.endpoints {
            let slots =
                [(plan.egress_slot, v1::Direction::Egress), (plan.ingress_slot, v1::Direction::Ingress)];
            for (slot, direction) in slots {
                users.entry((slot.0, direction)).or_default().push(key.to_string());
                let of = match direction {
                    v1::Direction::Egress => flowloom_model::Direction::Egress,
                    v1::Direction::Ingress => flowloom_model::Direction::Ingress,
                };
                if let Some(word) = self.holds.word(key, of) {
                    held.entry((slot.0, direction)).or_default().insert(key.to_string(), word.to_owned());
                }
            }
        }
        let mut slots = Vec::new();
        for ((slot, direction), endpoints) in users {
            if only.is_some_and(|k| !endpoints.contains(&k.to_string())) {
                continue;
            }
            let entries = view.policy(PolicySlot(slot)).map_err(kernel)?.unwrap_or_default();
            slots.push(v1::PolicySlotEntries {
                slot,
                direction,
                endpoints,
                held: held.remove(&(slot, direction)).unwrap_or_default(),
                entries: entries.iter().map(|(k, v)| self.policy_entry(k, v)).collect(),
            });
        }
        Ok(v1::PolicyEntryList { slots })
    }

    fn policy_entry(
        &self,
        key: &flowloom_bpf_abi::PolicyKey,
        value: &flowloom_bpf_abi::PolicyValue,
    ) -> v1::PolicyEntry {
        use flowloom_bpf_abi::{PolicyKey, policy_flags};
        let any = key.prefixlen < PolicyKey::PROTOCOL_BITS;
        v1::PolicyEntry {
            peer: self.identity_named(Identity(key.identity)),
            protocol: if any { "any".into() } else { names::protocol(key.protocol) },
            ports: ports(key),
            verdict: names::verdict(value.verdict).unwrap_or(v1::Verdict::Drop),
            rule: self.rule_named(value.rule),
            precedence: value.precedence,
            log: value.flags & policy_flags::LOG != 0,
            stateless: value.flags & policy_flags::STATELESS != 0,
        }
    }

    pub(crate) fn rule_hits(&self, vpc: Option<&str>) -> Result<v1::RuleList, ApiError> {
        let hits: BTreeMap<u32, flowloom_bpf_abi::Counter> =
            self.kernel_view()?.rule_hits().map_err(kernel)?.into_iter().map(|(id, c)| (id.0, c)).collect();
        let of_vpc = |r: &flowloom_compiler::RuleRef| vpc.is_none_or(|v| v == r.vpc.as_str());
        let rules = self.wanted.rules.iter().filter(|(_, r)| of_vpc(r)).map(|(id, r)| {
            let counter = hits.get(&id.0).copied().unwrap_or_default();
            v1::RuleHits {
                rule: v1::Named::new(r.to_string(), id.0),
                hits: counter.packets,
                bytes: counter.bytes,
            }
        });
        Ok(v1::RuleList { rules: rules.collect() })
    }

    pub(crate) fn drop_list(&self, filter: &v1::DropFilter) -> Result<v1::DropList, ApiError> {
        let rows = self.kernel_view()?.drops().map_err(kernel)?;
        let (mut vpc, mut endpoint) = (filter.vpc.clone(), filter.endpoint.clone());
        if let (Some(before), Some(name)) = (&vpc, &endpoint) {
            let key = self.endpoint_meant(before, name)?;
            (vpc, endpoint) = (Some(key.vpc.to_string()), Some(key.name.to_string()));
        }
        let mut drops = Vec::new();
        for row in rows {
            let plan = row.endpoint.and_then(|id| self.wanted.endpoints.values().find(|e| e.id == id));
            let (reason, text) = row.reason.map_or((v1::Named::new("Unknown", 0), ""), |r| {
                (v1::Named::new(r.name(), r as u32), r.text())
            });
            let matches = vpc.as_ref().is_none_or(|v| plan.is_some_and(|p| p.key.vpc.as_str() == v))
                && endpoint.as_ref().is_none_or(|n| plan.is_some_and(|p| p.key.name.as_str() == n))
                && filter.reason.as_ref().is_none_or(|r| *r == reason.name);
            if !matches || row.packets == 0 {
                continue;
            }
            drops.push(v1::DropCount {
                vpc: plan.map(|p| self.vpc_named(p.vpc.0)),
                endpoint: row.endpoint.map(|id| self.endpoint_named(id)),
                direction: names::direction(row.direction),
                reason,
                text: text.to_owned(),
                packets: row.packets,
                bytes: row.bytes,
            });
        }
        Ok(v1::DropList { drops })
    }
}

fn singular(kind: &str) -> &str {
    kind.strip_suffix('s').unwrap_or(kind)
}

/// The ports (or ICMP type and code) that an entry's prefix covers.
fn ports(key: &flowloom_bpf_abi::PolicyKey) -> String {
    use flowloom_bpf_abi::PolicyKey;
    let bits = key.prefixlen.saturating_sub(PolicyKey::PROTOCOL_BITS);
    if bits == 0 {
        return "any".to_owned();
    }
    let [kind, code] = key.port;
    if matches!(key.protocol, 1 | 58) {
        return match bits {
            8 => kind.to_string(),
            16 => format!("{kind}/{code}"),
            _ => format!("{kind}/{code} ({bits} bits)"),
        };
    }
    let first = u16::from_be_bytes(key.port);
    let last = first | u16::try_from(0xffff_u32 >> bits).unwrap_or(0);
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_prefix_is_shown_as_the_ports_it_covers() {
        let key = |protocol, port: u16, bits: u32| flowloom_bpf_abi::PolicyKey {
            prefixlen: 40 + bits,
            identity: 0,
            protocol,
            port: port.to_be_bytes(),
            pad: 0,
        };
        assert_eq!(ports(&key(6, 80, 16)), "80");
        assert_eq!(ports(&key(6, 8080, 13)), "8080-8087");
        assert_eq!(ports(&key(6, 0, 0)), "any");
        assert_eq!(ports(&key(6, 0x8000, 1)), "32768-65535");
        assert_eq!(ports(&key(1, 0x0800, 8)), "8");
        assert_eq!(ports(&key(1, 0x0301, 16)), "3/1");
    }
}
