//! Completing documents.

use proptest::prelude::*;

use super::*;
use crate::{Format, Mac, parse, validate};

fn world(text: &str) -> World {
    match parse(text.as_bytes(), Format::Yaml) {
        Ok(p) => p.world,
        Err(f) => panic!("{f:#?}"),
    }
}

fn doc(rest: &str) -> World {
    world(&format!(
        "version: 1\nnodes: [{{name: n1, address: 192.0.2.1}}, {{name: n2, address: 192.0.2.2}}]\n{rest}"
    ))
}

const DUAL: &str = "vpcs: [{name: red}]\nsubnets: [{name: s, vpc: red, cidrs: [10.0.0.0/24, \"fd00::/64\"], exclude_cidrs: [10.0.0.3..10.0.0.4]}]\n";

/// A world with `endpoints` by name in the dual-stack subnet, without addresses unless given as `name=ip`.
fn dual(endpoints: &[&str]) -> World {
    let list: Vec<String> = endpoints
        .iter()
        .map(|e| match e.split_once('=') {
            Some((name, ip)) => format!("{{name: {name}, vpc: red, subnet: s, node: n1, ip: \"{ip}\"}}"),
            None => format!("{{name: {e}, vpc: red, subnet: s, node: n1}}"),
        })
        .collect();
    doc(&format!("{DUAL}endpoints: [{}]", list.join(", ")))
}

fn ips(w: &World, name: &str) -> Vec<String> {
    w.endpoints[&format!("red/{name}").parse().unwrap()].ips.iter().map(ToString::to_string).collect()
}

fn vni(w: &World, name: &str) -> Option<u32> {
    w.vpcs[&name.parse().unwrap()].vni.map(Vni::number)
}

fn run(w: &World, lock: &Lock, now: u64) -> Allocation {
    let a = allocate(w, lock, Timestamp(now));
    assert_eq!(
        Lock::parse(a.lock.to_yaml().unwrap().as_bytes()),
        Ok(a.lock.clone()),
        "the text says the same"
    );
    a
}

#[test]
fn what_the_document_leaves_open_is_completed_with_the_lowest_free_values() {
    let w = dual(&["a", "b=10.0.0.2", "c"]);
    let a = run(&w, &Lock::default(), 0);
    assert_eq!(a.faults, []);
    assert_eq!(ips(&a.world, "a"), ["10.0.0.5", "fd00::2"]);
    assert_eq!(ips(&a.world, "b"), ["10.0.0.2"]);
    assert_eq!(ips(&a.world, "c"), ["10.0.0.6", "fd00::3"]);
    assert_eq!((vni(&a.world, "default"), vni(&a.world, "red")), (Some(1), Some(2)));
    assert_eq!(validate(&a.world), []);
    let text = a.lock.to_yaml().unwrap();
    let mac = Mac::derive(&"red".parse().unwrap(), "10.0.0.5".parse().unwrap());
    assert!(text.contains(&mac.to_string()) && text.starts_with("# "), "{text}");
}

#[test]
fn a_second_run_changes_nothing_and_later_objects_move_no_earlier_one() {
    let first = run(&dual(&["m", "n"]), &Lock::default(), 0);
    let again = run(&dual(&["m", "n"]), &first.lock, 1_000_000);
    assert_eq!((&again.lock, &again.world), (&first.lock, &first.world));
    // New names that sort before and between.
    let more = run(&dual(&["a", "m", "mm", "n"]), &first.lock, 5);
    for name in ["m", "n"] {
        assert_eq!(ips(&more.world, name), ips(&first.world, name));
    }
    assert_eq!(ips(&more.world, "a"), ["10.0.0.6", "fd00::4"]);
    assert_eq!(more.lock.released.len(), 0);
}

