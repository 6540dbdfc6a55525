//! `validate` and `apply`: files in, files out.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../../cni/tests/fake_agent/mod.rs"]
mod fake_agent;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use assert_cmd::Command;
use fake_agent::{FakeAgent, Reply, ok};
use flowloom_api::v1::digest;
use serde_json::{Value, json};

const OPEN: &str = "\
version: 1
nodes:
  - {name: n1, addresses: [192.0.2.1]}
vpcs:
  - {name: red}
  - {name: blue, vni: 77}
subnets:
  - {vpc: red, name: web, cidr: 10.0.0.0/24}
  - {vpc: blue, name: web, cidr: 10.0.0.0/24}
endpoints:
  - {vpc: red, name: a, subnet: web, node: n1}
  - {vpc: red, name: b, subnet: web, node: n1}
  - {vpc: blue, name: a, subnet: web, node: n1, ip: 10.0.0.9}
";

const THREE_FAULTS: &str = "\
version: 1
vpcs: [{name: red, vni: 99999999}]
subnets:
  - {vpc: red, name: web, cidr: 10.0.0.1/24}
nodez: []
";

struct Dir(tempfile::TempDir);

impl Dir {
    fn new(document: &str) -> Self {
        let dir = Self(tempfile::tempdir().unwrap());
        fs::write(dir.path("net.yaml"), document).unwrap();
        dir
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }
    fn files(&self) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(self.0.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
    fn run(&self, line: &str) -> (i32, String, String) {
        self.run_with(line, Path::new("/nowhere/agent.sock"))
    }
    fn run_with(&self, line: &str, socket: &Path) -> (i32, String, String) {
        let output = Command::cargo_bin("flowloom")
            .unwrap()
            .current_dir(self.0.path())
            .env("FLOWLOOM_SOCKET", socket)
            .args(line.split_whitespace())
            .output()
            .unwrap();
        let text = |b: Vec<u8>| String::from_utf8(b).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }
    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.run(&format!("{line} -o json")).1).unwrap()
    }
}

#[test]
fn validate_shows_every_fault_of_every_file_at_once() {
    let dir = Dir::new(THREE_FAULTS);
    fs::write(dir.path("good.yaml"), OPEN).unwrap();
    let (code, out, err) = dir.run("validate net.yaml good.yaml");
    assert_eq!((code, err.as_str()), (1, ""));
    for part in [
        "net.yaml: 3 faults",
        "nodez",
        "99999999",
        "10.0.0.1/24",
        "10.0.0.0/24",
        "good.yaml: ok (1 node, 3 VPCs, 2 subnets, 3 endpoints)",
    ] {
        assert!(out.contains(part), "{out} lacks {part}");
    }
    let (_, text, _) = dir.run("validate net.yaml good.yaml -o json");
    let reports: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&reports[0]["ok"], &reports[1]["ok"]), (&json!(false), &json!(true)));
    assert_eq!(reports[0]["faults"].as_array().unwrap().len(), 3);
    assert!(reports[0]["faults"].as_array().unwrap().iter().any(|f| f["suggestion"] == "nodes"));
    assert_eq!(dir.run("validate good.yaml").0, 0);
    let (code, _, err) = dir.run("validate none.yaml");
    assert!(code == 1 && err.contains("none.yaml"), "{err}");
}

#[test]
fn apply_completes_what_is_left_open_and_the_second_run_changes_nothing() {
    let dir = Dir::new(OPEN);
    let (code, out, err) = dir.run("apply net.yaml");
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert!(out.contains("assigned  vpc red: vni 2\n"), "{out}");
    assert!(out.contains("assigned  endpoint red/a: ip 10.0.0.2, mac "), "{out}");
    assert!(!out.contains("blue"), "what the document says is not assigned: {out}");
    assert!(out.contains("wrote     net.yaml.lock.yaml\n"), "{out}");
    assert_eq!(dir.files(), ["net.yaml", "net.yaml.lock.yaml"]);
    assert_eq!(dir.read("net.yaml"), OPEN, "the user's file is the user's");
    let lock = dir.read("net.yaml.lock.yaml");
    let (code, out, _) = dir.run("apply net.yaml");
    assert_eq!(code, 0);
    assert!(out.contains("unchanged net.yaml.lock.yaml") && !out.contains("assigned"), "{out}");
    assert_eq!(dir.read("net.yaml.lock.yaml"), lock);
}

