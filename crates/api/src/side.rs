//! A side of a question as people write it: an endpoint, a Pod, a Service or an address.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// What is said before a name, apart from where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SideKind {
    /// Nothing: an endpoint, a Pod or an address.
    Any,
    /// `pod/`.
    Pod,
    /// `svc/`.
    Service,
}

/// `name`, `vpc/name`, `vpc/address`, `address`, `namespace/pod`, `pod/namespace/name`, `svc/namespace/name`, `svc/name`.
///
/// Which of a VPC and a namespace `a/b` means, only the agent can say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// What kind of thing it says it is.
    pub kind: SideKind,
    /// VPC or namespace.
    pub before: Option<String>,
    /// The name, or an address in its shortest form.
    pub name: String,
}

impl Side {
    /// The address, where it is one.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        if self.kind == SideKind::Any { self.name.parse().ok() } else { None }
    }
}

impl FromStr for Side {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, rest) = match text.split_once('/') {
            Some(("svc" | "service" | "services", rest)) => (SideKind::Service, rest),
            Some(("pod" | "pods" | "po", rest)) if rest.contains('/') => (SideKind::Pod, rest),
            _ => (SideKind::Any, text),
        };
        let (before, name) = match rest.split_once('/') {
            Some((before, name)) => (Some(before), name),
            None => (None, rest),
        };
        if let Some(before) = before.filter(|b| !is_name(b)) {
            return Err(format!("{before:?} is the name of neither a VPC nor a namespace"));
        }
        let before = before.map(str::to_owned);
        if kind == SideKind::Any {
            if let Ok(address) = name.parse::<IpAddr>() {
                return Ok(Self { kind, before, name: address.to_string() });
            }
            // Names may hold dots and digits, so a mistyped address would pass as one and not be found.
            let dotted = name.contains('.') && name.bytes().all(|b| b.is_ascii_digit() || b == b'.');
            if name.contains(':') || dotted {
                return Err(format!("{name:?} is not an address"));
            }
        }
        if !is_name(name) {
            return Err(match kind {
                SideKind::Any => format!("{name:?} is neither a name nor an address"),
                SideKind::Pod => format!("{name:?} is no Pod's name: write pod/namespace/name"),
                SideKind::Service => format!("{name:?} is no Service's name: write svc/namespace/name"),
            });
        }
        Ok(Self { kind, before, name: name.to_owned() })
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            SideKind::Any => "",
            SideKind::Pod => "pod/",
            SideKind::Service => "svc/",
        })?;
        if let Some(before) = &self.before {
            write!(f, "{before}/")?;
        }
        f.write_str(&self.name)
    }
}

/// As names of Pods are (RFC 1123 subdomain): the longest of all that is meant here.
fn is_name(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    let edge = |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let bytes = text.as_bytes();
    bytes.len() <= 253 && bytes.iter().all(|b| inner(*b)) && edge(bytes.first()) && edge(bytes.last())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read_and_written_the_same() {
        use SideKind::{Any, Pod, Service};
        for (text, kind, before, name) in [
            ("web-1", Any, None, "web-1"),
            ("red/web-1", Any, Some("red"), "web-1"),
            ("red/10.0.0.5", Any, Some("red"), "10.0.0.5"),
            ("fd00::1", Any, None, "fd00::1"),
            ("pod/shop/front-0.a", Pod, Some("shop"), "front-0.a"),
            ("svc/shop/front", Service, Some("shop"), "front"),
            ("svc/web", Service, None, "web"),
            // A VPC may be called so.
            ("pod/web", Any, Some("pod"), "web"),
        ] {
            let side: Side = text.parse().unwrap();
            assert_eq!(
                (side.kind, side.before.as_deref(), side.name.as_str()),
                (kind, before, name),
                "{text}"
            );
            assert_eq!(side.to_string(), text);
        }
        let long = format!("shop/{}", "a".repeat(253));
        assert_eq!(long.parse::<Side>().unwrap().to_string(), long);
    }

    #[test]
    fn other_words_and_forms_mean_the_same() {
        let same = |a: &str, b: &str| assert_eq!(a.parse::<Side>().unwrap().to_string(), b);
        same("service/shop/front", "svc/shop/front");
        same("po/shop/x", "pod/shop/x");
        same("red/FD00:0::1", "red/fd00::1");
    }

    #[test]
    fn what_cannot_be_a_name_is_refused_before_anybody_is_asked() {
        for bad in [
            "",
            "/",
            "red/",
            "/web",
            "10.0.0.256",
            "10.0.0",
            "010.0.0.1",
            "fd00::g",
            "Web",
            "a/b/c",
            "svc/",
            "svc/a/b/c",
            "pod/a/",
            "pod/a/b/c",
            "-a",
            "a/b_c",
            "Shop/web",
            "svc/shop/10_0",
        ] {
            assert!(bad.parse::<Side>().is_err(), "{bad}");
        }
        assert_eq!("svc/shop/10.0.0.1".parse::<Side>().unwrap().address(), None);
    }
}
