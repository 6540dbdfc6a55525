//! Services over the in-memory maps: killed at every write, restarted, finished. No root, no kernel.

use flowloom_compiler::service_oracle;
use flowloom_compiler::worldgen::{Rng, local_node};
use flowloom_compiler::{HeldServices, NodePlan, Numbers, compile, diff};
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
