//! One pass: world to plan, plan to kernel, and the node's own duties. State is recomputed; nothing is written twice.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use flowloom_api::v1;
use flowloom_compiler::{EndpointPlan, NodePlan, Op, VpcId, compile_pinned, diff, ended_backends};
use flowloom_datapath::{ApplyReport, DeviceInfo, NodeSettings, Object};
use flowloom_model::{Attachment, DEFAULT_VPC, Edited, Endpoint, EndpointKey, World};
use flowloom_netlink::NetnsCookie;
use ipnet::IpNet;

use crate::core::{Core, Retired};
use crate::events::Names;
use crate::record::{Record, device_name};
use crate::slow::watched;
use crate::wiring::{Wire, WireSpec};
use crate::writes;
use crate::{duties, ended};

/// Interface of a managed workload.
const INTERFACE: &str = "eth0";
/// Quiet time after an ADD before its endpoint gets its links.
const SETTLE_AFTER: Duration = Duration::from_secs(1);
/// Quiet time after a change of policies before the slots of the old ones are given back: the next change, which often follows at once, must
/// not wait for a grace period that nobody needs yet.
const FREE_AFTER: Duration = Duration::from_millis(100);
/// So many unused slots do not wait for a quiet time that may never come.
const MOST_UNUSED: usize = 64;

impl Core {
    /// Document and attachments together; the pools follow.
    pub(crate) fn rebuild_world(&mut self) {
        if !self.sources_spoke() {
            return;
        }
        let Some(document) = &self.document else { return };
        let mut world = document.world.clone();
        self.add_kubernetes(&mut world);
        self.ipam.follow(&world, &self.config.node, self.records.values());
        for record in self.records.values().filter(|r| !self.leaving.contains(&r.key)) {
            if let Some(endpoint) = self.endpoint_of(record) {
                // A name of the document wins; the attachment then waits with its device closed.
                world.endpoints.or_insert_with(endpoint.key(), || endpoint.into());
            }
        }
        self.world = world;
    }

    /// As [`Self::rebuild_world`], when nothing of the document but this changed.
    pub(crate) fn follow_edit(&mut self, edited: &Edited) {
        let Some(document) = &self.document else { return };
        let place = |e: &Arc<Endpoint>| (e.subnet.clone(), e.ips.clone());
        let mut moved = false;
        for key in &edited.endpoints {
            let attachment = self.records.get(key).filter(|r| !self.leaving.contains(&r.key));
            let attached = || self.endpoint_of(attachment?).map(Arc::new);
            let new = document.world.endpoints.get(key).cloned().or_else(attached);
            moved |= self.world.endpoints.get(key).map(place) != new.as_ref().map(place);
            match new {
                Some(endpoint) => self.world.endpoints.insert(key.clone(), endpoint),
                None => self.world.endpoints.remove(key),
            };
        }
        if edited.rules {
            self.world.security_groups.clone_from(&document.world.security_groups);
            self.world.cidr_groups.clone_from(&document.world.cidr_groups);
        }
        if moved {
            self.ipam.follow(&document.world, &self.config.node, self.records.values());
            self.moved = true;
        }
    }

    /// Compiles the world as it is now.
    pub(crate) fn compile(&mut self) -> NodePlan {
        self.end_holds();
        let compilation = compile_pinned(
            &self.world,
            self.holds.compiled(),
            &self.config.node,
            self.options,
            &mut self.numbers,
            &mut self.cache,
        );
        self.compiled = compilation.conditions;
        compilation.plan
    }

    /// Makes the node what the world says. Never fails: errors stay with their objects and are tried again.
    pub(crate) fn pass(&mut self) {
        self.pass_over(None);
        self.swollen = true;
    }

