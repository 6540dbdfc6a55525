//! Per-device settings under `/proc/sys/net`, and the ports that are kept from sockets. The files show the namespace of the
//! thread that opens them: [`crate::Handle::ensure_sysctls`] reads and writes them in the right one.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::str::FromStr;

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

/// TCP and UDP ports of both families that the kernel hands to no socket by itself (`ip_local_reserved_ports`).
const RESERVED_PORTS: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// A set of ports, written as the kernel writes it: `8080,30000-32767`.
#[derive(Clone, PartialEq, Eq)]
pub struct PortSet(Vec<bool>);

impl PortSet {
    /// No port.
    #[must_use]
    pub fn empty() -> Self {
        Self(vec![false; 1 << 16])
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.0.contains(&true)
    }

    /// Those of either.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        self.with(other, |a, b| a || b)
    }

    /// Those of both.
    #[must_use]
    pub fn common(&self, other: &Self) -> Self {
        self.with(other, |a, b| a && b)
    }

    /// Those that the other has not.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        self.with(other, |a, b| a && !b)
    }

    fn with(&self, other: &Self, keep: impl Fn(bool, bool) -> bool) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(a, b)| keep(*a, *b)).collect())
    }
}

/// A text that is no set of ports.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no list of ports and ranges (8080,30000-32767)")]
pub struct PortSetError(String);

impl FromStr for PortSet {
    type Err = PortSetError;

    fn from_str(text: &str) -> std::result::Result<Self, PortSetError> {
        let error = || PortSetError(text.to_owned());
        let mut set = Self::empty();
        for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let port = |text: &str| text.trim().parse::<u16>().map_err(|_| error());
            let (first, last) = (usize::from(port(first)?), usize::from(port(last)?));
            set.0.get_mut(first..=last).filter(|ports| !ports.is_empty()).ok_or_else(error)?.fill(true);
        }
        Ok(set)
    }
}

impl fmt::Display for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut at, mut comma) = (0, "");
        while let Some(first) = self.0[at..].iter().position(|p| *p).map(|i| at + i) {
            at = self.0[first..].iter().position(|p| !p).map_or(self.0.len(), |i| first + i);
            match at - 1 {
                last if last == first => write!(f, "{comma}{first}")?,
                last => write!(f, "{comma}{first}-{last}")?,
            }
            comma = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The reserved ports in the calling thread's namespace.
///
/// # Errors
/// When the setting cannot be read.
pub fn reserved_ports() -> Result<PortSet> {
    let fail = |source| Error::Sysctl { action: Action::Read, path: RESERVED_PORTS.into(), source };
    let text = fs::read_to_string(RESERVED_PORTS).map_err(fail)?;
    text.parse().map_err(|e| fail(std::io::Error::new(std::io::ErrorKind::InvalidData, e)))
}

/// Sets them, whatever they were.
///
/// # Errors
/// When the setting cannot be written.
pub fn set_reserved_ports(ports: &PortSet) -> Result<()> {
    fs::write(RESERVED_PORTS, format!("{ports}\n")).map_err(|source| Error::Sysctl {
        action: Action::Change,
        path: RESERVED_PORTS.into(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_sets_are_read_joined_and_written_as_the_kernel_does() {
        let set = |text: &str| text.parse::<PortSet>().unwrap();
        for text in ["", "80", "0-65535", "8080,30000-32767,61000-65535"] {
            assert_eq!(set(text).to_string(), text);
        }
        assert_eq!(set(" 5,3-4,7\n").to_string(), "3-5,7");
        let (ours, theirs) = (set("30000-32767"), set("8080,32000-33000"));
        assert_eq!(ours.union(&theirs).to_string(), "8080,30000-33000");
        assert_eq!(ours.without(&theirs).to_string(), "30000-31999");
        assert_eq!(ours.common(&theirs).to_string(), "32000-32767");
        assert!(set("\n").is_empty() && !ours.is_empty());
        for text in ["x", "1-", "9-3", "9-8", "65536", "1,,2", "1-2-3"] {
            assert!(text.parse::<PortSet>().is_err(), "{text}");
        }
    }
}
