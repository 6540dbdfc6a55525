//! What is published, and with which rights.

use std::collections::BTreeSet;

use flowloom_testkit::api_server::rights_used;

use super::*;

#[tokio::test(start_paused = true)]
async fn pods_are_published_changed_and_collected() {
    let server = ApiServer::new();
    for n in 1..=3 {
        add(&server, &format!("web-{n}"), n);
    }
    let a = start(&server, "a");
    eventually("all are there", async || names(&server) == set(&["web-1", "web-2", "web-3"])).await;
    assert_eq!(server.objects(SLICES).len(), 1);
    let slice = &server.objects(SLICES)[0];
    assert_eq!(slice["spec"]["profiles"].as_array().unwrap().len(), 1, "one template, one profile");

    server.put("/api/v1/namespaces/shop/pods", pod("web-1", 9, "web"));
    eventually("the new address", async || published(&server)["shop/web-1"] == "10.40.0.9").await;
    remove(&server, "web-2");
    eventually("one less", async || names(&server) == set(&["web-1", "web-3"])).await;

    // A Pod that ended has no address any more; one on the host's network never had one.
    let mut ended = pod("web-3", 3, "web");
    ended["status"]["phase"] = "Succeeded".into();
    server.put("/api/v1/namespaces/shop/pods", ended);
    let mut host = pod("host", 4, "web");
    host["spec"]["hostNetwork"] = true.into();
    server.put("/api/v1/namespaces/shop/pods", host);
    eventually("one left", async || names(&server) == set(&["web-1"])).await;
    remove(&server, "web-1");
    eventually("the slice goes with its last Pod", async || server.objects(SLICES).is_empty()).await;
    assert!(a.status().await.ready);
    a.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_restart_writes_nothing() {
    let server = ApiServer::new();
    for n in 1..=20 {
        add(&server, &format!("web-{n}"), n);
    }
    let a = start(&server, "a");
    eventually("published", async || names(&server).len() == 20).await;
    let before = server.objects(SLICES);
    a.end().await;
    let b = start(&server, "b");
    eventually("b leads", async || b.status().await.leader.leads).await;
    throughout(90, "an unchanged world is written again", async || writes(&server, "b") == 0).await;
    assert_eq!(server.objects(SLICES), before);
    b.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_burst_becomes_few_writes() {
    let server = ApiServer::new();
    add(&server, "web-0", 1);
    let a = start(&server, "a");
    eventually("published", async || names(&server).len() == 1).await;
    let before = writes(&server, "a");
    for n in 1..=200 {
        add(&server, &format!("web-{n}"), n);
    }
    eventually("published", async || names(&server).len() == 201).await;
    let made = writes(&server, "a") - before;
    assert!(made <= 2, "{made} writes for one burst");
    a.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_controller_uses_every_right_of_its_role_and_no_other() {
    let server = ApiServer::new();
    add(&server, "web-1", 1);
    add(&server, "web-2", 2);
    let a = start(&server, "a");
    eventually("published", async || names(&server).len() == 2).await;
    add(&server, "web-3", 3);
    eventually("changed", async || names(&server).len() == 3).await;
    for n in 1..=3 {
        remove(&server, &format!("web-{n}"));
    }
    eventually("collected", async || server.objects(SLICES).is_empty()).await;
    a.end().await;

    // Servers that stream no lists are asked for pages.
    server.trouble(|a| {
        (a.verb == "watch" && a.client == "b").then_some(flowloom_testkit::api_server::Trouble::Refuse(422))
    });
    let b = start(&server, "b");
    eventually("b has listed", async || b.status().await.sources.iter().all(|s| s.listed)).await;
    b.end().await;

    assert_eq!(server.refused(), [], "asked for what its role does not allow");
    let used: BTreeSet<(String, String, String)> = rights_used(&server.asked())
        .into_iter()
        .map(|(_, verb, group, resource)| (verb.to_owned(), group, resource))
        .collect();
    let granted: BTreeSet<(String, String, String)> = CONTROLLER
        .rights
        .iter()
        .flat_map(|r| {
            r.resources.iter().flat_map(move |resource| {
                r.verbs.iter().map(move |v| ((*v).to_owned(), r.group.to_owned(), (*resource).to_owned()))
            })
        })
        .collect();
    assert_eq!(used, granted);
}

#[tokio::test(start_paused = true)]
async fn metrics_and_status_tell_the_same() {
    let server = ApiServer::new();
    add(&server, "web-1", 1);
    let a = start(&server, "a");
    eventually("published", async || names(&server).len() == 1).await;
    eventually("nothing is pending", async || a.status().await.slices.pending == 0).await;
    let status = a.status().await;
    assert_eq!((status.slices.workloads, status.slices.slices), (1, 1));
    let text = a.metrics.text();
    for line in [
        "flowloom_controller_leader 1",
        "flowloom_controller_workloads 1",
        "flowloom_controller_slices 1",
        "flowloom_controller_writes_total{result=\"written\"} 1",
    ] {
        assert!(text.lines().any(|l| l == line), "no {line:?} in\n{text}");
    }
    a.end().await;
}
