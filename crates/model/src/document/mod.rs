//! The desired-state document, version 1: JSON or YAML to [`World`], strict, every fault at once.
//!
//! Reading goes in two steps: an untyped tree (`tree`), then typed readers (`objects`, `rules`) that collect faults with path, line, value and suggestion.
//! `schema` is the one table of fields. An object with a fault is left out of the world, so that what remains is right by itself.

mod edit;
mod objects;
mod reader;
mod rules;
mod schema;
mod services;
mod tree;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::value::RawValue;

pub use self::edit::{Basis, Edited};
use self::reader::{Fields, Path, Reader};
pub(crate) use self::rules::MAX_PRIORITY;
pub use self::schema::{Field, SHAPES, Shape, Support};
pub(crate) use self::tree::yaml_options;
pub use self::tree::{MAX_BYTES, MAX_DEPTH};
use self::tree::{Node as Value, Tree};
use crate::{DefaultPolicy, Fault, ObjectRef, Reason, Vpc, VpcName, World};

/// Text format of a document.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// RFC 8259.
    Json,
    /// YAML 1.2; `yes` and `no` are strings.
    Yaml,
}

impl Format {
    /// From a file's name: `.json` is JSON, everything else YAML.
    #[must_use]
    pub fn of_path(path: &std::path::Path) -> Self {
        if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) { Self::Json } else { Self::Yaml }
    }
}

/// A document that has been read without a fault.
#[derive(Clone, Debug, Default)]
pub struct Parsed {
    /// What it says. The default VPC is always there.
    pub world: World,
    places: BTreeMap<ObjectRef, Place>,
}

/// Where an object stands in the input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// `endpoints[3]`.
    pub path: String,
    /// Its first line, when the format tells.
    pub line: Option<u64>,
}

impl Parsed {
    /// Where an object stands in the input.
    #[must_use]
    pub fn place(&self, object: &ObjectRef) -> Option<&Place> {
        self.places.get(object)
    }

    /// Adds lines to faults that [`crate::validate`] found.
    pub fn locate(&self, faults: &mut [Fault]) {
        locate(&self.places, faults);
    }
}

fn locate(places: &BTreeMap<ObjectRef, Place>, faults: &mut [Fault]) {
    for f in faults.iter_mut().filter(|f| f.line.is_none()) {
        f.line = f.object.as_ref().and_then(|o| places.get(o)).and_then(|p| p.line);
    }
}

/// Reads a document.
///
/// # Errors
/// Every fault of the input at once: what cannot be read, and what [`crate::validate`] finds between the objects that could be.
pub fn parse(bytes: &[u8], format: Format) -> Result<Parsed, Vec<Fault>> {
    let draft = read(bytes, format).map_err(|f| vec![f])?;
    if draft.faults.is_empty() {
        return Ok(Parsed { world: draft.world, places: draft.places });
    }
    // What could be read of the bad objects takes part, so that their dangling references show as well.
    let mut all = draft.world;
    all.nodes.extend(draft.partial.nodes);
    all.vpcs.extend(draft.partial.vpcs);
    all.subnets.extend(draft.partial.subnets);
    all.endpoints.extend(draft.partial.endpoints);
    all.security_groups.extend(draft.partial.security_groups);
    all.cidr_groups.extend(draft.partial.cidr_groups);
    all.services.extend(draft.partial.services);
    let mut across = crate::validate(&all);
    // But what follows from a fault that is listed already is no second fault.
    let bad = |o: &Option<ObjectRef>| o.as_ref().is_some_and(|o| draft.bad.contains(o));
    across.retain(|f| match f.code {
        Reason::DanglingReference => !bad(&f.other),
        Reason::UndefinedNamedPort => false,
        _ => !bad(&f.object) && !bad(&f.other),
    });
    locate(&draft.places, &mut across);
    let mut faults = draft.faults;
    faults.extend(across);
    Err(faults)
}

/// What could be read of a document.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    /// The objects without fault.
    pub(crate) world: World,
    /// What could be read of objects with a fault; to find more faults, never to act on.
    partial: World,
    /// Every fault of reading.
    pub(crate) faults: Vec<Fault>,
    /// Named objects that were left out.
    pub(crate) bad: BTreeSet<ObjectRef>,
    pub(crate) places: BTreeMap<ObjectRef, Place>,
}

