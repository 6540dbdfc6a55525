//! Services: every state of the maps on the way from one world to the next gives every client what the old or the new world has for it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use flowloom_bpf_abi::service_flags;
use flowloom_model::{VpcName, World};
use ipnet::IpNet;

use super::{seed, worlds};
use crate::diff::diff_with;
use crate::service_oracle::{Answer, Ask, Outcome, answer, asks, change, world};
use crate::worldgen::{Rng, local_node};
use crate::*;

/// The service maps, as the programs read them.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
struct Maps {
    services: BTreeMap<FrontendKey, FrontendPlan>,
    backends: BTreeMap<(ListId, u32), BackendPlan>,
    members: BTreeSet<(ListId, IpAddr, u16)>,
    ranges: BTreeSet<(ServiceId, IpNet)>,
}

impl Maps {
    /// What they must hold for a plan.
    fn of(plan: &ServicePlan) -> Self {
        let mut maps = Self::default();
        maps.services = plan.frontends().map(|(key, plan)| (*key, *plan)).collect();
        for (id, list) in plan.lists() {
            maps.backends.extend(list.iter().zip(0..).map(|(b, at)| ((id, at), *b)));
            maps.members.extend(list.iter().map(|b| (id, b.ip, b.port)));
        }
        maps.ranges = plan.ranges().collect();
        maps
    }

    /// What an agent finds there after a restart.
    fn held(&self) -> HeldServices {
        let mut held = HeldServices::default();
        held.frontends = self.services.iter().map(|(key, plan)| (*key, (plan.service, plan.list))).collect();
        for ((id, _), backend) in &self.backends {
            held.lists.entry(*id).or_default().push(*backend);
            held.last_list = *id;
        }
        held
    }

    /// Applies an operation write by write, calling `after` behind each.
    fn apply(&mut self, op: &Op, after: &mut dyn FnMut(&Self)) {
        match op {
            Op::PutLists(lists) => {
                for (id, list) in lists {
                    for b in list.iter() {
                        self.members.insert((*id, b.ip, b.port));
                        after(self);
                    }
                    for (b, at) in list.iter().zip(0..) {
                        self.backends.insert((*id, at), *b);
                        after(self);
                    }
                }
            }
            Op::PutRanges(ranges) => {
                for range in ranges {
                    self.ranges.insert(*range);
                    after(self);
                }
            }
            Op::PutFrontends(frontends) => {
                for (key, plan) in frontends {
                    self.services.insert(*key, *plan);
                    after(self);
                }
            }
            Op::RemoveFrontends(keys) => {
                for key in keys {
                    assert!(self.services.remove(key).is_some(), "only what is there is removed");
                    after(self);
                }
            }
            Op::RemoveRanges(ranges) => {
                for range in ranges {
                    self.ranges.remove(range);
                    after(self);
                }
            }
            Op::RemoveLists(lists) => {
                for (id, list) in lists {
                    for (b, at) in list.iter().zip(0..) {
                        self.backends.remove(&(*id, at));
                        self.members.remove(&(*id, b.ip, b.port));
                        after(self);
                    }
                }
            }
            _ => {}
        }
    }

    /// What a client gets; an error is a hole.
    fn answer(&self, vpcs: &BTreeMap<VpcName, VpcId>, ask: &Ask) -> Result<Answer, String> {
        let nobody = |outcome| Ok(Answer { admitted: true, outcome });
        let Some(vpc) = vpcs.get(&ask.vpc) else { return nobody(Outcome::Unserved) };
        let key =
            FrontendKey { vpc: *vpc, ip: ask.ip, protocol: ask.protocol, port: ask.port, scope: ask.scope };
        let Some(plan) = self.services.get(&key) else {
            let rest = self.services.contains_key(&FrontendKey { protocol: 0, port: 0, ..key });
            return nobody(if rest { Outcome::Refused } else { Outcome::Unserved });
        };
        let in_range =
            || self.ranges.iter().any(|(id, net)| *id == plan.service && net.contains(&ask.client));
        let admitted = plan.flags & service_flags::RANGES == 0 || in_range();
        let outcome = if plan.count == 0 {
            let silent = plan.flags & service_flags::SILENT != 0;
            if silent { Outcome::Silence } else { Outcome::Refused }
        } else {
            let at =
                |index| self.backends.get(&(plan.list, index)).ok_or(format!("hole {index} in {plan:?}"));
            let list = (0..plan.count).map(at).collect::<Result<Vec<_>, _>>()?;
            let set: BTreeSet<_> = list.iter().map(|b| (b.ip, b.port)).collect();
            let members: BTreeSet<_> = self
                .members
                .iter()
                .filter(|(id, ..)| *id == plan.list)
                .map(|(_, ip, port)| (*ip, *port))
                .collect();
            if members != set || list.len() != set.len() {
                return Err(format!("members {members:?} are not the list {set:?}"));
            }
            let keep_source = plan.flags & service_flags::KEEP_SOURCE != 0;
            Outcome::Backends { set, keep_source, affinity: plan.affinity }
        };
        Ok(Answer { admitted, outcome })
    }
}

