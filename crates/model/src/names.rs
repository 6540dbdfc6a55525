//! Validated names and identity newtypes.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Why a name was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} is not a name: 1..63 characters of a-z, 0-9, '-' and '.', first and last alphanumeric")]
pub struct NameError {
    /// What was given.
    pub value: String,
}

fn check(s: &str) -> Result<(), NameError> {
    let alnum = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let b = s.as_bytes();
    let ok = !b.is_empty()
        && b.len() <= 63
        && b.iter().all(|&c| alnum(c) || c == b'-' || c == b'.')
        && b.first().is_some_and(|&c| alnum(c))
        && b.last().is_some_and(|&c| alnum(c));
    if ok { Ok(()) } else { Err(NameError { value: s.chars().take(80).collect() }) }
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks and wraps.
            ///
            /// # Errors
            /// When the syntax is not met.
            pub fn new(s: impl AsRef<str>) -> Result<Self, NameError> {
                check(s.as_ref())?;
                Ok(Self(s.as_ref().into()))
            }
            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str { &self.0 }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.pad(&self.0) }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { fmt::Debug::fmt(&*self.0, f) }
        }
        impl TryFrom<String> for $name {
            type Error = NameError;
            fn try_from(s: String) -> Result<Self, NameError> { Self::new(s) }
        }
        impl std::str::FromStr for $name {
            type Err = NameError;
            fn from_str(s: &str) -> Result<Self, NameError> { Self::new(s) }
        }
        impl From<$name> for String {
            fn from(n: $name) -> Self { n.0.to_string() }
        }
    };
}

name_type!(
    /// A VPC, unique globally.
    VpcName
);
name_type!(
    /// A node, unique globally.
    NodeName
);
name_type!(
    /// A subnet, unique in its VPC.
    SubnetName
);
name_type!(
    /// An endpoint, unique in its VPC.
    EndpointName
);
name_type!(
    /// A security group, unique in its VPC.
    GroupName
);
name_type!(
    /// A CIDR group, unique in its VPC.
    CidrGroupName
);
name_type!(
    /// A rule, unique in its group.
    RuleName
);
name_type!(
    /// A named port.
    PortName
);
name_type!(
    /// A load balancer, unique in its VPC.
    ServiceName
);

/// A name made of parts that were checked elsewhere (`namespace`, `pod`): joined by dots, lower case, other characters as `-`. What does not
/// fit 63 characters keeps its beginning and gets a hash of the whole, so that different parts stay different names.
#[must_use]
pub fn joined(parts: &[&str]) -> String {
    let whole = parts.join(".");
    let clean: String = whole
        .chars()
        .map(|c| c.to_ascii_lowercase())
        .map(|c| if c.is_ascii_lowercase() || c.is_ascii_digit() || c == '.' || c == '-' { c } else { '-' })
        .collect();
    let trimmed = clean.trim_matches(['.', '-']);
    if trimmed == whole && (1..=63).contains(&trimmed.len()) {
        return whole;
    }
    // FNV-1a, 64 bits: the same in every version and on every node.
    let hash = whole
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    let kept: String = trimmed.chars().take(50).collect();
    let kept = kept.trim_end_matches(['.', '-']);
    if kept.is_empty() { format!("{:012x}", hash >> 16) } else { format!("{kept}-{:012x}", hash >> 16) }
}

/// The VPC whose traffic may use the host's stack, and the one CNI attachments get when they name none.
pub const DEFAULT_VPC: &str = "default";

/// The default VPC's VNI unless the document gives another: every node knows it without asking the allocator.
pub const DEFAULT_VNI: Vni = Vni(1);

impl VpcName {
    /// Whether this is the default VPC.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.as_str() == DEFAULT_VPC
    }
}

/// An endpoint's full name; shown and parsed as `vpc/name`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct EndpointKey {
    /// Its VPC.
    pub vpc: VpcName,
    /// Its name there.
    pub name: EndpointName,
}

impl fmt::Display for EndpointKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.vpc, self.name)
    }
}

impl std::str::FromStr for EndpointKey {
    type Err = NameError;
    fn from_str(s: &str) -> Result<Self, NameError> {
        let (vpc, name) = s.split_once('/').ok_or_else(|| NameError { value: s.to_owned() })?;
        Ok(Self { vpc: vpc.parse()?, name: name.parse()? })
    }
}

/// VXLAN network identifier, 1..=16777215; also the VPC's number in every map.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Vni(u32);

impl Vni {
    /// Largest VNI (24 bits, RFC 7348).
    pub const MAX: u32 = 0x00ff_ffff;
    /// Checks the range.
    #[must_use]
    pub const fn new(n: u32) -> Option<Self> {
        if n >= 1 && n <= Self::MAX { Some(Self(n)) } else { None }
    }
    /// The number.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }
}

impl TryFrom<u32> for Vni {
    type Error = String;
    fn try_from(n: u32) -> Result<Self, String> {
        Self::new(n).ok_or_else(|| format!("{n} is not a VNI: 1..=16777215"))
    }
}

impl From<Vni> for u32 {
    fn from(v: Vni) -> Self {
        v.0
    }
}

impl fmt::Display for Vni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_names_are_legal_and_stay_different() {
        assert_eq!(joined(&["shop", "web-0"]), "shop.web-0");
        let long = "a".repeat(253);
        for parts in
            [&["shop", long.as_str()][..], &["shop", "Web_0"], &["", ""], &["---"], &[""], &["é", "x"]]
        {
            let name = joined(parts);
            assert!(EndpointName::new(&name).is_ok(), "{parts:?} became {name:?}");
        }
        let other = format!("{long}b");
        assert_ne!(joined(&["shop", &long]), joined(&["shop", &other]));
        assert_ne!(joined(&["shop", "Web"]), joined(&["shop", "web"]));
    }
}
