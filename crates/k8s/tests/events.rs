//! Events about Pods: one per Pod and reason, with a count, and not more than anybody reads.

use std::time::Duration;

use flowloom_k8s::{Client, ObjectName, PodEvent, Recorder};
use flowloom_testkit::api_server::{ApiServer, Asked};
use serde_json::Value;

const EVENTS: &str = "/api/v1/events";

fn recorder(server: &ApiServer) -> Recorder {
    Recorder::new(Client::over(server.client("agent", |_| true), "memory".into(), 10_000, 10_000), "n1")
}

fn event(pod: usize, message: &str) -> PodEvent {
    PodEvent {
        pod: ObjectName::new("shop", format!("web-{pod}")),
        uid: format!("uid-{pod}"),
        reason: "NetworkNotReady".into(),
        message: message.into(),
    }
}

fn only(server: &ApiServer) -> Value {
    let events = server.objects(EVENTS);
    assert_eq!(events.len(), 1, "{events:?}");
    events[0].clone()
}

#[tokio::test(start_paused = true)]
async fn an_event_that_repeats_is_one_with_a_right_count_and_the_last_message() {
    let server = ApiServer::new();
    let mut recorder = recorder(&server);
    for _ in 0..5 {
        recorder.record(&event(1, "no address is free")).await.unwrap();
    }
    assert_eq!(only(&server)["count"], 1, "the others are counted and wait");
    assert_eq!(only(&server)["involvedObject"]["uid"], "uid-1");
    tokio::time::advance(Duration::from_secs(61)).await;
    recorder.record(&event(1, "the node has no pod CIDR")).await.unwrap();
    assert_eq!(only(&server)["count"], 6, "as often as it happened");
    assert_eq!(only(&server)["message"], "the node has no pod CIDR");
}

#[tokio::test(start_paused = true)]
async fn events_of_many_pods_are_bounded_and_go_on_a_minute_later() {
    let server = ApiServer::new();
    let mut recorder = recorder(&server);
    for pod in 0..200 {
        recorder.record(&event(pod, "x")).await.unwrap();
    }
    let sent = |server: &ApiServer| server.asked().iter().filter(|a| a.writes()).count();
    assert_eq!(sent(&server), 64);
    tokio::time::advance(Duration::from_secs(61)).await;
    recorder.record(&event(199, &"long ".repeat(1000))).await.unwrap();
    assert_eq!(sent(&server), 65);
    let long = server.objects(EVENTS).into_iter().find(|e| e["involvedObject"]["name"] == "web-199").unwrap();
    assert!(long["message"].as_str().unwrap().len() <= 1024, "what the API takes");
}

#[tokio::test(start_paused = true)]
async fn an_event_that_somebody_deleted_is_made_anew() {
    let server = ApiServer::new();
    let mut recorder = recorder(&server);
    recorder.record(&event(1, "x")).await.unwrap();
    let name = only(&server)["metadata"]["name"].as_str().unwrap().to_owned();
    assert!(server.delete(&format!("/api/v1/namespaces/shop/events/{name}")));
    tokio::time::advance(Duration::from_secs(61)).await;
    recorder.record(&event(1, "x")).await.unwrap();
    assert_ne!(only(&server)["metadata"]["name"], name.as_str());
    let verbs: Vec<_> = server.asked().iter().filter(|a| Asked::writes(a)).map(|a| a.verb).collect();
    assert_eq!(verbs, ["create", "patch", "create"]);
}
