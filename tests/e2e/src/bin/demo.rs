//! The demonstration: two nodes, two tenants with the same addresses, and a table of measured packets beside what `flowloom policy explain` says.
//! Every row's rule is then taken away, and the row must flip.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;
use comfy_table::Table;
use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use flowloom_api::v1::{Explanation, Verdict};
use flowloom_netlink::Netns;
use flowloom_testkit::{Mode, Netfilter, TcpClient, TcpServer};
use flowloom_tests_e2e::{Document, Lab, Reached, Workload};
use serde_json::json;

/// Shows what flowloom does on this machine: two nodes as namespaces, two VPCs with the same addresses.
#[derive(Parser)]
struct Args {
    /// Leave everything running until Enter or a signal, and say how to look around.
    #[arg(long)]
    keep: bool,
}

/// Long enough for a packet on one machine, short enough for a table.
const PATIENCE: Duration = Duration::from_millis(400);

/// One row: who connects to whom.
struct Row {
    from: &'static str,
    to: &'static str,
    port: u16,
    family: u8,
    shows: &'static str,
}

const fn row(from: &'static str, to: &'static str, port: u16, family: u8, shows: &'static str) -> Row {
    Row { from, to, port, family, shows }
}

const ROWS: &[Row] = &[
    row("red/client", "red/web", 8080, 4, "same node, allowed by label"),
    row("blue/client", "blue/web", 8080, 4, "same addresses, other tenant, opposite policy"),
    row("red/remote", "red/web", 8080, 4, "across nodes, allowed by label"),
    row("blue/remote", "blue/web", 8080, 4, "across nodes, other tenant"),
    row("red/remote", "red/web", 8080, 6, "across nodes, IPv6"),
    row("red/client", "red/web", 9000, 4, "tier 0 beats a tenant's allow"),
    row("red/client", "red/web", 9001, 6, "rejected: the client is told"),
    row("red/web", "red/db", 5432, 4, "allowed by CIDR"),
    row("red/remote", "red/db", 5432, 4, "same node, one address out of the CIDR"),
    row("red/client", "red/db", 5432, 4, "dropped by its own egress"),
    row("blue/client", "blue/remote", 7000, 4, "across nodes, port range"),
    row("blue/client", "blue/remote", 7443, 4, "one port out of that range"),
];

fn document(lab: &Lab) -> Document {
    let endpoint = |vpc: &str, name: &str, node: &str, host: u8, groups: &[&str], role: &str| {
        json!({"vpc": vpc, "name": name, "subnet": "app", "node": node, "ips": [format!("10.1.0.{host}"), format!("fd10:1::{host}")],
               "security_groups": groups, "labels": {"role": role}})
    };
    let tcp = |id: &str, priority: u16, direction: &str, from: u16, to: u16, action: &str| json!({"id": id, "priority": priority, "direction": direction, "protocol": "tcp", "ports": [{"from": from, "to": to}], "action": action});
    let with = |mut rule: serde_json::Value, key: &str, value: serde_json::Value| {
        rule[key] = value;
        rule
    };
    let subnet = |vpc: &str| json!({"vpc": vpc, "name": "app", "cidrs": ["10.1.0.0/24", "fd10:1::/64"]});
    let open_egress =
        |id: &str| json!({"id": id, "priority": 16000, "direction": "egress", "action": "allow"});
    lab.empty_document()
        .with("vpcs", json!([{"name": "red"}, {"name": "blue"}]))
        .with("subnets", json!([subnet("red"), subnet("blue")]))
        .with("endpoints", json!([
            endpoint("red", "web", "n1", 10, &["web", "platform"], "web"),
            endpoint("red", "client", "n1", 20, &["client"], "client"),
            endpoint("red", "remote", "n2", 30, &["remote"], "client"),
            endpoint("red", "db", "n2", 40, &["db"], "db"),
            endpoint("blue", "web", "n1", 10, &["web"], "web"),
            endpoint("blue", "client", "n1", 20, &[], "client"),
            endpoint("blue", "remote", "n2", 30, &["remote"], "trusted"),
        ]))
        .with("security_groups", json!([
            {"vpc": "red", "name": "web", "rules": [
                with(tcp("clients", 100, "ingress", 8080, 8080, "allow"), "remote_endpoint_selector", json!({"role": "client"})),
                tcp("admin", 10, "ingress", 9000, 9000, "allow"),
                tcp("told", 20, "ingress", 9001, 9001, "reject"),
                tcp("untold", 30, "ingress", 9001, 9001, "allow"),
                tcp("out", 100, "egress", 5432, 5432, "allow"),
            ]},
            {"vpc": "red", "name": "platform", "tier": 0, "default_deny_ingress": false, "default_deny_egress": false, "rules": [
                tcp("no-admin", 16384, "ingress", 9000, 9000, "drop"),
            ]},
            {"vpc": "red", "name": "client", "default_deny_ingress": false, "rules": [
                with(tcp("no-db", 50, "egress", 5432, 5432, "drop"), "remote_cidr", json!("10.1.0.40/32")),
                open_egress("rest"),
            ]},
            {"vpc": "red", "name": "remote", "default_deny_ingress": false, "rules": [open_egress("all")]},
            {"vpc": "red", "name": "db", "default_deny_egress": false, "rules": [
                with(tcp("app", 100, "ingress", 5432, 5432, "allow"), "remote_cidr", json!("10.1.0.0/27")),
                with(tcp("not-remote", 90, "ingress", 5432, 5432, "drop"), "remote_cidr", json!("10.1.0.30/32")),
            ]},
            {"vpc": "blue", "name": "web", "default_deny_egress": false, "rules": [
                with(tcp("no-clients", 100, "ingress", 8080, 8080, "drop"), "remote_endpoint_selector", json!({"role": "client"})),
                tcp("others", 200, "ingress", 8080, 8080, "allow"),
            ]},
            {"vpc": "blue", "name": "remote", "default_deny_egress": false, "rules": [
                tcp("range", 200, "ingress", 7000, 7999, "allow"),
                tcp("not-7443", 100, "ingress", 7443, 7443, "drop"),
            ]},
        ]))
}