#[test]
fn what_is_assigned_stays_when_neighbours_come_and_go() {
    let dir = Dir::new(OPEN);
    dir.run("apply net.yaml");
    let ip = |report: &Value, name: &str| {
        let of = |c: &&Value| c["object"]["endpoint"]["name"] == name;
        report["changes"]
            .as_array()
            .unwrap()
            .iter()
            .find(of)
            .map(|c| (c["action"].clone(), c["value"].clone()))
    };
    let without_a = OPEN.replace(
        "  - {vpc: red, name: a, subnet: web, node: n1}\n",
        "  - {vpc: red, name: c, subnet: web, node: n1}\n",
    );
    fs::write(dir.path("net.yaml"), without_a).unwrap();
    let dry = dir.json("apply net.yaml --dry-run");
    assert_eq!(dry["dry_run"], true);
    assert_eq!(dry["written"], json!([]));
    let before = dir.read("net.yaml.lock.yaml");
    let report = dir.json("apply net.yaml");
    assert_eq!(report["changes"], dry["changes"], "a dry run says what the run then does");
    assert_ne!(dir.read("net.yaml.lock.yaml"), before);
    assert_eq!(ip(&report, "a"), Some((json!("released"), json!("ip 10.0.0.2"))));
    assert_eq!(ip(&report, "b"), None);
    // Released a moment ago: not handed out again while others are free.
    let (action, value) = ip(&report, "c").unwrap();
    assert_eq!(
        (action, value.as_str().unwrap().starts_with("ip 10.0.0.4,")),
        (json!("assigned"), true),
        "{value}"
    );
}

#[test]
fn a_fault_keeps_everything_as_it_was() {
    let dir = Dir::new(THREE_FAULTS);
    let (code, out, err) = dir.run("apply net.yaml --to installed.yaml");
    assert_eq!(code, 1);
    assert!(
        out.contains("3 faults") && out.contains("nodez") && err.contains("nothing was written"),
        "{out}{err}"
    );
    assert_eq!(dir.files(), ["net.yaml"]);
    assert_eq!(
        dir.run("apply net.yaml --force-partial").0,
        1,
        "a fault in no object: nothing can be relied on"
    );
    assert_eq!(dir.files(), ["net.yaml"]);
}

#[test]
fn an_exhausted_subnet_is_a_fault_that_names_endpoint_and_subnet() {
    let dir =
        Dir::new(&OPEN.replace("cidr: 10.0.0.0/24}\n  - {vpc: blue", "cidr: 10.0.0.0/30}\n  - {vpc: blue"));
    let (code, out, _) = dir.run("apply net.yaml");
    assert_eq!(code, 1);
    assert!(out.contains("endpoint red/b") && out.contains("AddressPoolExhausted"), "{out}");
    assert_eq!(dir.files(), ["net.yaml"]);
}

#[test]
fn force_partial_applies_the_rest_and_gives_nothing_of_a_bad_object_away() {
    let dir = Dir::new(OPEN);
    dir.run("apply net.yaml");
    let bad = OPEN.replace(
        "name: a, subnet: web, node: n1}\n  - {vpc: red, name: b",
        "name: a, subnet: gone, node: n1}\n  - {vpc: red, name: b",
    ) + "  - {vpc: red, name: d, subnet: web, node: n1}\n";
    fs::write(dir.path("net.yaml"), &bad).unwrap();
    let (code, out, err) = dir.run("apply net.yaml");
    assert!(code == 1 && out.contains("gone") && err.contains("--force-partial"), "{out}{err}");
    let before = dir.read("net.yaml.lock.yaml");
    let (code, out, _) = dir.run("apply net.yaml --force-partial --to installed.yaml");
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("gone") && out.contains("assigned  endpoint red/d: ip 10.0.0.4"), "{out}");
    let after = dir.read("net.yaml.lock.yaml");
    assert!(
        before.contains("10.0.0.2") && after.contains("10.0.0.2"),
        "red/a may still run with it: {after}"
    );
    assert!(!out.contains("released"), "{out}");
    assert_eq!(dir.read("installed.yaml"), bad);
}

#[test]
fn a_broken_lock_is_named_and_not_overwritten() {
    let dir = Dir::new(OPEN);
    fs::write(dir.path("net.yaml.lock.yaml"), "version: 9\n").unwrap();
    let (code, out, _) = dir.run("apply net.yaml");
    assert!(code == 1 && out.contains("net.yaml.lock.yaml"), "{out}");
    assert_eq!(dir.read("net.yaml.lock.yaml"), "version: 9\n");
}

