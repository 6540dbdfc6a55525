//! The pin directory: where it is, whose it is, what is in it.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use flowloom_bpf_abi::ABI_VERSION;
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{FsType, statfs};

use crate::error::{Context as _, Error, Result};

/// `BPF_FS_MAGIC`.
const BPF_FS: FsType = FsType(0xcafe_4a11);
/// Where bpffs is mounted by convention.
const SYSTEM_MOUNT: &str = "/sys/fs/bpf";

/// Paths below a pin root. Holding it keeps other processes out.
#[derive(Debug)]
pub(crate) struct Pins {
    root: PathBuf,
    base: PathBuf,
    _lock: Flock<File>,
}

impl Pins {
    /// Mounts bpffs when missing, refuses other ABI versions, makes the directories. Returns whether anything was made.
    pub(crate) fn open(root: &Path) -> Result<(Self, bool)> {
        let mounted = ensure_bpffs(root)?;
        let base = root.join(format!("v{ABI_VERSION}"));
        let mut made = mounted;
        for dir in [root, &base] {
            made |= make_dir(dir)?;
        }
        refuse_foreign_versions(root)?;
        let lock = lock(root)?;
        let pins = Self { root: root.to_owned(), base, _lock: lock };
        for dir in [pins.maps(), pins.links(), pins.programs_root()] {
            made |= make_dir(&dir)?;
        }
        Ok((pins, made))
    }

    /// As [`Self::open`] for removal: nothing is made. `None` when there is nothing.
    pub(crate) fn existing(root: &Path) -> Result<Option<Self>> {
        if !root.exists() || !on_bpffs(root)? {
            return Ok(None);
        }
        let lock = lock(root)?;
        Ok(Some(Self { root: root.to_owned(), base: root.join(format!("v{ABI_VERSION}")), _lock: lock }))
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn base(&self) -> &Path {
        &self.base
    }

    pub(crate) fn maps(&self) -> PathBuf {
        self.base.join("maps")
    }

    pub(crate) fn links(&self) -> PathBuf {
        self.base.join("links")
    }

    pub(crate) fn programs_root(&self) -> PathBuf {
        self.base.join("programs")
    }

    pub(crate) fn programs(&self, digest: &str) -> PathBuf {
        self.programs_root().join(digest)
    }
}

fn lock(root: &Path) -> Result<Flock<File>> {
    let file = File::open(root).path("opening", root)?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        nix::errno::Errno::EWOULDBLOCK => Error::ForeignPin {
            path: root.to_owned(),
            detail: "another process works with these pins; stop it, or use another pin_root".to_owned(),
        },
        other => Error::Path { doing: "locking", path: root.to_owned(), source: other.into() },
    })
}

/// Makes a directory readable by root only. Returns whether it was missing.
pub(crate) fn make_dir(dir: &Path) -> Result<bool> {
    use std::os::unix::fs::DirBuilderExt as _;
    match fs::symlink_metadata(dir) {
        Ok(m) if m.is_dir() => Ok(false),
        Ok(_) => Err(Error::ForeignPin { path: dir.to_owned(), detail: "it is not a directory".to_owned() }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).path("creating", dir)?;
            Ok(true)
        }
        Err(e) => Err(e).path("reading", dir),
    }
}

/// Names in a directory, sorted; a missing directory is empty. Symbolic links are refused: a pin is never reached through one.
pub(crate) fn list(dir: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Ok(e) => e,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e).path("reading", dir),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.path("reading", dir)?;
        if entry.file_type().path("reading", &entry.path())?.is_symlink() {
            return Err(Error::ForeignPin { path: entry.path(), detail: "it is a symbolic link".to_owned() });
        }
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// What lies in a pin root. The root may be the file system's own, where the kernel keeps two files.
pub(crate) fn list_root(root: &Path) -> Result<Vec<String>> {
    let mut names = list(root)?;
    names.retain(|n| n != "maps.debug" && n != "progs.debug");
    Ok(names)
}

fn refuse_foreign_versions(root: &Path) -> Result<()> {
    let ours = format!("v{ABI_VERSION}");
    for name in list_root(root)? {
        if name == ours {
            continue;
        }
        let path = root.join(&name);
        match name.strip_prefix('v') {
            Some(found) if !found.is_empty() && found.bytes().all(|b| b.is_ascii_digit()) => {
                if list(&path)?.is_empty() {
                    fs::remove_dir(&path).path("removing", &path)?;
                } else {
                    return Err(Error::ForeignAbi { found: found.to_owned(), path, ours: ABI_VERSION });
                }
            }
            _ => {
                let detail =
                    "nothing but version directories belongs here; choose another pin_root".to_owned();
                return Err(Error::ForeignPin { path, detail });
            }
        }
    }
    Ok(())
}

fn on_bpffs(path: &Path) -> Result<bool> {
    let fs = statfs(path).map_err(io::Error::from).path("reading the file system of", path)?;
    Ok(fs.filesystem_type() == BPF_FS)
}

/// Returns whether a bpffs had to be mounted.
fn ensure_bpffs(root: &Path) -> Result<bool> {
    let existing = root.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    if on_bpffs(existing)? {
        return Ok(false);
    }
    let target = if root.starts_with(SYSTEM_MOUNT) { Path::new(SYSTEM_MOUNT) } else { root };
    fs::create_dir_all(target).path("creating", target)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("bpf"), target, Some("bpf"), flags, Some("mode=0700"))
        .map_err(io::Error::from)
        .path("mounting a bpffs on", target)?;
    Ok(true)
}
