//! UDP echo, one-way numbered streams, and an SCTP responder made of a raw socket.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use flowloom_netlink::Netns;
use nix::sys::socket::{MsgFlags, SockaddrStorage, recvfrom, sendto, setsockopt, sockopt};
use std::os::fd::AsRawFd;

use crate::net::{any, bind_to, bound, inside, open_raw};
use crate::packet::{ip_protocol, sctp_chunk, sctp_packet};
use crate::stop::Worker;

/// Sends every datagram back to its sender. Stopped on drop.
#[derive(Debug)]
pub struct EchoServer {
    addr: SocketAddr,
    count: Arc<AtomicU64>,
    _worker: Worker<()>,
}

impl EchoServer {
    /// Binds (port 0 = any free one) and serves.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn start(ns: &Netns, addr: SocketAddr) -> Result<Self> {
        let socket = bound(ns, addr, UdpSocket::bind).with_context(|| format!("binding udp {addr}"))?;
        socket.set_nonblocking(true)?;
        let addr = socket.local_addr()?;
        let count = Arc::new(AtomicU64::new(0));
        let shared = count.clone();
        let worker = Worker::start("udp-echo", move |stop| {
            let mut buffer = vec![0; 65_536];
            while !stop.wait(&[socket.as_fd()], None) {
                while let Ok((n, from)) = socket.recv_from(&mut buffer) {
                    shared.fetch_add(1, Ordering::SeqCst);
                    let _ = socket.send_to(&buffer[..n], from);
                }
            }
        })?;
        Ok(Self { addr, count, _worker: worker })
    }

    /// Where it is bound.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Datagrams received so far.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }
}

/// First bytes of a numbered datagram: the number, then a mark that says whose stream it is.
const HEADER: usize = 16;

/// Sends numbered datagrams one way, and never reads. Stopped on drop.
#[derive(Debug)]
pub struct UdpSender {
    local: SocketAddr,
    sent: Arc<AtomicU64>,
    refused: Arc<AtomicU64>,
    worker: Worker<()>,
}

impl UdpSender {
    /// Starts: one datagram per interval, marked with `mark` and `length` bytes long (16 at least).
    ///
    /// # Errors
    /// When the source cannot be bound.
    pub fn start(
        ns: &Netns,
        from: Option<SocketAddr>,
        to: SocketAddr,
        interval: Duration,
        mark: u64,
        length: usize,
    ) -> Result<Self> {
        let from = from.unwrap_or_else(|| SocketAddr::new(any(to.ip()), 0));
        let socket = bound(ns, from, UdpSocket::bind).with_context(|| format!("binding udp {from}"))?;
        let local = socket.local_addr()?;
        let (sent, refused) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (counted, errors) = (sent.clone(), refused.clone());
        let worker = Worker::start("udp-sender", move |stop| {
            let mut datagram = vec![0xfb; length.max(HEADER)];
            datagram[8..HEADER].copy_from_slice(&mark.to_be_bytes());
            for number in 0u64.. {
                datagram[..8].copy_from_slice(&number.to_be_bytes());
                match socket.send_to(&datagram, to) {
                    Ok(_) => counted.store(number + 1, Ordering::SeqCst),
                    Err(_) => drop(errors.fetch_add(1, Ordering::SeqCst)),
                }
                if stop.pause(interval) {
                    return;
                }
            }
        })?;
        Ok(Self { local, sent, refused, worker })
    }

    /// Its source; the address is unspecified unless it was given.
    #[must_use]
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Numbers below this were tried; the kernel took those that it did not refuse.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::SeqCst)
    }

    /// Datagrams that the local kernel refused (an ICMP error that came back, no route).
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::SeqCst)
    }

    /// Ends it; how many were tried.
    #[must_use]
    pub fn stop(self) -> u64 {
        let Self { sent, worker, .. } = self;
        worker.finish();
        sent.load(Ordering::SeqCst)
    }
}

/// One datagram of a [`UdpSender`], as received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Its number.
    pub number: u64,
    /// Whose stream.
    pub mark: u64,
    /// Its sender.
    pub from: SocketAddr,
    /// When it was read.
    pub at: Instant,
}

/// Records numbered datagrams and never answers. Stopped on drop.
#[derive(Debug)]
pub struct UdpReceiver {
    addr: SocketAddr,
    arrivals: Arc<Mutex<Vec<Arrival>>>,
    foreign: Arc<AtomicU64>,
    _worker: Worker<()>,
}