/// A row's measurement and explanation.
struct Seen {
    reached: Reached,
    explained: Explanation,
    micros: u128,
}

impl Seen {
    fn agrees(&self) -> bool {
        let expected = match self.explained.verdict {
            Verdict::Allow => Reached::Yes,
            Verdict::Drop => Reached::Silence,
            Verdict::Reject => Reached::Refused,
        };
        self.reached == expected
    }

    /// The rule that decided: of the side that denies, else of the ingress side, else of egress.
    fn rule(&self) -> Option<String> {
        let sides = [&self.explained.egress, &self.explained.ingress];
        let denying = sides.iter().filter_map(|s| s.as_ref()).find(|j| j.verdict != Verdict::Allow);
        let named = |j: &&flowloom_api::v1::Judgement| j.rule.is_some();
        let deciding = denying.or_else(|| sides.iter().rev().filter_map(|s| s.as_ref()).find(named))?;
        deciding.rule.as_ref().map(|r| r.name.clone())
    }
}

struct Demo {
    lab: Lab,
    workloads: BTreeMap<String, Workload>,
    servers: BTreeMap<(String, SocketAddr), TcpServer>,
}

impl Demo {
    fn start() -> Result<Self> {
        let lab = Lab::builder().netfilter(Netfilter::ForwardDrop).start()?;
        lab.apply(&document(&lab))?;
        let mut demo = Self { lab, workloads: BTreeMap::new(), servers: BTreeMap::new() };
        for row in ROWS {
            for name in [row.from, row.to] {
                if !demo.workloads.contains_key(name) {
                    demo.workloads.insert(name.to_owned(), demo.lab.workload(name)?);
                }
            }
            let target = &demo.workloads[row.to];
            let address = SocketAddr::new(target.ip(row.family)?, row.port);
            if let Entry::Vacant(free) = demo.servers.entry((row.to.to_owned(), address)) {
                free.insert(TcpServer::start(&target.netns, address, Mode::Echo)?);
            }
        }
        Ok(demo)
    }

    fn measure(&self, row: &Row) -> Result<Seen> {
        let address = SocketAddr::new(self.workloads[row.to].ip(row.family)?, row.port);
        let accepted = |demo: &Self| -> BTreeMap<_, u64> {
            demo.servers.iter().map(|(k, s)| (k.clone(), s.accepted())).collect()
        };
        let before = accepted(self);
        let start = Instant::now();
        let reached = self.workloads[row.from].reach_tcp(address, PATIENCE)?;
        let micros = start.elapsed().as_micros();
        // Who answered? Only the tenant's own server may have.
        for (key, count) in accepted(self) {
            let own = key == (row.to.to_owned(), address);
            if count != before[&key] && !(own && reached == Reached::Yes) {
                bail!("{} to {}: {} at {} accepted a connection", row.from, row.to, key.0, key.1);
            }
        }
        let explained = self.lab.explain(row.from, row.to, "tcp", Some(row.port), row.family)?;
        Ok(Seen { reached, explained, micros })
    }

