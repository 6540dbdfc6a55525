//! Raw frames: sending, and recording what passes a link.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use std::{io, mem};

use anyhow::{Context, Result};
use flowloom_netlink::{Handle, IfIndex, LinkName, Netns};
use nix::sys::socket::{setsockopt, sockopt};

use crate::net::inside;
use crate::parsed::Parsed;
use crate::stop::Worker;

const BUFFER: usize = 32 * 1024 * 1024;
const FRAME: usize = 128 * 1024;

fn packet_socket(ns: &Netns, link: &LinkName) -> Result<(OwnedFd, IfIndex)> {
    let index = Handle::in_netns(ns)?.expect_link(link)?.index;
    let fd = inside(ns, || open(index)).with_context(|| format!("opening a packet socket on {link}"))?;
    Ok((fd, index))
}

fn open(index: IfIndex) -> io::Result<OwnedFd> {
    let every = (libc::ETH_P_ALL as u16).to_be();
    // Protocol 0 receives nothing until it is bound, so that no other link's frame gets in first.
    // SAFETY: socket(2) takes three integers and returns a new descriptor or -1.
    let fd = unsafe {
        libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above returned this descriptor and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    setsockopt(&fd, sockopt::RcvBufForce, &BUFFER)?;
    // SAFETY: all-zero bytes are a valid sockaddr_ll.
    let mut addr: libc::sockaddr_ll = unsafe { mem::zeroed() };
    addr.sll_family = libc::AF_PACKET as u16;
    addr.sll_protocol = every;
    addr.sll_ifindex = i32::try_from(index.0).map_err(io::Error::other)?;
    // SAFETY: the address is a whole sockaddr_ll and the length is its size.
    let rc = unsafe {
        libc::bind(
            fd.as_raw_fd(),
            (&raw const addr).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(fd) } else { Err(io::Error::last_os_error()) }
}

/// Sends frames, headers and all, through one link.
#[derive(Debug)]
pub struct RawSender {
    fd: OwnedFd,
}

impl RawSender {
    /// On a link of a namespace.
    ///
    /// # Errors
    /// When there is no such link.
    pub fn open(ns: &Netns, link: &LinkName) -> Result<Self> {
        Ok(Self { fd: packet_socket(ns, link)?.0 })
    }

    /// As [`Self::open`], past the link's queueing and TCX egress (`PACKET_QDISC_BYPASS`), as a hostile workload would.
    ///
    /// # Errors
    /// When there is no such link.
    pub fn open_bypassing(ns: &Netns, link: &LinkName) -> Result<Self> {
        let sender = Self::open(ns, link)?;
        let on: libc::c_int = 1;
        // SAFETY: the option reads one int, which outlives the call.
        let rc = unsafe {
            libc::setsockopt(
                sender.fd.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_QDISC_BYPASS,
                (&raw const on).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        if rc == 0 { Ok(sender) } else { Err(io::Error::last_os_error().into()) }
    }

    /// Sends one frame (Ethernet header first, 14 bytes at least).
    ///
    /// # Errors
    /// When the link is down or the frame too long.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        loop {
            match nix::sys::socket::send(self.fd.as_raw_fd(), frame, nix::sys::socket::MsgFlags::empty()) {
                Ok(_) => return Ok(()),
                // The queue of the link is full: it drains by itself.
                Err(nix::errno::Errno::ENOBUFS | nix::errno::Errno::EAGAIN) => std::thread::yield_now(),
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Which way a frame went, seen from the namespace of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// It came in.
    In,
    /// It went out.
    Out,
}

/// A frame as a packet socket shows it: checksums may be unfinished and segments larger than the MTU on a veth with
/// offloads.
#[derive(Debug, Clone)]
pub struct Frame {
    /// Ethernet header and all; without VLAN tags that the kernel took off.
    pub bytes: Vec<u8>,
    /// Which way.
    pub direction: Direction,
    /// When it was read.
    pub at: Instant,
}

impl Frame {
    /// Taken apart; `None` when it is not IP.
    #[must_use]
    pub fn parsed(&self) -> Option<Parsed> {
        Parsed::from_frame(&self.bytes)
    }

    /// Whether these bytes are anywhere in it.
    #[must_use]
    pub fn contains(&self, needle: &[u8]) -> bool {
        self.bytes.windows(needle.len()).any(|w| w == needle)
    }
}

/// Records the frames of a link from the moment it is started until it is stopped.
#[derive(Debug)]
pub struct Capture {
    frames: Arc<Mutex<Vec<Frame>>>,
    count: Arc<AtomicUsize>,
    worker: Worker<bool>,
}

impl Capture {
    /// Starts; every frame from now on is seen.
    ///
    /// # Errors
    /// When there is no such link.
    pub fn start(ns: &Netns, link: &LinkName) -> Result<Self> {
        let (fd, _) = packet_socket(ns, link)?;
        let (frames, count) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)));
        let (list, counter) = (frames.clone(), count.clone());
        let worker = Worker::start("capture", move |stop| {
            let mut buffer = vec![0; FRAME];
            loop {
                // What was queued when the stop came is still read.
                let stopping = stop.wait(&[fd.as_fd()], None);
                while let Some(frame) = receive(&fd, &mut buffer) {
                    list.lock().unwrap_or_else(PoisonError::into_inner).push(frame);
                    counter.fetch_add(1, Ordering::SeqCst);
                }
                if stopping {
                    return lost_any(&fd);
                }
            }
        })?;
        Ok(Self { frames, count, worker })
    }

    /// Frames so far.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// A copy of the frames so far.
    #[must_use]
    pub fn frames(&self) -> Vec<Frame> {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops, and returns all frames.
    ///
    /// # Errors
    /// When the kernel dropped frames for want of buffer: the record has holes and proves nothing.
    pub fn stop(self) -> Result<Vec<Frame>> {
        let Self { frames, worker, .. } = self;
        let lost = worker.finish().context("the capture thread panicked")?;
        anyhow::ensure!(!lost, "the capture lost frames: it cannot say what did not pass");
        let list = mem::take(&mut *frames.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(list)
    }
}

fn receive(fd: &OwnedFd, buffer: &mut [u8]) -> Option<Frame> {
    loop {
        // SAFETY: all-zero bytes are a valid sockaddr_ll.
        let mut from: libc::sockaddr_ll = unsafe { mem::zeroed() };
        let mut length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: buffer and address are valid for writes of the lengths given, and outlive the call.
        let n = unsafe {
            libc::recvfrom(
                fd.as_raw_fd(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                0,
                (&raw mut from).cast(),
                &raw mut length,
            )
        };
        match usize::try_from(n) {
            Ok(n) => {
                let direction =
                    if from.sll_pkttype == libc::PACKET_OUTGOING { Direction::Out } else { Direction::In };
                return Some(Frame { bytes: buffer[..n].to_vec(), direction, at: Instant::now() });
            }
            Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
}

fn lost_any(fd: &OwnedFd) -> bool {
    const PACKET_STATISTICS: libc::c_int = 6;
    /// `struct tpacket_stats` of linux/if_packet.h.
    #[repr(C)]
    struct Stats {
        packets: u32,
        drops: u32,
    }
    let mut stats = Stats { packets: 0, drops: 0 };
    let mut length = size_of::<Stats>() as libc::socklen_t;
    // SAFETY: the option writes at most `length` bytes to `stats`, which has that size; both outlive the call.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_PACKET,
            PACKET_STATISTICS,
            (&raw mut stats).cast(),
            &raw mut length,
        )
    };
    rc != 0 || stats.drops > 0
}