#[test]
fn a_released_address_is_not_given_to_another_within_the_cool_down() {
    let first = run(&dual(&["a", "b"]), &Lock::default(), 0);
    // a goes and c comes in one run.
    let second = run(&dual(&["b", "c"]), &first.lock, 100);
    assert_eq!(ips(&second.world, "c"), ["10.0.0.6", "fd00::4"]);
    assert_eq!(second.lock.released.len(), 2);
    let third = run(&dual(&["b", "c", "d"]), &second.lock, 100 + COOL_DOWN - 1);
    assert_eq!(ips(&third.world, "d"), ["10.0.0.7", "fd00::5"]);
    let fourth = run(&dual(&["b", "c", "d", "e"]), &third.lock, 100 + COOL_DOWN);
    assert_eq!(ips(&fourth.world, "e"), ["10.0.0.2", "fd00::2"]);
    assert_eq!(fourth.lock.released.len(), 0);
    // When nothing else is free, the rest ends early.
    let tiny = |name: &str| {
        doc(&format!(
            "subnets: [{{name: s, vpc: default, cidr: 10.0.0.0/31}}]\nendpoints: [{{name: {name}, vpc: default, subnet: s, node: n1}}]"
        ))
    };
    let a = run(&tiny("a"), &Lock::default(), 0);
    let b = run(&tiny("b"), &a.lock, 1);
    assert_eq!(b.world.endpoints.values().next().unwrap().ips, ["10.0.0.1".parse::<IpAddr>().unwrap()]);
}

#[test]
fn the_document_wins_over_the_lock() {
    let first = run(&dual(&["a"]), &Lock::default(), 0);
    // Another endpoint claims a's address by name: a moves.
    let second = run(&dual(&["a", "b=10.0.0.2"]), &first.lock, 10);
    assert_eq!(ips(&second.world, "a"), ["10.0.0.5", "fd00::2"]);
    // An exclusion that comes later takes the address away as well.
    let excluded = doc(&format!(
        "{}endpoints: [{{name: a, vpc: red, subnet: s, node: n1}}]",
        DUAL.replace("10.0.0.3..10.0.0.4", "10.0.0.2..10.0.0.9")
    ));
    let third = run(&excluded, &first.lock, 10);
    assert_eq!(ips(&third.world, "a"), ["10.0.0.10", "fd00::2"]);
    assert!(third.lock.released.contains_key(&("red".parse().unwrap(), "10.0.0.2".parse().unwrap())));
}

#[test]
fn an_endpoint_that_changes_subnet_leaves_its_address_to_rest() {
    let two = |sub: &str, more: &str| {
        doc(&format!(
            "vpcs: [{{name: red}}]\nsubnets: [{{name: s, vpc: red, cidr: 10.0.0.0/24}}, {{name: t, vpc: red, cidr: 10.0.1.0/24}}]\nendpoints: [{{name: a, vpc: red, subnet: {sub}, node: n1}}{more}]"
        ))
    };
    let first = run(&two("s", ""), &Lock::default(), 0);
    let moved = run(&two("t", ", {name: b, vpc: red, subnet: s, node: n1}"), &first.lock, 10);
    assert_eq!(ips(&moved.world, "a"), ["10.0.1.2"]);
    assert_eq!(ips(&moved.world, "b"), ["10.0.0.3"]);
    assert_eq!(moved.lock.released.len(), 1);
}

#[test]
fn a_subnet_that_gains_a_family_gives_it_to_its_endpoints() {
    let with = |cidrs: &str| {
        doc(&format!(
            "vpcs: [{{name: red}}]\nsubnets: [{{name: s, vpc: red, cidrs: {cidrs}}}]\nendpoints: [{{name: a, vpc: red, subnet: s, node: n1}}]"
        ))
    };
    let first = run(&with("[10.0.0.0/24]"), &Lock::default(), 0);
    let second = run(&with("[10.0.0.0/24, \"fd00::/64\"]"), &first.lock, 1);
    assert_eq!(ips(&second.world, "a"), ["10.0.0.2", "fd00::2"]);
    // All or nothing: never silently one family of two.
    let full = run(&with("[10.0.0.0/31, \"fd00::/64\"]"), &Lock::default(), 0);
    assert_eq!(ips(&full.world, "a").len(), 2);
    let two = doc(
        "vpcs: [{name: red}]\nsubnets: [{name: s, vpc: red, cidrs: [10.0.0.0/31, \"fd00::/64\"]}]\nendpoints: [{name: a, vpc: red, subnet: s, node: n1}, {name: b, vpc: red, subnet: s, node: n1}]",
    );
    let over = run(&two, &Lock::default(), 0);
    assert_eq!(ips(&over.world, "b"), [""; 0]);
    assert_eq!((over.faults.len(), over.faults[0].code), (1, Reason::AddressPoolExhausted));
    assert!(over.faults[0].message.contains("endpoint red/b"), "{}", over.faults[0]);
}

