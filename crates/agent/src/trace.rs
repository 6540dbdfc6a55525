//! `trace`: the programs themselves, in dry run over the live maps, with every step named.

use std::net::IpAddr;
use std::time::Instant;

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_compiler::Identity;
use flowloom_datapath::packet::{Frame, Transport};
use flowloom_datapath::trace::{Action, Answer, Step, Tracked};
use flowloom_datapath::{Hook, TraceRequest, View};
use flowloom_model::{EndpointKey, Family, Mac};

use crate::core::{Core, Handle};
use crate::names;
use crate::sides::invalid;
use crate::views::kernel;

/// Largest payload.
const PAYLOAD: u16 = 8192;
/// A hardware address for senders that are not on this node.
const ELSEWHERE: Mac = Mac([0x02, 0xf1, 0, 0, 0, 2]);

/// A packet to trace, with what its report needs.
struct Prepared {
    view: View,
    traced: TraceRequest,
    packet: String,
    src: IpAddr,
    dst: IpAddr,
    service: Option<v1::ServiceSide>,
}

/// Answers `POST /v1/trace`. The run is outside the core's thread: the first one loads the dry-run programs.
///
/// # Errors
/// A packet that cannot be, or what the kernel refuses.
pub(crate) async fn trace(core: &Handle, request: v1::TraceRequest) -> Result<v1::TraceReport, ApiError> {
    let Prepared { view, traced, packet, src, dst, service } =
        core.ask(move |core| core.prepare_trace(&request)).await??;
    let run = move || {
        let start = Instant::now();
        view.trace(&traced).map(|report| (report, start.elapsed()))
    };
    let (report, duration) = tokio::task::spawn_blocking(run).await.map_err(kernel)?.map_err(kernel)?;
    core.ask(move |core| {
        let steps: Vec<v1::TraceStep> = report.steps.iter().map(|s| core.step(s)).collect();
        let (outcome, verdict, reason) = outcome(&report.steps, report.action);
        v1::TraceReport {
            outcome: outcome.to_owned(),
            verdict,
            reason,
            summary: steps.last().map_or_else(|| "the program said nothing".to_owned(), |s| s.text.clone()),
            packet,
            src,
            dst,
            steps,
            duration_ns: u32::try_from(duration.as_nanos()).unwrap_or(u32::MAX),
            service,
        }
    })
    .await
}