    /// The same, when nothing but these endpoints came, went or changed since the last one.
    pub(crate) fn pass_over(&mut self, only: Option<&BTreeSet<EndpointKey>>) {
        if !self.sources_spoke() {
            return;
        }
        let (start, writes_before) = (Instant::now(), writes::total());
        self.last.errors.clear();
        self.retry_at = None;
        let first = self.applied_generation == 0;
        let only = only.filter(|_| !first && !self.unsure && self.node_spec.is_some());
        let loading = first && self.plane.is_loading();
        if first {
            self.forget_lost_attachments();
        }
        self.replay();
        self.wanted = watched("compiling", || self.compile());
        if self.store_numbers() {
            if only.is_none() {
                watched("duties of the node", || self.node_duties());
            }
            if loading {
                // Programs of uplinks refuse what only claims to come from an endpoint: until they are there, the stack leads nobody to one.
                self.routes = None;
                if let Err(e) = self.wiring.routes(&[]) {
                    self.note_error(format!("routes: {e}"));
                }
                // Nothing is in force and no device is guarded: what needs no program waits for none.
                let plan = self.effective_plan();
                watched("the datapath", || self.put_in_force(plan));
            }
            watched("wiring", || self.wire_wanted(only));
            let plan = self.effective_plan();
            let clean = watched("the datapath", || self.put_in_force(plan));
            if clean {
                self.remove_unwanted();
            }
            let loaded = !loading || watched("programs", || self.finish_loading());
            if first && clean && loaded {
                self.remove_strangers();
                self.retire_leftovers();
            }
            // They follow nodes, subnets and endpoints.
            if loaded && only.is_none_or(|only| !only.is_empty()) {
                watched("routes", || self.sync_routes());
            }
            // An object that does not fit has a condition and its old state; it holds up nobody else.
            let judged = self.refused.is_some() && loaded;
            if judged && let Some(document) = &self.document {
                self.applied_generation = document.generation;
                self.applied_digest.clone_from(&document.digest);
                if let Some(kubernetes) = &mut self.kubernetes {
                    kubernetes.applied();
                }
                if let Some(noticed) = self.noticed.take() {
                    self.applied_us = u64::try_from(noticed.elapsed().as_micros()).unwrap_or(u64::MAX);
                }
            }
        }
        self.finish(start, writes_before);
    }

    /// Bookkeeping at the end of a pass or of a CNI request.
    pub(crate) fn finish(&mut self, start: Instant, writes_before: u64) {
        self.history.source = v1::ChangeSource::Agent;
        self.last.count += 1;
        self.last.writes = writes::total() - writes_before;
        self.last.micros = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        if self.last.errors.is_empty() && self.wiring_errors.is_empty() {
            self.backoff.reset();
        } else if self.retry_at.is_none() {
            self.retry_at = Some(Instant::now() + self.backoff.pause());
        }
        tracing::debug!(
            pass = self.last.count,
            writes = self.last.writes,
            micros = self.last.micros,
            errors = self.last.errors.len(),
            "pass"
        );
        self.publish();
    }

    /// The rest of a start on a node where nothing was in force: links instead of guards, then the programs that connect the node with
    /// others, and only with them what leads there. Returns whether every program is in place.
    fn finish_loading(&mut self) -> bool {
        for key in std::mem::take(&mut self.unsettled) {
            let (Some(device), Some((id, _))) = (self.attached.get(&key), self.wired_as.get(&key)) else {
                continue;
            };
            if let Err(e) = self.plane.attach_endpoint(*id, &device.name) {
                // The guard stays, and the next pass begins with the device anew.
                self.attached.remove(&key);
                self.wiring_errors.insert(key, e.to_string());
            }
        }
        self.settle_at = None;
        if let Err(e) = self.plane.finish_loading() {
            self.unloaded = e.to_string();
            self.note_error(format!("datapath: {e}"));
            return false;
        }
        self.unloaded.clear();
        self.node_spec = None;
        self.node_duties();
        true
    }

    /// The plan without endpoints that have no guarded device: their addresses stay known, packets to them are dropped.
    pub(crate) fn effective_plan(&self) -> NodePlan {
        let mut plan = self.wanted.clone();
        plan.endpoints.retain(|key, _| self.attached.contains_key(key));
        plan
    }

