//! This node's own Pods, watched in full, and the peers that slices name, as one stream of Pods.

use std::collections::{BTreeMap, BTreeSet};

use flowloom_model::NodeName;

use super::{PeerChange, PeerView, PublishedSlice, Workload};
use crate::{Happening, ObjectName, Pod};

/// A Pod as its watch would have said it.
pub type Told = (ObjectName, Result<Pod, String>);

/// What changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// All Pods there are.
    Replace(Vec<Told>),
    /// One is new or different.
    Put(ObjectName, Result<Pod, String>),
    /// One is gone.
    Gone(ObjectName),
}

/// Joins the two. Says nothing before both had their first list. A Pod of this node is what its own watch says, whatever slices say.
#[derive(Debug)]
pub struct Join {
    node: NodeName,
    local: Option<BTreeMap<ObjectName, Result<Pod, String>>>,
    view: PeerView,
    listed: bool,
}

impl Join {
    /// For a node.
    #[must_use]
    pub fn new(node: NodeName) -> Self {
        Self { node, local: None, view: PeerView::default(), listed: false }
    }

    /// Slices' entries that are not used, by slice.
    #[must_use]
    pub fn view(&self) -> &PeerView {
        &self.view
    }

    fn complete(&self) -> bool {
        self.local.is_some() && self.listed
    }

    /// What the watch of this node's Pods said.
    pub fn local(&mut self, said: Happening<Pod>) -> Vec<Step> {
        match (said, &mut self.local) {
            (Happening::Listed(list), _) => {
                self.local = Some(list.into_iter().collect());
                return self.all();
            }
            (Happening::Put(name, pod), Some(local)) => {
                local.insert(name.clone(), pod.clone());
                if self.complete() {
                    return vec![Step::Put(name, pod)];
                }
            }
            (Happening::Gone(name), Some(local)) => {
                local.remove(&name);
                if self.complete() {
                    return vec![self.peer(name)];
                }
            }
            _ => {}
        }
        Vec::new()
    }

    /// What the watch of slices said. A slice that cannot be read keeps its last good version.
    pub fn slices(&mut self, said: Happening<PublishedSlice>) -> Vec<Step> {
        let changes = match said {
            Happening::Listed(list) => {
                let first = !self.listed;
                self.listed = true;
                // Unreadable ones are in the list as well.
                let names: BTreeSet<String> = list.iter().map(|(n, _)| n.name.clone()).collect();
                let mut changes = Vec::new();
                for (name, slice) in list {
                    if let Ok(slice) = slice {
                        let told = self.view.apply(&name.name, &slice.spec);
                        if !first {
                            changes.extend(told);
                        }
                    }
                }
                // What moved to another slice is there before its old slice goes.
                changes.extend(self.view.retain(&names));
                if first {
                    return self.all();
                }
                changes
            }
            Happening::Put(name, Ok(slice)) => self.view.apply(&name.name, &slice.spec),
            Happening::Gone(name) => self.view.remove(&name.name),
            _ => return Vec::new(),
        };
        if self.complete() { self.steps(changes) } else { Vec::new() }
    }

    fn steps(&self, changes: Vec<PeerChange>) -> Vec<Step> {
        let own = |name: &ObjectName| self.local.as_ref().is_some_and(|l| l.contains_key(name));
        changes.into_iter().filter(|c| !own(&c.pod)).map(|c| self.peer(c.pod)).collect()
    }

    /// A Pod that this node does not run, as slices have it.
    fn peer(&self, name: ObjectName) -> Step {
        match self.view.pod(&name).filter(|w| w.node != self.node) {
            Some(w) => Step::Put(name, Ok(as_pod(w))),
            None => Step::Gone(name),
        }
    }

    fn all(&self) -> Vec<Step> {
        let Some(local) = self.local.as_ref().filter(|_| self.listed) else { return Vec::new() };
        let mut all = local.clone();
        for w in self.view.pods().filter(|w| w.node != self.node) {
            all.entry(w.pod.clone()).or_insert_with(|| Ok(as_pod(w)));
        }
        vec![Step::Replace(all.into_iter().collect())]
    }
}

