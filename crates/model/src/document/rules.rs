//! Readers of security groups and their rules.

use std::collections::BTreeSet;

use super::objects::vpc_of;
use super::reader::{Fields, Path, Reader};
use super::schema;
use super::tree::{Node as Value, Tree};
use crate::fault::nearest;
use crate::{
    Action, CidrEntry, Direction, Entity, Expression, Operator, Protocol, Reason, Remote, Rule,
    SecurityGroup, Selector,
};

/// Largest priority; 1 is the strongest.
pub(crate) const MAX_PRIORITY: u16 = 16384;

const DIRECTIONS: [(&str, Direction); 2] = [("ingress", Direction::Ingress), ("egress", Direction::Egress)];
const ACTIONS: [(&str, Action); 5] = [
    ("allow", Action::Allow),
    ("drop", Action::Drop),
    ("reject", Action::Reject),
    ("log", Action::Log),
    ("pass", Action::Pass),
];
const PROTOCOLS: [(&str, Protocol); 5] = [
    ("any", Protocol::Any),
    ("tcp", Protocol::Tcp),
    ("udp", Protocol::Udp),
    ("icmp", Protocol::Icmp),
    ("sctp", Protocol::Sctp),
];
const ENTITIES: [(&str, Entity); 9] = [
    ("all", Entity::All),
    ("world", Entity::World),
    ("world-ipv4", Entity::WorldIpv4),
    ("world-ipv6", Entity::WorldIpv6),
    ("cluster", Entity::Cluster),
    ("private", Entity::Private),
    ("host", Entity::Host),
    ("remote-node", Entity::RemoteNode),
    ("none", Entity::None),
];
const OPERATORS: [(&str, Operator); 4] = [
    ("In", Operator::In),
    ("NotIn", Operator::NotIn),
    ("Exists", Operator::Exists),
    ("DoesNotExist", Operator::DoesNotExist),
];

/// The fields that say whom a rule speaks of; the selector's two count as one.
const REMOTES: [&str; 7] = [
    "remote_cidr",
    "remote_cidr_group",
    "remote_group",
    "remote_endpoint_selector",
    "remote_entities",
    "remote_service",
    "remote_fqdns",
];

