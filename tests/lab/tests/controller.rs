//! flowloom's controller and node duties against a real API server, with the rights of the manifests. Needs what `smoke.rs` needs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use flowloom_lab::{BUSYBOX, Lab, Options};
use flowloom_testkit::{Cmd, eventually};
use serde_json::{Value, json};

/// Longer than the lease, on a machine that also compiles.
const PATIENCE: Duration = Duration::from_secs(90);
const TAINT: &str = "node.flowloom.io/agent-not-ready";

fn bin_dir() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_flowloom-lab")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// A controller beside the lab's own; killed when dropped.
struct Standby(Child);

impl Standby {
    fn start(lab: &Lab) -> Result<Self> {
        let dir = lab.state().join("cp");
        let config = dir.join("standby.yaml");
        let text = json!({
            "identity": "standby",
            "socket": dir.join("standby.sock"),
            "metrics": {"listen": ""},
            "kubernetes": {"kubeconfig": dir.join("controller.kubeconfig")},
        });
        fs::write(&config, text.to_string())?;
        let program = bin_dir().join("flowloom-controller").display().to_string();
        let argv = lab.exec_argv("cp", &[&program, "--config", &config.display().to_string()])?;
        let log = fs::File::create(dir.join("standby.log"))?;
        let child = Command::new(&argv[0])
            .args(&argv[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("starting a standby")?;
        Ok(Self(child))
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn holder(lab: &Lab) -> Result<String> {
    let lease = lab.kubectl_json(&["-n", "flowloom", "get", "lease", "flowloom-controller"])?;
    let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
    ensure!(!holder.is_empty(), "nobody leads");
    Ok(holder.to_owned())
}

/// Slices by name, with their versions.
fn slices(lab: &Lab) -> Result<BTreeMap<String, String>> {
    let list = lab.kubectl_json(&["get", "workloadslices.flowloom.io"])?;
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let items = list["items"].as_array().cloned().unwrap_or_default();
    Ok(items
        .iter()
        .map(|s| (text(&s["metadata"]["name"]), text(&s["metadata"]["resourceVersion"])))
        .collect())
}

fn run_pod(lab: &Lab, name: &str, node: &str) -> Result<String> {
    let serve = format!("mkdir -p /tmp/www; echo {name} >/tmp/www/name; exec httpd -f -p 8080 -h /tmp/www");
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0,
                 "containers": [{"name": "web", "image": BUSYBOX, "command": ["sh", "-c", serve]}]},
    });
    lab.kubectl_input(&["apply", "-f", "-"], &pod.to_string())?;
    lab.kubectl(&["wait", "--for=condition=Ready", "pod", name, "--timeout=90s"])?;
    let pod = lab.kubectl_json(&["get", "pod", name])?;
    Ok(pod["status"]["podIP"].as_str().context("no address")?.to_owned())
}

fn reaches(lab: &Lab, from: &str, ip: &str) -> Result<String> {
    let url = format!("http://{ip}:8080/name");
    let answer = lab.kubectl(&["exec", from, "--", "timeout", "3", "wget", "-qO-", &url])?;
    Ok(answer.trim().to_owned())
}

/// Agents that take other nodes' Pods from slices.
fn read_slices(lab: &Lab) -> Result<()> {
    for node in lab.nodes()? {
        let file = lab.state().join(node.name()).join("agent.yaml");
        let mut config: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
        config["kubernetes"]["peers"] = json!("slices");
        fs::write(&file, config.to_string())?;
        node.restart_agent()?;
    }
    Ok(())
}

/// What the API server answers when the agent of `n1` writes to a node's object; the token is bound to that node as a Pod's there would be.
fn written_as_agent_of_n1(lab: &Lab, node: &str) -> Result<Value> {
    let bound = ["--bound-object-kind=Node", "--bound-object-name=n1"];
    let create = ["-n", "flowloom", "create", "token", "flowloom-agent"];
    let token = lab.kubectl(&[create.as_slice(), &bound].concat())?;
    let (netns, ca) = (lab.netns(), lab.state().join("pki/ca.crt").display().to_string());
    let url = format!("{}/api/v1/nodes/{node}", lab.api_server());
    let proof = format!("Authorization: Bearer {}", token.trim());
    let kind = "Content-Type: application/merge-patch+json";
    let body = r#"{"metadata":{"annotations":{"example.com/seen":"yes"}}}"#;
    // kubectl reads what it patches first, which agents need not.
    let curl = ["curl", "-sS", "--cacert", &ca, "-X", "PATCH", "-H", &proof, "-H", kind, "-d", body, &url];
    let out = Cmd::new(&[&["ip", "netns", "exec", &netns], curl.as_slice()].concat()).run()?.success()?;
    serde_json::from_str(&out.stdout).context(out.stdout)
}

#[test]
fn a_killed_leader_is_replaced_and_agents_that_read_slices_hear_of_new_pods() {
    let options =
        Options { bin_dir: bin_dir(), name: format!("c{}", std::process::id()), ..Options::for_test() };
    let lab = Lab::up(options.flowloom()).unwrap();
    let first = eventually(PATIENCE, || holder(&lab));
    let _standby = Standby::start(&lab).unwrap();
    read_slices(&lab).unwrap();

    let one = run_pod(&lab, "one", "n1").unwrap();
    let two = run_pod(&lab, "two", "n2").unwrap();
    for (from, ip, answer) in [("one", &two, "two"), ("two", &one, "one")] {
        assert_eq!(eventually(PATIENCE, || reaches(&lab, from, ip)), answer);
    }
    let before = eventually(PATIENCE, || {
        let slices = slices(&lab)?;
        ensure!(!slices.is_empty(), "no slice yet");
        Ok(slices)
    });

    // The leader dies without a word.
    let pid = lab
        .status()
        .unwrap()
        .into_iter()
        .find(|(_, service, ..)| service == "flowloom-controller")
        .map(|(_, _, state, _)| state.pid.to_string())
        .unwrap();
    let kill = lab.exec_argv("cp", &["kill", "-9", &pid]).unwrap();
    Cmd::new(&kill).run().unwrap().success().unwrap();
    let second = eventually(PATIENCE, || {
        let now = holder(&lab)?;
        ensure!(now != first, "{now} still holds the lease");
        Ok(now)
    });
    assert_eq!(second, "standby");
    assert_eq!(slices(&lab).unwrap(), before, "a new leader with nothing to say writes nothing");
    assert_eq!(reaches(&lab, "one", &two).unwrap(), "two");

    // It publishes, and agents hear of it: a Pod that came after the first leader's death.
    let three = run_pod(&lab, "three", "n2").unwrap();
    assert_eq!(eventually(PATIENCE, || reaches(&lab, "one", &three)), "three");
    let name = |slices: BTreeMap<String, String>| slices.into_keys().collect::<Vec<_>>();
    assert_eq!(name(slices(&lab).unwrap()), name(before), "it went into the slice that was there");

    // Node duties: the start-up taint goes, others stay, and the condition says that the network is there.
    for taint in [format!("{TAINT}=:NoSchedule"), "example.com/mine=:NoSchedule".to_owned()] {
        lab.kubectl(&["taint", "node", "n2", &taint]).unwrap();
    }
    eventually(PATIENCE, || {
        let node = lab.kubectl_json(&["get", "node", "n2"])?;
        let taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
        let keys: Vec<_> = taints.iter().filter_map(|t| t["key"].as_str()).collect();
        ensure!(keys == ["example.com/mine"], "{keys:?}");
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let network = conditions.iter().find(|c| c["type"] == "NetworkUnavailable");
        ensure!(network.is_some_and(|c| c["status"] == "False"), "{network:?}");
        Ok(())
    });
    // An agent's token is good for its own node's object alone.
    let own = written_as_agent_of_n1(&lab, "n1").unwrap();
    assert_eq!(own["kind"], "Node", "{own}");
    let refused = written_as_agent_of_n1(&lab, "n2").unwrap();
    assert_eq!(refused["code"], 403, "{refused}");
    assert!(refused["message"].as_str().is_some_and(|m| m.contains("its own node only")), "{refused}");
}
