//! From the services of one plan to those of the next.
//!
//! A frontend's entry is switched in one write, and what it names is there before and until after: new lists, ranges that more may
//! come from, frontends, then what nobody names any more. In between, every client gets a backend of the old or of the new plan, or a
//! refusal that one of them has for it.

use std::collections::BTreeMap;
use std::sync::Arc;

use ipnet::IpNet;

use super::{BackendPlan, FrontendKey, FrontendPlan, ListId, ServiceId, ServicePart, ServicePlan};
use crate::fault::{Fault, planted};
use crate::{Op, VpcId};

/// The operations, in the order in which they keep every state in between right.
pub(crate) fn ops(old: &ServicePlan, new: &ServicePlan, fault: Fault) -> Vec<Op> {
    if old.parts.is_same(&new.parts) {
        return Vec::new();
    }
    let (before, after) = changed(old, new);
    let (added_lists, removed_lists) = delta(before.lists, &after.lists);
    let (added_ranges, removed_ranges) = delta(before.ranges, &after.ranges);
    let frontends: Vec<(FrontendKey, FrontendPlan)> = after
        .frontends
        .iter()
        .filter(|(key, plan)| before.frontends.get(*key) != Some(*plan))
        .map(|(key, plan)| (**key, **plan))
        .collect();
    let gone: Vec<FrontendKey> =
        before.frontends.keys().filter(|key| !after.frontends.contains_key(*key)).map(|key| **key).collect();
    let mut ops = Vec::new();
    let mut push = |empty: bool, op: Op| {
        if !empty {
            ops.push(op);
        }
    };
    let ranges = |all: BTreeMap<(ServiceId, IpNet), ()>| all.into_keys().collect::<Vec<_>>();
    let lists = |all: BTreeMap<ListId, &Arc<[BackendPlan]>>| {
        all.into_iter().map(|(id, list)| (id, list.clone())).collect::<Vec<_>>()
    };
    let (added_lists, removed_lists) = (lists(added_lists), lists(removed_lists));
    let (added_ranges, removed_ranges) = (ranges(added_ranges), ranges(removed_ranges));
    if planted!(fault, ListsRemovedFirst) {
        push(removed_lists.is_empty(), Op::RemoveLists(removed_lists.clone()));
    }
    if planted!(fault, FrontendsFirst) {
        push(frontends.is_empty(), Op::PutFrontends(frontends.clone()));
    }
    if planted!(fault, RangesRemovedFirst) {
        push(removed_ranges.is_empty(), Op::RemoveRanges(removed_ranges.clone()));
    }
    push(added_lists.is_empty(), Op::PutLists(added_lists));
    push(added_ranges.is_empty(), Op::PutRanges(added_ranges));
    push(frontends.is_empty(), Op::PutFrontends(frontends));
    if !planted!(fault, FrontendsLeft) {
        push(gone.is_empty(), Op::RemoveFrontends(gone));
    }
    push(removed_ranges.is_empty(), Op::RemoveRanges(removed_ranges));
    push(removed_lists.is_empty(), Op::RemoveLists(removed_lists));
    ops
}

/// What some services hold.
#[derive(Default)]
struct Holdings<'a> {
    frontends: BTreeMap<&'a FrontendKey, &'a FrontendPlan>,
    lists: BTreeMap<ListId, &'a Arc<[BackendPlan]>>,
    ranges: BTreeMap<(ServiceId, IpNet), ()>,
}

impl<'a> Holdings<'a> {
    fn add(&mut self, part: &'a ServicePart) {
        self.frontends.extend(&part.frontends);
        self.lists.extend(part.lists.iter().map(|(id, list)| (*id, list)));
        let ranges = part.ranges.iter().flat_map(|(id, nets)| nets.iter().map(|net| ((*id, *net), ())));
        self.ranges.extend(ranges);
    }
}

/// What the services that differ hold, before and after.
fn changed<'a>(old: &'a ServicePlan, new: &'a ServicePlan) -> (Holdings<'a>, Holdings<'a>) {
    let (mut before, mut after) = (Holdings::default(), Holdings::default());
    for (_, was, is) in old.parts().apart(new.parts()) {
        if was.zip(is).is_some_and(|(was, is)| Arc::ptr_eq(was, is) || was == is) {
            continue;
        }
        was.into_iter().for_each(|part| before.add(part));
        is.into_iter().for_each(|part| after.add(part));
    }
    (before, after)
}

/// What is only in the one, and only in the other.
fn delta<K: Ord + Copy, V: Copy>(
    mut before: BTreeMap<K, V>,
    after: &BTreeMap<K, V>,
) -> (BTreeMap<K, V>, BTreeMap<K, V>) {
    let mut added = BTreeMap::new();
    for (key, value) in after {
        if before.remove(key).is_none() {
            added.insert(*key, *value);
        }
    }
    (added, before)
}

/// A backend that connections of a service's port must not use any more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct EndedBackend {
    /// VPC.
    pub vpc: VpcId,
    /// The service's port, as `old` numbered it.
    pub service: ServiceId,
    /// IP protocol number.
    pub protocol: u8,
    /// Address and port.
    pub backend: (std::net::IpAddr, u16),
}

/// Backends that `old` had and `new` has not, and for UDP those that served and do not any more: their connections through the service end. A
/// backend that only takes no *new* connections here (it is ending or not ready, or a topology hint or traffic policy speaks for others) is
/// not among them.
#[must_use]
pub fn ended_backends(old: &ServicePlan, new: &ServicePlan) -> Vec<EndedBackend> {
    let mut ended = Vec::new();
    for (_, was, is) in old.parts().apart(new.parts()) {
        let Some(was) = was else { continue };
        if is.is_some_and(|is| Arc::ptr_eq(was, is)) {
            continue;
        }
        let Some(vpc) = was.frontends.keys().next().map(|key| key.vpc) else { continue };
        for (service, name) in &was.names {
            let now = is.and_then(|is| {
                let (id, _) = is.names.iter().find(|(_, n)| *n == name)?;
                is.keeps.get(id)
            });
            let at = |b: &BackendPlan| (b.ip, b.port);
            let gone = was
                .keeps
                .get(service)
                .into_iter()
                .flat_map(|list| list.iter())
                .filter(|b| now.is_none_or(|now| now.binary_search_by_key(&at(b), at).is_err()));
            ended.extend(gone.map(|b| EndedBackend {
                vpc,
                service: *service,
                protocol: name.protocol,
                backend: at(b),
            }));
        }
    }
    ended
}