#[test]
fn the_document_never_gets_an_address_that_a_node_hands_out() {
    let with = |more: &str| {
        doc(&format!(
            "vpcs: [{{name: red}}]\nsubnets: [{{name: s, vpc: red, cidr: 10.0.0.0/29, {more}}}]\nendpoints: [{{name: a, vpc: red, subnet: s, node: n1}}]"
        ))
    };
    let ranged = run(&with("cni_ranges: [{node: n1, cidr: 10.0.0.0/30}]"), &Lock::default(), 0);
    assert_eq!(ips(&ranged.world, "a"), ["10.0.0.4"]);
    let whole = run(&with("node: n1"), &Lock::default(), 0);
    assert_eq!(ips(&whole.world, "a"), [""; 0]);
    assert!(whole.faults[0].message.contains("cni_ranges"), "{}", whole.faults[0]);
}

#[test]
fn numbers_are_unique_stable_and_rest_when_released() {
    let v = |list: &str| doc(&format!("vpcs: [{list}]"));
    let first = run(&v("{name: b}, {name: c, vni: 3}, {name: d}"), &Lock::default(), 0);
    assert_eq!((vni(&first.world, "b"), vni(&first.world, "d")), (Some(2), Some(4)));
    let second = run(&v("{name: a}, {name: c, vni: 3}, {name: d}"), &first.lock, 10);
    assert_eq!((vni(&second.world, "a"), vni(&second.world, "d")), (Some(5), Some(4)));
    assert_eq!(second.lock.released_vnis.keys().map(|v| v.number()).collect::<Vec<_>>(), [2]);
    let third = run(&v("{name: a}, {name: c, vni: 3}, {name: d}, {name: e}"), &second.lock, 10 + COOL_DOWN);
    assert_eq!(vni(&third.world, "e"), Some(2));
    // The document takes a number that the lock had given away.
    let taken = run(&v("{name: d}, {name: x, vni: 4}"), &first.lock, 10);
    assert_eq!(vni(&taken.world, "x"), Some(4));
    assert_ne!(vni(&taken.world, "d"), Some(4));
}

#[test]
fn an_agent_completes_from_the_lock_and_assigns_nothing() {
    let w = dual(&["a", "b"]);
    let lock = run(&dual(&["a"]), &Lock::default(), 0).lock;
    let (done, faults) = complete(&w, &lock);
    assert_eq!(
        (ips(&done, "a"), ips(&done, "b")),
        (vec!["10.0.0.2".to_owned(), "fd00::2".to_owned()], Vec::new())
    );
    assert_eq!(vni(&done, "red"), Some(2));
    assert_eq!(
        faults.iter().map(|f| (f.path.as_str(), f.code)).collect::<Vec<_>>(),
        [("endpoints[red/b].ips", Reason::AwaitingAddress)]
    );
    // Without any lock everything waits, but the default VPC has its number.
    let (none, faults) = complete(&w, &Lock::default());
    assert_eq!((vni(&none, "default"), vni(&none, "red"), faults.len()), (Some(1), None, 3));
    // A lock that is out of date gives no address twice.
    let (stale, _) = complete(&dual(&["a", "b=10.0.0.2"]), &lock);
    assert_eq!(ips(&stale, "a"), [""; 0]);
}

