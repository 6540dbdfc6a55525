//! Programs on devices: pinned links, first in the chain, exchanged in place.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};

use flowloom_bpf_abi::hook;

use crate::error::{Context as _, Error, Result};
use crate::kernel::Writes;
use crate::loading::Programs;
use crate::pins;
use crate::sockets::SocketHook;
use crate::sys::{self, TcxHook};

/// Where a program of ours runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Hook {
    /// TCX ingress of an endpoint's host-side device: what the workload sends.
    FromEndpoint = hook::FROM_ENDPOINT,
    /// TCX egress of it: what reaches the workload through the stack.
    ToEndpoint = hook::TO_ENDPOINT,
    /// TCX ingress of the VXLAN device.
    FromOverlay = hook::FROM_OVERLAY,
    /// TCX egress of the VXLAN device.
    ToOverlay = hook::TO_OVERLAY,
    /// TCX ingress of an uplink.
    FromUplink = hook::FROM_UPLINK,
    /// TCX egress of an uplink.
    ToUplink = hook::TO_UPLINK,
}

impl Hook {
    /// Every hook.
    pub const ALL: [Self; 6] = [
        Self::FromEndpoint,
        Self::ToEndpoint,
        Self::FromOverlay,
        Self::ToOverlay,
        Self::FromUplink,
        Self::ToUplink,
    ];

    /// The program's name, and the first part of its links' pins.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FromEndpoint => "from_endpoint",
            Self::ToEndpoint => "to_endpoint",
            Self::FromOverlay => "from_overlay",
            Self::ToOverlay => "to_overlay",
            Self::FromUplink => "from_uplink",
            Self::ToUplink => "to_uplink",
        }
    }

    /// The hook with this number (`flowloom_bpf_abi::hook`).
    #[must_use]
    pub fn from_number(n: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|h| *h as u8 == n)
    }

    /// Direction on the device.
    #[must_use]
    pub const fn tcx(self) -> TcxHook {
        match self {
            Self::FromEndpoint | Self::FromOverlay | Self::FromUplink => TcxHook::Ingress,
            Self::ToEndpoint | Self::ToOverlay | Self::ToUplink => TcxHook::Egress,
        }
    }
}

/// File name of a link's pin.
fn pin_name(hook: Hook, ifindex: u32) -> String {
    format!("{}_{ifindex}", hook.name())
}

fn parse_pin_name(name: &str) -> Option<(Hook, u32)> {
    let (hook, ifindex) = name.rsplit_once('_')?;
    let hook = Hook::ALL.into_iter().find(|h| h.name() == hook)?;
    let ifindex: u32 = ifindex.parse().ok().filter(|n| *n > 0)?;
    (pin_name(hook, ifindex) == name).then_some((hook, ifindex))
}

/// A program on a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Attached {
    /// Hook.
    pub hook: Hook,
    /// Device.
    pub ifindex: u32,
    /// Kernel id of the link.
    pub link_id: u32,
    /// Kernel id of its program.
    pub prog_id: u32,
    /// The device is gone; the pin is all that is left.
    pub dead: bool,
}

/// What an audit found wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Hook.
    pub hook: Hook,
    /// Device.
    pub ifindex: u32,
    /// What, in words.
    pub problem: Problem,
}

/// Ways in which a link is not as it must be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Problem {
    /// The device is gone.
    Dead,
    /// It runs a program that is not this load's.
    OtherProgram,
    /// Programs (by id) run before it and may decide without it.
    NotFirst(Vec<u32>),
    /// It is not in the device's chain (detached by someone, or the device is in another namespace).
    NotInChain,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on ifindex {}: ", self.hook.name(), self.ifindex)?;
        match &self.problem {
            Problem::Dead => f.write_str("the device is gone"),
            Problem::OtherProgram => f.write_str("it runs another load's program"),
            Problem::NotFirst(ids) => write!(f, "programs {ids:?} run before it"),
            Problem::NotInChain => f.write_str("it is not in the device's chain"),
        }
    }
}

impl Programs<Hook> {
    pub(crate) fn fd(&self, hook: Hook) -> Result<BorrowedFd<'_>> {
        Ok(self.of(hook, hook.name())?.0)
    }

    fn id(&self, hook: Hook) -> Result<u32> {
        Ok(self.of(hook, hook.name())?.1)
    }
}

/// The link directory.
#[derive(Debug)]
pub(crate) struct Links {
    dir: PathBuf,
}

fn unpin(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).path("unpinning", path),
        _ => Ok(()),
    }
}

impl Links {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    fn path(&self, hook: Hook, ifindex: u32) -> PathBuf {
        self.dir.join(pin_name(hook, ifindex))
    }