    /// Returns whether the datapath holds exactly `plan` now.
    pub(crate) fn put_in_force(&mut self, plan: NodePlan) -> bool {
        self.refused = None;
        let changes = self.changes_to(&plan);
        let report = if self.unsure {
            // It finds slots that nobody needs by itself.
            self.unused_slots.clear();
            match self.plane.sync(&plan) {
                Ok(report) => report,
                Err(e) => {
                    self.history.note(&plan, changes, |_| Some(e.to_string()));
                    self.note_error(format!("datapath: {e}"));
                    return false;
                }
            }
        } else {
            let mut ops = diff(&self.plan, &plan);
            // The kernel waits a grace period for each change of the table of slots: whoever waits for this plan waits once.
            ops.retain(|op| match op {
                Op::FreeSlots(slots) => {
                    self.unused_slots.extend(slots);
                    false
                }
                _ => true,
            });
            self.unused_slots.retain(|slot| !plan.policies.contains_key(slot));
            if self.unused_slots.is_empty() {
                self.free_at = None;
            } else if self.free_at.is_none() || self.unused_slots.len() <= MOST_UNUSED {
                self.free_at = Some(Instant::now() + FREE_AFTER);
            }
            if ops.is_empty() { ApplyReport::default() } else { self.plane.apply(&ops) }
        };
        let clean = report.is_clean();
        self.history.note(&plan, changes, |plan| refusal(&report, plan));
        self.refused = (!report.aborted).then(|| report.failures.iter().map(|f| f.object.clone()).collect());
        for failure in &report.failures {
            if let Object::Endpoint(key) = &failure.object {
                self.wiring_errors.insert(key.clone(), failure.error.to_string());
            }
            self.note_error(format!("{}: {}", failure.object, failure.error));
        }
        let gone: Vec<_> = self
            .plan
            .endpoints
            .iter()
            .filter(|(key, old)| plan.endpoints.get(*key).is_none_or(|new| new.id != old.id))
            .map(|(_, old)| (Some(old.vpc), old.id))
            .collect();
        let gone_vpcs: Vec<VpcId> =
            self.plan.vpcs.keys().filter(|id| !plan.vpcs.contains_key(id)).copied().collect();
        let new_vpcs: Vec<VpcId> =
            plan.vpcs.keys().filter(|id| !self.plan.vpcs.contains_key(id)).copied().collect();
        let new_endpoints: Vec<_> = plan
            .endpoints
            .iter()
            .filter(|(key, new)| self.plan.endpoints.get(*key).is_none_or(|old| new.id != old.id))
            .map(|(_, new)| (new.vpc, new.id))
            .collect();
        self.unsure = !clean;
        let ended = ended_backends(&self.plan.services, &plan.services);
        self.plan = plan;
        if let Some(view) = self.view.clone().filter(|_| !ended.is_empty()) {
            let inside = self.wired_as.values().filter_map(|(_, spec)| spec.wire.inside());
            ended::end(view, ended, inside.map(|(path, _)| path.clone()).collect());
        }
        self.set_quotas(&new_vpcs, &new_endpoints);
        for vpc in gone_vpcs {
            if let Some(Err(e)) = self.view.as_ref().map(|v| v.remove_quota(vpc, None)) {
                self.note_error(format!("quota of vpc {vpc}: {e}"));
            }
        }
        let epoch = self.numbers.epoch();
        if !gone.is_empty() || self.retired.back().is_none_or(|r| r.epoch != epoch) {
            self.retired.push_back(Retired { since: Instant::now(), epoch, endpoints: gone });
        }
        clean
    }

    /// Gives back the slots that [`Self::put_in_force`] left.
    pub(crate) fn free_slots(&mut self) {
        self.free_at = None;
        let slots: Vec<_> = std::mem::take(&mut self.unused_slots).into_iter().collect();
        if self.unsure || slots.is_empty() {
            return;
        }
        for failure in self.plane.apply(&[Op::FreeSlots(slots)]).failures {
            self.note_error(format!("{}: {}", failure.object, failure.error));
            self.unsure = true;
        }
        if self.unsure && self.retry_at.is_none() {
            self.retry_at = Some(Instant::now() + self.backoff.pause());
        }
    }

    /// Whether the last [`Self::put_in_force`] left this endpoint as planned, whatever it left of others.
    pub(crate) fn is_in_force(&self, plan: &EndpointPlan) -> bool {
        let concerns = |object: &Object| match object {
            Object::Endpoint(key) => *key == plan.key,
            Object::Peer(vpc, net) => *vpc == plan.vpc && plan.ips.iter().any(|ip| IpNet::from(*ip) == *net),
            _ => false,
        };
        self.plan.endpoints.get(&plan.key) == Some(plan)
            && self.refused.as_ref().is_some_and(|list| !list.iter().any(concerns))
    }

