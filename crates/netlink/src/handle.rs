//! A connection to one namespace's rtnetlink.

use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_route::RouteNetlinkMessage;

use crate::error::{Error, Result};
use crate::netns::{self, Netns, NetnsCookie};
use crate::socket::{Answer, Request, Socket};
use crate::sysctl::{self, Setting};

/// Reads and changes one network namespace. The socket belongs to that namespace wherever the handle is used;
/// one handle serves one thread at a time, and opening another is cheap.
#[derive(Debug)]
pub struct Handle {
    socket: Socket,
    /// `None` for the caller's own namespace.
    netns: Option<Netns>,
}

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Handle {
    /// For the calling thread's namespace.
    ///
    /// # Errors
    /// When the socket cannot be opened.
    pub fn new() -> Result<Self> {
        Ok(Self { socket: Socket::open()?, netns: None })
    }

    /// For another namespace.
    ///
    /// # Errors
    /// When the namespace cannot be entered or the socket not be opened.
    pub fn in_netns(netns: &Netns) -> Result<Self> {
        let socket = netns.run_in(Socket::open)??;
        Ok(Self { socket, netns: Some(netns.try_clone()?) })
    }

    /// Writes the settings that differ; returns how many were written. In a namespace of its own this costs a
    /// thread, so pass all of them at once.
    ///
    /// # Errors
    /// The first setting that cannot be read or written.
    pub fn ensure_sysctls(&self, settings: &[Setting]) -> Result<usize> {
        match &self.netns {
            None => sysctl::ensure(settings),
            Some(ns) => ns.run_in(|| sysctl::ensure(settings))?,
        }
    }

    /// The cookie of the namespace that this reads and changes.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn netns_cookie(&self) -> Result<NetnsCookie> {
        netns::cookie_of(self.as_fd())
            .map_err(|source| Error::Socket { what: "read the namespace's cookie of", source })
    }

    /// The socket's number, unique in its namespace.
    pub(crate) fn port(&self) -> u32 {
        self.socket.port()
    }

    pub(crate) fn request(&mut self, request: Request) -> Result<Answer> {
        self.socket.request(request)
    }

    pub(crate) fn transact(&mut self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        self.socket.transact(requests)
    }

    pub(crate) fn read(&mut self, request: Request) -> Result<Option<RouteNetlinkMessage>> {
        self.socket.read(request)
    }

    pub(crate) fn dump(
        &mut self,
        message: &RouteNetlinkMessage,
        object: &str,
    ) -> Result<Vec<RouteNetlinkMessage>> {
        self.socket.dump(message, object)
    }
}
