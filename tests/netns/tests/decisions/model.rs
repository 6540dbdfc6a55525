//! What must become of a packet, said from the rules and a list of connections alone: slow, and apart from everything that ships.
//!
//! * A packet of no connection is asked about as it is: by the sender's egress rules, then by the receiver's ingress rules. When both allow it
//!   and one of the rules is stateful, it is the start of a connection.
//! * A packet of a connection passes when both sides, under the rules in force now, allow the packet that began it.
//! * Where the rule that allows is stateless, an answer must be allowed on its own as well, in its own direction.
//! * An ICMP error is an answer to the packet it quotes. An echo reply without its request, and other ICMP, begin nothing.

use std::collections::BTreeMap;
use std::net::IpAddr;

use flowloom_compiler::Verdict;
use flowloom_compiler::oracle::{self, Decision};
use flowloom_model::{AllowLocalhost, Direction, Endpoint, EndpointKey, NodeName, VpcName, World};

/// Address and port (an echo's identifier at both ends).
pub(crate) type End = (IpAddr, u16);

/// TCP flags.
pub(crate) mod tcp {
    pub(crate) const FIN: u8 = 1;
    pub(crate) const SYN: u8 = 2;
    pub(crate) const RST: u8 = 4;
    pub(crate) const PSH: u8 = 8;
    pub(crate) const ACK: u8 = 16;
}

/// What kind of packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shape {
    /// TCP with these flags.
    Tcp(u8),
    /// UDP, SCTP, or a protocol without ports.
    Plain,
    /// Echo request or reply.
    Echo { reply: bool },
    /// ICMP that is neither echo nor error: type and code.
    Icmp(u8, u8),
    /// An ICMP error (type and code) that quotes a packet of the opposite direction.
    Error(u8, u8),
}

/// How a packet reaches the node's programs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Via {
    /// A local endpoint sent it.
    Endpoint(EndpointKey),
    /// This host's stack made it.
    Host,
    /// The stack forwards it from outside.
    Stack,
    /// It came in on the uplink, from a peer with a direct route.
    Uplink,
}

/// One packet.
#[derive(Clone, Debug)]
pub(crate) struct Probe {
    pub(crate) vpc: VpcName,
    pub(crate) via: Via,
    /// Protocol of the connection (of the quoted packet, for an error).
    pub(crate) protocol: u8,
    pub(crate) src: End,
    pub(crate) dst: End,
    pub(crate) shape: Shape,
}

impl Probe {
    /// Protocol and port that rules see.
    fn asked(&self) -> (u8, u16) {
        let icmp = if self.src.0.is_ipv4() { 1 } else { 58 };
        let (request, reply) = if self.src.0.is_ipv4() { (8, 0) } else { (128, 129) };
        match self.shape {
            Shape::Tcp(_) | Shape::Plain => (self.protocol, self.dst.1),
            Shape::Echo { reply: false } => (icmp, u16::from_be_bytes([request, 0])),
            Shape::Echo { reply: true } => (icmp, u16::from_be_bytes([reply, 0])),
            Shape::Icmp(kind, code) | Shape::Error(kind, code) => (icmp, u16::from_be_bytes([kind, code])),
        }
    }

    fn key(&self) -> (VpcName, u8, [End; 2]) {
        let mut ends = [self.src, self.dst];
        ends.sort();
        (self.vpc.clone(), self.protocol, ends)
    }
}

/// What can be seen of a packet's fate.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Seen {
    /// It goes on.
    Passed,
    /// It is gone.
    Dropped,
    /// Its sender is told no.
    Refused,
    /// The gateway answers the echo.
    Echoed,
}

/// One side's decision.
#[derive(Clone, Debug)]
pub(crate) struct Judged {
    pub(crate) endpoint: EndpointKey,
    pub(crate) direction: Direction,
    pub(crate) decision: Decision,
}

/// The oracle's answer.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) seen: Seen,
    /// In the order in which they were asked; the last one decided.
    pub(crate) judged: Vec<Judged>,
    /// Whether every side must have been asked now (no connection remembers).
    pub(crate) anew: bool,
}

/// Where an address is, seen from one VPC on one node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// An endpoint here.
    Local(EndpointKey),
    /// This host, in the default VPC.
    Host,
    /// The VPC's gateway, which answers echo and nothing else.
    Gateway,
    /// Another node, or an endpoint there.
    Remote,
    /// Beyond the host's stack.
    Stack,
    /// Nobody has it, or no way leads there.
    Nowhere,
}

struct Connection {
    origin: End,
    asked: (u8, u16),
    from_host: bool,
    /// Of the originator, of the responder.
    fin: [bool; 2],
    reset: bool,
}

