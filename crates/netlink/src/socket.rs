//! A rtnetlink socket on which every answer is matched to its request.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP,
    NLMSG_OVERRUN, NetlinkHeader, NetlinkMessage, NetlinkPayload, NlasIterator, ParseableParametrized,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket as RawSocket, SocketAddr};
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::error::{Action, Error, Result};

/// The kernel answers while it handles the request, so this is met only when something is badly wrong.
const ANSWER_TIMEOUT_SECONDS: i64 = 20;
/// A dump is sent in pieces no larger than the reader's buffer, up to this.
const BUFFER: usize = 64 * 1024;
/// Requests sent in one call: their acknowledgements must fit the socket's receive buffer.
const MAX_IN_FLIGHT: usize = 64;
const MAX_DUMP_ATTEMPTS: u32 = 10;
const HEADER: usize = 16;
const NLM_F_CAPPED: u16 = 0x100;
const NLM_F_ACK_TLVS: u16 = 0x200;
const NLMSGERR_ATTR_MSG: u16 = 1;

/// One request of a batch.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) message: RouteNetlinkMessage,
    /// `NLM_F_CREATE` and the like; request and acknowledgement are added.
    pub(crate) flags: u16,
    pub(crate) action: Action,
    pub(crate) object: String,
    /// Errors that mean "it is so already".
    pub(crate) already: &'static [Errno],
}

/// How a request ended.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    /// Whether the kernel changed anything (an error of [`Request::already`] is `false`).
    pub(crate) wrote: bool,
    /// What came back besides the acknowledgement.
    pub(crate) message: Option<RouteNetlinkMessage>,
}

pub(crate) struct Socket {
    inner: RawSocket,
    port: u32,
    sequence: u32,
    buffer: Vec<u8>,
}

impl std::fmt::Debug for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Socket").field("fd", &self.inner.as_raw_fd()).finish_non_exhaustive()
    }
}

/// One message as received.
struct Received {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: std::ops::Range<usize>,
}

impl Socket {
    /// In the calling thread's network namespace.
    pub(crate) fn open() -> Result<Self> {
        let mut inner = RawSocket::new(NETLINK_ROUTE).map_err(Error::socket("open"))?;
        let port = inner.bind_auto().map_err(Error::socket("bind"))?.port_number();
        inner.connect(&SocketAddr::new(0, 0)).map_err(Error::socket("connect"))?;
        inner.set_ext_ack(true).map_err(Error::socket("ask for extended errors"))?;
        inner.set_cap_ack(true).map_err(Error::socket("ask for short acknowledgements"))?;
        inner.set_netlink_get_strict_chk(true).map_err(Error::socket("ask for strict checks"))?;
        setsockopt(&inner.as_fd(), sockopt::ReceiveTimeout, &TimeVal::seconds(ANSWER_TIMEOUT_SECONDS))
            .map_err(|e| Error::Socket { what: "set its timeout", source: e.into() })?;
        Ok(Self { inner, port, sequence: 0, buffer: vec![0; BUFFER] })
    }

    pub(crate) fn port(&self) -> u32 {
        self.port
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }

    /// Sends all, waits for all. The kernel handles them in order and goes on after one fails; the first error is
    /// returned after every answer is in.
    pub(crate) fn transact(&mut self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        let mut answers = Vec::with_capacity(requests.len());
        let mut first_error = None;
        let mut rest = requests;
        while !rest.is_empty() {
            let tail = rest.split_off(rest.len().min(MAX_IN_FLIGHT));
            for answer in self.transact_some(rest)? {
                match answer {
                    Ok(a) => answers.push(a),
                    Err(e) => {
                        answers.push(Answer::default());
                        first_error.get_or_insert(e);
                    }
                }
            }
            rest = tail;
        }
        match first_error {
            Some(e) => Err(e),
            None => Ok(answers),
        }
    }

    /// One request.
    pub(crate) fn request(&mut self, request: Request) -> Result<Answer> {
        Ok(self.transact(vec![request])?.pop().unwrap_or_default())
    }

