//! The built program as people and runtimes run it.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[allow(dead_code, reason = "each test program uses a part of it")]
mod fake_agent;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use fake_agent::{FakeAgent, ok};
use serde_json::{Value, json};

const PROGRAM: &str = env!("CARGO_BIN_EXE_flowloom-cni");

fn program(args: &[&str]) -> Output {
    Command::new(PROGRAM).args(args).env_remove("CNI_COMMAND").stdin(Stdio::null()).output().unwrap()
}

fn health(ready: bool) -> fake_agent::Reply {
    ok(
        json!({"ready": ready, "node": "n1", "version": "0.1.0", "waiting_for": if ready { vec![] } else { vec!["document"] }}),
    )
}

struct Host {
    root: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("bin")).unwrap();
        fs::create_dir(root.path().join("conf")).unwrap();
        Self { root }
    }
    fn run(&self, command: &str, socket: &Path, more: &[&str]) -> Output {
        let mut args = vec![
            command.to_owned(),
            format!("--bin-dir={}", self.root.path().join("bin").display()),
            format!("--conf-dir={}", self.root.path().join("conf").display()),
            format!("--socket={}", socket.display()),
        ];
        args.extend(more.iter().map(|m| (*m).to_owned()));
        program(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }
    fn files(&self, dir: &str) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(self.root.path().join(dir))
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
    fn conflist(&self) -> Value {
        let text = fs::read_to_string(self.root.path().join("conf/10-flowloom.conflist")).unwrap();
        serde_json::from_str(&text).unwrap()
    }
}

#[test]
fn install_waits_for_the_agent_and_writes_both_whole() {
    let asked = AtomicU32::new(0);
    let agent = FakeAgent::start(move |_| health(asked.fetch_add(1, Ordering::Relaxed) >= 2));
    let host = Host::new();
    let out = host.run(
        "install",
        &agent.socket(),
        &[
            "--vpc",
            "blue",
            "--subnet=web",
            "--security-group",
            "a",
            "--security-group",
            "b",
            "--label",
            "k=v",
            "--queue=/q",
            "--capability=ips",
        ],
    );
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(host.files("bin"), ["flowloom-cni", "loopback"]);
    assert_eq!(host.files("conf"), ["10-flowloom.conflist"]);
    let plugin = host.root.path().join("bin/flowloom-cni");
    assert_eq!(fs::metadata(&plugin).unwrap().permissions().mode() & 0o777, 0o755);
    assert_eq!(fs::read(&plugin).unwrap(), fs::read(PROGRAM).unwrap());
    assert_eq!(
        host.conflist(),
        json!({"cniVersion": "1.0.0", "name": "flowloom", "plugins": [{
            "type": "flowloom-cni", "socket": agent.socket(), "queue": "/q", "vpc": "blue", "subnet": "web",
            "security_groups": ["a", "b"], "labels": {"k": "v"}, "capabilities": {"ips": true},
        }]})
    );
    assert_eq!(agent.requests().len(), 3);
}

#[test]
fn no_configuration_appears_before_the_agent_is_ready() {
    let agent = FakeAgent::start(|_| health(false));
    let host = Host::new();
    let out = host.run("install", &agent.socket(), &["--wait", "0"]);
    assert_eq!(out.status.code(), Some(1));
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(text.contains("document") && text.contains("no network configuration"), "{text}");
    assert_eq!(host.files("conf"), Vec::<String>::new());
    assert_eq!(host.files("bin"), ["flowloom-cni", "loopback"]);
}

// Field reports 23: the runtime read a truncated configuration or program after a crash.
#[test]
fn what_a_crashed_install_left_is_no_configuration_and_is_removed() {
    let agent = FakeAgent::start(|_| health(true));
    let host = Host::new();
    let left = [("conf", ".10-flowloom.conflist.4711.tmp"), ("bin", ".flowloom-cni.4711.tmp")];
    for (dir, name) in left {
        fs::write(host.root.path().join(dir).join(name), "{\"cniVersion\":").unwrap();
        // What runtimes read: libcni takes these three endings and nothing else.
        assert!(![".conf", ".conflist", ".json"].iter().any(|e| name.ends_with(e)));
    }
    fs::write(host.root.path().join("conf/.10-flowloom.conflist.notes.tmp"), "someone else's").unwrap();
    assert!(host.run("install", &agent.socket(), &[]).status.success());
    assert_eq!(host.files("conf"), [".10-flowloom.conflist.notes.tmp", "10-flowloom.conflist"]);
    assert_eq!(host.files("bin"), ["flowloom-cni", "loopback"]);
}

#[test]
fn a_truncated_file_in_place_is_replaced_and_an_equal_one_is_left_alone() {
    let agent = FakeAgent::start(|_| health(true));
    let host = Host::new();
    let path = host.root.path().join("conf/10-flowloom.conflist");
    fs::write(&path, "{\"cniVersion\":").unwrap();
    assert!(host.run("install", &agent.socket(), &[]).status.success());
    assert_eq!(host.conflist()["name"], "flowloom");
    let inode = |p: &Path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(p).unwrap());
    let plugin = host.root.path().join("bin/flowloom-cni");
    let before = (inode(&path), inode(&plugin));
    assert!(host.run("install", &agent.socket(), &[]).status.success());
    assert_eq!((inode(&path), inode(&plugin)), before);
}

