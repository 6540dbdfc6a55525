//! Services from one compilation to the next: a change costs the services it touches.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use flowloom_model::{NodeName, Service, ServiceName, SharedMap, VpcName, World};

use super::build::{Claim, build, claims, object, shown};
use super::choose::Here;
use super::numbers::ServiceNumbers;
use crate::fault::{Fault, planted};
use crate::{Condition, ConditionReason, FrontendKey, FrontendKind, ServicePart, ServicePlan, VpcId};

/// A service's VPC and name.
pub type ServiceKey = (VpcName, ServiceName);

/// A VPC, as far as its services care.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// In force on this node.
    Here(VpcId),
    /// It has no endpoint here.
    Elsewhere,
    /// It has no number of its own yet.
    Waits,
}

/// What every service depends on.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Frame {
    pub(super) here: Here,
    pub(super) vpcs: BTreeMap<VpcName, Place>,
}

impl Frame {
    pub(super) fn new(world: &World, local: &NodeName, plan: &crate::NodePlan) -> Self {
        let own = plan.nodes.iter().filter(|(_, n)| n.local).map(|(ip, _)| *ip);
        let here = Here {
            node: local.clone(),
            zone: world.nodes.get(local).and_then(|n| n.zone.clone()),
            addresses: own.collect(),
        };
        let ids: BTreeMap<&VpcName, VpcId> = plan.vpcs.iter().map(|(id, vpc)| (&vpc.name, *id)).collect();
        // Of two VPCs with one number the first has it.
        let mut numbers = BTreeSet::new();
        let mut place = |vpc: &flowloom_model::Vpc| match (ids.get(&vpc.name), vpc.vni) {
            (Some(id), _) => Place::Here(*id),
            (None, Some(vni)) if numbers.insert(vni.number()) => Place::Elsewhere,
            (None, _) => Place::Waits,
        };
        let vpcs = world.vpcs.values().map(|vpc| (vpc.name.clone(), place(vpc))).collect();
        Self { here, vpcs }
    }
}

/// Inputs and outputs of the last compilation.
#[derive(Debug, Default)]
pub(crate) struct ServiceMemo {
    frame: Option<Frame>,
    inputs: SharedMap<ServiceKey, Arc<Service>>,
    /// Who has a frontend, and who wants it, too.
    owners: HashMap<FrontendKey, Arc<ServiceKey>>,
    contested: BTreeMap<FrontendKey, BTreeSet<Arc<ServiceKey>>>,
    conditions: BTreeMap<ServiceKey, Vec<Condition>>,
    plan: ServicePlan,
    /// Services compiled so far.
    #[cfg(test)]
    pub(crate) compiled: u64,
}

impl ServiceMemo {
    /// The services of a world; `plan` has the VPCs and nodes already.
    pub(crate) fn update(
        &mut self,
        world: &World,
        local: &NodeName,
        plan: &crate::NodePlan,
        numbers: &mut ServiceNumbers,
        fault: Fault,
    ) -> ServicePlan {
        let before = self.frame.take();
        let frame = Frame::new(world, local, plan);
        let same_numbers = self.plan.parts.is_same(&numbers.plan.parts);
        let before = before.filter(|before| same_numbers && before.here == frame.here).unwrap_or_else(|| {
            *self = Self::default();
            Frame { here: frame.here.clone(), vpcs: BTreeMap::new() }
        });
        // Where a VPC came, went or got another number, all its services are new.
        let moved = |key: &ServiceKey| before.vpcs.get(&key.0) != frame.vpcs.get(&key.0);
        let mut changed: BTreeSet<ServiceKey> = self
            .inputs
            .apart(&world.services)
            .filter(|(_, was, is)| was != is)
            .map(|(key, ..)| key.clone())
            .collect();
        if before.vpcs != frame.vpcs {
            let all = self.inputs.keys().chain(world.services.keys());
            changed.extend(all.filter(|key| moved(key)).cloned());
        }
        if !changed.is_empty() {
            let changed: Vec<ServiceKey> = changed.into_iter().collect();
            self.change(world, (&before, &frame), &changed, numbers, fault);
        }
        numbers.settle(self.plan.clone());
        self.frame = Some(frame);
        self.plan.clone()
    }

    /// What is not in force.
    pub(crate) fn conditions(&self) -> impl Iterator<Item = &Condition> {
        self.conditions.values().flatten()
    }

