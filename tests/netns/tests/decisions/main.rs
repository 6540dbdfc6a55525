//! One decision: the oracle (rules walked one by one, a list of connections), the compiled entries in user space (the compiler's lookup under
//! the shipped logic) and the kernel (`BPF_PROG_TEST_RUN` of the shipped programs over maps filled from plans) agree on every packet of random
//! sequences in random worlds, while the worlds change. And they do not agree when a fault is planted.
//!
//! `FLOWLOOM_SEED` repeats a run, `FLOWLOOM_WORLDS` is how many worlds it looks at.

mod fault;
mod lab;
mod model;
mod tables;
mod traffic;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow};
use flowloom_bpf_abi::{event_kind, verdict};
use flowloom_bpf_logic::Verdict as Action;
use flowloom_bpf_logic::fake::FakeFrame;
use flowloom_compiler::worldgen::{self, Rng};
use flowloom_compiler::{RuleId, Verdict};
use flowloom_datapath::Hook;
use flowloom_datapath::sys::RunContext;
use flowloom_model::{Direction, Endpoint, EndpointKey, NodeName, Vni, VpcName, World};

use crate::fault::Fault;
use crate::lab::Lab;
use crate::model::{Answer, Connections, Ground, Probe, Seen, Shape, Via};
use crate::traffic::Flow;

/// Worlds that are compiled and applied together, each in VPCs of its own: a swap of slots costs a grace period, for one slot or for many.
const TOGETHER: u64 = 8;
/// Policies that a world goes through, and packets under each.
const PACKETS: [usize; 4] = [34, 26, 24, 22];
/// Most flows of a world.
const FLOWS: usize = 14;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |s| s.parse().expect("a number"))
}

/// One random world among those of a batch.
struct Place {
    number: u64,
    world: World,
    rng: Rng,
    flows: Vec<Flow>,
    /// Endpoints that went and may come back.
    gone: Vec<Arc<Endpoint>>,
    /// The last packets, with what all three said of each.
    history: VecDeque<String>,
}

/// VPCs of one world renamed and numbered apart from those of the others. Only the first one of a batch has the default VPC.
fn apart(world: World, at: u64) -> World {
    let renamed = |vpc: &VpcName| -> VpcName {
        if at == 0 { vpc.clone() } else { format!("w{at}-{vpc}").parse().expect("a name") }
    };
    let mut out = World { nodes: world.nodes, ..World::default() };
    let vpcs: Vec<_> = world.vpcs.into_values().collect();
    for (n, mut vpc) in vpcs.into_iter().rev().enumerate() {
        vpc.name = renamed(&vpc.name);
        // The default VPC is number 1.
        let n = if vpc.name.is_default() { 0 } else { n as u32 + 1 };
        vpc.vni = Vni::new(at as u32 * 4 + 1 + n);
        out.vpcs.insert(vpc.name.clone(), vpc);
    }
    for ((vpc, name), mut subnet) in world.subnets {
        subnet.vpc = renamed(&vpc);
        out.subnets.insert((renamed(&vpc), name), subnet);
    }
    for ((vpc, name), mut group) in world.security_groups {
        group.vpc = renamed(&vpc);
        out.security_groups.insert((renamed(&vpc), name), group);
    }
    for ((vpc, name), mut group) in world.cidr_groups {
        group.vpc = renamed(&vpc);
        out.cidr_groups.insert((renamed(&vpc), name), group);
    }
    for endpoint in world.endpoints.into_values() {
        let endpoint = Endpoint { vpc: renamed(&endpoint.vpc), ..(*endpoint).clone() };
        out.endpoints.insert(endpoint.key(), endpoint.into());
    }
    out
}