#[test]
fn a_broken_lock_is_refused() {
    for bad in [
        "version: 2\nvpcs: {}\nendpoints: []\nreleased: []\nreleased_vnis: []\n",
        "version: 1\nvpcs: {a: 2, b: 2}\nendpoints: []\nreleased: []\nreleased_vnis: []\n",
        "version: 1\nvpcs: {a: 2, a: 3}\nendpoints: []\nreleased: []\nreleased_vnis: []\n",
        "version: 1\nvpcs: {a: 0}\nendpoints: []\nreleased: []\nreleased_vnis: []\n",
        "version: 1\nvpcs: {}\nendpoints: [{vpc: a, name: e, ips: [10.0.0.1], mac: ~}, {vpc: a, name: f, ips: [10.0.0.1], mac: ~}]\nreleased: []\nreleased_vnis: []\n",
        "version: 1\nvpcs: {}\nendpoints: [{vpc: a, name: e, ips: [], mac: ~}, {vpc: a, name: e, ips: [], mac: ~}]\nreleased: []\nreleased_vnis: []\n",
        "version: 1\nvpcs: {}\nendpoints: []\nreleased: []\nreleased_vnis: []\nmore: 1\n",
        "<<<<<<< HEAD\nversion: 1\n",
        "version: 1\n",
    ] {
        assert!(Lock::parse(bad.as_bytes()).is_err(), "{bad}");
    }
    assert_eq!(Lock::parse(b""), Ok(Lock::default()));
    assert_eq!(Lock::parse(Lock::default().to_yaml().unwrap().as_bytes()), Ok(Lock::default()));
}

#[test]
fn ten_thousand_endpoints_are_completed_in_linear_time() {
    let mut w = doc(
        "vpcs: [{name: red}]\nsubnets: [{name: s, vpc: red, cidr: 10.0.0.0/16, exclude_cidrs: [10.0.0.0/20]}]\nendpoints: [{name: a, vpc: red, subnet: s, node: n1}]",
    );
    let template = w.endpoints.values().next().unwrap().clone();
    for i in 0..10_000 {
        let mut e = (*template).clone();
        e.name = format!("e{i}").parse().unwrap();
        w.endpoints.insert(e.key(), e.into());
    }
    let start = std::time::Instant::now();
    let first = allocate(&w, &Lock::default(), Timestamp(0));
    let second = allocate(&w, &first.lock, Timestamp(1));
    assert_eq!(second.lock, first.lock);
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}

proptest! {
    /// Runs over changing documents: no address twice, all inside, none excluded, unchanged endpoints keep theirs.
    #[test]
    fn allocation_is_unique_inside_and_stable(
        rounds in proptest::collection::vec((proptest::collection::btree_set(0u8..40, 0..40), 0u64..90), 1..6),
        exclude in proptest::collection::vec((2u8..60, 0u8..9), 0..4),
    ) {
        let holes: Vec<String> = exclude.iter().map(|(a, n)| format!("10.0.0.{a}..10.0.0.{}", (a + n).min(62))).collect();
        let (mut lock, mut now) = (Lock::default(), 1000);
        for (names, wait) in rounds {
            now += wait;
            let list: Vec<String> = names.iter().map(|n| format!("{{name: e{n}, vpc: red, subnet: s, node: n1}}")).collect();
            let w = doc(&format!("vpcs: [{{name: red}}]\nsubnets: [{{name: s, vpc: red, cidr: 10.0.0.0/26, exclude_cidrs: {holes:?}}}]\nendpoints: [{}]", list.join(", ")));
            let a = allocate(&w, &lock, Timestamp(now));
            prop_assert_eq!(validate(&a.world), vec![]);
            let got: Vec<_> = a.world.endpoints.values().filter(|e| !e.ips.is_empty()).collect();
            prop_assert_eq!(got.len() + a.faults.len(), names.len());
            for e in got {
                if let Some(before) = lock.endpoints.get(&e.key()) {
                    prop_assert_eq!(&e.ips, before);
                }
            }
            let again = allocate(&w, &a.lock, Timestamp(now));
            prop_assert_eq!(&again.lock, &a.lock);
            lock = a.lock;
        }
    }
}
