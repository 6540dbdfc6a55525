//! Notifications: what changed in a namespace, as it changes.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};

use crate::address::Address;
use crate::error::{Error, Result};
use crate::link::Link;
use crate::netns::Netns;
use crate::route::Route;
use crate::socket::parse_datagram;

/// Bytes of notifications that may wait; a burst of a few thousand links fits.
const RECEIVE_BUFFER: usize = 4 * 1024 * 1024;
const DATAGRAM: usize = 64 * 1024;

/// What to hear about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variants are the kinds of object")]
pub enum Interest {
    Links,
    Addresses,
    Routes,
}

impl Interest {
    /// Numbers of the multicast groups (`RTNLGRP_*` of linux/rtnetlink.h).
    fn groups(self) -> &'static [u32] {
        match self {
            Self::Links => &[1],
            Self::Addresses => &[5, 9],
            Self::Routes => &[7, 11],
        }
    }
}

/// One notification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A link is new or changed.
    LinkChanged(Box<Link>),
    /// A link is gone.
    LinkRemoved(Box<Link>),
    /// An address is new or changed.
    AddressChanged(Address),
    /// An address is gone.
    AddressRemoved(Address),
    /// A route is new or changed.
    RouteChanged(Box<Route>),
    /// A route is gone.
    RouteRemoved(Box<Route>),
    /// Notifications were lost (or not understood): read the state anew.
    Lost,
}

/// A socket that hears about changes; readable when there are some.
#[derive(Debug)]
pub struct Monitor {
    socket: Socket,
    buffer: Vec<u8>,
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Monitor {
    /// Of the calling thread's namespace. What changes after this call is heard; read the state after it, not before.
    ///
    /// # Errors
    /// When the socket cannot be opened.
    pub fn new(interests: &[Interest]) -> Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(Error::socket("open"))?;
        socket.bind(&SocketAddr::new(0, 0)).map_err(Error::socket("bind"))?;
        socket.set_non_blocking(true).map_err(Error::socket("make non-blocking"))?;
        // The forced form needs CAP_NET_ADMIN; the plain one is bounded by a sysctl. Either is only about bursts.
        if setsockopt(&socket.as_fd(), sockopt::RcvBufForce, &RECEIVE_BUFFER).is_err() {
            let _ = setsockopt(&socket.as_fd(), sockopt::RcvBuf, &RECEIVE_BUFFER);
        }
        for group in interests.iter().flat_map(|i| i.groups()) {
            socket.add_membership(*group).map_err(Error::socket("subscribe"))?;
        }
        Ok(Self { socket, buffer: vec![0; DATAGRAM] })
    }

    /// Of another namespace.
    ///
    /// # Errors
    /// When the namespace cannot be entered or the socket not be opened.
    pub fn in_netns(netns: &Netns, interests: &[Interest]) -> Result<Self> {
        netns.run_in(|| Self::new(interests))?
    }

    /// Everything that waits now; empty when nothing does. [`Event::Lost`] stands for what could not be kept.
    ///
    /// # Errors
    /// When the socket itself fails.
    pub fn read(&mut self) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        loop {
            let mut into = &mut self.buffer[..];
            match self.socket.recv(&mut into, libc::MSG_TRUNC) {
                Ok(n) if n > self.buffer.len() => events.push(Event::Lost),
                Ok(n) => match parse_datagram(&self.buffer[..n]) {
                    Ok(list) => events.extend(list.iter().filter_map(event)),
                    Err(_) => events.push(Event::Lost),
                },
                Err(e) => match e.raw_os_error().map(Errno::from_raw) {
                    Some(Errno::EAGAIN) => return Ok(events),
                    Some(Errno::EINTR) => {}
                    Some(Errno::ENOBUFS) => events.push(Event::Lost),
                    _ => return Err(Error::socket("receive")(e)),
                },
            }
        }
    }

    /// Waits until something is readable, at most `timeout`; whether there is.
    ///
    /// # Errors
    /// When the descriptor cannot be polled.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, timeout) {
            Ok(n) => Ok(n > 0),
            Err(Errno::EINTR) => Ok(false),
            Err(e) => Err(Error::socket("poll")(e.into())),
        }
    }
}

fn event(message: &RouteNetlinkMessage) -> Option<Event> {
    Some(match message {
        RouteNetlinkMessage::NewLink(m) => Event::LinkChanged(Box::new(Link::from_message(m))),
        RouteNetlinkMessage::DelLink(m) => Event::LinkRemoved(Box::new(Link::from_message(m))),
        RouteNetlinkMessage::NewAddress(m) => Event::AddressChanged(Address::from_message(m)?),
        RouteNetlinkMessage::DelAddress(m) => Event::AddressRemoved(Address::from_message(m)?),
        RouteNetlinkMessage::NewRoute(m) => Event::RouteChanged(Box::new(Route::from_message(m)?)),
        RouteNetlinkMessage::DelRoute(m) => Event::RouteRemoved(Box::new(Route::from_message(m)?)),
        _ => return None,
    })
}
