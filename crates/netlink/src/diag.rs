//! Sockets of a namespace: listing connected UDP sockets and ending one (`sock_diag(7)`).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr as Endpoint};
use std::os::fd::AsFd as _;

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket as RawSocket, SocketAddr};
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike as _};

use crate::error::{Action, Error, Result};
use crate::netns::Netns;

/// `SOCK_DIAG_BY_FAMILY` and `SOCK_DESTROY` of linux/sock_diag.h.
const BY_FAMILY: u16 = 20;
const DESTROY: u16 = 21;
/// Protocol number of UDP.
const UDP: u8 = 17;
/// The state of a connected UDP socket: `1 << TCP_ESTABLISHED`.
const CONNECTED: u32 = 1 << 1;
const HEADER: usize = 16;
/// `struct inet_diag_sockid`.
const ID: usize = 48;
/// `struct inet_diag_msg` begins with four bytes, then the id.
const MESSAGE: usize = 4 + ID;
const BUFFER: usize = 64 * 1024;
const ANSWER_TIMEOUT_SECONDS: i64 = 20;

/// A connected UDP socket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UdpSocket {
    /// Its own address.
    pub local: Endpoint,
    /// Whom it is connected to; an IPv4 address also where the socket is of IPv6.
    pub remote: Endpoint,
    /// The kernel's number of it, never used again (`SO_COOKIE`).
    pub cookie: u64,
    family: u8,
    id: [u8; ID],
}

/// A `sock_diag` socket in one namespace.
pub struct Diag {
    inner: RawSocket,
    sequence: u32,
}

impl std::fmt::Debug for Diag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Diag").finish_non_exhaustive()
    }
}

impl Diag {
    /// For the calling thread's namespace.
    ///
    /// # Errors
    /// When the socket cannot be opened.
    pub fn open() -> Result<Self> {
        let mut inner = RawSocket::new(NETLINK_SOCK_DIAG).map_err(Error::socket("open"))?;
        inner.bind_auto().map_err(Error::socket("bind"))?;
        inner.connect(&SocketAddr::new(0, 0)).map_err(Error::socket("connect"))?;
        setsockopt(&inner.as_fd(), sockopt::ReceiveTimeout, &TimeVal::seconds(ANSWER_TIMEOUT_SECONDS))
            .map_err(|e| Error::Socket { what: "set its timeout", source: e.into() })?;
        Ok(Self { inner, sequence: 0 })
    }

    /// For another namespace.
    ///
    /// # Errors
    /// When the namespace cannot be entered or the socket not be opened.
    pub fn in_netns(netns: &Netns) -> Result<Self> {
        netns.run_in(Self::open)?
    }

    /// Every connected UDP socket of the namespace.
    ///
    /// # Errors
    /// When the kernel refuses or its answer cannot be read.
    pub fn connected_udp(&mut self) -> Result<Vec<UdpSocket>> {
        let mut found = Vec::new();
        for family in [libc::AF_INET as u8, libc::AF_INET6 as u8] {
            self.send(BY_FAMILY, NLM_F_DUMP, family, &[0; ID])?;
            let mut done = false;
            while !done {
                for (kind, body) in self.receive("UDP sockets")? {
                    match kind {
                        NLMSG_DONE => done = true,
                        NLMSG_ERROR => {
                            return Err(refused(Action::Read, "UDP sockets", &body).unwrap_or_else(|| {
                                Error::Malformed {
                                    object: "UDP sockets".to_owned(),
                                    reason: "an error without a number".to_owned(),
                                }
                            }));
                        }
                        BY_FAMILY => found.extend(parse(&body)),
                        _ => {}
                    }
                }
            }
        }
        Ok(found)
    }

    /// Ends a socket: its owner's next call fails with `ECONNABORTED`. `false` when it is gone already.
    ///
    /// # Errors
    /// When the kernel refuses, e.g. without `CONFIG_INET_DIAG_DESTROY`.
    pub fn destroy(&mut self, socket: &UdpSocket) -> Result<bool> {
        self.send(DESTROY, NLM_F_ACK, socket.family, &socket.id)?;
        let object = format!("UDP socket {} -> {}", socket.local, socket.remote);
        loop {
            for (kind, body) in self.receive(&object)? {
                if kind != NLMSG_ERROR {
                    continue;
                }
                return match refused(Action::Delete, &object, &body) {
                    None => Ok(true),
                    Some(e) if matches!(e.errno(), Some(Errno::ENOENT | Errno::ESTALE)) => Ok(false),
                    Some(e) => Err(e),
                };
            }
        }
    }

