//! GC as container runtimes call it: what no valid attachment owns goes, and nothing else.

use anyhow::Result;
use flowloom_api::v1::CniGcRequest;
use flowloom_cni::clock;
use flowloom_testkit::{Ns, Outcome, PATIENCE, Probe};
use flowloom_tests_e2e::{Runtime, netns_path, pods};
use serde_json::json;

fn valid(runtime: Runtime, containers: &[&str]) -> Runtime {
    let list: Vec<_> = containers.iter().map(|c| json!({"containerID": c, "ifname": "eth0"})).collect();
    runtime.with("cni.dev/valid-attachments", json!(list))
}

#[test]
fn gc_frees_links_and_addresses_that_no_valid_attachment_owns_and_nothing_else() -> Result<()> {
    let lab = pods::start()?;
    let runtime = pods::runtime(&lab, "1.1.0")?;
    let (keep, old, silent) = (Ns::new("keep")?, Ns::new("old")?, Ns::new("silent")?);
    let kept = pods::addresses(&runtime.add("keep", &keep)?)?;
    let other_network = pods::runtime(&lab, "1.1.0")?.with("name", json!("another"));
    let (neighbour, bound) = (Ns::new("neighbour")?, Ns::new("bound")?);
    let neighbours = pods::addresses(&other_network.add("neighbour", &neighbour)?)?;
    let links = pods::links(&lab)?;
    runtime.add("old", &old)?;
    runtime.add("silent", &silent)?;
    Runtime::new(&lab, 0, "1.1.0")?.arg("FLOWLOOM_ENDPOINT", "db").add("bound", &bound)?;
    // A container that went without a word.
    drop(silent);
    let output =
        valid(pods::runtime(&lab, "1.1.0")?, &["keep", "never-seen"]).call("GC", "", "")?.success()?;
    assert_eq!(output.stdout, "");
    assert_eq!(pods::links(&lab)?, links, "links of others went, or stale ones stayed");
    assert_eq!(pods::held(&lab, "pods")?, kept.iter().chain(&neighbours).copied().collect());
    assert!(pods::inside(&old).is_err() && pods::inside(&bound).is_err());
    // What stays works, the document's endpoints among it; what was bound can be bound again.
    let client = lab.workload("default/client")?;
    for ip in kept.iter().chain(&neighbours) {
        assert_eq!(Probe::icmp(&client.netns, *ip).timeout(PATIENCE).run()?, Outcome::Connected, "{ip}");
    }
    Runtime::new(&lab, 0, "1.1.0")?.arg("FLOWLOOM_ENDPOINT", "db").add("bound", &bound)?;
    // Nothing is left to do; an empty list means that nothing is valid.
    valid(pods::runtime(&lab, "1.1.0")?, &["keep", "bound"]).call("GC", "", "")?.success()?;
    assert_eq!(pods::containers(&lab)?.len(), 3);
    valid(pods::runtime(&lab, "1.1.0")?, &[]).call("GC", "", "")?.success()?;
    assert_eq!(pods::containers(&lab)?, ["neighbour".to_owned()].into());
    Ok(())
}

// Field report 11: a list that was missing was taken for an empty one.
#[test]
fn a_gc_without_a_list_removed_everything() -> Result<()> {
    let lab = pods::start()?;
    let (runtime, ns) = (pods::runtime(&lab, "1.1.0")?, Ns::new("pod")?);
    runtime.add("pod", &ns)?;
    let output = runtime.call("GC", "", "")?.success()?;
    assert!(output.stderr.contains("nothing is removed"), "{}", output.stderr);
    let broken =
        pods::runtime(&lab, "1.1.0")?.with("cni.dev/valid-attachments", json!([{"containerId": "pod"}]));
    assert_eq!(broken.refused("GC", "", "")?.0, 7);
    assert_eq!(pods::runtime(&lab, "1.0.0")?.refused("GC", "", "")?.0, 1);
    assert_eq!(pods::containers(&lab)?.len(), 1);
    Ok(())
}

#[test]
fn gc_never_touches_an_add_in_flight() -> Result<()> {
    let lab = pods::start()?;
    let runtime = pods::runtime(&lab, "1.1.0")?;
    let client = lab.agents[0].client();
    let stale = Ns::new("stale")?;
    runtime.add("stale", &stale)?;
    // The list is made before any of the ADDs, and GC after GC is served with it while they go on.
    let list = CniGcRequest { network: "flowloom".into(), valid: Vec::new(), started: clock::now()? };
    let namespaces: Vec<Ns> = (0..12).map(|_| Ns::new("pod")).collect::<Result<_>>()?;
    let (rounds, spared) = std::thread::scope(|scope| -> Result<(usize, usize)> {
        let adds: Vec<_> = namespaces
            .iter()
            .enumerate()
            .map(|(i, ns)| {
                let runtime = &runtime;
                scope.spawn(move || runtime.add(&format!("c{i}"), ns))
            })
            .collect();
        let (mut rounds, mut spared) = (0, 0);
        loop {
            let ended = adds.iter().all(std::thread::ScopedJoinHandle::is_finished);
            spared = client.cni_gc(&list)?.spared.len().max(spared);
            rounds += 1;
            if ended {
                break;
            }
        }
        for add in adds {
            add.join().map_err(|_| anyhow::anyhow!("a call panicked"))??;
        }
        Ok((rounds, spared))
    })?;
    assert!(rounds > 1 && spared == namespaces.len(), "{rounds} rounds spared {spared}");
    assert_eq!(pods::containers(&lab)?.len(), namespaces.len(), "the stale one goes, and no other");
    for ns in &namespaces {
        pods::inside(ns)?;
    }
    // A list made now knows them, if the runtime says so.
    let later = CniGcRequest { started: clock::now()?, ..list };
    assert_eq!(client.cni_gc(&later)?.removed.len(), namespaces.len());
    assert_eq!(pods::held(&lab, "pods")?.len(), 0);
    Ok(())
}

#[test]
fn after_a_restart_gc_knows_the_attachments_of_before() -> Result<()> {
    let mut lab = pods::start()?;
    let (keep, old) = (Ns::new("keep")?, Ns::new("old")?);
    let runtime = pods::runtime(&lab, "1.1.0")?;
    runtime.add("keep", &keep)?;
    runtime.add("old", &old)?;
    lab.agents[0].restart()?;
    valid(pods::runtime(&lab, "1.1.0")?, &["keep"]).call("GC", "", "")?.success()?;
    assert_eq!(pods::containers(&lab)?, ["keep".to_owned()].into());
    // The runtime's DEL of what GC took finds nothing, which is success.
    runtime.call("DEL", "old", &netns_path(&old))?.success()?;
    Ok(())
}