/// Ends of flows come and go under connections that stay: as they were, with other labels or groups, or on another node.
fn churn(place: &mut Place) {
    let rng = &mut place.rng;
    for mut endpoint in std::mem::take(&mut place.gone) {
        let taken = place
            .world
            .endpoints
            .values()
            .any(|e| e.vpc == endpoint.vpc && e.ips.iter().any(|ip| endpoint.ips.contains(ip)));
        let other = place.world.endpoints.values().find(|e| e.vpc == endpoint.vpc);
        if let Some(other) = other.filter(|_| rng.one_in(2)) {
            let endpoint = Arc::make_mut(&mut endpoint);
            endpoint.labels = other.labels.clone();
            endpoint.security_groups = other.security_groups.clone();
        }
        if rng.one_in(4) {
            Arc::make_mut(&mut endpoint).node =
                if rng.one_in(2) { worldgen::local_node() } else { "n2".parse().expect("a name") };
        }
        if !taken && !place.world.endpoints.contains_key(&endpoint.key()) {
            place.world.endpoints.insert(endpoint.key(), endpoint);
        }
    }
    if place.flows.is_empty() || rng.one_in(2) {
        return;
    }
    let ends = place.flows[rng.below(place.flows.len())].ends();
    let end = *rng.pick(&ends);
    let vpc = &place.flows[rng.below(place.flows.len())].vpc;
    let local = |e: &Endpoint| e.node == worldgen::local_node();
    let others = place.world.endpoints.values().filter(|e| local(e) && !e.ips.contains(&end)).count();
    let key = place.world.endpoints.values().find(|e| e.vpc == *vpc && e.ips.contains(&end)).map(|e| e.key());
    if let Some(endpoint) = key.filter(|_| others > 0).and_then(|key| place.world.endpoints.remove(&key)) {
        place.gone.push(endpoint);
    }
}

fn together(places: &[Place]) -> World {
    let mut all = World { nodes: places[0].world.nodes.clone(), ..World::default() };
    for place in places {
        let world = place.world.clone();
        all.vpcs.extend(world.vpcs);
        all.subnets.extend(world.subnets);
        all.security_groups.extend(world.security_groups);
        all.cidr_groups.extend(world.cidr_groups);
        all.endpoints.extend(world.endpoints);
    }
    all
}

/// What a run counted.
#[derive(Default)]
struct Shares {
    decisions: u64,
    worlds: u64,
    /// By fate, and by the tier of the rule that decided.
    by: BTreeMap<(Seen, String), u64>,
    /// By how the packet came in.
    ways: BTreeMap<&'static str, u64>,
    /// By what was remembered.
    memory: BTreeMap<&'static str, u64>,
    /// By family and protocol.
    kinds: BTreeMap<String, u64>,
}

/// A disagreement.
struct Mismatch {
    world: u64,
    text: String,
}

struct Bench<'a> {
    lab: &'a mut Lab,
    node: NodeName,
    connections: Connections,
    shares: Shares,
}

