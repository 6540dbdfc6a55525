//! Something between here and the API server takes requests and answers none (a balancer whose server is gone): nobody waits for ever.
#![expect(clippy::unwrap_used, reason = "helpers of tests, outside test functions")]

use std::time::Duration;

use flowloom_k8s::{Client, Happening, ObjectName, Pod, PodEvent, Recorder, Selection, follow};
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
