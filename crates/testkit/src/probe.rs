//! Probes for table-driven tests: can this namespace reach that address, and if not, how does it learn so?

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use flowloom_netlink::Netns;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, SockType, SockaddrStorage, recv, recvmsg, send, setsockopt, sockopt,
};

use crate::net::{bind_to, connect_to, inside, open, open_raw, pending_error};
use crate::packet::{checksum, icmp, ip_protocol, sctp_chunk, sctp_packet};
use crate::time::PATIENCE;
use crate::udp::sctp_payload;

/// Sockets open at a time, well below the usual limit of descriptors.
const AT_ONCE: usize = 200;

/// What is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Proto {
    /// A handshake.
    Tcp,
    /// One datagram, answered by an [`crate::EchoServer`].
    Udp,
    /// One echo request; the port is ignored.
    Icmp,
    /// One INIT, answered by an [`crate::SctpServer`].
    Sctp,
}

/// How a probe ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Answered.
    Connected,
    /// A TCP RST, an ICMP port unreachable, an SCTP ABORT.
    Refused,
    /// Another ICMP error, or no route; the error as the kernel reports it (`EHOSTUNREACH`, `EACCES`, `EMSGSIZE`, ...).
    /// The probe asks for every error (`IP_RECVERR`): an IPv6 TCP client that does not would wait for its timeout.
    Unreachable(Errno),
    /// Nothing came back in time.
    TimedOut,
}

/// One attempt.
#[derive(Debug, Clone, Copy)]
pub struct Probe<'a> {
    /// What.
    pub proto: Proto,
    /// From where.
    pub from: &'a Netns,
    /// To where.
    pub to: SocketAddr,
    /// Source address and port; chosen by the kernel when absent (SCTP: port 40000 and up).
    pub source: Option<SocketAddr>,
    /// How long to wait for an answer.
    pub timeout: Duration,
}

impl<'a> Probe<'a> {
    /// With 500 ms: enough silence to mean that nothing comes, too little for an answer that must come from a busy machine.
    #[must_use]
    pub fn new(proto: Proto, from: &'a Netns, to: SocketAddr) -> Self {
        Self { proto, from, to, source: None, timeout: Duration::from_millis(500) }
    }

    /// A TCP handshake.
    #[must_use]
    pub fn tcp(from: &'a Netns, to: SocketAddr) -> Self {
        Self::new(Proto::Tcp, from, to)
    }

    /// A UDP datagram.
    #[must_use]
    pub fn udp(from: &'a Netns, to: SocketAddr) -> Self {
        Self::new(Proto::Udp, from, to)
    }

    /// An echo request.
    #[must_use]
    pub fn icmp(from: &'a Netns, to: IpAddr) -> Self {
        Self::new(Proto::Icmp, from, SocketAddr::new(to, 0))
    }

    /// An SCTP INIT.
    #[must_use]
    pub fn sctp(from: &'a Netns, to: SocketAddr) -> Self {
        Self::new(Proto::Sctp, from, to)
    }

    /// With another time limit.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Waits as `wanted` asks: [`PATIENCE`] for an answer, no longer than before for silence.
    #[must_use]
    pub fn wants(self, wanted: Outcome) -> Self {
        if wanted == Outcome::TimedOut { self } else { self.timeout(PATIENCE) }
    }

    /// With a source.
    #[must_use]
    pub fn source(mut self, source: SocketAddr) -> Self {
        self.source = Some(source);
        self
    }

    /// Runs it.
    ///
    /// # Errors
    /// When its socket cannot be opened or its source not be bound; what the network does is an [`Outcome`].
    pub fn run(self) -> Result<Outcome> {
        Ok(probe_all(&[self])?.first().copied().unwrap_or(Outcome::TimedOut))
    }
}

/// Runs many at the same time (200 sockets at once); outcomes in the order of the probes.
///
/// # Errors
/// When a socket cannot be opened or a source not be bound.
pub fn probe_all(probes: &[Probe<'_>]) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::with_capacity(probes.len());
    for (round, chunk) in probes.chunks(AT_ONCE).enumerate() {
        outcomes.extend(run_together(chunk, round * AT_ONCE)?);
    }
    Ok(outcomes)
}

struct Attempt<'p> {
    probe: &'p Probe<'p>,
    fd: OwnedFd,
    deadline: Instant,
    /// Distinguishes this attempt from others to the same place.
    number: u16,
    nonce: [u8; 16],
}

