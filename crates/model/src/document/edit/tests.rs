//! An edit gives what reading the whole document gives, or it is refused.

use serde_json::{Value, json};

use super::*;
use crate::{Format, Loaded, load};

fn lock() -> Vec<u8> {
    b"version: 1\nvpcs: {red: 7, blue: 8}\nendpoints:\n- {vpc: red, name: free, ips: [10.0.0.77]}\nreleased: []\nreleased_vnis: []\n".to_vec()
}

fn whole(text: &[u8], last: Option<&World>) -> Result<Loaded, Vec<crate::Fault>> {
    load(text, Format::Json, Some(&lock()), last)
}

/// A generator (splitmix64, public domain).
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

fn endpoint(i: usize, rng: &mut Rng) -> Value {
    let mut e = json!({"vpc": *rng.pick(&["red", "red", "red", "blue"]), "name": format!("e{i}"), "subnet": "s", "node": *rng.pick(&["n1", "n2"]),
        "ip": format!("10.0.0.{}", 2 + i + rng.below(2) * 100), "labels": {"role": *rng.pick(&["a", "b", "{}", "\u{fc},]\\\""])}, "security_groups": *rng.pick(&[&["g"][..], &[], &["g", "h"]])});
    match rng.below(12) {
        0 => e["named_ports"] = json!([{"name": "http", "protocol": "tcp", "port": 80}]),
        1 => e["mac"] = json!(format!("02:00:00:00:00:{:02x}", rng.below(4))),
        2 => e["device"] = json!(format!("tap{}", rng.below(3))),
        _ => {}
    }
    e
}

fn rule(i: usize, rng: &mut Rng) -> Value {
    let mut r = json!({"id": format!("r{i}"), "priority": 1 + rng.below(9), "direction": *rng.pick(&["ingress", "egress"]), "protocol": "tcp", "action": "allow"});
    match rng.below(12) {
        0 | 1 => r["remote_group"] = json!("h"),
        2 | 3 => r["remote_cidr"] = json!("192.0.2.0/24"),
        4 => r["remote_cidr_group"] = json!("c"),
        5 if rng.below(4) == 0 => r["remote_group"] = json!("nobody"),
        6 => r["remote_endpoint_selector"] = json!({"role": "a"}),
        _ => {}
    }
    r
}

fn document(rng: &mut Rng) -> Value {
    let endpoints: Vec<Value> = (0..4 + rng.below(6)).map(|i| endpoint(i, rng)).collect();
    let mut doc = json!({"version": 1, "nodes": [{"name": "n1", "address": "198.51.100.1"}, {"name": "n2", "address": "198.51.100.2"}],
        "vpcs": [{"name": "red"}, {"name": "blue"}], "subnets": [{"vpc": "red", "name": "s", "cidr": "10.0.0.0/24"}, {"vpc": "blue", "name": "s", "cidr": "10.0.0.0/24"}],
        "endpoints": endpoints, "cidr_groups": [{"vpc": "red", "name": "c", "cidrs": ["203.0.113.0/24"]}],
        "security_groups": [
            {"vpc": "red", "name": "g", "rules": (0..rng.below(4)).map(|i| rule(i, rng)).collect::<Vec<_>>()},
            {"vpc": "red", "name": "h"}, {"vpc": "blue", "name": "g"}, {"vpc": "blue", "name": "h"}]});
    if rng.below(3) == 0 {
        doc["endpoints"]
            .as_array_mut()
            .unwrap()
            .push(json!({"vpc": "red", "name": "free", "subnet": "s", "node": "n1"}));
    }
    doc
}

/// An edit as people and tools make them.
fn change(doc: &mut Value, rng: &mut Rng) {
    let list = doc["endpoints"].as_array_mut().unwrap();
    let at = rng.below(list.len());
    match rng.below(16) {
        0..=3 => {
            list[at]["labels"] = json!({"role": *rng.pick(&["a", "b", "c"]), "n": rng.below(3).to_string()})
        }
        4 => list[at] = endpoint(at, rng),
        5 => list[at]["ip"] = json!(format!("10.0.0.{}", rng.below(256))),
        6 => drop(list.remove(at)),
        7 => list.insert(at, endpoint(rng.below(14), rng)),
        8 => list.swap(0, at),
        9 => list[at]["security_groups"] = json!([*rng.pick(&["g", "h", "nobody"])]),
        10 => {
            let twin = list[at].clone();
            list.push(twin);
        }
        11 => list[at]["subnet"] = json!("nowhere"),
        12 => doc["subnets"][0]["exclude_cidrs"] = json!([format!("10.0.0.{}", 2 + rng.below(9))]),
        13 => {
            doc["cidr_groups"][0]["cidrs"] = json!(*rng.pick(&[&["203.0.113.0/25"][..], &["203.0.113.1/25"]]))
        }
        _ => {
            doc["security_groups"][rng.below(4)]["rules"] = (0..rng.below(4)).map(|i| rule(i, rng)).collect()
        }
    }
}