    /// An established connection whose rule is taken away stops, and goes on when the rule is back.
    fn revoked(&self, out: &mut String) -> Result<bool> {
        let row = &ROWS[0];
        let mut document = document(&self.lab);
        let address = SocketAddr::new(self.workloads[row.to].ip(row.family)?, row.port);
        let mut client = TcpClient::connect(&self.workloads[row.from].netns, address, PATIENCE)?;
        client.round_trip(b"packet", PATIENCE)?;
        let rule = document.take_rule("red/web/clients")?;
        self.lab.apply(&document)?;
        let stopped = client.round_trip(b"packet", PATIENCE).is_err();
        document.rules("red", "web")?.push(rule);
        self.lab.apply(&document)?;
        // TCP sends the lost bytes again; the same bytes each time, since the first answer is that of the lost ones.
        let again = client.round_trip(b"packet", Duration::from_secs(5)).is_ok();
        *out = format!(
            "established connection {} -> {}:{}: rule taken away: {}; rule back: {}",
            row.from,
            row.to,
            row.port,
            if stopped { "stopped" } else { "STILL PASSES" },
            if again { "goes on" } else { "STILL BLOCKED" }
        );
        Ok(stopped && again)
    }
}

fn run(args: &Args) -> Result<bool> {
    let begin = Instant::now();
    let demo = Demo::start()?;
    println!(
        "two nodes with agents, {} workloads in two VPCs that share 10.1.0.0/24 and fd10:1::/64; ready after {:.1} s\n",
        demo.workloads.len(),
        begin.elapsed().as_secs_f32()
    );
    let mut table = Table::new();
    table.load_style(UTF8_HORIZONTAL_ONLY);
    table.set_header([
        "from",
        "to",
        "what it shows",
        "measured",
        "explain",
        "deciding rule",
        "without the rule",
    ]);
    let mut good = true;
    for row in ROWS {
        let seen = demo.measure(row)?;
        let rule = seen.rule().with_context(|| {
            format!("{} to {}:{} was decided by no rule: {:?}", row.from, row.to, row.port, seen.explained)
        })?;
        let mut document = document(&demo.lab);
        document.take_rule(&rule)?;
        demo.lab.apply(&document)?;
        let without = demo.measure(row)?;
        demo.lab.apply(&self::document(&demo.lab))?;
        let flipped = (seen.reached == Reached::Yes) != (without.reached == Reached::Yes);
        let agree = seen.agrees() && without.agrees();
        good &= flipped && agree;
        let measured = if seen.reached == Reached::Silence {
            "silence".to_owned()
        } else {
            format!("{} ({} us)", seen.reached.word(), seen.micros)
        };
        table.add_row([
            row.from.to_owned(),
            format!("{} tcp/{} v{}", row.to, row.port, row.family),
            row.shows.to_owned(),
            measured,
            format!("{:?}{}", seen.explained.verdict, if agree { "" } else { " DISAGREES" }).to_lowercase(),
            rule,
            format!("{}{}", without.reached.word(), if flipped { "" } else { " DID NOT FLIP" }),
        ]);
    }
    println!("{table}\n");
    let mut line = String::new();
    good &= demo.revoked(&mut line)?;
    println!("{line}\n");
    println!(
        "{} in {:.1} s",
        if good { "every row as explained, every row flips" } else { "SOMETHING IS WRONG" },
        begin.elapsed().as_secs_f32()
    );
    if args.keep {
        look_around(&demo)?;
    }
    Ok(good)
}

/// Says how to look, and waits.
fn look_around(demo: &Demo) -> Result<()> {
    println!("\nTwo nodes are running. Look around, for example:");
    let flowloom = flowloom_tests_e2e::binary("flowloom")?;
    for agent in &demo.lab.agents {
        println!("  export FLOWLOOM_SOCKET={}   # {}", agent.socket.display(), agent.name);
    }
    for command in [
        "status",
        "endpoint list -o wide",
        "policy explain red/client red/web --protocol tcp --port 8080",
        "trace red/client red/web --protocol tcp --port 9000",
        "observe --last 20",
        "ct list --vpc red",
        "policy rules",
    ] {
        println!("  {flowloom} {command}");
    }
    let netns: &Netns = &demo.workloads["red/client"].netns;
    println!("  nsenter --net={} ping -c1 10.1.0.10", netns.path().display());
    println!("  $EDITOR {}   # both agents follow it", demo.lab.document.display());
    println!("\nEnter ends it and removes everything.");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(())
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("demo: {e:#}");
            ExitCode::FAILURE
        }
    }
}
