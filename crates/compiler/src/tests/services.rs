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
        let services = plan.frontends().map(|(key, plan)| (*key, *plan)).collect();
        let mut maps = Self { services, ..Self::default() };
        for (id, list) in plan.lists() {
            maps.backends.extend(list.iter().zip(0..).map(|(b, at)| ((id, at), *b)));
            maps.members.extend(list.iter().map(|b| (id, b.ip, b.port)));
        }
        maps.ranges = plan.ranges().collect();
        maps
    }

    /// What an agent finds there after a restart.
    fn held(&self) -> HeldServices {
        let frontends = self.services.iter().map(|(key, plan)| (*key, (plan.service, plan.list))).collect();
        let mut held = HeldServices { frontends, ..HeldServices::default() };
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
        if rng.one_in(2) {
            // Put together anew: nothing is shared with the one before.
            world.services =
                world.services.iter().map(|(key, service)| (key.clone(), service.clone())).collect();
        }
        let next = compile_with(&world, &here, options, &mut numbers, &mut cache);
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

mod named {
    //! Cases with names.

    use std::sync::Arc;

    use flowloom_model::{
        Backend, BackendState, DefaultPolicy, Node, NodeName, Protocol, Service, ServicePort, Vni, Vpc, World,
    };

    use super::super::sample::{here, ip, net};
    use super::*;

    fn name<T: std::str::FromStr<Err = flowloom_model::NameError>>(text: &str) -> T {
        text.parse().unwrap()
    }

    /// The default VPC on nodes `n1` (here, zone east) and `n2` (west).
    fn world() -> World {
        let mut world = World::default();
        for (n, address, zone) in [("n1", "192.0.2.1", "east"), ("n2", "192.0.2.2", "west")] {
            let name: NodeName = name(n);
            let node = Node { name: name.clone(), addresses: vec![ip(address)], zone: Some(zone.to_owned()) };
            world.nodes.insert(name, node);
        }
        let vpc: VpcName = name("default");
        let policy = DefaultPolicy::Allow;
        world.vpcs.insert(vpc.clone(), Vpc { name: vpc, vni: Vni::new(1), default_policy: policy });
        world
    }

    fn backend(node: &str, state: BackendState) -> Backend {
        Backend { node: Some(name(node)), state, zones: BTreeSet::new(), nodes: BTreeSet::new() }
    }

    /// `10.96.0.1:80` with these backends at 10.1.0.1, .2 ...
    fn service(called: &str, backends: &[Backend]) -> Service {
        let backends = backends.iter().zip(1..);
        Service {
            vpc: name("default"),
            name: name(called),
            ports: vec![ServicePort {
                name: None,
                protocol: Protocol::Tcp,
                port: 80,
                node_port: None,
                host_addresses: BTreeSet::new(),
                backends: backends.map(|(b, n)| ((ip(&format!("10.1.0.{n}")), 8080), b.clone())).collect(),
            }],
            cluster_ips: [ip("10.96.0.1")].into(),
            external_ips: BTreeSet::new(),
            load_balancer_ips: BTreeSet::new(),
            affinity: None,
            internal_local: false,
            external_local: false,
            source_ranges: Vec::new(),
            health_check_port: None,
        }
    }

    fn add(world: &mut World, service: Service) {
        world.services.insert((service.vpc.clone(), service.name.clone()), Arc::new(service));
    }

    fn compiled(world: &World) -> Compilation {
        compile(world, &here(), &mut Numbers::default())
    }

    /// Backends (last number of their addresses) and flags of a frontend.
    fn front(plan: &NodePlan, address: &str, port: u16, scope: Scope) -> Option<(Vec<u8>, u32)> {
        let (_, front) = plan
            .services
            .frontends()
            .find(|(k, _)| k.ip == ip(address) && k.protocol == 6 && k.port == port && k.scope == scope)?;
        let last = |b: &BackendPlan| match b.ip {
            IpAddr::V4(ip) => ip.octets()[3],
            IpAddr::V6(ip) => ip.octets()[15],
        };
        let list = plan.services.lists().find(|(id, _)| *id == front.list).map(|(_, list)| list);
        assert_eq!(front.count as usize, list.map_or(0, |list| list.len()));
        Some((list.into_iter().flat_map(|list| list.iter().map(last)).collect(), front.flags))
    }

    #[test]
    fn a_local_policy_outside_is_silent_only_while_another_node_serves() {
        use service_flags::{KEEP_SOURCE, NODE_PORT, SILENT};
        let with = |backends: &[Backend]| {
            let mut world = world();
            let mut service = Service { external_local: true, ..service("web", backends) };
            service.load_balancer_ips = [ip("198.51.100.1")].into();
            service.ports[0].node_port = Some(30080);
            service.health_check_port = Some(31000);
            add(&mut world, service);
            compiled(&world).plan
        };
        let (mine, other) = (backend("n1", BackendState::Ready), backend("n2", BackendState::Ready));
        let plan = with(&[mine.clone(), other.clone()]);
        assert_eq!(front(&plan, "198.51.100.1", 80, Scope::Outside), Some((vec![1], KEEP_SOURCE)));
        assert_eq!(front(&plan, "198.51.100.1", 80, Scope::Inside), Some((vec![1, 2], 0)));
        assert_eq!(
            front(&plan, "192.0.2.1", 30080, Scope::Outside),
            Some((vec![1], KEEP_SOURCE | NODE_PORT))
        );
        assert_eq!(front(&plan, "192.0.2.1", 30080, Scope::Inside), Some((vec![1, 2], NODE_PORT)));
        assert_eq!(front(&plan, "192.0.2.2", 30080, Scope::Inside), None, "another node's port is its own");
        assert_eq!(front(&plan, "10.96.0.1", 80, Scope::Outside), None, "a ClusterIP is for inside");
        assert_eq!(
            plan.services.health_checks().map(|(_, _, p, n)| (p, n)).collect::<Vec<_>>(),
            [(31000, 1)]
        );

        let plan = with(std::slice::from_ref(&other));
        assert_eq!(front(&plan, "198.51.100.1", 80, Scope::Outside), Some((vec![], SILENT)));
        assert_eq!(plan.services.health_checks().next().map(|(_, _, _, n)| n), Some(0));
        let ending = backend("n1", BackendState::Terminating);
        let plan = with(&[ending, other]);
        assert_eq!(front(&plan, "198.51.100.1", 80, Scope::Outside), Some((vec![1], KEEP_SOURCE)));
        assert_eq!(plan.services.health_checks().next().map(|(_, _, _, n)| n), Some(0), "it is not ready");
        let plan = with(&[]);
        assert_eq!(front(&plan, "198.51.100.1", 80, Scope::Outside), Some((vec![], 0)), "nobody has one");
    }

    #[test]
    fn hints_count_only_when_every_ready_backend_has_them_and_one_is_for_here() {
        let hinted = |node: &str, zone: &str| Backend {
            zones: [zone.to_owned()].into(),
            ..backend(node, BackendState::Ready)
        };
        let used = |backends: &[Backend]| {
            let mut world = world();
            add(&mut world, service("web", backends));
            front(&compiled(&world).plan, "10.96.0.1", 80, Scope::Inside).unwrap().0
        };
        let (east, west) = (hinted("n1", "east"), hinted("n2", "west"));
        assert_eq!(used(&[east.clone(), west.clone()]), [1]);
        assert_eq!(used(&[west.clone(), west.clone()]), [1, 2], "nothing is for this zone");
        let plain = backend("n2", BackendState::Ready);
        assert_eq!(used(&[east.clone(), west.clone(), plain]), [1, 2, 3], "one has no hint");
        let sick = backend("n2", BackendState::NotReady);
        assert_eq!(used(&[east.clone(), west.clone(), sick]), [1], "what is not ready needs none");
        let for_node = Backend { nodes: [here()].into(), ..west.clone() };
        let for_other = Backend { nodes: [name("n2")].into(), ..east };
        assert_eq!(used(&[for_node, for_other]), [1], "the node comes before the zone");
    }

    #[test]
    fn ending_backends_serve_when_nothing_is_ready_and_keep_their_connections_until_they_are_gone() {
        let with = |states: &[BackendState]| as_ports(&[Protocol::Tcp], states);
        use BackendState::{NotReady, Ready, Terminating};
        let used = |plan: &NodePlan| front(plan, "10.96.0.1", 80, Scope::Inside).unwrap().0;
        let (all, ending, gone) = (with(&[Ready, Ready]), with(&[Ready, Terminating]), with(&[Ready]));
        assert_eq!((used(&all), used(&ending)), (vec![1, 2], vec![1]));
        assert_eq!(used(&with(&[Terminating, NotReady])), [1]);
        assert_eq!(ended_backends(&all.services, &ending.services), []);
        let ended = ended_backends(&ending.services, &gone.services);
        assert_eq!(ended.iter().map(|e| e.backend).collect::<Vec<_>>(), [(ip("10.1.0.2"), 8080)]);
        assert_eq!(ended_backends(&gone.services, &ServicePlan::default()).len(), 1);
    }

    /// One service of these ports, all with backends in these states.
    fn as_ports(protocols: &[Protocol], states: &[BackendState]) -> NodePlan {
        let mut world = world();
        let backends: Vec<Backend> = states.iter().map(|s| backend("n2", *s)).collect();
        let mut web = service("web", &backends);
        let port = web.ports[0].clone();
        web.ports = protocols.iter().map(|p| ServicePort { protocol: *p, ..port.clone() }).collect();
        add(&mut world, web);
        compiled(&world).plan
    }

    /// A Pod that drains fails its readiness, and one whose probe fails once comes back: neither is gone.
    #[test]
    fn connections_were_cut_when_a_backend_failed_its_readiness() {
        use BackendState::{NotReady, Ready, Terminating};
        let with =
            |states: &[BackendState]| as_ports(&[Protocol::Tcp, Protocol::Udp, Protocol::Sctp], states);
        let ended = |was: &NodePlan, is: &NodePlan| -> Vec<_> {
            let ended = ended_backends(&was.services, &is.services);
            let mut ended: Vec<_> = ended.iter().map(|e| (e.protocol, e.backend.0)).collect();
            ended.sort_unstable();
            ended
        };
        let (sick, gone) = (with(&[Ready, NotReady]), with(&[Ready]));
        let second = ip("10.1.0.2");
        for before in [with(&[Ready, Ready]), with(&[Ready, Terminating])] {
            assert_eq!(ended(&before, &sick), [(17, second)], "datagrams find another backend");
            assert_eq!(ended(&before, &gone), [(6, second), (17, second), (132, second)]);
        }
        // Whatever it was last, once it is gone its connections are over.
        assert_eq!(ended(&sick, &gone), [(6, second), (132, second)]);
    }

    #[test]
    fn what_two_services_want_is_the_first_ones_until_it_goes() {
        let mut world = world();
        add(&mut world, service("a", &[backend("n1", BackendState::Ready)]));
        let other = [backend("n1", BackendState::NotReady), backend("n2", BackendState::Ready)];
        add(&mut world, service("b", &other));
        let first = compiled(&world);
        assert_eq!(front(&first.plan, "10.96.0.1", 80, Scope::Inside), Some((vec![1], 0)));
        let said: Vec<String> =
            first.conditions.iter().map(|c| format!("{}: {}", c.object, c.message)).collect();
        assert!(
            said.iter()
                .any(|s| s == "service default/b: tcp 10.96.0.1:80 belongs to service a: choose another"),
            "{said:?}"
        );
        let key = |n: &str| (name::<VpcName>("default"), name(n));
        let explained = explain_service(&world, &here(), &first.plan, &key("b")).unwrap();
        assert_eq!(explained.frontends[0].taken_by, Some(name("a")));
        world.services.remove(&key("a"));
        let second = compiled(&world);
        assert_eq!(front(&second.plan, "10.96.0.1", 80, Scope::Inside), Some((vec![2], 0)));
        assert!(!second.conditions.iter().any(|c| matches!(c.object, ObjectRef::Service { .. })));
    }

    #[test]
    fn source_ranges_are_for_load_balancer_addresses_whoever_asks() {
        let mut world = world();
        let mut web = service("web", &[backend("n1", BackendState::Ready)]);
        web.load_balancer_ips = [ip("198.51.100.1")].into();
        web.external_ips = [ip("198.51.100.2")].into();
        web.source_ranges = vec![net("192.0.2.0/24")];
        add(&mut world, web);
        let plan = compiled(&world).plan;
        let flags = |address, scope| front(&plan, address, 80, scope).unwrap().1;
        assert_eq!(flags("198.51.100.1", Scope::Outside), service_flags::RANGES);
        assert_eq!(flags("198.51.100.1", Scope::Inside), service_flags::RANGES);
        assert_eq!(flags("198.51.100.2", Scope::Outside), 0);
        assert_eq!(flags("198.51.100.2", Scope::Inside), 0);
        assert_eq!(flags("10.96.0.1", Scope::Inside), 0);
        assert_eq!(plan.services.ranges().map(|(_, net)| net).collect::<Vec<_>>(), [net("192.0.2.0/24")]);
    }

    #[test]
    fn sctp_that_needs_another_port_is_told_and_not_only_dropped() {
        let told = |change: &dyn Fn(&mut ServicePort)| {
            let mut world = world();
            let mut web = service("web", &[backend("n1", BackendState::Ready)]);
            web.ports[0].protocol = Protocol::Sctp;
            change(&mut web.ports[0]);
            add(&mut world, web);
            let said = compiled(&world).conditions;
            let of_service = said.iter().filter(|c| matches!(c.object, ObjectRef::Service { .. }));
            of_service.filter(|c| c.message.contains("sctp")).count()
        };
        assert_eq!(told(&|_| ()), 1, "backends listen at 8080");
        assert_eq!(told(&|port| port.port = 8080), 0);
        let node_port = |port: &mut ServicePort| {
            port.port = 8080;
            port.node_port = Some(30080);
        };
        assert_eq!(told(&node_port), 1);
        assert_eq!(told(&|port| port.protocol = Protocol::Tcp), 0);
    }

    #[test]
    fn sctp_from_outside_to_another_nodes_backend_is_told_and_not_only_dropped() {
        let told = |node, change: &dyn Fn(&mut Service)| {
            let mut world = world();
            let mut web =
                service("web", &[backend("n1", BackendState::Ready), backend(node, BackendState::Ready)]);
            (web.ports[0].protocol, web.ports[0].port) = (Protocol::Sctp, 8080);
            web.external_ips = [ip("198.51.100.2")].into();
            change(&mut web);
            add(&mut world, web);
            let said = compiled(&world).conditions;
            said.iter().filter(|c| c.message.contains("sctp from outside")).count()
        };
        assert_eq!(told("n2", &|_| ()), 1);
        assert_eq!(told("n2", &|web| web.load_balancer_ips = std::mem::take(&mut web.external_ips)), 1);
        assert_eq!(told("n1", &|_| ()), 0, "all are on the node that is asked");
        assert_eq!(told("n2", &|web| web.external_local = true), 0);
        assert_eq!(told("n2", &|web| web.external_ips.clear()), 0, "nobody outside knows it");
        assert_eq!(
            told("n2", &|web| web.external_ips = [ip("2001:db8::9")].into()),
            0,
            "no backend of the family"
        );
        assert_eq!(told("n2", &|web| web.ports[0].protocol = Protocol::Tcp), 0);
    }

    #[test]
    fn an_explanation_says_why_each_backend_is_used_or_not() {
        use BackendState::{NotReady, Ready, Terminating};
        let mut world = world();
        let mut web = service(
            "web",
            &[
                backend("n1", Ready),
                backend("n2", Ready),
                backend("n1", Terminating),
                backend("n1", NotReady),
            ],
        );
        web.internal_local = true;
        add(&mut world, web);
        let plan = compiled(&world).plan;
        let key = (name("default"), name("web"));
        let explained = explain_service(&world, &here(), &plan, &key).unwrap();
        let why: Vec<BackendUse> = explained.frontends[0].backends.iter().map(|b| b.used).collect();
        assert_eq!(
            why,
            [BackendUse::Ready, BackendUse::NotLocal, BackendUse::Terminating, BackendUse::NotReady]
        );
        assert_eq!(explained.frontends[0].answer, FrontendAnswer::Backend);
        assert_eq!(explain_service(&world, &here(), &plan, &(name("default"), name("x"))), None);
    }

    /// 97.
    #[test]
    fn tcp_and_udp_on_one_port_overwrote_each_other() {
        let mut world = world();
        let mut dns = service("dns", &[backend("n1", BackendState::Ready)]);
        let mut udp = dns.ports[0].clone();
        udp.protocol = Protocol::Udp;
        udp.backends = [((ip("10.1.0.9"), 53), backend("n2", BackendState::Ready))].into();
        dns.ports.push(udp);
        add(&mut world, dns);
        let plan = compiled(&world).plan;
        let ports = plan.services.frontends().filter(|(key, _)| key.port == 80);
        let found: Vec<_> = ports.map(|(key, front)| (key.protocol, front.service, front.list)).collect();
        let [(6, tcp, a), (17, udp, b)] = found.as_slice() else { panic!("{found:?}") };
        assert!(tcp != udp && a != b, "{found:?}");
    }

    /// 105 and 107c.
    #[test]
    fn a_rolling_update_left_the_only_local_backend_unused_and_cut_its_connections() {
        use BackendState::{Ready, Terminating};
        let with = |states: [(&str, BackendState); 2]| {
            let mut world = world();
            let hinted = |(node, state): (&str, BackendState)| {
                let zones = if state == Ready { [String::from("east")].into() } else { BTreeSet::new() };
                Backend { zones, ..backend(node, state) }
            };
            let mut web = Service { external_local: true, ..service("web", &states.map(hinted)) };
            web.load_balancer_ips = [ip("198.51.100.1")].into();
            add(&mut world, web);
            compiled(&world).plan
        };
        let (before, during) =
            (with([("n1", Ready), ("n2", Ready)]), with([("n1", Terminating), ("n2", Ready)]));
        let outside = |plan: &NodePlan| front(plan, "198.51.100.1", 80, Scope::Outside).unwrap().0;
        assert_eq!((outside(&before), outside(&during)), (vec![1], vec![1]));
        assert_eq!(
            front(&during, "10.96.0.1", 80, Scope::Inside).unwrap().0,
            [2],
            "others take new connections"
        );
        assert_eq!(ended_backends(&before.services, &during.services), [], "and it keeps its own");
    }

    /// 111.
    #[test]
    fn a_changed_affinity_or_traffic_policy_was_ignored() {
        let mut world = world();
        let both = [backend("n1", BackendState::Ready), backend("n2", BackendState::Ready)];
        add(&mut world, service("web", &both));
        let (mut numbers, key) = (Numbers::default(), (name::<VpcName>("default"), name("web")));
        let mut plan = compile(&world, &here(), &mut numbers).plan;
        for change in [
            (|s: &mut Service| s.affinity = Some(60)) as fn(&mut Service),
            |s| s.affinity = Some(61),
            |s| s.internal_local = true,
            |s| s.affinity = None,
        ] {
            change(Arc::make_mut(world.services.get_mut(&key).unwrap()));
            let next = compile(&world, &here(), &mut numbers).plan;
            let ops = diff(&plan, &next);
            assert!(ops.iter().any(|op| matches!(op, Op::PutFrontends(f) if f.len() == 1)), "{ops:?}");
            plan = next;
        }
    }

    /// 123.
    #[test]
    fn a_client_inside_was_bound_by_the_external_policy() {
        let mut world = world();
        let mut web =
            Service { external_local: true, ..service("web", &[backend("n2", BackendState::Ready)]) };
        web.load_balancer_ips = [ip("198.51.100.1")].into();
        web.ports[0].node_port = Some(30080);
        add(&mut world, web);
        let plan = compiled(&world).plan;
        for (address, port) in [("10.96.0.1", 80), ("198.51.100.1", 80), ("192.0.2.1", 30080)] {
            assert_eq!(front(&plan, address, port, Scope::Inside).unwrap().0, [1], "{address}");
        }
    }

    #[test]
    fn a_change_of_one_service_compiles_one() {
        let mut world = world();
        for n in 0..200 {
            let mut one = service(&format!("s{n}"), &[backend("n1", BackendState::Ready)]);
            one.cluster_ips = [IpAddr::from([10, 96, 1, n])].into();
            add(&mut world, one);
        }
        let (mut numbers, mut cache) = (Numbers::default(), CompilerCache::default());
        let options = CompileOptions::default();
        let first = compile_with(&world, &here(), options, &mut numbers, &mut cache);
        assert_eq!(cache.services.compiled, 200);
        let key = (name::<VpcName>("default"), name("s7"));
        let one = Arc::make_mut(world.services.get_mut(&key).unwrap());
        one.ports[0].backends.insert((ip("10.1.0.9"), 8080), backend("n2", BackendState::Ready));
        let second = compile_with(&world, &here(), options, &mut numbers, &mut cache);
        assert_eq!(cache.services.compiled, 201);
        let ops = diff(&first.plan, &second.plan);
        assert!(
            matches!(ops.as_slice(), [Op::PutLists(a), Op::PutFrontends(b), Op::RemoveLists(c)]
                if (a.len(), b.len(), c.len()) == (1, 1, 1)),
            "{ops:?}"
        );
        assert_eq!(
            diff(&second.plan, &compile_with(&world, &here(), options, &mut numbers, &mut cache).plan),
            []
        );
    }
}
