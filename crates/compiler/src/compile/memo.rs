//! What one compilation leaves for the next, and how the next starts from it.
//!
//! What is cheap: endpoints come, go or change while rules stay; rules change while endpoints stay and they ask the same of peers;
//! services, in any case.
//! Whatever else changes, and whatever could right or wrong something else (two endpoints that want one address), is compiled from
//! the start, so the result never depends on the path that led to it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use flowloom_model::{Endpoint, EndpointKey, GroupName, NodeName, VpcName, World};
use ipnet::IpNet;

use super::{Compilation, CompileOptions, Compiler, CompilerCache, SpecKey, VpcScope};
use crate::questions::{Questions, host};
use crate::{Condition, ConditionReason, Identity, NodePlan, Numbers, ObjectRef, Pins, PolicySlot, VpcId};

/// More changed VPCs than this are compiled from the start.
const MOST_VPCS: usize = 8;

/// Inputs and outputs of the last compilation.
#[derive(Debug)]
pub(super) struct Memo {
    inputs: Inputs,
    /// [`Numbers::epoch`] it ended with.
    epoch: u64,
    questions: BTreeMap<VpcId, Arc<Questions>>,
    specs: BTreeMap<SpecKey, Option<[PolicySlot; 2]>>,
    holders: HashMap<Identity, u32>,
    plan: NodePlan,
    conditions: Vec<Condition>,
}

/// What a compilation was made from.
#[derive(Debug)]
pub(super) struct Inputs {
    local: NodeName,
    options: CompileOptions,
    world: World,
    pins: Pins,
}

impl Inputs {
    pub(super) fn new(world: &World, pins: &Pins, local: &NodeName, options: CompileOptions) -> Self {
        Self { local: local.clone(), options, world: world.clone(), pins: pins.clone() }
    }
}

impl Compiler<'_> {
    /// Keeps what the next compilation can start from.
    pub(super) fn remember(self, inputs: Inputs) {
        self.cache.memo = Some(Memo {
            inputs,
            epoch: self.numbers.epoch(),
            questions: self.questions,
            specs: self.specs,
            holders: self.holders,
            plan: self.plan,
            conditions: self.conditions,
        });
    }
}

/// The compilation of a world that differs little from the last one; `None` when it must start anew.
pub(super) fn resume(
    memo: Memo,
    world: &World,
    pins: &Pins,
    local: &NodeName,
    options: CompileOptions,
    numbers: &mut Numbers,
    cache: &mut CompilerCache,
) -> Option<Compilation> {
    let Memo { inputs, epoch, questions, specs, holders, plan, conditions } = memo;
    let before = &inputs.world;
    let same_frame = inputs.local == *local
        && inputs.options == options
        && before.nodes == world.nodes
        && before.vpcs == world.vpcs
        && before.subnets == world.subnets;
    if epoch != numbers.epoch() || !same_frame {
        return None;
    }
    let new_rules = before.security_groups != world.security_groups
        || before.cidr_groups != world.cidr_groups
        || inputs.pins != *pins;
    if new_rules && !asks_the_same(&plan, &questions, world, pins, cache) {
        return None;
    }
    let changed: Vec<Pair<'_>> = before
        .endpoints
        .apart(&world.endpoints)
        .filter(|(_, before, after)| before != after)
        .map(|(_, before, after)| (before, after))
        .collect();
    let ids: BTreeMap<VpcName, VpcId> = plan.vpcs.iter().map(|(id, vpc)| (vpc.name.clone(), *id)).collect();
    // Other nodes' endpoints in VPCs that this node has no part in change nothing here.
    let concerns = |e: &&&Arc<Endpoint>| {
        let waits = || world.vpcs.get(&e.vpc).is_none_or(|vpc| vpc.vni.is_none());
        ids.contains_key(&e.vpc) || e.node == *local || waits()
    };
    let touched: BTreeSet<&VpcName> = changed
        .iter()
        .flat_map(|(before, after)| before.iter().chain(after))
        .filter(concerns)
        .map(|e| &e.vpc)
        .collect();
    if (new_rules && !changed.is_empty())
        || touched.len() > MOST_VPCS
        || touched.iter().any(|vpc| !ids.contains_key(*vpc))
        || !changed.iter().filter_map(|(_, after)| *after).all(|e| refers_well(world, e))
        || !(conditions.is_empty() || (!new_rules && stay_true(&conditions, &changed)))
        || touched.iter().any(|vpc| !vpc.is_default() && !keeps_a_local(&plan, &changed, vpc, local))
    {
        return None;
    }
    let mut scopes = BTreeMap::new();
    for (name, id) in &ids {
        if new_rules || touched.contains(name) {
            let vpc = world.vpcs.get(name)?;
            let subnets = world.subnets.values().filter(|s| s.vpc == *name).collect();
            let groups =
                world.security_groups.values().filter(|g| g.vpc == *name).map(|g| (&g.name, g)).collect();
            let questions = questions.get(id)?.clone();
            scopes.insert(name.clone(), VpcScope { id: *id, vpc, subnets, groups, questions });
        }
    }
    let known = conditions.len();
    let mut compiler = Compiler {
        world,
        pins,
        local,
        options,
        numbers,
        cache,
        plan,
        conditions,
        specs: if new_rules { BTreeMap::new() } else { specs },
        holders,
        new_policies: false,
        questions,
    };
    for (name, scope) in &scopes {
        let of_vpc = |e: &&Arc<Endpoint>| e.vpc == *name;
        let gone = changed.iter().filter_map(|(before, _)| before.filter(of_vpc));
        let freed: BTreeSet<IpNet> = gone.flat_map(|before| compiler.remove(scope, before)).collect();
        for after in changed.iter().filter_map(|(_, after)| after.filter(of_vpc)) {
            let places = compiler.places(scope, after)?;
            compiler.endpoint(scope, after, &places);
        }
        compiler.uncover(scope, freed);
    }
    if new_rules {
        compiler.reslot(&scopes)?;
    }
    if compiler.conditions.len() != known {
        return None;
    }
    if new_rules
        || changed
            .iter()
            .any(|(before, after)| [before, after].iter().any(|e| e.is_some_and(|e| e.node == *local)))
    {
        compiler.name_rules();
    }
    Some(compiler.finish(Inputs::new(world, pins, local, options)))
}

