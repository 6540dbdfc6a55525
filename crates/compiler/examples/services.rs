//! How long services take at size: `cargo run --release -p flowloom-compiler --example services`.
//!
//! Prints medians of several runs; ratios between rows count, not absolute times (shared machines).

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use flowloom_compiler::{CompileOptions, CompilerCache, HeldServices, NodePlan, Numbers, compile_with, diff};
use flowloom_model::{
    Backend, BackendState, DefaultPolicy, NameError, Node, NodeName, Protocol, Service, ServicePort, Vni,
    Vpc, VpcName, World,
};

fn name<T: std::str::FromStr<Err = NameError>>(text: &str) -> T {
    text.parse().expect("a valid name")
}

fn service(number: usize, backends: usize) -> Service {
    let address = |n: usize| IpAddr::from(Ipv4Addr::from(0x0a80_0000 + n as u32));
    let backend = |at: usize| Backend {
        node: Some(name(&format!("n{}", 1 + at % 10))),
        state: BackendState::Ready,
        zones: BTreeSet::new(),
        nodes: BTreeSet::new(),
    };
    Service {
        vpc: name("default"),
        name: name(&format!("ns.s{number}")),
        ports: vec![ServicePort {
            name: None,
            protocol: Protocol::Tcp,
            port: 80,
            node_port: None,
            host_addresses: BTreeSet::new(),
            backends: (0..backends)
                .map(|at| ((address(number * backends + at), 8080), backend(at)))
                .collect(),
        }],
        cluster_ips: [IpAddr::from(Ipv4Addr::from(0x0a60_0000 + number as u32))].into(),
        external_ips: BTreeSet::new(),
        load_balancer_ips: BTreeSet::new(),
        affinity: None,
        internal_local: false,
        external_local: false,
        source_ranges: Vec::new(),
        health_check_port: None,
    }
}

fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let value = work();
    (start.elapsed(), value)
}

fn percentiles(mut times: Vec<Duration>) -> String {
    times.sort();
    format!("median {:?}, p99 {:?}", times[times.len() / 2], times[times.len() * 99 / 100])
}

fn case(services: usize, backends: usize) {
    let node: NodeName = name("n1");
    let mut world = World::default();
    for n in 1..=10 {
        let name: NodeName = name(&format!("n{n}"));
        let addresses = vec![format!("192.0.2.{n}").parse().expect("an address")];
        world.nodes.insert(name.clone(), Node { name, addresses, zone: None });
    }
    let vpc: VpcName = name("default");
    let default_policy = DefaultPolicy::Allow;
    world.vpcs.insert(vpc.clone(), Vpc { name: vpc.clone(), vni: Vni::new(1), default_policy });
    for number in 0..services {
        let service = service(number, backends);
        world.services.insert((vpc.clone(), service.name.clone()), Arc::new(service));
    }
    let (mut numbers, mut cache) = (Numbers::default(), CompilerCache::default());
    let options = CompileOptions::default();
    let (cold, mut plan) = timed(|| compile_with(&world, &node, options, &mut numbers, &mut cache).plan);
    let (fill, ops) = timed(|| diff(&NodePlan::default(), &plan));
    println!(
        "{services} services x {backends}: cold compile {cold:?}, first diff {fill:?} ({} ops)",
        ops.len()
    );
    let held = HeldServices {
        frontends: plan.services.frontends().map(|(key, f)| (*key, (f.service, f.list))).collect(),
        lists: plan.services.lists().map(|(id, list)| (id, list.to_vec())).collect(),
        ..HeldServices::default()
    };
    let mut restarted = Numbers::default();
    let (again, same) = timed(|| {
        restarted.adopt_services(held);
        compile_with(&world, &node, options, &mut restarted, &mut CompilerCache::default()).plan
    });
    println!("  after a restart: {again:?}, the same plan: {}", same == plan);
    let (mut slices, mut comes, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..300 {
        // One EndpointSlice: a backend changes.
        let key = (vpc.clone(), name(&format!("ns.s{}", round % services)));
        let held = Arc::make_mut(world.services.get_mut(&key).expect("a service"));
        let backend = held.ports[0].backends.values_mut().next().expect("a backend");
        backend.state = match backend.state {
            BackendState::Ready => BackendState::NotReady,
            _ => BackendState::Ready,
        };
        let (time, next) = timed(|| {
            let next = compile_with(&world, &node, options, &mut numbers, &mut cache).plan;
            std::hint::black_box(diff(&plan, &next));
            next
        });
        slices.push(time);
        plan = next;
        // One Service more, one less.
        let one = service(services, backends);
        let key = (vpc.clone(), one.name.clone());
        if world.services.remove(&key).is_none() {
            world.services.insert(key, Arc::new(one));
        }
        let (time, next) = timed(|| {
            let next = compile_with(&world, &node, options, &mut numbers, &mut cache).plan;
            std::hint::black_box(diff(&plan, &next));
            next
        });
        comes.push(time);
        plan = next;
    }
    for _ in 0..9 {
        whole.push(timed(|| compile_with(&world, &node, options, &mut numbers, &mut cache)).0);
    }
    println!("  one slice, compile and diff: {}", percentiles(slices));
    println!("  one service more or less: {}", percentiles(comes));
    println!("  nothing changed, nobody says so: {}", percentiles(whole));
}

fn main() {
    case(1_000, 2);
    case(10_000, 2);
    case(10_000, 10);
}
