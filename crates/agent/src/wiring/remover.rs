//! Removes devices on a thread of its own, as many at once as wait: the kernel makes every removal wait for all CPUs, and
//! several together wait once.

use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use flowloom_netlink::{Handle, LinkName, Netns};

use super::{Wire, WiringError, workload};
use crate::writes;

/// A device to remove, and who waits for it.
struct Job {
    wire: Wire,
    done: Sender<Result<(), WiringError>>,
}

/// Hands devices to the thread. The thread ends with the last of these.
#[derive(Clone, Debug)]
pub(super) struct Queue(Sender<Job>);

impl Queue {
    /// Starts the thread, in the caller's network namespace.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(super) fn start() -> std::io::Result<Self> {
        let (sender, jobs) = mpsc::channel();
        thread::Builder::new().name("remover".into()).spawn(move || serve(&jobs))?;
        Ok(Self(sender))
    }

    /// Removes one and returns when it is gone.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub(super) fn remove(&self, wire: &Wire) -> Result<(), WiringError> {
        let (done, answer) = mpsc::channel();
        let ended = || WiringError::Mismatch("the thread that removes devices has ended".to_owned());
        self.0.send(Job { wire: wire.clone(), done }).map_err(|_| ended())?;
        answer.recv().map_err(|_| ended())?
    }
}

fn serve(jobs: &Receiver<Job>) {
    while let Ok(first) = jobs.recv() {
        let mut batch = vec![first];
        batch.extend(jobs.try_iter());
        if batch.len() > 1 {
            // What this leaves behind is met, and told, one by one below.
            if let Err(e) = together(&batch) {
                tracing::debug!(error = %e, "devices are removed one by one");
            }
        }
        for job in batch {
            let result = Handle::new()
                .map_err(WiringError::from)
                .and_then(|mut h| workload::unwire(&mut h, &job.wire));
            // A request that was given up needs no answer.
            let _ = job.done.send(result);
        }
    }
}

fn together(batch: &[Job]) -> Result<(), WiringError> {
    let mut host = Handle::new()?;
    let mut links = Vec::with_capacity(batch.len());
    for job in batch.iter().filter(|j| !matches!(j.wire, Wire::Device { .. })) {
        if let Some(link) = host.link(&LinkName::new(job.wire.device().to_owned())?)?
            && link.is_ours()
        {
            links.push(link.index);
        }
    }
    links.sort_unstable();
    links.dedup();
    writes::before("devices removal");
    writes::made(host.delete_links(&links)?);
    for job in batch {
        if let Wire::Managed { netns, .. } = &job.wire {
            writes::made(usize::from(Netns::remove(netns)?));
        }
    }
    Ok(())
}