    fn set_quotas(&mut self, vpcs: &[VpcId], endpoints: &[(VpcId, flowloom_compiler::EndpointId)]) {
        let Some(view) = self.view.clone() else { return };
        let limits = (self.config.conntrack.vpc_quota, self.config.conntrack.endpoint_quota);
        let of_vpcs = vpcs.iter().map(|v| (*v, None, limits.0));
        let of_endpoints = endpoints.iter().map(|(v, e)| (*v, Some(*e), limits.1));
        // A number that comes later than the first pass has rested: no connection names it, and none needs to be looked for.
        let rested = self.applied_generation > 0;
        for (vpc, endpoint, limit) in of_vpcs.chain(of_endpoints) {
            writes::before("quota");
            let set = match endpoint {
                Some(endpoint) if rested => view.start_quota(vpc, endpoint, limit),
                _ => view.set_quota(vpc, endpoint, limit),
            };
            match set {
                Ok(wrote) => writes::made(usize::from(wrote)),
                Err(e) => self.note_error(format!("quota of vpc {vpc}: {e}")),
            }
        }
    }

    /// After a start: what a life before this one retired is treated as retired now.
    fn retire_leftovers(&mut self) {
        let in_use: BTreeSet<_> = self.plan.endpoints.values().map(|e| e.id).collect();
        let left: Vec<_> = (1..flowloom_bpf_abi::MAX_ENDPOINTS)
            .map(flowloom_compiler::EndpointId)
            .filter(|id| !in_use.contains(id))
            .filter_map(|id| Some((self.numbers.endpoint(id)?, id)))
            .map(|(key, id)| (self.vpc_id(key.vpc.as_str()).ok(), id))
            .collect();
        let epoch = self.numbers.epoch();
        self.retired.push_back(Retired { since: Instant::now(), epoch, endpoints: left });
    }

    fn node_duties(&mut self) {
        let mut spec = duties::node_spec(&self.config, &self.world);
        if self.plane.is_loading() {
            // Nothing leaves a tunnel before there is somebody to judge it.
            spec.overlay = None;
        }
        if self.node_spec.as_ref() != Some(&spec) {
            match self.wiring.node(&spec) {
                Ok(node) => {
                    self.node = node;
                    self.node_spec = Some(spec);
                    self.overlay_open = false;
                    self.routes = None;
                }
                Err(e) => {
                    self.note_error(format!("node: {e}"));
                    return;
                }
            }
        }
        let default_vpc = self.wanted.vpcs.iter().find(|(_, v)| v.default).map_or(0, |(id, _)| id.0);
        let underlay = self.node_spec.as_ref().map(|spec| spec.underlay.as_slice()).unwrap_or_default();
        let settings = NodeSettings {
            node4: underlay.iter().find_map(|ip| if let IpAddr::V4(ip) = ip { Some(*ip) } else { None }),
            node6: underlay.iter().find_map(|ip| if let IpAddr::V6(ip) = ip { Some(*ip) } else { None }),
            overlay_ifindex: self.node.overlay.as_ref().map_or(0, |(_, i)| *i),
            uplink_ifindex: self.node.uplinks.first().map_or(0, |(_, i)| *i),
            overlay_mtu: self.node.overlay_mtu,
            uplink_mtu: self.node.uplink_mtu,
            default_vpc,
        };
        let uplinks: Vec<u32> = self.node.uplinks.iter().map(|(_, i)| *i).collect();
        if let Err(e) = self.plane.set_node(&settings, &uplinks) {
            self.note_error(format!("node programs: {e}"));
        } else if settings.overlay_ifindex != 0 && !self.overlay_open {
            match self.wiring.open_overlay(settings.overlay_ifindex) {
                Ok(()) => self.overlay_open = true,
                Err(e) => self.note_error(format!("overlay: {e}")),
            }
        }
        let masquerade = duties::masquerade_spec(&self.config, &self.world, &self.node);
        if let Err(e) = self.wiring.masquerade(masquerade.as_ref()) {
            self.note_error(format!("masquerade: {e}"));
        }
    }

    fn sync_routes(&mut self) {
        let wanted = duties::routes(&self.config, &self.world, &self.plan, &self.attached);
        if self.routes.as_ref() == Some(&wanted) {
            return;
        }
        let list: Vec<_> = wanted.iter().cloned().collect();
        match self.wiring.routes(&list) {
            Ok(()) => self.routes = Some(wanted),
            Err(e) => {
                self.routes = None;
                self.note_error(format!("routes: {e}"));
            }
        }
    }