    /// Every pinned link.
    pub(crate) fn all(&self) -> Result<Vec<Attached>> {
        let mut out = Vec::new();
        for name in pins::list(&self.dir)? {
            if SocketHook::from_name(&name).is_some() {
                continue;
            }
            let path = self.dir.join(&name);
            let (hook, ifindex) = parse_pin_name(&name).ok_or_else(|| Error::ForeignPin {
                path: path.clone(),
                detail: "no link has this name".to_owned(),
            })?;
            let link = sys::obj_get(&path).path("opening", &path)?;
            out.push(attached(hook, ifindex, link.as_fd()).path("reading", &path)?);
        }
        Ok(out)
    }

    /// Makes `hook` run our program on a device, first in its chain. What is right already is left alone.
    pub(crate) fn attach(
        &self,
        programs: &Programs<Hook>,
        writes: &mut Writes,
        hook: Hook,
        ifindex: u32,
    ) -> Result<()> {
        let path = self.path(hook, ifindex);
        match sys::obj_get(&path) {
            Ok(link) => {
                let have = attached(hook, ifindex, link.as_fd()).path("reading", &path)?;
                if !have.dead {
                    return update(programs, writes, &have, link.as_fd());
                }
                writes.step()?;
                unpin(&path)?;
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e).path("opening", &path),
        }
        writes.step()?;
        let link = sys::link_create(programs.fd(hook)?, ifindex, hook.tcx())
            .device("attaching to", format!("ifindex {ifindex}"))?;
        writes.step()?;
        sys::obj_pin(link.as_fd(), &path).path("pinning", &path)
    }

    /// Takes our program off a device. Nothing there is fine.
    pub(crate) fn detach(&self, writes: &mut Writes, hook: Hook, ifindex: u32) -> Result<()> {
        let path = self.path(hook, ifindex);
        let link = match sys::obj_get(&path) {
            Ok(link) => link,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e).path("opening", &path),
        };
        writes.step()?;
        // Closing the last reference detaches some time later; this is now. A dead link has nothing to detach.
        match sys::link_detach(link.as_fd()) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::ENOLINK) => {}
            Err(e) => return Err(e).device("detaching from", format!("ifindex {ifindex}")),
        }
        unpin(&path)
    }

    /// Gives every link this load's program and forgets the links of devices that are gone.
    pub(crate) fn refresh(&self, programs: &Programs<Hook>, writes: &mut Writes) -> Result<()> {
        for have in self.all()? {
            let path = self.path(have.hook, have.ifindex);
            if have.dead {
                writes.step()?;
                unpin(&path)?;
            } else {
                let link = sys::obj_get(&path).path("opening", &path)?;
                update(programs, writes, &have, link.as_fd())?;
            }
        }
        Ok(())
    }

    /// Compares every link with what it must be. Devices are looked up in the caller's network namespace.
    pub(crate) fn audit(&self, programs: &Programs<Hook>) -> Result<Vec<Finding>> {
        let mut out = Vec::new();
        for have in self.all()? {
            let Attached { hook, ifindex, .. } = have;
            let mut find = |problem| out.push(Finding { hook, ifindex, problem });
            if have.dead {
                find(Problem::Dead);
                continue;
            }
            if have.prog_id != programs.id(hook)? {
                find(Problem::OtherProgram);
            }
            let chain = match sys::tcx_chain(ifindex, hook.tcx()) {
                Ok(c) => c,
                Err(e) if e.raw_os_error() == Some(libc::ENODEV) => sys::Chain::default(),
                Err(e) => return Err(e).device("reading the chain of", format!("ifindex {ifindex}")),
            };
            match chain.programs.iter().position(|(_, link)| *link == have.link_id) {
                Some(0) => {}
                Some(n) => find(Problem::NotFirst(chain.programs[..n].iter().map(|(p, _)| *p).collect())),
                None => find(Problem::NotInChain),
            }
        }
        Ok(out)
    }
}

fn attached(hook: Hook, ifindex: u32, link: BorrowedFd<'_>) -> io::Result<Attached> {
    let info = sys::link_info(link)?;
    let dead = info.ifindex != ifindex || info.hook != hook.tcx();
    Ok(Attached { hook, ifindex, link_id: info.id, prog_id: info.prog_id, dead })
}

fn update(
    programs: &Programs<Hook>,
    writes: &mut Writes,
    have: &Attached,
    link: BorrowedFd<'_>,
) -> Result<()> {
    if have.prog_id == programs.id(have.hook)? {
        return Ok(());
    }
    writes.step()?;
    sys::link_update(link, programs.fd(have.hook)?)
        .device("exchanging the program on", format!("ifindex {}", have.ifindex))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pin_names_are_read_back_and_nothing_else_is() {
        for hook in Hook::ALL {
            assert_eq!(parse_pin_name(&pin_name(hook, 12)), Some((hook, 12)));
            assert_eq!(Hook::from_number(hook as u8), Some(hook));
        }
        for bad in [
            "from_endpoint",
            "from_endpoint_",
            "from_endpoint_0",
            "from_endpoint_012",
            "x_1",
            "from_endpoint_-1",
            "",
        ] {
            assert_eq!(parse_pin_name(bad), None, "{bad}");
        }
    }
}
