//! The bad object degrades alone: it keeps its last good version, or stays out together with what depends on it; its neighbours are untouched.

use std::collections::{BTreeMap, BTreeSet};

use crate::validate::exists;
use crate::{Fault, Format, Lock, ObjectRef, Reason, Remote, SharedMap, World, complete, document, validate};

/// A world without its faults.
#[derive(Clone, Debug, Default)]
pub struct Degraded {
    /// What may be realised: [`validate`] finds only faults in it that open nothing.
    pub world: World,
    /// Every fault, those of dependants included. [`crate::conditions`] makes conditions of them.
    pub faults: Vec<Fault>,
}

/// What an agent acts on.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// What may be realised.
    pub world: World,
    /// What is wrong with the rest.
    pub faults: Vec<Fault>,
    /// Nothing is wrong, and the world follows from document and lock alone, whatever was in force before.
    pub self_contained: bool,
}

/// Reads a document for an agent: completed from the lock, never allocated for, with the bad objects degraded. `last_good` is the world in force.
///
/// # Errors
/// When the document says nothing that can be relied on as a whole (no document, another version, a fault in no object by name, a broken lock): the world
/// in force has to stay as it is.
pub fn load(
    bytes: &[u8],
    format: Format,
    lock: Option<&[u8]>,
    last_good: Option<&World>,
) -> Result<Loaded, Vec<Fault>> {
    let draft = document::read(bytes, format).map_err(|f| vec![f])?;
    let lock = lock.map(Lock::parse).transpose();
    let lock = match (lock, draft.unusable()) {
        (Ok(lock), false) => lock.unwrap_or_default(),
        (lock, _) => {
            let mut faults = draft.faults;
            faults.extend(lock.err());
            return Err(faults);
        }
    };
    let (mut world, mut waiting) = complete(&draft.world, &lock);
    let alone = waiting.is_empty();
    if let (false, Some(old)) = (alone, last_good) {
        // A lock that is late, or lost, takes no address away from what runs.
        (world, waiting) = complete(&world, &Lock::of(old));
    }
    let mut faults = draft.faults;
    faults.extend(waiting);
    faults.extend(validate(&world));
    if faults.is_empty() {
        return Ok(Loaded { world, faults, self_contained: alone });
    }
    let degraded = degrade(&world, faults, last_good);
    Ok(Loaded { world: degraded.world, faults: degraded.faults, self_contained: false })
}

/// Takes the faulty objects out of a world. Those that `last_good` has stay in that version as long as it fits; where two objects conflict and one of
/// them was there before with the same claim, the newcomer gives way.
#[must_use]
pub fn degrade(world: &World, faults: Vec<Fault>, last_good: Option<&World>) -> Degraded {
    let mut state = State {
        world: world.clone(),
        last_good,
        retired: BTreeMap::new(),
        dependants: BTreeMap::new(),
        faults: Vec::new(),
        seen: BTreeSet::new(),
    };
    state.index_dependants();
    let mut found = faults;
    // What names an object that is at fault itself is judged once that object's own fate is known.
    let at_fault: BTreeSet<ObjectRef> = found
        .iter()
        .filter(|f| f.code != Reason::DanglingReference && !f.keeps_object())
        .filter_map(|f| f.object.clone())
        .collect();
    found.retain(|f| {
        f.code != Reason::DanglingReference || f.other.as_ref().is_none_or(|o| !at_fault.contains(o))
    });
    loop {
        let mut bad = BTreeSet::new();
        for fault in found {
            let fault = state.blame(fault);
            if let (Some(object), false) = (&fault.object, fault.keeps_object()) {
                bad.insert(object.clone());
            }
            state.note(fault);
        }
        if bad.is_empty() {
            break;
        }
        bad.into_iter().for_each(|object| state.retire(object));
        found = validate(&state.world);
    }
    state.finish()
}

/// How far an object has been taken back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Retired {
    ToLastGood,
    Out,
}

struct State<'w> {
    world: World,
    last_good: Option<&'w World>,
    retired: BTreeMap<ObjectRef, Retired>,
    dependants: BTreeMap<ObjectRef, BTreeSet<ObjectRef>>,
    faults: Vec<Fault>,
    seen: BTreeSet<(Reason, String, String)>,
}

