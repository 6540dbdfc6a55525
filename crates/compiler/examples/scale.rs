//! How long compilations take at size: `cargo run --release -p flowloom-compiler --example scale`.
//!
//! Prints medians of several runs; ratios between rows count, not absolute times (shared machines).

use std::time::{Duration, Instant};

use flowloom_compiler::{CompileOptions, CompilerCache, NodePlan, Numbers, compile_with, diff};
use flowloom_model::{
    Action, AllowLocalhost, Attachment, CidrEntry, DefaultPolicy, Direction, Endpoint, EndpointKey,
    NameError, Node, NodeName, Protocol, Remote, Rule, SecurityGroup, Selector, Subnet, Vni, Vpc, VpcName,
    World,
};

fn name<T: std::str::FromStr<Err = NameError>>(text: &str) -> T {
    text.parse().expect("a valid name")
}

fn rule(at: usize, kinds: usize) -> Rule {
    let remote = match at % 3 {
        0 => Remote::Cidr(CidrEntry {
            cidr: format!("172.{}.{}.0/24", 16 + at / 256 % 16, at % 256).parse().expect("a prefix"),
            except: Vec::new(),
        }),
        1 => Remote::Selector(Selector {
            labels: [("app".to_owned(), format!("app-{}", at % kinds))].into(),
            expressions: Vec::new(),
        }),
        _ => Remote::Any,
    };
    Rule {
        id: name(&format!("r{at}")),
        priority: 1 + (at % 16384) as u16,
        direction: if at.is_multiple_of(2) { Direction::Ingress } else { Direction::Egress },
        protocol: Protocol::Tcp,
        remote,
        ports: vec![(1 + (at * 7 % 60_000) as u16, 3 + (at * 7 % 60_000) as u16)],
        named_ports: Vec::new(),
        icmp: None,
        action: if at.is_multiple_of(5) { Action::Drop } else { Action::Allow },
        stateful: true,
        log: false,
    }
}

fn world(endpoints: usize, local: usize, groups: usize, rules: usize, kinds: usize) -> World {
    let mut world = World::default();
    for n in 1..=10 {
        let name: NodeName = name(&format!("n{n}"));
        let address = format!("192.0.2.{n}").parse().expect("an address");
        world.nodes.insert(name.clone(), Node { name, addresses: vec![address], zone: None });
    }
    let vpc: VpcName = name("red");
    world.vpcs.insert(
        vpc.clone(),
        Vpc { name: vpc.clone(), vni: Vni::new(7), default_policy: DefaultPolicy::Allow },
    );
    let subnet = Subnet {
        vpc: vpc.clone(),
        name: name("a"),
        cidrs: vec!["10.0.0.0/8".parse().expect("a prefix")],
        gateways: vec!["10.0.0.1".parse().expect("an address")],
        exclude: Vec::new(),
        node: None,
        cni_ranges: Vec::new(),
        mtu: None,
    };
    world.subnets.insert((vpc.clone(), subnet.name.clone()), subnet);
    for group in 0..groups {
        let group = SecurityGroup {
            vpc: vpc.clone(),
            name: name(&format!("g{group}")),
            tier: 1,
            default_deny_ingress: None,
            default_deny_egress: None,
            rules: (0..rules / groups).map(|at| rule(at * groups + group, kinds)).collect(),
        };
        world.security_groups.insert((vpc.clone(), group.name.clone()), group);
    }
    for at in 0..endpoints {
        let address = 0x0a00_0100 + at as u32;
        let node = if at < local { 1 } else { 2 + at % 9 };
        let endpoint = Endpoint {
            vpc: vpc.clone(),
            name: name(&format!("e{at}")),
            subnet: name("a"),
            ips: vec![std::net::Ipv4Addr::from(address).into()],
            mac: None,
            node: name(&format!("n{node}")),
            security_groups: [name(&format!("g{}", at % groups))].into(),
            labels: [("app".to_owned(), format!("app-{}", at % kinds)), ("pod".to_owned(), format!("p{at}"))]
                .into(),
            named_ports: Vec::new(),
            attachment: Attachment::Managed,
            allow_localhost: AllowLocalhost::Always,
        };
        world.endpoints.insert(endpoint.key(), endpoint.into());
    }
    world
}

fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let value = work();
    (start.elapsed(), value)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn case(title: &str, mut world: World) {
    let node: NodeName = name("n1");
    let mut numbers = Numbers::default();
    let mut cache = CompilerCache::default();
    let compile = |world: &World, numbers: &mut Numbers, cache: &mut CompilerCache| {
        compile_with(world, &node, CompileOptions::default(), numbers, cache).plan
    };
    let (cold, mut plan) = timed(|| compile(&world, &mut numbers, &mut cache));
    let (fill, ops) = timed(|| diff(&NodePlan::default(), &plan));
    let entries: usize = plan.policies.keys().map(|slot| plan.entries(*slot).len()).sum();
    println!(
        "{title}: cold compile {cold:?}, first diff {fill:?} ({} ops), {} identities, {} slots, {entries} entries",
        ops.len(),
        plan.identities.len(),
        plan.policies.len()
    );
    let (mut compiles, mut diffs, mut last) = (Vec::new(), Vec::new(), 0);
    for round in 0..99 {
        let key = EndpointKey { vpc: name("red"), name: name(&format!("e{}", 50 + round)) };
        let endpoint = world.endpoints.get_mut(&key).expect("an endpoint");
        std::sync::Arc::make_mut(endpoint).labels.insert("app".to_owned(), format!("app-{}", round + 1));
        let (time, next) = timed(|| compile(&world, &mut numbers, &mut cache));
        compiles.push(time);
        let (time, ops) = timed(|| diff(&plan, &next));
        diffs.push(time);
        last = ops.len();
        plan = next;
    }
    println!("  one label: compile {:?}, diff {:?} ({last} ops)", median(compiles), median(diffs));
    let (mut compiles, mut diffs) = (Vec::new(), Vec::new());
    for round in 0..5 {
        let group = world.security_groups.values_mut().next().expect("a group");
        group.rules[0].priority = 9000 + round;
        let (time, next) = timed(|| compile(&world, &mut numbers, &mut cache));
        compiles.push(time);
        let (time, ops) = timed(|| diff(&plan, &next));
        diffs.push(time);
        last = ops.len();
        plan = next;
    }
    println!("  one rule: compile {:?}, diff {:?} ({last} ops)", median(compiles), median(diffs));
    let (same, _) = timed(|| compile(&world, &mut numbers, &mut cache));
    println!("  nothing: compile {same:?}");
}

fn main() {
    case("10,000 endpoints (100 local), 50 groups, 1,000 rules, 300 apps", world(10_000, 100, 50, 1000, 300));
    case(
        "10,000 endpoints (100 local), 1 group, 10,000 rules, 10,000 apps",
        world(10_000, 100, 1, 10_000, 10_000),
    );
    case("50,000 endpoints (250 local), 50 groups, 5,000 rules, 300 apps", world(50_000, 250, 50, 5000, 300));
}
