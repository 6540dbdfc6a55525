//! What the rules of a VPC ask about peers. Facts nobody asks about split no identity.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;

use flowloom_model::{
    CidrGroup, Direction, Endpoint, Entity, GroupName, PortName, Remote, SecurityGroup, Selector, VpcName,
    World,
};
use ipnet::IpNet;

use crate::fault::{Fault, planted};
use crate::spec::protocol_numbers;
use crate::{EndpointFacts, Pins, PolicySpec, SpecRemote, everywhere, private_prefixes};

/// The union over all groups of a VPC.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Questions {
    pub(crate) prefixes: Prefixes,
    label_keys: BTreeSet<String>,
    groups: BTreeSet<GroupName>,
    peer_ports: BTreeSet<PortName>,
    /// Some rule asks whether an address lies in the VPC's subnets.
    pub(crate) inside: bool,
}

impl Questions {
    /// Collects what the groups of a VPC ask, and the policies that endpoints are held at there.
    pub(crate) fn of<'a>(
        world: &'a World,
        vpc: &VpcName,
        groups: impl Iterator<Item = &'a SecurityGroup>,
        pins: &Pins,
    ) -> Self {
        let held = pins.iter().filter(|(key, _)| key.vpc == *vpc).flat_map(|(_, held)| held.specs());
        Self::new(groups, held, |name| world.cidr_groups.get(&(vpc.clone(), name.clone())))
    }

    /// `cidr_group` looks a CIDR group up.
    fn new<'a, 'h>(
        groups: impl Iterator<Item = &'a SecurityGroup>,
        held: impl Iterator<Item = &'h PolicySpec>,
        cidr_group: impl Fn(&flowloom_model::CidrGroupName) -> Option<&'a CidrGroup>,
    ) -> Self {
        let mut questions = Self::default();
        let mut prefixes = BTreeSet::new();
        for rule in held.flat_map(|spec| &spec.rules) {
            questions.peer_ports.extend(rule.peer_ports.iter().cloned());
            match &rule.remote {
                SpecRemote::Any => {}
                SpecRemote::Cidrs(entries) => {
                    prefixes.extend(entries.iter().flat_map(|e| e.except.iter().copied().chain([e.cidr])));
                }
                SpecRemote::Group(name) => {
                    questions.groups.insert(name.clone());
                }
                SpecRemote::Selector(selector) => {
                    let expressions = selector.expressions.iter().map(|e| &e.key);
                    questions.label_keys.extend(selector.labels.keys().chain(expressions).cloned());
                }
                SpecRemote::Entities(set) => set.iter().for_each(|e| questions.entity(*e, &mut prefixes)),
            }
        }
        for rule in groups.flat_map(|g| &g.rules) {
            if rule.direction == Direction::Egress {
                questions.peer_ports.extend(rule.named_ports.iter().cloned());
            }
            match &rule.remote {
                Remote::Any => {}
                Remote::Cidr(entry) => prefixes.extend(with_holes(entry)),
                Remote::CidrGroup(name) => {
                    prefixes
                        .extend(cidr_group(name).into_iter().flat_map(|g| &g.entries).flat_map(with_holes));
                }
                Remote::Group(name) => {
                    questions.groups.insert(name.clone());
                }
                Remote::Selector(selector) => questions.label_keys.extend(keys(selector)),
                Remote::Entities(set) => set.iter().for_each(|e| questions.entity(*e, &mut prefixes)),
            }
        }
        questions.prefixes = Prefixes::new(prefixes);
        questions
    }

    fn entity(&mut self, entity: Entity, prefixes: &mut BTreeSet<IpNet>) {
        let [v4, v6] = everywhere();
        match entity {
            Entity::World | Entity::Cluster => self.inside = true,
            Entity::WorldIpv4 => {
                self.inside = true;
                prefixes.insert(v4);
            }
            Entity::WorldIpv6 => {
                self.inside = true;
                prefixes.insert(v6);
            }
            Entity::Private => prefixes.extend(private_prefixes()),
            Entity::All | Entity::Host | Entity::RemoteNode | Entity::None => {}
        }
    }

    /// What is asked about an endpoint.
    pub(crate) fn endpoint_facts(&self, endpoint: &Endpoint) -> EndpointFacts {
        let asked = |key: &str| self.label_keys.contains(key);
        EndpointFacts {
            labels: endpoint
                .labels
                .iter()
                .filter(|(k, _)| asked(k))
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect(),
            groups: endpoint.security_groups.intersection(&self.groups).cloned().collect(),
            named_ports: endpoint
                .named_ports
                .iter()
                .filter(|p| self.peer_ports.contains(&p.name))
                .flat_map(|p| protocol_numbers(p.protocol).iter().map(|n| (p.name.to_string(), *n, p.port)))
                .collect(),
        }
    }
}

fn with_holes(entry: &flowloom_model::CidrEntry) -> impl Iterator<Item = IpNet> {
    std::iter::once(entry.cidr.trunc()).chain(entry.except.iter().map(IpNet::trunc))
}

fn keys(selector: &Selector) -> impl Iterator<Item = String> {
    selector.labels.keys().chain(selector.expressions.iter().map(|e| &e.key)).cloned()
}

/// Prefixes that rules name, asked by what they cover.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Prefixes {
    all: HashSet<IpNet>,
    /// The same in order: numbers are handed out in it.
    sorted: BTreeSet<IpNet>,
    /// Prefix lengths in use, IPv4 and IPv6.
    lengths: [BTreeSet<u8>; 2],
    pub(crate) fault: Fault,
}

impl Prefixes {
    fn new(prefixes: BTreeSet<IpNet>) -> Self {
        let mut lengths = [BTreeSet::new(), BTreeSet::new()];
        for prefix in &prefixes {
            lengths[usize::from(prefix.addr().is_ipv6())].insert(prefix.prefix_len());
        }
        Self { all: prefixes.iter().copied().collect(), sorted: prefixes, lengths, fault: Fault::None }
    }

    pub(crate) fn contains(&self, prefix: &IpNet) -> bool {
        self.all.contains(prefix)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &IpNet> {
        self.sorted.iter()
    }

    /// Every prefix that contains all of `net`.
    pub(crate) fn covering(&self, net: IpNet) -> BTreeSet<IpNet> {
        let lengths = &self.lengths[usize::from(net.addr().is_ipv6())];
        let mut found: BTreeSet<IpNet> = lengths
            .range(..=net.prefix_len())
            .filter_map(|len| IpNet::new(net.addr(), *len).ok().map(|n| n.trunc()))
            .filter(|n| self.all.contains(n))
            .collect();
        if planted!(self.fault, CoveringForgotten)
            && let Some(longest) = found.iter().max_by_key(|n| n.prefix_len()).copied()
        {
            found = [longest].into();
        }
        found
    }
}

/// The prefix of one address.
pub(crate) fn host(ip: IpAddr) -> IpNet {
    IpNet::from(ip)
}
