//! Per-device settings under `/proc/sys/net`. The files show the namespace of the thread that opens them:
//! [`crate::Handle::ensure_sysctls`] reads and writes them in the right one.

use std::fs;
use std::path::PathBuf;

use crate::error::{Action, Error, Result};
use crate::types::LinkName;

/// Whose setting it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// One link.
    Link(LinkName),
    /// `all`: what it does beside the per-device value differs per key (Documentation/networking/ip-sysctl).
    All,
    /// `default`: what new links start with.
    Default,
}

/// The settings that flowloom knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Key {
    /// IPv4 reverse-path filter: 0 off, 1 strict, 2 loose. The larger of `all` and the device's counts.
    RpFilter,
    /// IPv4 forwarding.
    Forwarding4,
    /// IPv6 forwarding.
    Forwarding6,
    /// Answer ARP for addresses routed elsewhere.
    ProxyArp,
    /// Accept packets with a local source.
    AcceptLocal,
    /// 1 = answer ARP only for addresses of the device itself.
    ArpIgnore,
    /// Accept IPv6 router advertisements.
    AcceptRa,
    /// How IPv6 link-local addresses are made: 0 EUI-64, 1 none.
    AddrGenMode,
    /// No IPv6 on the device.
    DisableIpv6,
    /// IPv6 duplicate address detection: 0 off, 1 on.
    AcceptDad,
    /// IPv6 neighbour proxy.
    ProxyNdp,
}

impl Key {
    fn location(self) -> (&'static str, &'static str) {
        match self {
            Self::RpFilter => ("ipv4", "rp_filter"),
            Self::Forwarding4 => ("ipv4", "forwarding"),
            Self::ProxyArp => ("ipv4", "proxy_arp"),
            Self::AcceptLocal => ("ipv4", "accept_local"),
            Self::ArpIgnore => ("ipv4", "arp_ignore"),
            Self::Forwarding6 => ("ipv6", "forwarding"),
            Self::AcceptRa => ("ipv6", "accept_ra"),
            Self::AddrGenMode => ("ipv6", "addr_gen_mode"),
            Self::DisableIpv6 => ("ipv6", "disable_ipv6"),
            Self::AcceptDad => ("ipv6", "accept_dad"),
            Self::ProxyNdp => ("ipv6", "proxy_ndp"),
        }
    }
}

/// One setting and its wanted value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// Whose.
    pub scope: Scope,
    /// Which.
    pub key: Key,
    /// The value, as the kernel prints it.
    pub value: i64,
}

impl Setting {
    /// Of one link.
    #[must_use]
    pub fn link(name: &LinkName, key: Key, value: i64) -> Self {
        Self { scope: Scope::Link(name.clone()), key, value }
    }

    /// Its file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        path(&self.scope, self.key)
    }
}

fn path(scope: &Scope, key: Key) -> PathBuf {
    let (family, file) = key.location();
    let device = match scope {
        Scope::Link(name) => name.as_str(),
        Scope::All => "all",
        Scope::Default => "default",
    };
    ["/proc/sys/net", family, "conf", device, file].iter().collect()
}

/// Reads in the calling thread's namespace.
///
/// # Errors
/// When the device or the setting does not exist.
pub fn read(scope: &Scope, key: Key) -> Result<i64> {
    let path = path(scope, key);
    let fail = |path, source| Error::Sysctl { action: Action::Read, path, source };
    let text = fs::read_to_string(&path).map_err(|e| fail(path.clone(), e))?;
    text.trim().parse().map_err(|_| fail(path, std::io::Error::from(std::io::ErrorKind::InvalidData)))
}

/// Writes what differs in the calling thread's namespace; returns how many were written.
///
/// # Errors
/// The first setting that cannot be read or written.
pub fn ensure(settings: &[Setting]) -> Result<usize> {
    let mut written = 0;
    for s in settings {
        if read(&s.scope, s.key)? != s.value {
            let path = s.path();
            fs::write(&path, s.value.to_string()).map_err(|source| Error::Sysctl {
                action: Action::Change,
                path,
                source,
            })?;
            written += 1;
        }
    }
    Ok(written)
}
