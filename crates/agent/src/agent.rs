//! Puts the parts together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use flowloom_datapath::{Config as DatapathConfig, Datapath};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::config::{Config, Forwarding, Receive};
use crate::core::{Command, Core, Line, Outside};
use crate::events::EventLog;
use crate::plane::Kernel;
use crate::source::{self, DocumentFile};
use crate::store::Store;
use crate::threads::{self, Stop};
use crate::wiring::{Host, Wiring};
use crate::{api, health, replay, reserve, uninstall};

/// What fails where the kernel, the pins or a program do not fit.
const OPENING: &str = "opening the datapath";

fn datapath_config(config: &Config) -> DatapathConfig {
    DatapathConfig {
        pin_root: config.pin_root.clone(),
        forwarding: match config.forwarding {
            Forwarding::Ebpf => flowloom_datapath::Forwarding::Ebpf,
            Forwarding::Stack => flowloom_datapath::Forwarding::Stack,
        },
        tunnel_port: config.tunnel_port,
        receive: match config.tunnel_receive {
            Receive::Device => flowloom_datapath::Receive::Device,
            Receive::Uplink => flowloom_datapath::Receive::Uplink,
        },
        conntrack_entries: config.conntrack.entries,
        conntrack_new_entries: config.conntrack.new_entries,
        event_bytes: None,
        event_rate: config.events.rate,
        answer_rate: config.events.answer_rate,
        verdict_events: config.events.verdicts,
        ..DatapathConfig::default()
    }
}

/// Runs until SIGTERM or SIGINT. What is in force stays in force.
///
/// # Errors
/// What keeps the agent from starting: another agent, a live socket, a kernel or pins that do not fit.
pub fn run(config: Config) -> Result<()> {
    let store = Store::open(&config.state_dir)?;
    reserve::take(&config, &store);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(16)
        .thread_stack_size(512 * 1024)
        .enable_all()
        .build()
        .context("starting the runtime")?;
    let socket = runtime.block_on(async { api::bind(&config.socket) })?;
    // The kernel looks at programs for about as long as a large document takes to be understood.
    let (path, lock) = (config.document.clone(), config.lock_file());
    let document = std::thread::Builder::new()
        .name("document".into())
        .spawn(move || DocumentFile::begin(&path, &lock))?;
    let events = Arc::new(EventLog::new(config.events.history));
    let line = Line::new(&config, events.clone());
    let handle = line.handle();
    // So are the API server's lists; what they say waits for the core.
    let started = config.kubernetes.enabled.then(|| {
        let _runtime = runtime.enter();
        source::start(&config, &handle)
    });
    let datapath = Datapath::start(datapath_config(&config)).context(OPENING)?;
    tracing::debug!(loading = datapath.is_loading(), "maps are there");
    let (view, verified) = (datapath.view(), datapath.verified());
    let wiring: Box<dyn Wiring> = Box::new(Host::open(&config.masquerade.table, &config.overlay_device)?);
    let plane = Box::new(Kernel::new(datapath, &config.cgroup_root));
    let mut core = Core::new(config.clone(), Outside { store, wiring, plane }, line)?;
    match document.join() {
        Ok(read) => core.begin_with(read),
        Err(_) => anyhow::bail!("reading the document panicked"),
    }

    // Subscriptions first, then the full look (in `Core::run`): nothing falls between.
    threads::read_events(&view, events).context("reading events")?;
    threads::watch_network(handle.clone()).context("watching the network")?;
    if let Some(started) = started {
        core.watch_kubernetes(started);
    }
    let _watcher = watch_document(&config, &handle);
    let _queue = replay::watch(&config.state_dir, handle.clone())
        .inspect_err(|e| tracing::error!(error = %e, "the queue of DELs is not watched"));
    let stop = Arc::new(Stop::default());
    let every = Duration::from_secs(config.conntrack.sweep_seconds);
    let sweeper =
        threads::sweep(view, handle.clone(), every, stop.clone()).context("starting the sweeper")?;
    let writer = std::thread::Builder::new().name("core".into()).spawn(move || core.run())?;

    let refused = runtime.block_on(async {
        let (stop_api, stopped) = watch::channel(false);
        let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
        if config.kubernetes.enabled {
            tokio::spawn(health::run(config.kubernetes.clone(), handle.clone(), stopped.clone()));
        }
        let server = tokio::spawn(api::serve(socket, handle.clone(), config.api.clone(), stopped));
        let mut passes = handle.passes();
        let ready = async {
            while !handle.health().ready {
                if passes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
            tracing::info!(node = %config.node, "ready");
            // Without systemd there is nobody to tell.
            let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]);
            std::future::pending::<()>().await;
        };
        let refused = async {
            match tokio::task::spawn_blocking(move || verified.wait()).await {
                Ok(Err(e)) => return e,
                Ok(Ok(())) => tracing::debug!("every program is verified"),
                Err(e) => tracing::warn!(error = %e, "waiting for the verifier"),
            }
            // Nothing more is to be heard.
            std::future::pending().await
        };
        let refused = tokio::select! {
            _ = terminate.recv() => None,
            _ = interrupt.recv() => None,
            () = ready => None,
            e = refused => Some(e),
        };
        let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Stopping]);
        stop_api.send_replace(true);
        server.await.context("the API server")?;
        handle.send(Command::Stop);
        anyhow::Ok(refused)
    })?;
    stop.set();
    for (name, thread) in [("sweeper", sweeper), ("core", writer)] {
        if thread.join().is_err() {
            anyhow::bail!("the {name} thread panicked");
        }
    }
    runtime.shutdown_timeout(Duration::from_millis(200));
    refused.map_or(Ok(()), |e| Err(e).context(OPENING))
}

/// Without a watch the core's safety timer still finds changes; the directory may appear later.
fn watch_document(config: &Config, handle: &crate::core::Handle) -> Option<notify::RecommendedWatcher> {
    let (handle, path) = (handle.clone(), &config.document);
    source::watch(path, &config.lock_file(), move || handle.send(Command::Document(Instant::now())))
        .inspect_err(|e| tracing::error!(path = %path.display(), error = %e, "the document's directory is not watched"))
        .ok()
}

/// Removes everything of this agent's making.
///
/// # Errors
/// What could not be removed; the rest is gone.
pub fn remove(config: &Config) -> Result<()> {
    uninstall::uninstall(config)
}
