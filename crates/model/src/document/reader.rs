//! Reads values out of a [`Tree`] and collects what is wrong with them, instead of stopping at the first fault.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;
use std::str::FromStr;

use ipnet::IpNet;

use super::schema::{Shape, Support};
use super::tree::{Node, Tree};
use crate::fault::nearest;
use crate::{Endpoint, Fault, NameError, NodeName, ObjectRef, Reason, SubnetName, VpcName};

/// Where a value is; built on the stack, turned into text only for a fault.
#[derive(Clone, Copy)]
pub(crate) enum Path<'a> {
    Root,
    Field(&'a Path<'a>, &'a str),
    Index(&'a Path<'a>, usize),
}

impl Path<'_> {
    pub(crate) fn field<'a>(&'a self, name: &'a str) -> Path<'a> {
        Path::Field(self, name)
    }
    pub(crate) fn index(&self, i: usize) -> Path<'_> {
        Path::Index(self, i)
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => Ok(()),
            Self::Field(Path::Root, name) => f.write_str(&crate::fault::shorten(name)),
            Self::Field(parent, name) => write!(f, "{parent}.{}", crate::fault::shorten(name)),
            Self::Index(parent, i) => write!(f, "{parent}[{i}]"),
        }
    }
}

/// The fields of one mapping, checked against its shape.
pub(crate) struct Fields<'t> {
    map: &'t [(String, Tree)],
    line: Option<u64>,
}

impl<'t> Fields<'t> {
    /// The field's value, null included.
    pub(crate) fn find(&self, name: &str) -> Option<&'t Tree> {
        self.map.iter().find(|(k, _)| k == name).map(|(_, v)| v)
    }
    pub(crate) fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }
    /// The field's value; null counts as absent. For fields whose absence opens nothing.
    pub(crate) fn find_some(&self, name: &str) -> Option<&'t Tree> {
        self.find(name).filter(|t| t.node != Node::Null)
    }
    pub(crate) fn line(&self) -> Option<u64> {
        self.line
    }
}

/// The faults found so far.
#[derive(Default)]
pub(crate) struct Reader {
    pub(crate) faults: Vec<Fault>,
    vpcs: BTreeSet<VpcName>,
    subnets: BTreeSet<SubnetName>,
    nodes: BTreeSet<NodeName>,
}

/// The name that was read before, so that thousands of objects share its text.
fn shared<N: Ord + Clone>(known: &mut BTreeSet<N>, name: N) -> N {
    if let Some(name) = known.get(&name) {
        return name.clone();
    }
    known.insert(name.clone());
    name
}

impl Reader {
    /// An endpoint whose references share their text with those of others.
    pub(crate) fn sharing(&mut self, endpoint: Endpoint) -> Endpoint {
        Endpoint {
            vpc: shared(&mut self.vpcs, endpoint.vpc),
            subnet: shared(&mut self.subnets, endpoint.subnet),
            node: shared(&mut self.nodes, endpoint.node),
            ..endpoint
        }
    }

    pub(crate) fn fault(
        &mut self,
        code: Reason,
        path: &Path<'_>,
        tree: &Tree,
        message: impl Into<String>,
    ) -> &mut Fault {
        let mut f = Fault::new(code, path.to_string(), &tree.node, message);
        f.line = tree.line;
        self.push(f)
    }

    pub(crate) fn push(&mut self, f: Fault) -> &mut Fault {
        let at = self.faults.len();
        self.faults.push(f);
        &mut self.faults[at]
    }

    fn wrong_type(&mut self, path: &Path<'_>, tree: &Tree, wanted: &str) -> &mut Fault {
        if tree.node == Node::Null {
            return self.fault(
                Reason::EmptyValue,
                path,
                tree,
                format!("has no value: give {wanted} or leave the field out"),
            );
        }
        self.fault(Reason::WrongType, path, tree, format!("must be {wanted}, not {}", tree.node.type_name()))
    }

