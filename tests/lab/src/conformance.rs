//! `cargo xtask test conformance`: a cluster for upstream's suites, each group on it, the record.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use flowloom_testkit::Cmd;

use crate::lab::Lab;
use crate::options::{Cni, Families, Options};
use crate::report::{self, Record};
use crate::suites::{self, RunOptions};
use crate::{paths, upstream, wait};

/// What to run, on what.
#[derive(Debug, Clone)]
pub struct Conformance {
    /// Groups in order; everything when empty.
    pub groups: Vec<String>,
    /// The cluster to make, or the name of the one that is up.
    pub cluster: std::result::Result<Options, String>,
    /// Tests at the same time.
    pub procs: u8,
    /// Kill and start again the agent of the first node in this rhythm.
    pub kill_agent_every: Option<Duration>,
    /// For the suite, as they are.
    pub more: Vec<String>,
}

/// Runs it and prints a line per group.
///
/// # Errors
/// When a test failed, after all groups ran.
pub fn run(what: &Conformance) -> Result<()> {
    let exclusions = suites::repository_exclusions()?;
    ensure!(
        upstream::built()? == upstream::listed(),
        "upstream's tests are not those of tests/lab/sig-network.txt: cargo xtask lab names, and cargo test -p flowloom-lab --lib"
    );
    let lab = match &what.cluster {
        Ok(options) => Lab::up(options.clone())?,
        Err(name) => Lab::open(name)?,
    };
    let groups: Vec<&str> = match what.groups.is_empty() {
        true => suites::EVERYTHING.to_vec(),
        false => what.groups.iter().map(String::as_str).collect(),
    };
    let options = RunOptions {
        procs: what.procs,
        // A second run of a group, on another cluster, must not take the first one's files.
        reports: paths::cache().join("conformance").join(&lab.options().name),
        more: what.more.clone(),
    };
    let repository = repository()?;
    // Of what was built: while the groups run, the tree may change, and each of them writes its own record there.
    let built = commit(&repository);
    let mut failed = Vec::new();
    for group in groups {
        println!("{group}: runs");
        let run = match what.kill_agent_every {
            None => suites::run(&lab, group, &options),
            Some(rhythm) => under_fire(&lab, rhythm, || suites::run(&lab, group, &options)),
        }?;
        let record = Record::of(&run, describe(&lab, what), built.clone(), today());
        println!(
            "{group}: {} passed, {} failed, {} skipped in {} s ({})",
            record.passed,
            record.failed.len(),
            record.skipped.len(),
            record.seconds,
            run.log.display()
        );
        record.failed.iter().for_each(|(name, why)| println!("  FAILED {name}: {why}"));
        if !record.failed.is_empty() {
            failed.push(group);
        }
        // The record is of flowloom; a peer's results only help to judge them.
        if lab.options().cni == Cni::Flowloom {
            let key = key(group, lab.options().families, what.kill_agent_every.is_some());
            report::update(&repository.join("docs"), &key, record, &exclusions)?;
        }
    }
    if failed.is_empty() { Ok(()) } else { bail!("failed: {}", failed.join(", ")) }
}

/// What earlier runs have written is no change of what is run.
const RECORDS: &str = ":(exclude)docs/conformance.*";

/// Under which a run is recorded: another kind of cluster does not take the usual one's place.
fn key(group: &str, families: Families, under_fire: bool) -> String {
    let families = if families == Families::Ipv4 { ", IPv4 alone" } else { "" };
    let fire = if under_fire { ", under fire" } else { "" };
    format!("{group}{families}{fire}")
}

/// The agent of the first node is killed and started again for as long as the work takes.
fn under_fire<T>(lab: &Lab, rhythm: Duration, work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let shooter = scope.spawn(|| -> Result<u32> {
            let node = lab.node(1)?;
            let mut kills = 0;
            while !done.load(Ordering::Relaxed) {
                let next = Instant::now() + rhythm;
                let due = wait::until(rhythm + Duration::from_secs(1), "the next kill", || {
                    anyhow::ensure!(Instant::now() >= next || done.load(Ordering::Relaxed), "not yet");
                    Ok(())
                });
                due?;
                node.kill_agent()?;
                node.start_agent()?;
                kills += 1;
            }
            Ok(kills)
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        match shooter.join() {
            Ok(Ok(kills)) => println!("the agent of n1 was killed {kills} times"),
            Ok(Err(e)) => println!("the agent of n1 was not killed any more: {e:#}"),
            Err(_) => println!("the thread that kills the agent panicked"),
        }
        result
    })
}

fn describe(lab: &Lab, what: &Conformance) -> String {
    let families = match lab.options().families {
        Families::Dual => "dual stack",
        Families::Ipv4 => "IPv4",
    };
    let fire = what.kill_agent_every.map(|d| format!(", an agent killed every {} s", d.as_secs()));
    format!("{} nodes, {families}{}", lab.options().nodes, fire.unwrap_or_default())
}

fn repository() -> Result<PathBuf> {
    let root = paths::source().ancestors().nth(2);
    root.map(Path::to_path_buf).context("tests/lab is not in a repository")
}

fn commit(repository: &Path) -> String {
    let git = |args: &[&str]| {
        let argv = [&["git"], args].concat();
        Cmd::new(&argv)
            .dir(repository)
            .run()
            .ok()
            .filter(|o| o.status.success())
            .map(|o| o.stdout.trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short", "HEAD"]) else { return "unknown".to_owned() };
    let changed = git(&["status", "--porcelain", "--untracked-files=no", "--", ".", RECORDS])
        .is_none_or(|s| !s.is_empty());
    if changed { format!("{commit} and changes") } else { commit }
}

fn today() -> String {
    Cmd::new(&["date", "-I"]).run().map(|o| o.stdout.trim().to_owned()).unwrap_or_default()
}
