//! Version 1. Names first, numbers beside them; times in nanoseconds or milliseconds since the Unix epoch as the field's name says.

mod cni;
mod conntrack;
mod controller;
mod endpoint;
mod error;
mod history;
mod hold;
mod kubernetes;
mod observe;
mod policy;
pub mod route;
mod service;
mod status;
mod trace;

pub use cni::*;
pub use conntrack::*;
pub use controller::*;
pub use endpoint::*;
pub use error::*;
pub use history::*;
pub use hold::*;
pub use kubernetes::*;
pub use observe::*;
pub use policy::*;
pub use service::*;
pub use status::*;
pub use trace::*;

use serde::{Deserialize, Serialize};

/// A name and its number on this node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Named {
    /// The name the user wrote; empty when the number has no name any more.
    pub name: String,
    /// The number in maps and counters.
    pub number: u32,
}

impl Named {
    /// Pairs the two.
    #[must_use]
    pub fn new(name: impl Into<String>, number: u32) -> Self {
        Self { name: name.into(), number }
    }
}

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.name.is_empty() { write!(f, "#{}", self.number) } else { f.pad(&self.name) }
    }
}

/// Direction of a policy, relative to the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// What it sends.
    Egress,
    /// What it receives.
    Ingress,
}

impl Direction {
    /// The word used in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Egress => "egress",
            Self::Ingress => "ingress",
        }
    }
}

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Passed.
    Allow,
    /// Dropped silently.
    Drop,
    /// Dropped and answered.
    Reject,
}

impl Verdict {
    /// The word used in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Drop => "drop",
            Self::Reject => "reject",
        }
    }

    /// Parses the word used in JSON.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Allow, Self::Drop, Self::Reject].into_iter().find(|v| v.name() == name)
    }
}

/// A condition of an object: what is wrong with it, or that nothing is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Condition {
    /// `Ready`, `Accepted` and the like.
    #[serde(rename = "type")]
    pub kind: String,
    /// Whether it holds.
    pub status: bool,
    /// CamelCase constant.
    pub reason: String,
    /// What to do, for people.
    pub message: String,
    /// Generation of the source document it speaks of.
    pub observed_generation: u64,
    /// Milliseconds since the Unix epoch.
    pub last_transition_ms: u64,
}
