//! Programs of sockets on a cgroup: pinned links, exchanged in place.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use flowloom_bpf_abi::hook;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, FsType, statfs};

use crate::error::{Context as _, Error, Result};
use crate::kernel::Writes;
use crate::loading::Programs;
use crate::sys;

/// `CGROUP2_SUPER_MAGIC` of linux/magic.h.
const CGROUP2: FsType = CGROUP2_SUPER_MAGIC;

/// A system call that a program of ours sees.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum SocketHook {
    /// `recvmsg` that asks for the sender, IPv4.
    RecvMsg4 = hook::RECVMSG4,
    /// The same, IPv6.
    RecvMsg6 = hook::RECVMSG6,
    /// `getpeername`, IPv4.
    GetPeerName4 = hook::GETPEERNAME4,
    /// The same, IPv6.
    GetPeerName6 = hook::GETPEERNAME6,
    /// `connect`, IPv4.
    Connect4 = hook::CONNECT4,
    /// The same, IPv6.
    Connect6 = hook::CONNECT6,
    /// `sendmsg` with an address, IPv4.
    SendMsg4 = hook::SENDMSG4,
    /// The same, IPv6.
    SendMsg6 = hook::SENDMSG6,
}

impl SocketHook {
    /// Every hook, in the order of attachment: those that show addresses before those that translate them.
    pub const ALL: [Self; 8] = [
        Self::RecvMsg4,
        Self::RecvMsg6,
        Self::GetPeerName4,
        Self::GetPeerName6,
        Self::Connect4,
        Self::Connect6,
        Self::SendMsg4,
        Self::SendMsg6,
    ];

    /// The program's name, and its link's pin.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RecvMsg4 => "recvmsg4",
            Self::RecvMsg6 => "recvmsg6",
            Self::GetPeerName4 => "getpeername4",
            Self::GetPeerName6 => "getpeername6",
            Self::Connect4 => "connect4",
            Self::Connect6 => "connect6",
            Self::SendMsg4 => "sendmsg4",
            Self::SendMsg6 => "sendmsg6",
        }
    }

    /// The hook whose link has this pin.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|h| h.name() == name)
    }

    /// `BPF_CGROUP_*`.
    #[must_use]
    pub const fn attach_type(self) -> u32 {
        match self {
            Self::Connect4 => 10,
            Self::Connect6 => 11,
            Self::SendMsg4 => 14,
            Self::SendMsg6 => 15,
            Self::RecvMsg4 => 19,
            Self::RecvMsg6 => 20,
            Self::GetPeerName4 => 29,
            Self::GetPeerName6 => 30,
        }
    }
}

impl Programs<SocketHook> {
    fn program(&self, hook: SocketHook) -> Result<(BorrowedFd<'_>, u32)> {
        self.of(hook, hook.name())
    }

    /// Lets the links in `dir` run these programs; what is right already is left alone.
    pub(crate) fn refresh(&self, dir: &Path, writes: &mut Writes) -> Result<()> {
        for hook in SocketHook::ALL {
            let path = dir.join(hook.name());
            match sys::obj_get(&path) {
                Ok(link) => self.update(hook, &link, &path, writes)?,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e).path("opening", &path),
            }
        }
        Ok(())
    }

    fn update(&self, hook: SocketHook, link: &OwnedFd, path: &Path, writes: &mut Writes) -> Result<()> {
        let (program, id) = self.program(hook)?;
        let have = sys::cgroup_link_info(link.as_fd()).path("reading", path)?;
        if have.cgroup == 0 || have.prog_id == id {
            return Ok(());
        }
        writes.step()?;
        sys::link_update(link.as_fd(), program).path("exchanging the program of", path)
    }

    /// Runs every program on a cgroup. What is right already is left alone; a link to another cgroup goes once the new one is there.
    pub(crate) fn attach(&self, cgroup: &Path, dir: &Path, writes: &mut Writes) -> Result<()> {
        let cgroup = &directory(cgroup)?;
        let target = File::open(cgroup).path("opening the cgroup", cgroup)?;
        let id = target.metadata().path("reading the cgroup", cgroup)?.ino();
        for hook in SocketHook::ALL {
            let path = dir.join(hook.name());
            let old = match sys::obj_get(&path) {
                Ok(link) => {
                    let have = sys::cgroup_link_info(link.as_fd()).path("reading", &path)?;
                    if have.cgroup == id && have.attach_type == hook.attach_type() {
                        self.update(hook, &link, &path, writes)?;
                        continue;
                    }
                    Some(link)
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => None,
                Err(e) => return Err(e).path("opening", &path),
            };
            let (program, _) = self.program(hook)?;
            writes.step()?;
            let link = sys::cgroup_link_create(program, target.as_fd(), hook.attach_type())
                .path("attaching to the cgroup", cgroup)?;
            if let Some(old) = old {
                writes.step()?;
                unpin(&path)?;
                detach(old, &path)?;
            }
            writes.step()?;
            sys::obj_pin(link.as_fd(), &path).path("pinning", &path)?;
        }
        Ok(())
    }
}

/// The cgroup v2 directory that is meant: where v1 is in use beside it, its root is mounted below the place that is v2's alone elsewhere.
fn directory(cgroup: &Path) -> Result<PathBuf> {
    let is_v2 = |path: &Path| statfs(path).is_ok_and(|fs| fs.filesystem_type() == CGROUP2);
    let below = cgroup.join("unified");
    match [cgroup, below.as_path()].into_iter().find(|path| is_v2(path)) {
        Some(path) => Ok(path.to_owned()),
        None => Err(Error::Invalid {
            object: format!("cgroup {}", cgroup.display()),
            detail: "it is not in a cgroup v2 file system".to_owned(),
        }),
    }
}

/// Takes every program off its cgroup.
pub(crate) fn detach_all(dir: &Path, writes: &mut Writes) -> Result<()> {
    for hook in SocketHook::ALL.into_iter().rev() {
        let path = dir.join(hook.name());
        match sys::obj_get(&path) {
            Ok(link) => {
                writes.step()?;
                unpin(&path)?;
                detach(link, &path)?;
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e).path("opening", &path),
        }
    }
    Ok(())
}

fn unpin(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).path("unpinning", path),
        _ => Ok(()),
    }
}

fn detach(link: OwnedFd, path: &Path) -> Result<()> {
    match sys::link_detach(link.as_fd()) {
        // The cgroup is gone.
        Err(e) if e.raw_os_error() == Some(libc::ENOLINK) => Ok(()),
        other => other.path("detaching", path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_attach_types_are_distinct() {
        let names: std::collections::BTreeSet<_> = SocketHook::ALL.iter().map(|h| h.name()).collect();
        let types: std::collections::BTreeSet<_> = SocketHook::ALL.iter().map(|h| h.attach_type()).collect();
        assert_eq!((names.len(), types.len()), (8, 8));
        assert!(SocketHook::ALL.iter().all(|h| SocketHook::from_name(h.name()) == Some(*h)));
    }
}
