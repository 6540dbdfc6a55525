//! The bpf(2) system call where aya has no wrapper, or hides what we must see. Every attribute struct is the prefix of the kernel's union
//! (`include/uapi/linux/bpf.h`) that the command reads; the kernel takes shorter ones and fills with zeros.

mod link;
mod map;
mod prog;

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

pub use link::{
    CgroupLinkInfo, Chain, LinkInfo, TcxHook, cgroup_link_create, cgroup_link_info, link_by_id, link_create,
    link_detach, link_info, link_update, tcx_chain,
};
pub use map::{Map, MapFacts, PerCpuMap, Plain, map_by_id, map_create, map_facts, map_memory, possible_cpus};
pub use prog::{
    Insn, ProgFacts, RunContext, RunResult, prog_by_id, prog_facts, prog_load, prog_statistics, test_run,
    test_run_syscall,
};

/// Gives memory back to the kernel that the allocator keeps and nobody uses: for a quiet moment after work that needed much more than
/// what stays of it.
pub fn release_memory() {
    // SAFETY: nothing is passed but a number; the allocator locks its arenas itself.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Has all threads take their memory from one heap. With a heap each, as the allocator would have it, every thread keeps what it once needed
/// at most. To be called before there are threads.
pub fn one_heap() {
    // SAFETY: nothing is passed but numbers; the allocator locks its settings itself.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Commands of bpf(2) that are used here.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(crate) enum Command {
    MapCreate = 0,
    MapLookup = 1,
    MapUpdate = 2,
    MapDelete = 3,
    MapNextKey = 4,
    ProgLoad = 5,
    ObjPin = 6,
    ObjGet = 7,
    ProgTestRun = 10,
    ProgById = 13,
    MapById = 14,
    Info = 15,
    ProgQuery = 16,
    MapLookupBatch = 24,
    MapUpdateBatch = 26,
    MapDeleteBatch = 27,
    LinkCreate = 28,
    LinkUpdate = 29,
    LinkById = 30,
    LinkDetach = 34,
}

/// Calls bpf(2), again after a signal.
///
/// # Safety
/// `attr` must be the attribute struct of `command`, its pointers valid for what the command reads and writes.
pub(crate) unsafe fn bpf<T>(command: Command, attr: &mut T) -> io::Result<i64> {
    loop {
        // SAFETY: the pointer and the size describe `attr`, which lives over the call; the rest is the caller's promise.
        let r = unsafe {
            libc::syscall(
                libc::SYS_bpf,
                command as u32,
                std::ptr::from_mut(attr),
                std::mem::size_of::<T>() as u32,
            )
        };
        if r >= 0 {
            return Ok(r);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// `CLOCK_MONOTONIC`, the clock of the programs.
///
/// # Errors
/// When the kernel refuses.
pub fn monotonic() -> io::Result<Duration> {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live timespec.
    if unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Duration::new(t.tv_sec as u64, t.tv_nsec as u32))
}

/// Takes ownership of a descriptor that bpf(2) returned.
pub(crate) fn owned(fd: i64) -> io::Result<OwnedFd> {
    let fd =
        RawFd::try_from(fd).map_err(|_| io::Error::other("the kernel returned an impossible descriptor"))?;
    // SAFETY: bpf(2) just made this descriptor for us and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

/// An object's name as the kernel keeps it: 15 bytes and a zero.
pub(crate) fn object_name(name: &str) -> [u8; 16] {
    let mut out = [0; 16];
    for (to, from) in out.iter_mut().take(15).zip(name.bytes()) {
        *to = from;
    }
    out
}

pub(crate) fn name_text(name: &[u8; 16]) -> String {
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    String::from_utf8_lossy(&name[..end]).into_owned()
}

#[repr(C)]
#[derive(Default)]
struct ObjAttr {
    path: u64,
    fd: u32,
    file_flags: u32,
}

/// Pins a map, program or link.
///
/// # Errors
/// `AlreadyExists` when the path is taken; whatever bpffs says otherwise.
pub fn obj_pin(fd: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let mut attr = ObjAttr { path: path.as_ptr() as u64, fd: fd.as_raw_fd() as u32, file_flags: 0 };
    // SAFETY: the path is a live C string, the descriptor is borrowed for the call.
    unsafe { bpf(Command::ObjPin, &mut attr) }.map(drop)
}

/// Opens a pinned object.
///
/// # Errors
/// `NotFound` when nothing is pinned there.
pub fn obj_get(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let mut attr = ObjAttr { path: path.as_ptr() as u64, ..ObjAttr::default() };
    // SAFETY: the path is a live C string.
    owned(unsafe { bpf(Command::ObjGet, &mut attr) }?)
}

#[repr(C)]
#[derive(Default)]
struct IdAttr {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

pub(crate) fn fd_by_id(command: Command, id: u32) -> io::Result<OwnedFd> {
    let mut attr = IdAttr { id, ..IdAttr::default() };
    // SAFETY: no pointers.
    owned(unsafe { bpf(command, &mut attr) }?)
}

#[repr(C)]
#[derive(Default)]
struct InfoAttr {
    fd: u32,
    len: u32,
    info: u64,
}

/// Fills `info` about an object.
///
/// # Safety
/// `T` must be a prefix of the kernel's info struct of this kind of object, valid for every bit pattern, and its pointer fields valid for what their lengths say.
pub(crate) unsafe fn object_info<T>(fd: BorrowedFd<'_>, info: &mut T) -> io::Result<()> {
    let mut attr = InfoAttr {
        fd: fd.as_raw_fd() as u32,
        len: std::mem::size_of::<T>() as u32,
        info: std::ptr::from_mut(info) as u64,
    };
    // SAFETY: `info` and its length belong together; the rest is the caller's promise.
    unsafe { bpf(Command::Info, &mut attr) }.map(drop)
}