impl State<'_> {
    fn note(&mut self, fault: Fault) {
        if self.seen.insert((fault.code, fault.path.clone(), fault.value.clone())) {
            self.faults.push(fault);
        }
    }

    fn finish(mut self) -> Degraded {
        for f in &mut self.faults {
            let state = f.object.as_ref().and_then(|o| self.retired.get(o));
            if state == Some(&Retired::ToLastGood) && !f.keeps_object() {
                f.message.push_str("; its last good version stays in force");
            }
        }
        Degraded { world: self.world, faults: self.faults }
    }

    /// Who is at fault in a conflict: not the one that was there before.
    fn blame(&self, mut fault: Fault) -> Fault {
        if let (Reason::DanglingReference, Some(other)) = (fault.code, &fault.other)
            && self.retired.contains_key(other)
        {
            fault.code = Reason::DependencyDegraded;
            if let Some(object) = &fault.object {
                fault.message = format!("{object} depends on {other}, which is degraded");
            }
        }
        let mutual = matches!(
            fault.code,
            Reason::DuplicateVni
                | Reason::NodeAddressConflict
                | Reason::SubnetOverlap
                | Reason::DuplicateAddress
                | Reason::DuplicateMac
                | Reason::AttachmentConflict
                | Reason::DuplicateFrontend
        );
        if let (true, Some(object), Some(other)) = (mutual, &fault.object, &fault.other)
            && self.settled(object)
            && !self.settled(other)
            && !is_default_vpc(other)
        {
            fault.path = fault.path.replacen(&object.path(), &other.path(), 1);
            std::mem::swap(&mut fault.object, &mut fault.other);
        }
        fault
    }

    /// Whether the object was there before, with the same claims on what others may want.
    fn settled(&self, object: &ObjectRef) -> bool {
        let Some(old) = self.last_good else { return false };
        let new = &self.world;
        match object {
            ObjectRef::Node(k) => same(old.nodes.get(k), new.nodes.get(k), |v| v.addresses.clone()),
            ObjectRef::Vpc(k) => same(old.vpcs.get(k), new.vpcs.get(k), |v| v.vni),
            ObjectRef::Subnet(v, n) => {
                let k = (v.clone(), n.clone());
                same(old.subnets.get(&k), new.subnets.get(&k), |v| v.cidrs.clone())
            }
            ObjectRef::Endpoint(k) => same(old.endpoints.get(k), new.endpoints.get(k), |v| {
                (v.ips.clone(), v.effective_mac(), v.node.clone(), v.attachment.clone())
            }),
            ObjectRef::LoadBalancer(v, n) => {
                let k = (v.clone(), n.clone());
                same(old.services.get(&k), new.services.get(&k), |v| {
                    let ports: Vec<_> = v.ports.iter().map(|p| (p.protocol, p.port)).collect();
                    (v.cluster_ips.clone(), ports)
                })
            }
            ObjectRef::SecurityGroup(..) | ObjectRef::CidrGroup(..) => false,
        }
    }

    /// Back to the last good version, or out with everything that depends on it.
    fn retire(&mut self, object: ObjectRef) {
        let before = self.retired.get(&object).copied();
        if before.is_none() && self.restore(&object) {
            self.retired.insert(object, Retired::ToLastGood);
            return;
        }
        let mut queue = vec![object];
        while let Some(object) = queue.pop() {
            if self.retired.insert(object.clone(), Retired::Out) == Some(Retired::Out) {
                continue;
            }
            remove(&mut self.world, &object);
            for dependant in self.dependants.get(&object).cloned().unwrap_or_default() {
                if !exists(&self.world, &dependant) {
                    continue;
                }
                let message = format!("{dependant} depends on {object}, which is degraded");
                let fault =
                    Fault::new(Reason::DependencyDegraded, dependant.path(), object.full_name(), message)
                        .on(dependant.clone())
                        .with(object.clone());
                self.note(fault);
                queue.push(dependant);
            }
        }
    }

    /// Puts the last good version in place; `false` when there is none that differs.
    fn restore(&mut self, object: &ObjectRef) -> bool {
        let Some(old) = self.last_good else { return false };
        let restored = match object {
            ObjectRef::Node(k) => put(&mut self.world.nodes, &old.nodes, k),
            ObjectRef::Vpc(k) => put(&mut self.world.vpcs, &old.vpcs, k),
            ObjectRef::Subnet(v, n) => put(&mut self.world.subnets, &old.subnets, &(v.clone(), n.clone())),
            ObjectRef::Endpoint(k) => put(&mut self.world.endpoints, &old.endpoints, k),
            ObjectRef::SecurityGroup(v, n) => {
                put(&mut self.world.security_groups, &old.security_groups, &(v.clone(), n.clone()))
            }
            ObjectRef::CidrGroup(v, n) => {
                put(&mut self.world.cidr_groups, &old.cidr_groups, &(v.clone(), n.clone()))
            }
            ObjectRef::LoadBalancer(v, n) => {
                put(&mut self.world.services, &old.services, &(v.clone(), n.clone()))
            }
        };
        if restored {
            // The restored version may depend on other objects than the new one.
            index(&self.world, object, &mut self.dependants);
        }
        restored
    }

    fn index_dependants(&mut self) {
        let w = &self.world;
        let subnets = w.subnets.keys().map(|(v, n)| ObjectRef::Subnet(v.clone(), n.clone()));
        let endpoints = w.endpoints.keys().map(|k| ObjectRef::Endpoint(k.clone()));
        let groups = w.security_groups.keys().map(|(v, n)| ObjectRef::SecurityGroup(v.clone(), n.clone()));
        let cidrs = w.cidr_groups.keys().map(|(v, n)| ObjectRef::CidrGroup(v.clone(), n.clone()));
        let services = w.services.keys().map(|(v, n)| ObjectRef::LoadBalancer(v.clone(), n.clone()));
        for object in subnets.chain(endpoints).chain(groups).chain(cidrs).chain(services) {
            index(w, &object, &mut self.dependants);
        }
    }
}