    fn change(
        &mut self,
        world: &World,
        (before, frame): (&Frame, &Frame),
        changed: &[ServiceKey],
        numbers: &mut ServiceNumbers,
        fault: Fault,
    ) {
        // First who has what, then what it is: a frontend that changes hands concerns both.
        let mut touched: BTreeSet<ServiceKey> = changed.iter().cloned().collect();
        for key in changed {
            if let Some(service) = self.inputs.get(key).cloned() {
                for claim in wanted(&service, before).0 {
                    self.release(&claim.key, key, &mut touched);
                }
            }
            if let Some(after) = world.services.get(key) {
                let shared = Arc::new(key.clone());
                for claim in wanted(after, frame).0 {
                    self.claim(claim.key, &shared, &mut touched, fault);
                }
            }
        }
        self.inputs.clone_from(&world.services);
        let mut parts: Vec<(ServiceKey, Option<ServicePart>)> = Vec::new();
        for key in touched {
            #[cfg(test)]
            {
                self.compiled += 1;
            }
            self.conditions.remove(&key);
            let Some(service) = self.inputs.get(&key).cloned() else {
                parts.push((key, None));
                continue;
            };
            let (claims, mut conditions) = wanted(&service, frame);
            let (owned, lost): (Vec<Claim>, Vec<Claim>) =
                claims.into_iter().partition(|c| self.owners.get(&c.key).is_some_and(|owner| **owner == key));
            conditions.extend(self.lost(&service, &lost));
            conditions.extend(unplaced(&service, frame));
            if !conditions.is_empty() {
                self.conditions.insert(key.clone(), conditions);
            }
            let part = (!owned.is_empty()).then(|| build(&service, &owned, &frame.here, numbers, fault));
            parts.push((key, part));
        }
        let plan = &mut self.plan.parts;
        for (key, part) in parts {
            match part {
                Some(part) if plan.get(&key).is_some_and(|held| **held == part) => {}
                Some(part) => {
                    let same = numbers.of(&key).filter(|held| **held == part);
                    plan.insert(key, same.unwrap_or_else(|| Arc::new(part)));
                }
                None => drop(plan.remove(&key)),
            }
        }
        if planted!(fault, ServiceForgotten) && changed.len() > 1 {
            // The last of several changes is not seen.
            changed.last().map(|key| plan.remove(key));
        }
    }

    fn claim(
        &mut self,
        frontend: FrontendKey,
        key: &Arc<ServiceKey>,
        touched: &mut BTreeSet<ServiceKey>,
        fault: Fault,
    ) {
        match self.owners.get_mut(&frontend) {
            None => {
                self.owners.insert(frontend, key.clone());
            }
            Some(owner) if *owner == *key => {}
            Some(owner) => {
                let last_wins = planted!(fault, LastClaimWins);
                let all = self.contested.entry(frontend).or_insert_with(|| [owner.clone()].into());
                all.insert(key.clone());
                // Everyone who wants it hears who has it.
                touched.extend(all.iter().map(|k| (**k).clone()));
                if (*key < *owner) != last_wins {
                    *owner = key.clone();
                }
            }
        }
    }

    fn release(&mut self, frontend: &FrontendKey, key: &ServiceKey, touched: &mut BTreeSet<ServiceKey>) {
        if let Some(all) = self.contested.get_mut(frontend) {
            all.retain(|k| **k != *key);
            touched.extend(all.iter().map(|k| (**k).clone()));
            if let Some(first) = all.first() {
                self.owners.insert(*frontend, first.clone());
            }
            if all.len() < 2 {
                self.contested.remove(frontend);
            }
        } else if self.owners.get(frontend).is_some_and(|owner| **owner == *key) {
            self.owners.remove(frontend);
        }
    }

    /// What others have that a service wants.
    fn lost(&self, service: &Service, claims: &[Claim]) -> Vec<Condition> {
        let mut seen = BTreeSet::new();
        claims
            .iter()
            .filter(|claim| claim.kind != FrontendKind::Rest)
            .filter(|claim| seen.insert((claim.key.ip, claim.key.protocol, claim.key.port)))
            .filter_map(|claim| Some((claim, self.owners.get(&claim.key)?)))
            .map(|(claim, owner)| Condition {
                object: object(service),
                reason: ConditionReason::Conflict,
                message: format!("{} belongs to service {}: choose another", shown(&claim.key), owner.1),
            })
            .collect()
    }
}

/// What a service wants here; nothing where its VPC is not.
fn wanted(service: &Service, frame: &Frame) -> (Vec<Claim>, Vec<Condition>) {
    match frame.vpcs.get(&service.vpc) {
        Some(Place::Here(id)) => claims(service, *id, &frame.here),
        _ => Default::default(),
    }
}

/// Why a service is not in force on any node.
fn unplaced(service: &Service, frame: &Frame) -> Option<Condition> {
    let (reason, message) = match frame.vpcs.get(&service.vpc) {
        Some(Place::Here(_) | Place::Elsewhere) => return None,
        Some(Place::Waits) => {
            (ConditionReason::DependencyWaits, format!("vpc {} has no vni of its own yet", service.vpc))
        }
        None => (ConditionReason::DanglingReference, format!("vpc {} does not exist", service.vpc)),
    };
    Some(Condition { object: object(service), reason, message })
}
