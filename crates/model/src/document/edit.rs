//! A document read again after a small edit: only objects whose text changed are read and checked.
//!
//! What makes it right: where whole items of one list of a right JSON text are replaced by other right items, the new text is right JSON in which
//! just these items differ. What changed objects say about others is checked by the same code as in [`crate::validate`]. Everything else (YAML, an edit
//! elsewhere, another lock, named ports, any fault) is left to [`crate::load`], which stays the only judge of what is wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::reader::{Path, Reader};
use super::tree::{self, Tree};
use super::{objects, rules};
use crate::validate::{cidr_groups_fit, endpoints_fit, groups_fit};
use crate::{CidrGroup, Endpoint, EndpointKey, MAX_BYTES, SecurityGroup, SharedMap, World};

/// More changed endpoints than this are no small edit.
const MOST: usize = 256;

/// A JSON document in force: its text, and where the objects stand in it.
#[derive(Clone, Debug)]
pub struct Basis {
    text: Vec<u8>,
    /// In the order of the text.
    items: Vec<Item>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Item {
    list: List,
    start: usize,
    end: usize,
}

/// Lists whose objects can change alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum List {
    Endpoints,
    SecurityGroups,
    CidrGroups,
}

impl List {
    const ALL: [(&'static str, Self); 3] = [
        ("endpoints", Self::Endpoints),
        ("security_groups", Self::SecurityGroups),
        ("cidr_groups", Self::CidrGroups),
    ];
}

/// What an edit changed in the world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edited {
    /// Endpoints that came, went or are different.
    pub endpoints: BTreeSet<EndpointKey>,
    /// Some security group or CIDR group is different.
    pub rules: bool,
}

/// What a world had before an edit.
type Before<T> = Vec<(<T as Held>::Key, Option<<T as Held>::Kept>)>;

/// A kind of object that can change alone.
trait Held: Sized + PartialEq {
    type Key: Ord + Clone;
    type Kept: Clone;
    fn read(r: &mut Reader, tree: &Tree) -> Option<Self>;
    fn key(&self) -> Self::Key;
    fn map(world: &mut World) -> &mut SharedMap<Self::Key, Self::Kept>;
}

impl Held for Endpoint {
    type Key = EndpointKey;
    type Kept = Arc<Self>;
    fn read(r: &mut Reader, tree: &Tree) -> Option<Self> {
        objects::endpoint(r, &Path::Root, tree)
    }
    fn key(&self) -> EndpointKey {
        Self::key(self)
    }
    fn map(world: &mut World) -> &mut SharedMap<EndpointKey, Arc<Self>> {
        &mut world.endpoints
    }
}

macro_rules! held_by_vpc_and_name {
    ($type:ty, $name:ty, $field:ident, $read:path) => {
        impl Held for $type {
            type Key = (crate::VpcName, $name);
            type Kept = Self;
            fn read(r: &mut Reader, tree: &Tree) -> Option<Self> {
                $read(r, &Path::Root, tree)
            }
            fn key(&self) -> Self::Key {
                (self.vpc.clone(), self.name.clone())
            }
            fn map(world: &mut World) -> &mut SharedMap<Self::Key, Self> {
                &mut world.$field
            }
        }
    };
}

held_by_vpc_and_name!(SecurityGroup, crate::GroupName, security_groups, rules::security_group);
held_by_vpc_and_name!(CidrGroup, crate::CidrGroupName, cidr_groups, objects::cidr_group);

/// The old text's part that an edit touches, in whole items, and what stands there now.
struct Region<'t> {
    list: List,
    /// Items of the basis.
    items: std::ops::Range<usize>,
    old: &'t str,
    new: &'t str,
}

impl Basis {
    /// Of a JSON text that [`crate::load`] read without a fault and without help from an older world ([`crate::Loaded::self_contained`]).
    ///
    /// # Errors
    /// The text, when it is no JSON.
    pub fn new(text: Vec<u8>) -> Result<Self, Vec<u8>> {
        match std::str::from_utf8(&text).ok().and_then(places) {
            Some(items) => Ok(Self { text, items }),
            None => Err(text),
        }
    }

    /// The text.
    #[must_use]
    pub fn text(&self) -> &[u8] {
        &self.text
    }