/// Whether a client in between may get this.
fn is_right(now: &Answer, old: &Answer, new: &Answer) -> bool {
    let either = |outcome: &Outcome| old.outcome == *outcome || new.outcome == *outcome;
    // While an address comes or goes, what it will not serve or served no more is refused.
    let meanwhile = now.outcome == Outcome::Refused && either(&Outcome::Unserved);
    (either(&now.outcome) || meanwhile) && (now.admitted == old.admitted || now.admitted == new.admitted)
}

fn vpcs_of(plan: &NodePlan) -> BTreeMap<VpcName, VpcId> {
    plan.vpcs.iter().map(|(id, vpc)| (vpc.name.clone(), *id)).collect()
}

/// Walks from world to world; what is wrong first, if anything. Counts the states looked at.
fn walk(seed: u64, steps: u64, fault: Fault, states: &mut u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let here = local_node();
    let questions = asks();
    let mut world: World = world(&mut rng);
    let (mut numbers, mut cache) = (Numbers::default(), CompilerCache::with_fault(fault));
    let options = CompileOptions::default();
    let mut compilation = compile_with(&world, &here, options, &mut numbers, &mut cache);
    let mut maps = Maps::default();
    for step in 0..steps {
        let at = |what: &str| format!("seed {seed}, step {step}: {what}");
        let before = world.clone();
        change(&mut world, &mut rng);
        let keys: BTreeSet<ServiceKey> = crate::diff::both(&before.services, &world.services)
            .filter(|(_, a, b)| a != b)
            .map(|(key, ..)| key.clone())
            .collect();
        let rest = World { services: before.services.clone(), ..world.clone() };
        let next = if rest == before && rng.one_in(2) {
            let changes = Changes { services: keys, ..Changes::default() };
            compile_changes(&world, &here, options, &mut numbers, &mut cache, &changes)
        } else {
            compile_with(&world, &here, options, &mut numbers, &mut cache)
        };
        let (old_vpcs, new_vpcs) = (vpcs_of(&compilation.plan), vpcs_of(&next.plan));
        let in_force: BTreeSet<VpcName> = old_vpcs.keys().chain(new_vpcs.keys()).cloned().collect();
        let all: BTreeMap<VpcName, VpcId> = old_vpcs.clone().into_iter().chain(new_vpcs.clone()).collect();
        let names = |vpcs: &BTreeMap<VpcName, VpcId>| vpcs.keys().cloned().collect::<BTreeSet<_>>();
        let (old_names, new_names) = (names(&old_vpcs), names(&new_vpcs));
        let asked: Vec<(&Ask, Answer, Answer)> = questions
            .iter()
            .filter(|ask| in_force.contains(&ask.vpc))
            .map(|ask| (ask, answer(&before, &here, &old_names, ask), answer(&world, &here, &new_names, ask)))
            .collect();
        let mut wrong = None;
        let mut check = |maps: &Maps| {
            *states += 1;
            for (ask, old, new) in &asked {
                let complaint = match maps.answer(&all, ask) {
                    Ok(now) if is_right(&now, old, new) => continue,
                    Ok(now) => format!("{ask:?} gets {now:?}, not {old:?} and not {new:?}"),
                    Err(hole) => format!("{ask:?} meets a {hole}"),
                };
                wrong.get_or_insert(complaint);
                return;
            }
        };
        let ops = diff_with(&compilation.plan, &next.plan, fault);
        ops.iter().for_each(|op| maps.apply(op, &mut check));
        if let Some(wrong) = wrong {
            return Err(at(&wrong));
        }
        for (ask, _, new) in &asked {
            let now = maps.answer(&all, ask).map_err(|e| at(&e))?;
            if now != *new {
                return Err(at(&format!("in the end {ask:?} gets {now:?}, not {new:?}")));
            }
        }
        if maps != Maps::of(&next.plan.services) {
            return Err(at("the maps hold something else than the plan"));
        }
        if rng.one_in(4) {
            // From the start, with the numbers: the same plan. After a restart, with the numbers of the maps: nothing to write.
            let anew = |numbers: &mut Numbers| {
                let mut cache = CompilerCache::with_fault(fault);
                compile_with(&world, &here, options, numbers, &mut cache)
            };
            let mut restarted = Numbers::default();
            restarted.adopt_services(maps.held());
            if anew(&mut numbers.clone()) != next {
                return Err(at("the plan depends on the way that led to it"));
            }
            let (after, before) = (anew(&mut restarted).plan.services, &next.plan.services);
            if let Some(part) =
                before.parts().iter().find(|(key, part)| after.parts().get(*key) != Some(part))
            {
                let now = after.parts().get(part.0);
                return Err(at(&format!("a restart makes something else of {part:?}: {now:?}")));
            }
        }
        compilation = next;
    }
    Ok(())
}

#[test]
fn every_state_in_between_is_right() {
    let mut states = 0;
    for run in 0..worlds(12) {
        if let Err(wrong) = walk(seed() + run, 60, Fault::None, &mut states) {
            panic!("{wrong}");
        }
    }
    assert!(states > 1000, "only {states} states were looked at");
}

#[test]
fn every_fault_of_services_is_noticed() {
    for fault in Fault::SERVICES {
        let noticed = (0..20).any(|run| walk(seed() + run, 60, fault, &mut 0).is_err());
        assert!(noticed, "{fault:?} went unnoticed");
    }
}