    /// How the document wants an endpoint wired; `None` for what waits for a CNI request.
    fn document_wire(&self, key: &EndpointKey) -> Option<Wire> {
        let device = device_name(key);
        Some(match &self.world.endpoints.get(key)?.attachment {
            Attachment::Managed => Wire::Managed {
                device,
                netns: self.config.netns_dir.join(crate::record::file_name(key)),
                interface: INTERFACE.to_owned(),
            },
            Attachment::Netns { path, interface } => {
                Wire::Netns { device, netns: path.clone(), interface: interface.clone() }
            }
            Attachment::Device { name } => Wire::Device { device: name.clone() },
            Attachment::Cni => return None,
        })
    }

    /// Devices of every local endpoint that the plan wants and that has none, or one that is not right; of `only` and those that
    /// failed before, when the others are known to be as they were.
    fn wire_wanted(&mut self, only: Option<&BTreeSet<EndpointKey>>) {
        let failed = std::mem::take(&mut self.wiring_errors);
        let look = |key: &EndpointKey| only.is_none_or(|only| only.contains(key) || failed.contains_key(key));
        let wanted: Vec<EndpointPlan> =
            self.wanted.endpoints.values().filter(|plan| look(&plan.key)).cloned().collect();
        for plan in wanted {
            if let Err(e) = self.ensure_wired(&plan) {
                tracing::warn!(endpoint = %plan.key, error = %e, "not wired");
                self.wiring_errors.insert(plan.key.clone(), e);
            }
        }
    }

    fn ensure_wired(&mut self, plan: &EndpointPlan) -> Result<(), String> {
        let key = &plan.key;
        if self.leaving.contains(key) {
            return Ok(());
        }
        let record = self.records.get(key);
        if let Some(ours) = record.and_then(|r| self.endpoint_of(r))
            && self.world.endpoints.get(key).map(Arc::as_ref) != Some(&ours)
        {
            self.attached.remove(key);
            return Err("a CNI attachment has this name already: give the endpoint another one, or DEL the attachment".into());
        }
        let wire = match (record.filter(|r| r.cni.is_some()), self.document_wire(key)) {
            (Some(record), _) => record.wire.clone(),
            (None, Some(wire)) => wire,
            // Waits for its CNI request.
            (None, None) => return Ok(()),
        };
        let spec = self.wire_spec(plan, wire.clone());
        let same = self.wired_as.get(key).is_some_and(|(id, known)| *id == plan.id && *known == spec);
        if same && self.attached.contains_key(key) {
            return Ok(());
        }
        if let Some(old) = self.records.get(key).filter(|r| r.wire != wire).cloned() {
            // The document wires it differently now.
            self.unwire(&old).map_err(|e| e.to_string())?;
        }
        if self.records.get(key).is_none_or(|r| r.wire != wire) {
            let record = Record { key: key.clone(), wire, cni: None };
            self.store.write_endpoint(&record.file(), &record).map_err(|e| e.to_string())?;
            self.records.insert(key.clone(), record);
        }
        let netns = self.wiring.wire(&spec).map_err(|e| e.to_string())?;
        if self.plane.is_loading() {
            // Links follow before anybody hears that the node is ready.
            self.guard(plan, spec, netns)?;
            self.overtake(&plan.key);
            return Ok(());
        }
        self.attach(plan, spec, netns)
    }

    /// Programs on the device; from here on nothing passes before the endpoint's record is written.
    fn attach(
        &mut self,
        plan: &EndpointPlan,
        spec: WireSpec,
        netns: Option<NetnsCookie>,
    ) -> Result<(), String> {
        let device = self.plane.attach_endpoint(plan.id, spec.wire.device()).map_err(|e| e.to_string())?;
        self.unsettled.remove(&plan.key);
        self.guarded(plan, spec, device, netns)
    }

    /// The same for a request that waits: the links follow when the core has nothing else to do.
    pub(crate) fn guard(
        &mut self,
        plan: &EndpointPlan,
        spec: WireSpec,
        netns: Option<NetnsCookie>,
    ) -> Result<(), String> {
        let (device, unsettled) =
            self.plane.guard_endpoint(plan.id, spec.wire.device()).map_err(|e| e.to_string())?;
        if unsettled {
            self.unsettled.insert(plan.key.clone());
            self.settle_at = Some(Instant::now() + SETTLE_AFTER);
        }
        self.guarded(plan, spec, device, netns)
    }