/// Damage: bytes lost, doubled, moved or replaced.
fn damage(text: &mut Vec<u8>, rng: &mut Rng) {
    let at = rng.below(text.len());
    let to = (at + rng.below(40)).min(text.len());
    match rng.below(4) {
        0 => drop(text.drain(at..to)),
        1 => {
            let part = text[at..to].to_vec();
            let place = rng.below(text.len());
            text.splice(place..place, part);
        }
        2 => text[at] = *rng.pick(b"{}[],:\"\\ x0\xff"),
        _ => text.insert(at, *rng.pick(b"{}[],:\"\\ \n")),
    }
}

fn text(doc: &Value, pretty: bool) -> Vec<u8> {
    if pretty { serde_json::to_vec_pretty(doc).unwrap() } else { serde_json::to_vec(doc).unwrap() }
}

/// Takes an edit and compares it with the whole reading; whether it was taken.
fn agrees(basis: &mut Basis, world: &mut World, new: &[u8]) -> bool {
    let before = world.clone();
    let full = whole(new, Some(&before));
    match basis.edit(new.to_vec(), world) {
        Err(text) => {
            assert_eq!((text.as_slice(), &*world), (new, &before));
            false
        }
        Ok(edited) => {
            let shown = String::from_utf8_lossy(new).into_owned();
            let full = full.unwrap_or_else(|f| panic!("{f:#?}\n{shown}"));
            assert_eq!(full.faults, [], "{shown}");
            assert!(full.self_contained);
            assert_eq!(*world, full.world, "{shown}");
            let differ = |key: &&EndpointKey| before.endpoints.get(*key) != world.endpoints.get(*key);
            let keys = || before.endpoints.keys().chain(world.endpoints.keys());
            assert_eq!(edited.endpoints, keys().filter(differ).cloned().collect());
            let rules =
                before.security_groups != world.security_groups || before.cidr_groups != world.cidr_groups;
            assert_eq!(edited.rules, rules);
            assert_eq!(
                (&before.nodes, &before.vpcs, &before.subnets),
                (&world.nodes, &world.vpcs, &world.subnets)
            );
            let anew = Basis::new(new.to_vec()).unwrap();
            assert_eq!((basis.text(), &basis.items), (new, &anew.items));
            true
        }
    }
}

#[test]
fn an_edit_gives_what_the_whole_reading_gives() {
    let (mut taken, mut right, mut tried) = (0, 0, 0);
    for seed in 0..300 {
        let mut rng = Rng(seed);
        let mut doc = document(&mut rng);
        let pretty = rng.below(2) == 0;
        let mut held: Option<(Basis, World, Value)> = None;
        for _ in 0..12 {
            let mut new = text(&doc, pretty);
            let damaged = rng.below(4) == 0;
            if damaged {
                damage(&mut new, &mut rng);
            }
            let full = whole(&new, held.as_ref().map(|(_, world, _)| world));
            if let Some((basis, world, _)) = &mut held {
                tried += 1;
                right += usize::from(full.as_ref().is_ok_and(|l| l.self_contained));
                taken += usize::from(agrees(basis, world, &new));
            }
            // What is in force from here on; a damaged text is followed by one without the damage.
            if let Ok(loaded) = full
                && loaded.self_contained
            {
                held = Basis::new(new).ok().map(|basis| (basis, loaded.world, doc.clone()));
            } else if let Some((_, _, good)) = &held {
                doc = good.clone();
            } else {
                doc = document(&mut rng);
            }
            change(&mut doc, &mut rng);
        }
    }
    println!("{tried} edits, {right} without a fault, {taken} taken");
    assert!(taken * 2 > right && tried > right, "{tried} {right} {taken}");
}

