//! A workload the agent wired, seen from inside.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use flowloom_api::v1::EndpointInfo;
use flowloom_netlink::Netns;
use flowloom_testkit::TcpClient;

/// What became of an attempt to reach something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// An answer came.
    Yes,
    /// TCP reset or port unreachable.
    Refused,
    /// ICMP unreachable or prohibited.
    Unreachable,
    /// Nothing came.
    Silence,
}

impl Reached {
    /// A word for tables.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Yes => "reached",
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
            Self::Silence => "silence",
        }
    }
}

/// A wired workload.
#[derive(Debug)]
pub struct Workload {
    /// Its namespace.
    pub netns: Netns,
    /// What the agent says of it.
    pub info: EndpointInfo,
}

impl Workload {
    /// Opens the namespace that the agent names.
    ///
    /// # Errors
    /// When it has none.
    pub fn open(info: EndpointInfo) -> Result<Self> {
        let path =
            info.netns.as_deref().with_context(|| format!("{} has no namespace", info.endpoint.name))?;
        Ok(Self { netns: Netns::open(Path::new(path))?, info })
    }

    /// Its address of a family (4 or 6).
    ///
    /// # Errors
    /// When it has none.
    pub fn ip(&self, family: u8) -> Result<IpAddr> {
        let of_family = |ip: &&IpAddr| ip.is_ipv4() == (family == 4);
        self.info
            .ips
            .iter()
            .find(of_family)
            .copied()
            .with_context(|| format!("{} has no IPv{family}", self.info.endpoint.name))
    }

    /// Connects and exchanges a few bytes.
    ///
    /// # Errors
    /// What is neither an answer nor a refusal.
    pub fn reach_tcp(&self, to: SocketAddr, patience: Duration) -> Result<Reached> {
        match TcpClient::connect(&self.netns, to, patience) {
            Ok(mut client) => match client.round_trip(b"flowloom", patience) {
                Ok(_) => Ok(Reached::Yes),
                Err(e) => outcome(&e),
            },
            Err(e) => outcome(&e),
        }
        .with_context(|| format!("tcp from {} to {to}", self.info.endpoint.name))
    }
}

fn outcome(e: &std::io::Error) -> Result<Reached> {
    match e.kind() {
        ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset => Ok(Reached::Refused),
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable | ErrorKind::PermissionDenied => {
            Ok(Reached::Unreachable)
        }
        ErrorKind::TimedOut | ErrorKind::WouldBlock => Ok(Reached::Silence),
        _ => Err(anyhow::anyhow!("{e}")),
    }
}
