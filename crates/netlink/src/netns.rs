//! Network namespaces. The calling thread's namespace never changes: what has to run inside one runs on a thread of
//! its own that ends afterwards.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{FsType, fstatfs};

use crate::error::{Error, Result};

/// Where `ip netns` and container runtimes look.
pub const DEFAULT_DIR: &str = "/run/netns";

/// `NSFS_MAGIC` of linux/magic.h.
const NSFS: FsType = FsType(0x6e73_6673);

/// What one namespace is, for as long as it lives: device and inode of its nsfs file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NetnsId {
    /// Device of nsfs.
    pub device: u64,
    /// Inode; the kernel may give it to a new namespace once this one is gone.
    pub inode: u64,
}

/// The kernel's number of a namespace, never used again until reboot (`SO_NETNS_COOKIE`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NetnsCookie(pub u64);

/// An open network namespace; it lives at least as long as this value.
#[derive(Debug)]
pub struct Netns {
    file: File,
    path: PathBuf,
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Netns {
    /// Makes a namespace that outlives this process, mounted at `dir/name`.
    ///
    /// # Errors
    /// When the path exists already (`EEXIST`), or root's rights are missing.
    pub fn create(dir: &Path, name: &str) -> Result<Self> {
        let path = dir.join(name);
        let fail = |what| failure(what, &path);
        if name.is_empty() || name.contains('/') || name == "." || name == ".." {
            return Err(fail("name")(io::Error::from(Errno::EINVAL)));
        }
        fs::create_dir_all(dir).map_err(fail("make the directory of"))?;
        if dir == Path::new(DEFAULT_DIR) {
            share(dir).map_err(|e| fail("share the directory of")(e.into()))?;
        }
        OpenOptions::new().write(true).create_new(true).mode(0o444).open(&path).map_err(fail("create"))?;
        let made = std::thread::scope(|s| {
            s.spawn(|| {
                unshare(CloneFlags::CLONE_NEWNET)?;
                bind(Path::new("/proc/thread-self/ns/net"), &path)
            })
            .join()
            .unwrap_or(Err(Errno::EIO))
        });
        if let Err(e) = made {
            // The file is this call's own: nothing is mounted on it.
            let _ = fs::remove_file(&path);
            return Err(fail("create")(e.into()));
        }
        Self::open(&path)
    }

    /// Opens the namespace mounted at a path (or a `/proc/PID/ns/net`).
    ///
    /// # Errors
    /// [`Error::Missing`] when the path does not exist, [`Error::NotANetns`] when it is something else.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let file = File::open(&path).map_err(|e| {
            if e.kind() == io::ErrorKind::NotFound {
                Error::Missing { object: format!("network namespace {}", path.display()) }
            } else {
                failure("open", &path)(e)
            }
        })?;
        let kind = fstatfs(&file).map_err(|e| failure("look at", &path)(e.into()))?.filesystem_type();
        if kind != NSFS || !is_net(&file) {
            return Err(Error::NotANetns { path });
        }
        Ok(Self { file, path })
    }

    /// The namespace of a process.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such process.
    pub fn of_pid(pid: u32) -> Result<Self> {
        Self::open(format!("/proc/{pid}/ns/net"))
    }

    /// The calling thread's namespace.
    ///
    /// # Errors
    /// When `/proc` is not mounted.
    pub fn current() -> Result<Self> {
        Self::open("/proc/thread-self/ns/net")
    }

    /// Unmounts and removes the name; the namespace itself goes with its last process, socket or descriptor.
    /// `Ok(false)` when there was nothing.
    ///
    /// # Errors
    /// When something at that path cannot be unmounted or removed.
    pub fn remove(path: &Path) -> Result<bool> {
        loop {
            match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
                // Mounted more than once, or not mounted: go on until the kernel says that it is no mount point.
                Ok(()) => {}
                Err(Errno::EINVAL) => break,
                Err(Errno::ENOENT) => return Ok(false),
                Err(e) => return Err(failure("unmount", path)(e.into())),
            }
        }
        match fs::remove_file(path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(failure("remove", path)(e)),
        }
    }

    /// Where it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Another handle of the same namespace.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn try_clone(&self) -> Result<Self> {
        let file = self.file.try_clone().map_err(failure("duplicate", &self.path))?;
        Ok(Self { file, path: self.path.clone() })
    }

    /// Device and inode.
    ///
    /// # Errors
    /// When the descriptor cannot be examined.
    pub fn id(&self) -> Result<NetnsId> {
        let m = self.file.metadata().map_err(failure("look at", &self.path))?;
        Ok(NetnsId { device: m.dev(), inode: m.ino() })
    }

    /// The kernel's cookie.
    ///
    /// # Errors
    /// When the namespace cannot be entered.
    pub fn cookie(&self) -> Result<NetnsCookie> {
        self.run_in(|| {
            let socket = std::net::UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0))?;
            cookie_of(socket.as_fd())
        })?
        .map_err(failure("read the cookie of", &self.path))
    }

    /// Runs `f` inside the namespace, on a thread that ends afterwards; a panic of `f` goes on in the caller.
    ///
    /// # Errors
    /// When the namespace cannot be entered.
    pub fn run_in<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T> {
        std::thread::scope(|s| {
            let joined = std::thread::Builder::new()
                .name("in-netns".into())
                .spawn_scoped(s, || {
                    self.enter_for_good().map_err(|e| failure("enter", &self.path)(e.into()))?;
                    Ok(f())
                })
                .map_err(failure("start a thread for", &self.path))?
                .join();
            joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Moves the *calling thread*; only for threads that end inside (see [`Self::run_in`]).
    fn enter_for_good(&self) -> nix::Result<()> {
        setns(&self.file, CloneFlags::CLONE_NEWNET)
    }
}

fn failure(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Netns { what, path, source }
}

fn bind(from: &Path, to: &Path) -> nix::Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)
}

/// Makes the directory a shared mount, so that removing a namespace here also frees it in mount namespaces that were
/// copied from ours meanwhile.
fn share(dir: &Path) -> nix::Result<()> {
    let shared =
        || mount(None::<&str>, dir, None::<&str>, MsFlags::MS_SHARED | MsFlags::MS_REC, None::<&str>);
    match shared() {
        Err(Errno::EINVAL) => {
            mount(Some(dir), dir, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)?;
            shared()
        }
        other => other,
    }
}

/// Whether an nsfs file is a *network* namespace.
fn is_net(file: &File) -> bool {
    const NS_GET_NSTYPE: libc::c_ulong = 0xb703;
    // SAFETY: NS_GET_NSTYPE takes no argument and writes no memory; the descriptor is open for the call's duration.
    let kind = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_NSTYPE) };
    kind == libc::CLONE_NEWNET
}

/// Of the namespace that a socket belongs to.
pub(crate) fn cookie_of(socket: BorrowedFd<'_>) -> io::Result<NetnsCookie> {
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let mut cookie = 0u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the option writes at most `length` bytes to `cookie`, which has exactly that size; both outlive the call.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if rc == 0 { Ok(NetnsCookie(cookie)) } else { Err(io::Error::last_os_error()) }
}