    /// Somebody who puts programs on every new link came first on one that has no links of ours yet: it gets them at once.
    pub(crate) fn overtake(&mut self, key: &EndpointKey) {
        let Some(device) = self.attached.get(key).filter(|_| self.unsettled.contains(key)) else { return };
        let (ifindex, name) = (device.ifindex, device.name.clone());
        if !self.plane.is_preceded(ifindex) {
            return;
        }
        tracing::warn!(endpoint = %key, device = name, "somebody's programs were first on its device; ours go before them now");
        let Some((id, _)) = self.wired_as.get(key) else { return };
        match self.plane.attach_endpoint(*id, &name) {
            Ok(_) => drop(self.unsettled.remove(key)),
            Err(e) => tracing::warn!(endpoint = %key, error = %e, "its programs have no links yet"),
        }
    }

    fn guarded(
        &mut self,
        plan: &EndpointPlan,
        spec: WireSpec,
        device: DeviceInfo,
        known: Option<NetnsCookie>,
    ) -> Result<(), String> {
        let raised = self.wiring.raise(device.ifindex);
        if self.plan.endpoints.contains_key(&plan.key) && self.attached.get(&plan.key) != Some(&device) {
            // The record in force names another device, and the routes went with it.
            self.unsure = true;
            self.routes = None;
        }
        // Without it the workload's packets to services are translated one by one.
        if let Some((netns, _)) = spec.wire.inside()
            && let Err(e) = self.plane.bind_netns(plan.id, netns, known)
        {
            tracing::warn!(endpoint = %plan.key, error = %e, "services of its sockets are off");
        }
        self.attached.insert(plan.key.clone(), device);
        raised.map_err(|e| e.to_string())?;
        self.wired_as.insert(plan.key.clone(), (plan.id, spec));
        Ok(())
    }

    /// Makes the links of one endpoint that is guarded without.
    pub(crate) fn settle_one(&mut self) {
        self.settle_at = None;
        let Some(key) = self.unsettled.pop_first() else { return };
        if let (Some(device), Some((id, _))) = (self.attached.get(&key), self.wired_as.get(&key)) {
            let (id, name) = (*id, device.name.clone());
            if let Err(e) = self.plane.attach_endpoint(id, &name) {
                tracing::warn!(endpoint = %key, error = %e, "its programs have no links yet");
                self.unsettled.insert(key);
                self.settle_at = Some(Instant::now() + 10 * SETTLE_AFTER);
                return;
            }
        }
        if !self.unsettled.is_empty() {
            self.settle_at = Some(Instant::now());
        }
    }

    /// What an endpoint's device must be.
    pub(crate) fn wire_spec(&self, plan: &EndpointPlan, wire: Wire) -> WireSpec {
        let prefix = |ip: &IpAddr| {
            plan.subnets.iter().find(|n| n.contains(ip)).map_or(IpNet::from(*ip), |subnet| {
                IpNet::new(*ip, subnet.prefix_len()).unwrap_or(IpNet::from(*ip))
            })
        };
        WireSpec {
            name: plan.key.to_string(),
            wire,
            addresses: plan.ips.iter().map(prefix).collect(),
            gateways: plan.gateways.clone(),
            mac: plan.mac,
            mtu: duties::workload_mtu(&self.config, &self.node, plan),
        }
    }

    /// Takes an endpoint's device away, its programs with it. The record stays.
    pub(crate) fn unwire(&mut self, record: &Record) -> Result<(), crate::wiring::WiringError> {
        self.wiring.unwire(&record.wire)?;
        self.detached(record);
        Ok(())
    }

    /// The device is gone: its links and number, too.
    pub(crate) fn detached(&mut self, record: &Record) {
        self.attached.remove(&record.key);
        self.unsettled.remove(&record.key);
        let known = self.wired_as.remove(&record.key).map(|(id, _)| id);
        if let Some(id) = known.or_else(|| self.numbers.endpoint_id(&record.key))
            && let Err(e) = self.plane.detach_endpoint(id)
        {
            self.note_error(format!("endpoint {}: {e}", record.key));
        }
    }