/// An endpoint before and after.
type Pair<'a> = (Option<&'a Arc<Endpoint>>, Option<&'a Arc<Endpoint>>);

/// Whether everything that an endpoint names exists: what the full compilation would have a condition for.
fn refers_well(world: &World, endpoint: &Endpoint) -> bool {
    let of_vpc = |name: &GroupName| (endpoint.vpc.clone(), name.clone());
    world.nodes.get(&endpoint.node).is_some_and(|node| !node.addresses.is_empty())
        && endpoint.security_groups.iter().all(|name| world.security_groups.contains_key(&of_vpc(name)))
}

/// Whether what was wrong is wrong still, whatever these endpoints do: nothing that they could free or stop using.
fn stay_true(conditions: &[Condition], changed: &[Pair<'_>]) -> bool {
    let keys: BTreeSet<EndpointKey> =
        changed.iter().flat_map(|(before, after)| before.iter().chain(after)).map(|e| e.key()).collect();
    conditions.iter().all(|c| match (&c.object, c.reason) {
        (_, ConditionReason::Conflict | ConditionReason::OutOfNumbers) | (ObjectRef::Rule { .. }, _) => false,
        (ObjectRef::Endpoint { endpoint }, _) => !keys.contains(endpoint),
        _ => true,
    })
}

/// Whether a VPC has a local endpoint after the change.
fn keeps_a_local(plan: &NodePlan, changed: &[Pair<'_>], vpc: &VpcName, local: &NodeName) -> bool {
    let of_vpc = |e: &&Arc<Endpoint>| e.vpc == *vpc;
    let comes = changed.iter().filter_map(|(_, after)| after.filter(of_vpc)).any(|e| e.node == *local);
    let gone: BTreeSet<EndpointKey> =
        changed.iter().filter_map(|(before, _)| before.filter(of_vpc)).map(|e| e.key()).collect();
    comes || plan.endpoints.keys().any(|key| key.vpc == *vpc && !gone.contains(key))
}

/// Whether the new rules ask the same of peers, VPC by VPC.
fn asks_the_same(
    plan: &NodePlan,
    questions: &BTreeMap<VpcId, Arc<Questions>>,
    world: &World,
    pins: &Pins,
    cache: &CompilerCache,
) -> bool {
    plan.vpcs.iter().all(|(id, vpc)| {
        let groups = world.security_groups.values().filter(|g| g.vpc == vpc.name);
        let mut asked = Questions::of(world, &vpc.name, groups, pins);
        asked.prefixes.fault = cache.fault;
        questions.get(id).is_some_and(|held| **held == asked)
    })
}

impl<'a> Compiler<'a> {
    /// Takes an endpoint out of the plan; returns the entries it had.
    fn remove(&mut self, scope: &VpcScope<'a>, endpoint: &Endpoint) -> Vec<IpNet> {
        self.plan.endpoints.remove(&endpoint.key());
        let nets: Vec<IpNet> = endpoint.ips.iter().map(|ip| host(*ip)).collect();
        nets.iter().for_each(|net| self.forget(scope.id, *net));
        nets
    }

    /// Freed addresses that rules name, or that are a whole subnet, have an entry of their own still.
    fn uncover(&mut self, scope: &VpcScope<'a>, freed: BTreeSet<IpNet>) {
        for net in freed {
            let named = scope.questions.prefixes.contains(&net)
                || scope.subnets.iter().any(|s| s.cidrs.contains(&net));
            if named && !self.plan.ipcache.contains_key(&(scope.id, net)) {
                self.prefix(scope, net);
            }
        }
    }

    /// Slots anew for every local endpoint: the rules changed.
    fn reslot(&mut self, scopes: &BTreeMap<VpcName, VpcScope<'a>>) -> Option<()> {
        let keys: Vec<EndpointKey> = self.plan.endpoints.keys().cloned().collect();
        for key in keys {
            let endpoint = self.world.endpoints.get(&key)?;
            let [egress_slot, ingress_slot] = self.slots(scopes.get(&key.vpc)?, endpoint)?;
            let record = self.plan.endpoints.get_mut(&key)?;
            record.revision = self.numbers.revision(record.id, egress_slot, ingress_slot);
            (record.egress_slot, record.ingress_slot) = (egress_slot, ingress_slot);
        }
        Some(())
    }
}
