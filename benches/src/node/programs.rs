//! The programs alone: what one packet costs at each hook, whatever the maps hold.

use anyhow::{Context, Result};
use flowloom_tests_netns::stats;

use super::Effort;
use crate::measure::{Goal, against, alone};
use crate::programs::{Hook, LIFE, Scale, World};
use crate::report::{INSTRUCTIONS, Measure, STATES};

const BENCH: &str = "node: programs alone";
/// Runs of one packet that the kernel averages.
const REPEAT: u32 = 20_000;
/// Connections opened per round: the table of new ones is full after a while, as it is on a node that is in use.
const LIVES: usize = 400;

/// Nanoseconds by hook, by the size of the maps, and what the verifier says.
pub(super) fn programs(effort: Effort) -> Result<Vec<Measure>> {
    let object = flowloom_bpf_object::object()?;
    let scales = [
        ("1 rule", Scale { rules: 1, peers: 0 }),
        ("1,000 rules", Scale { rules: 1000, peers: 0 }),
        ("10,000 rules", Scale { rules: 10_000, peers: 0 }),
        ("10,000 peers", Scale { rules: 1, peers: 10_000 }),
        ("50,000 endpoints known", Scale { rules: 1, peers: 50_000 }),
    ];
    let mut worlds = scales.iter().map(|(_, s)| World::new(object, *s)).collect::<Result<Vec<_>>>()?;
    let mut open = vec![Vec::new(); worlds.len()];
    let mut first = vec![Vec::new(); worlds.len()];
    let mut hooks = vec![Vec::new(); Hook::ALL.len()];
    let mut lives = vec![Vec::new(); LIFE.len()];
    // Twice as many as traffic gets: each is short.
    for round in 0..=effort.rounds * 2 {
        for (i, world) in worlds.iter_mut().enumerate() {
            // The best of a few: what another process took from one of them is not the program's.
            let ns = best((0..3).map(|_| world.established(REPEAT)))?;
            let mut packets: Vec<_> = (0..LIFE.len()).map(|_| Vec::new()).collect();
            for _ in 0..LIVES {
                for (times, ns) in packets.iter_mut().zip(world.life()?) {
                    times.push(ns);
                }
            }
            let middle: Vec<f64> =
                packets.iter().map(|t| crate::stats::median(t).map_or(0.0, |m| m.value)).collect();
            if round == 0 {
                continue;
            }
            open[i].push(ns);
            first[i].push(*middle.first().context("no packets")?);
            if i == 0 {
                for (times, ns) in lives.iter_mut().zip(middle) {
                    times.push(ns);
                }
                for (times, hook) in hooks.iter_mut().zip(Hook::ALL) {
                    times.push(best((0..3).map(|_| world.hook(hook, REPEAT)))?);
                }
            }
        }
    }
    let mut measures = Vec::new();
    for (hook, times) in Hook::ALL.iter().zip(&hooks) {
        measures.push(alone(
            BENCH,
            &format!("{}, ns per test_run, {}", hook.name(), hook.packet()),
            times,
            "ns",
            None,
        ));
    }
    for (packet, times) in LIFE.iter().zip(&lives) {
        measures.push(alone(
            BENCH,
            &format!("from_endpoint, one run, a connection's {packet}"),
            times,
            "ns",
            None,
        ));
    }
    for (i, (what, _)) in scales.iter().enumerate().skip(1) {
        let peer = scales[0].0;
        measures.push(against(
            BENCH,
            &format!("open connection, {what}"),
            "ns",
            &open[i],
            peer,
            &open[0],
            Some(Goal::AtMost(1.03)),
        ));
        measures.push(against(
            BENCH,
            &format!("first packet, {what}"),
            "ns",
            &first[i],
            peer,
            &first[0],
            None,
        ));
    }
    for cost in stats::measure()? {
        measures.push(alone(
            BENCH,
            &format!("{}, walked by the verifier", cost.name),
            &[cost.verified.into()],
            INSTRUCTIONS,
            None,
        ));
        measures.push(alone(
            BENCH,
            &format!("{}, states the verifier kept", cost.name),
            &[cost.states.into()],
            STATES,
            None,
        ));
        measures.push(alone(
            BENCH,
            &format!("{}, loaded", cost.name),
            &[cost.instructions.into()],
            INSTRUCTIONS,
            None,
        ));
    }
    Ok(measures)
}

fn best(mut samples: impl Iterator<Item = Result<f64>>) -> Result<f64> {
    samples.try_fold(f64::INFINITY, |least, ns| ns.map(|ns| least.min(ns)))
}
