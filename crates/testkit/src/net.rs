//! Sockets of a namespace, usable from any thread.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use flowloom_netlink::Netns;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect, getsockopt, setsockopt,
    socket, sockopt,
};

use crate::time::within;

pub(crate) fn family(ip: IpAddr) -> AddressFamily {
    if ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

/// Any address of that family.
pub(crate) fn any(ip: IpAddr) -> IpAddr {
    if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// Runs in the namespace; a failure to enter is an I/O error like the others.
pub(crate) fn inside<T: Send>(ns: &Netns, f: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    ns.run_in(f).map_err(io::Error::other)?
}

/// How long an address may still be held by a server that has ended.
const RELEASE: Duration = Duration::from_secs(5);

/// Binds inside the namespace. A server dropped just now may be there still: a process that another
/// thread forks holds every descriptor of ours until its exec, so a taken address is tried again.
pub(crate) fn bound<T: Send>(
    ns: &Netns,
    addr: SocketAddr,
    bind: impl Fn(SocketAddr) -> io::Result<T> + Send + Sync,
) -> io::Result<T> {
    within(RELEASE, || match inside(ns, || bind(addr)) {
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => Err(e),
        other => Ok(other),
    })?
}

/// A non-blocking socket; call inside the namespace.
pub(crate) fn open(ip: IpAddr, kind: SockType, protocol: Option<SockProtocol>) -> nix::Result<OwnedFd> {
    socket(family(ip), kind, SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC, protocol)
}

/// A raw socket of an IP protocol that nix has no name for; call inside the namespace.
pub(crate) fn open_raw(ip: IpAddr, protocol: u8) -> io::Result<OwnedFd> {
    use std::os::fd::FromRawFd;
    let flags = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: socket(2) takes three integers and returns a new descriptor or -1.
    let fd = unsafe { libc::socket(family(ip) as libc::c_int, flags, libc::c_int::from(protocol)) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above returned this descriptor and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn bind_to(fd: &OwnedFd, addr: SocketAddr) -> nix::Result<()> {
    setsockopt(fd, sockopt::ReuseAddr, &true)?;
    bind(fd.as_raw_fd(), &SockaddrStorage::from(addr))
}

pub(crate) fn connect_to(fd: &OwnedFd, addr: SocketAddr) -> nix::Result<()> {
    connect(fd.as_raw_fd(), &SockaddrStorage::from(addr))
}

pub(crate) fn pending_error(fd: &impl AsFd) -> Option<Errno> {
    match getsockopt(fd, sockopt::SocketError) {
        Ok(0) => None,
        Ok(n) => Some(Errno::from_raw(n)),
        Err(e) => Some(e),
    }
}

/// Waits until readable (or writable); false when the time is over.
pub(crate) fn wait(fd: BorrowedFd<'_>, flags: PollFlags, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut list = [PollFd::new(fd, flags)];
        // Rounded up, so that the last wait is not a spin of zero timeouts.
        let timeout = PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX);
        match poll(&mut list, timeout) {
            Err(Errno::EINTR) => {}
            Ok(n) => return n > 0,
            Err(_) => return false,
        }
    }
}

/// Connects from a namespace, with a bound source when given. The stream blocks.
pub(crate) fn tcp_connect(
    ns: &Netns,
    source: Option<SocketAddr>,
    to: SocketAddr,
    timeout: Duration,
) -> io::Result<TcpStream> {
    let deadline = Instant::now() + timeout;
    let fd = inside(ns, || {
        let fd = open(to.ip(), SockType::Stream, None)?;
        if let Some(source) = source {
            bind_to(&fd, source)?;
        }
        Ok(fd)
    })?;
    match connect_to(&fd, to) {
        Ok(()) | Err(Errno::EINPROGRESS) => {}
        Err(e) => return Err(e.into()),
    }
    if !wait(fd.as_fd(), PollFlags::POLLOUT, deadline) {
        return Err(io::Error::from(io::ErrorKind::TimedOut));
    }
    if let Some(e) = pending_error(&fd) {
        return Err(e.into());
    }
    let stream = TcpStream::from(fd);
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
