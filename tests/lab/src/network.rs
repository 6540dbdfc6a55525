//! Networks of a lab: one bridge in a namespace of its own, a port on it for everybody.

use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result};
use flowloom_testkit::Cmd;

use crate::addresses::{self, UNDERLAY_LENGTHS, WORLD};
use crate::paths::netns;

const BRIDGE_NS: &str = "net";
/// The outside host: a network namespace and nothing else.
pub(crate) const OUTSIDE: &str = "ext";

/// Makes the underlay with the outside host and these members.
pub(crate) fn create(lab: &str, members: &[(String, [IpAddr; 2])]) -> Result<()> {
    add_netns(lab, BRIDGE_NS)?;
    // The bridge's frames are nobody's business: this namespace has no rules, and shall not look for any.
    let no_rules = ["net.bridge.bridge-nf-call-iptables=0", "net.bridge.bridge-nf-call-ip6tables=0"];
    for setting in no_rules.iter().filter(|s| Path::new("/proc/sys").join(sysctl_path(s)).exists()) {
        run_in(&netns(lab, BRIDGE_NS), &["sysctl", "-qw", setting])?;
    }
    batch(&netns(lab, BRIDGE_NS), "link add br0 type bridge forward_delay 0\nlink set br0 up\n")?;
    plug(lab, OUTSIDE, addresses::outside())?;
    let world = format!("address add {}/32 dev lo\naddress add {}/128 dev lo nodad\n", WORLD[0], WORLD[1]);
    batch(&netns(lab, OUTSIDE), &world)?;
    forward(lab, OUTSIDE)?;
    let [v4, v6] = addresses::outside();
    for (member, ips) in members {
        plug(lab, member, *ips)?;
        batch(&netns(lab, member), &format!("route add default via {v4}\nroute add default via {v6}\n"))?;
        if member != "cp" {
            forward(lab, member)?;
        }
    }
    Ok(())
}

fn plug(lab: &str, member: &str, [v4, v6]: [IpAddr; 2]) -> Result<()> {
    add_netns(lab, member)?;
    let (own, net) = (netns(lab, member), netns(lab, BRIDGE_NS));
    batch(&own, &format!("link add eth0 type veth peer name {member} netns {net}\nlink set eth0 up\n"))?;
    batch(&net, &format!("link set {member} master br0 up\n"))?;
    let [len4, len6] = UNDERLAY_LENGTHS;
    batch(&own, &format!("address add {v4}/{len4} dev eth0\naddress add {v6}/{len6} dev eth0 nodad\n"))
}

fn add_netns(lab: &str, member: &str) -> Result<()> {
    let name = netns(lab, member);
    run(&["ip", "netns", "add", &name])?;
    batch(&name, "link set lo up\n")
}

fn forward(lab: &str, member: &str) -> Result<()> {
    let on = ["sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"];
    run_in(&netns(lab, member), &on)
}

/// Routes in a member's namespace.
pub(crate) fn add_routes(lab: &str, member: &str, routes: &[(String, IpAddr)]) -> Result<()> {
    let lines: String = routes.iter().map(|(to, via)| format!("route replace {to} via {via}\n")).collect();
    batch(&netns(lab, member), &lines)
}

/// Removes every namespace of a lab.
pub(crate) fn remove(lab: &str) -> Result<()> {
    let prefix = netns(lab, "");
    let Ok(dir) = std::fs::read_dir("/run/netns") else { return Ok(()) };
    let mut result = Ok(());
    for entry in dir.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(&prefix) {
            result = result.and(run(&["ip", "netns", "delete", &name]));
        }
    }
    result
}

/// Processes in a lab's namespaces: clients started by hand.
pub(crate) fn processes(lab: &str) -> Vec<u32> {
    let prefix = netns(lab, "");
    let Ok(dir) = std::fs::read_dir("/run/netns") else { return Vec::new() };
    dir.flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .filter(|n| n.starts_with(&prefix))
        .filter_map(|name| Cmd::new(&["ip", "netns", "pids", &name]).run().ok())
        .flat_map(|out| out.stdout.lines().filter_map(|l| l.parse().ok()).collect::<Vec<u32>>())
        .collect()
}

fn sysctl_path(setting: &str) -> String {
    setting.split('=').next().unwrap_or_default().replace('.', "/")
}

fn batch(netns: &str, lines: &str) -> Result<()> {
    let out = Cmd::new(&["ip", "-n", netns, "-batch", "-"]).input(lines).run()?;
    out.success().with_context(|| format!("in {netns}:\n{lines}")).map(drop)
}

fn run_in(netns: &str, argv: &[&str]) -> Result<()> {
    run(&[&["ip", "netns", "exec", netns], argv].concat())
}

fn run(argv: &[&str]) -> Result<()> {
    Cmd::new(argv).run()?.success().map(drop)
}
