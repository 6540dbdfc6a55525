//! Oracle against compiled entries, and every planted fault found.

use std::collections::BTreeMap;

use flowloom_bpf_abi::{PolicyValue, policy_flags, verdict};
use flowloom_model::{Direction, World};

use super::{seed, worlds};
use crate::oracle::{self, Decision, Packet};
use crate::worldgen::{self, Rng};
use crate::*;

/// What the compiled entries say, in the oracle's words.
fn compiled(plan: &NodePlan, value: Option<PolicyValue>) -> Decision {
    let Some(value) = value else { panic!("a lookup missed") };
    let verdict = match value.verdict {
        verdict::ALLOW => Verdict::Allow,
        verdict::DROP => Verdict::Drop,
        verdict::REJECT => Verdict::Reject,
        other => panic!("verdict {other}"),
    };
    let rule = (value.rule != 0).then(|| plan.rules[&RuleId(value.rule)].clone());
    Decision {
        verdict,
        rule,
        tier: None,
        log: value.flags & policy_flags::LOG != 0,
        stateful: value.flags & policy_flags::STATELESS == 0,
    }
}

struct Run<'a> {
    world: &'a World,
    plan: NodePlan,
    entries: BTreeMap<PolicySlot, PolicyEntries>,
    fault: Fault,
}

impl<'a> Run<'a> {
    fn new(world: &'a World, fault: Fault) -> Self {
        let mut numbers = Numbers::default();
        let mut cache = CompilerCache::with_fault(fault);
        let node = worldgen::local_node();
        let plan = compile_with(world, &node, CompileOptions::default(), &mut numbers, &mut cache).plan;
        let entries = plan.policies.keys().map(|slot| (*slot, plan.entries(*slot))).collect();
        Self { world, plan, entries, fault }
    }

    /// The oracle's decision and the compiled one.
    fn compare(&self, endpoint: &EndpointPlan, direction: Direction, packet: Packet) -> (Decision, Decision) {
        let expected = oracle::decide(self.world, &worldgen::local_node(), &endpoint.key, direction, packet);
        let slot = match direction {
            Direction::Egress => endpoint.egress_slot,
            Direction::Ingress => endpoint.ingress_slot,
        };
        let (_, peer) = self.plan.peer(endpoint.vpc, packet.peer).expect("the ipcache covers every address");
        let entries = &self.entries[&slot];
        let value = if self.fault == Fault::AnyIdentityIgnored {
            lookup_exact_first(entries, peer.identity, packet)
        } else {
            lookup(entries, peer.identity, packet.protocol, packet.port)
        };
        let mut found = compiled(&self.plan, value);
        found.tier = expected.tier;
        (expected, found)
    }
}

fn lookup_exact_first(entries: &PolicyEntries, peer: Identity, packet: Packet) -> Option<PolicyValue> {
    let exact: PolicyEntries =
        entries.iter().filter(|(key, _)| key.identity == peer.0).map(|(k, v)| (*k, *v)).collect();
    lookup(&exact, peer, packet.protocol, packet.port)
        .or_else(|| lookup(entries, peer, packet.protocol, packet.port))
}

#[test]
fn compiled_entries_decide_as_the_oracle() {
    let seed = seed();
    let mut shares: BTreeMap<(String, Option<u8>), u64> = BTreeMap::new();
    let mut decisions = 0u64;
    for number in 0..worlds(2000) {
        let world_seed = seed.wrapping_add(number);
        let mut rng = Rng::new(world_seed);
        let world = worldgen::world(&mut rng);
        let run = Run::new(&world, Fault::None);
        for endpoint in run.plan.endpoints.values() {
            for _ in 0..14 {
                for direction in [Direction::Egress, Direction::Ingress] {
                    let packet = worldgen::packet(&world, &endpoint.key, &mut rng);
                    let (expected, found) = run.compare(endpoint, direction, packet);
                    assert_eq!(
                        expected, found,
                        "world {world_seed} (FLOWLOOM_SEED={world_seed}), {} {direction:?} {packet:?}",
                        endpoint.key
                    );
                    *shares.entry((format!("{:?}", expected.verdict), expected.tier)).or_default() += 1;
                    decisions += 1;
                }
            }
        }
    }
    println!("seed {seed}: {decisions} decisions");
    for ((verdict, tier), count) in &shares {
        let tier = tier.map_or("default".to_owned(), |t| format!("tier {t}"));
        println!("  {verdict:<7} {tier:<8} {count:>7}  {:.1} %", 100.0 * *count as f64 / decisions as f64);
    }
    assert!(decisions >= worlds(200_000), "{decisions} decisions are too few");
    let seen: std::collections::BTreeSet<&str> = shares.keys().map(|(v, _)| v.as_str()).collect();
    assert_eq!(seen.len(), 3, "every verdict must occur: {seen:?}");
}

#[test]
fn every_planted_fault_is_found() {
    let seed = seed();
    for fault in Fault::ALL {
        let found = (0..400u64).find(|number| {
            let mut rng = Rng::new(seed.wrapping_add(*number));
            let world = worldgen::world(&mut rng);
            let run = Run::new(&world, fault);
            run.plan.endpoints.values().any(|endpoint| {
                (0..24).any(|_| {
                    [Direction::Egress, Direction::Ingress].into_iter().any(|direction| {
                        let packet = worldgen::packet(&world, &endpoint.key, &mut rng);
                        let (expected, found) = run.compare(endpoint, direction, packet);
                        expected != found
                    })
                })
            })
        });
        let world = found.unwrap_or_else(|| panic!("{fault:?} was not found in 400 worlds"));
        println!("{fault:?}: found in world {world}");
    }
}