impl Core {
    fn prepare_trace(&self, request: &v1::TraceRequest) -> Result<Prepared, ApiError> {
        let asked = request.direction == Some(v1::Direction::Ingress);
        let sides = self.sides(&request.vpc, &request.from, &request.to)?;
        let (family, src, dst) = self.family_of(&sides, request.family)?;
        let protocol = names::protocol_number(&request.protocol, family == Family::V4)
            .ok_or_else(|| invalid(format!("protocol {:?} is unknown", request.protocol)))?;
        let service = self.service_side(&sides.to, src, &sides.vpc, protocol, request.port)?;
        // What the workload asks for; the programs choose the backend.
        let (dst, port) = service.as_ref().map_or((dst, request.port), |s| (s.ip, Some(s.port)));
        let vpc = sides.vpc;
        // The stack delivers to endpoints of the default VPC only. In another one the sender's hook judges both sides, and what another node sends is
        // judged where it leaves the tunnel: there is none in a dry run.
        let ingress = asked && self.plan.vpcs.values().any(|v| v.name == vpc && v.default);
        let at = if ingress { dst } else { src };
        let local = self.plan.endpoints.values().find(|e| e.key.vpc == vpc && e.ips.contains(&at));
        let Some(plan) = local else {
            let message = format!(
                "{at} is no enforced endpoint of vpc {vpc} on this node; trace where the {} runs",
                if ingress { "receiver" } else { "sender" }
            );
            let message = if asked && !ingress {
                format!("{message}; in vpc {vpc} it is the sender's node that a trace can follow a packet on")
            } else {
                message
            };
            return Err(ApiError::new(ErrorCode::NotFound, message));
        };
        let device = self.attached.get(&plan.key).ok_or_else(|| {
            ApiError::new(ErrorCode::Conflict, format!("endpoint {} has no device", plan.key))
        })?;
        let v6 = src.is_ipv6();
        let payload = request.payload.unwrap_or(0);
        if payload > PAYLOAD {
            return Err(invalid(format!("payload: at most {PAYLOAD} bytes")));
        }
        if matches!(protocol, 6 | 17 | 132) && port.is_none() {
            return Err(invalid(format!("{} needs a port", request.protocol)));
        }
        let source_port = request.src_port.unwrap_or(40_000);
        let mut transport = Transport::new(protocol, v6, source_port, port.unwrap_or(0));
        if let (Transport::Tcp { flags, .. }, Some(letters)) = (&mut transport, &request.tcp_flags) {
            *flags = names::tcp_flags_byte(letters)
                .ok_or_else(|| invalid(format!("tcp_flags {letters:?}: letters of SAFRPUEC")))?;
        }
        let (src_mac, dst_mac) = if ingress { (device.mac, plan.mac) } else { (plan.mac, device.mac) };
        let frame = Frame {
            src_mac: if ingress { ELSEWHERE } else { src_mac },
            dst_mac,
            src,
            dst,
            ttl: 64,
            transport,
            payload: payload.into(),
        };
        let traced = TraceRequest {
            hook: if ingress { Hook::ToEndpoint } else { Hook::FromEndpoint },
            ifindex: device.ifindex,
            frame: frame.build().map_err(invalid)?,
            mark: 0,
        };
        let tail = |p: Option<u16>| p.map(|p| format!(":{p}")).unwrap_or_default();
        let shown = |ip: IpAddr, p: Option<u16>| match ip {
            IpAddr::V6(_) if p.is_some() => format!("[{ip}]{}", tail(p)),
            _ => format!("{ip}{}", tail(p)),
        };
        let from = port.map(|_| source_port);
        let packet =
            format!("{vpc}: {} {} -> {}", names::protocol(protocol), shown(src, from), shown(dst, port));
        Ok(Prepared { view: self.kernel_view()?.clone(), traced, packet, src, dst, service })
    }

