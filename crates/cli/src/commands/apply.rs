//! `flowloom apply`: the one allocator of a document.

use std::collections::BTreeSet;
use std::fs::File;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use flowloom_api::Client;
use flowloom_api::v1::digest;
use flowloom_model::{
    Allocation, EndpointKey, Fault, Format, Lock, ObjectRef, Reason, Timestamp, Vni, VpcName, World,
    allocate, load, validate,
};

use super::validate::{check, read};
use super::wait::{Wait, passing, poll};
use crate::context::Context;
use crate::exit::{Exit, Failure};
use crate::files;
use crate::output::document::{ApplyReport, Change, Counts, Enforced, Written, applied};
use crate::output::time::now_ms;
use crate::values::duration;

/// Complete a document with addresses and VNIs, write them beside it, and hand both to the agents.
///
/// FILE is checked first; with a fault nothing is written. What the document leaves open (ip, mac, vni) is assigned and kept in
/// FILE.lock.yaml: the same document gets the same values again. Keep the lock file with the document.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom apply network.yaml --dry-run
  flowloom apply network.yaml
  flowloom apply network.yaml --to /etc/flowloom/desired.yaml --wait 30s
  flowloom apply network.yaml --to /srv/net.yaml --wait 30s --agent /run/a.sock --agent /run/b.sock")]
pub(crate) struct ApplyArgs {
    /// The document.
    file: PathBuf,
    /// Install document and lock here, where the agent reads them.
    #[arg(long, value_name = "PATH")]
    to: Option<PathBuf>,
    /// Show what would be assigned, and write nothing.
    #[arg(long, conflicts_with_all = ["to", "wait"])]
    dry_run: bool,
    /// Apply what is right although objects have faults: agents leave these, and what depends on them, as they are or out.
    #[arg(long)]
    force_partial: bool,
    /// Wait until the agents enforce it; exit code 5 when they do not in time.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    wait: Option<Duration>,
    /// The agents to wait for, by socket; --socket when none is named.
    #[arg(long, value_name = "SOCKET", requires = "wait")]
    agent: Vec<PathBuf>,
}

pub(crate) fn run(context: &mut Context<'_>, args: &ApplyArgs) -> Result<Exit, Failure> {
    let format = Format::of_path(&args.file);
    if let Some(to) = &args.to
        && Format::of_path(to) != format
    {
        let message = format!(
            "{} and {} must be of one format: both .json or neither",
            args.file.display(),
            to.display()
        );
        return Err(Failure::usage(message));
    }
    let bytes = read(&args.file)?;
    let lock_path = lock_file(&args.file);
    // One apply at a time for a document: two would hand out one address twice. Released when the process ends.
    let _turn = if args.dry_run { None } else { Some(take_turn(&args.file)?) };
    let old_text = files::read_if_there(&lock_path)?;
    let (old_path, old) = match (old_text, &args.to) {
        // A document without its lock that is in force somewhere keeps the addresses it has there.
        (None, Some(to)) => (lock_file(to), files::read_if_there(&lock_file(to))?),
        (text, _) => (lock_path.clone(), text),
    };
    let old = match old {
        None => Ok(Lock::default()),
        Some(text) => match Lock::parse(&text) {
            Ok(lock) => Ok(lock),
            Err(mut fault) => {
                fault.path = old_path.display().to_string();
                Err(vec![fault])
            }
        },
    };
    let mut report = ApplyReport::new(args.file.display().to_string(), args.dry_run);
    let planned = old.and_then(|old| {
        let plan = plan(&args.file, &bytes, &old, Timestamp(now_ms() / 1000), args.force_partial)?;
        Ok((old, plan))
    });
    let (old, plan) = match planned {
        Ok(planned) => planned,
        Err(faults) => {
            report.faults = faults;
            context.show(&report, applied)?;
            return Err(refused(&report.faults));
        }
    };
    report.objects = Some(Counts::of(&plan.world));
    report.changes = changes(&plan.open, &plan.world, &old, &plan.lock);
    report.faults = plan.faults;
    let text = plan.lock.to_yaml().map_err(|f| Failure::error(f.to_string()))?;
    if !args.dry_run {
        // Locks before documents: nobody reads a document whose addresses are not known yet.
        report.written.push(put(&lock_path, text.as_bytes())?);
        if let Some(to) = &args.to {
            report.written.push(put(&lock_file(to), text.as_bytes())?);
            report.written.push(put(to, &bytes)?);
        }
    }
    let waited = args.wait.map_or(Ok(Vec::new()), |limit| {
        let sockets = if args.agent.is_empty() { std::slice::from_ref(&context.socket) } else { &args.agent };
        enforced(sockets, &digest(&bytes, Some(text.as_bytes())), limit)
    });
    let failure = match waited {
        Ok(agents) => {
            report.agents = agents;
            None
        }
        Err(failure) => Some(failure),
    };
    context.show(&report, applied)?;
    failure.map_or(Ok(Exit::Ok), Err)
}

