//! TCX links: create at the front of the chain, exchange the program atomically, read the chain.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

use super::{Command, bpf, fd_by_id, object_info, owned};

/// Where on a device a classifier runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u32)]
pub enum TcxHook {
    /// `BPF_TCX_INGRESS`.
    Ingress = 46,
    /// `BPF_TCX_EGRESS`.
    Egress = 47,
}

/// `BPF_F_BEFORE`; without a relative program it means the front.
const BEFORE: u32 = 1 << 3;
/// `BPF_LINK_TYPE_TCX`.
const LINK_TYPE_TCX: u32 = 11;
/// `BPF_LINK_TYPE_CGROUP`.
const LINK_TYPE_CGROUP: u32 = 3;

#[repr(C)]
#[derive(Default)]
struct CreateAttr {
    prog: u32,
    ifindex: u32,
    attach_type: u32,
    flags: u32,
    relative: u32,
    pad: u32,
    expected_revision: u64,
}

/// Attaches a program at the front of a device's chain. The device is looked up in the caller's network namespace.
///
/// # Errors
/// `ENODEV` when there is no such device.
pub fn link_create(prog: BorrowedFd<'_>, ifindex: u32, hook: TcxHook) -> io::Result<OwnedFd> {
    let mut attr = CreateAttr {
        prog: prog.as_raw_fd() as u32,
        ifindex,
        attach_type: hook as u32,
        flags: BEFORE,
        ..CreateAttr::default()
    };
    // SAFETY: no pointers.
    owned(unsafe { bpf(Command::LinkCreate, &mut attr) }?)
}

/// Attaches a program to a cgroup, besides those of others.
///
/// # Errors
/// Whatever the kernel says.
pub fn cgroup_link_create(
    prog: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
    attach_type: u32,
) -> io::Result<OwnedFd> {
    let mut attr = CreateAttr {
        prog: prog.as_raw_fd() as u32,
        // The kernel's name for the field is `target_fd`.
        ifindex: cgroup.as_raw_fd() as u32,
        attach_type,
        ..CreateAttr::default()
    };
    // SAFETY: no pointers.
    owned(unsafe { bpf(Command::LinkCreate, &mut attr) }?)
}

/// What the kernel says about a link to a cgroup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CgroupLinkInfo {
    /// Id of its program.
    pub prog_id: u32,
    /// The cgroup (the inode number of its directory); 0 when it is gone.
    pub cgroup: u64,
    /// `BPF_CGROUP_*`.
    pub attach_type: u32,
}

#[repr(C)]
#[derive(Default)]
struct KernelCgroupLinkInfo {
    kind: u32,
    id: u32,
    prog_id: u32,
    pad: u32,
    cgroup: u64,
    attach_type: u32,
    pad2: u32,
    rest: [u64; 3],
}

/// Facts of a link to a cgroup.
///
/// # Errors
/// When the descriptor is no such link.
pub fn cgroup_link_info(link: BorrowedFd<'_>) -> io::Result<CgroupLinkInfo> {
    let mut info = KernelCgroupLinkInfo::default();
    // SAFETY: the struct is a prefix of `struct bpf_link_info`; a link to a cgroup has no pointers in it and zeroed ones are ignored.
    unsafe { object_info(link, &mut info) }?;
    if info.kind != LINK_TYPE_CGROUP {
        return Err(io::Error::other(format!("link type {}: not a link to a cgroup", info.kind)));
    }
    Ok(CgroupLinkInfo { prog_id: info.prog_id, cgroup: info.cgroup, attach_type: info.attach_type })
}

#[repr(C)]
struct UpdateAttr {
    link: u32,
    new_prog: u32,
    flags: u32,
    old_prog: u32,
}

/// Exchanges a link's program; every packet sees the old one or the new one.
///
/// # Errors
/// `ENOLINK` when the device is gone.
pub fn link_update(link: BorrowedFd<'_>, prog: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = UpdateAttr {
        link: link.as_raw_fd() as u32,
        new_prog: prog.as_raw_fd() as u32,
        flags: 0,
        old_prog: 0,
    };
    // SAFETY: no pointers.
    unsafe { bpf(Command::LinkUpdate, &mut attr) }.map(drop)
}

/// Detaches a link from its device; the link itself stays until its last reference goes.
///
/// # Errors
/// Whatever the kernel says.
pub fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = link.as_raw_fd() as u32;
    // SAFETY: no pointers; the command reads one descriptor.
    unsafe { bpf(Command::LinkDetach, &mut attr) }.map(drop)
}

/// Opens a link by its kernel id.
///
/// # Errors
/// `NotFound` when it is gone.
pub fn link_by_id(id: u32) -> io::Result<OwnedFd> {
    fd_by_id(Command::LinkById, id)
}

/// What the kernel says about a TCX link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkInfo {
    /// Kernel id.
    pub id: u32,
    /// Id of its program.
    pub prog_id: u32,
    /// Device; 0 when it is gone.
    pub ifindex: u32,
    /// Hook.
    pub hook: TcxHook,
}

#[repr(C)]
#[derive(Default)]
struct KernelLinkInfo {
    kind: u32,
    id: u32,
    prog_id: u32,
    pad: u32,
    ifindex: u32,
    attach_type: u32,
    rest: [u64; 4],
}

/// Facts of a TCX link.
///
/// # Errors
/// When the descriptor is no TCX link.
pub fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    let mut info = KernelLinkInfo::default();
    // SAFETY: the struct is a prefix of `struct bpf_link_info`; a TCX link has no pointers in it and zeroed ones are ignored.
    unsafe { object_info(link, &mut info) }?;
    let hook = match (info.kind, info.attach_type) {
        (LINK_TYPE_TCX, 46) => TcxHook::Ingress,
        (LINK_TYPE_TCX, 47) => TcxHook::Egress,
        (kind, at) => {
            return Err(io::Error::other(format!("link type {kind}, attach type {at}: not a TCX link")));
        }
    };
    Ok(LinkInfo { id: info.id, prog_id: info.prog_id, ifindex: info.ifindex, hook })
}

#[repr(C)]
#[derive(Default)]
struct QueryAttr {
    ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    count: u32,
    pad: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// A device's chain at one hook, in the order of execution.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Chain {
    /// (program id, link id or 0 for a program attached without a link).
    pub programs: Vec<(u32, u32)>,
    /// Grows with every change.
    pub revision: u64,
}

/// Reads a device's chain (caller's network namespace).
///
/// # Errors
/// `ENODEV` when there is no such device.
pub fn tcx_chain(ifindex: u32, hook: TcxHook) -> io::Result<Chain> {
    // The kernel allows 64 programs per chain (`BPF_MPROG_MAX`).
    let (mut progs, mut links) = ([0u32; 64], [0u32; 64]);
    let mut attr = QueryAttr {
        ifindex,
        attach_type: hook as u32,
        prog_ids: progs.as_mut_ptr() as u64,
        count: 64,
        link_ids: links.as_mut_ptr() as u64,
        ..QueryAttr::default()
    };
    // SAFETY: both arrays hold `count` integers and live over the call.
    match unsafe { bpf(Command::ProgQuery, &mut attr) } {
        Ok(_) => {}
        // No chain was ever made on this hook.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Chain::default()),
        Err(e) => return Err(e),
    }
    let n = (attr.count as usize).min(64);
    Ok(Chain {
        programs: progs[..n].iter().copied().zip(links[..n].iter().copied()).collect(),
        revision: attr.revision,
    })
}
