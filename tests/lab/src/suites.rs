//! Groups of upstream's suites, and how one is run against a lab.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::junit::{self, Outcome};
use crate::lab::Lab;
use crate::paths;

/// A named part of Kubernetes' suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// What it is asked for by.
    pub name: &'static str,
    /// Which tests, as a regular expression of Go.
    pub(crate) focus: &'static str,
    /// Which of these belong to another group.
    pub(crate) skip: Option<&'static str>,
}

const fn group(name: &'static str, focus: &'static str) -> Group {
    Group { name, focus, skip: None }
}

/// All groups, the ones that hold others last.
pub const GROUPS: &[Group] = &[
    Group { skip: Some("Netpol API"), ..group("netpol", r"\[sig-network\] Netpol ") },
    group(
        "netpol-smoke",
        r"\[sig-network\] Netpol NetworkPolicy between server and client should (support a 'default-deny-ingress' policy|enforce policy based on Ports|deny egress from pods based on PodSelector|stop enforcing policies after they are deleted)",
    ),
    group("netpol-api", r"\[sig-network\] Netpol API"),
    group("services", r"\[sig-network\] Services "),
    group(
        "services-smoke",
        r"\[sig-network\] Services should (serve a basic endpoint from pods|be able to create a functioning NodePort service|be rejected when no endpoints exist)",
    ),
    // What tier k8s runs: a test or two of each kind, none of which waits for long.
    group(
        "quick",
        r"\[sig-network\] (Services should (serve a basic endpoint from pods|be able to create a functioning NodePort service|be rejected when no endpoints exist|allow pods to hairpin back|support externalTrafficPolicy=Local for type=NodePort|be possible to connect to a service via ExternalIP|have session affinity work for service with type clusterIP|create endpoints for unready pods)|Netpol NetworkPolicy between server and client should (support a 'default-deny-ingress' policy|enforce policy based on Ports|deny egress from pods based on PodSelector|stop enforcing policies after they are deleted)|HostPort |DNS should provide DNS for the cluster|EndpointSlice should support a Service with multiple endpoint IPs|\[Feature:IPv6DualStack\] Granular Checks: Services Secondary IP Family \[LinuxOnly\] should function for pod-Service: http)",
    ),
    Group {
        skip: Some("IPv6DualStack"),
        ..group("networking", r"\[sig-network\] Networking Granular Checks")
    },
    group("affinity", r"\[sig-network\].*session affinity"),
    group("conntrack", r"\[sig-network\] Conntrack |KubeProxy should set TCP CLOSE_WAIT"),
    Group { skip: Some("DNS configMap"), ..group("dns", r"\[sig-network\] DNS ") },
    group("dns-config", r"\[sig-network\] DNS configMap"),
    group("dualstack", r"\[Feature:IPv6DualStack\]"),
    group("hostport", r"\[sig-network\] HostPort "),
    group(
        "endpoints",
        r"\[sig-network\] (EndpointSlice|Endpoints|EndpointsController|EndpointSliceMirroring) ",
    ),
    group(
        "traffic",
        r"\[sig-network\] (Traffic Distribution|Topology Hints|NoSNAT|Connectivity Pod Lifecycle|Service CIDRs)",
    ),
    group("perf", r"\[sig-network\] (Networking IPerf2|Service endpoints latency)"),
    // What asks little or nothing of a network.
    group(
        "others",
        r"\[sig-network\] (API Server|Ingress API|IngressClass|Networking should|Proxy version|ServiceCIDR and IPAddress API) ",
    ),
    group("conformance", r"\[sig-network\].*\[Conformance\]"),
    group("all", r"\[sig-network\]"),
];

/// Groups whose tests are in other groups, too.
pub const VIEWS: [&str; 5] = ["netpol-smoke", "services-smoke", "quick", "conformance", "all"];

/// The policy prober's generated cases, all that need no SCTP; and few of them, but of the kinds that break most.
pub const CYCLONUS: [&str; 2] = ["cyclonus", "cyclonus-smoke"];

/// What runs when no group is named.
pub const EVERYTHING: [&str; 2] = ["all", "cyclonus"];

/// A regular expression of tests that do not run, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exclusion {
    /// Regular expression of Go.
    pub pattern: String,
    /// Why.
    pub reason: String,
}

/// Reads `exclusions.txt`.
///
/// # Errors
/// Names the line that has no reason.
pub fn exclusions(text: &str) -> Result<Vec<Exclusion>> {
    let lines = (1..).zip(text.lines()).filter(|(_, l)| !l.trim().is_empty() && !l.starts_with('#'));
    lines
        .map(|(number, line)| {
            let (pattern, reason) = line
                .split_once("  #")
                .filter(|(p, r)| !p.trim().is_empty() && r.trim().len() > 3)
                .with_context(|| {
                    format!("exclusions.txt, line {number}: no reason after two spaces and #")
                })?;
            Ok(Exclusion { pattern: pattern.trim().to_owned(), reason: reason.trim().to_owned() })
        })
        .collect()
}