impl Connection {
    fn closed(&self) -> bool {
        self.reset || self.fin == [true; 2]
    }

    fn goes_on(&mut self, shape: Shape, original: bool) {
        let Shape::Tcp(flags) = shape else { return };
        if flags & tcp::RST != 0 {
            self.reset = true;
        } else if flags & tcp::SYN == 0 {
            // Who sends on did not believe the reset.
            self.reset = false;
            self.fin[usize::from(!original)] |= flags & tcp::FIN != 0;
        }
    }
}

/// Every connection of a node.
#[derive(Default)]
pub(crate) struct Connections(BTreeMap<(VpcName, u8, [End; 2]), Connection>);

impl Connections {
    /// Forgets all.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

/// The rules in force.
#[derive(Clone, Copy)]
pub(crate) struct Ground<'a> {
    pub(crate) world: &'a World,
    pub(crate) node: &'a NodeName,
    /// The default VPC's endpoints of other nodes come without a tunnel.
    pub(crate) direct: bool,
}

impl Ground<'_> {
    fn endpoint(&self, vpc: &VpcName, ip: IpAddr) -> Option<&Endpoint> {
        self.world
            .endpoints
            .values()
            .map(std::sync::Arc::as_ref)
            .find(|e| e.vpc == *vpc && e.ips.contains(&ip))
    }

    /// Where an address is.
    pub(crate) fn place(&self, vpc: &VpcName, ip: IpAddr) -> Place {
        let subnets = || self.world.subnets.values().filter(|s| s.vpc == *vpc);
        if subnets().any(|s| s.gateways.contains(&ip)) {
            return if vpc.is_default() { Place::Host } else { Place::Gateway };
        }
        let node = self.world.nodes.values().find(|n| vpc.is_default() && n.addresses.contains(&ip));
        if let Some(node) = node {
            return if node.name == *self.node { Place::Host } else { Place::Remote };
        }
        if let Some(endpoint) = self.endpoint(vpc, ip) {
            return if endpoint.node == *self.node { Place::Local(endpoint.key()) } else { Place::Remote };
        }
        let inside = subnets().any(|s| s.cidrs.iter().any(|c| c.contains(&ip)));
        if inside || !vpc.is_default() { Place::Nowhere } else { Place::Stack }
    }

    /// How a packet with this source reaches the programs; `None` = not in a test run.
    pub(crate) fn via(&self, vpc: &VpcName, src: IpAddr, dst: IpAddr) -> Option<Via> {
        if let Place::Local(key) = self.place(vpc, src) {
            return Some(Via::Endpoint(key));
        }
        let Place::Local(_) = self.place(vpc, dst) else { return None };
        match self.place(vpc, src) {
            Place::Host => Some(Via::Host),
            Place::Stack => Some(Via::Stack),
            Place::Remote if self.direct && vpc.is_default() => Some(Via::Uplink),
            _ => None,
        }
    }

    fn ask(
        &self,
        endpoint: &EndpointKey,
        direction: Direction,
        peer: IpAddr,
        (protocol, port): (u8, u16),
        from_host: bool,
    ) -> Judged {
        let always = self.world.endpoints.get(endpoint).map(|e| e.allow_localhost);
        let decision =
            if from_host && direction == Direction::Ingress && always == Some(AllowLocalhost::Always) {
                Decision { verdict: Verdict::Allow, rule: None, tier: None, log: false, stateful: true }
            } else {
                let packet = oracle::Packet { peer, protocol, port };
                oracle::decide(self.world, self.node, endpoint, direction, packet)
            };
        Judged { endpoint: endpoint.clone(), direction, decision }
    }

    /// What must become of a packet, and of the connections.
    pub(crate) fn judge(&self, connections: &mut Connections, probe: &Probe) -> Answer {
        let key = probe.key();
        let sender = match &probe.via {
            Via::Endpoint(key) => Some(key.clone()),
            Via::Host | Via::Stack | Via::Uplink => None,
        };
        let place = self.place(&probe.vpc, probe.dst.0);
        let receiver = if let Place::Local(key) = &place { Some(key.clone()) } else { None };
        let mut run = Run {
            ground: self,
            probe,
            sender,
            receiver,
            answer: Answer { seen: Seen::Passed, judged: Vec::new(), anew: true },
        };
        let held = connections.0.get(&key);
        let original = held.is_none_or(|c| c.origin == probe.src);
        let begins = match (probe.shape, held) {
            (Shape::Error(..), None) => {
                run.answer.seen = Seen::Dropped;
                return run.answer;
            }
            (Shape::Icmp(..), _) => Some(false),
            (Shape::Echo { reply }, held) => match held {
                Some(_) if reply != original => None,
                Some(_) => Some(false),
                None => Some(!reply),
            },
            (Shape::Tcp(flags), Some(c)) if c.closed() && flags & (tcp::SYN | tcp::ACK) == tcp::SYN => {
                Some(true)
            }
            (_, None) => Some(true),
            (_, Some(_)) => None,
        };
        let passes = match (begins, held) {
            (None, Some(connection)) => {
                run.answer.anew = false;
                run.known(connection, original, place == Place::Nowhere)
            }
            _ => run.fresh(place == Place::Nowhere),
        };
        if !passes {
            return run.answer;
        }
        let mut answer = run.answer;
        let stateful = answer.judged.iter().any(|j| j.decision.stateful);
        match begins {
            Some(true) if stateful => {
                if matches!(probe.shape, Shape::Tcp(flags) if flags & tcp::RST != 0) {
                    // A reset of nothing.
                    answer.seen = Seen::Dropped;
                    return answer;
                }
                let connection = Connection {
                    origin: probe.src,
                    asked: probe.asked(),
                    from_host: probe.via == Via::Host,
                    fin: [false; 2],
                    reset: false,
                };
                connections.0.insert(key, connection);
            }
            None => {
                if let Some(connection) = connections.0.get_mut(&key) {
                    connection.goes_on(probe.shape, original);
                }
            }
            Some(_) => {}
        }
        if place == Place::Gateway {
            let question = probe.shape == (Shape::Echo { reply: false });
            answer.seen = if question { Seen::Echoed } else { Seen::Dropped };
        }
        answer
    }
}