fn run_together(probes: &[Probe<'_>], first: usize) -> Result<Vec<Outcome>> {
    let sockets = open_all(probes, first)?;
    let mut outcomes: Vec<Option<Outcome>> = vec![None; probes.len()];
    let mut attempts = Vec::with_capacity(probes.len());
    for (i, (probe, fd)) in probes.iter().zip(sockets).enumerate() {
        let number = ((first + i) & 0xffff) as u16;
        let mut nonce = [0xf1; 16];
        nonce[..8].copy_from_slice(&(fd.as_raw_fd() as u64).to_be_bytes());
        nonce[8..12].copy_from_slice(&std::process::id().to_be_bytes());
        nonce[12..14].copy_from_slice(&number.to_be_bytes());
        let attempt = Attempt { probe, fd, deadline: Instant::now() + probe.timeout, number, nonce };
        outcomes[i] = attempt.begin();
        attempts.push(attempt);
    }
    while outcomes.iter().any(Option::is_none) {
        let now = Instant::now();
        let open: Vec<usize> = (0..attempts.len()).filter(|i| outcomes[*i].is_none()).collect();
        let nearest = open.iter().map(|i| attempts[*i].deadline).min().unwrap_or(now);
        let left = nearest.saturating_duration_since(now) + Duration::from_micros(999);
        let mut fds: Vec<PollFd<'_>> =
            open.iter().map(|i| PollFd::new(attempts[*i].fd.as_fd(), attempts[*i].events())).collect();
        match poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(e).context("polling the probes"),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(false)).collect();
        for (i, ready) in open.into_iter().zip(ready) {
            if ready {
                outcomes[i] = attempts[i].advance();
            }
            if outcomes[i].is_none() && Instant::now() >= attempts[i].deadline {
                outcomes[i] = Some(Outcome::TimedOut);
            }
        }
    }
    Ok(outcomes.into_iter().flatten().collect())
}

