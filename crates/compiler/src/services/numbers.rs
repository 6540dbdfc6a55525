//! Numbers of services and lists. The kernel's maps are where they live: a restart takes them over from there ([`HeldServices`]), so that
//! nothing is written to a file when a Service changes, and nothing to the maps when none did.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use flowloom_model::{PackedMap, ServiceName, VpcName};

use crate::fault::{Fault, planted};
use crate::{BackendPlan, FrontendKey, ListId, ServiceId, ServicePart, ServicePlan, ServiceRef};

/// What the service maps of the kernel hold, as far as numbers go.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HeldServices {
    /// Service and list of each frontend.
    pub frontends: BTreeMap<FrontendKey, (ServiceId, ListId)>,
    /// Lists without holes, in the order of their indices.
    pub lists: BTreeMap<ListId, Vec<BackendPlan>>,
    /// The highest list number of all, also of lists with holes.
    pub last_list: ListId,
}

/// Hands numbers out round robin.
#[derive(Clone, Debug, Default)]
struct Counter {
    last: u32,
    /// It came round: from now on numbers may be in use.
    round: bool,
}

impl Counter {
    fn next(&mut self, used: impl Fn(u32) -> bool) -> u32 {
        loop {
            match self.last.checked_add(1) {
                Some(next) => self.last = next,
                None => (self.last, self.round) = (1, true),
            }
            if !self.round || !used(self.last) {
                return self.last;
            }
        }
    }

    fn skip(&mut self, to: u32) {
        self.last = self.last.max(to);
    }
}

/// The numbers in use: those of the last compilation. A number is handed out again only after all four billion others were, so whatever
/// still names a retired one (a program that runs, an affinity entry) is long gone.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServiceNumbers {
    pub(crate) plan: ServicePlan,
    services: Counter,
    lists: Counter,
    /// From before the restart, and what of it has been claimed: by one service each.
    held: Arc<HeldServices>,
    claimed: HashSet<ServiceId>,
    claimed_lists: HashSet<ListId>,
}

impl ServiceNumbers {
    pub(crate) fn adopt(&mut self, held: HeldServices) {
        for (service, list) in held.frontends.values() {
            self.services.skip(service.0);
            self.lists.skip(list.0);
        }
        self.lists.skip(held.last_list.0.max(held.lists.keys().next_back().map_or(0, |id| id.0)));
        self.held = Arc::new(held);
        self.claimed.clear();
        self.claimed_lists.clear();
    }

    /// Ends a compilation. What the kernel held and nobody claimed when there were services to claim it is on its way out.
    pub(crate) fn settle(&mut self, plan: ServicePlan) {
        if !plan.parts.is_empty() && !self.held.frontends.is_empty() {
            self.held = Arc::default();
            self.claimed = HashSet::new();
            self.claimed_lists = HashSet::new();
        }
        self.plan = plan;
    }

    /// What a service was given last.
    pub(crate) fn of(&self, key: &(VpcName, ServiceName)) -> Option<Arc<ServicePart>> {
        self.plan.parts.get(key).cloned()
    }

    /// The number of a port: the one it has, the one its frontends have in the kernel, or a new one.
    pub(crate) fn service<'k>(
        &mut self,
        before: Option<&ServicePart>,
        name: &ServiceRef,
        mut frontends: impl Iterator<Item = &'k FrontendKey>,
    ) -> ServiceId {
        let known = before.and_then(|part| part.names.iter().find(|(_, n)| *n == name));
        if let Some((id, _)) = known {
            return *id;
        }
        let seeded = frontends.find_map(|key| self.held.frontends.get(key)).map(|(id, _)| *id);
        if let Some(id) = seeded.filter(|id| id.0 != 0 && self.claimed.insert(*id)) {
            return id;
        }
        let (plan, held) = (&self.plan, &self.held);
        let in_kernel = |n| held.frontends.values().any(|(id, _)| id.0 == n);
        ServiceId(self.services.next(|n| plan.names().any(|(id, _)| id.0 == n) || in_kernel(n)))
    }

    /// The number of a list: the one it has in this service, the one the frontend has in the kernel, or a new one. `lists` are those of
    /// the part that is being made.
    pub(crate) fn list(
        &mut self,
        before: Option<&ServicePart>,
        lists: &mut PackedMap<ListId, Arc<[BackendPlan]>>,
        content: Vec<BackendPlan>,
        frontend: &FrontendKey,
        fault: Fault,
    ) -> ListId {
        if content.is_empty() {
            return ListId(0);
        }
        if let Some(id) = find(lists, &content) {
            return id;
        }
        if let Some((id, held)) = before.and_then(|part| find_entry(&part.lists, &content)) {
            lists.insert(id, held.clone());
            return id;
        }
        if planted!(fault, ListChangedInPlace)
            && let Some(id) = before.and_then(|part| part.frontends.get(frontend)).map(|f| f.list)
            && id.0 != 0
            && !lists.contains_key(&id)
        {
            lists.insert(id, content.into());
            return id;
        }
        // A number of the kernel goes to the service whose frontend names it: nobody else has that frontend.
        let seeded = self.held.frontends.get(frontend).map(|(_, list)| *list);
        let same = |id: &ListId| self.held.lists.get(id).is_some_and(|held| *held == content);
        let seeded = seeded.filter(same).filter(|id| self.claimed_lists.insert(*id));
        let id = seeded.unwrap_or_else(|| {
            let (plan, held) = (&self.plan, &self.held);
            let used = |n| plan.lists().any(|(id, _)| id.0 == n) || held.lists.contains_key(&ListId(n));
            ListId(self.lists.next(used))
        });
        lists.insert(id, content.into());
        id
    }
}

fn find(lists: &PackedMap<ListId, Arc<[BackendPlan]>>, content: &[BackendPlan]) -> Option<ListId> {
    find_entry(lists, content).map(|(id, _)| id)
}

fn find_entry<'a>(
    lists: &'a PackedMap<ListId, Arc<[BackendPlan]>>,
    content: &[BackendPlan],
) -> Option<(ListId, &'a Arc<[BackendPlan]>)> {
    lists.iter().find(|(_, list)| ***list == *content).map(|(id, list)| (*id, list))
}
