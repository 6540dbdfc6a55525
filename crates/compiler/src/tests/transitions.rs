//! Every state between two plans decides every packet as one of the two does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use flowloom_bpf_abi::{PolicyValue, peer_flags};
use flowloom_model::{Direction, EndpointKey};
use ipnet::IpNet;

use super::{seed, worlds};
use crate::oracle::Packet;
use crate::worldgen::{self, Rng};
use crate::*;

/// The maps of a node.
#[derive(Clone, Default, PartialEq, Debug)]
struct Maps {
    generations: BTreeMap<VpcId, u32>,
    vpcs: BTreeMap<VpcId, VpcPlan>,
    nodes: BTreeMap<IpAddr, NodeAddress>,
    ipcache: BTreeMap<(VpcId, IpNet), Peer>,
    slots: BTreeMap<PolicySlot, PolicyEntries>,
    endpoints: BTreeMap<EndpointId, EndpointPlan>,
    addresses: BTreeMap<(VpcId, IpAddr), EndpointId>,
}

/// A verdict with its rule and flags; none = no endpoint, or nothing answered.
type Answer = Option<(u8, u32, u8)>;

fn answer(value: PolicyValue) -> (u8, u32, u8) {
    (value.verdict, value.rule, value.flags)
}

impl Maps {
    /// Applies an operation write by write, calling `after` behind each.
    fn apply(&mut self, op: &Op, mut after: impl FnMut(&Self)) {
        match op {
            Op::PutVpc { id, vpc, .. } => {
                self.vpcs.insert(*id, vpc.clone());
                self.generations.entry(*id).or_insert(1);
            }
            Op::RemoveVpc { id, .. } => {
                self.vpcs.remove(id);
                self.generations.remove(id);
            }
            Op::PutNode { address, node } => {
                self.nodes.insert(*address, node.clone());
            }
            Op::RemoveNode { address, .. } => {
                self.nodes.remove(address);
            }
            Op::AddEntries { slot, entries } => {
                for (key, value) in entries {
                    self.slots.get_mut(slot).expect("a slot in force").insert(*key, *value);
                    after(self);
                }
            }
            Op::RemoveEntries { slot, keys } => {
                for key in keys {
                    self.slots.get_mut(slot).expect("a slot in force").remove(key);
                    after(self);
                }
            }
            Op::PutPeers(peers) => {
                for (key, peer) in peers {
                    self.ipcache.insert(*key, *peer);
                    after(self);
                }
            }
            Op::RemovePeers(keys) => {
                for key in keys {
                    self.ipcache.remove(key).expect("only what is there is removed");
                    after(self);
                }
            }
            Op::PutSlots(slots) => {
                for (slot, entries) in slots {
                    self.slots.insert(*slot, entries.clone());
                    after(self);
                }
            }
            Op::FreeSlots(slots) => {
                for slot in slots {
                    self.slots.remove(slot).expect("only what is there is freed");
                    after(self);
                }
            }
            Op::PutEndpoint(endpoint) => {
                self.endpoints.insert(endpoint.id, endpoint.clone());
                for ip in &endpoint.ips {
                    self.addresses.insert((endpoint.vpc, *ip), endpoint.id);
                }
            }
            Op::RemoveAddresses { endpoint, ips } => {
                self.addresses.retain(|(vpc, ip), id| {
                    !(*vpc == endpoint.vpc && ips.contains(ip) && *id == endpoint.id)
                });
            }
            Op::RemoveEndpoint(endpoint) => {
                self.endpoints.remove(&endpoint.id);
                self.addresses.retain(|_, id| *id != endpoint.id);
            }
            // Services have a check of their own.
            Op::PutLists(_)
            | Op::PutRanges(_)
            | Op::PutFrontends(_)
            | Op::RemoveFrontends(_)
            | Op::RemoveRanges(_)
            | Op::RemoveLists(_) => {}
            Op::BumpGeneration(vpc) => *self.generations.get_mut(vpc).expect("the vpc is there") += 1,
        }
        after(self);
    }

    fn peer(&self, vpc: VpcId, ip: IpAddr) -> Option<Peer> {
        const LENGTHS: [u8; 13] = [128, 64, 32, 29, 28, 24, 16, 12, 10, 8, 7, 0, 14];
        LENGTHS.iter().find_map(|len| {
            let net = IpNet::new(ip, *len).ok()?.trunc();
            self.ipcache.get(&(vpc, net)).copied()
        })
    }