#[test]
fn installed_pairs_are_equal_and_a_lost_lock_is_taken_from_where_it_is_in_force() {
    let dir = Dir::new(OPEN);
    let (code, out, _) = dir.run("apply net.yaml --to live.yaml");
    assert_eq!(code, 0, "{out}");
    assert_eq!(dir.files(), ["live.yaml", "live.yaml.lock.yaml", "net.yaml", "net.yaml.lock.yaml"]);
    assert_eq!(dir.read("live.yaml"), OPEN);
    assert_eq!(dir.read("live.yaml.lock.yaml"), dir.read("net.yaml.lock.yaml"));
    let lock = dir.read("live.yaml.lock.yaml");
    fs::remove_file(dir.path("net.yaml.lock.yaml")).unwrap();
    let (_, out, _) = dir.run("apply net.yaml --to live.yaml");
    assert!(out.contains("unchanged live.yaml\n") && out.contains("wrote     net.yaml.lock.yaml"), "{out}");
    assert_eq!(dir.read("net.yaml.lock.yaml"), lock);
    let (code, _, err) = dir.run("apply net.yaml --to live.json");
    assert!(code == 2 && err.contains("format"), "{err}");
}

fn status(applied: &str, error: &str) -> Reply {
    ok(json!({
        "node": "n1", "version": "0", "abi_version": 1, "started_ms": 1, "ready": true, "forwarding": "ebpf",
        "document": {"path": "/x", "generation": 5, "applied_generation": 5, "loaded_ms": 1, "applied_digest": applied, "error": error},
        "reconcile": {"passes": 1, "last_writes": 0, "total_writes": 0, "last_duration_us": 1, "errors": []},
        "endpoints": {"total": 1, "ready": 0, "waiting": 0, "failed": 1},
        "conntrack": {"established": 0, "capacity": 1, "swept": 0}, "events": {"read": 0, "lost": 0, "streams": 0}, "degraded": [],
    }))
}

#[test]
fn wait_ends_when_every_agent_has_exactly_these_contents_in_force() {
    let dir = Dir::new(OPEN);
    let agent = |slow: usize| {
        let (document, lock) = (dir.path("live.yaml"), dir.path("live.yaml.lock.yaml"));
        let asked = std::sync::atomic::AtomicUsize::new(0);
        FakeAgent::start(move |_| {
            // An agent that is about to restart, has the old contents, and then the new ones.
            match asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
                0 => Reply::HangUp,
                n if n < slow => status("0123456789abcdef", ""),
                _ => status(&digest(&fs::read(&document).unwrap(), Some(&fs::read(&lock).unwrap())), ""),
            }
        })
    };
    let (one, two) = (agent(3), agent(6));
    let line = format!(
        "apply net.yaml --to live.yaml --wait 30s --agent {} --agent {}",
        one.socket().display(),
        two.socket().display()
    );
    let (code, out, err) = dir.run(&line);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert_eq!(out.matches("in force  on node n1, generation 5").count(), 2, "{out}");
    assert!(out.contains("1 endpoint failed"), "{out}");
    assert_eq!((one.requests().len(), two.requests().len()), (4, 7));
}

#[test]
fn an_agent_that_does_not_follow_is_exit_code_5_with_its_reason() {
    let dir = Dir::new(OPEN);
    let agent = FakeAgent::start(|_| status("0123456789abcdef", "live.yaml cannot be read"));
    let (code, out, err) = dir.run_with("apply net.yaml --to live.yaml --wait 100ms", &agent.socket());
    assert_eq!(code, 5);
    assert!(out.contains("wrote     live.yaml"), "{out}");
    assert!(err.contains("live.yaml cannot be read") && err.contains("n1"), "{err}");
    // Nobody there at all.
    let (code, _, err) = dir.run("apply net.yaml --wait 100ms");
    assert!(code == 5 && err.contains("/nowhere/agent.sock"), "{err}");
}

#[test]
fn a_second_apply_waits_for_its_turn() {
    let dir = Dir::new(OPEN);
    let turn = fs::File::open(dir.0.path()).unwrap();
    turn.lock().unwrap();
    let mut second = std::process::Command::new(env!("CARGO_BIN_EXE_flowloom"))
        .args(["apply", "net.yaml"])
        .current_dir(dir.0.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // The kernel lists who waits for a lock.
    let pid = second.id().to_string();
    let waits = || {
        let locks = fs::read_to_string("/proc/locks").unwrap();
        locks.lines().any(|l| l.contains("-> FLOCK") && l.split_whitespace().any(|w| w == pid))
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    while !waits() {
        assert!(Instant::now() < deadline, "it never waited");
        assert_eq!(second.try_wait().unwrap(), None, "it did not wait");
        std::thread::yield_now();
    }
    assert_eq!(dir.files(), ["net.yaml"]);
    drop(turn);
    assert!(second.wait().unwrap().success());
    assert_eq!(dir.files(), ["net.yaml", "net.yaml.lock.yaml"]);
}