#[test]
fn uninstall_removes_its_own_and_nothing_else() {
    let agent = FakeAgent::start(|_| health(true));
    let host = Host::new();
    fs::write(host.root.path().join("conf/99-loopback.conf"), "{}").unwrap();
    fs::write(host.root.path().join("bin/loopback"), "x").unwrap();
    assert!(host.run("install", &agent.socket(), &[]).status.success());
    for _ in 0..2 {
        assert!(host.run("uninstall", &agent.socket(), &[]).status.success());
        assert_eq!(host.files("conf"), ["99-loopback.conf"]);
        assert_eq!(host.files("bin"), ["loopback"]);
    }
    fs::write(host.root.path().join("conf/10-flowloom.conflist"), "{\"plugins\":[{\"type\":\"bridge\"}]}")
        .unwrap();
    assert_eq!(host.run("uninstall", &agent.socket(), &[]).status.code(), Some(1));
    assert_eq!(host.files("conf"), ["10-flowloom.conflist", "99-loopback.conf"]);
}

#[test]
fn missing_directories_are_made_and_the_configuration_has_the_name_asked_for() {
    let agent = FakeAgent::start(|_| health(true));
    let root = tempfile::tempdir().unwrap();
    let (bin, conf) = (root.path().join("opt/cni/bin"), root.path().join("etc/cni/net.d"));
    let run = |command: &str| {
        let [bin, conf, socket] = [&bin, &conf, &agent.socket()].map(|p| p.display().to_string());
        let args = [
            command,
            "--bin-dir",
            &bin,
            "--conf-dir",
            &conf,
            "--socket",
            &socket,
            "--conf-name",
            "05-x.conflist",
        ];
        let out = program(&args);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    };
    run("install");
    assert!(bin.join("flowloom-cni").is_file() && conf.join("05-x.conflist").is_file());
    run("uninstall");
    for dir in [&bin, &conf] {
        assert_eq!(fs::read_dir(dir).unwrap().count(), 0, "{}", dir.display());
    }
}

// Runtimes call a plugin `loopback` of their own accord, and some with a version that networks do not have.
#[test]
fn the_link_serves_the_loopback_plugin_of_runtimes() {
    let agent = FakeAgent::start(|_| health(true));
    let host = Host::new();
    assert!(host.run("install", &agent.socket(), &[]).status.success());
    let link = host.root.path().join("bin/loopback");
    assert_eq!(fs::read_link(&link).unwrap(), Path::new("flowloom-cni"));
    let call = |verb: &str, conf: &str| {
        let mut child = Command::new(&link)
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", "c")
            .env("CNI_IFNAME", "lo")
            .env("CNI_NETNS", "")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), conf.as_bytes()).unwrap();
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success(), "{verb}: {}", String::from_utf8_lossy(&out.stdout));
        out.stdout
    };
    let versions: Value = serde_json::from_slice(&call("VERSION", r#"{"cniVersion":"1.0.0"}"#)).unwrap();
    assert_eq!(versions["supportedVersions"], json!(["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]));
    let conf = r#"{"cniVersion":"0.3.1","name":"cni-loopback","type":"loopback"}"#;
    assert!(call("DEL", conf).is_empty());
    assert!(host.run("uninstall", &agent.socket(), &[]).status.success());
    assert_eq!(host.files("bin"), Vec::<String>::new());
}

#[test]
fn wrong_options_are_usage_errors_and_change_nothing() {
    let host = Host::new();
    for more in [
        &["--nope", "1"][..],
        &["--wait", "x"],
        &["--cni-version", "0.3.1"],
        &["--label", "x"],
        &["stray"],
        &["--vpc"],
        &["--queue", "x"],
        &["--capability", "bandwidth"],
        &["--conf-name", "a/b.conflist"],
        &["--conf-name", "flowloom.conf"],
    ] {
        let out = host.run("install", Path::new("/nowhere"), more);
        assert_eq!(out.status.code(), Some(2), "{more:?}: {}", String::from_utf8_lossy(&out.stderr));
    }
    // Passes the options, but makes a configuration the plugin would refuse.
    let out = host.run("install", Path::new("/nowhere"), &["--network", "a b", "--wait", "0"]);
    assert_eq!(out.status.code(), Some(1));
    assert_eq!(host.files("bin"), Vec::<String>::new());
    assert_eq!(program(&["nonsense"]).status.code(), Some(2));
    for help in [&["--help"][..], &["install", "--help"], &[]] {
        assert!(String::from_utf8_lossy(&program(help).stdout).contains("EXAMPLE"));
    }
    assert!(String::from_utf8_lossy(&program(&["--version"]).stdout).contains("1.1.0"));
}

#[test]
fn a_runtime_gets_errors_on_stdout_and_exit_code_1() {
    let out = Command::new(PROGRAM).env("CNI_COMMAND", "ADD").stdin(Stdio::null()).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    let error: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(error["code"], 6);
    assert!(out.stderr.is_empty());
}
