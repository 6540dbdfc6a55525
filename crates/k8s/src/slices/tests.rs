//! Packing under random changes; what readers see while slices are written one by one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use flowloom_model::{PortName, Protocol};
use proptest::prelude::*;

use super::*;

fn profile(n: u8, long: bool) -> Arc<Profile> {
    let mut labels = BTreeMap::from([("app".to_owned(), format!("a{n}"))]);
    if long {
        labels.extend((0..20).map(|i| (format!("example.com/label-{i:02}"), "v".repeat(60))));
    }
    Arc::new(Profile {
        labels: labels.into(),
        service_account: "default".into(),
        ports: vec![NamedPort { name: PortName::new("http").unwrap(), protocol: Protocol::Tcp, port: 8080 }],
    })
}

fn workload(n: u16, version: u8) -> Workload {
    Workload {
        pod: ObjectName::new(format!("ns{}", n % 5), format!("pod-{n}")),
        uid: format!("uid-{n}-{}", version / 8).into(),
        ips: vec![
            std::net::Ipv4Addr::from(0x0a28_0000 + u32::from(n)).into(),
            std::net::Ipv6Addr::from(0xfd40 << 112 | u128::from(n)).into(),
        ],
        node: format!("node-{}", n % 7).parse().unwrap(),
        created: "2026-01-01T00:00:00Z".into(),
        profile: profile((n % 11) as u8 + version, version % 5 == 4),
    }
}

#[derive(Clone, Debug)]
enum Step {
    Set(u16, u8),
    Remove(u16),
    Tidy,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..150_u16, 0..16_u8).prop_map(|(n, v)| Step::Set(n, v)),
        2 => (0..150_u16).prop_map(Step::Remove),
        1 => Just(Step::Tidy),
    ];
    prop::collection::vec(step, 1..200)
}

const SMALL: Limits = Limits { workloads: 12, bytes: 4_000 };

fn contents(packer: &Packer) -> BTreeMap<String, WorkloadSliceSpec> {
    let names: Vec<String> = packer.slices().map(str::to_owned).collect();
    names
        .into_iter()
        .map(|n| {
            let content = packer.content(&n, 1, 1).expect("listed slices have content");
            (n, content)
        })
        .collect()
}

fn all(contents: &BTreeMap<String, WorkloadSliceSpec>) -> Vec<Workload> {
    contents.values().flat_map(|c| c.workloads().map(Result::unwrap)).collect()
}

fn differing(a: &BTreeMap<String, WorkloadSliceSpec>, b: &BTreeMap<String, WorkloadSliceSpec>) -> usize {
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    names.into_iter().filter(|n| a.get(*n) != b.get(*n)).count()
}

fn json(spec: &WorkloadSliceSpec) -> usize {
    serde_json::to_vec(spec).unwrap().len()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn every_pod_is_in_exactly_one_slice_and_a_change_touches_few(steps in steps()) {
        let mut packer = Packer::new(SMALL);
        let mut wanted: BTreeMap<ObjectName, Workload> = BTreeMap::new();
        let mut before = contents(&packer);
        for step in steps {
            packer.take_changed();
            let most = match &step {
                Step::Set(n, v) => {
                    let w = workload(*n, *v);
                    packer.upsert(w.clone());
                    wanted.insert(w.pod.clone(), w);
                    1
                }
                Step::Remove(n) => {
                    let w = workload(*n, 0);
                    prop_assert_eq!(packer.remove(&w.pod), wanted.remove(&w.pod).is_some());
                    1
                }
                Step::Tidy => {
                    packer.tidy(|_| true);
                    2
                }
            };
            let after = contents(&packer);
            let differ = differing(&before, &after);
            prop_assert!(differ <= most, "{step:?} rewrote {differ} slices");
            let told = packer.take_changed();
            prop_assert!(before.iter().chain(&after).all(|(n, _)| told.contains(n) || before.get(n) == after.get(n)));
            before = after;
        }
        let mut found = all(&before);
        found.sort();
        let want: Vec<Workload> = wanted.into_values().collect();
        prop_assert_eq!(found, want);
    }

    #[test]
    fn tidied_slices_keep_their_limits_and_are_few(steps in steps()) {
        let mut packer = Packer::new(SMALL);
        for step in steps {
            match step {
                Step::Set(n, v) => drop(packer.upsert(workload(n, v))),
                Step::Remove(n) => drop(packer.remove(&workload(n, 0).pod)),
                Step::Tidy => {}
            }
        }
        let mut rounds = 0;
        while packer.tidy(|_| true).is_some() {
            rounds += 1;
            prop_assert!(rounds < 2_000, "tidying does not end");
        }
        let contents = contents(&packer);
        for (name, spec) in &contents {
            prop_assert!(spec.workloads.len() <= SMALL.workloads, "{name}: {}", spec.workloads.len());
            prop_assert!(spec.workloads.len() == 1 || json(spec) <= SMALL.bytes, "{name}: {} bytes", json(spec));
        }
        let nearly_empty = contents.values().filter(|s| s.workloads.len() * 4 <= SMALL.workloads && json(s) * 8 <= SMALL.bytes).count();
        prop_assert!(nearly_empty <= 1, "{nearly_empty} slices wait to be merged");
    }

    #[test]
    fn a_restart_that_adopts_what_is_published_rewrites_nothing(steps in steps(), backwards in any::<bool>()) {
        let mut packer = Packer::new(SMALL);
        for step in steps {
            match step {
                Step::Set(n, v) => drop(packer.upsert(workload(n, v))),
                Step::Remove(n) => drop(packer.remove(&workload(n, 0).pod)),
                Step::Tidy => drop(packer.tidy(|_| true)),
            }
        }
        let published = contents(&packer);
        let mut second = Packer::new(SMALL);
        let mut order: Vec<_> = published.iter().collect();
        if backwards {
            order.reverse();
        }
        for (name, spec) in order {
            second.adopt(name, spec.workloads().map(Result::unwrap));
        }
        for w in all(&published) {
            prop_assert!(!second.upsert(w));
        }
        prop_assert_eq!(contents(&second), published);
    }

    /// Slices are written one by one, the target of a move first. At every moment a reader that has seen any prefix sees each Pod that exists
    /// throughout, and never an older fact after a newer one.
    #[test]
    fn a_reader_sees_no_gap_while_pods_move(seed in prop::collection::vec((0..60_u16, 0..16_u8), 30..60), removed in prop::collection::vec(0..60_u16, 20..45)) {
        let mut packer = Packer::new(SMALL);
        for (n, v) in &seed {
            packer.upsert(workload(*n, *v));
        }
        for n in &removed {
            packer.remove(&workload(*n, 0).pod);
        }
        let mut sequence = 0;
        let mut view = PeerView::default();
        let mut publish = |packer: &Packer, slice: &str, view: &mut PeerView| {
            sequence += 1;
            match packer.content(slice, 1, sequence) {
                Some(spec) => view.apply(slice, &spec),
                None => view.remove(slice),
            }
        };
        for slice in packer.take_changed() {
            publish(&packer, &slice, &mut view);
        }
        let everybody: Vec<Workload> = all(&contents(&packer));
        while let Some(step) = packer.tidy(|_| true) {
            let changed = packer.take_changed();
            prop_assert_eq!(changed, BTreeSet::from([step.from.clone(), step.to.clone()]));
            for slice in [&step.to, &step.from] {
                let changes = publish(&packer, slice, &mut view);
                prop_assert!(changes.is_empty(), "a move is nothing to a reader: {:?}", changes);
                prop_assert!(everybody.iter().all(|w| view.pod(&w.pod).is_some_and(|v| **v == *w)));
            }
        }
        prop_assert_eq!(view.len(), everybody.len());
    }
}