    /// Makes `world` what the new text says. `world` is what the basis says, completed from the lock, which must not have changed.
    ///
    /// # Errors
    /// The text, when it has to be read whole; `world` is as it was.
    pub fn edit(&mut self, text: Vec<u8>, world: &mut World) -> Result<Edited, Vec<u8>> {
        let Some((edited, at, fresh)) = self.try_edit(&text, world) else { return Err(text) };
        let (grown, shrunk) = (text.len(), self.text.len());
        for item in &mut self.items[at.end..] {
            // Behind the region every offset moves by the same amount.
            item.start = item.start + grown - shrunk;
            item.end = item.end + grown - shrunk;
        }
        self.items.splice(at, fresh);
        self.text = text;
        Ok(edited)
    }

    fn try_edit(
        &self,
        text: &[u8],
        world: &mut World,
    ) -> Option<(Edited, std::ops::Range<usize>, Vec<Item>)> {
        if text.len() > MAX_BYTES {
            return None;
        }
        let region = self.region(text)?;
        let edited = match region.list {
            List::Endpoints => Edited { endpoints: edit_endpoints(&region, world)?, rules: false },
            List::SecurityGroups => edit_rules::<SecurityGroup>(&region, world, |world, before| {
                groups_fit(world, before.iter().filter_map(|(key, old)| Some((key, old.as_ref()?))))
            })?,
            List::CidrGroups => edit_rules::<CidrGroup>(&region, world, |world, before| {
                cidr_groups_fit(world, before.iter().map(|(key, _)| key))
            })?,
        };
        let start = self.items.get(region.items.start)?.start;
        let wrapped = wrap(region.new);
        let base = wrapped.as_ptr() as usize + 1;
        let fresh = tree::items(&wrapped)?
            .iter()
            .map(|raw| {
                let at = start + (raw.get().as_ptr() as usize - base);
                Item { list: region.list, start: at, end: at + raw.get().len() }
            })
            .collect();
        Some((edited, region.items, fresh))
    }

    /// Where old and new text differ; `None` when that is not inside one list.
    fn region<'t>(&'t self, text: &'t [u8]) -> Option<Region<'t>> {
        let old = self.text.as_slice();
        let shorter = old.len().min(text.len());
        let prefix = common_prefix(&old[..shorter], &text[..shorter]);
        let left = shorter - prefix;
        let suffix = common_suffix(&old[old.len() - left..], &text[text.len() - left..]);
        let (from, to) = (prefix, old.len() - suffix);
        // The last item that starts at or before the difference, and the first after it that ends at or behind it.
        let first = self.items.partition_point(|item| item.start <= from).checked_sub(1)?;
        let last = first + self.items.get(first..)?.partition_point(|item| item.end < to);
        let touched = self.items.get(first..=last)?;
        let (head, tail) = (touched.first()?, touched.last()?);
        if touched.iter().any(|item| item.list != head.list) {
            return None;
        }
        let new_end = text.len().checked_sub(old.len() - tail.end)?;
        Some(Region {
            list: head.list,
            items: first..last + 1,
            old: std::str::from_utf8(old.get(head.start..tail.end)?).ok()?,
            new: std::str::from_utf8(text.get(head.start..new_end)?).ok()?,
        })
    }
}

/// Bytes compared at once.
const STRIDE: usize = 256;

/// How many bytes two texts of one length have in common from the start.
fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    let at = STRIDE * a.chunks(STRIDE).zip(b.chunks(STRIDE)).take_while(|(a, b)| a == b).count();
    let at = at.min(a.len());
    at + a[at..].iter().zip(&b[at..]).take_while(|(a, b)| a == b).count()
}

/// The same from the end.
fn common_suffix(a: &[u8], b: &[u8]) -> usize {
    let at = STRIDE * a.rchunks(STRIDE).zip(b.rchunks(STRIDE)).take_while(|(a, b)| a == b).count();
    let left = a.len() - at.min(a.len());
    a.len() - left + a[..left].iter().rev().zip(b[..left].iter().rev()).take_while(|(a, b)| a == b).count()
}