    fn step(&self, step: &Step) -> v1::TraceStep {
        let endpoint = |id| {
            let key: Option<EndpointKey> =
                self.plan.endpoints.values().find(|e| e.id == id).map(|e| e.key.clone());
            key.map_or_else(|| format!("endpoint #{id}"), |k| k.to_string())
        };
        let identity = |id: Identity| format!("{} (identity {id})", self.identity_named(id));
        let device = |ifindex: u32| {
            let known = self.attached.values().find(|d| d.ifindex == ifindex).map(|d| d.name.clone());
            known.unwrap_or_else(|| format!("ifindex {ifindex}"))
        };
        let mut out = v1::TraceStep {
            step: String::new(),
            text: String::new(),
            verdict: None,
            rule: None,
            numbers: [0; 3],
        };
        let (name, text, numbers) = match step {
            Step::Device { ifindex, endpoint: id } => (
                "device",
                format!(
                    "device {} belongs to {}",
                    device(*ifindex),
                    id.map_or_else(|| "nobody".to_owned(), endpoint)
                ),
                [*ifindex, id.map_or(0, |i| i.0), 0],
            ),
            Step::Source { endpoint: id } => {
                ("source", format!("the source is an address of {}", endpoint(*id)), [id.0, 0, 0])
            }
            Step::Conntrack { found, reply } => {
                let (n, what) = match found {
                    Tracked::Miss => (0, "no tracked connection"),
                    Tracked::HalfOpen => (1, "half-open connection"),
                    Tracked::Established => (2, "established connection"),
                };
                let side = if *reply { ", this is a reply" } else { "" };
                ("conntrack", format!("{what}{side}"), [n, u32::from(*reply), 0])
            }
            Step::Peer { identity: id, flags } => {
                ("peer", format!("the peer is {}", identity(*id)), [id.0, *flags, 0])
            }
            Step::Egress(j) | Step::Ingress(j) => {
                let name = if matches!(step, Step::Egress(_)) { "egress" } else { "ingress" };
                let rule = self.rule_named(j.rule.0);
                let verdict = names::verdict(j.verdict);
                out.verdict = verdict;
                let word = verdict.map_or("unknown", v1::Verdict::name);
                let text = format!("{name} policy: {word} by {rule}, peer {}", identity(j.identity));
                out.rule = Some(rule);
                (name, text, [j.verdict.into(), j.rule.0, j.identity.0])
            }
            Step::Current { direction, rule } => {
                let named = self.rule_named(rule.0);
                let word = names::direction(*direction).name();
                let text = format!("the {word} decision on the connection is current ({named})");
                out.rule = Some(named);
                ("current", text, [(*direction).into(), rule.0, 0])
            }
            Step::Local { endpoint: id } => {
                ("local", format!("the destination is {}", endpoint(*id)), [id.0, 0, 0])
            }
            Step::Encap { vni, remote } => {
                let [a, b, c, d] = *remote;
                let vpc = self.vpc_named(*vni);
                (
                    "encap",
                    format!("to the tunnel endpoint …{a}.{b}.{c}.{d}, VNI {vni} ({vpc})"),
                    [*vni, u32::from_be_bytes(*remote), 0],
                )
            }
            Step::Stack => ("stack", "handed to the host's stack".to_owned(), [0; 3]),
            Step::Drop { reason } => match reason {
                Ok(r) => ("drop", format!("dropped: {} ({})", r.name(), r.text()), [*r as u32, 0, 0]),
                Err(n) => ("drop", format!("dropped: reason {n}"), [*n, 0, 0]),
            },
            Step::Answer(answer) => match answer {
                Answer::Neighbour => ("answer", "answered: address resolution".to_owned(), [1, 0, 0]),
                Answer::Echo => ("answer", "answered: echo reply".to_owned(), [2, 0, 0]),
                Answer::Reset => ("answer", "answered: TCP reset".to_owned(), [3, 0, 0]),
                Answer::IcmpError { kind, code, mtu } => {
                    let told = if *mtu == 0 { String::new() } else { format!(", MTU {mtu}") };
                    let bits = u32::from(u16::from_be_bytes([*kind, *code]));
                    ("answer", format!("answered: ICMP error type {kind} code {code}{told}"), [4, bits, *mtu])
                }
            },
            Step::Deliver { ifindex, method } => {
                ("deliver", format!("delivered to {}", device(*ifindex)), [*ifindex, *method, 0])
            }
            Step::Unknown(raw) => {
                ("unknown", format!("step {} of a newer program", raw.kind), [raw.a, raw.b, raw.c])
            }
        };
        out.step = name.to_owned();
        out.text = text;
        out.numbers = numbers;
        out
    }
}

/// What became of the packet, by its last word.
fn outcome(steps: &[Step], action: Action) -> (&'static str, v1::Verdict, Option<String>) {
    let rejected = steps.iter().any(
        |s| matches!(s, Step::Egress(j) | Step::Ingress(j) if j.verdict == flowloom_bpf_abi::verdict::REJECT),
    );
    let against = if rejected { v1::Verdict::Reject } else { v1::Verdict::Drop };
    for step in steps.iter().rev() {
        match step {
            Step::Drop { .. } => return ("dropped", against, drop_reason(steps)),
            Step::Answer(Answer::Neighbour | Answer::Echo) => return ("answered", v1::Verdict::Allow, None),
            Step::Answer(Answer::Reset | Answer::IcmpError { .. }) => {
                return ("answered", against, drop_reason(steps));
            }
            Step::Deliver { .. } => return ("delivered", v1::Verdict::Allow, None),
            Step::Encap { .. } => return ("encapsulated", v1::Verdict::Allow, None),
            Step::Stack => return ("stack", v1::Verdict::Allow, None),
            _ => {}
        }
    }
    match action {
        Action::Drop => ("dropped", against, None),
        Action::Redirect => ("delivered", v1::Verdict::Allow, None),
        _ => ("stack", v1::Verdict::Allow, None),
    }
}

fn drop_reason(steps: &[Step]) -> Option<String> {
    steps.iter().rev().find_map(|s| match s {
        Step::Drop { reason } => Some(reason.map_or_else(|n| format!("Reason{n}"), |r| r.name().to_owned())),
        _ => None,
    })
}
