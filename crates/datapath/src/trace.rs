//! Dry runs: the same programs over the live maps, writing none of them.

use flowloom_bpf_abi::map_name::TRACE;
use flowloom_bpf_abi::{self as abi, DropReason, trace_step as kind};
use flowloom_compiler::{EndpointId, Identity, RuleId};

use crate::error::{Context as _, Result};
use crate::links::Hook;
use crate::loading::Programs;
use crate::object::Dry;
use crate::sys::{self, Map, RunContext};

/// A packet to judge without sending it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceRequest {
    /// Which program.
    pub hook: Hook,
    /// Device it runs on, in the network namespace of the calling thread.
    pub ifindex: u32,
    /// Ethernet frame (see [`crate::packet::Frame`]).
    pub frame: Vec<u8>,
    /// `skb->mark`.
    pub mark: u32,
}

/// What a policy said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Judged {
    /// `flowloom_bpf_abi::verdict`.
    pub verdict: u8,
    /// The rule; 0 = the default.
    pub rule: RuleId,
    /// The peer that was judged.
    pub identity: Identity,
}

/// One step of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The device was looked up.
    Device {
        /// Which.
        ifindex: u32,
        /// Whose; `None` = nobody's.
        endpoint: Option<EndpointId>,
    },
    /// The source belongs to this endpoint.
    Source {
        /// Which.
        endpoint: EndpointId,
    },
    /// Connection tracking was asked.
    Conntrack {
        /// What it knew.
        found: Tracked,
        /// The packet is a reply.
        reply: bool,
    },
    /// The peer was looked up.
    Peer {
        /// Who.
        identity: Identity,
        /// `flowloom_bpf_abi::peer_flags`.
        flags: u32,
    },
    /// The sender's policy was asked.
    Egress(Judged),
    /// The receiver's policy was asked.
    Ingress(Judged),
    /// The decision on the connection was current.
    Current {
        /// `flowloom_bpf_abi::direction`.
        direction: u8,
        /// Rule that had decided.
        rule: RuleId,
    },
    /// The destination is a local endpoint.
    Local {
        /// Which.
        endpoint: EndpointId,
    },
    /// It would be encapsulated.
    Encap {
        /// VNI.
        vni: u32,
        /// Last four bytes of the tunnel endpoint: the address for IPv4.
        remote: [u8; 4],
    },
    /// It would go to the host's stack.
    Stack,
    /// It would be dropped.
    Drop {
        /// Why; `Err` = a number that this build does not know.
        reason: std::result::Result<DropReason, u32>,
    },
    /// It would be answered.
    Answer(Answer),
    /// It would be delivered.
    Deliver {
        /// Device.
        ifindex: u32,
        /// `flowloom_bpf_abi::delivery`.
        method: u32,
    },
    /// A step that this build does not know.
    Unknown(abi::TraceStep),
}

/// What connection tracking knew.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tracked {
    /// Nothing.
    Miss,
    /// A connection without a reply yet.
    HalfOpen,
    /// A connection.
    Established,
}

/// Kinds of answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// ARP or neighbour advertisement.
    Neighbour,
    /// Echo reply.
    Echo,
    /// TCP RST.
    Reset,
    /// ICMP error (ICMPv6 for IPv6 packets).
    IcmpError {
        /// Type.
        kind: u8,
        /// Code.
        code: u8,
        /// MTU told, 0 = none.
        mtu: u32,
    },
}

impl Step {
    /// From the programs' numbers.
    #[must_use]
    pub fn parse(step: abi::TraceStep) -> Self {
        let abi::TraceStep { kind: what, a, b, c } = step;
        let endpoint = |n: u32| (n != 0).then_some(EndpointId(n));
        let reason = |n: u32| u8::try_from(n).ok().and_then(DropReason::from_u8);
        let judged =
            || u8::try_from(a).map(|verdict| Judged { verdict, rule: RuleId(b), identity: Identity(c) });
        match what {
            kind::DEVICE => Self::Device { ifindex: a, endpoint: endpoint(b) },
            kind::SOURCE => Self::Source { endpoint: EndpointId(a) },
            kind::CONNTRACK => {
                let found = match a {
                    0 => Tracked::Miss,
                    1 => Tracked::HalfOpen,
                    2 => Tracked::Established,
                    _ => return Self::Unknown(step),
                };
                Self::Conntrack { found, reply: b == 1 }
            }
            kind::PEER => Self::Peer { identity: Identity(a), flags: b },
            kind::EGRESS => judged().map_or(Self::Unknown(step), Self::Egress),
            kind::INGRESS => judged().map_or(Self::Unknown(step), Self::Ingress),
            kind::LOCAL => Self::Local { endpoint: EndpointId(a) },
            kind::ENCAP => Self::Encap { vni: a, remote: b.to_be_bytes() },
            kind::STACK => Self::Stack,
            kind::DROP => Self::Drop { reason: reason(a).ok_or(a) },
            kind::ANSWER => {
                let answer = match a {
                    1 => Answer::Neighbour,
                    2 => Answer::Echo,
                    3 => Answer::Reset,
                    4 => match u16::try_from(b).map(u16::to_be_bytes) {
                        Ok([kind, code]) => Answer::IcmpError { kind, code, mtu: c },
                        Err(_) => return Self::Unknown(step),
                    },
                    _ => return Self::Unknown(step),
                };
                Self::Answer(answer)
            }
            kind::DELIVER => Self::Deliver { ifindex: a, method: b },
            kind::CURRENT => match u8::try_from(a) {
                Ok(direction) => Self::Current { direction, rule: RuleId(b) },
                Err(_) => Self::Unknown(step),
            },
            _ => Self::Unknown(step),
        }
    }
}

