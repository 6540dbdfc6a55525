//! Endpoints and addresses as people write them: `vpc/name`, `vpc/address`, or either alone.

use std::net::IpAddr;
use std::str::FromStr;

use flowloom_model::{DEFAULT_VPC, EndpointName, VpcName};

use crate::exit::Failure;

/// One side of a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Peer {
    /// The part before the slash.
    pub(crate) vpc: Option<VpcName>,
    /// The rest: an endpoint's name or an address in its shortest form.
    pub(crate) name: String,
    /// Whether `name` is an address.
    pub(crate) is_address: bool,
}

impl FromStr for Peer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (vpc, rest) = match text.split_once('/') {
            Some((vpc, rest)) => (Some(vpc.parse::<VpcName>().map_err(|e| e.to_string())?), rest),
            None => (None, text),
        };
        if let Ok(address) = rest.parse::<IpAddr>() {
            return Ok(Self { vpc, name: address.to_string(), is_address: true });
        }
        // Names may hold dots and digits, so a mistyped address would pass as one and not be found.
        if rest.contains(':') || (rest.contains('.') && rest.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
        {
            return Err(format!("{rest:?} is not an address"));
        }
        let name: EndpointName =
            rest.parse().map_err(|_| format!("{rest:?} is neither an endpoint's name nor an address"))?;
        Ok(Self { vpc, name: name.to_string(), is_address: false })
    }
}

/// An endpoint, and nothing else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EndpointArg {
    pub(crate) vpc: Option<VpcName>,
    pub(crate) name: String,
}

impl FromStr for EndpointArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let peer: Peer = text.parse()?;
        if peer.is_address {
            Err("an endpoint's name is wanted here, not an address".to_owned())
        } else {
            Ok(peer.into())
        }
    }
}

impl From<Peer> for EndpointArg {
    fn from(p: Peer) -> Self {
        Self { vpc: p.vpc, name: p.name }
    }
}

impl EndpointArg {
    /// VPC and name: the argument's own VPC, then `--vpc`, then the default VPC.
    pub(crate) fn resolve(&self, vpc: Option<&VpcName>) -> Result<(String, String), Failure> {
        Ok((one_vpc([self.vpc.as_ref(), vpc])?, self.name.clone()))
    }
}

/// The one VPC that all who name one agree on; the default VPC when nobody does.
pub(crate) fn one_vpc<'a>(named: impl IntoIterator<Item = Option<&'a VpcName>>) -> Result<String, Failure> {
    let mut found: Option<&VpcName> = None;
    for vpc in named.into_iter().flatten() {
        match found {
            Some(other) if other != vpc => {
                return Err(Failure::usage(format!(
                    "VPC {other} and VPC {vpc}: both sides must be in one VPC; nothing is ever forwarded between VPCs"
                )));
            }
            _ => found = Some(vpc),
        }
    }
    Ok(found.map_or_else(|| DEFAULT_VPC.to_owned(), ToString::to_string))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_form_on_either_side() {
        let p = |s: &str| s.parse::<Peer>();
        assert_eq!(p("web-1").unwrap(), Peer { vpc: None, name: "web-1".into(), is_address: false });
        assert_eq!(p("red/10.0.0.5").unwrap().vpc.unwrap().as_str(), "red");
        assert_eq!(p("red/FD00:0::1").unwrap().name, "fd00::1");
        assert!(p("fd00::1").unwrap().is_address);
        for bad in ["", "/", "red/", "/web", "10.0.0.256", "10.0.0", "010.0.0.1", "fd00::g", "Web", "a/b/c"] {
            assert!(p(bad).is_err(), "{bad}");
        }
        assert!("10.0.0.1".parse::<EndpointArg>().is_err());
    }

    #[test]
    fn one_vpc_for_both() {
        let (red, blue) = (VpcName::new("red").unwrap(), VpcName::new("blue").unwrap());
        assert_eq!(one_vpc([None, None]).unwrap(), "default");
        assert_eq!(one_vpc([None, Some(&red)]).unwrap(), "red");
        assert_eq!(one_vpc([Some(&red), Some(&red)]).unwrap(), "red");
        let e = one_vpc([Some(&red), Some(&blue)]).unwrap_err();
        assert!(e.message.contains("red") && e.message.contains("blue"));
        assert_eq!(e.exit, crate::Exit::Usage);
    }
}
