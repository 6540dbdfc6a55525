//! The tasks that talk to the API server: watches in, the node's condition, taint and events out.

use std::time::Duration;

use flowloom_k8s::{
    Client, ClientOptions, NodeDuties, Options, PodEvent, Recorder, SourceStatus, Translator, perform,
    run_with,
};
use tokio::sync::{mpsc, watch};

use crate::config::Config;
use crate::core::{Command, Handle};

/// Between attempts to read credentials, or to write to the node's object.
const AGAIN: Duration = Duration::from_secs(5);

/// Events that wait while the API server is slow or away; what comes beyond them is left out.
const EVENTS: usize = 256;

type OwnNode = Option<std::sync::Arc<flowloom_k8s::Node>>;

/// What the core needs to know of the tasks.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) status: SourceStatus,
    pub(crate) events: mpsc::Sender<PodEvent>,
}

/// Starts the tasks on the current runtime; they end with it.
pub(crate) fn start(config: &Config, core: &Handle) -> Started {
    let status = SourceStatus::default();
    let (events, wanted) = mpsc::channel(EVENTS);
    tokio::spawn(whole(config.clone(), core.clone(), status.clone(), wanted));
    Started { status, events }
}

async fn whole(config: Config, core: Handle, status: SourceStatus, events: mpsc::Receiver<PodEvent>) {
    let options = ClientOptions {
        kubeconfig: Some(config.kubernetes.kubeconfig.clone()).filter(|p| !p.as_os_str().is_empty()),
        qps: config.kubernetes.qps,
        burst: config.kubernetes.burst,
    };
    let client = loop {
        match Client::new(&options).await {
            Ok(client) => break client,
            // A service account's files may come later.
            Err(e) => {
                tracing::error!(error = %e, "no access to the API server");
                status.failed(e.to_string());
                tokio::time::sleep(AGAIN).await;
            }
        }
    };
    let server = client.server().to_owned();
    tracing::info!(%server, "watching the API server");
    core.send(Command::Ask(Box::new(move |core| {
        if let Some(kubernetes) = &mut core.kubernetes {
            kubernetes.server = server;
        }
    })));
    let translator = match Translator::new(Options { node: config.node.clone() }) {
        Ok(translator) => translator,
        Err(e) => {
            tracing::error!(error = %e, "kubernetes");
            return;
        }
    };
    let (own, own_watch) = watch::channel(None);
    tokio::spawn(duties(client.clone(), config.clone(), core.clone(), own_watch));
    tokio::spawn(send_events(Recorder::new(client.clone(), config.node.as_str()), events));
    let peers = match config.kubernetes.peers {
        crate::config::Peers::Pods => flowloom_k8s::Peers::Pods,
        crate::config::Peers::Slices => flowloom_k8s::Peers::Slices,
    };
    run_with(peers, client, translator, status, move |update| {
        own.send_if_modified(|known: &mut OwnNode| {
            let changed = *known != update.own_node;
            known.clone_from(&update.own_node);
            changed
        });
        core.send(Command::Kubernetes(Box::new(update)));
        true
    })
    .await;
}

/// While the agent is ready, its node says so.
async fn duties(client: Client, config: Config, core: Handle, mut own: watch::Receiver<OwnNode>) {
    let taint = &config.kubernetes.startup_taint;
    let mut passes = core.passes();
    loop {
        let left = own.borrow_and_update().as_ref().map(|node| NodeDuties::of(node, taint));
        passes.borrow_and_update();
        let mut pause = Duration::MAX;
        if let Some(left) = left.filter(|left| !left.is_done())
            && core.health().ready
        {
            match perform(&client, config.node.as_str(), taint, &left).await {
                Ok(()) => {
                    tracing::info!(node = %config.node, "the node's object says that its network is ready")
                }
                Err(e) => {
                    tracing::warn!(node = %config.node, error = %e, "the node's object is not written yet")
                }
            }
            // Its own answer comes back by the watch; without that it is tried again.
            pause = AGAIN;
        }
        let ready = core.health().ready;
        tokio::select! {
            changed = own.changed() => if changed.is_err() { return },
            // Once ready, passes change nothing here.
            changed = passes.changed(), if !ready => if changed.is_err() { return },
            () = tokio::time::sleep(pause.min(Duration::from_secs(3600))) => {}
        }
    }
}

async fn send_events(mut recorder: Recorder, mut events: mpsc::Receiver<PodEvent>) {
    while let Some(event) = events.recv().await {
        if let Err(e) = recorder.record(&event).await {
            tracing::debug!(pod = %event.pod, error = %e, "an event was not taken");
        }
    }
}