#[test]
fn two_hundred_fifty_ordinary_pods_fit_a_slice_of_a_hundred_kilobytes() {
    let mut packer = Packer::new(Limits::default());
    for n in 0..1000 {
        packer.upsert(workload(n, 0));
    }
    let contents = contents(&packer);
    assert_eq!(contents.len(), 4);
    assert!(contents.values().all(|s| s.workloads.len() == 250 && json(s) < 60_000));
}

#[test]
fn a_pod_of_its_own_size_gets_a_slice_of_its_own() {
    let mut packer = Packer::new(Limits { workloads: 20, bytes: 1_000 });
    packer.upsert(workload(1, 0));
    packer.upsert(workload(2, 4));
    packer.upsert(workload(3, 0));
    let contents = contents(&packer);
    assert_eq!(contents.len(), 2);
    assert!(contents.values().any(|s| json(s) > 1_000 && s.workloads.len() == 1));
}

#[test]
fn of_two_slices_that_name_a_pod_the_younger_is_right_whatever_the_order() {
    let (old, new) = (workload(1, 0), workload(1, 1));
    let older = WorkloadSliceSpec::of(1, 9, [&old].into_iter());
    let newer = WorkloadSliceSpec::of(2, 1, [&new].into_iter());
    for order in [[("a", &older), ("b", &newer)], [("b", &newer), ("a", &older)]] {
        let mut view = PeerView::default();
        for (name, spec) in order {
            view.apply(name, spec);
        }
        assert_eq!(**view.pod(&old.pod).unwrap(), new);
        assert!(view.remove("a").is_empty());
        let changes = view.remove("b");
        assert_eq!(changes, [PeerChange { pod: old.pod.clone(), now: None }]);
        assert!(view.is_empty());
    }
}

#[test]
fn a_bad_entry_leaves_its_neighbours() {
    let (a, b) = (workload(1, 0), workload(2, 0));
    let mut spec = WorkloadSliceSpec::of(1, 1, [&a, &b].into_iter());
    spec.workloads[0].profile = 7;
    let mut view = PeerView::default();
    view.apply("s", &spec);
    assert_eq!(view.pods().map(|w| w.pod.clone()).collect::<Vec<_>>(), [b.pod]);
    let fault = view.faults().next().unwrap().1.to_string();
    assert!(fault.contains("ns1/pod-1") && fault.contains("profile 7"), "{fault}");
}

#[test]
fn after_a_list_what_is_not_in_it_is_gone() {
    let (a, b) = (workload(1, 0), workload(2, 0));
    let mut view = PeerView::default();
    view.apply("s", &WorkloadSliceSpec::of(1, 1, [&a].into_iter()));
    view.apply("t", &WorkloadSliceSpec::of(1, 2, [&b].into_iter()));
    let changes = view.retain(&BTreeSet::from(["t".to_owned()]));
    assert_eq!(changes, [PeerChange { pod: a.pod, now: None }]);
}
