//! DELs while no agent serves: teardown goes on, and nothing leaks.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use flowloom_api::v1::{CniAttachment, CniDelRequest, Moment};
use flowloom_cni::clock;
use flowloom_cni::queue::{self, Entry};
use flowloom_testkit::{Ns, Outcome, PATIENCE, Probe, eventually, never};
use flowloom_tests_e2e::{Lab, netns_path, pods};

fn waiting(lab: &Lab) -> Result<usize> {
    Ok(queue::list(&lab.agents[0].state_dir.join(queue::DIRECTORY))?.entries.len())
}

fn enqueue(lab: &Lab, container: &str, started: Moment) -> Result<()> {
    let attachment = CniAttachment { container_id: container.into(), ifname: "eth0".into() };
    let request = CniDelRequest { attachment, netns: None, args: std::collections::BTreeMap::default() };
    Ok(queue::put(&lab.agents[0].state_dir.join(queue::DIRECTORY), &Entry { request, started })?)
}

fn until_containers(lab: &Lab, wanted: &[&str]) {
    eventually(PATIENCE, || match pods::containers(lab) {
        Ok(found) if found.iter().map(String::as_str).eq(wanted.iter().copied()) => Ok(()),
        other => Err(format!("{other:?}, not {wanted:?}")),
    });
}

#[test]
fn a_del_without_an_agent_holds_up_no_teardown_and_is_done_when_the_agent_starts() -> Result<()> {
    let mut lab = pods::start()?;
    let runtime = pods::runtime(&lab, "1.0.0")?;
    let (gone, left, stays) = (Ns::new("gone")?, Ns::new("left")?, Ns::new("stays")?);
    for (name, ns) in [("gone", &gone), ("left", &left)] {
        runtime.add(name, ns)?;
    }
    let kept = pods::addresses(&runtime.add("stays", &stays)?)?;
    lab.agents[0].kill()?;
    let start = Instant::now();
    runtime.call("DEL", "gone", &netns_path(&gone))?.success()?;
    let output = runtime.call("DEL", "left", &netns_path(&left))?.success()?;
    assert!(start.elapsed() < Duration::from_secs(15), "teardown waited {:?}", start.elapsed());
    assert!(output.stderr.contains("waits in"), "{}", output.stderr);
    runtime.call("DEL", "never-seen", "")?.success()?;
    assert_eq!(waiting(&lab)?, 3);
    drop(gone);
    lab.agents[0].start()?;
    lab.agents[0].wait_ready()?;
    until_containers(&lab, &["stays"]);
    assert_eq!(pods::held(&lab, "pods")?, kept.iter().copied().collect());
    assert!(pods::inside(&left).is_err(), "the namespace is there, its interface must not be");
    assert_eq!(waiting(&lab)?, 0);
    let client = lab.workload("default/client")?;
    assert_eq!(Probe::icmp(&client.netns, kept[0]).timeout(PATIENCE).run()?, Outcome::Connected);
    // Done once: another start finds nothing to do.
    lab.agents[0].restart()?;
    until_containers(&lab, &["stays"]);
    assert_eq!(lab.agents[0].client().cni_report()?.queue.replayed, 0);
    Ok(())
}

#[test]
fn an_add_of_the_same_container_after_a_queued_del_gets_a_new_interface() -> Result<()> {
    let mut lab = pods::start()?;
    let runtime = pods::runtime(&lab, "1.0.0")?;
    let (first, second) = (Ns::new("first")?, Ns::new("second")?);
    runtime.add("pod", &first)?;
    lab.agents[0].kill()?;
    runtime.call("DEL", "pod", &netns_path(&first))?.success()?;
    // The runtime starts it again before there is an agent; its ADD waits.
    let result = std::thread::scope(|scope| {
        let add = scope.spawn(|| runtime.add("pod", &second));
        lab.agents[0].start()?;
        add.join().map_err(|_| anyhow::anyhow!("the call panicked"))?
    })?;
    assert!(pods::inside(&first).is_err());
    let ip = pods::addresses(&result)?.first().copied().context("no address")?;
    assert!(pods::inside(&second)?.contains(&ip.to_string()));
    assert_eq!(waiting(&lab)?, 0);
    until_containers(&lab, &["pod"]);
    let client = lab.workload("default/client")?;
    assert_eq!(Probe::icmp(&client.netns, ip).timeout(PATIENCE).run()?, Outcome::Connected);
    Ok(())
}