/// Where the objects of a right document stand.
fn places(text: &str) -> Option<Vec<Item>> {
    let base = text.as_ptr() as usize;
    let names = List::ALL.map(|(name, _)| name);
    let split = tree::split(text.as_bytes(), &names)?;
    let mut items = Vec::new();
    for (name, list) in List::ALL {
        items.extend(split.lists.get(name).into_iter().flatten().map(|raw| {
            let start = raw.get().as_ptr() as usize - base;
            Item { list, start, end: start + raw.get().len() }
        }));
    }
    items.sort_unstable_by_key(|item| item.start);
    items.shrink_to_fit();
    Some(items)
}

fn wrap(items: &str) -> String {
    format!("[{items}]")
}

/// The objects of a region as written, by key; `None` for a fault, or one key twice.
fn read<T: Held>(region: &str) -> Option<BTreeMap<T::Key, T>> {
    let wrapped = wrap(region);
    let items = tree::items(&wrapped)?;
    // A list that becomes empty, or was: commas around it would be left over.
    if items.is_empty() {
        return None;
    }
    let mut out = BTreeMap::new();
    for raw in items {
        let mut r = Reader::default();
        let object = T::read(&mut r, &tree::read_json(raw.get()).ok()?)?;
        if !r.faults.is_empty() || out.insert(object.key(), object).is_some() {
            return None;
        }
    }
    Some(out)
}

/// The keys whose objects are written differently.
fn differ<T: Held>(old: &BTreeMap<T::Key, T>, new: &BTreeMap<T::Key, T>) -> BTreeSet<T::Key> {
    old.keys().chain(new.keys()).filter(|key| old.get(key) != new.get(key)).cloned().collect()
}

/// Puts objects in the world, and back when they do not fit there.
fn exchange<T: Held>(
    world: &mut World,
    new: Vec<(T::Key, Option<T::Kept>)>,
    fits: impl FnOnce(&World, &Before<T>) -> bool,
) -> Option<()> {
    let put = |world: &mut World, objects: Vec<(T::Key, Option<T::Kept>)>| -> Before<T> {
        let map = T::map(world);
        let one = |(key, object): (T::Key, Option<T::Kept>)| {
            let before = match object {
                Some(object) => map.insert(key.clone(), object),
                None => map.remove(&key),
            };
            (key, before)
        };
        objects.into_iter().map(one).collect()
    };
    let before = put(world, new);
    if fits(world, &before) {
        return Some(());
    }
    put(world, before);
    None
}

fn edit_endpoints(region: &Region<'_>, world: &mut World) -> Option<BTreeSet<EndpointKey>> {
    let (old, mut new) = (read::<Endpoint>(region.old)?, read::<Endpoint>(region.new)?);
    let changed = differ(&old, &new);
    if changed.len() > MOST {
        return None;
    }
    let mut objects = Vec::new();
    for key in &changed {
        let held = world.endpoints.get(key);
        // An object elsewhere in the document has the name.
        if held.is_some() != old.contains_key(key) {
            return None;
        }
        let mut object = new.remove(key);
        if let Some(endpoint) = object.as_mut().filter(|e| e.ips.is_empty()) {
            // The lock's addresses stay right while nothing asks for others.
            let same = old.get(key).is_some_and(|o| o.ips.is_empty() && o.subnet == endpoint.subnet);
            endpoint.ips = held.filter(|_| same)?.ips.clone();
        }
        objects.push((key.clone(), object.map(Arc::new)));
    }
    exchange::<Endpoint>(world, objects, |world, before| endpoints_fit(world, before))?;
    Some(changed)
}

fn edit_rules<T: Held<Kept = T> + Clone>(
    region: &Region<'_>,
    world: &mut World,
    fits: impl FnOnce(&World, &Before<T>) -> bool,
) -> Option<Edited> {
    let (old, mut new) = (read::<T>(region.old)?, read::<T>(region.new)?);
    // Others refer to them: one that comes or goes is looked at with all of these.
    if !old.keys().eq(new.keys()) {
        return None;
    }
    let changed = differ(&old, &new);
    let objects: Vec<_> = changed.iter().map(|key| (key.clone(), new.remove(key))).collect();
    exchange::<T>(world, objects, fits)?;
    Some(Edited { endpoints: BTreeSet::new(), rules: !changed.is_empty() })
}

#[cfg(test)]
mod tests;
