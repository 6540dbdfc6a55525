//! Something between here and the API server takes requests and answers none (a balancer whose server is gone): nobody waits for ever.

use std::collections::BTreeSet;
use std::time::Duration;

use flowloom_k8s::{
    Client, Happening, ObjectName, Options, Pod, PodEvent, Recorder, Selection, SourceStatus, Translator,
    follow, run,
};
use flowloom_testkit::api_server::{ApiServer, Asked, Trouble};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Virtual: nobody waits for it.
const LONG: Duration = Duration::from_secs(600);

fn client(server: &ApiServer) -> Client {
    Client::over(server.client("agent", |_| true), "memory".into(), 1000, 1000)
}

/// The next requests of this kind are swallowed.
fn swallow(server: &ApiServer, mut times: usize, of: impl Fn(&Asked) -> bool + Send + 'static) {
    server.trouble(move |asked| {
        let hit = times > 0 && of(asked);
        times -= usize::from(hit);
        hit.then_some(Trouble::Freeze)
    });
}

#[tokio::test(start_paused = true)]
async fn a_watch_waited_for_ever_for_an_answer_that_never_began() {
    let server = ApiServer::new();
    let pod = |name: &str| json!({"metadata": {"name": name, "namespace": "shop"}});
    server.put("/api/v1/namespaces/shop/pods", pod("one"));
    swallow(&server, 2, |_| true);
    let (tell, mut told) = mpsc::unbounded_channel();
    let client = client(&server);
    let following = tokio::spawn(async move {
        follow::<Pod>(&client, &Selection::default(), 0, |happening| tell.send(happening).is_ok()).await;
    });
    let mut failures = Vec::new();
    let mut names = Vec::new();
    while names.is_empty() {
        match timeout(LONG, told.recv()).await.expect("it goes on").unwrap() {
            Happening::Failed(error) => failures.push(error.to_string()),
            Happening::Listed(all) => names.extend(all.into_iter().map(|(name, _)| name.name)),
            _ => {}
        }
    }
    assert_eq!(names, ["one"]);
    assert!(failures.len() == 2 && failures.iter().all(|f| f.contains("no answer within")), "{failures:?}");
    // The same while it watches: the watch is opened again, and what came meanwhile is told.
    swallow(&server, 1, |asked| asked.verb == "watch");
    server.end_watches();
    server.put("/api/v1/namespaces/shop/pods", pod("two"));
    loop {
        match timeout(LONG, told.recv()).await.expect("it goes on").unwrap() {
            Happening::Put(name, _) if name.name == "two" => break,
            _ => {}
        }
    }
    following.abort();
}

#[tokio::test(start_paused = true)]
async fn an_event_that_nobody_answers_holds_up_no_other() {
    let server = ApiServer::new();
    swallow(&server, 1, Asked::writes);
    let mut recorder = Recorder::new(client(&server), "n1");
    let event = |pod: &str| PodEvent {
        pod: ObjectName::new("shop", pod),
        uid: pod.into(),
        reason: "NetworkNotReady".into(),
        message: "x".into(),
    };
    let lost = timeout(LONG, recorder.record(&event("one"))).await.expect("it gives up");
    assert!(lost.unwrap_err().to_string().contains("no answer within"));
    timeout(LONG, recorder.record(&event("two"))).await.unwrap().unwrap();
    assert_eq!(server.objects("/api/v1/events").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_takes_its_time_is_waited_for_and_loses_nothing() {
    let server = ApiServer::new();
    server.trouble(|_| Some(Trouble::Slow(Duration::from_secs(50))));
    server.put("/api/v1/namespaces", json!({"metadata": {"name": "shop"}}));
    server.put(
        "/api/v1/nodes",
        json!({"metadata": {"name": "n2"}, "spec": {"podCIDRs": ["10.1.2.0/24"]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.2"}]}}),
    );
    let pods = "/api/v1/namespaces/shop/pods";
    let pod = |n: u8| {
        json!({"metadata": {"name": format!("p{n}"), "namespace": "shop", "uid": format!("p{n}")}, "spec": {"nodeName": "n2"},
            "status": {"phase": "Running", "podIPs": [{"ip": format!("10.1.2.{n}")}]}})
    };
    (1..=3).for_each(|n| server.put(pods, pod(n)));
    let (tell, mut told) = mpsc::unbounded_channel();
    let status = SourceStatus::default();
    let translator = Translator::new(Options { node: "n1".parse().unwrap() }).unwrap();
    tokio::spawn(run(client(&server), translator, status.clone(), move |update| tell.send(update).is_ok()));
    let (mut there, mut gone) = (BTreeSet::new(), BTreeSet::new());
    let mut until = async |wanted: &[&str]| {
        while there != wanted.iter().map(|p| format!("shop.{p}")).collect() {
            let update = timeout(LONG, told.recv()).await.expect("it goes on").unwrap();
            for (key, endpoint) in update.delta.endpoints {
                let name = key.name.to_string();
                if endpoint.is_some() {
                    there.insert(name);
                } else if there.remove(&name) {
                    gone.insert(name);
                }
            }
        }
        gone.clone()
    };
    assert_eq!(until(&["p1", "p2", "p3"]).await, BTreeSet::new());
    // While no watch is open: one comes, one goes.
    server.end_watches();
    server.put(pods, pod(4));
    assert!(server.delete("/api/v1/namespaces/shop/pods/p1"));
    assert_eq!(until(&["p2", "p3", "p4"]).await, BTreeSet::from(["shop.p1".to_owned()]));
    assert_eq!(status.kinds()["Pod"].failures, 0, "slow is no failure");
}
