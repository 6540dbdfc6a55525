//! No packet sees half a policy: two policies of thousands of entries, of which any mixture would lose A (allowed by both) or let B through (denied by both), are
//! swapped while new and established flows probe both.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use flowloom_testkit::{PATIENCE, UdpReceiver, UdpSender, eventually};
use flowloom_tests_e2e::{Document, Lab};
use serde_json::{Value, json};

const A: u16 = 7000;
const B: u16 = 7001;

/// 2,000 rules that speak of nobody here, each an entry of its own.
fn filler(direction: &str, action: &str) -> Vec<Value> {
    (0..2000)
        .map(|i| {
            json!({"id": format!("f{i}"), "priority": 10, "direction": direction, "protocol": "udp", "ports": [{"from": 20_000 + 2 * i, "to": 20_000 + 2 * i}], "action": action})
        })
        .collect()
}

fn port(id: &str, priority: u16, port: u16, action: &str) -> Value {
    json!({"id": id, "priority": priority, "direction": "ingress", "protocol": "udp", "ports": [{"from": port, "to": port}], "action": action})
}

/// Allows everything but B.
fn open() -> Vec<Value> {
    let mut rules = filler("ingress", "allow");
    rules.push(port("not-b", 100, B, "drop"));
    rules.push(json!({"id": "rest", "priority": 500, "direction": "ingress", "action": "allow"}));
    rules
}

/// Denies everything but A.
fn closed() -> Vec<Value> {
    let mut rules = filler("ingress", "drop");
    rules.push(port("only-a", 100, A, "allow"));
    rules.push(json!({"id": "nothing", "priority": 200, "direction": "ingress", "action": "drop"}));
    rules
}

fn document(lab: &Lab, sender: &str, rules: Vec<Value>) -> Document {
    lab.empty_document()
        .with("vpcs", json!([{"name": "red"}]))
        .with("subnets", json!([{"vpc": "red", "name": "app", "cidr": "10.1.0.0/24"}]))
        .with("endpoints", json!([
            {"vpc": "red", "name": "sender", "subnet": "app", "node": sender, "ip": "10.1.0.10", "labels": {"role": "x"}},
            {"vpc": "red", "name": "target", "subnet": "app", "node": "n1", "ip": "10.1.0.20", "security_groups": ["g"]},
        ]))
        .with("security_groups", json!([{"vpc": "red", "name": "g", "default_deny_egress": false, "rules": rules}]))
}

/// Tells a thread to end, also when what it waits for panics: its scope would wait for it for good.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn no_mixture_of_two_policies_is_ever_in_force() -> Result<()> {
    let swaps: usize = std::env::var("FLOWLOOM_TEST_SWAPS").ok().and_then(|s| s.parse().ok()).unwrap_or(120);
    for sender in ["n1", "n2"] {
        let lab = Lab::builder().start()?;
        let policies = [document(&lab, sender, open()), document(&lab, sender, closed())];
        lab.apply(&policies[0])?;
        let (from, target) = (lab.workload("red/sender")?, lab.workload("red/target")?);
        let at = |port| -> Result<SocketAddr> { Ok(SocketAddr::new(target.ip(4)?, port)) };
        let (a, b) = (UdpReceiver::start(&target.netns, at(A)?)?, UdpReceiver::start(&target.netns, at(B)?)?);
        // Established flows.
        let established = [
            UdpSender::start(&from.netns, None, at(A)?, Duration::from_micros(400), 1, 64)?,
            UdpSender::start(&from.netns, None, at(B)?, Duration::from_micros(400), 2, 64)?,
        ];
        // New flows, each from a port of its own.
        let stop = Arc::new(AtomicBool::new(false));
        let sent = Arc::new(AtomicU64::new(0));
        std::thread::scope(|scope| -> Result<()> {
            let ends = Ends(&stop);
            let (ended, count, netns) = (Arc::clone(&stop), Arc::clone(&sent), &from.netns);
            let (to_a, to_b) = (at(A)?, at(B)?);
            let storm = scope.spawn(move || {
                netns.run_in(move || -> std::io::Result<()> {
                    let begin = Instant::now();
                    for number in 0u64.. {
                        if ended.load(Ordering::Relaxed) {
                            break;
                        }
                        // Ports below the range that the kernel gives to the established flows.
                        let socket = UdpSocket::bind(("10.1.0.10", 2_000 + (number % 30_000) as u16))?;
                        for (to, mark) in [(to_a, 3u64), (to_b, 4)] {
                            let mut datagram = number.to_be_bytes().to_vec();
                            datagram.extend(mark.to_be_bytes());
                            socket.send_to(&datagram, to)?;
                        }
                        count.store(number + 1, Ordering::Relaxed);
                        // About 2,500 pairs a second.
                        while begin.elapsed() < Duration::from_micros(400) * number as u32 {
                            std::thread::yield_now();
                        }
                    }
                    Ok(())
                })
            });
            let result = (0..swaps).try_for_each(|i| lab.replace(&policies[(i + 1) % 2]));
            drop(ends);
            storm.join().map_err(|_| anyhow::anyhow!("the storm panicked"))???;
            result
        })?;
        let tried = established.map(|s| s.stop());
        let new = sent.load(Ordering::Relaxed);
        // Everything that was sent has arrived once the last of each kind has.
        eventually(PATIENCE, || {
            let missing = a.missing(1, tried[0]).len() + a.missing(3, new).len();
            if missing == 0 {
                Ok(())
            } else {
                Err(format!("{missing} of {} datagrams to A were lost", tried[0] + new))
            }
        });
        assert_eq!(b.count() as u64 + b.foreign(), 0, "datagrams came through to B");
        println!(
            "sender on {sender}: {swaps} swaps, {} probes, none lost to A, none through to B",
            tried[0] + tried[1] + 2 * new
        );
    }
    Ok(())
}

