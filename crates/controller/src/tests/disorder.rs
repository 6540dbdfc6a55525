//! Watches and writes that go wrong.

use flowloom_testkit::api_server::Trouble;

use super::*;

#[tokio::test(start_paused = true)]
async fn nothing_is_deleted_before_every_first_list() {
    let server = ApiServer::new();
    add(&server, "web-1", 1);
    add(&server, "web-2", 2);
    let a = start(&server, "a");
    eventually("published", async || names(&server).len() == 2).await;
    a.end().await;
    remove(&server, "web-2");
    for kind in ["pods", "workloadslices"] {
        server.trouble(move |r| {
            (r.resource == kind && matches!(r.verb, "list" | "watch")).then_some(Trouble::Refuse(500))
        });
        let b = start(&server, "b");
        throughout(60, "something was written", async || writes(&server, "b") == 0).await;
        let status = b.status().await;
        assert!(!status.ready && status.sources.iter().any(|s| s.name == kind && !s.error.is_empty()));
        drop(b);
        server.calm();
        server.delete(LEASE);
    }
    let c = start(&server, "c");
    eventually("collected", async || names(&server) == set(&["web-1"])).await;
    c.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_change_by_somebody_else_is_undone() {
    let server = ApiServer::new();
    add(&server, "web-1", 1);
    let a = start(&server, "a");
    eventually("published", async || names(&server).len() == 1).await;
    let mut slice = server.objects(SLICES)[0].clone();
    slice["spec"]["workloads"][0]["ips"][0] = "10.66.6.6".into();
    server.put(SLICES, slice.clone());
    eventually("put right", async || published(&server)["shop/web-1"] == "10.40.0.1").await;
    slice["metadata"]["name"] = "somebody".into();
    slice["metadata"]["uid"] = "x".into();
    server.put(SLICES, slice);
    eventually("a foreign slice is removed", async || server.objects(SLICES).len() == 1).await;
    assert!(
        server
            .delete(&format!("{SLICES}/{}", server.objects(SLICES)[0]["metadata"]["name"].as_str().unwrap()))
    );
    eventually("a deleted slice comes back", async || names(&server) == set(&["web-1"])).await;
    a.end().await;
}

#[tokio::test(start_paused = true)]
async fn pods_deleted_while_the_watch_was_down_and_forgotten_are_collected() {
    let server = ApiServer::new();
    for n in 1..=4 {
        add(&server, &format!("web-{n}"), n);
    }
    let a = start(&server, "a");
    eventually("published", async || names(&server).len() == 4).await;
    // The watch ends, meanwhile objects go, and the server no longer knows the version.
    server.trouble(|r| (r.verb == "watch").then_some(Trouble::Refuse(503)));
    server.end_watches();
    remove(&server, "web-2");
    add(&server, "web-5", 5);
    throughout(20, "deleted without a list", async || names(&server).contains("shop/web-2")).await;
    server.forget();
    server.calm();
    eventually("all is right", async || names(&server) == set(&["web-1", "web-3", "web-4", "web-5"])).await;
    a.end().await;
}

#[tokio::test(start_paused = true)]
async fn watches_cut_within_an_object_and_events_that_are_errors_converge() {
    let server = ApiServer::new();
    for n in 1..=4 {
        add(&server, &format!("web-{n}"), n);
    }
    let mut cuts = 0;
    server.trouble(move |r| {
        (r.verb == "watch" && cuts < 9).then(|| {
            cuts += 1;
            Trouble::Cut(150 * cuts)
        })
    });
    let a = start(&server, "a");
    eventually("published", async || names(&server).len() == 4).await;
    for code in [410, 500] {
        server.say("ERROR", &json!({"kind": "Status", "code": code, "message": "as the test wants it"}));
        let name = format!("after-{code}");
        add(&server, &name, 9);
        eventually("published", async || names(&server).contains(&format!("shop/{name}"))).await;
    }
    server.say("NONSENSE", &json!({}));
    remove(&server, "web-1");
    eventually("collected", async || !names(&server).contains("shop/web-1")).await;
    a.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_malformed_pod_is_told_and_stops_nobody() {
    let server = ApiServer::new();
    add(&server, "web-1", 1);
    let mut bad = pod("bad", 2, "web");
    bad["status"]["podIPs"] = json!([{"ip": "10.40.0.300"}]);
    server.put("/api/v1/namespaces/shop/pods", bad);
    let a = start(&server, "a");
    eventually("its neighbour is published", async || names(&server) == set(&["web-1"])).await;
    let status = a.status().await;
    let told = status.degraded.iter().find(|d| d.name == "shop/bad").unwrap();
    assert_eq!((told.kind.as_str(), told.conditions[0].reason.as_str()), ("pod", "Unreadable"));
    assert!(told.conditions[0].message.contains("10.40.0.300"));

    // A good Pod that turns bad keeps its last good version.
    let mut turned = pod("web-1", 1, "web");
    turned["spec"]["containers"][0]["ports"][0]["containerPort"] = "eighty".into();
    server.put("/api/v1/namespaces/shop/pods", turned);
    eventually("told", async || a.status().await.degraded.len() == 2).await;
    assert_eq!(names(&server), set(&["web-1"]));
    add(&server, "web-1", 1);
    server.delete("/api/v1/namespaces/shop/pods/bad");
    eventually("forgiven", async || a.status().await.degraded.is_empty()).await;
    a.end().await;
}

#[tokio::test(start_paused = true)]
async fn writes_that_fail_are_repeated_with_pauses_and_told() {
    let server = ApiServer::new();
    add(&server, "web-1", 1);
    server.trouble(|r| (r.writes() && r.resource == "workloadslices").then_some(Trouble::Refuse(500)));
    let a = start(&server, "a");
    eventually("told", async || {
        a.status().await.degraded.iter().any(|d| d.conditions[0].reason == "WriteFailed")
    })
    .await;
    throughout(60, "it goes on leading", async || a.status().await.leader.leads).await;
    let tried = writes(&server, "a");
    assert!((3..20).contains(&tried), "{tried} tries in a minute");
    server.calm();
    eventually("published", async || names(&server).len() == 1).await;
    eventually("forgiven", async || a.status().await.degraded.is_empty()).await;
    a.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_server_is_borne_and_one_that_swallows_answers_loses_nothing() {
    let server = ApiServer::new();
    server.trouble(|_| Some(Trouble::Slow(Duration::from_secs(1))));
    for n in 1..=3 {
        add(&server, &format!("web-{n}"), n);
    }
    let a = start(&server, "a");
    eventually("published", async || names(&server).len() == 3).await;
    server.calm();
    // The write is done, the answer is lost: the watch tells.
    let mut left = 3;
    server.trouble(move |r| {
        (r.writes() && r.resource == "workloadslices" && left > 0).then(|| {
            left -= 1;
            Trouble::Swallow
        })
    });
    add(&server, "web-4", 4);
    eventually("published", async || names(&server).len() == 4).await;
    eventually("and known", async || a.status().await.slices.pending == 0).await;
    remove(&server, "web-1");
    eventually("and on it goes", async || names(&server).len() == 3).await;
    a.end().await;
}
