//! Small worlds written out, for tests that name what they mean.

use std::net::IpAddr;
use std::sync::Arc;

use flowloom_model::{
    Action, AllowLocalhost, Attachment, CidrEntry, DefaultPolicy, Direction, Endpoint, EndpointKey, Labels,
    NamedPort, Node, NodeName, Protocol, Remote, Rule, SecurityGroup, Selector, Subnet, Vni, Vpc, VpcName,
    World,
};

use crate::*;

/// One VPC (`red`, VNI 7) on nodes `n1` (here) and `n2`, subnet 10.1.0.0/16 and fd00:1::/64.
pub(super) struct Sample {
    pub(super) world: World,
    pub(super) numbers: Numbers,
}

pub(super) fn here() -> NodeName {
    "n1".parse().unwrap()
}

pub(super) fn net(s: &str) -> ipnet::IpNet {
    s.parse().unwrap()
}

pub(super) fn ip(s: &str) -> IpAddr {
    s.parse().unwrap()
}

pub(super) fn red() -> VpcName {
    "red".parse().unwrap()
}

pub(super) fn key(name: &str) -> EndpointKey {
    EndpointKey { vpc: red(), name: name.parse().unwrap() }
}

/// An ingress rule for anyone and everything; tests change what they speak of.
pub(super) fn rule(id: &str, priority: u16, action: Action) -> Rule {
    Rule {
        id: id.parse().unwrap(),
        priority,
        direction: Direction::Ingress,
        protocol: Protocol::Any,
        remote: Remote::Any,
        ports: Vec::new(),
        named_ports: Vec::new(),
        icmp: None,
        action,
        stateful: true,
        log: false,
    }
}

pub(super) fn cidr(s: &str) -> Remote {
    Remote::Cidr(CidrEntry { cidr: net(s), except: Vec::new() })
}

pub(super) fn except(s: &str, holes: &[&str]) -> Remote {
    Remote::Cidr(CidrEntry { cidr: net(s), except: holes.iter().map(|h| net(h)).collect() })
}

pub(super) fn by_label(key: &str, value: &str) -> Remote {
    Remote::Selector(Selector {
        labels: [(key.to_owned(), value.to_owned())].into(),
        expressions: Vec::new(),
    })
}

impl Sample {
    pub(super) fn new() -> Self {
        let mut world = World::default();
        for (name, address) in [("n1", "192.0.2.1"), ("n2", "192.0.2.2")] {
            let name: NodeName = name.parse().unwrap();
            world.nodes.insert(name.clone(), Node { name, addresses: vec![ip(address)], zone: None });
        }
        world.vpcs.insert(red(), Vpc { name: red(), vni: Vni::new(7), default_policy: DefaultPolicy::Allow });
        let subnet = Subnet {
            vpc: red(),
            name: "a".parse().unwrap(),
            cidrs: vec![net("10.1.0.0/16"), net("fd00:1::/64")],
            gateways: vec![ip("10.1.0.1"), ip("fd00:1::1")],
            exclude: Vec::new(),
            node: None,
            cni_ranges: Vec::new(),
            mtu: None,
        };
        world.subnets.insert((red(), subnet.name.clone()), subnet);
        Self { world, numbers: Numbers::default() }
    }

    /// An endpoint here, with the groups.
    pub(super) fn endpoint(mut self, name: &str, ips: &[&str], groups: &[&str]) -> Self {
        let endpoint = Endpoint {
            vpc: red(),
            name: name.parse().unwrap(),
            subnet: "a".parse().unwrap(),
            ips: ips.iter().map(|s| ip(s)).collect(),
            mac: None,
            node: here(),
            security_groups: groups.iter().map(|g| g.parse().unwrap()).collect(),
            labels: Labels::new(),
            named_ports: Vec::new(),
            attachment: Attachment::Managed,
            allow_localhost: AllowLocalhost::Policy,
        };
        self.world.endpoints.insert(endpoint.key(), endpoint.into());
        self
    }

    pub(super) fn edit(&mut self, name: &str) -> &mut Endpoint {
        Arc::make_mut(self.world.endpoints.get_mut(&key(name)).unwrap())
    }

    pub(super) fn label(mut self, name: &str, k: &str, v: &str) -> Self {
        self.edit(name).labels.insert(k.to_owned(), v.to_owned());
        self
    }

    pub(super) fn port(mut self, name: &str, port_name: &str, protocol: Protocol, port: u16) -> Self {
        let port = NamedPort { name: port_name.parse().unwrap(), protocol, port };
        self.edit(name).named_ports.push(port);
        self
    }

    pub(super) fn group(mut self, name: &str, tier: u8, rules: Vec<Rule>) -> Self {
        let group = SecurityGroup {
            vpc: red(),
            name: name.parse().unwrap(),
            tier,
            default_deny_ingress: None,
            default_deny_egress: None,
            rules,
        };
        self.world.security_groups.insert((red(), group.name.clone()), group);
        self
    }

    pub(super) fn edit_group(&mut self, name: &str) -> &mut SecurityGroup {
        self.world.security_groups.get_mut(&(red(), name.parse().unwrap())).unwrap()
    }

    pub(super) fn compile(&mut self) -> Compilation {
        compile(&self.world, &here(), &mut self.numbers)
    }

    /// What the compiled entries say; the oracle and `explain` must say the same.
    pub(super) fn verdict(
        &mut self,
        endpoint: &str,
        direction: Direction,
        peer: &str,
        protocol: u8,
        port: u16,
    ) -> Verdict {
        let plan = self.compile().plan;
        let record = &plan.endpoints[&key(endpoint)];
        let slot = if direction == Direction::Egress { record.egress_slot } else { record.ingress_slot };
        let (_, found) = plan.peer(record.vpc, ip(peer)).unwrap();
        let value = lookup(&plan.entries(slot), found.identity, protocol, port).unwrap();
        let verdict = match value.verdict {
            1 => Verdict::Allow,
            2 => Verdict::Drop,
            3 => Verdict::Reject,
            other => panic!("verdict {other}"),
        };
        let packet = oracle::Packet { peer: ip(peer), protocol, port };
        let expected = oracle::decide(&self.world, &here(), &key(endpoint), direction, packet);
        assert_eq!(verdict, expected.verdict, "compiled entries and oracle differ");
        let (own, other) = (Party::Endpoint(endpoint.parse().unwrap()), Party::Address(ip(peer)));
        let (source, destination) = if direction == Direction::Egress { (own, other) } else { (other, own) };
        let port = match protocol {
            1 | 58 => PortQuery::Icmp { kind: (port >> 8) as u8, code: port as u8 },
            _ => PortQuery::Port(port),
        };
        let answer =
            explain(&self.world, &plan, &Query { vpc: red(), source, destination, protocol, port }).unwrap();
        let judged = if direction == Direction::Egress { answer.egress } else { answer.ingress }.unwrap();
        assert_eq!(judged.verdict, verdict, "explain and compiled entries differ");
        verdict
    }

    pub(super) fn ingress(&mut self, peer: &str, protocol: u8, port: u16) -> Verdict {
        self.verdict("e", Direction::Ingress, peer, protocol, port)
    }

    pub(super) fn egress(&mut self, peer: &str, protocol: u8, port: u16) -> Verdict {
        self.verdict("e", Direction::Egress, peer, protocol, port)
    }
}
