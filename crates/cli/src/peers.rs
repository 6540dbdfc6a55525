//! Endpoints as people write them: `vpc/name`, `namespace/pod`, `pod/namespace/name`, or a name alone.

use std::str::FromStr;

use flowloom_api::{Side, SideKind};
use flowloom_model::{DEFAULT_VPC, VpcName, joined};

use crate::exit::Failure;

/// An endpoint, and nothing else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EndpointArg {
    /// A VPC, or a namespace: the agent knows.
    pub(crate) before: Option<String>,
    pub(crate) name: String,
}

impl FromStr for EndpointArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let side: Side = text.parse()?;
        if side.address().is_some() {
            return Err("an endpoint's name is wanted here, not an address".to_owned());
        }
        match side.kind {
            SideKind::Service => Err("an endpoint's name is wanted here, not a Service".to_owned()),
            SideKind::Pod => {
                let namespace = side.before.as_deref().unwrap_or_default();
                Ok(Self { before: Some(DEFAULT_VPC.to_owned()), name: joined(&[namespace, &side.name]) })
            }
            SideKind::Any => Ok(Self { before: side.before, name: side.name }),
        }
    }
}

impl EndpointArg {
    /// VPC (or namespace) and name: the argument's own, then `--vpc`, then the default VPC.
    pub(crate) fn resolve(&self, vpc: Option<&VpcName>) -> Result<(String, String), Failure> {
        match (&self.before, vpc) {
            (Some(before), Some(vpc)) if before != vpc.as_str() => {
                Err(Failure::usage(format!("the endpoint is one of {before}, --vpc says {vpc}")))
            }
            (Some(before), _) => Ok((before.clone(), self.name.clone())),
            (None, vpc) => Ok((vpc.map_or(DEFAULT_VPC, VpcName::as_str).to_owned(), self.name.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_and_pods_by_every_name_they_have() {
        let of = |text: &str, vpc: Option<&str>| {
            let vpc = vpc.map(|v| VpcName::new(v).unwrap());
            text.parse::<EndpointArg>().unwrap().resolve(vpc.as_ref()).map_err(|e| e.exit)
        };
        let pair = |a: &str, b: &str| Ok((a.to_owned(), b.to_owned()));
        assert_eq!(of("web-1", None), pair("default", "web-1"));
        assert_eq!(of("web-1", Some("red")), pair("red", "web-1"));
        assert_eq!(of("shop/front-0", None), pair("shop", "front-0"));
        assert_eq!(of("pod/shop/front-0", None), pair("default", "shop.front-0"));
        assert_eq!(of("red/web-1", Some("blue")), Err(crate::Exit::Usage));
        for bad in ["10.0.0.1", "svc/shop/front", "Red/web", ""] {
            assert!(bad.parse::<EndpointArg>().is_err(), "{bad}");
        }
    }
}