impl Draft {
    /// Whether a fault concerns no object by name: then nobody can tell which objects the document means to keep.
    pub(crate) fn unusable(&self) -> bool {
        self.faults.iter().any(|f| f.object.is_none() && f.code != Reason::NotSupportedYet)
    }
}

/// Lists of objects.
const KINDS: [&str; 7] =
    ["nodes", "vpcs", "subnets", "endpoints", "security_groups", "cidr_groups", "load_balancers"];

/// Reads what can be read.
pub(crate) fn read(bytes: &[u8], format: Format) -> Result<Draft, Fault> {
    if format == Format::Json
        && let Some(split) = tree::split(bytes, &KINDS)
        && let Some(draft) = draft(&split.tree, &split.lists)
    {
        return Ok(draft);
    }
    let tree = tree::read(bytes, format)?;
    if tree.node == Value::Null {
        let message = "the document is empty: it needs at least version: 1";
        return Err(Fault::new(Reason::MissingField, "version", "", message));
    }
    Ok(draft(&tree, &BTreeMap::new()).unwrap_or_default())
}

/// Reads the objects. `None` when one of `lists`, which are items that are not read yet, is no JSON: never without them.
fn draft(tree: &Tree, lists: &BTreeMap<String, Vec<&RawValue>>) -> Option<Draft> {
    let mut r = Reader::default();
    let mut draft = Draft::default();
    if let Some(fields) = r.fields(&Path::Root, tree, &schema::DOCUMENT) {
        let fields = Objects { fields, lists };
        version(&mut r, &fields.fields);
        let d = &mut draft;
        kind(
            &mut r,
            d,
            &fields,
            "nodes",
            objects::node,
            |v| ObjectRef::Node(v.name.clone()),
            |w, v| {
                w.nodes.insert(v.name.clone(), v);
            },
        )?;
        kind(
            &mut r,
            d,
            &fields,
            "vpcs",
            objects::vpc,
            |v| ObjectRef::Vpc(v.name.clone()),
            |w, v| {
                w.vpcs.insert(v.name.clone(), v);
            },
        )?;
        let id = |v: &crate::Subnet| ObjectRef::Subnet(v.vpc.clone(), v.name.clone());
        kind(&mut r, d, &fields, "subnets", objects::subnet, id, |w, v| {
            w.subnets.insert((v.vpc.clone(), v.name.clone()), v);
        })?;
        kind(
            &mut r,
            d,
            &fields,
            "endpoints",
            objects::endpoint,
            |v| ObjectRef::Endpoint(v.key()),
            |w, v| {
                w.endpoints.insert(v.key(), v.into());
            },
        )?;
        let id = |v: &crate::SecurityGroup| ObjectRef::SecurityGroup(v.vpc.clone(), v.name.clone());
        kind(&mut r, d, &fields, "security_groups", rules::security_group, id, |w, v| {
            w.security_groups.insert((v.vpc.clone(), v.name.clone()), v);
        })?;
        let id = |v: &crate::CidrGroup| ObjectRef::CidrGroup(v.vpc.clone(), v.name.clone());
        kind(&mut r, d, &fields, "cidr_groups", objects::cidr_group, id, |w, v| {
            w.cidr_groups.insert((v.vpc.clone(), v.name.clone()), v);
        })?;
        let id = |v: &crate::Service| ObjectRef::LoadBalancer(v.vpc.clone(), v.name.clone());
        kind(&mut r, d, &fields, "load_balancers", services::load_balancer, id, |w, v| {
            w.services.insert((v.vpc.clone(), v.name.clone()), v.into());
        })?;
    }
    draft.world.add_default_vpc(&draft.bad);
    draft.faults = r.faults;
    Some(draft)
}

fn version(r: &mut Reader, fields: &Fields<'_>) {
    let Some(tree) = fields.find("version") else {
        if let Some(f) = r.faults.iter_mut().find(|f| f.code == Reason::MissingField && f.path == "version") {
            f.message = "the document does not say its version".into();
            f.suggestion = Some("version: 1".into());
        }
        return;
    };
    if tree.node != Value::Int(1) {
        let message = "this program reads version 1 of the document";
        r.fault(Reason::UnsupportedVersion, &Path::Root.field("version"), tree, message).suggestion =
            Some("1".into());
    }
}