fn refused(faults: &[Fault]) -> Failure {
    let partial =
        if faults.iter().all(|f| f.object.is_some()) { "; --force-partial applies the rest" } else { "" };
    Failure::error(format!("nothing was written{partial}"))
}

/// `<file>.lock.yaml`.
fn lock_file(document: &Path) -> PathBuf {
    let mut name = document.to_path_buf().into_os_string();
    name.push(".lock.yaml");
    name.into()
}

/// An advisory lock on the document's directory (a lock on the file would be on the one that is about to be replaced).
fn take_turn(document: &Path) -> Result<File, Failure> {
    let dir = document.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let failed = |e: std::io::Error| Failure::error(format!("{}: {e}", dir.display()));
    let dir = File::open(dir).map_err(failed)?;
    dir.lock().map_err(failed)?;
    Ok(dir)
}

/// What is to be written.
struct Plan {
    /// The world before it was completed.
    open: World,
    /// The completed world.
    world: World,
    lock: Lock,
    /// Only with `--force-partial`.
    faults: Vec<Fault>,
}

fn plan(file: &Path, bytes: &[u8], old: &Lock, now: Timestamp, partial: bool) -> Result<Plan, Vec<Fault>> {
    let (open, mut faults) = match check(file, bytes) {
        Ok(parsed) => (parsed.world, Vec::new()),
        Err(faults) if !partial => return Err(faults),
        Err(_) => {
            let loaded = load(bytes, Format::of_path(file), None, None)?;
            // What the document leaves open is assigned below; it is no fault here.
            let open = |f: &Fault| matches!(f.code, Reason::AwaitingAddress | Reason::AwaitingVni);
            let faults = loaded.faults.into_iter().filter(|f| !open(f)).collect();
            (loaded.world, faults)
        }
    };
    let Allocation { world, mut lock, faults: unassigned } = allocate(&open, old, now);
    let known = faults.len();
    faults.extend(unassigned);
    faults.extend(validate(&world).into_iter().filter(|f| !f.keeps_object()));
    if faults.len() > known && !partial {
        return Err(faults);
    }
    keep_degraded(old, &faults, &mut lock);
    Ok(Plan { open, world, lock, faults })
}

/// An object with a fault may still run in its last good version: what it holds must not go to another.
fn keep_degraded(old: &Lock, faults: &[Fault], lock: &mut Lock) {
    let mut vnis: BTreeSet<Vni> = lock.vpcs.values().copied().collect();
    let mut addresses: BTreeSet<(VpcName, IpAddr)> = lock.endpoints.iter().flat_map(claims).collect();
    for object in faults.iter().filter_map(|f| f.object.as_ref()) {
        match object {
            ObjectRef::Vpc(name) if !lock.vpcs.contains_key(name) => {
                if let Some(vni) = old.vpcs.get(name).filter(|v| vnis.insert(**v)) {
                    lock.vpcs.insert(name.clone(), *vni);
                    lock.released_vnis.remove(vni);
                }
            }
            ObjectRef::Endpoint(key) if !lock.endpoints.contains_key(key) => {
                if let Some(entry) = old.endpoints.get_key_value(key)
                    && claims(entry).all(|claim| !addresses.contains(&claim))
                {
                    addresses.extend(claims(entry));
                    for claim in claims(entry) {
                        lock.released.remove(&claim);
                    }
                    lock.endpoints.insert(key.clone(), entry.1.clone());
                }
            }
            _ => {}
        }
    }
}