#[test]
fn labels_and_cidrs_coming_and_going_never_flip_what_both_sides_agree_on() -> Result<()> {
    let changes: usize =
        std::env::var("FLOWLOOM_TEST_SWAPS").ok().and_then(|s| s.parse().ok()).unwrap_or(120);
    let lab = Lab::builder().start()?;
    // The sender's label changes and rules name ever new CIDRs around it; A stays allowed for both labels, B denied for both.
    let world = |i: usize| {
        let rules = vec![
            json!({"id": "x", "priority": 100, "direction": "ingress", "protocol": "udp", "remote_endpoint_selector": {"role": "x"}, "ports": [{"from": A, "to": A}], "action": "allow"}),
            json!({"id": "y", "priority": 100, "direction": "ingress", "protocol": "udp", "remote_endpoint_selector": {"role": "y"}, "ports": [{"from": A, "to": A}], "action": "allow"}),
            json!({"id": "cidr", "priority": 200, "direction": "ingress", "protocol": "udp", "remote_cidr": format!("10.1.0.{}/{}", if i.is_multiple_of(3) { 8 } else { 0 }, if i.is_multiple_of(3) { 29 } else { 24 + (i % 5) }), "ports": [{"from": 9000 + i, "to": 9000 + i}], "action": "allow"}),
        ];
        let mut document = document(&lab, "n2", rules);
        if let Ok(endpoint) = document.endpoint("red", "sender") {
            endpoint["labels"]["role"] = json!(if i.is_multiple_of(2) { "x" } else { "y" });
        }
        document
    };
    lab.apply(&world(0))?;
    let (from, target) = (lab.workload("red/sender")?, lab.workload("red/target")?);
    let at = |port| -> Result<SocketAddr> { Ok(SocketAddr::new(target.ip(4)?, port)) };
    let (a, b) = (UdpReceiver::start(&target.netns, at(A)?)?, UdpReceiver::start(&target.netns, at(B)?)?);
    let senders = [
        UdpSender::start(&from.netns, None, at(A)?, Duration::from_micros(200), 1, 64)?,
        UdpSender::start(&from.netns, None, at(B)?, Duration::from_micros(200), 2, 64)?,
    ];
    for i in 1..=changes {
        lab.replace(&world(i))?;
    }
    let tried = senders.map(|s| s.stop());
    eventually(PATIENCE, || {
        let missing = a.missing(1, tried[0]).len();
        if missing == 0 { Ok(()) } else { Err(format!("{missing} of {} datagrams to A were lost", tried[0])) }
    });
    assert_eq!(b.count() as u64 + b.foreign(), 0, "datagrams came through to B");
    println!("{changes} changes, {} probes, none lost to A, none through to B", tried[0] + tried[1]);
    Ok(())
}