    /// Endpoints that the world no longer has, after the datapath let go of them.
    fn remove_unwanted(&mut self) {
        let node = &self.config.node;
        let unwanted: Vec<Record> = self
            .records
            .values()
            .filter(|r| {
                let there = self.world.endpoints.get(&r.key).filter(|e| e.node == *node);
                match &r.cni {
                    // A bound endpoint of the document goes with the document's entry; another one with its DEL.
                    Some(cni) => cni.endpoint.is_none() && there.is_none(),
                    None => there.is_none_or(|e| e.attachment == Attachment::Cni),
                }
            })
            .cloned()
            .collect();
        for record in unwanted {
            let result = self.unwire(&record).map_err(|e| e.to_string());
            let result =
                result.and_then(|()| self.store.remove_endpoint(&record.file()).map_err(|e| e.to_string()));
            match result {
                Ok(()) => {
                    self.records.remove(&record.key);
                }
                Err(e) => self.note_error(format!("endpoint {}: {e}", record.key)),
            }
        }
    }

    /// At start: attachments whose device did not survive (a reboot, a container that went while no agent ran).
    fn forget_lost_attachments(&mut self) {
        let attachments: Vec<Record> = self.records.values().filter(|r| r.cni.is_some()).cloned().collect();
        for record in attachments {
            match self.wiring.is_wired(&record.wire) {
                Ok(true) => {}
                Ok(false) => {
                    tracing::info!(endpoint = %record.key, "its device did not survive: the attachment is released");
                    self.forget_attachment(&record.key);
                }
                Err(e) => self.note_error(format!("endpoint {}: {e}", record.key)),
            }
        }
        self.rebuild_world();
    }

    /// At start: devices and links that belong to no record.
    fn remove_strangers(&mut self) {
        let known: BTreeSet<String> = self.records.values().map(|r| r.wire.device().to_owned()).collect();
        if let Err(e) = self.wiring.remove_strangers(&known) {
            self.note_error(format!("stray devices: {e}"));
        }
        let indices: Vec<u32> = self.attached.values().map(|d| d.ifindex).collect();
        if let Err(e) = self.plane.detach_strangers(&indices) {
            self.note_error(format!("stray links: {e}"));
        }
    }

    pub(crate) fn publish_names(&mut self) {
        let vnis: BTreeMap<&str, u32> =
            self.wanted.vpcs.iter().map(|(id, v)| (v.name.as_str(), id.0)).collect();
        if std::mem::take(&mut self.moved) {
            self.address_names =
                Arc::new(self.document.as_ref().map_or_else(HashMap::new, |d| addresses(&d.world, &vnis)));
        }
        let attached = self
            .records
            .values()
            .filter_map(|r| Some((r, r.cni.as_ref()?.endpoint.as_ref()?, *vnis.get(r.key.vpc.as_str())?)))
            .flat_map(|(r, own, vni)| own.ips.iter().map(move |ip| ((vni, *ip), r.key.clone())))
            .collect();
        if self.named_rules != self.wanted.rules {
            self.rule_names =
                Arc::new(self.wanted.rules.iter().map(|(id, r)| (id.0, r.to_string())).collect());
            self.named_rules.clone_from(&self.wanted.rules);
        }
        self.events.set_names(Names {
            vpcs: self.wanted.vpcs.iter().map(|(id, v)| (id.0, v.name.clone())).collect(),
            endpoints: self.wanted.endpoints.values().map(|e| (e.id.0, e.key.clone())).collect(),
            rules: self.rule_names.clone(),
            addresses: self.address_names.clone(),
            attached,
        });
    }

    /// Whether a VPC is the one whose traffic may use the host's stack.
    pub(crate) fn is_default(key: &EndpointKey) -> bool {
        key.vpc.as_str() == DEFAULT_VPC
    }
}

/// Why an endpoint is not judged as planned, when it is not.
fn refusal(report: &ApplyReport, plan: &EndpointPlan) -> Option<String> {
    let concerns = |object: &Object| match object {
        Object::Endpoint(key) => *key == plan.key,
        Object::Slot(slot) => [plan.egress_slot, plan.ingress_slot].contains(slot),
        _ => false,
    };
    let failure = report.failures.iter().find(|failure| concerns(&failure.object));
    let stopped = report.aborted.then(|| "the datapath stopped before it was done".to_owned());
    failure.map(|failure| format!("{}: {}", failure.object, failure.error)).or(stopped)
}

fn addresses(world: &World, vnis: &BTreeMap<&str, u32>) -> HashMap<(u32, IpAddr), EndpointKey> {
    world
        .endpoints
        .values()
        .filter_map(|e| Some((e, *vnis.get(e.vpc.as_str())?)))
        .flat_map(|(e, vni)| e.ips.iter().map(move |ip| ((vni, *ip), e.key())))
        .collect()
}
