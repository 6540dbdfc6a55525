//! What can be wrong with an object: one enum of reasons, the object's full name, the field's path and the value.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{CidrGroupName, EndpointKey, GroupName, NodeName, ServiceName, SubnetName, VpcName};

/// An object of the world by its full name; shown as `kind vpc/name`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ObjectRef {
    /// A node.
    Node(NodeName),
    /// A VPC.
    Vpc(VpcName),
    /// A subnet.
    Subnet(VpcName, SubnetName),
    /// An endpoint.
    Endpoint(EndpointKey),
    /// A security group.
    SecurityGroup(VpcName, GroupName),
    /// A CIDR group.
    CidrGroup(VpcName, CidrGroupName),
    /// A load balancer.
    LoadBalancer(VpcName, ServiceName),
}

impl ObjectRef {
    /// The kind's key in the desired-state document.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Node(_) => "nodes",
            Self::Vpc(_) => "vpcs",
            Self::Subnet(..) => "subnets",
            Self::Endpoint(_) => "endpoints",
            Self::SecurityGroup(..) => "security_groups",
            Self::CidrGroup(..) => "cidr_groups",
            Self::LoadBalancer(..) => "load_balancers",
        }
    }

    /// The name without the kind: `vpc/name`, or `name` for what is unique globally.
    #[must_use]
    pub fn full_name(&self) -> String {
        match self {
            Self::Node(n) => n.to_string(),
            Self::Vpc(n) => n.to_string(),
            Self::Subnet(v, n) => format!("{v}/{n}"),
            Self::Endpoint(k) => k.to_string(),
            Self::SecurityGroup(v, n) => format!("{v}/{n}"),
            Self::CidrGroup(v, n) => format!("{v}/{n}"),
            Self::LoadBalancer(v, n) => format!("{v}/{n}"),
        }
    }

    /// Path of the object by name, e.g. `endpoints[red/web-1]`.
    #[must_use]
    pub fn path(&self) -> String {
        format!("{}[{}]", self.kind(), self.full_name())
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Node(_) => "node",
            Self::Vpc(_) => "vpc",
            Self::Subnet(..) => "subnet",
            Self::Endpoint(_) => "endpoint",
            Self::SecurityGroup(..) => "security group",
            Self::CidrGroup(..) => "cidr group",
            Self::LoadBalancer(..) => "load balancer",
        };
        write!(f, "{kind} {}", self.full_name())
    }
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Why an object is refused or degraded. CamelCase in every output; conditions use the same names.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum Reason { $($(#[$doc])* $name,)* }

        impl Reason {
            /// Every reason.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];
            /// The CamelCase constant.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }
        }
    };
}

reasons! {
    /// Nothing is wrong.
    Ok,
    /// The input is no JSON or YAML.
    SyntaxError,
    /// The input is larger, or nested deeper, than a document may be.
    InputTooLarge,
    /// `version` is missing or not 1.
    UnsupportedVersion,
    /// A key or a field that is not part of the model.
    UnknownField,
    /// A kind or field that is specified and comes with later work.
    NotSupportedYet,
    /// A key twice in one mapping.
    DuplicateField,
    /// A required field is missing.
    MissingField,
    /// A value of another type than the field's.
    WrongType,
    /// A field that is there but has no value.
    EmptyValue,
    /// A text that its field's syntax refuses.
    InvalidValue,
    /// A number outside the field's range.
    OutOfRange,
    /// Fields that exclude each other, or one that needs another.
    ConflictingFields,
    /// Two objects of one kind with one name.
    DuplicateName,
    /// An object names one that does not exist.
    DanglingReference,
    /// An object that this one depends on is degraded.
    DependencyDegraded,
    /// More objects than the datapath holds.
    LimitExceeded,
    /// Two VPCs with one VNI.
    DuplicateVni,
    /// An underlay address that two nodes have, or that a subnet of the default VPC covers.
    NodeAddressConflict,
    /// Two subnets of a VPC overlap.
    SubnetOverlap,
    /// A CIDR that cannot be a subnet.
    SubnetUnusable,
    /// A gateway outside its subnet, reserved or excluded.
    InvalidGateway,
    /// A range outside the object it belongs to.
    OutsideRange,
    /// Two nodes could hand out one address.
    CniRangeConflict,
    /// An endpoint's address outside its subnet.
    AddressOutsideSubnet,
    /// An endpoint's address that the subnet excludes or reserves.
    AddressExcluded,
    /// An endpoint's address is the gateway's.
    AddressIsGateway,
    /// Two endpoints of a VPC with one address.
    DuplicateAddress,
    /// Two endpoints of a VPC with one MAC.
    DuplicateMac,
    /// An endpoint with the gateway's MAC.
    MacIsGateway,
    /// Two addresses or CIDRs of one family, or both families where one is meant.
    FamilyMismatch,
    /// Two endpoints wired to one device or interface.
    AttachmentConflict,
    /// A load balancer's address that a subnet covers or a node has.
    InvalidVip,
    /// Two load balancers of a VPC, or two ports of one, with one address, protocol and port.
    DuplicateFrontend,
    /// A rule's field contradicts its protocol, direction or remote.
    InvalidRule,
    /// A named port that no endpoint in question defines.
    UndefinedNamedPort,
    /// An endpoint waits for an address.
    AwaitingAddress,
    /// A VPC waits for its VNI.
    AwaitingVni,
    /// No address is left.
    AddressPoolExhausted,
    /// No VNI is left.
    VniExhausted,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// One thing that is wrong.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Fault {
    /// Where: `security_groups[2].rules[0].priority` while reading a document, `endpoints[red/web-1].ip` across objects. Empty = the input as a whole.
    pub path: String,
    /// Line in the input, when it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u64>,
    /// The value as given, shortened; empty when there is none.
    pub value: String,
    /// What is wrong and, when that is not obvious, what to do.
    pub message: String,
    /// What was probably meant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suggestion: Option<String>,
    /// The kind of fault.
    pub code: Reason,
    /// The object at fault, when its name could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<ObjectRef>,
    /// The other object of a conflict, or the missing one of a dangling reference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other: Option<ObjectRef>,
}

impl Fault {
    /// A fault without line, suggestion and objects.
    pub fn new(
        code: Reason,
        path: impl Into<String>,
        value: impl fmt::Display,
        message: impl Into<String>,
    ) -> Self {
        Self {
            path: path.into(),
            line: None,
            value: shorten(&value.to_string()),
            message: message.into(),
            suggestion: None,
            code,
            object: None,
            other: None,
        }
    }

    /// Names what was probably meant.
    #[must_use]
    pub fn suggest(mut self, suggestion: impl fmt::Display) -> Self {
        self.suggestion = Some(shorten(&suggestion.to_string()));
        self
    }

    /// Names the object at fault.
    #[must_use]
    pub fn on(mut self, object: ObjectRef) -> Self {
        self.object = Some(object);
        self
    }

    /// Names the other object.
    #[must_use]
    pub fn with(mut self, other: ObjectRef) -> Self {
        self.other = Some(other);
        self
    }

    /// Whether the object stays in force in spite of the fault: what is unresolved matches nothing and opens nothing.
    #[must_use]
    pub fn keeps_object(&self) -> bool {
        matches!(self.code, Reason::UndefinedNamedPort | Reason::AwaitingAddress | Reason::AwaitingVni)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() {
            f.write_str("document")?;
        } else {
            f.write_str(&self.path)?;
        }
        if let Some(line) = self.line {
            write!(f, " (line {line})")?;
        }
        if !self.value.is_empty() {
            write!(f, " = {}", self.value)?;
        }
        write!(f, ": {}", self.message)?;
        if let Some(s) = &self.suggestion {
            write!(f, "; did you mean {s}?")?;
        }
        write!(f, " [{}]", self.code)
    }
}

/// Longest value shown in a fault, in characters.
const SHOWN: usize = 120;

pub(crate) fn shorten(text: &str) -> String {
    let printable = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    let mut out: String = text.chars().take(SHOWN).map(printable).collect();
    if text.chars().nth(SHOWN).is_some() {
        out.push('…');
    }
    out
}

/// The nearest of the known names, when it is near enough to be a slip of the fingers.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Longer names are never one of ours, and the table below is quadratic.
    if name.len() > 48 {
        return None;
    }
    let lower = name.to_lowercase().replace('-', "_");
    let allowed = 1 + lower.chars().count() / 4;
    known
        .into_iter()
        .map(|k| (distance(&lower, k), k))
        .filter(|(d, k)| {
            *d <= allowed || (lower.len() >= 3 && (k.starts_with(&lower) || lower.starts_with(k)))
        })
        .min()
        .map(|(_, k)| k)
}