/// The addresses of a lock's entry.
fn claims<'a>(
    (key, ips): (&'a EndpointKey, &'a Vec<IpAddr>),
) -> impl Iterator<Item = (VpcName, IpAddr)> + 'a {
    ips.iter().map(|ip| (key.vpc.clone(), *ip))
}

/// What differs from the old lock, of what the document leaves open, and what is given back.
fn changes(open: &World, world: &World, old: &Lock, new: &Lock) -> Vec<Change> {
    let mut out = Vec::new();
    for (name, vni) in &new.vpcs {
        let left_open = open.vpcs.get(name).is_some_and(|v| v.vni.is_none());
        if left_open && old.vpcs.get(name) != Some(vni) {
            out.push(Change::assigned(ObjectRef::Vpc(name.clone()), format!("vni {vni}")));
        }
    }
    for (key, ips) in &new.endpoints {
        let left_open = open.endpoints.get(key).is_some_and(|e| e.ips.is_empty());
        if left_open && old.endpoints.get(key) != Some(ips) {
            let mut value: Vec<String> = ips.iter().map(|ip| format!("ip {ip}")).collect();
            value
                .extend(world.endpoints.get(key).and_then(|e| e.effective_mac()).map(|m| format!("mac {m}")));
            out.push(Change::assigned(ObjectRef::Endpoint(key.clone()), value.join(", ")));
        }
    }
    for (name, vni) in &old.vpcs {
        if !new.vpcs.contains_key(name) {
            out.push(Change::released(ObjectRef::Vpc(name.clone()), format!("vni {vni}")));
        }
    }
    for (key, ips) in &old.endpoints {
        let kept = new.endpoints.get(key);
        let gone: Vec<String> = ips
            .iter()
            .filter(|ip| kept.is_none_or(|k| !k.contains(ip)))
            .map(|ip| format!("ip {ip}"))
            .collect();
        if !gone.is_empty() {
            out.push(Change::released(ObjectRef::Endpoint(key.clone()), gone.join(", ")));
        }
    }
    out
}

/// Puts a file in place unless it has these contents already: an agent is not woken for nothing.
fn put(path: &Path, contents: &[u8]) -> Result<Written, Failure> {
    let changed = files::read_if_there(path)?.as_deref() != Some(contents);
    if changed {
        files::replace(path, contents)?;
    }
    Ok(Written { path: path.display().to_string(), changed })
}

/// Until every agent has exactly these contents in force.
fn enforced(sockets: &[PathBuf], digest: &str, limit: Duration) -> Result<Vec<Enforced>, Failure> {
    let start = Instant::now();
    sockets
        .iter()
        .map(|socket| {
            let client = Client::new(socket);
            let left = limit.saturating_sub(start.elapsed());
            poll(left, |left| {
                let status = client.clone().with_timeout(left).status().map_err(passing)?;
                let d = &status.document;
                if d.applied_digest == digest {
                    return Ok(Some(Enforced {
                        node: status.node,
                        generation: d.applied_generation,
                        waited_ms: u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX),
                        failed_endpoints: status.endpoints.failed,
                    }));
                }
                let why = if d.error.is_empty() { "another document is in force" } else { d.error.as_str() };
                Err(Wait::Not(format!("node {} (document {}): {why}", status.node, d.path)))
            })
            .map_err(|f| Failure {
                message: format!("not enforced by {}: {}", socket.display(), f.message),
                ..f
            })
        })
        .collect()
}