/// Reads the objects of one kind; those with a fault stay out of the world.
fn kind<T>(
    r: &mut Reader,
    draft: &mut Draft,
    document: &Objects<'_>,
    name: &str,
    read: impl Fn(&mut Reader, &Path<'_>, &Tree) -> Option<T>,
    id: impl Fn(&T) -> ObjectRef,
    insert: impl Fn(&mut World, T),
) -> Option<()> {
    let path = Path::Root.field(name);
    let mut good: BTreeMap<ObjectRef, T> = BTreeMap::new();
    let Some(tree) = document.fields.find_some(name) else { return Some(()) };
    let whole = r.list(&path, tree);
    let unread = document.lists.get(name).map_or(&[][..], Vec::as_slice);
    for i in 0..whole.len() + unread.len() {
        let item = match (whole.get(i), unread.get(i)) {
            (Some(tree), _) => Cow::Borrowed(tree),
            (None, raw) => Cow::Owned(tree::read_json(raw?.get()).ok()?),
        };
        let item = item.as_ref();
        let at = path.index(i);
        let before = r.faults.len();
        let object = read(r, &at, item);
        let Some(reference) = object.as_ref().map(&id).or_else(|| named(name, item)) else { continue };
        r.blame(before, &reference);
        if let Some(place) = draft.places.get(&reference) {
            let message = format!("{reference} is defined twice, here and at {}", place.path);
            let mut f = Fault::new(Reason::DuplicateName, at.to_string(), reference.full_name(), message)
                .on(reference.clone());
            f.line = item.line;
            r.push(f);
            // Which of the two is meant nobody knows: neither takes effect.
            draft.bad.insert(reference);
            continue;
        }
        draft.places.insert(reference.clone(), Place { path: at.to_string(), line: item.line });
        match object {
            Some(v) if r.faults.len() == before => {
                good.insert(reference, v);
            }
            faulty => {
                draft.bad.insert(reference);
                if let Some(v) = faulty {
                    insert(&mut draft.partial, v);
                }
            }
        }
    }
    for (reference, v) in good {
        if !draft.bad.contains(&reference) {
            insert(&mut draft.world, v);
        }
    }
    Some(())
}

/// The top of a document.
struct Objects<'t> {
    fields: Fields<'t>,
    /// Items that are not read yet.
    lists: &'t BTreeMap<String, Vec<&'t RawValue>>,
}

/// The full name of an object that could not be read otherwise.
fn named(kind: &str, tree: &Tree) -> Option<ObjectRef> {
    let Value::Map(map) = &tree.node else { return None };
    let text = |key: &str| {
        map.iter().find(|(k, _)| k == key).and_then(|(_, v)| match &v.node {
            Value::Text(s) => Some(s.as_str()),
            _ => None,
        })
    };
    let vpc = || text("vpc")?.parse::<VpcName>().ok();
    Some(match kind {
        "nodes" => ObjectRef::Node(text("name")?.parse().ok()?),
        "vpcs" => ObjectRef::Vpc(text("name")?.parse().ok()?),
        "subnets" => ObjectRef::Subnet(vpc()?, text("name")?.parse().ok()?),
        "endpoints" => ObjectRef::Endpoint(crate::EndpointKey {
            vpc: vpc()?,
            name: text("name").or(text("id"))?.parse().ok()?,
        }),
        "security_groups" => ObjectRef::SecurityGroup(vpc()?, text("name")?.parse().ok()?),
        "cidr_groups" => ObjectRef::CidrGroup(vpc()?, text("name")?.parse().ok()?),
        "load_balancers" => ObjectRef::LoadBalancer(vpc()?, text("name")?.parse().ok()?),
        _ => return None,
    })
}

impl World {
    /// The default VPC exists even when no source names it, and always has a number: one that every node knows without asking.
    fn add_default_vpc(&mut self, bad: &BTreeSet<ObjectRef>) {
        let Ok(name) = VpcName::new(crate::DEFAULT_VPC) else { return };
        if bad.contains(&ObjectRef::Vpc(name.clone())) {
            return;
        }
        let unnamed = || Vpc { name: name.clone(), vni: None, default_policy: DefaultPolicy::default() };
        self.vpcs.or_insert_with(name.clone(), unnamed);
        if let Some(vpc) = self.vpcs.get_mut(&name) {
            vpc.vni.get_or_insert(crate::DEFAULT_VNI);
        }
    }
}

#[cfg(test)]
mod tests;