    fn decide(&self, endpoint: &EndpointPlan, direction: Direction, packet: Packet) -> Answer {
        let slot = match direction {
            Direction::Egress => endpoint.egress_slot,
            Direction::Ingress => endpoint.ingress_slot,
        };
        let entries = self.slots.get(&slot).expect("an endpoint names only slots in force");
        let peer = self.peer(endpoint.vpc, packet.peer)?;
        lookup(entries, peer.identity, packet.protocol, packet.port).map(answer)
    }

    fn of(plan: &NodePlan) -> Self {
        let mut maps = Self::default();
        for op in diff(&NodePlan::default(), plan) {
            maps.apply(&op, |_| {});
        }
        maps
    }
}

/// A connection that is probed after every write.
struct Probe {
    key: EndpointKey,
    direction: Direction,
    packet: Packet,
    allowed: Vec<Answer>,
    end: Answer,
    /// (revision, generation, decision) as a conntrack entry keeps it.
    cached: Option<(u32, u32, Answer)>,
}

impl Probe {
    fn check(&mut self, maps: &Maps, context: &dyn Fn() -> String) {
        let record = maps.endpoints.values().find(|e| e.key == self.key);
        let fresh = record.and_then(|endpoint| maps.decide(endpoint, self.direction, self.packet));
        assert!(
            self.allowed.contains(&fresh),
            "{} {:?} {:?}: {fresh:?} is none of {:?}; {}",
            self.key,
            self.direction,
            self.packet,
            self.allowed,
            context()
        );
        let Some(endpoint) = record else {
            self.cached = None;
            return;
        };
        // Nobody has such an address, so no connection with it is tracked.
        if maps.peer(endpoint.vpc, self.packet.peer).is_some_and(|p| p.flags & peer_flags::UNASSIGNED != 0) {
            self.cached = None;
            return;
        }
        let stamp = (endpoint.revision, maps.generations[&endpoint.vpc]);
        match self.cached {
            Some((revision, generation, _)) if (revision, generation) == stamp => {}
            _ => self.cached = Some((stamp.0, stamp.1, fresh)),
        }
    }
}

fn probes(old: &NodePlan, new: &NodePlan, worlds: [&flowloom_model::World; 2], rng: &mut Rng) -> Vec<Probe> {
    let maps = [Maps::of(old), Maps::of(new)];
    let keys: BTreeSet<&EndpointKey> = old.endpoints.keys().chain(new.endpoints.keys()).collect();
    let mut probes = Vec::new();
    for key in keys {
        let records = [old.endpoints.get(key), new.endpoints.get(key)];
        for direction in [Direction::Egress, Direction::Ingress] {
            for n in 0..4 {
                let packet = worldgen::packet(worlds[n % 2], key, rng);
                let decide = |at: usize| {
                    records[at].and_then(|e: &EndpointPlan| maps[at].decide(e, direction, packet))
                };
                let (before, after) = (decide(0), decide(1));
                let mut allowed = vec![before, after];
                // An endpoint that comes back under another number is gone for a moment.
                if let [Some(a), Some(b)] = records
                    && (a.id != b.id || a.vpc != b.vpc)
                {
                    allowed.push(None);
                }
                probes.push(Probe { key: key.clone(), direction, packet, allowed, end: after, cached: None });
            }
        }
    }
    probes
}

/// Worlds that went wrong: an address that nobody had came with new rules, and a flow met in between kept what was said of it then.
const REPORTED: [u64; 1] = [15_797_819];

