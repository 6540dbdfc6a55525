//! TCP servers, clients and long flows.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use flowloom_netlink::Netns;

use crate::net::{bound, tcp_connect};
use crate::stop::{StopEvent, Worker};

/// What a server does with what it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Sends it back.
    Echo,
    /// Counts and drops it.
    Discard,
}

#[derive(Debug, Default)]
struct Counts {
    accepted: AtomicU64,
    bytes: AtomicU64,
    peers: Mutex<Vec<SocketAddr>>,
}

/// A TCP server in a namespace; any number of connections, one thread. Stopped on drop.
#[derive(Debug)]
pub struct TcpServer {
    addr: SocketAddr,
    counts: Arc<Counts>,
    _worker: Worker<()>,
}

impl TcpServer {
    /// Listens (port 0 = any free one) and serves.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn start(ns: &Netns, addr: SocketAddr, mode: Mode) -> Result<Self> {
        let listener =
            bound(ns, addr, TcpListener::bind).with_context(|| format!("listening on tcp {addr}"))?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let counts = Arc::new(Counts::default());
        let shared = counts.clone();
        let worker = Worker::start("tcp-server", move |stop| serve(&listener, mode, &shared, &stop))?;
        Ok(Self { addr, counts, _worker: worker })
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Connections accepted so far.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.counts.accepted.load(Ordering::SeqCst)
    }

    /// Bytes received so far, over all connections.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.counts.bytes.load(Ordering::SeqCst)
    }

    /// Who connected, in order.
    #[must_use]
    pub fn peers(&self) -> Vec<SocketAddr> {
        self.counts.peers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

struct Connection {
    stream: TcpStream,
    unsent: Vec<u8>,
}

fn serve(listener: &TcpListener, mode: Mode, counts: &Counts, stop: &StopEvent) {
    let mut connections: Vec<Connection> = Vec::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let blocked = connections.iter().any(|c| !c.unsent.is_empty());
        let mut fds = vec![listener.as_fd()];
        fds.extend(connections.iter().map(|c| c.stream.as_fd()));
        // A client that does not read its echo is looked at again a little later.
        if stop.wait(&fds, blocked.then_some(Duration::from_millis(2))) {
            return;
        }
        while let Ok((stream, peer)) = listener.accept() {
            if stream.set_nonblocking(true).is_ok() && stream.set_nodelay(true).is_ok() {
                counts.peers.lock().unwrap_or_else(PoisonError::into_inner).push(peer);
                counts.accepted.fetch_add(1, Ordering::SeqCst);
                connections.push(Connection { stream, unsent: Vec::new() });
            }
        }
        connections.retain_mut(|c| turn(c, mode, counts, &mut buffer));
    }
}

/// Reads and answers what there is; false when the connection is over.
fn turn(c: &mut Connection, mode: Mode, counts: &Counts, buffer: &mut [u8]) -> bool {
    if c.unsent.is_empty() {
        match c.stream.read(buffer) {
            Ok(0) => return false,
            Ok(n) => {
                counts.bytes.fetch_add(n as u64, Ordering::SeqCst);
                if mode == Mode::Echo {
                    c.unsent.extend_from_slice(&buffer[..n]);
                }
            }
            Err(e) if would_block(&e) => {}
            Err(_) => return false,
        }
    }
    while !c.unsent.is_empty() {
        match c.stream.write(&c.unsent) {
            Ok(n) => drop(c.unsent.drain(..n)),
            Err(e) if would_block(&e) => break,
            Err(_) => return false,
        }
    }
    true
}

fn would_block(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// One connection, used step by step.
#[derive(Debug)]
pub struct TcpClient {
    stream: TcpStream,
}

impl TcpClient {
    /// Connects from a namespace.
    ///
    /// # Errors
    /// As connect(2); `TimedOut` when nobody answered.
    pub fn connect(ns: &Netns, to: SocketAddr, timeout: Duration) -> io::Result<Self> {
        Self::connect_from(ns, None, to, timeout)
    }

    /// Connects from a namespace and a source address.
    ///
    /// # Errors
    /// As connect(2); `TimedOut` when nobody answered.
    pub fn connect_from(
        ns: &Netns,
        source: Option<SocketAddr>,
        to: SocketAddr,
        timeout: Duration,
    ) -> io::Result<Self> {
        Ok(Self { stream: tcp_connect(ns, source, to, timeout)? })
    }

    /// Sends and waits for the same bytes from an echo server.
    ///
    /// # Errors
    /// As send(2) and recv(2); `TimedOut`; `InvalidData` when something else came back.
    pub fn round_trip(&mut self, payload: &[u8], timeout: Duration) -> io::Result<Duration> {
        let start = Instant::now();
        self.send(payload)?;
        let mut back = vec![0; payload.len()];
        let mut got = 0;
        while got < back.len() {
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(io::Error::from(io::ErrorKind::TimedOut));
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(&mut back[got..]) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                Ok(n) => got += n,
                Err(e) if would_block(&e) => {}
                Err(e) => return Err(e),
            }
        }
        if back == payload { Ok(start.elapsed()) } else { Err(io::Error::from(io::ErrorKind::InvalidData)) }
    }

    /// Hands bytes to the kernel.
    ///
    /// # Errors
    /// As send(2).
    pub fn send(&mut self, payload: &[u8]) -> io::Result<()> {
        self.stream.write_all(payload)
    }

    /// The stream itself.
    #[must_use]
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }
}

/// What became of a [`TcpFlow`].
#[derive(Debug, Clone, Default)]
pub struct FlowReport {
    /// Round trips that came back whole.
    pub round_trips: u64,
    /// The longest round trip.
    pub longest: Duration,
    /// Why it ended, when not because it was told to.
    pub error: Option<String>,
}

/// A connection that makes one round trip after the other in the background; what "an established flow loses
/// nothing" is measured with.
#[derive(Debug)]
pub struct TcpFlow {
    trips: Arc<AtomicU64>,
    worker: Worker<FlowReport>,
}

impl TcpFlow {
    /// Connects to an echo server and starts; a round trip that takes longer than `patience` ends the flow.
    ///
    /// # Errors
    /// When it cannot connect.
    pub fn start(ns: &Netns, to: SocketAddr, interval: Duration, patience: Duration) -> Result<Self> {
        let mut client =
            TcpClient::connect(ns, to, patience).with_context(|| format!("connecting to {to}"))?;
        let trips = Arc::new(AtomicU64::new(0));
        let shared = trips.clone();
        let worker = Worker::start("tcp-flow", move |stop| {
            let mut report = FlowReport::default();
            while !stop.pause(interval) {
                match client.round_trip(&report.round_trips.to_be_bytes(), patience) {
                    Ok(took) => {
                        report.round_trips += 1;
                        report.longest = report.longest.max(took);
                        shared.store(report.round_trips, Ordering::SeqCst);
                    }
                    Err(e) => {
                        report.error = Some(format!("round trip {}: {e}", report.round_trips + 1));
                        break;
                    }
                }
            }
            report
        })?;
        Ok(Self { trips, worker })
    }

    /// Round trips so far.
    #[must_use]
    pub fn round_trips(&self) -> u64 {
        self.trips.load(Ordering::SeqCst)
    }

    /// Whether it ended by itself (it does so by an error only).
    #[must_use]
    pub fn ended(&self) -> bool {
        self.worker.is_finished()
    }

    /// Ends it.
    #[must_use]
    pub fn stop(self) -> FlowReport {
        self.worker
            .finish()
            .unwrap_or_else(|| FlowReport { error: Some("panicked".into()), ..FlowReport::default() })
    }
}
