//! Plans over the in-memory maps: applied, cut off at every write, out of room. No root, no kernel.

use std::collections::BTreeSet;

use flowloom_bpf_abi::{self as abi, PolicyKey};
use flowloom_compiler::worldgen::{self, Rng};
use flowloom_compiler::{EndpointId, NodePlan, Numbers, Op, PolicyEntries, PolicySlot, VpcId, compile, diff};
use flowloom_datapath::realise::{Kind, Memory, Realise as _};
use flowloom_datapath::{ApplyReport, Delivery, DeviceInfo, Devices, KernelState, Object, adopt, apply};
use flowloom_model::Mac;

/// Two plans of one node, the second after a change of the world.
fn plans(seed: u64) -> (NodePlan, NodePlan) {
    let mut rng = Rng::new(seed);
    let mut world = worldgen::world(&mut rng);
    let mut numbers = Numbers::default();
    let local = worldgen::local_node();
    let before = compile(&world, &local, &mut numbers).plan;
    worldgen::mutate(&mut world, &mut rng);
    let after = compile(&world, &local, &mut numbers).plan;
    (before, after)
}

fn devices(plans: &[&NodePlan]) -> Devices {
    let ids: BTreeSet<EndpointId> = plans.iter().flat_map(|p| p.endpoints.values().map(|e| e.id)).collect();
    let device = |id: &EndpointId| DeviceInfo {
        name: format!("fl{id}"),
        ifindex: 100 + id.0,
        mac: Mac([2, 0, 0, 0, 0, 1]),
        mtu: 1500,
        delivery: Delivery::Peer,
    };
    ids.iter().map(|id| (*id, device(id))).collect()
}

#[derive(Clone)]
struct Node {
    memory: Memory,
    devices: Devices,
    default_vpc: Option<VpcId>,
}

impl Node {
    fn new(plans: &[&NodePlan]) -> Self {
        Self { memory: Memory::default(), devices: devices(plans), default_vpc: None }
    }

    fn apply(&mut self, ops: &[Op]) -> ApplyReport {
        apply::apply(&mut self.memory, &self.devices, &mut self.default_vpc, ops)
    }

    fn remaining(&self, plan: &NodePlan) -> Vec<Op> {
        adopt::remaining(&self.memory.state, plan, &self.devices)
    }

    fn sync(&mut self, plan: &NodePlan) -> ApplyReport {
        let ops = self.remaining(plan);
        self.apply(&ops)
    }

    fn restart(&mut self) {
        self.memory.abort_at = None;
        self.default_vpc = self.memory.state.default_vpc().map(VpcId);
    }
}

/// Everything but the generations, which only grow.
fn timeless(state: &KernelState) -> KernelState {
    let mut state = state.clone();
    for record in state.vpcs.values_mut() {
        record.generation = 1;
    }
    state
}

#[test]
fn an_applied_diff_leaves_nothing_to_do() {
    let mut changes = 0;
    for seed in 0..100 {
        let (before, after) = plans(seed);
        let mut node = Node::new(&[&before, &after]);
        for (old, new) in [(&NodePlan::default(), &before), (&before, &after), (&after, &NodePlan::default())]
        {
            let ops = diff(old, new);
            let report = node.apply(&ops);
            assert!(report.is_clean(), "seed {seed}: {:?}", report.failures);
            assert_eq!(node.remaining(new), [], "seed {seed}");
            changes += ops.len();
            // A second pass over the same plan is silent.
            assert_eq!(node.sync(new).writes, 0, "seed {seed}");
        }
        let empty = KernelState::default();
        assert_eq!(node.memory.state, empty, "seed {seed}: something stayed behind");
    }
    assert!(changes > 500, "the worlds were too quiet: {changes} operations");
}

#[test]
fn a_plan_is_adopted_from_any_other_state() {
    for seed in 0..40 {
        let (before, after) = plans(seed);
        let (_, stranger) = plans(seed + 10_000);
        let mut clean = Node::new(&[&after]);
        assert!(clean.apply(&diff(&NodePlan::default(), &after)).is_clean());
        for start in [&before, &stranger] {
            let mut node = Node::new(&[start, &after]);
            assert!(node.sync(start).is_clean());
            let report = node.sync(&after);
            assert!(report.is_clean(), "seed {seed}: {:?}", report.failures);
            assert_eq!(node.remaining(&after), [], "seed {seed}");
            assert_eq!(timeless(&node.memory.state), timeless(&clean.memory.state), "seed {seed}");
        }
    }
}

/// Kills the change from `before` to `after` at every write, restarts and finishes. Returns the kills.
fn kill_everywhere(before: &NodePlan, after: &NodePlan) -> u32 {
    let ops = diff(before, after);
    let mut start = Node::new(&[before, after]);
    assert!(start.apply(&diff(&NodePlan::default(), before)).is_clean());
    let mut clean = start.clone();
    assert!(clean.apply(&ops).is_clean());

    let first = start.memory.writes() + 1;
    for n in first.. {
        let mut node = start.clone();
        node.memory.abort_at = Some(n);
        let report = node.apply(&ops);
        if !report.aborted {
            assert_eq!(node.memory.state, clean.memory.state);
            return u32::try_from(n - first).expect("few writes");
        }
        assert_eq!(report.writes, n - first);
        node.restart();
        let report = node.sync(after);
        assert!(report.is_clean(), "killed at write {n}: {:?}", report.failures);
        assert_eq!(timeless(&node.memory.state), timeless(&clean.memory.state), "killed at write {n}");
    }
    unreachable!("the numbers of writes end only with the operations")
}