impl Bench<'_> {
    /// Runs the worlds `first..first + count`, which a batch at `seed + first` begins.
    fn batch(&mut self, seed: u64, first: u64, count: u64, check: bool) -> Result<Option<Mismatch>> {
        self.connections.clear();
        self.lab.forget()?;
        let mut places: Vec<Place> = Vec::new();
        for at in 0..count {
            let mut rng = Rng::new(seed.wrapping_add(first + at));
            let world = loop {
                let world = worldgen::world(&mut rng);
                if world.endpoints.values().any(|e| e.node == self.node && !e.ips.is_empty()) {
                    break world;
                }
            };
            let mut world = apart(world, at);
            if let Some(one) = places.first() {
                world.nodes = one.world.nodes.clone();
            }
            let number = first + at;
            places.push(Place {
                number,
                world,
                rng,
                flows: Vec::new(),
                gone: Vec::new(),
                history: VecDeque::new(),
            });
        }
        let direct = Rng::new(seed.wrapping_add(first) ^ 1).one_in(2);
        for (change, packets) in PACKETS.into_iter().enumerate() {
            if change > 0 {
                for place in &mut places {
                    worldgen::mutate(&mut place.world, &mut place.rng);
                    churn(place);
                    place.history.push_back("-- the world changes --".to_owned());
                }
            }
            self.lab.apply(&together(&places), direct)?;
            for _ in 0..packets {
                for at in 0..places.len() {
                    if let Some(found) = self.step(&mut places, at, direct)? {
                        return Ok(Some(found));
                    }
                }
            }
        }
        self.shares.worlds += count;
        if check && let Err(text) = self.lab.compare().and_then(|()| self.lab.holds_the_plan()) {
            return Ok(Some(Mismatch { world: first, text: format!("after the batch: {text}") }));
        }
        Ok(None)
    }

    /// One packet of one world, if it has any.
    fn step(&mut self, places: &mut [Place], at: usize, direct: bool) -> Result<Option<Mismatch>> {
        let node = self.node.clone();
        for _ in 0..80 {
            let place = &mut places[at];
            let ground = Ground { world: &place.world, node: &node, direct };
            if place.flows.len() < FLOWS && (place.flows.is_empty() || place.rng.one_in(3)) {
                let Some(flow) = traffic::flow(&ground, &place.world, &mut place.rng) else { continue };
                // Most talk that is allowed and answered: what is not says little for long.
                let lively = flow.opening(&ground).is_some_and(|(probe, answers)| {
                    answers && ground.judge(&mut Connections::default(), &probe).seen == Seen::Passed
                });
                if !lively && !place.rng.one_in(30) {
                    continue;
                }
                place.flows.push(flow.clone());
                // The same addresses and ports in other VPCs.
                for vpc in place.world.vpcs.keys() {
                    if let Some(twin) = flow.elsewhere(vpc, &ground)
                        && place.rng.one_in(2)
                    {
                        place.flows.push(twin);
                    }
                }
            }
            let mut which = place.rng.below(place.flows.len());
            if place.flows[which].refused && !place.rng.one_in(3) {
                which = place.rng.below(place.flows.len());
            }
            let Some(probe) = place.flows[which].packet(&ground, &mut place.rng) else { continue };
            let (seen, found) = self.decide(&ground, &probe, &mut place.history)?;
            place.flows[which].refused = seen != Seen::Passed;
            return Ok(found.map(|text| Mismatch { world: place.number, text }));
        }
        Ok(None)
    }

    /// Asks all three about a packet.
    fn decide(
        &mut self,
        ground: &Ground<'_>,
        probe: &Probe,
        history: &mut VecDeque<String>,
    ) -> Result<(Seen, Option<String>)> {
        let expected = ground.judge(&mut self.connections, probe);
        let endpoint = |key: &EndpointKey| self.lab.plan.endpoints.get(key).context("not in the plan");
        let (hook, frame, ifindex, arrived_on) = match &probe.via {
            Via::Endpoint(key) => {
                let endpoint = endpoint(key)?;
                let (ifindex, mac) = self.lab.device(endpoint);
                (Hook::FromEndpoint, traffic::frame(probe, endpoint.mac, mac), ifindex, 0)
            }
            via => {
                let model::Place::Local(key) = ground.place(&probe.vpc, probe.dst.0) else {
                    return Err(anyhow!("{probe:?} goes to no endpoint"));
                };
                let endpoint = endpoint(&key)?;
                let (ifindex, mac) = self.lab.device(endpoint);
                let frame = traffic::frame(probe, mac, endpoint.mac);
                match via {
                    Via::Uplink => (Hook::FromUplink, frame, self.lab.uplink, 0),
                    Via::Host => (Hook::ToEndpoint, frame, ifindex, 0),
                    _ => (Hook::ToEndpoint, frame, ifindex, self.lab.uplink),
                }
            }
        };
        let mirror = FakeFrame::new(frame.clone(), ifindex);
        mirror.0.borrow_mut().arrived_on = arrived_on;
        let now = flowloom_testkit::settled_second().as_nanos() as u64;
        let mapped = |end: model::End| (flowloom_bpf_abi::Addr::from(end.0).0, end.1);
        let src_is_lo = mapped(probe.src) <= mapped(probe.dst);
        let action = self.lab.tables.run(hook, &mirror, now, src_is_lo);
        let logic = (action.0, mirror.bytes().data);
        let context = RunContext { ifindex, ingress_ifindex: arrived_on, ..RunContext::default() };
        let kernel = self.lab.run(hook, &frame, &context)?;

        let seen = [fate(probe, &logic), fate(probe, &kernel)];
        let line = format!(
            "{} {:?} {} {}:{} -> {}:{} {:?}: oracle {:?}, entries {:?}, kernel {:?}",
            probe.vpc,
            probe.via,
            probe.protocol,
            probe.src.0,
            probe.src.1,
            probe.dst.0,
            probe.dst.1,
            probe.shape,
            expected.seen,
            seen[0],
            seen[1]
        );
        history.push_back(line);
        let attribution = self.attributed(&expected);
        if seen != [expected.seen; 2] || logic != kernel || attribution.is_some() {
            let text = self.explain(ground, probe, &expected, history, [&logic, &kernel], attribution);
            return Ok((expected.seen, Some(text)));
        }
        self.count(probe, &expected);
        Ok((expected.seen, None))
    }

    /// Whether every decision that was made now is the oracle's, rule and all.
    fn attributed(&self, expected: &Answer) -> Option<String> {
        let plan = &self.lab.plan;
        let mut made = Vec::new();
        for event in self.lab.tables.events.borrow().iter().filter(|e| e.kind == event_kind::VERDICT) {
            let key = plan.endpoints.values().find(|e| e.id.0 == event.endpoint).map(|e| e.key.clone());
            let direction = if event.direction == flowloom_bpf_abi::direction::EGRESS {
                Direction::Egress
            } else {
                Direction::Ingress
            };
            let word = match event.verdict {
                verdict::ALLOW => Verdict::Allow,
                verdict::DROP => Verdict::Drop,
                _ => Verdict::Reject,
            };
            made.push((key, direction, word, plan.rules.get(&RuleId(event.rule)).cloned()));
        }
        let asked: Vec<_> = expected
            .judged
            .iter()
            .map(|j| (Some(j.endpoint.clone()), j.direction, j.decision.verdict, j.decision.rule.clone()))
            .collect();
        let right = if expected.anew { made == asked } else { made.iter().all(|m| asked.contains(m)) };
        (!right).then(|| format!("decisions made {made:?}\nof the oracle  {asked:?}"))
    }

    fn explain(
        &self,
        ground: &Ground<'_>,
        probe: &Probe,
        expected: &Answer,
        history: &VecDeque<String>,
        [logic, kernel]: [&(i32, Vec<u8>); 2],
        attribution: Option<String>,
    ) -> String {
        let mut out = String::new();
        let _ = writeln!(out, "the packet: {probe:?}");
        let _ =
            writeln!(out, "oracle : {:?} ({})", expected.seen, if expected.anew { "new" } else { "known" });
        for judged in &expected.judged {
            let d = &judged.decision;
            let _ = writeln!(
                out,
                "         {} {:?}: {:?} by {:?} (tier {:?}, stateful {})",
                judged.endpoint, judged.direction, d.verdict, d.rule, d.tier, d.stateful
            );
        }
        let _ = writeln!(out, "entries: {:?}, returned {}", fate(probe, logic), logic.0);
        for event in self.lab.tables.events.borrow().iter() {
            let _ = writeln!(out, "         {event:?}");
        }
        let _ = writeln!(out, "kernel : {:?}, returned {}", fate(probe, kernel), kernel.0);
        if logic.1 != kernel.1 {
            let _ = writeln!(out, "frames differ\n  entries {:02x?}\n  kernel  {:02x?}", logic.1, kernel.1);
        }
        if let Some(text) = attribution {
            let _ = writeln!(out, "{text}");
        }
        let ends = [probe.src.0.to_string(), probe.dst.0.to_string()];
        let _ = writeln!(out, "what these two ends said before:");
        let of_them = history.iter().filter(|l| l.starts_with("--") || ends.iter().all(|e| l.contains(&**e)));
        for line in of_them {
            let _ = writeln!(out, "  {line}");
        }
        for ip in [probe.src.0, probe.dst.0] {
            let _ = writeln!(out, "{ip} is {:?}", ground.place(&probe.vpc, ip));
            let of = |e: &&Arc<Endpoint>| e.vpc == probe.vpc && e.ips.contains(&ip);
            let Some(endpoint) = ground.world.endpoints.values().find(of) else { continue };
            let _ = writeln!(out, "  labels {:?}, ports {:?}", endpoint.labels, endpoint.named_ports);
            for name in &endpoint.security_groups {
                let group = ground.world.security_groups.get(&(probe.vpc.clone(), name.clone()));
                let Some(group) = group else { continue };
                let _ = writeln!(
                    out,
                    "  group {name} tier {} (default deny: ingress {:?}, egress {:?})",
                    group.tier, group.default_deny_ingress, group.default_deny_egress
                );
                for rule in &group.rules {
                    let _ = writeln!(out, "    {rule:?}");
                }
            }
        }
        out
    }

    fn count(&mut self, probe: &Probe, expected: &Answer) {
        self.shares.decisions += 1;
        let tier = match expected.judged.last() {
            None => "nobody asked".to_owned(),
            Some(j) => match (&j.decision.rule, j.decision.tier) {
                (Some(_), Some(tier)) => format!("tier {tier}"),
                _ => "default".to_owned(),
            },
        };
        *self.shares.by.entry((expected.seen, tier)).or_default() += 1;
        let way = match &probe.via {
            Via::Endpoint(_) => "from an endpoint",
            Via::Host => "from this host",
            Via::Stack => "from the stack",
            Via::Uplink => "from the uplink",
        };
        *self.shares.ways.entry(way).or_default() += 1;
        let asked = self.lab.tables.events.borrow().iter().any(|e| e.kind == event_kind::VERDICT);
        let memory = match (expected.anew, asked) {
            (true, _) => "no connection",
            (false, true) => "connection, decided anew",
            (false, false) => "connection, decision current",
        };
        *self.shares.memory.entry(memory).or_default() += 1;
        let kind = match (probe.shape, probe.protocol) {
            (Shape::Error(..), _) => "icmp error".to_owned(),
            (Shape::Icmp(..), _) => "icmp other".to_owned(),
            (Shape::Echo { .. }, _) => "icmp echo".to_owned(),
            (_, 6) => "tcp".to_owned(),
            (_, 17) => "udp".to_owned(),
            (_, 132) => "sctp".to_owned(),
            (_, other) => format!("protocol {other}"),
        };
        let family = if probe.src.0.is_ipv4() { "ipv4" } else { "ipv6" };
        *self.shares.kinds.entry(format!("{family} {kind}")).or_default() += 1;
    }
}