impl UdpReceiver {
    /// Binds (port 0 = any free one) and records.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn start(ns: &Netns, addr: SocketAddr) -> Result<Self> {
        let socket = bound(ns, addr, UdpSocket::bind).with_context(|| format!("binding udp {addr}"))?;
        socket.set_nonblocking(true)?;
        setsockopt(&socket, sockopt::RcvBufForce, &(8 * 1024 * 1024))?;
        let addr = socket.local_addr()?;
        let (arrivals, foreign) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicU64::new(0)));
        let (list, others) = (arrivals.clone(), foreign.clone());
        let worker = Worker::start("udp-receiver", move |stop| {
            let mut buffer = vec![0; 65_536];
            loop {
                let stopping = stop.wait(&[socket.as_fd()], None);
                while let Ok((n, from)) = socket.recv_from(&mut buffer) {
                    match (
                        buffer[..n].first_chunk::<8>(),
                        buffer[..n].get(8..HEADER).and_then(|b| b.first_chunk::<8>()),
                    ) {
                        (Some(number), Some(mark)) => {
                            let arrival = Arrival {
                                number: u64::from_be_bytes(*number),
                                mark: u64::from_be_bytes(*mark),
                                from,
                                at: Instant::now(),
                            };
                            list.lock().unwrap_or_else(PoisonError::into_inner).push(arrival);
                        }
                        _ => drop(others.fetch_add(1, Ordering::SeqCst)),
                    }
                }
                if stopping {
                    return;
                }
            }
        })?;
        Ok(Self { addr, arrivals, foreign, _worker: worker })
    }

    /// Where it is bound.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many arrived.
    #[must_use]
    pub fn count(&self) -> usize {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// All that arrived, in order.
    #[must_use]
    pub fn arrivals(&self) -> Vec<Arrival> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Datagrams too short to be numbered.
    #[must_use]
    pub fn foreign(&self) -> u64 {
        self.foreign.load(Ordering::SeqCst)
    }

    /// The numbers below `sent` that never arrived, of one stream.
    #[must_use]
    pub fn missing(&self, mark: u64, sent: u64) -> Vec<u64> {
        let got: BTreeSet<u64> =
            self.arrivals().iter().filter(|a| a.mark == mark).map(|a| a.number).collect();
        (0..sent).filter(|n| !got.contains(n)).collect()
    }
}

/// Answers SCTP INIT with INIT ACK on one port, by a raw socket: this kernel may have no SCTP. Stopped on drop.
#[derive(Debug)]
pub struct SctpServer {
    count: Arc<AtomicU64>,
    _worker: Worker<()>,
}

impl SctpServer {
    /// Starts to answer on an address and port.
    ///
    /// # Errors
    /// When the raw socket cannot be opened or bound.
    pub fn start(ns: &Netns, addr: SocketAddr) -> Result<Self> {
        let socket = inside(ns, || {
            let fd = open_raw(addr.ip(), ip_protocol::SCTP)?;
            bind_to(&fd, SocketAddr::new(addr.ip(), 0))?;
            Ok(fd)
        })
        .with_context(|| format!("opening a raw socket for sctp {addr}"))?;
        let count = Arc::new(AtomicU64::new(0));
        let shared = count.clone();
        let worker = Worker::start("sctp-server", move |stop| {
            let mut buffer = vec![0; 65_536];
            while !stop.wait(&[socket.as_fd()], None) {
                while let Ok((n, Some(from))) = recvfrom::<SockaddrStorage>(socket.as_raw_fd(), &mut buffer) {
                    let Some(init) = sctp_payload(&buffer[..n], addr.ip()) else { continue };
                    if u16::from_be_bytes([init[2], init[3]]) != addr.port()
                        || init.get(12) != Some(&sctp_chunk::INIT)
                    {
                        continue;
                    }
                    shared.fetch_add(1, Ordering::SeqCst);
                    let tag =
                        init.get(16..20).and_then(|b| b.first_chunk::<4>()).copied().unwrap_or_default();
                    let to = u16::from_be_bytes([init[0], init[1]]);
                    let answer =
                        sctp_packet(addr.port(), to, u32::from_be_bytes(tag), sctp_chunk::INIT_ACK, &[0; 16]);
                    let _ = sendto(socket.as_raw_fd(), &answer, &from, MsgFlags::empty());
                }
            }
        })?;
        Ok(Self { count, _worker: worker })
    }

    /// INITs seen so far.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }
}

/// The SCTP packet in what a raw socket received: an IPv4 one shows the IP header, an IPv6 one does not.
pub(crate) fn sctp_payload(received: &[u8], ip: IpAddr) -> Option<&[u8]> {
    let skip = if ip.is_ipv4() { usize::from(received.first()? & 15) * 4 } else { 0 };
    received.get(skip..).filter(|p| p.len() >= 12)
}