/// Opens in one visit per run of probes from the same namespace.
fn open_all(probes: &[Probe<'_>], first: usize) -> Result<Vec<OwnedFd>> {
    let mut sockets = Vec::with_capacity(probes.len());
    for group in probes.chunk_by(|a, b| std::ptr::eq(a.from, b.from)) {
        let opened = inside(group[0].from, || group.iter().map(open_one).collect::<io::Result<Vec<_>>>());
        let at = first + sockets.len();
        sockets
            .extend(opened.with_context(|| {
                format!("opening the sockets of probes {at} to {}", at + group.len() - 1)
            })?);
    }
    Ok(sockets)
}

fn open_one(probe: &Probe<'_>) -> io::Result<OwnedFd> {
    let ip = probe.to.ip();
    let fd = match probe.proto {
        Proto::Tcp => open(ip, SockType::Stream, None)?,
        Proto::Udp => open(ip, SockType::Datagram, None)?,
        Proto::Icmp if ip.is_ipv4() => open_raw(ip, ip_protocol::ICMP)?,
        Proto::Icmp => open_raw(ip, ip_protocol::ICMPV6)?,
        Proto::Sctp => open_raw(ip, ip_protocol::SCTP)?,
    };
    // Errors that the kernel takes for passing (unreachable of any kind; for IPv6 TCP every ICMP error) are reported too.
    if ip.is_ipv4() {
        setsockopt(&fd, sockopt::Ipv4RecvErr, &true)?;
    } else {
        setsockopt(&fd, sockopt::Ipv6RecvErr, &true)?;
    }
    if let Some(source) = probe.source {
        let raw = matches!(probe.proto, Proto::Icmp | Proto::Sctp);
        bind_to(&fd, if raw { SocketAddr::new(source.ip(), 0) } else { source })?;
    }
    Ok(fd)
}

impl Attempt<'_> {
    /// Connects and sends; an outcome when it is known at once.
    fn begin(&self) -> Option<Outcome> {
        let to = match self.probe.proto {
            Proto::Tcp | Proto::Udp => self.probe.to,
            // A port on a raw IPv6 socket must be zero or the protocol.
            Proto::Icmp | Proto::Sctp => SocketAddr::new(self.probe.to.ip(), 0),
        };
        match connect_to(&self.fd, to) {
            Ok(()) if self.probe.proto == Proto::Tcp => return Some(Outcome::Connected),
            Ok(()) => {}
            Err(Errno::EINPROGRESS) => return None,
            Err(e) => return Some(outcome(e)),
        }
        let sent = match self.probe.proto {
            Proto::Tcp => return None,
            Proto::Udp => self.send(&self.nonce),
            Proto::Icmp => self.send(&self.echo()),
            Proto::Sctp => {
                let init = crate::packet::init_body(u32::from(self.number) + 1);
                self.send(&sctp_packet(self.sctp_port(), self.probe.to.port(), 0, sctp_chunk::INIT, &init))
            }
        };
        sent.err().map(outcome)
    }

    fn send(&self, bytes: &[u8]) -> nix::Result<()> {
        send(self.fd.as_raw_fd(), bytes, MsgFlags::empty()).map(drop)
    }

    fn sctp_port(&self) -> u16 {
        self.probe.source.map(|s| s.port()).filter(|p| *p != 0).unwrap_or(40_000 + self.number % 20_000)
    }

    fn echo(&self) -> Vec<u8> {
        let v4 = self.probe.to.is_ipv4();
        let mut b = vec![if v4 { icmp::V4_ECHO } else { icmp::V6_ECHO }, 0, 0, 0];
        b.extend(icmp::id_and_sequence(self.number, 1));
        b.extend(self.nonce);
        // The kernel fills in ICMPv6's checksum, which covers the addresses.
        let sum = if v4 { checksum::internet(&[&b]) } else { 0 };
        b[2..4].copy_from_slice(&sum.to_be_bytes());
        b
    }

    fn events(&self) -> PollFlags {
        if self.probe.proto == Proto::Tcp { PollFlags::POLLOUT } else { PollFlags::POLLIN }
    }

    /// Something happened: an outcome, or `None` when it was not about this attempt.
    fn advance(&self) -> Option<Outcome> {
        if self.probe.proto == Proto::Tcp {
            return Some(pending_error(&self.fd).map_or(Outcome::Connected, outcome));
        }
        let mut buffer = [0; 2048];
        loop {
            match recv(self.fd.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Ok(n) => {
                    if let Some(outcome) = self.judge(&buffer[..n]) {
                        return Some(outcome);
                    }
                }
                // With only the error queue readable, the pending error was taken by an earlier call.
                Err(Errno::EAGAIN) => return queued_error(&self.fd).map(outcome),
                Err(Errno::EINTR) => {}
                Err(e) => return Some(outcome(e)),
            }
        }
    }

    fn judge(&self, received: &[u8]) -> Option<Outcome> {
        let v4 = self.probe.to.is_ipv4();
        match self.probe.proto {
            Proto::Tcp => None,
            Proto::Udp => (received == self.nonce).then_some(Outcome::Connected),
            Proto::Icmp => {
                let skip = if v4 { usize::from(received.first()? & 15) * 4 } else { 0 };
                let message = received.get(skip..)?;
                let wanted = if v4 { icmp::V4_ECHO_REPLY } else { icmp::V6_ECHO_REPLY };
                let ours = message.first() == Some(&wanted)
                    && message.get(4..8) == Some(&icmp::id_and_sequence(self.number, 1)[..])
                    && message.get(8..) == Some(&self.nonce[..]);
                ours.then_some(Outcome::Connected)
            }
            Proto::Sctp => {
                let packet = sctp_payload(received, self.probe.to.ip())?;
                let ports = [packet[0], packet[1], packet[2], packet[3]];
                let ([a, b], [c, d]) = (self.probe.to.port().to_be_bytes(), self.sctp_port().to_be_bytes());
                match packet.get(12) {
                    Some(&sctp_chunk::INIT_ACK) if ports == [a, b, c, d] => Some(Outcome::Connected),
                    Some(&sctp_chunk::ABORT) if ports == [a, b, c, d] => Some(Outcome::Refused),
                    _ => None,
                }
            }
        }
    }
}

/// The next error of the socket's queue, if there is one.
fn queued_error(fd: &OwnedFd) -> Option<Errno> {
    let mut buffer = [0; 2048];
    let mut control = nix::cmsg_space!(libc::sock_extended_err, libc::sockaddr_in6);
    let mut parts = [io::IoSliceMut::new(&mut buffer)];
    let flags = MsgFlags::MSG_ERRQUEUE;
    let message = recvmsg::<SockaddrStorage>(fd.as_raw_fd(), &mut parts, Some(&mut control), flags).ok()?;
    message.cmsgs().ok()?.find_map(|c| match c {
        ControlMessageOwned::Ipv4RecvErr(e, _) | ControlMessageOwned::Ipv6RecvErr(e, _) => {
            Some(Errno::from_raw(e.ee_errno as i32))
        }
        _ => None,
    })
}

fn outcome(e: Errno) -> Outcome {
    match e {
        Errno::ECONNREFUSED | Errno::ECONNRESET => Outcome::Refused,
        Errno::ETIMEDOUT => Outcome::TimedOut,
        other => Outcome::Unreachable(other),
    }
}