    fn transact_some(&mut self, requests: Vec<Request>) -> Result<Vec<Result<Answer>>> {
        let first = self.sequence.wrapping_add(1);
        let mut out = Vec::new();
        let mut pending = Vec::with_capacity(requests.len());
        for r in requests {
            self.sequence = self.sequence.wrapping_add(1);
            append(&mut out, r.message, r.flags | NLM_F_REQUEST | NLM_F_ACK, self.sequence);
            pending.push((r.action, r.object, r.already));
        }
        self.send(&out)?;
        let mut done: Vec<Option<Result<Answer>>> = pending.iter().map(|_| None).collect();
        let mut echoes: Vec<Option<RouteNetlinkMessage>> = pending.iter().map(|_| None).collect();
        let mut open = pending.len();
        while open > 0 {
            let object = || pending.first().map(|p| p.1.clone()).unwrap_or_default();
            for m in self.receive(object)? {
                // Answers to what an earlier call gave up on are older than the first; they are skipped.
                let i = m.sequence.wrapping_sub(first) as usize;
                let Some((action, object, already)) = pending.get(i) else { continue };
                if m.kind == NLMSG_ERROR {
                    let (errno, detail) = parse_error(&self.buffer[m.body], m.flags);
                    let answer = match errno {
                        None => Ok(Answer { wrote: true, message: echoes[i].take() }),
                        Some(e) if already.contains(&e) => Ok(Answer::default()),
                        Some(errno) => {
                            Err(Error::Refused { action: *action, object: object.clone(), errno, detail })
                        }
                    };
                    if done[i].replace(answer).is_none() {
                        open -= 1;
                    }
                } else if m.kind > NLMSG_OVERRUN {
                    echoes[i] = Some(parse(&self.buffer[m.body], m.kind, object)?);
                }
            }
        }
        Ok(done.into_iter().map(|d| d.unwrap_or_else(|| Ok(Answer::default()))).collect())
    }

    /// Reads one object; `None` when the kernel says that it is none.
    pub(crate) fn read(&mut self, request: Request) -> Result<Option<RouteNetlinkMessage>> {
        Ok(self.request(request)?.message)
    }

    /// Lists; repeated when the list changed meanwhile, so that the result is one state.
    pub(crate) fn dump(
        &mut self,
        message: &RouteNetlinkMessage,
        object: &str,
    ) -> Result<Vec<RouteNetlinkMessage>> {
        for _ in 0..MAX_DUMP_ATTEMPTS {
            if let Some(list) = self.dump_once(message.clone(), object)? {
                return Ok(list);
            }
        }
        Err(Error::Unsettled { object: object.into(), attempts: MAX_DUMP_ATTEMPTS })
    }

    fn dump_once(
        &mut self,
        message: RouteNetlinkMessage,
        object: &str,
    ) -> Result<Option<Vec<RouteNetlinkMessage>>> {
        self.sequence = self.sequence.wrapping_add(1);
        let sequence = self.sequence;
        let mut out = Vec::new();
        append(&mut out, message, NLM_F_REQUEST | NLM_F_DUMP, sequence);
        match self.send(&out) {
            // Another dump still runs on this socket (an earlier reader gave up): its rest is drained below.
            Err(e) if e.errno() == Some(Errno::EBUSY) => return Ok(None),
            other => other?,
        }
        let mut list = Vec::new();
        let mut interrupted = false;
        loop {
            let received = match self.receive(|| object.to_owned()) {
                Err(Error::RepliesLost { .. }) => return Ok(None),
                other => other?,
            };
            for m in received.into_iter().filter(|m| m.sequence == sequence) {
                interrupted |= m.flags & NLM_F_DUMP_INTR != 0;
                match m.kind {
                    NLMSG_DONE | NLMSG_ERROR => {
                        let (errno, detail) = parse_error(&self.buffer[m.body], m.flags);
                        return match errno {
                            Some(Errno::EINTR | Errno::EBUSY | Errno::EAGAIN) => Ok(None),
                            Some(errno) => Err(Error::Refused {
                                action: Action::Read,
                                object: object.into(),
                                errno,
                                detail,
                            }),
                            None => Ok((!interrupted).then_some(list)),
                        };
                    }
                    NLMSG_NOOP | NLMSG_OVERRUN => {}
                    kind => list.push(parse(&self.buffer[m.body], kind, object)?),
                }
            }
        }
    }

    fn send(&self, out: &[u8]) -> Result<()> {
        loop {
            match self.inner.send(out, 0) {
                Ok(_) => return Ok(()),
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
                Err(e) => return Err(Error::socket("send")(e)),
            }
        }
    }

    /// The messages of one datagram, as ranges of the buffer.
    fn receive(&mut self, object: impl Fn() -> String) -> Result<Vec<Received>> {
        let n = loop {
            let mut into = &mut self.buffer[..];
            match self.inner.recv(&mut into, libc::MSG_TRUNC) {
                Ok(n) => break n,
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::ENOBUFS) => return Err(Error::RepliesLost { object: object() }),
                    _ => return Err(Error::socket("receive")(e)),
                },
            }
        };
        if n > self.buffer.len() {
            self.buffer.resize(n.next_power_of_two(), 0);
            return Err(Error::RepliesLost { object: object() });
        }
        split(&self.buffer[..n]).map_err(|reason| Error::Malformed { object: object(), reason })
    }
}