// The plugin found no agent, and the agent had looked at the queue before the plugin wrote.
#[test]
fn a_del_that_was_queued_beside_a_starting_agent_waited_for_the_next_one() -> Result<()> {
    let lab = pods::start()?;
    let (runtime, ns) = (pods::runtime(&lab, "1.0.0")?, Ns::new("pod")?);
    runtime.add("pod", &ns)?;
    enqueue(&lab, "pod", clock::now()?)?;
    until_containers(&lab, &[]);
    eventually(PATIENCE, || match waiting(&lab) {
        Ok(0) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    assert_eq!(pods::held(&lab, "pods")?.len(), 0);
    Ok(())
}

#[test]
fn a_late_entry_of_the_queue_took_the_attachment_that_came_after_it() -> Result<()> {
    let lab = pods::start()?;
    let (runtime, ns) = (pods::runtime(&lab, "1.0.0")?, Ns::new("pod")?);
    runtime.add("pod", &ns)?;
    let called = clock::now()?;
    runtime.call("DEL", "pod", &netns_path(&ns))?.success()?;
    let result = runtime.add("pod", &ns)?;
    // A plugin that was called before that DEL, and stopped for long, writes only now.
    enqueue(&lab, "pod", called)?;
    eventually(PATIENCE, || match lab.agents[0].client().cni_report() {
        Ok(report) if report.queue.outdated == 1 && report.queue.waiting == 0 => Ok(()),
        other => Err(format!("{other:?}")),
    });
    never(Duration::from_millis(300), || match pods::containers(&lab) {
        Ok(found) if found.len() == 1 => Ok(()),
        other => Err(format!("{other:?}")),
    });
    assert_eq!(runtime.add("pod", &ns)?, result);
    Ok(())
}

#[test]
fn an_unreadable_entry_is_set_aside_told_and_holds_up_nothing() -> Result<()> {
    let mut lab = pods::start()?;
    let (runtime, ns) = (pods::runtime(&lab, "1.0.0")?, Ns::new("pod")?);
    runtime.add("pod", &ns)?;
    lab.agents[0].kill()?;
    let directory = lab.agents[0].state_dir.join(queue::DIRECTORY);
    std::fs::write(directory.join("a@eth0.json"), "{\"request\":")?;
    runtime.call("DEL", "pod", &netns_path(&ns))?.success()?;
    lab.agents[0].start()?;
    lab.agents[0].wait_ready()?;
    until_containers(&lab, &[]);
    assert!(directory.join("a@eth0.unreadable").is_file());
    let shown = lab.flowloom(0, &["cni", "status"])?.success()?.stdout;
    assert!(shown.contains("unreadable"), "{shown}");
    Ok(())
}

#[test]
fn killed_at_every_write_of_a_replay() -> Result<()> {
    let mut lab = pods::start()?;
    let runtime = pods::runtime(&lab, "1.0.0")?;
    let links = pods::links(&lab)?;
    let mut killed = 0;
    for n in 1..=200 {
        let ns = Ns::new("pod")?;
        runtime.add("pod", &ns)?;
        lab.agents[0].kill()?;
        runtime.call("DEL", "pod", &netns_path(&ns))?.success()?;
        let agent = &mut lab.agents[0];
        agent.set_variable("FLOWLOOM_TEST_ABORT_AT_WRITE", &n.to_string());
        agent.start()?;
        agent.clear_variables();
        let (client, deadline) = (agent.client(), Instant::now() + PATIENCE);
        let dead = loop {
            if agent.process.as_mut().context("not started")?.status()?.is_some() {
                break true;
            }
            if client
                .cni_report()
                .is_ok_and(|r| r.queue.replayed == 1 && client.health().is_ok_and(|h| h.ready))
            {
                break false;
            }
            anyhow::ensure!(
                Instant::now() < deadline,
                "neither died nor finished: {:?}",
                client.cni_report()
            );
            std::thread::yield_now();
        };
        if dead {
            killed += 1;
            lab.agents[0].restart()?;
        }
        until_containers(&lab, &[]);
        assert_eq!(waiting(&lab)?, 0, "after write {n}");
        assert_eq!(pods::held(&lab, "pods")?.len(), 0, "after write {n}");
        assert_eq!(pods::links(&lab)?, links, "after write {n}");
        assert!(pods::inside(&ns).is_err(), "after write {n}");
        if !dead {
            println!("replay: killed before each of {killed} writes");
            assert!(killed > 0, "nothing was killed: is the agent built with kill-points?");
            return Ok(());
        }
    }
    anyhow::bail!("a replay needs more than 200 writes")
}