#[test]
fn an_agent_killed_at_any_write_finishes_the_work_after_its_restart() {
    let empty = NodePlan::default();
    let mut kills = [0; 3];
    for seed in 0..15 {
        let (before, after) = plans(seed);
        for (n, (from, to)) in
            [(&before, &after), (&empty, &before), (&before, &empty)].into_iter().enumerate()
        {
            kills[n] += kill_everywhere(from, to);
        }
    }
    println!("{kills:?} kills of changes, of starts, of removals");
    assert!(kills.iter().all(|n| *n > 60), "{kills:?}");
}

/// The slot of `plan` with the most entries, and an identity that has entries of its own there.
fn crowded(plan: &NodePlan) -> Option<(PolicySlot, u32)> {
    let slot = *plan.policies.keys().max_by_key(|s| plan.entries(**s).len())?;
    let identity = plan.entries(slot).keys().map(|k| k.identity).find(|i| *i >= abi::identity::FIRST_USER)?;
    Some((slot, identity))
}

#[test]
fn a_slot_that_means_other_rules_is_exchanged_whole_and_its_decisions_are_made_anew() {
    let mut tried = 0;
    for plan in (0..40).map(|seed| plans(seed).0) {
        let Some((slot, identity)) = crowded(&plan) else { continue };
        let mut node = Node::new(&[&plan]);
        assert!(node.apply(&diff(&NodePlan::default(), &plan)).is_clean());
        let whole = plan.entries(slot);
        let user = plan.endpoints.values().find(|e| e.egress_slot == slot || e.ingress_slot == slot).unwrap();
        let exchange = [Op::PutSlots(vec![(slot, whole.clone())]), Op::BumpGeneration(user.vpc)];

        // The default means something else; an identity has other entries; it has only some of its entries.
        let any = *whole.keys().find(|k| k.identity == abi::identity::ANY).unwrap();
        let own = *whole.keys().find(|k| k.identity == identity).unwrap();
        for key in [any, own] {
            node.memory.state.policies.get_mut(&slot.0).unwrap().get_mut(&key).unwrap().precedence ^= 1;
            assert_eq!(node.remaining(&plan), exchange);
            assert!(node.sync(&plan).is_clean());
        }
        if whole.keys().filter(|k| k.identity == identity).count() > 1 {
            node.memory.state.policies.get_mut(&slot.0).unwrap().remove(&own);
            assert_eq!(node.remaining(&plan), exchange);
            assert!(node.sync(&plan).is_clean());
            tried += 1;
        }

        // A whole identity comes or goes in place, and nothing is decided anew.
        let mine: PolicyEntries =
            whole.iter().filter(|(k, _)| k.identity == identity).map(|(k, v)| (*k, *v)).collect();
        node.memory.state.policies.get_mut(&slot.0).unwrap().retain(|k, _| k.identity != identity);
        assert_eq!(node.remaining(&plan), [Op::AddEntries { slot, entries: mine.clone() }]);
        assert!(node.sync(&plan).is_clean());
        let strangers: PolicyEntries =
            mine.iter().map(|(k, v)| (PolicyKey { identity: 9_999_999, ..*k }, *v)).collect();
        node.memory.state.policies.get_mut(&slot.0).unwrap().extend(strangers.clone());
        let keys = strangers.keys().copied().collect();
        assert_eq!(node.remaining(&plan), [Op::RemoveEntries { slot, keys }]);
    }
    assert!(tried > 3, "{tried}");
}

/// A plan with endpoints of which at least two have different policies, and its devices.
fn rich() -> NodePlan {
    (0..500)
        .map(|seed| plans(seed).0)
        .find(|p| p.endpoints.len() >= 3 && p.policies.len() >= 3 && p.ipcache.len() >= 8)
        .expect("one of the worlds is rich enough")
}

#[test]
fn a_policy_that_does_not_fit_is_refused_and_its_neighbours_are_applied() {
    let plan = rich();
    let largest = plan.policies.keys().map(|s| plan.entries(*s).len()).max().unwrap();
    let mut node = Node::new(&[&plan]);
    node.memory.capacity.insert(Kind::Entries, largest - 1);
    let report = node.apply(&diff(&NodePlan::default(), &plan));

    let fits = |slot| plan.entries(slot).len() < largest;
    let slots: BTreeSet<_> = plan.policies.keys().filter(|s| fits(**s)).map(|s| s.0).collect();
    assert_eq!(node.memory.state.policies.keys().copied().collect::<BTreeSet<_>>(), slots);
    let ready: BTreeSet<_> = plan
        .endpoints
        .values()
        .filter(|e| fits(e.egress_slot) && fits(e.ingress_slot))
        .map(|e| e.id.0)
        .collect();
    assert_eq!(node.memory.state.endpoints.keys().copied().collect::<BTreeSet<_>>(), ready);
    assert!(!report.is_clean());
    let refused = report.failures.iter().filter(|f| matches!(f.object, Object::Endpoint(_))).count();
    assert_eq!(refused, plan.endpoints.len() - ready.len());
    assert!(report.failures.iter().any(|f| matches!(f.object, Object::Slot(_)) && f.error.is_capacity()));

    // Room again: the next pass finishes.
    node.memory.capacity.clear();
    assert!(node.sync(&plan).is_clean());
    assert_eq!(node.remaining(&plan), []);
}