pub(super) fn security_group(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<SecurityGroup> {
    let f = r.fields(path, tree, &schema::SECURITY_GROUP)?;
    let name = r.at(path, &f, "name", Reader::name);
    let vpc = vpc_of(r, path, &f);
    let tier = r.at(path, &f, "tier", |r, p, t| r.number(p, t, 0..=1u8)).unwrap_or(1);
    let mut switch = |field: &str| f.find_some(field).and_then(|t| r.boolean(&path.field(field), t));
    let (default_deny_ingress, default_deny_egress) =
        (switch("default_deny_ingress"), switch("default_deny_egress"));
    r.at(path, &f, "description", |r, p, t| r.text(p, t).map(|_| ()));
    let mut seen = BTreeSet::new();
    let rules = r.each(&path.field("rules"), f.find_some("rules"), |r, p, t| {
        let rule = rule(r, p, t)?;
        if !seen.insert(rule.id.clone()) {
            r.fault(Reason::DuplicateName, p, t, format!("two rules of the group have the id {}", rule.id));
        }
        Some(rule)
    });
    Some(SecurityGroup { vpc: vpc?, name: name?, tier, default_deny_ingress, default_deny_egress, rules })
}

fn rule(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<Rule> {
    let f = r.fields(path, tree, &schema::RULE)?;
    let id = r.at(path, &f, "id", Reader::name);
    let priority = r.at(path, &f, "priority", |r, p, t| r.number(p, t, 1..=MAX_PRIORITY));
    let direction = r.at(path, &f, "direction", |r, p, t| r.choice(p, t, &DIRECTIONS));
    let action = r.at(path, &f, "action", |r, p, t| r.choice(p, t, &ACTIONS));
    let protocol = match f.find("protocol") {
        Some(t) => r.choice(&path.field("protocol"), t, &PROTOCOLS),
        None => Some(Protocol::Any),
    };
    let remote = remote(r, path, &f);
    let ports = r.at(path, &f, "ports", |r, p, t| Some(r.each(p, Some(t), port_range))).unwrap_or_default();
    let named_ports = r
        .at(path, &f, "named_ports", |r, p, t| Some(r.distinct(p, t, Reader::name).into_iter().collect()))
        .unwrap_or_default();
    let icmp = icmp(r, path, &f);
    let stateful = r.at(path, &f, "stateful", Reader::boolean).unwrap_or(true);
    let log = r.at(path, &f, "log", Reader::boolean).unwrap_or(false);
    r.at(path, &f, "description", |r, p, t| r.text(p, t).map(|_| ()));
    Some(Rule {
        id: id?,
        priority: priority?,
        direction: direction?,
        protocol: protocol?,
        remote: remote?,
        ports,
        named_ports,
        icmp,
        action: action?,
        stateful,
        log,
    })
}

fn port_range(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<(u16, u16)> {
    if let Value::Int(n) = tree.node {
        let f = r.fault(Reason::WrongType, path, tree, "must be a range {from, to}");
        f.suggestion = Some(format!("{{from: {n}, to: {n}}}"));
        return None;
    }
    let f = r.fields(path, tree, &schema::PORT_RANGE)?;
    let from = r.at(path, &f, "from", |r, p, t| r.number(p, t, 1..=u16::MAX));
    let to = r.at(path, &f, "to", |r, p, t| r.number(p, t, 1..=u16::MAX));
    Some((from?, to?))
}

fn icmp(r: &mut Reader, path: &Path<'_>, f: &Fields<'_>) -> Option<(u8, Option<u8>)> {
    let mut read =
        |field: &str| f.find_some(field).and_then(|t| r.number(&path.field(field), t, 0..=u8::MAX));
    let (kind, code) = (read("icmp_type"), read("icmp_code"));
    if let (None, Some(t)) = (f.find_some("icmp_type"), f.find_some("icmp_code")) {
        r.fault(
            Reason::ConflictingFields,
            &path.field("icmp_code"),
            t,
            "icmp_code needs icmp_type: a code means nothing alone",
        );
    }
    kind.map(|k| (k, code))
}

fn remote(r: &mut Reader, path: &Path<'_>, f: &Fields<'_>) -> Option<Remote> {
    let selects = f.has("remote_endpoint_selector") || f.has("remote_endpoint_expressions");
    let given: Vec<&str> = REMOTES
        .into_iter()
        .filter(|n| if *n == "remote_endpoint_selector" { selects } else { f.has(n) })
        .collect();
    if let ([first, second, ..], Some(t)) = (given.as_slice(), given.get(1).and_then(|n| f.find(n))) {
        let message = format!("{first} and {second} exclude each other: a rule speaks of one remote");
        r.fault(Reason::ConflictingFields, &path.field(second), t, message);
    }
    if let (Some(t), false) = (f.find("except_cidrs"), f.has("remote_cidr")) {
        r.fault(Reason::ConflictingFields, &path.field("except_cidrs"), t, "except_cidrs needs remote_cidr");
    }
    // Every given remote is read, so that each one's faults show.
    let cidr = r.at(path, f, "remote_cidr", Reader::cidr);
    let except =
        r.at(path, f, "except_cidrs", |r, p, t| Some(r.each(p, Some(t), Reader::cidr))).unwrap_or_default();
    let cidr_group = r.at(path, f, "remote_cidr_group", Reader::name);
    let group = r.at(path, f, "remote_group", Reader::name);
    let entities = r.at(path, f, "remote_entities", entities);
    let labels = r.at(path, f, "remote_endpoint_selector", Reader::labels);
    let expressions =
        r.at(path, f, "remote_endpoint_expressions", |r, p, t| Some(r.each(p, Some(t), expression)));
    match given.first() {
        None => Some(Remote::Any),
        Some(_) if selects => Some(Remote::Selector(Selector {
            labels: labels.unwrap_or_default(),
            expressions: expressions.unwrap_or_default(),
        })),
        Some(_) => cidr
            .map(|cidr| Remote::Cidr(CidrEntry { cidr, except }))
            .or(cidr_group.map(Remote::CidrGroup))
            .or(group.map(Remote::Group))
            .or(entities.map(Remote::Entities)),
    }
}

fn entities(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<BTreeSet<Entity>> {
    let set = r.distinct(path, tree, |r, p, t| r.choice(p, t, &ENTITIES));
    if matches!(&tree.node, Value::List(v) if v.is_empty()) {
        // Read as "no remote" it would open the rule to anyone.
        r.fault(
            Reason::EmptyValue,
            path,
            tree,
            "names no entity: leave the field out for anyone, or write none for nobody",
        );
    }
    Some(set)
}

fn expression(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<Expression> {
    let f = r.fields(path, tree, &schema::EXPRESSION)?;
    let key = r.at(path, &f, "key", |r, p, t| r.short_text(p, t, 317).map(str::to_owned));
    let operator = r.at(path, &f, "operator", operator);
    let values = r
        .at(path, &f, "values", |r, p, t| {
            Some(r.distinct(p, t, |r, p, t| r.label_value(p, t).map(str::to_owned)))
        })
        .unwrap_or_default();
    Some(Expression { key: key?, operator: operator?, values })
}

/// Case, `-` and `_` do not matter: `not_in` is `NotIn`.
fn operator(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<Operator> {
    let fold = |s: &str| s.to_lowercase().replace(['-', '_'], "");
    let text = r.text(path, tree)?;
    if let Some((_, op)) = OPERATORS.iter().find(|(w, _)| fold(w) == fold(text)) {
        return Some(*op);
    }
    let near = nearest(&fold(text), ["in", "notin", "exists", "doesnotexist"]);
    let near = near.and_then(|n| OPERATORS.iter().find(|(w, _)| fold(w) == n)).map(|(w, _)| (*w).to_owned());
    r.fault(Reason::InvalidValue, path, tree, "must be one of In, NotIn, Exists, DoesNotExist").suggestion =
        near;
    None
}
