//! What can go wrong, named after the object it concerns.

use std::fmt;
use std::io;
use std::path::PathBuf;

use nix::errno::Errno;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What was tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the variants are the verbs")]
pub enum Action {
    Create,
    Change,
    Delete,
    Read,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Create => "create",
            Self::Change => "change",
            Self::Delete => "delete",
            Self::Read => "read",
        })
    }
}

/// An operation on the host's network failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel answered a request with an error.
    #[error("cannot {action} {object}: {errno}{}{}", detail_text(.detail.as_deref()), hint(*.errno))]
    Refused {
        /// What was tried.
        action: Action,
        /// The object, e.g. `link "eth0"`.
        object: String,
        /// The kernel's error number.
        errno: Errno,
        /// The kernel's own explanation (extended acknowledgement), when it gave one.
        detail: Option<String>,
    },
    /// The netlink socket failed.
    #[error("netlink socket: cannot {what}")]
    Socket {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// Replies were lost: the outcome is unknown; read the state again.
    #[error(
        "the kernel dropped netlink replies while {object} was handled: read the state again and compare"
    )]
    RepliesLost {
        /// The object.
        object: String,
    },
    /// A listing changed under every attempt to read it.
    #[error("{object} kept changing while it was read ({attempts} attempts): try again")]
    Unsettled {
        /// What was listed.
        object: String,
        /// Attempts made.
        attempts: u32,
    },
    /// The kernel sent something this program does not understand.
    #[error("cannot parse the kernel's answer about {object}: {reason}")]
    Malformed {
        /// The object.
        object: String,
        /// What the parser said.
        reason: String,
    },
    /// Something by that name exists and does not carry flowloom's mark.
    #[error("{object} exists and is not flowloom's ({found}): remove it or configure another name")]
    NotOurs {
        /// The object.
        object: String,
        /// What was found.
        found: String,
    },
    /// Something that must exist does not.
    #[error("{object} does not exist")]
    Missing {
        /// The object.
        object: String,
    },
    /// A namespace could not be made, opened, entered or removed.
    #[error("cannot {what} network namespace {path}")]
    Netns {
        /// What was tried.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The path exists, but no namespace is mounted there (a leftover of a reboot, or the wrong path).
    #[error("{path} is not a network namespace: a leftover of a reboot can be removed")]
    NotANetns {
        /// The path.
        path: PathBuf,
    },
    /// A file under `/proc/sys` could not be read or written.
    #[error("cannot {action} sysctl {path}")]
    Sysctl {
        /// What was tried.
        action: Action,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// `nft` could not be run, or failed.
    #[error("nft {what} failed: {reason}")]
    Nft {
        /// The operation.
        what: &'static str,
        /// Its error output, or why it could not be started.
        reason: String,
    },
}

impl Error {
    /// The kernel's error number, when one is known.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Refused { errno, .. } => Some(*errno),
            Self::Socket { source, .. } | Self::Netns { source, .. } | Self::Sysctl { source, .. } => {
                source.raw_os_error().map(Errno::from_raw)
            }
            _ => None,
        }
    }

    pub(crate) fn socket(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Socket { what, source }
    }
}

fn detail_text(detail: Option<&str>) -> String {
    detail.map(|d| format!(" ({d})")).unwrap_or_default()
}

/// What to check, for the errors that people meet.
fn hint(errno: Errno) -> &'static str {
    match errno {
        Errno::EPERM | Errno::EACCES => "; root or CAP_NET_ADMIN is needed",
        Errno::EEXIST => "; another object has this name or key",
        Errno::EOPNOTSUPP => "; does this kernel have the device type or option?",
        Errno::ENETUNREACH => "; is the next hop on a link that is up?",
        Errno::ENODEV => "; is the link still there?",
        Errno::ENETDOWN => "; the link is down",
        Errno::EADDRINUSE => "; the port or address is taken",
        Errno::ENOBUFS | Errno::ENOMEM => "; the kernel is short of memory",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_names_object_errno_detail_and_what_to_check() {
        let e = Error::Refused {
            action: Action::Create,
            object: "link \"eth9\"".into(),
            errno: Errno::EPERM,
            detail: Some("no".into()),
        };
        let text = e.to_string();
        for part in ["create link \"eth9\"", "EPERM", "(no)", "CAP_NET_ADMIN"] {
            assert!(text.contains(part), "{text} lacks {part}");
        }
        assert_eq!(e.errno(), Some(Errno::EPERM));
    }
}