/// What became of a packet: what the program returned, and whose answer the frame is now.
fn fate(probe: &Probe, (action, frame): &(i32, Vec<u8>)) -> Seen {
    if *action == Action::DROP.0 {
        return Seen::Dropped;
    }
    let (dst, l4, length) = if probe.src.0.is_ipv4() { (30, 34, 4) } else { (38, 54, 16) };
    let source: Vec<u8> = match probe.src.0 {
        std::net::IpAddr::V4(ip) => ip.octets().to_vec(),
        std::net::IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    if frame.get(dst..dst + length) != Some(&source[..]) {
        return Seen::Passed;
    }
    let echo = matches!(probe.shape, Shape::Echo { .. });
    if echo && frame.get(l4).is_some_and(|kind| [0, 129].contains(kind)) {
        Seen::Echoed
    } else {
        Seen::Refused
    }
}

impl Shares {
    fn print(&self, seconds: f64) {
        println!(
            "{} decisions in {} worlds, {seconds:.1} s, {:.0} per second",
            self.decisions,
            self.worlds,
            self.decisions as f64 / seconds
        );
        let share = |n: u64| 100.0 * n as f64 / self.decisions.max(1) as f64;
        for ((seen, tier), n) in &self.by {
            println!("  {:<8} {tier:<13} {n:>8} {:>6.2} %", format!("{seen:?}"), share(*n));
        }
        let other = self.ways.iter().chain(&self.memory).map(|(k, n)| ((*k).to_owned(), *n));
        for (name, n) in other.chain(self.kinds.clone()) {
            println!("  {name:<28} {n:>8} {:>6.2} %", share(n));
        }
    }
}

/// Runs worlds until the first disagreement.
fn run(lab: &mut Lab, seed: u64, worlds: u64, check: bool) -> Result<(Shares, Option<Mismatch>)> {
    let node = worldgen::local_node();
    let mut bench = Bench { lab, node, connections: Connections::default(), shares: Shares::default() };
    let mut first = 0;
    while first < worlds {
        let count = TOGETHER.min(worlds - first);
        if let Some(found) = bench.batch(seed, first, count, check)? {
            return Ok((bench.shares, Some(found)));
        }
        first += count;
    }
    Ok((bench.shares, None))
}

#[test]
fn oracle_entries_and_kernel_decide_every_packet_alike() {
    let seed = number("FLOWLOOM_SEED", 0x00f1_0e10);
    let worlds = number("FLOWLOOM_WORLDS", 2000);
    println!("FLOWLOOM_SEED={seed} FLOWLOOM_WORLDS={worlds}");
    let ns = lab::devices().expect("devices");
    ns.run_in(|| {
        let mut lab = Lab::open().expect("datapath");
        let start = Instant::now();
        let (shares, found) = run(&mut lab, seed, worlds, true).expect("run");
        if let Some(found) = found {
            let batch = found.world / TOGETHER * TOGETHER;
            panic!(
                "world {} of FLOWLOOM_SEED={seed}: alone with its batch by FLOWLOOM_SEED={} FLOWLOOM_WORLDS={TOGETHER}\n{}",
                found.world,
                seed.wrapping_add(batch),
                found.text
            );
        }
        shares.print(start.elapsed().as_secs_f64());
        assert_eq!(shares.worlds, worlds);
        assert!(shares.decisions >= worlds * 100, "{} decisions are too few", shares.decisions);
        if worlds >= 100 {
            let fates: std::collections::BTreeSet<Seen> = shares.by.keys().map(|(seen, _)| *seen).collect();
            assert_eq!(fates.len(), 4, "every fate occurs: {fates:?}");
            assert_eq!(shares.ways.len(), 4, "every way in occurs: {:?}", shares.ways);
            assert_eq!(shares.memory.len(), 3, "{:?}", shares.memory);
        }
    })
    .expect("namespace");
}

#[test]
fn every_planted_fault_is_found() {
    let seed = number("FLOWLOOM_SEED", 0x00f1_0e10);
    println!("FLOWLOOM_SEED={seed}");
    let ns = lab::devices().expect("devices");
    ns.run_in(|| {
        let mut lab = Lab::open().expect("datapath");
        for fault in Fault::ALL {
            lab.plant(fault).expect("plant");
            let (shares, found) = run(&mut lab, seed, 2000, false).expect("run");
            let Some(found) = found else { panic!("{fault:?} was not found in 2000 worlds") };
            println!("{fault:?}: found in world {} after {} decisions", found.world, shares.decisions);
        }
    })
    .expect("namespace");
}