fn append(out: &mut Vec<u8>, message: RouteNetlinkMessage, flags: u16, sequence: u32) {
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    header.sequence_number = sequence;
    let mut m = NetlinkMessage::new(header, NetlinkPayload::from(message));
    m.finalize();
    let start = out.len();
    out.resize(start + m.buffer_len().next_multiple_of(4), 0);
    m.serialize(&mut out[start..start + m.buffer_len()]);
}

fn split(bytes: &[u8]) -> std::result::Result<Vec<Received>, String> {
    let mut list = Vec::new();
    let mut at = 0;
    while bytes.len() - at >= HEADER {
        let u32_at = |o: usize| {
            u32::from_ne_bytes([bytes[at + o], bytes[at + o + 1], bytes[at + o + 2], bytes[at + o + 3]])
        };
        let u16_at = |o: usize| u16::from_ne_bytes([bytes[at + o], bytes[at + o + 1]]);
        let length = u32_at(0) as usize;
        if length < HEADER || length > bytes.len() - at {
            return Err(format!("message of {length} bytes in {} that are left", bytes.len() - at));
        }
        list.push(Received {
            kind: u16_at(4),
            flags: u16_at(6),
            sequence: u32_at(8),
            body: at + HEADER..at + length,
        });
        at = (at + length.next_multiple_of(4)).min(bytes.len());
    }
    Ok(list)
}

/// All messages of one datagram, parsed; for the monitor.
pub(crate) fn parse_datagram(bytes: &[u8]) -> Result<Vec<RouteNetlinkMessage>> {
    let malformed = |reason| Error::Malformed { object: "a notification".into(), reason };
    split(bytes)
        .map_err(malformed)?
        .into_iter()
        .filter(|m| m.kind > NLMSG_OVERRUN)
        .map(|m| parse(&bytes[m.body], m.kind, "a notification"))
        .collect()
}

fn parse(body: &[u8], kind: u16, object: &str) -> Result<RouteNetlinkMessage> {
    RouteNetlinkMessage::parse_with_param(body, kind)
        .map_err(|e| Error::Malformed { object: object.into(), reason: e.to_string() })
}

/// Body of an error, acknowledgement or end of dump: the error and the kernel's text about it.
fn parse_error(body: &[u8], flags: u16) -> (Option<Errno>, Option<String>) {
    let code = match body.first_chunk::<4>() {
        Some(b) => i32::from_ne_bytes(*b),
        None => 0,
    };
    if code >= 0 {
        return (None, None);
    }
    let mut detail = None;
    if flags & NLM_F_ACK_TLVS != 0 {
        // error, then the request's header, then (unless capped) its body, then attributes.
        let quoted = match body.get(4..8).and_then(|b| b.first_chunk::<4>()) {
            Some(b) if flags & NLM_F_CAPPED == 0 => (u32::from_ne_bytes(*b) as usize).next_multiple_of(4),
            _ => HEADER,
        };
        for nla in NlasIterator::new(body.get(4 + quoted..).unwrap_or_default()).flatten() {
            if nla.kind() == NLMSGERR_ATTR_MSG {
                let text = String::from_utf8_lossy(nla.value());
                detail = Some(text.trim_end_matches('\0').to_owned());
            }
        }
    }
    (Some(Errno::from_raw(-code)), detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_truncated_or_lying_datagram_is_an_error_and_not_a_panic() {
        let mut good = Vec::new();
        append(&mut good, RouteNetlinkMessage::GetLink(Default::default()), 0, 7);
        assert_eq!(split(&good).unwrap().len(), 1);
        for n in HEADER..good.len() {
            assert!(split(&good[..n]).is_err(), "{n}");
        }
        for n in 0..HEADER {
            assert_eq!(split(&good[..n]).unwrap().len(), 0);
        }
        good[0] = 3;
        assert!(split(&good).is_err());
    }

    #[test]
    fn the_kernels_own_words_are_kept() {
        let mut body = (-22i32).to_ne_bytes().to_vec();
        body.extend([0u8; HEADER]);
        body.extend(9u16.to_ne_bytes());
        body.extend(NLMSGERR_ATTR_MSG.to_ne_bytes());
        body.extend(b"oops\0\0\0\0");
        let (errno, detail) = parse_error(&body, NLM_F_ACK_TLVS | NLM_F_CAPPED);
        assert_eq!((errno, detail.as_deref()), (Some(Errno::EINVAL), Some("oops")));
        assert_eq!(parse_error(&[0; 4], 0), (None, None));
    }
}
