//! Quarantine, freeze and rollback, by packets: open streams and new ones, over changes of rules and a killed agent.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use flowloom_testkit::{PATIENCE, UdpReceiver, UdpSender, eventually};
use flowloom_tests_e2e::{Document, Lab};
use serde_json::json;

const PORT: u16 = 7100;
const INTERVAL: Duration = Duration::from_millis(1);

/// `a` sends to `b` and `c`, which let datagrams in by the same rule.
fn document(lab: &Lab) -> Document {
    let endpoint = |name: &str, host: u8, groups: serde_json::Value| json!({"vpc": "red", "name": name, "subnet": "app", "node": "n1", "ip": format!("10.1.0.{host}"), "security_groups": groups});
    lab.empty_document()
        .with("vpcs", json!([{"name": "red"}]))
        .with("subnets", json!([{"vpc": "red", "name": "app", "cidr": "10.1.0.0/24"}]))
        .with("endpoints", json!([endpoint("a", 10, json!([])), endpoint("b", 20, json!(["g"])), endpoint("c", 30, json!(["g"]))]))
        .with("security_groups", json!([{"vpc": "red", "name": "g", "default_deny_egress": false, "rules": [
            {"id": "stream", "priority": 10, "direction": "ingress", "protocol": "udp", "ports": [{"from": PORT, "to": PORT}], "action": "allow"}]}]))
}

/// A numbered stream between two endpoints.
struct Stream {
    receiver: UdpReceiver,
    sender: UdpSender,
    mark: u64,
}

impl Stream {
    fn start(lab: &Lab, from: &str, to: &str, mark: u64) -> Result<Self> {
        let (from, to) = (lab.workload(&format!("red/{from}"))?, lab.workload(&format!("red/{to}"))?);
        let receiver = UdpReceiver::start(&to.netns, SocketAddr::new(to.ip(4)?, PORT))?;
        let sender = UdpSender::start(&from.netns, None, receiver.addr(), INTERVAL, mark, 64)?;
        let stream = Self { receiver, sender, mark };
        stream.goes_on("at the start");
        Ok(stream)
    }

    /// A number that is sent from now on, as are all above it.
    fn border(&self) -> u64 {
        self.sender.sent() + 1
    }

    fn arrived_from(&self, border: u64) -> usize {
        let ours = |a: &&flowloom_testkit::Arrival| a.mark == self.mark && a.number >= border;
        self.receiver.arrivals().iter().filter(ours).count()
    }

    /// Datagrams sent from now on arrive.
    fn goes_on(&self, when: &str) {
        let border = self.border();
        eventually(PATIENCE, || match self.arrived_from(border) {
            0..20 => Err(format!("{when}: {} of {}", self.arrived_from(border), self.sender.sent())),
            _ => Ok(()),
        });
    }

    /// Of the datagrams from `border` on, more than a few of which are sent by the end, none arrives.
    fn stopped_at(&self, border: u64, when: &str) {
        let end = self.border() + 300;
        eventually(PATIENCE, || if self.sender.sent() > end { Ok(()) } else { Err(self.sender.sent()) });
        assert_eq!(self.arrived_from(border), 0, "{when}: datagrams arrived that were sent after the answer");
    }
}

fn policy(lab: &Lab, args: &[&str]) -> Result<String> {
    let line: Vec<&str> = ["policy"].iter().chain(args).copied().collect();
    Ok(lab.flowloom(0, &line)?.success()?.stdout)
}

/// Kinds of the conditions of `b`, with their messages.
fn conditions(lab: &Lab) -> Result<Vec<(String, String)>> {
    let info = lab.agents.first().context("no agent")?.client().endpoint("red", "b")?;
    Ok(info.conditions.into_iter().map(|c| (c.kind, c.message)).collect())
}

