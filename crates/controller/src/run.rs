//! Puts the parts together.

use std::hash::{BuildHasher, RandomState};

use anyhow::{Context as _, Result, anyhow};
use flowloom_k8s::{Client, ClientOptions};
use flowloom_serve::Limits;
use kube::Api;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::api;
use crate::config::Config;
use crate::core::{Core, Outside, Question};
use crate::lease::{self, Candidate, Seen, Standing};
use crate::metrics::Metrics;
use crate::source::{Pods, Slices, Source};

/// Unique among the candidates of this moment and of all times before.
fn identity(config: &Config) -> Result<String> {
    if !config.identity.is_empty() {
        return Ok(config.identity.clone());
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").context("host name")?;
    let random = RandomState::new().hash_one(std::process::id());
    Ok(format!("{}_{random:016x}", host.trim()))
}

/// Everything of one controller but sockets and signals, until `stop` turns true. Writes under way are finished, then the lease is given back.
pub async fn controller(
    config: &Config,
    me: String,
    client: Client,
    questions: mpsc::Receiver<Question>,
    metrics: Metrics,
    stop: watch::Receiver<bool>,
) {
    let candidate = Candidate {
        leases: Api::namespaced(client.connection(), &config.lease.namespace),
        name: config.lease.name.clone(),
        me,
        times: config.times(),
    };
    let (standing_tx, standing) = watch::channel(Standing::default());
    let (seen_tx, seen) = watch::channel(Seen::default());
    let (stop_lease, lease_stopped) = watch::channel(false);
    // Ends with this future, too: a controller that is dropped is dead as a whole.
    let mut election = JoinSet::new();
    election.spawn(lease::run(candidate.clone(), standing_tx, seen_tx, lease_stopped));
    let jitter = RandomState::new().hash_one(&candidate.me);
    let sources: Vec<Box<dyn Source>> = vec![
        Box::new(Pods { client: client.clone(), jitter }),
        Box::new(Slices { client: client.clone(), jitter }),
    ];
    let outside =
        Outside { slices: Api::all(client.connection()), candidate, standing, seen, questions, metrics };
    let (core, news) = Core::new(outside, sources, config.pace());
    core.run(news, stop).await;
    stop_lease.send_replace(true);
    while let Some(ended) = election.join_next().await {
        if let Err(e) = ended {
            tracing::error!(error = %e, "the election ended badly");
        }
    }
}

/// Runs until SIGTERM or SIGINT.
///
/// # Errors
/// What keeps the controller from starting: no credentials, a live socket, a listener that is taken.
pub fn run(config: &Config) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the runtime")?;
    runtime.block_on(async {
        let socket = flowloom_serve::bind(&config.socket)?;
        let listen = config.listen().map_err(|e| anyhow!(e))?;
        let listener = match listen {
            Some(at) => Some(TcpListener::bind(at).await.with_context(|| format!("metrics.listen {at}"))?),
            None => None,
        };
        let kubeconfig = Some(config.kubernetes.kubeconfig.clone()).filter(|p| !p.as_os_str().is_empty());
        let options =
            ClientOptions { kubeconfig, qps: config.kubernetes.qps, burst: config.kubernetes.burst };
        let client = Client::new(&options).await?;
        let me = identity(config)?;
        tracing::info!(me, server = client.server(), "starts");

        let metrics = Metrics::default();
        let (ask, questions) = mpsc::channel(16);
        let (stop, stopped) = watch::channel(false);
        let limits = Limits {
            connections: config.api.connections,
            header: std::time::Duration::from_secs(config.api.header_seconds),
        };
        let api =
            tokio::spawn(flowloom_serve::serve(socket, api::router(ask.clone()), limits, stopped.clone()));
        if let Some(listener) = listener {
            let router = api::metrics_router(ask.clone(), metrics.clone());
            tokio::spawn(flowloom_serve::serve_tcp(listener, router, limits, stopped.clone()));
        }
        let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
        let controller = controller(config, me, client, questions, metrics, stopped);
        tokio::pin!(controller);
        // Without systemd there is nobody to tell.
        let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]);
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = &mut controller => return Err(anyhow!("the controller ended by itself")),
        }
        let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Stopping]);
        stop.send_replace(true);
        controller.await;
        api.await.context("the API server")?;
        drop(ask);
        Ok(())
    })
}