#[test]
fn no_packet_meets_a_mixture_of_two_plans() {
    let seed = seed();
    let node = worldgen::local_node();
    let (mut writes, mut checks, mut transient, mut stand_ins) = (0u64, 0u64, 0u64, 0u64);
    let drawn = (0..worlds(70)).map(|number| seed.wrapping_add(number));
    for world_seed in drawn.chain(REPORTED) {
        let mut rng = Rng::new(world_seed);
        let mut world = worldgen::world(&mut rng);
        let mut numbers = Numbers::default();
        let mut old = compile(&world, &node, &mut numbers).plan;
        let mut maps = Maps::of(&old);
        for step in 0..3 {
            let before = world.clone();
            worldgen::mutate(&mut world, &mut rng);
            if rng.one_in(3) {
                worldgen::mutate(&mut world, &mut rng);
            }
            if rng.one_in(3) {
                numbers.release_before(numbers.epoch());
            }
            let new = compile(&world, &node, &mut numbers).plan;
            let mut probes = probes(&old, &new, [&before, &world], &mut rng);
            probes.iter_mut().for_each(|p| p.check(&maps, &|| "before".to_owned()));
            let ops = diff(&old, &new);
            assert_eq!(
                old == new,
                ops.is_empty() || only_names_differ(&old, &new),
                "FLOWLOOM_SEED={world_seed}"
            );
            for op in &ops {
                transient += u64::from(
                    matches!(op, Op::PutPeers(p) if p.iter().any(|(_, p)| p.identity.0 > 0x7fff_ffff)),
                );
                stand_ins += u64::from(matches!(op, Op::FreeSlots(s) if s.iter().any(|s| s.0 > 0x7fff_ffff)));
                maps.apply(op, |maps| {
                    writes += 1;
                    for probe in &mut probes {
                        checks += 1;
                        probe.check(maps, &|| {
                            format!("FLOWLOOM_SEED={world_seed} step {step} in {op:?}\nof {ops:#?}")
                        });
                    }
                });
            }
            for probe in &probes {
                let Some((_, _, kept)) = probe.cached else { continue };
                assert_eq!(
                    kept, probe.end,
                    "a tracked connection outlives the change: FLOWLOOM_SEED={world_seed} step {step}, {} {:?} {:?} of {ops:#?}",
                    probe.key, probe.direction, probe.packet
                );
            }
            let mut expected = Maps::of(&new);
            expected.generations.clone_from(&maps.generations);
            assert_eq!(maps, expected, "FLOWLOOM_SEED={world_seed} step {step}");
            assert_eq!(diff(&new, &new), []);
            old = new;
        }
    }
    println!(
        "seed {seed}: {writes} writes, {checks} checks, {transient} transient peers, {stand_ins} stand-ins"
    );
    // A replayed seed, or a shorter run, need not meet the rarest case.
    let usual = std::env::var_os("FLOWLOOM_SEED").is_none() && worlds(100) >= 100;
    assert!(transient > 0 && (stand_ins > 0 || !usual), "the hard cases never occurred");
}

/// Plans that differ in what no map holds: names of rule and identity numbers.
fn only_names_differ(old: &NodePlan, new: &NodePlan) -> bool {
    let strip = |plan: &NodePlan| NodePlan {
        rules: Default::default(),
        identities: Default::default(),
        ..plan.clone()
    };
    strip(old) == strip(new)
}

#[test]
fn a_compilation_that_starts_from_the_last_one_equals_one_from_scratch() {
    let seed = seed();
    let node = worldgen::local_node();
    let mut resumed = 0u64;
    for number in 0..worlds(400) {
        let world_seed = seed.wrapping_add(number);
        let mut rng = Rng::new(world_seed);
        let mut world = worldgen::world(&mut rng);
        let mut numbers = Numbers::default();
        let mut cache = CompilerCache::default();
        for step in 0..6 {
            let (mut apart, stored) = (numbers.clone(), numbers.clone());
            let options = CompileOptions::default();
            let before_resumed = cache.resumed();
            let scratch = compile(&world, &node, &mut apart);
            let quick = compile_with(&world, &node, options, &mut numbers, &mut cache);
            assert!(
                numbers == stored || numbers.version() != stored.version(),
                "what is to be stored is not told"
            );
            assert_eq!(quick.conditions, scratch.conditions, "FLOWLOOM_SEED={world_seed} step {step}");
            // An attempt that had to start anew may have taken numbers that retire at once.
            if cache.resumed() > before_resumed {
                assert_eq!(quick.plan, scratch.plan, "FLOWLOOM_SEED={world_seed} step {step}");
                assert_eq!(numbers, apart, "FLOWLOOM_SEED={world_seed} step {step}");
            }
            worldgen::mutate(&mut world, &mut rng);
            if rng.one_in(3) {
                worldgen::mutate(&mut world, &mut rng);
            }
            if rng.one_in(2) {
                // Put together anew: nothing is shared with the one before.
                world.endpoints = world.endpoints.iter().map(|(k, e)| (k.clone(), e.clone())).collect();
            }
        }
        resumed += cache.resumed();
    }
    println!("{resumed} compilations started from the last one");
    assert!(resumed > worlds(100), "{resumed}");
}