/// One packet on its way past the sides that judge it.
struct Run<'a> {
    ground: &'a Ground<'a>,
    probe: &'a Probe,
    sender: Option<EndpointKey>,
    receiver: Option<EndpointKey>,
    answer: Answer,
}

impl Run<'_> {
    /// Notes a decision; false when it ends the packet.
    fn allows(&mut self, judged: Judged) -> bool {
        let verdict = judged.decision.verdict;
        self.answer.judged.push(judged);
        // Nobody answers a reset or an error.
        let silent = match self.probe.shape {
            Shape::Tcp(flags) => flags & tcp::RST != 0,
            Shape::Error(..) => true,
            _ => false,
        };
        self.answer.seen = match verdict {
            Verdict::Allow => Seen::Passed,
            Verdict::Reject if !silent => Seen::Refused,
            Verdict::Reject | Verdict::Drop => Seen::Dropped,
        };
        verdict == Verdict::Allow
    }

    fn nowhere(&mut self, nowhere: bool) -> bool {
        if nowhere {
            self.answer.seen = Seen::Dropped;
        }
        nowhere
    }

    fn fresh(&mut self, nowhere: bool) -> bool {
        let (probe, ground) = (self.probe, self.ground);
        if let Some(key) = self.sender.clone()
            && !self.allows(ground.ask(&key, Direction::Egress, probe.dst.0, probe.asked(), false))
        {
            return false;
        }
        if self.nowhere(nowhere) {
            return false;
        }
        let host = probe.via == Via::Host;
        self.receiver.clone().is_none_or(|key| {
            self.allows(ground.ask(&key, Direction::Ingress, probe.src.0, probe.asked(), host))
        })
    }

    fn known(&mut self, connection: &Connection, original: bool, nowhere: bool) -> bool {
        let (first, second) = if original {
            (Direction::Egress, Direction::Ingress)
        } else {
            (Direction::Ingress, Direction::Egress)
        };
        if let Some(key) = self.sender.clone()
            && !self.side(connection, &key, first, self.probe.dst.0, original)
        {
            return false;
        }
        if self.nowhere(nowhere) {
            return false;
        }
        self.receiver
            .clone()
            .is_none_or(|key| self.side(connection, &key, second, self.probe.src.0, original))
    }

    /// One endpoint's side of a connection.
    fn side(
        &mut self,
        connection: &Connection,
        key: &EndpointKey,
        direction: Direction,
        peer: IpAddr,
        original: bool,
    ) -> bool {
        let judged = self.ground.ask(key, direction, peer, connection.asked, connection.from_host);
        let stateful = judged.decision.stateful;
        if !self.allows(judged) {
            return false;
        }
        if stateful || original {
            return true;
        }
        let own = match direction {
            Direction::Egress => Direction::Ingress,
            Direction::Ingress => Direction::Egress,
        };
        self.allows(self.ground.ask(key, own, peer, self.probe.asked(), false))
    }
}
