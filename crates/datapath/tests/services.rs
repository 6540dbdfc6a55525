//! Services over the in-memory maps: killed at every write, restarted, finished. No root, no kernel.

use std::collections::BTreeSet;

use flowloom_bpf_abi::{VpcRecord, vpc_flags};
use flowloom_compiler::service_oracle;
use flowloom_compiler::worldgen::{Rng, local_node};
use flowloom_compiler::{
    FrontendKey, FrontendPlan, HeldServices, ListId, NodePlan, Numbers, Op, Scope, ServiceId, VpcId, VpcPlan,
    compile, diff,
};
use flowloom_datapath::realise::{Memory, Realise as _};
use flowloom_datapath::services::held_services;
use flowloom_datapath::{Devices, adopt, apply};
use flowloom_model::World;

/// The services of a plan and nothing else.
fn services(world: &World, numbers: &mut Numbers) -> NodePlan {
    let plan = compile(world, &local_node(), numbers).plan;
    NodePlan { services: plan.services, ..NodePlan::default() }
}

/// What an agent makes of a world after a start on these maps.
fn restarted(world: &World, held: HeldServices) -> NodePlan {
    let mut numbers = Numbers::default();
    numbers.adopt_services(held);
    services(world, &mut numbers)
}

#[test]
fn a_restart_of_an_agent_writes_no_service_anew_and_finishes_what_a_kill_left() {
    let devices = Devices::new();
    let mut kills = 0;
    for seed in 0..6 {
        let mut rng = Rng::new(seed);
        let mut world = service_oracle::world(&mut rng);
        let mut numbers = Numbers::default();
        let mut plan = services(&world, &mut numbers);
        let mut memory = Memory::default();
        for _ in 0..12 {
            service_oracle::change(&mut world, &mut rng);
            service_oracle::change(&mut world, &mut rng);
            let next = services(&world, &mut numbers);
            let ops = diff(&plan, &next);
            let mut after = memory.clone();
            assert!(apply::apply(&mut after, &devices, &mut None, &ops).is_clean());
            assert_eq!(adopt::remaining(&after.state, &next, &devices), [], "seed {seed}");
            let again = restarted(&world, held_services(&after.state.services));
            assert_eq!(adopt::remaining(&after.state, &again, &devices), [], "seed {seed}: written anew");
            for n in memory.writes() + 1.. {
                let mut killed = memory.clone();
                killed.abort_at = Some(n);
                if !apply::apply(&mut killed, &devices, &mut None, &ops).aborted {
                    break;
                }
                kills += 1;
                killed.abort_at = None;
                let finished = restarted(&world, held_services(&killed.state.services));
                let ops = adopt::remaining(&killed.state, &finished, &devices);
                assert!(apply::apply(&mut killed, &devices, &mut None, &ops).is_clean());
                assert_eq!(
                    adopt::remaining(&killed.state, &finished, &devices),
                    [],
                    "seed {seed}, write {n}"
                );
            }
            (memory, plan) = (after, next);
        }
    }
    assert!(kills > 100, "only {kills} kills");
}

/// Packets look for services only in a VPC that is marked: the mark comes before the first frontend and goes after the last.
#[test]
fn a_vpc_is_marked_while_it_has_services() {
    let (devices, id) = (Devices::new(), VpcId(100));
    let key = |port| FrontendKey {
        vpc: id,
        ip: "10.96.0.10".parse().expect("ip"),
        protocol: 6,
        port,
        scope: Scope::Inside,
    };
    let plan = FrontendPlan { service: ServiceId(1), list: ListId(0), count: 0, affinity: 0, flags: 0 };
    let put = |port| Op::PutFrontends(vec![(key(port), plan)]);
    let vpc = Op::PutVpc {
        id,
        vpc: VpcPlan {
            name: "red".parse().expect("name"),
            default: false,
            gateways: BTreeSet::new(),
            subnets: BTreeSet::new(),
        },
        stale_gateways: Vec::new(),
    };
    let run = |memory: &mut Memory, op: &Op| {
        assert!(apply::apply(memory, &devices, &mut None, std::slice::from_ref(op)).is_clean());
    };
    let marked = |memory: &Memory| memory.state.vpcs[&100].flags & vpc_flags::SERVICES != 0;

    let mut memory = Memory::default();
    run(&mut memory, &vpc);
    assert_eq!(memory.state.vpcs[&100], VpcRecord { vni: 100, generation: 1, flags: 0, pad: 0 });
    // Killed after the first write: marked, and no frontend.
    let mut killed = memory.clone();
    killed.abort_at = Some(killed.writes() + 2);
    assert!(apply::apply(&mut killed, &devices, &mut None, &[put(80)]).aborted);
    assert!(marked(&killed) && killed.state.services.services.is_empty());
    run(&mut memory, &put(80));
    let before = memory.writes();
    run(&mut memory, &put(81));
    assert_eq!(memory.writes() - before, 1, "marked once");
    // Neither the VPC written again nor a bump takes it away.
    run(&mut memory, &vpc);
    run(&mut memory, &Op::BumpGeneration(id));
    run(&mut memory, &Op::RemoveFrontends(vec![key(80)]));
    assert!(marked(&memory));
    run(&mut memory, &Op::RemoveFrontends(vec![key(81)]));
    assert!(!marked(&memory));
    // Services that are there first.
    let mut memory = Memory::default();
    run(&mut memory, &put(80));
    run(&mut memory, &vpc);
    assert!(marked(&memory));
}