#[test]
fn quarantine_stops_open_streams_and_outlives_the_agent_and_changes_of_rules() -> Result<()> {
    let mut lab = Lab::builder().nodes(1).start()?;
    let open = document(&lab);
    lab.apply(&open)?;
    let (to_b, to_c) = (Stream::start(&lab, "a", "b", 1)?, Stream::start(&lab, "a", "c", 2)?);

    let said = policy(&lab, &["quarantine", "red/b", "--ingress", "--reason", "ticket 4711"])?;
    let border = to_b.border();
    assert!(said.starts_with("red/b is in quarantine: nothing passes in ingress (revision "), "{said}");
    to_b.stopped_at(border, "in quarantine");
    to_c.goes_on("beside a quarantine");
    let own = Stream::start(&lab, "b", "a", 3)?;
    own.goes_on("the other direction");
    let shown = conditions(&lab)?;
    assert!(
        matches!(&shown[..], [(kind, message)] if kind == "Quarantined" && message.contains("ticket 4711")),
        "{shown:?}"
    );
    let answer = lab.explain("red/a", "red/b", "udp", Some(PORT), 4)?;
    assert!(answer.summary.contains("it is in quarantine"), "{answer:?}");
    let kernel = answer.ingress.and_then(|j| j.kernel).context("no answer of the kernel")?;
    assert_eq!(kernel.verdict, Some(flowloom_api::v1::Verdict::Drop));
    let entries = policy(&lab, &["entries", "red/b"])?;
    assert!(entries.contains("red/b (quarantine)"), "{entries}");

    // The predecessor's quarantine was overwritten by the next reconcile.
    let mut changed = open.clone();
    changed
        .rules("red", "g")?
        .push(json!({"id": "all", "priority": 5, "direction": "ingress", "action": "allow"}));
    lab.apply(&changed)?;
    to_b.stopped_at(border, "after a change of rules");
    lab.agents.first_mut().context("no agent")?.kill()?;
    to_b.stopped_at(border, "without an agent");
    let agent = lab.agents.first_mut().context("no agent")?;
    agent.start()?;
    agent.wait_ready()?;
    lab.wait_enforced()?;
    to_b.stopped_at(border, "after a restart");
    to_c.goes_on("after a restart");
    assert_eq!(conditions(&lab)?, shown);

    policy(&lab, &["release", "red/b", "--reason", "closed"])?;
    to_b.goes_on("released");
    assert_eq!(conditions(&lab)?, []);
    let again = lab.flowloom(0, &["policy", "release", "red/b"])?;
    assert_eq!(again.status.code(), Some(1));
    assert!(again.stderr.contains("nothing to release"), "{}", again.stderr);
    let history = policy(&lab, &["history", "red/b", "-o", "wide"])?;
    for part in ["operator: quarantine", "ticket 4711", "operator: release from quarantine", "closed"] {
        assert!(history.contains(part), "{part} is not in {history}");
    }
    Ok(())
}

#[test]
fn a_frozen_or_rolled_back_endpoint_goes_on_enforcing_its_rules_over_changes_and_a_killed_agent() -> Result<()>
{
    let mut lab = Lab::builder().nodes(1).start()?;
    let open = document(&lab);
    lab.apply(&open)?;
    let (to_b, to_c) = (Stream::start(&lab, "a", "b", 1)?, Stream::start(&lab, "a", "c", 2)?);
    let revision = lab.workload("red/b")?.info.revision.to_string();
    policy(&lab, &["freeze", "red/b", "--reason", "migration"])?;
    to_b.goes_on("frozen");
    let mut shut = open.clone();
    shut.take_rule("red/g/stream")?;
    lab.apply(&shut)?;
    let border = to_c.border();
    to_c.stopped_at(border, "the rule is gone");
    to_b.goes_on("the rule is withheld");
    let shown = conditions(&lab)?;
    assert!(
        matches!(&shown[..], [(kind, message)] if kind == "Frozen" && message.contains("gone red/g/stream")),
        "{shown:?}"
    );
    // The predecessor's freeze took enforcement away: what the rules refuse must be refused still.
    let answer = lab.explain("red/a", "red/b", "udp", Some(PORT + 1), 4)?;
    let kernel = answer.ingress.and_then(|j| j.kernel).context("no answer of the kernel")?;
    assert_eq!(kernel.verdict, Some(flowloom_api::v1::Verdict::Drop));

    lab.agents.first_mut().context("no agent")?.restart()?;
    lab.wait_enforced()?;
    to_b.goes_on("after a restart");
    to_c.stopped_at(border, "after a restart");
    policy(&lab, &["release", "red/b"])?;
    let border = to_b.border();
    to_b.stopped_at(border, "released");
    policy(&lab, &["rollback", "red/b", "--to", &revision])?;
    to_b.goes_on("rolled back");
    lab.agents.first_mut().context("no agent")?.restart()?;
    to_b.goes_on("rolled back, after a restart");
    policy(&lab, &["release", "red/b"])?;
    let border = to_b.border();
    to_b.stopped_at(border, "released again");
    Ok(())
}