/// What the kernel would do with the packet next (`TCX_*`, `TC_ACT_*`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// The next program, then the stack.
    Next,
    /// The stack.
    Pass,
    /// Nothing: it ends here.
    Drop,
    /// Another device.
    Redirect,
    /// Anything else.
    Other(i32),
}

impl Action {
    /// From the return value.
    #[must_use]
    pub const fn from_number(n: i32) -> Self {
        match n {
            -1 => Self::Next,
            0 => Self::Pass,
            2 => Self::Drop,
            7 => Self::Redirect,
            n => Self::Other(n),
        }
    }
}

/// What a dry run showed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceReport {
    /// In order.
    pub steps: Vec<Step>,
    /// Steps that did not fit the log.
    pub lost_steps: u32,
    /// What would happen to the packet.
    pub action: Action,
    /// The frame as the program left it.
    pub frame: Vec<u8>,
}

/// The dry-run load.
#[derive(Debug)]
pub(crate) struct Tracer {
    programs: Programs<Hook>,
    log: Map<u32, abi::TraceLog>,
}

impl Tracer {
    pub(crate) fn new(loaded: Dry) -> Result<Self> {
        Ok(Self { programs: loaded.programs, log: Map::from_fd(loaded.trace).in_map("opening", TRACE)? })
    }

    pub(crate) fn run(&mut self, request: &TraceRequest) -> Result<TraceReport> {
        let (program, _) = self.programs.of(request.hook, request.hook.name())?;
        self.log.set(&0, &abi::TraceLog::default()).in_map("writing", TRACE)?;
        let context = RunContext { mark: request.mark, ifindex: request.ifindex, ..RunContext::default() };
        let doing = format!("tracing {} on ifindex {}", request.hook.name(), request.ifindex);
        let run = sys::test_run(program, &request.frame, &context, 1).kernel(doing)?;
        let log = self.log.get(&0).in_map("reading", TRACE)?.unwrap_or_default();
        let kept = (log.count as usize).min(abi::MAX_TRACE_STEPS);
        Ok(TraceReport {
            steps: log.steps[..kept].iter().map(|s| Step::parse(*s)).collect(),
            lost_steps: log.count - kept as u32,
            action: Action::from_number(run.action),
            frame: run.data,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(kind: u32, a: u32, b: u32, c: u32) -> Step {
        Step::parse(abi::TraceStep { kind, a, b, c })
    }

    #[test]
    fn numbers_become_what_they_mean() {
        let judged = Judged { verdict: abi::verdict::DROP, rule: RuleId(5), identity: Identity(300) };
        assert_eq!(step(kind::EGRESS, 2, 5, 300), Step::Egress(judged));
        assert_eq!(step(kind::DEVICE, 9, 0, 0), Step::Device { ifindex: 9, endpoint: None });
        assert_eq!(
            step(kind::CONNTRACK, 2, 1, 0),
            Step::Conntrack { found: Tracked::Established, reply: true }
        );
        assert_eq!(step(kind::DROP, 14, 0, 0), Step::Drop { reason: Ok(DropReason::PolicyEgress) });
        let too_big = Step::Answer(Answer::IcmpError { kind: 3, code: 4, mtu: 1450 });
        assert_eq!(step(kind::ANSWER, 4, 0x0304, 1450), too_big);
        assert_eq!(step(kind::ANSWER, 3, 0, 0), Step::Answer(Answer::Reset));
        let encap = Step::Encap { vni: 100, remote: [192, 0, 2, 7] };
        assert_eq!(step(kind::ENCAP, 100, u32::from_be_bytes([192, 0, 2, 7]), 0), encap);
        assert_eq!(step(kind::DELIVER, 9, 1, 0), Step::Deliver { ifindex: 9, method: 1 });
    }

    #[test]
    fn unknown_numbers_are_shown_not_guessed() {
        assert_eq!(step(kind::DROP, 1000, 0, 0), Step::Drop { reason: Err(1000) });
        for (k, a) in [(99, 0), (kind::CONNTRACK, 7), (kind::ANSWER, 9), (kind::EGRESS, 256)] {
            assert!(matches!(step(k, a, 0, 0), Step::Unknown(_)), "{k} {a}");
        }
        assert_eq!(Action::from_number(-1), Action::Next);
        assert_eq!(Action::from_number(8), Action::Other(8));
    }
}