    /// A mapping of the given shape: unknown, repeated, missing and not yet supported fields become faults.
    pub(crate) fn fields<'t>(
        &mut self,
        path: &Path<'_>,
        tree: &'t Tree,
        shape: &Shape,
    ) -> Option<Fields<'t>> {
        let Node::Map(map) = &tree.node else {
            self.wrong_type(path, tree, "a mapping");
            return None;
        };
        self.unique_keys(path, map);
        let mut unknown = BTreeSet::new();
        for (key, value) in map {
            match shape.fields.iter().find(|f| f.name == key.as_str()) {
                Some(f) if f.support == Support::Later && !is_empty(&value.node) => {
                    let message = format!("{key} is not supported yet; this version would not act on it");
                    self.fault(Reason::NotSupportedYet, &path.field(key), value, message);
                }
                Some(_) => {}
                None if unknown.insert(key.as_str()) => {
                    let near = nearest(
                        key,
                        shape.fields.iter().filter(|f| f.support != Support::Later).map(|f| f.name),
                    );
                    let f = self.fault(
                        Reason::UnknownField,
                        &path.field(key),
                        value,
                        format!("{} has no such field", shape.at),
                    );
                    f.suggestion = near.map(str::to_owned);
                }
                None => {}
            }
        }
        let fields = Fields { map, line: tree.line };
        for f in shape.fields.iter().filter(|f| f.support == Support::Required) {
            if !fields.has(f.name) {
                self.missing(path, &fields, f.name);
            }
        }
        Some(fields)
    }

    pub(crate) fn missing(&mut self, path: &Path<'_>, fields: &Fields<'_>, name: &str) -> &mut Fault {
        let mut f =
            Fault::new(Reason::MissingField, path.field(name).to_string(), "", format!("{name} is required"));
        f.line = fields.line();
        self.push(f)
    }

    fn unique_keys(&mut self, path: &Path<'_>, map: &[(String, Tree)]) {
        let mut seen = BTreeSet::new();
        for (key, value) in map {
            if !seen.insert(key.as_str()) {
                self.fault(Reason::DuplicateField, &path.field(key), value, "is here twice; keep one");
            }
        }
    }

    /// The items of a list.
    pub(crate) fn list<'t>(&mut self, path: &Path<'_>, tree: &'t Tree) -> &'t [Tree] {
        match &tree.node {
            Node::List(items) => items,
            _ => {
                self.wrong_type(path, tree, "a list");
                &[]
            }
        }
    }

    /// Reads each item of an optional list field.
    pub(crate) fn each<T>(
        &mut self,
        path: &Path<'_>,
        tree: Option<&Tree>,
        mut read: impl FnMut(&mut Self, &Path<'_>, &Tree) -> Option<T>,
    ) -> Vec<T> {
        let Some(tree) = tree else { return Vec::new() };
        let items = self.list(path, tree);
        items.iter().enumerate().filter_map(|(i, t)| read(self, &path.index(i), t)).collect()
    }

    /// A string. A bare number or boolean is not one: YAML needs quotes there.
    pub(crate) fn text<'t>(&mut self, path: &Path<'_>, tree: &'t Tree) -> Option<&'t str> {
        match &tree.node {
            Node::Text(s) => Some(s),
            Node::Bool(_) | Node::Int(_) => {
                let quoted = format!("\"{}\"", tree.node);
                self.wrong_type(path, tree, "a string").suggestion = Some(quoted);
                None
            }
            _ => {
                self.wrong_type(path, tree, "a string");
                None
            }
        }
    }

    /// A string of bounded length without control characters.
    pub(crate) fn short_text<'t>(
        &mut self,
        path: &Path<'_>,
        tree: &'t Tree,
        longest: usize,
    ) -> Option<&'t str> {
        let s = self.text(path, tree)?;
        if s.is_empty() || s.len() > longest || s.chars().any(char::is_control) {
            let message = format!("must be 1..={longest} bytes without control characters");
            self.fault(Reason::InvalidValue, path, tree, message);
            return None;
        }
        Some(s)
    }

    /// A name or a reference by name.
    pub(crate) fn name<N: FromStr<Err = NameError>>(&mut self, path: &Path<'_>, tree: &Tree) -> Option<N> {
        let s = self.text(path, tree)?;
        match s.parse::<N>() {
            Ok(n) => Some(n),
            Err(_) => {
                let message =
                    "is not a name: 1..63 characters of a-z, 0-9, '-' and '.', first and last alphanumeric";
                let near = near_name(s).filter(|n| n.parse::<N>().is_ok());
                self.fault(Reason::InvalidValue, path, tree, message).suggestion = near;
                None
            }
        }
    }

    pub(crate) fn boolean(&mut self, path: &Path<'_>, tree: &Tree) -> Option<bool> {
        match &tree.node {
            Node::Bool(b) => Some(*b),
            other => {
                let meant = match other {
                    Node::Text(s) if ["yes", "on", "true", "y"].contains(&s.to_lowercase().as_str()) => {
                        Some("true")
                    }
                    Node::Text(s) if ["no", "off", "false", "n"].contains(&s.to_lowercase().as_str()) => {
                        Some("false")
                    }
                    _ => None,
                };
                self.wrong_type(path, tree, "true or false").suggestion = meant.map(str::to_owned);
                None
            }
        }
    }

    /// A whole number in a range.
    pub(crate) fn number<T>(&mut self, path: &Path<'_>, tree: &Tree, range: RangeInclusive<T>) -> Option<T>
    where
        T: TryFrom<i128> + Into<i128> + Copy + fmt::Display,
    {
        let (lo, hi) = (*range.start(), *range.end());
        let Node::Int(n) = tree.node else {
            let unquoted = match &tree.node {
                Node::Text(s) => s.parse::<i128>().ok().map(|n| n.to_string()),
                _ => None,
            };
            self.wrong_type(path, tree, &format!("a number {lo}..={hi}")).suggestion = unquoted;
            return None;
        };
        if (lo.into()..=hi.into()).contains(&n) {
            return T::try_from(n).ok();
        }
        self.fault(Reason::OutOfRange, path, tree, format!("must be {lo}..={hi}"));
        None
    }

    /// One of a few words.
    pub(crate) fn choice<T: Copy>(&mut self, path: &Path<'_>, tree: &Tree, words: &[(&str, T)]) -> Option<T> {
        let s = self.text(path, tree)?;
        if let Some((_, v)) = words.iter().find(|(w, _)| *w == s) {
            return Some(*v);
        }
        let all: Vec<&str> = words.iter().map(|(w, _)| *w).collect();
        let near = nearest(s, all.iter().copied()).map(str::to_owned);
        self.fault(Reason::InvalidValue, path, tree, format!("must be one of {}", all.join(", ")))
            .suggestion = near;
        None
    }

    /// An address, compared as an address from here on.
    pub(crate) fn ip(&mut self, path: &Path<'_>, tree: &Tree) -> Option<IpAddr> {
        let s = self.text(path, tree)?;
        match parse_ip(s) {
            Ok(ip) => Some(ip),
            Err(e) => {
                self.fault(Reason::InvalidValue, path, tree, e.message).suggestion = e.suggestion;
                None
            }
        }
    }

    /// A masked CIDR.
    pub(crate) fn cidr(&mut self, path: &Path<'_>, tree: &Tree) -> Option<IpNet> {
        let s = self.text(path, tree)?;
        match parse_cidr(s) {
            Ok(net) => Some(net),
            Err(e) => {
                self.fault(Reason::InvalidValue, path, tree, e.message).suggestion = e.suggestion;
                None
            }
        }
    }

    /// A CIDR, a single address or `first..last`: an inclusive range.
    pub(crate) fn range(&mut self, path: &Path<'_>, tree: &Tree) -> Option<(IpAddr, IpAddr)> {
        let s = self.text(path, tree)?;
        match parse_range(s) {
            Ok(r) => Some(r),
            Err(e) => {
                self.fault(Reason::InvalidValue, path, tree, e.message).suggestion = e.suggestion;
                None
            }
        }
    }

    /// Reads `one` or `many`, not both: `ip`/`ips`, `cidr`/`cidrs`.
    pub(crate) fn one_or_many<T>(
        &mut self,
        path: &Path<'_>,
        fields: &Fields<'_>,
        [one, many]: [&str; 2],
        mut read: impl FnMut(&mut Self, &Path<'_>, &Tree) -> Option<T>,
    ) -> Vec<T> {
        match (fields.find(one), fields.find(many)) {
            (Some(t), Some(_)) => {
                self.fault(
                    Reason::ConflictingFields,
                    &path.field(one),
                    t,
                    format!("{one} and {many} exclude each other"),
                );
                Vec::new()
            }
            (Some(t), None) => read(self, &path.field(one), t).into_iter().collect(),
            (None, many_tree) => self.each(&path.field(many), many_tree, read),
        }
    }

    /// Marks the faults found since `from` with the object they belong to.
    pub(crate) fn blame(&mut self, from: usize, object: &ObjectRef) {
        for f in self.faults.iter_mut().skip(from) {
            f.object.get_or_insert_with(|| object.clone());
        }
    }
}

/// A kind that is refused may still be written down empty.
fn is_empty(node: &Node) -> bool {
    match node {
        Node::Null => true,
        Node::List(v) => v.is_empty(),
        Node::Map(v) => v.is_empty(),
        _ => false,
    }
}

fn near_name(s: &str) -> Option<String> {
    let near: String = s
        .chars()
        .take(63)
        .map(|c| match c.to_ascii_lowercase() {
            c if c.is_ascii_lowercase() || c.is_ascii_digit() || c == '.' => c,
            _ => '-',
        })
        .collect();
    let near = near.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    (!near.is_empty()).then(|| near.to_owned())
}

/// Why a text is no address, CIDR or range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AddressError {
    pub(crate) message: String,
    pub(crate) suggestion: Option<String>,
}