fn is_default_vpc(object: &ObjectRef) -> bool {
    matches!(object, ObjectRef::Vpc(v) if v.is_default())
}

fn same<T, C: PartialEq>(old: Option<&T>, new: Option<&T>, claims: impl Fn(&T) -> C) -> bool {
    matches!((old, new), (Some(a), Some(b)) if claims(a) == claims(b))
}

fn put<K: Ord + Clone, V: Clone + PartialEq>(
    to: &mut SharedMap<K, V>,
    from: &SharedMap<K, V>,
    key: &K,
) -> bool {
    let Some(old) = from.get(key) else { return false };
    to.insert(key.clone(), old.clone()).is_none_or(|new| new != *old)
}

fn remove(world: &mut World, object: &ObjectRef) {
    match object {
        ObjectRef::Node(k) => drop(world.nodes.remove(k)),
        ObjectRef::Vpc(k) => drop(world.vpcs.remove(k)),
        ObjectRef::Subnet(v, n) => drop(world.subnets.remove(&(v.clone(), n.clone()))),
        ObjectRef::Endpoint(k) => drop(world.endpoints.remove(k)),
        ObjectRef::SecurityGroup(v, n) => drop(world.security_groups.remove(&(v.clone(), n.clone()))),
        ObjectRef::CidrGroup(v, n) => drop(world.cidr_groups.remove(&(v.clone(), n.clone()))),
        ObjectRef::LoadBalancer(v, n) => drop(world.services.remove(&(v.clone(), n.clone()))),
    }
}

/// Notes on whom an object depends.
fn index(world: &World, object: &ObjectRef, dependants: &mut BTreeMap<ObjectRef, BTreeSet<ObjectRef>>) {
    let mut on = |target: ObjectRef| {
        dependants.entry(target).or_default().insert(object.clone());
    };
    match object {
        ObjectRef::Node(_) | ObjectRef::Vpc(_) => {}
        ObjectRef::Subnet(v, n) => {
            on(ObjectRef::Vpc(v.clone()));
            let Some(s) = world.subnets.get(&(v.clone(), n.clone())) else { return };
            s.node
                .iter()
                .chain(s.cni_ranges.iter().map(|r| &r.node))
                .for_each(|n| on(ObjectRef::Node(n.clone())));
        }
        ObjectRef::Endpoint(k) => {
            on(ObjectRef::Vpc(k.vpc.clone()));
            let Some(e) = world.endpoints.get(k) else { return };
            on(ObjectRef::Subnet(k.vpc.clone(), e.subnet.clone()));
            on(ObjectRef::Node(e.node.clone()));
            e.security_groups.iter().for_each(|g| on(ObjectRef::SecurityGroup(k.vpc.clone(), g.clone())));
        }
        ObjectRef::SecurityGroup(v, n) => {
            on(ObjectRef::Vpc(v.clone()));
            let Some(g) = world.security_groups.get(&(v.clone(), n.clone())) else { return };
            for rule in &g.rules {
                match &rule.remote {
                    Remote::Group(n) => on(ObjectRef::SecurityGroup(v.clone(), n.clone())),
                    Remote::CidrGroup(n) => on(ObjectRef::CidrGroup(v.clone(), n.clone())),
                    Remote::Any | Remote::Cidr(_) | Remote::Selector(_) | Remote::Entities(_) => {}
                }
            }
        }
        ObjectRef::CidrGroup(v, _) | ObjectRef::LoadBalancer(v, _) => on(ObjectRef::Vpc(v.clone())),
    }
}

#[cfg(test)]
mod tests;