/// The repository's.
///
/// # Errors
/// As [`exclusions`].
pub fn repository_exclusions() -> Result<Vec<Exclusion>> {
    exclusions(include_str!("../exclusions.txt"))
}

/// How to run.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// Tests at the same time.
    pub procs: u8,
    /// Where logs and JUnit files go, in a folder per group.
    pub reports: PathBuf,
    /// Handed to `e2e.test` or `cyclonus` as they are.
    pub more: Vec<String>,
}

/// A finished run.
#[derive(Debug, Clone)]
pub struct Run {
    /// Its tests.
    pub outcomes: Vec<Outcome>,
    /// How long it took.
    pub seconds: u64,
    /// Everything it printed.
    pub log: PathBuf,
}

/// Runs one group against a lab; failed tests are no error.
///
/// # Errors
/// When there is no such group, or nothing ran.
pub fn run(lab: &Lab, name: &str, options: &RunOptions) -> Result<Run> {
    let reports = options.reports.join(name);
    let _ = fs::remove_dir_all(&reports);
    fs::create_dir_all(&reports)?;
    let reports = reports.canonicalize()?;
    let log = reports.join("log.txt");
    let start = Instant::now();
    let junit = reports.join("junit.xml");
    let argv = if CYCLONUS.contains(&name) {
        cyclonus(name, &junit)
    } else {
        let group = GROUPS.iter().find(|g| g.name == name);
        let group = group.with_context(|| format!("no group {name}; there are: {}", names().join(", ")))?;
        e2e(lab, group, options, &reports)?
    };
    let output = fs::File::create(&log)?;
    let status = Command::new("ip")
        .args(["netns", "exec", &lab.netns()])
        .args(&argv)
        .args(&options.more)
        .env("KUBECONFIG", lab.kubeconfig())
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .status()?;
    let mut outcomes = Vec::new();
    for entry in
        fs::read_dir(&reports)?.flatten().filter(|e| e.path().extension().is_some_and(|x| x == "xml"))
    {
        outcomes.extend(junit::read(&fs::read_to_string(entry.path())?)?);
    }
    // A suite that did not get as far as its tests must not look like one without failures.
    ensure!(!outcomes.is_empty(), "{name}: no test ran ({status}); see {}", log.display());
    if !status.success() && outcomes.iter().all(|o| o.failure.is_none()) {
        bail!("{name} ended with {status}, and no test says why; see {}", log.display());
    }
    Ok(Run { outcomes, seconds: start.elapsed().as_secs(), log })
}

/// Names of everything that can be run.
#[must_use]
pub fn names() -> Vec<&'static str> {
    GROUPS.iter().map(|g| g.name).chain(CYCLONUS).collect()
}

fn program(name: &str) -> String {
    paths::programs().join(name).display().to_string()
}

fn e2e(lab: &Lab, group: &Group, options: &RunOptions, reports: &Path) -> Result<Vec<String>> {
    let skip: Vec<_> = repository_exclusions()?
        .into_iter()
        .map(|e| e.pattern)
        .chain(group.skip.map(str::to_owned))
        .collect();
    Ok(vec![
        program("ginkgo"),
        format!("--procs={}", options.procs.max(1)),
        "--no-color".into(),
        "--timeout=24h".into(),
        // A line per test as it ends, and everything of those that fail.
        "--succinct=false".into(),
        format!("--focus={}", group.focus),
        format!("--skip={}", skip.join("|")),
        program("e2e.test"),
        "--".into(),
        "--provider=skeleton".into(),
        format!("--kubeconfig={}", lab.kubeconfig().display()),
        format!("--kubectl-path={}", program("kubectl")),
        format!("--report-dir={}", reports.display()),
        "--disable-log-dump".into(),
        // Only the first of several processes counts the nodes; the others would skip what wants two.
        format!("--num-nodes={}", lab.options().nodes),
    ])
}

fn cyclonus(name: &str, junit: &Path) -> Vec<String> {
    let mut argv = vec![
        program("cyclonus"),
        "--exclude=sctp".into(),
        format!("--junit-results-file={}", junit.display()),
    ];
    if name == "cyclonus-smoke" {
        argv.push("--include=action,end-port".into());
    }
    argv
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_exclusion_has_a_reason() {
        assert!(repository_exclusions().unwrap().len() > 5);
        let one = exclusions("# comment\n\na b|c  # because of it\n").unwrap();
        assert_eq!(one, [Exclusion { pattern: "a b|c".into(), reason: "because of it".into() }]);
        for bad in ["pattern\n", "pattern  #\n", "  # reason\n", "pattern # one space\n"] {
            assert!(exclusions(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_are_distinct() {
        let mut all = names();
        all.sort_unstable();
        let count = all.len();
        all.dedup();
        assert_eq!(all.len(), count);
        assert!(EVERYTHING.iter().all(|e| all.contains(e)));
    }
}