/// Edit distance with transpositions of neighbours as one step.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, &x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, &y) in b.iter().enumerate() {
            let mut cost = (last[j] + usize::from(x != y)).min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && x == b[j - 1] && a[i - 1] == y {
                cost = cost.min(before[j - 1] + 1);
            }
            row.push(cost);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_fingers_finds_its_field() {
        let known = ["priority", "protocol", "ports", "remote_cidr"];
        assert_eq!(nearest("prioirty", known), Some("priority"));
        assert_eq!(nearest("port", known), Some("ports"));
        assert_eq!(nearest("remoteCidr", known), Some("remote_cidr"));
        assert_eq!(nearest("colour", known), None);
        assert_eq!(nearest(&"p".repeat(4000), known), None);
    }

    #[test]
    fn a_reason_reads_the_same_in_json_and_text() {
        for &r in Reason::ALL {
            assert_eq!(serde_json::to_string(&r).unwrap(), format!("\"{r}\""));
        }
    }

    #[test]
    fn a_fault_shows_path_value_message_and_suggestion_and_no_control_characters() {
        let f = Fault::new(Reason::OutOfRange, "a[0].b", "9\u{1b}9", "1..=5").suggest(5);
        assert_eq!(f.to_string(), "a[0].b = 9\u{fffd}9: 1..=5; did you mean 5? [OutOfRange]");
    }
}