fn as_pod(w: &Workload) -> Pod {
    Pod {
        uid: w.uid.to_string(),
        mirror_of: String::new(),
        node: Some(w.node.clone()),
        labels: w.profile.labels.clone(),
        service_account: w.profile.service_account.clone(),
        host_network: false,
        named_ports: w.profile.ports.clone(),
        host_ports: Vec::new(),
        ips: w.ips.clone(),
        finished: false,
        leaving: false,
        created: w.created.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{Profile, WorkloadSliceSpec};
    use super::*;

    fn workload(name: &str, node: &str) -> Workload {
        Workload {
            pod: ObjectName::new("shop", name),
            uid: format!("uid-{name}").into(),
            ips: vec!["10.40.0.1".parse().unwrap()],
            node: node.parse().unwrap(),
            created: "2026-01-01T00:00:00Z".into(),
            profile: Arc::new(Profile::default()),
        }
    }

    fn slice(workloads: &[Workload]) -> PublishedSlice {
        let spec = WorkloadSliceSpec::of(1, 1, workloads.iter());
        PublishedSlice { uid: "u".into(), version: "1".into(), spec }
    }

    fn named(name: &str) -> ObjectName {
        ObjectName::new("shop", name)
    }

    fn joined(local: &[&str], peers: &[Workload]) -> Join {
        let mut join = Join::new("n1".parse().unwrap());
        let list = local.iter().map(|n| (named(n), Ok(as_pod(&workload(n, "n1"))))).collect();
        assert!(join.local(Happening::Listed(list)).is_empty(), "slices are not listed yet");
        let steps = join.slices(Happening::Listed(vec![(ObjectName::new("", "s"), Ok(slice(peers)))]));
        assert!(matches!(steps.as_slice(), [Step::Replace(_)]));
        join
    }

    #[test]
    fn nothing_is_said_before_both_lists_and_then_everything() {
        let peers = [workload("far", "n2"), workload("own", "n1"), workload("stale", "n1")];
        let mut join = Join::new("n1".parse().unwrap());
        assert!(
            join.slices(Happening::Listed(vec![(ObjectName::new("", "s"), Ok(slice(&peers)))])).is_empty()
        );
        let own = as_pod(&workload("own", "n1"));
        let steps = join.local(Happening::Listed(vec![(named("own"), Ok(own.clone()))]));
        let [Step::Replace(all)] = steps.as_slice() else { panic!("{steps:?}") };
        // What a slice says of this node counts for nothing.
        assert_eq!(*all, [(named("far"), Ok(as_pod(&peers[0]))), (named("own"), Ok(own))]);
    }

    #[test]
    fn a_pod_that_moved_here_is_this_nodes_and_one_that_moved_away_is_the_slices() {
        let mut join = joined(&[], &[workload("web-0", "n2")]);
        let here = as_pod(&workload("web-0", "n1"));
        let steps = join.local(Happening::Put(named("web-0"), Ok(here.clone())));
        assert_eq!(steps, [Step::Put(named("web-0"), Ok(here))]);
        // The slice is late, then right, then late again the other way.
        let name = ObjectName::new("", "s");
        assert!(join.slices(Happening::Put(name.clone(), Ok(slice(&[workload("web-0", "n1")])))).is_empty());
        assert!(join.slices(Happening::Put(name, Ok(slice(&[workload("web-0", "n3")])))).is_empty());
        let steps = join.local(Happening::Gone(named("web-0")));
        assert_eq!(steps, [Step::Put(named("web-0"), Ok(as_pod(&workload("web-0", "n3"))))]);
    }

    #[test]
    fn a_slice_that_goes_takes_its_peers_and_one_that_cannot_be_read_keeps_them() {
        let mut join = joined(&["own"], &[workload("far", "n2")]);
        let name = ObjectName::new("", "s");
        assert!(join.slices(Happening::Put(name.clone(), Err("broken".into()))).is_empty());
        assert!(join.slices(Happening::Listed(vec![(name.clone(), Err("broken".into()))])).is_empty());
        assert_eq!(join.slices(Happening::Gone(name)), [Step::Gone(named("far"))]);
    }
}