fn refuse<T>(message: &str, suggestion: Option<String>) -> Result<T, AddressError> {
    Err(AddressError { message: message.to_owned(), suggestion })
}

pub(crate) fn parse_ip(s: &str) -> Result<IpAddr, AddressError> {
    match s.parse::<IpAddr>() {
        Ok(IpAddr::V6(a)) => match a.to_ipv4_mapped() {
            Some(v4) => refuse("is an IPv4 address in IPv6 form; write it as IPv4", Some(v4.to_string())),
            None => Ok(IpAddr::V6(a)),
        },
        Ok(v4) => Ok(v4),
        Err(_) => match s.split_once('/') {
            Some((a, _)) if a.parse::<IpAddr>().is_ok() => {
                refuse("must be an address without prefix length", Some(a.to_owned()))
            }
            _ => refuse("is not an IP address", without_leading_zeros(s).map(|a| a.to_string())),
        },
    }
}

pub(crate) fn parse_cidr(s: &str) -> Result<IpNet, AddressError> {
    let Some((address, prefix)) = s.split_once('/') else {
        let whole = parse_ip(s).ok().map(|a| IpNet::from(a).to_string());
        return refuse("is not a CIDR: address/prefix", whole);
    };
    let ip = match parse_ip(address) {
        Ok(ip) => ip,
        Err(e) => {
            return refuse(
                &format!("its address {}", e.message),
                e.suggestion.map(|a| format!("{a}/{prefix}")),
            );
        }
    };
    let widest = if ip.is_ipv4() { 32 } else { 128 };
    let digits = !prefix.is_empty()
        && prefix.bytes().all(|b| b.is_ascii_digit())
        && (prefix == "0" || !prefix.starts_with('0'));
    let net = prefix.parse::<u8>().ok().filter(|_| digits).and_then(|p| IpNet::new(ip, p).ok());
    match net {
        None => refuse(&format!("its prefix length must be 0..={widest}"), None),
        Some(n) if n.trunc() != n => refuse("has bits set behind its prefix", Some(n.trunc().to_string())),
        Some(n) => Ok(n),
    }
}

pub(crate) fn parse_range(s: &str) -> Result<(IpAddr, IpAddr), AddressError> {
    if let Some((a, b)) = s.split_once("..") {
        let (a, b) = (parse_ip(a.trim())?, parse_ip(b.trim())?);
        return match (a.is_ipv4() == b.is_ipv4(), a <= b) {
            (false, _) => refuse("its ends are of different families", None),
            (_, false) => refuse("its ends are reversed", Some(format!("{b}..{a}"))),
            _ => Ok((a, b)),
        };
    }
    if s.contains('/') {
        return parse_cidr(s).map(|n| (n.network(), n.broadcast()));
    }
    parse_ip(s)
        .map(|a| (a, a))
        .map_err(|e| AddressError { message: format!("{}, CIDR or first..last", e.message), ..e })
}

/// `010.0.0.1`: octal to some, decimal to others.
fn without_leading_zeros(s: &str) -> Option<Ipv4Addr> {
    let parts: Option<Vec<u8>> = s.split('.').map(|p| p.parse::<u8>().ok()).collect();
    let octets: [u8; 4] = parts?.try_into().ok()?;
    Some(octets.into())
}
