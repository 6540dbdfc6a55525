//! Input that nobody means well with: nothing panics, and what degrades is right afterwards.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::sync::LazyLock;

use flowloom_model::{
    Format, Lock, Timestamp, World, allocate, complete, conditions, degrade, load, parse, validate,
};
use proptest::prelude::*;

const GOOD: &str = include_str!("../../../examples/two-tenants.yaml");

static GOOD_WORLD: LazyLock<World> = LazyLock::new(|| parse(GOOD.as_bytes(), Format::Yaml).unwrap().world);

/// Values that fit somewhere else than where they land.
const TOKENS: &[&str] = &[
    "red",
    "blue",
    "default",
    "web",
    "client",
    "app",
    "n1",
    "n2",
    "nope",
    "10.1.0.10",
    "10.1.0.0/24",
    "10.1.0.1",
    "fd10:1::10",
    "fd10:1::/64",
    "0.0.0.0/0",
    "::/0",
    "255.255.255.255",
    "10.1.0.0..10.1.0.255",
    "/",
    "..",
    "-1",
    "0",
    "1",
    "16384",
    "16385",
    "65536",
    "99999999999999999999999999999999999999",
    "1e400",
    ".nan",
    "~",
    "true",
    "yes",
    "[]",
    "{}",
    "\"\"",
    "tcp",
    "icmp",
    "ingress",
    "egress",
    "allow",
    "name",
    "vpc",
    "ips",
    "cidrs",
    "rules",
    "remote_group",
    "named_ports",
    "\u{0}",
    "\u{feff}",
    "é",
];

fn check(bytes: &[u8], format: Format) {
    let parsed = parse(bytes, format);
    if let Ok(p) = &parsed {
        let mut faults = validate(&p.world);
        p.locate(&mut faults);
        let a = allocate(&p.world, &Lock::default(), Timestamp(5));
        if faults.iter().all(flowloom_model::Fault::keeps_object) {
            let text = a.lock.to_yaml().unwrap();
            assert_eq!(Lock::parse(text.as_bytes()).unwrap(), a.lock);
            let (done, waiting) = complete(&p.world, &a.lock);
            assert_eq!(waiting.len(), a.faults.len());
            assert_eq!(done, a.world);
            assert_eq!(validate(&done).len(), faults.len());
        }
        settled(&p.world, faults);
    }
    match load(bytes, format, None, None) {
        Ok(l) => {
            let left: Vec<_> = validate(&l.world).into_iter().filter(|f| !f.keeps_object()).collect();
            assert_eq!(left, []);
            let shown = conditions(&l.faults, 1, Timestamp(1));
            assert_eq!(shown.is_empty(), l.faults.iter().all(|f| f.object.is_none()));
            // A document without a fault is taken as it is, and the other way round.
            assert!(parsed.is_ok() || !l.faults.is_empty());
        }
        Err(faults) => {
            assert!(!faults.is_empty());
            assert!(parsed.is_err());
        }
    }
    if let Ok(l) = load(bytes, format, None, Some(&GOOD_WORLD)) {
        let left: Vec<_> = validate(&l.world).into_iter().filter(|f| !f.keeps_object()).collect();
        assert_eq!(left, []);
    }
    let _either = Lock::parse(bytes);
}

fn settled(world: &World, faults: Vec<flowloom_model::Fault>) {
    let clean = !faults.iter().any(|f| !f.keeps_object());
    let d = degrade(world, faults, None);
    assert_eq!(clean, d.world == *world);
    let left: Vec<_> = validate(&d.world).into_iter().filter(|f| !f.keeps_object()).collect();
    assert_eq!(left, []);
}

/// Replaces words of the good document.
fn words(edits: &[(usize, usize)]) -> String {
    let word = |c: char| c.is_alphanumeric() || "._/:-".contains(c);
    let mut starts = Vec::new();
    let mut inside = false;
    for (i, c) in GOOD.char_indices() {
        if word(c) && !inside {
            starts.push(i);
        }
        inside = word(c);
    }
    let mut text = GOOD.to_owned();
    let mut edits: Vec<(usize, usize)> = edits.iter().map(|&(w, t)| (starts[w % starts.len()], t)).collect();
    edits.sort_unstable();
    edits.dedup_by_key(|e| e.0);
    for (at, token) in edits.into_iter().rev() {
        let end = text[at..].find(|c: char| !word(c)).map_or(text.len(), |n| at + n);
        text.replace_range(at..end, TOKENS[token % TOKENS.len()]);
    }
    text
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        check(&bytes, Format::Json);
        check(&bytes, Format::Yaml);
    }

    #[test]
    fn arbitrary_text_never_panics(text in "[ -~\n]{0,200}") {
        check(text.as_bytes(), Format::Json);
        check(text.as_bytes(), Format::Yaml);
    }

    #[test]
    fn mutated_bytes_of_a_good_document_never_panic(
        edits in proptest::collection::vec((any::<usize>(), any::<u8>(), 0u8..3), 1..12)
    ) {
        let mut bytes = GOOD.as_bytes().to_vec();
        for (at, byte, how) in edits {
            let at = at % bytes.len();
            match how {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => drop(bytes.remove(at)),
            }
        }
        check(&bytes, Format::Yaml);
    }

    #[test]
    fn misplaced_words_and_lines_never_panic(
        edits in proptest::collection::vec((any::<usize>(), any::<usize>()), 0..6),
        moved in proptest::collection::vec((any::<usize>(), any::<usize>()), 0..4),
    ) {
        let text = words(&edits);
        let mut lines: Vec<&str> = text.lines().collect();
        for (from, to) in moved {
            let line = lines[from % lines.len()];
            lines.insert(to % lines.len(), line);
        }
        check(lines.join("\n").as_bytes(), Format::Yaml);
    }
}

/// Fault for fault what the generator above found, and what its kind would find.
#[test]
fn known_troublemakers_never_panic() {
    let deep_list = format!("version: 1\nvpcs: {}", "[".repeat(5000));
    let deep_map = format!("version: 1\nvpcs: {}", "{a: ".repeat(5000));
    let long_key = format!("version: 1\n{}: 1", "k".repeat(100_000));
    let long_value = format!("version: 1\nvpcs: [{{name: {}}}]", "v".repeat(100_000));
    for text in [
        deep_list.as_str(),
        deep_map.as_str(),
        long_key.as_str(),
        long_value.as_str(),
        "? [a]\n: b",
        "version: 1\n? {a: b}\n: c",
        "!!map {version: 1}",
        "!!binary aGk=",
        "&a [*a]",
        "*a",
        "%YAML 1.1\n---\nversion: 1",
        "version: !!int \"1\"",
        "version: 0x1",
        "version: 1\nvpcs: [{name: [a]}]",
        "version: 1\nvpcs: [~]",
        "version: 1\nvpcs: [{}]",
        "version: 1\nsubnets: [{name: s, vpc: default, cidr: 0.0.0.0/0}]",
        "version: 1\nsubnets: [{name: s, vpc: default, cidr: \"::/0\"}]",
        "version: 1\nsubnets: [{name: s, vpc: default, cidrs: []}]",
        "{\"version\": 1, \"version\": 1}",
        "{\"version\": 1e999}",
        "\"version\"",
        "version: 1\nsubnets: [{name: s, vpc: default, cidr: \"fd00::/64\", exclude_cidrs: [\"fd00::..fd00::ffff:ffff:ffff:ffff\"]}]",
    ] {
        check(text.as_bytes(), Format::Yaml);
        check(text.as_bytes(), Format::Json);
    }
}
