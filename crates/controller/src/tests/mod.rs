//! Controllers against an API server in memory, in virtual time: leadership, disorder, and what is never written.

mod disorder;
mod leadership;
mod publish;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use flowloom_api::v1::ControllerStatus;
use flowloom_k8s::Client;
use flowloom_k8s::access::CONTROLLER;
use flowloom_testkit::api_server::{ApiServer, Asked};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::config::Config;
use crate::core::Question;
use crate::metrics::Metrics;
use crate::run::controller;

const SLICES: &str = "/apis/flowloom.io/v1alpha1/workloadslices";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/flowloom/leases/flowloom-controller";

/// A running controller. Dropped, it dies as a killed process does: at once, telling nobody.
struct Running {
    me: String,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
    questions: mpsc::Sender<Question>,
    metrics: Metrics,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn start(server: &ApiServer, me: &str) -> Running {
    let rights = |a: &Asked| CONTROLLER.allows(a.verb, &a.group, &a.resource, &a.namespace, &a.name);
    let client = Client::over(server.client(me, rights), "memory".into(), 100, 100);
    let (ask, questions) = mpsc::channel(16);
    let (stop, stopped) = watch::channel(false);
    let (config, metrics, name) = (Config::default(), Metrics::default(), me.to_owned());
    let shown = metrics.clone();
    let task = tokio::spawn(async move {
        controller(&config, name, client, questions, shown, stopped).await;
    });
    Running { me: me.to_owned(), stop, task, questions: ask, metrics }
}

impl Running {
    async fn status(&self) -> ControllerStatus {
        let (to, answer) = oneshot::channel();
        self.questions.send(Question::Status(to)).await.unwrap();
        answer.await.unwrap()
    }

    /// As on SIGTERM.
    async fn end(mut self) {
        self.stop.send_replace(true);
        (&mut self.task).await.unwrap();
    }
}

/// Polls in virtual time.
async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(120);
    while !holds().await {
        assert!(Instant::now() < until, "not within two minutes: {what}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Holds all the time.
async fn throughout(seconds: u64, what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < until {
        assert!(holds().await, "{what}");
        sleep(Duration::from_millis(200)).await;
    }
}

fn pod(name: &str, number: u8, app: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "shop", "labels": {"app": app}},
        "spec": {"nodeName": format!("n{}", number % 2 + 1), "serviceAccountName": "default",
            "containers": [{"name": "c", "ports": [{"name": "http", "containerPort": 80}]}]},
        "status": {"phase": "Running", "podIP": format!("10.40.0.{number}"), "podIPs": [{"ip": format!("10.40.0.{number}")}]}
    })
}

fn add(server: &ApiServer, name: &str, number: u8) {
    server.put("/api/v1/namespaces/shop/pods", pod(name, number, "web"));
}

fn remove(server: &ApiServer, name: &str) {
    assert!(server.delete(&format!("/api/v1/namespaces/shop/pods/{name}")));
}

/// Pods and their first address, as all slices together say it; fails when a Pod stands in two.
fn published(server: &ApiServer) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    for slice in server.objects(SLICES) {
        for w in slice["spec"]["workloads"].as_array().unwrap() {
            let name = format!("{}/{}", w["namespace"].as_str().unwrap(), w["pod"].as_str().unwrap());
            let ip = w["ips"][0].as_str().unwrap().to_owned();
            assert!(out.insert(name.clone(), ip).is_none(), "{name} stands in two slices");
        }
    }
    out
}

fn names(server: &ApiServer) -> BTreeSet<String> {
    published(server).into_keys().collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|n| format!("shop/{n}")).collect()
}

/// Writes of slices by a client.
fn writes(server: &ApiServer, me: &str) -> usize {
    server.asked().iter().filter(|a| a.client == me && a.writes() && a.resource == "workloadslices").count()
}

fn holder(server: &ApiServer) -> String {
    let lease = server.object(LEASE).unwrap_or_default();
    lease["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned()
}