fn sample() -> Value {
    json!({"version": 1, "nodes": [{"name": "n1", "address": "198.51.100.1"}], "vpcs": [{"name": "red"}],
        "subnets": [{"vpc": "red", "name": "s", "cidr": "10.0.0.0/24"}],
        "endpoints": [
            {"vpc": "red", "name": "a", "subnet": "s", "node": "n1", "ip": "10.0.0.10", "security_groups": ["g"]},
            {"vpc": "red", "name": "b", "subnet": "s", "node": "n1", "ip": "10.0.0.11", "labels": {"x": "1"}},
            {"vpc": "red", "name": "free", "subnet": "s", "node": "n1"}],
        "security_groups": [{"vpc": "red", "name": "g", "rules": [{"id": "r", "priority": 5, "direction": "ingress", "action": "allow", "remote_endpoint_selector": {"x": "1"}}]}]})
}

fn held(doc: &Value) -> (Basis, World) {
    let text = text(doc, false);
    let loaded = whole(&text, None).unwrap();
    assert!(loaded.self_contained, "{:#?}", loaded.faults);
    (Basis::new(text).unwrap(), loaded.world)
}

fn taken(change: impl FnOnce(&mut Value)) -> bool {
    let mut doc = sample();
    let (mut basis, mut world) = held(&doc);
    change(&mut doc);
    agrees(&mut basis, &mut world, &text(&doc, false))
}

#[test]
fn labels_addresses_and_rules_change_alone() {
    assert!(taken(|d| d["endpoints"][1]["labels"]["x"] = json!("2")));
    assert!(taken(|d| d["endpoints"][0]["ip"] = json!("10.0.0.99")));
    assert!(taken(|d| d["security_groups"][0]["rules"][0]["priority"] = json!(6)));
    assert!(taken(|d| drop(d["endpoints"].as_array_mut().unwrap().remove(1))));
    // An address of the lock stays with its endpoint.
    assert!(taken(|d| d["endpoints"][2]["labels"] = json!({"x": "1"})));
}

#[test]
fn an_address_of_the_lock_that_another_endpoint_takes_is_read_whole() {
    assert!(!taken(|d| d["endpoints"][1]["ip"] = json!("10.0.0.77")));
    assert!(!taken(|d| drop(d["endpoints"][1].as_object_mut().unwrap().remove("ip"))));
}

#[test]
fn a_subnet_that_leaves_an_unchanged_endpoint_outside_is_read_whole() {
    assert!(!taken(|d| d["subnets"][0]["cidr"] = json!("10.0.9.0/24")));
    assert!(!taken(|d| d["subnets"][0]["exclude_cidrs"] = json!(["10.0.0.11"])));
}

#[test]
fn the_same_object_elsewhere_is_moved_and_twice_is_a_fault() {
    assert!(taken(|d| d["endpoints"].as_array_mut().unwrap().swap(0, 2)));
    assert!(!taken(|d| {
        let twin = d["endpoints"][0].clone();
        d["endpoints"].as_array_mut().unwrap().push(twin);
    }));
    // Twice under one name, with other contents.
    assert!(!taken(|d| d["endpoints"][1]["name"] = json!("a")));
}

#[test]
fn text_that_only_looks_like_items_is_read_whole() {
    let (mut basis, mut world) = held(&sample());
    let old = String::from_utf8(basis.text().to_vec()).unwrap();
    for (from, to) in [
        (r#""labels":{"x":"1"}"#, r#""labels":{"x":"1"}}],"routes":[{"#),
        (r#""labels":{"x":"1"}"#, r#""labels":{"x":"1","x":"2"}"#),
        (r#""labels":{"x":"1"}"#, r#""labels":{"x":"1"},"nonsense":1"#),
        (r#""labels":{"x":"1"}"#, r#""labels":{"x":"1"}},{"#),
        (r#""labels":{"x":"1"},"#, ""),
        (r#""name":"b","#, r#""name":"b",,"#),
    ] {
        let new = old.replacen(from, to, 1);
        assert_ne!(new, old);
        let took = agrees(&mut basis, &mut world, new.as_bytes());
        assert_eq!(took, to.is_empty(), "{to}");
    }
}

#[test]
fn a_group_that_comes_or_goes_and_a_named_port_are_read_whole() {
    assert!(!taken(|d| d["security_groups"].as_array_mut().unwrap().clear()));
    assert!(!taken(|d| d["security_groups"]
        .as_array_mut()
        .unwrap()
        .push(json!({"vpc": "red", "name": "h"}))));
    assert!(!taken(|d| d["security_groups"][0]["rules"][0]["named_ports"] = json!(["http"])));
}

#[test]
fn yaml_has_no_basis() {
    assert!(Basis::new(b"version: 1\n".to_vec()).is_err());
    assert!(Basis::new(b"{\"version\": 1, \"version\": 1}".to_vec()).is_ok_and(|b| b.items.is_empty()));
}