    fn send(&mut self, kind: u16, flags: u16, family: u8, id: &[u8; ID]) -> Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut out = Vec::with_capacity(HEADER + 8 + ID);
        out.extend_from_slice(&((HEADER + 8 + ID) as u32).to_ne_bytes());
        out.extend_from_slice(&kind.to_ne_bytes());
        out.extend_from_slice(&(NLM_F_REQUEST | flags).to_ne_bytes());
        out.extend_from_slice(&self.sequence.to_ne_bytes());
        out.extend_from_slice(&0u32.to_ne_bytes());
        out.extend_from_slice(&[family, UDP, 0, 0]);
        out.extend_from_slice(&CONNECTED.to_ne_bytes());
        out.extend_from_slice(id);
        self.inner.send(&out, 0).map_err(Error::socket("send"))?;
        Ok(())
    }

    /// Messages of one read that answer the last request: kind and body.
    fn receive(&mut self, object: &str) -> Result<Vec<(u16, Vec<u8>)>> {
        let malformed =
            |reason: &str| Error::Malformed { object: object.to_owned(), reason: reason.to_owned() };
        let mut buffer = Vec::with_capacity(BUFFER);
        self.inner.recv(&mut buffer, 0).map_err(Error::socket("receive"))?;
        let mut rest = &buffer[..];
        let mut out = Vec::new();
        while let Some((header, _)) = rest.split_first_chunk::<HEADER>() {
            let [a, b, c, d, k0, k1, _, _, s0, s1, s2, s3, ..] = *header;
            let len = u32::from_ne_bytes([a, b, c, d]) as usize;
            let body = rest.get(HEADER..len).ok_or_else(|| malformed("a message is shorter than it says"))?;
            // Answers to what an earlier call gave up on are older.
            if u32::from_ne_bytes([s0, s1, s2, s3]) == self.sequence {
                out.push((u16::from_ne_bytes([k0, k1]), body.to_vec()));
            }
            rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(out)
    }
}

/// The error of an `NLMSG_ERROR`; `None` when it is an acknowledgement.
fn refused(action: Action, object: &str, body: &[u8]) -> Option<Error> {
    let code = body.first_chunk::<4>().map_or(0, |b| i32::from_ne_bytes(*b));
    (code != 0).then(|| Error::Refused {
        action,
        object: object.to_owned(),
        errno: Errno::from_raw(-code),
        detail: None,
    })
}

fn parse(body: &[u8]) -> Option<UdpSocket> {
    let message = body.first_chunk::<MESSAGE>()?;
    let family = message[0];
    let id: [u8; ID] = *message.last_chunk()?;
    let port = |at: usize| u16::from_be_bytes([id[at], id[at + 1]]);
    let ip = |at: usize| -> Option<IpAddr> {
        let bytes: [u8; 16] = *id.get(at..)?.first_chunk()?;
        if i32::from(family) == libc::AF_INET {
            return Some(Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]).into());
        }
        Some(IpAddr::from(Ipv6Addr::from(bytes)).to_canonical())
    };
    let low = u32::from_ne_bytes([id[40], id[41], id[42], id[43]]);
    let high = u32::from_ne_bytes([id[44], id[45], id[46], id[47]]);
    Some(UdpSocket {
        local: Endpoint::new(ip(4)?, port(0)),
        remote: Endpoint::new(ip(20)?, port(2)),
        cookie: u64::from(high) << 32 | u64::from(low),
        family,
        id,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_read_and_a_short_one_is_none() {
        let mut body = vec![libc::AF_INET6 as u8, 1, 0, 0];
        let mut id = [0u8; ID];
        id[..4].copy_from_slice(&[0x0f, 0xa0, 0x00, 0x35]);
        id[4..20].copy_from_slice(&Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped().octets());
        id[20..36].copy_from_slice(&Ipv4Addr::new(10, 0, 0, 2).to_ipv6_mapped().octets());
        id[40..44].copy_from_slice(&7u32.to_ne_bytes());
        id[44..48].copy_from_slice(&1u32.to_ne_bytes());
        body.extend_from_slice(&id);
        let socket = parse(&body).expect("parsed");
        assert_eq!(socket.local, "10.0.0.1:4000".parse().expect("address"));
        assert_eq!(socket.remote, "10.0.0.2:53".parse().expect("address"));
        assert_eq!(socket.cookie, (1 << 32) | 7);
        assert_eq!(parse(&body[..MESSAGE - 1]), None);
    }

    #[test]
    fn a_connected_socket_of_this_process_is_listed_with_its_cookie() {
        let server = std::net::UdpSocket::bind("127.0.0.1:0").expect("server");
        let client = std::net::UdpSocket::bind("127.0.0.1:0").expect("client");
        client.connect(server.local_addr().expect("address")).expect("connect");
        let all = Diag::open().and_then(|mut d| d.connected_udp()).expect("list");
        let found: Vec<_> = all.iter().filter(|s| s.local == client.local_addr().expect("address")).collect();
        assert_eq!(found.len(), 1, "{all:?}");
        assert_eq!(found[0].remote, server.local_addr().expect("address"));
        assert_ne!(found[0].cookie, 0);
    }
}