#[test]
fn a_changed_policy_that_does_not_fit_leaves_the_old_one_in_force() {
    let mut tried = 0;
    for seed in 0..200 {
        let (before, after) = plans(seed);
        let ops = diff(&before, &after);
        let new_slots = ops.iter().any(|o| matches!(o, Op::PutSlots(s) if !s.is_empty()));
        let kept = before.endpoints.values().filter(|e| {
            after.endpoints.get(&e.key).is_some_and(|a| {
                a.id == e.id && (a.egress_slot, a.ingress_slot) != (e.egress_slot, e.ingress_slot)
            })
        });
        let kept: Vec<_> = kept.collect();
        if !new_slots || kept.is_empty() {
            continue;
        }
        let mut node = Node::new(&[&before, &after]);
        assert!(node.apply(&diff(&NodePlan::default(), &before)).is_clean());
        let records = node.memory.state.endpoints.clone();
        let policies = node.memory.state.policies.clone();
        node.memory.capacity.insert(Kind::Slots, policies.len());
        let report = node.apply(&ops);
        assert!(report.failures.iter().any(|f| f.error.is_capacity()), "seed {seed}");
        for e in kept {
            let now = node.memory.state.endpoints[&e.id.0];
            let was = records[&e.id.0];
            if now == was {
                // Its old policy is still there, whole.
                for slot in [was.egress_slot, was.ingress_slot] {
                    let have = &node.memory.state.policies[&slot];
                    assert!(policies[&slot].iter().all(|(k, v)| have.get(k) == Some(v)), "seed {seed}");
                }
                tried += 1;
            }
        }
        node.memory.capacity.clear();
        assert!(node.sync(&after).is_clean(), "seed {seed}");
        assert_eq!(node.remaining(&after), [], "seed {seed}");
    }
    assert!(tried > 10, "{tried} endpoints kept an old policy");
}

#[test]
fn an_address_never_gets_an_identity_that_a_policy_does_not_know() {
    let (before, after) = (0..500)
        .map(plans)
        .find(|(b, a)| {
            let ops = diff(b, a);
            let adds = ops.iter().position(|o| matches!(o, Op::AddEntries { .. }));
            let peers = ops.iter().position(|o| matches!(o, Op::PutPeers(_)));
            matches!((adds, peers), (Some(x), Some(y)) if x < y)
        })
        .expect("some change brings an identity");
    let mut node = Node::new(&[&before, &after]);
    assert!(node.apply(&diff(&NodePlan::default(), &before)).is_clean());
    let peers = node.memory.state.peers.clone();
    node.memory.capacity.insert(Kind::Entries, 0);
    let report = node.apply(&diff(&before, &after));
    let known: BTreeSet<u32> =
        node.memory.state.policies.values().flat_map(|p| p.keys().map(|k| k.identity)).collect();
    for (key, record) in &node.memory.state.peers {
        let new = peers.get(key) != Some(record) && record.identity >= abi::identity::FIRST_USER;
        assert!(!new || known.contains(&record.identity), "{key:?} got identity {}", record.identity);
    }
    assert!(report.failures.iter().any(|f| matches!(f.object, Object::Peer(..))), "{:?}", report.failures);
    assert!(report.deferred > 0 || report.failures.len() > 1);
}

#[test]
fn an_endpoint_without_a_device_is_refused_by_name_and_the_others_are_not() {
    let plan = rich();
    let mut node = Node::new(&[&plan]);
    let (lost, _) = node.devices.pop_first().unwrap();
    let report = node.apply(&diff(&NodePlan::default(), &plan));
    let name = plan.endpoints.values().find(|e| e.id == lost).unwrap().key.to_string();
    assert_eq!(report.failures.len(), 1, "{:?}", report.failures);
    assert!(report.failures[0].error.to_string().contains(&name));
    assert_eq!(node.memory.state.endpoints.len(), plan.endpoints.len() - 1);
}

#[test]
fn a_full_ipcache_refuses_the_entries_that_do_not_fit_only() {
    let plan = rich();
    let mut node = Node::new(&[&plan]);
    node.memory.capacity.insert(Kind::Peers, plan.ipcache.len() - 2);
    let report = node.apply(&diff(&NodePlan::default(), &plan));
    let refused = report.failures.iter().filter(|f| matches!(f.object, Object::Peer(..))).count();
    assert_eq!((refused, node.memory.state.peers.len()), (2, plan.ipcache.len() - 2));
}
