//! Control groups (v2) whose sockets an agent under measurement serves, and that only its client's threads join: neither the other side nor
//! anybody else on the machine meets its programs.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use flowloom_tests_netns::services::own_cgroup;

/// A group of this process, below the one that it was in and goes back to.
pub(super) struct Group {
    home: PathBuf,
    own: PathBuf,
    next: AtomicU32,
}

impl Group {
    pub(super) fn new() -> Result<Self> {
        let home = own_cgroup()?;
        sweep(&home);
        let own = home.join(format!("fl{}-bench", std::process::id()));
        std::fs::create_dir(&own).with_context(|| format!("making {}", own.display()))?;
        let group = Self { home, own, next: AtomicU32::new(0) };
        std::fs::write(group.own.join("cgroup.procs"), "0").context("joining the group of the benchmark")?;
        Ok(group)
    }

    /// A new group: where an agent attaches, and what threads [`join`].
    pub(super) fn served(&self) -> Result<PathBuf> {
        let path = self.own.join(format!("served{}", self.next.fetch_add(1, Ordering::Relaxed)));
        std::fs::create_dir(&path).with_context(|| format!("making {}", path.display()))?;
        // Only so may one thread be elsewhere than the others.
        std::fs::write(path.join("cgroup.type"), "threaded")
            .with_context(|| format!("{} takes no threads", path.display()))?;
        Ok(path)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let back = std::fs::write(self.home.join("cgroup.procs"), "0");
        if let Err(e) = back.and_then(|()| remove(&self.own)) {
            eprintln!("the control group {} stays: {e}", self.own.display());
        }
    }
}

/// The calling thread is of this group until it ends.
pub(super) fn join(group: &Path) -> Result<()> {
    std::fs::write(group.join("cgroup.threads"), "0").with_context(|| format!("joining {}", group.display()))
}

/// Removes a group and those below; waits a little for what ends in them.
fn remove(group: &Path) -> std::io::Result<()> {
    let begin = Instant::now();
    loop {
        for below in std::fs::read_dir(group)?.flatten().filter(|e| e.path().is_dir()) {
            // Told by the group above, which cannot go then.
            let _ = std::fs::remove_dir(below.path());
        }
        match std::fs::remove_dir(group) {
            Err(_) if begin.elapsed() < Duration::from_secs(5) => {
                std::thread::park_timeout(Duration::from_millis(5));
            }
            done => return done,
        }
    }
}

/// Groups of benchmarks that were killed before they could remove them.
fn sweep(home: &Path) {
    let left = |name: &str| {
        let pid = name.strip_prefix("fl").and_then(|n| n.strip_suffix("-bench"));
        pid.and_then(|p| p.parse::<u32>().ok()).is_some_and(|p| !Path::new(&format!("/proc/{p}")).exists())
    };
    let Ok(groups) = std::fs::read_dir(home) else { return };
    for group in groups.flatten().filter(|g| left(&g.file_name().to_string_lossy())) {
        let _ = remove(&group.path());
    }
}
