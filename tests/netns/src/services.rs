//! Services written by hand, and sockets that are served.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use aya::programs::CgroupAttachMode;
use flowloom_bpf_abi::{self as abi, map_name, service_scope};
use flowloom_netlink::Netns;
use flowloom_testkit::{PATIENCE, eventually};

use crate::lab::Lab;
use crate::programs::SOCKET_PROGRAMS;

/// Address of the services here, in every VPC.
#[must_use]
pub fn vip(v6: bool) -> IpAddr {
    if v6 { [0xfd96, 0, 0, 0, 0, 0, 0, 10].into() } else { [10, 96, 0, 10].into() }
}

/// TCP and UDP.
pub const PROTOCOLS: [u8; 2] = [6, 17];

/// The cgroup (v2) of this process.
///
/// # Errors
/// When cgroup v2 is not mounted.
pub fn own_cgroup() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("reading the mounts")?;
    let fields = mounts.lines().map(|l| l.split(' ').collect::<Vec<_>>());
    let mount = fields
        .into_iter()
        .find(|f| f.get(2) == Some(&"cgroup2"))
        .and_then(|f| f.get(1).map(PathBuf::from))
        .context("cgroup v2 is not mounted")?;
    let own = fs::read_to_string("/proc/self/cgroup").context("reading the own cgroup")?;
    let path = own.lines().find_map(|l| l.strip_prefix("0::")).context("no cgroup of v2")?;
    Ok(mount.join(path.trim_start_matches('/')))
}

impl Lab {
    /// The frontend (`at`, TCP and UDP) of a VPC stands for these backends from now on; `list` is a number that no list had.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn serve(
        &mut self,
        vpc: u32,
        at: SocketAddr,
        list: u32,
        backends: &[SocketAddr],
        change: impl Fn(&mut abi::ServiceRecord),
    ) -> Result<()> {
        self.serve_scope(service_scope::INSIDE, vpc, at, list, backends, change)
    }

    /// As [`Self::serve`], for who asks from outside.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn serve_outside(
        &mut self,
        vpc: u32,
        at: SocketAddr,
        list: u32,
        backends: &[SocketAddr],
    ) -> Result<()> {
        self.serve_scope(service_scope::OUTSIDE, vpc, at, list, backends, |_| ())
    }

    fn serve_scope(
        &mut self,
        scope: u8,
        vpc: u32,
        at: SocketAddr,
        list: u32,
        backends: &[SocketAddr],
        change: impl Fn(&mut abi::ServiceRecord),
    ) -> Result<()> {
        for (index, backend) in (0..).zip(backends) {
            let (addr, port) = (backend.ip().into(), backend.port().to_be_bytes());
            let member = abi::MemberKey { list, addr, port, pad: [0; 2] };
            self.programs.put(map_name::MEMBERS, member, abi::MemberRecord::default())?;
            let record = abi::BackendRecord { addr, port, flags: 0, pad: 0 };
            self.programs.put(map_name::BACKENDS, abi::BackendKey { list, index }, record)?;
        }
        let list = if backends.is_empty() { 0 } else { list };
        self.programs.change_vpc(vpc, |record| record.flags |= abi::vpc_flags::SERVICES)?;
        for protocol in PROTOCOLS {
            let mut record = abi::ServiceRecord {
                service: number(vpc, at, protocol),
                list,
                count: backends.len() as u32,
                ..abi::ServiceRecord::default()
            };
            change(&mut record);
            let key = abi::ServiceKey { scope, ..service_key(vpc, at, protocol) };
            self.programs.put(map_name::SERVICES, key, record)?;
        }
        Ok(())
    }

    /// Translates services for sockets of this process's cgroup.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn serve_sockets(&mut self) -> Result<()> {
        let cgroup = fs::File::open(own_cgroup()?)?;
        for name in SOCKET_PROGRAMS {
            let program = self.programs.socket_program(name)?;
            program.attach(&cgroup, CgroupAttachMode::Single).with_context(|| format!("attaching {name}"))?;
        }
        Ok(())
    }

    /// The sockets of a namespace are an endpoint's; 0 = the host's.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn bind_netns(&mut self, ns: &Netns, endpoint: u32) -> Result<()> {
        let record = abi::NetnsRecord { endpoint, flags: 0 };
        self.programs.put(map_name::NETNS, ns.cookie()?.0, record)
    }
}

/// The service's number here.
#[must_use]
pub fn number(vpc: u32, at: SocketAddr, protocol: u8) -> u32 {
    vpc * 1000 + u32::from(at.port()) * 2 + u32::from(protocol == 6)
}

/// Key of a frontend for who asks from inside.
#[must_use]
pub fn service_key(vpc: u32, at: SocketAddr, protocol: u8) -> abi::ServiceKey {
    abi::ServiceKey {
        vpc,
        addr: at.ip().into(),
        port: at.port().to_be_bytes(),
        protocol,
        scope: service_scope::INSIDE,
    }
}

/// What a connected socket is told of what it sends. Said again each second: a datagram or the error about it may be lost on a busy machine, and
/// neither is sent twice by itself.
///
/// # Panics
/// When it is told nothing, or gets an answer.
#[must_use]
pub fn told(socket: &UdpSocket, bytes: &[u8]) -> io::Error {
    socket.set_read_timeout(Some(Duration::from_secs(1))).expect("timeout");
    eventually(PATIENCE, || {
        let heard = socket.send(bytes).and_then(|_| socket.recv(&mut [0; 16]));
        match heard.expect_err("an answer, where nobody listens") {
            silence if matches!(silence.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Err(silence),
            error => Ok(error),
        }
    })
}
