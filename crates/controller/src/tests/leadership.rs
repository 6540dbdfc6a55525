//! Leader and standby.

use flowloom_testkit::api_server::Trouble;

use super::*;

#[tokio::test(start_paused = true)]
async fn of_two_controllers_one_writes() {
    let server = ApiServer::new();
    add(&server, "web-1", 1);
    let (a, b) = (start(&server, "a"), start(&server, "b"));
    eventually("published", async || names(&server).len() == 1).await;
    let leader = holder(&server);
    for n in 2..=9 {
        add(&server, &format!("web-{n}"), n);
        eventually("published", async || names(&server).len() == usize::from(n)).await;
    }
    let other = if leader == "a" { "b" } else { "a" };
    assert_eq!(writes(&server, other), 0);
    for c in [&a, &b] {
        let status = c.status().await;
        assert_eq!((status.leader.holder.as_str(), status.ready), (leader.as_str(), true), "{}", c.me);
        assert_eq!(status.leader.leads, c.me == leader);
    }
}

#[tokio::test(start_paused = true)]
async fn a_killed_leader_is_replaced_after_its_lease_and_nothing_is_rewritten() {
    let server = ApiServer::new();
    for n in 1..=5 {
        add(&server, &format!("web-{n}"), n);
    }
    let a = start(&server, "a");
    eventually("a leads", async || names(&server).len() == 5).await;
    let b = start(&server, "b");
    eventually("b has listed", async || b.status().await.sources.iter().all(|s| s.listed)).await;
    let before = server.objects(SLICES);
    drop(a);
    let died = Instant::now();
    add(&server, "web-6", 6);
    eventually("b publishes", async || names(&server).len() == 6).await;
    let took = died.elapsed();
    assert!(took >= Duration::from_secs(12) && took < Duration::from_secs(20), "{took:?}");
    assert_eq!(before.len(), 1);
    assert_eq!(writes(&server, "b"), 1, "only what changed is written");
    let epoch = |slices: &[Value]| slices[0]["spec"]["epoch"].as_i64().unwrap();
    assert!(epoch(&server.objects(SLICES)) > epoch(&before));
    b.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_is_told_to_stop_gives_the_lease_back() {
    let server = ApiServer::new();
    add(&server, "web-1", 1);
    let a = start(&server, "a");
    eventually("a leads", async || names(&server).len() == 1).await;
    let b = start(&server, "b");
    eventually("b has listed", async || b.status().await.sources.iter().all(|s| s.listed)).await;
    let told = Instant::now();
    a.end().await;
    eventually("b leads", async || b.status().await.leader.leads).await;
    assert!(told.elapsed() < Duration::from_secs(4), "{:?}", told.elapsed());
    b.end().await;
    assert_eq!(holder(&server), "");
}

/// A process that is stopped and continued: its requests hang, and go on long after another leads.
#[tokio::test(start_paused = true)]
async fn a_paused_leader_that_wakes_writes_nothing() {
    let server = ApiServer::new();
    add(&server, "web-1", 1);
    let _a = start(&server, "a");
    eventually("a leads", async || names(&server).len() == 1).await;
    let b = start(&server, "b");
    eventually("b has listed", async || b.status().await.sources.iter().all(|s| s.listed)).await;
    let before = writes(&server, "a");
    server.trouble(|r| (r.client == "a" && r.verb != "watch").then_some(Trouble::Freeze));
    add(&server, "web-2", 2);
    eventually("b publishes", async || names(&server).len() == 2).await;
    let then = server.objects(SLICES);
    server.calm();
    server.thaw();
    throughout(30, "the old leader wrote", async || writes(&server, "a") == before).await;
    assert_eq!(server.objects(SLICES), then);
    assert_eq!(holder(&server), "b");
    add(&server, "web-3", 3);
    eventually("b goes on", async || names(&server).len() == 3).await;
    assert_eq!(writes(&server, "a"), before);
}

/// Between the look at the lease and the write another took over and wrote: the version does not fit.
#[tokio::test(start_paused = true)]
async fn a_write_that_was_under_way_when_the_leader_changed_meets_a_conflict() {
    let server = ApiServer::new();
    add(&server, "web-1", 1);
    let a = start(&server, "a");
    eventually("a leads", async || names(&server).len() == 1).await;
    let before = server.objects(SLICES)[0].clone();
    // While a's update waits in the server, somebody with a higher epoch writes the slice.
    server.trouble(|r| {
        (r.client == "a" && r.verb == "update" && r.resource == "workloadslices").then_some(Trouble::Freeze)
    });
    add(&server, "web-2", 2);
    eventually("the update is under way", async || {
        server.asked().iter().any(|r| r.verb == "update" && r.resource == "workloadslices")
    })
    .await;
    let mut other = before.clone();
    other["spec"]["epoch"] = 99.into();
    other["spec"]["workloads"] = json!([]);
    server.put(SLICES, other.clone());
    server.calm();
    server.thaw();
    let text = || a.metrics.text();
    eventually("the conflict is seen", async || text().contains("writes_total{result=\"conflict\"} 1")).await;
    a.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_cannot_renew_stops_before_others_may_begin() {
    let server = ApiServer::new();
    add(&server, "web-1", 1);
    let a = start(&server, "a");
    eventually("a leads", async || names(&server).len() == 1).await;
    server.trouble(|r| (r.resource == "leases").then_some(Trouble::Refuse(500)));
    let cut = Instant::now();
    eventually("a stands by", async || !a.status().await.leader.leads).await;
    assert!(cut.elapsed() <= Duration::from_secs(10), "{:?}", cut.elapsed());
    let before = writes(&server, "a");
    add(&server, "web-2", 2);
    throughout(20, "written without a lease", async || writes(&server, "a") == before).await;
    assert!(a.status().await.leader.error.contains("Trouble") || !a.status().await.leader.error.is_empty());
    server.calm();
    eventually("a leads again", async || names(&server).len() == 2).await;
}

#[tokio::test(start_paused = true)]
async fn clocks_that_differ_by_years_change_nothing() {
    let server = ApiServer::new();
    add(&server, "web-1", 1);
    for year in ["1999", "2099"] {
        let time = format!("{year}-01-01T00:00:00.000000Z");
        server.put(
            "/apis/coordination.k8s.io/v1/namespaces/flowloom/leases",
            json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": "flowloom-controller"},
                "spec": {"holderIdentity": "ghost", "leaseDurationSeconds": 15, "leaseTransitions": 3,
                    "acquireTime": time, "renewTime": time}}),
        );
        let began = Instant::now();
        let a = start(&server, "a");
        eventually("a takes the ghost's lease", async || holder(&server) == "a").await;
        let took = began.elapsed();
        assert!(took >= Duration::from_secs(15) && took < Duration::from_secs(18), "{year}: {took:?}");
        drop(a);
    }
}

#[tokio::test(start_paused = true)]
async fn an_epoch_never_falls_even_when_the_lease_is_deleted() {
    let server = ApiServer::new();
    add(&server, "web-1", 1);
    for (number, me) in ["a", "b", "c"].into_iter().enumerate() {
        let c = start(&server, me);
        add(&server, &format!("more-{me}"), 10 + number as u8);
        eventually("published", async || names(&server).len() == 2 + number).await;
        c.end().await;
    }
    let epoch = || server.objects(SLICES)[0]["spec"]["epoch"].as_i64().unwrap();
    let before = epoch();
    assert!(server.delete(LEASE));
    let d = start(&server, "d");
    add(&server, "last", 20);
    eventually("published", async || names(&server).len() == 5).await;
    assert!(epoch() > before);
    d.end().await;
}
