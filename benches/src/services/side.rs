//! A node whose Services somebody serves, a client on it and two backends.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use flowloom_netlink::Netns;

use super::cgroup;
use super::connect::Backends;
use super::objects::{self, BACKENDS, TARGET};
use crate::k8s::server::Server;

/// How long a Service may take to answer; the slowest that is known (kube-proxy with 10,000 on a busy machine) takes a quarter.
pub(super) const PATIENCE: Duration = Duration::from_secs(90);

/// See the module's comment.
pub(super) struct Side {
    pub(super) server: Server,
    pub(super) backends: Backends,
    pub(super) services: usize,
    /// Whatever comes sooner after the last change is held back by who serves.
    pub(super) quiet: Duration,
    client: Netns,
    /// The control group that the client's threads join: sockets of others are not served, as no agent is theirs.
    group: Option<PathBuf>,
}

impl Side {
    /// Opens the backends in their namespaces.
    pub(super) fn new(
        server: Server,
        services: usize,
        quiet: Duration,
        client: &Netns,
        group: Option<PathBuf>,
        homes: [&Netns; 2],
    ) -> Result<Self> {
        let mut listeners = Vec::new();
        for (home, address) in homes.into_iter().zip(BACKENDS) {
            listeners.push(home.run_in(|| TcpListener::bind((address, TARGET)))??);
        }
        let backends = Backends::start(listeners)?;
        Ok(Self { server, backends, services, quiet, client: client.try_clone()?, group })
    }

    /// The Service that is asked: in the middle of all.
    pub(super) fn vip(&self) -> SocketAddr {
        let live = objects::live(self.services);
        objects::vip(live.get(live.len() / 2).copied().unwrap_or(0))
    }

    /// Its backends.
    pub(super) fn direct(&self) -> Vec<SocketAddr> {
        BACKENDS.into_iter().map(|b| (b, TARGET).into()).collect()
    }

    /// All Services that answer, the last one first: the wait for it is the longest.
    pub(super) fn vips(&self) -> Vec<SocketAddr> {
        objects::live(self.services).into_iter().rev().map(objects::vip).collect()
    }

    /// Runs as a process of the client: in its namespace and its control group, on a thread that ends afterwards.
    pub(super) fn inside<T: Send>(&self, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        self.client.run_in(|| {
            if let Some(group) = &self.group {
                cgroup::join(group)?;
            }
            f()
        })?
    }
}
