//! Why the datapath refused or failed.

use std::io;
use std::path::{Path, PathBuf};

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel is too old.
    #[error(
        "kernel {found} is older than {need}: flowloom needs TCX links; install a kernel {need} or newer"
    )]
    KernelTooOld {
        /// `uname -r`.
        found: String,
        /// Oldest supported.
        need: &'static str,
    },
    /// The running kernel could not be identified.
    #[error("kernel release {found:?} cannot be read as a version")]
    KernelUnknown {
        /// `uname -r`.
        found: String,
    },
    /// A stub stands in for the BPF object.
    #[error("this build carries no BPF object: {detail}")]
    NoObject {
        /// What to do.
        detail: String,
    },
    /// Pins of another ABI version.
    #[error(
        "{path} holds maps of ABI version {found}, this agent speaks {ours}: run the matching agent, or `flowloom-agent uninstall` with it first (established connections end)"
    )]
    ForeignAbi {
        /// Where.
        path: PathBuf,
        /// Their version as written in the path.
        found: String,
        /// Ours.
        ours: u32,
    },
    /// A pinned map does not have the declared shape.
    #[error(
        "pinned map {path} differs from what this agent declares ({difference}): keep the configured sizes, or uninstall first (established connections end)"
    )]
    PinMismatch {
        /// Where.
        path: PathBuf,
        /// Field, found and expected values.
        difference: String,
    },
    /// Something that is not ours lies in the pin directory.
    #[error("{path} is not flowloom's: {detail}")]
    ForeignPin {
        /// Where.
        path: PathBuf,
        /// Why.
        detail: String,
    },
    /// aya could not parse or load the object.
    #[error("loading the BPF object failed while {doing}: {detail}")]
    Load {
        /// Which step.
        doing: String,
        /// The whole chain, with the verifier's log where there is one.
        detail: String,
    },
    /// The object lacks a map or a program.
    #[error("the BPF object has no {kind} {name:?}: rebuild it with `cargo xtask bpf`")]
    Missing {
        /// map or program.
        kind: &'static str,
        /// Name.
        name: String,
    },
    /// A map operation failed.
    #[error("{doing} map {map}: {source}")]
    Map {
        /// reading, writing, ...
        doing: &'static str,
        /// Map name.
        map: String,
        /// From the kernel.
        #[source]
        source: io::Error,
    },
    /// A file system operation failed.
    #[error("{doing} {path}: {source}")]
    Path {
        /// What.
        doing: &'static str,
        /// Where.
        path: PathBuf,
        /// From the kernel.
        #[source]
        source: io::Error,
    },
    /// A device operation failed.
    #[error("{doing} device {device}: {source}")]
    Device {
        /// What.
        doing: &'static str,
        /// Name or `ifindex N`.
        device: String,
        /// From the kernel.
        #[source]
        source: io::Error,
    },
    /// A program run or query failed.
    #[error("{doing}: {source}")]
    Kernel {
        /// What.
        doing: String,
        /// From the kernel.
        #[source]
        source: io::Error,
    },
    /// A value that no map can hold.
    #[error("{object}: {detail}")]
    Invalid {
        /// Which object.
        object: String,
        /// What is wrong with it.
        detail: String,
    },
    /// The owner's write hook ended the run.
    #[error("stopped before the next write: {0}")]
    Aborted(String),
    /// Removal went on past these.
    #[error("{} things could not be removed: {}", .0.len(), .0.join("; "))]
    Leftovers(Vec<String>),
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// `map_err` helpers that name the object.
pub(crate) trait Context<T> {
    fn in_map(self, doing: &'static str, map: &str) -> Result<T>;
    fn path(self, doing: &'static str, path: &Path) -> Result<T>;
    fn device(self, doing: &'static str, device: impl ToString) -> Result<T>;
    fn kernel(self, doing: impl ToString) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn in_map(self, doing: &'static str, map: &str) -> Result<T> {
        self.map_err(|source| Error::Map { doing, map: map.to_owned(), source })
    }
    fn path(self, doing: &'static str, path: &Path) -> Result<T> {
        self.map_err(|source| Error::Path { doing, path: path.to_owned(), source })
    }
    fn device(self, doing: &'static str, device: impl ToString) -> Result<T> {
        self.map_err(|source| Error::Device { doing, device: device.to_string(), source })
    }
    fn kernel(self, doing: impl ToString) -> Result<T> {
        self.map_err(|source| Error::Kernel { doing: doing.to_string(), source })
    }
}

impl Error {
    /// Whether the cause is a full map (`E2BIG`, `ENOSPC`, `ENOMEM`): the change was refused, what was before is in force.
    #[must_use]
    pub fn is_capacity(&self) -> bool {
        let source = match self {
            Self::Map { source, .. } | Self::Kernel { source, .. } => source,
            _ => return false,
        };
        matches!(source.raw_os_error(), Some(libc::E2BIG | libc::ENOSPC | libc::ENOMEM))
    }
}
