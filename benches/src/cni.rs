//! ADD and DEL of a plugin, run as a runtime runs it: a process per call, environment and standard input.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use flowloom_netlink::Netns;
use flowloom_testkit::Ns;

/// A plugin under measurement.
#[derive(Debug)]
pub struct Plugin<'a> {
    /// Its program.
    pub program: String,
    /// Its network configuration.
    pub config: String,
    /// The node.
    pub node: &'a Netns,
}

/// Milliseconds of ADD and of DEL.
#[derive(Clone, Debug, Default)]
pub struct Times {
    /// ADD.
    pub add: Vec<f64>,
    /// DEL.
    pub del: Vec<f64>,
}

impl Plugin<'_> {
    /// From the start of the process to its end, through pipes: no file of ours is in what is measured.
    fn call(&self, verb: &str, id: &str, netns: &Path) -> Result<Duration> {
        let run = || -> std::io::Result<_> {
            let mut command = Command::new(&self.program);
            let variables =
                [("COMMAND", verb), ("CONTAINERID", id), ("IFNAME", "eth0"), ("PATH", "/usr/lib/cni")];
            command.envs(variables.map(|(key, value)| (format!("CNI_{key}"), value)));
            command
                .env("CNI_NETNS", netns)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let start = Instant::now();
            let mut child = command.spawn()?;
            // Dropped at once: the plugin reads to the end.
            if let Some(mut stdin) = child.stdin.take() {
                stdin.write_all(self.config.as_bytes())?;
            }
            Ok((child.wait_with_output()?, start.elapsed()))
        };
        let (output, time) = self.node.run_in(run)?.with_context(|| format!("{verb} {id}"))?;
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ensure!(output.status.success(), "{verb} {id}: {} {}", said(&output.stdout), said(&output.stderr));
        Ok(time)
    }

    /// ADD and DEL of one workload, `rounds` times.
    ///
    /// # Errors
    /// When a call fails.
    pub fn alone(&self, rounds: usize, times: &mut Times) -> Result<()> {
        for round in 0..rounds {
            let ns = Ns::new("bench")?;
            let id = format!("alone-{round}-{}", ns.name());
            times.add.push(millis(self.call("ADD", &id, ns.path())?));
            times.del.push(millis(self.call("DEL", &id, ns.path())?));
        }
        Ok(())
    }

    /// ADD of `n` workloads at once, then DEL of all at once; the time of each batch divided by `n`.
    ///
    /// # Errors
    /// When a call fails.
    pub fn parallel(&self, n: usize, times: &mut Times) -> Result<()> {
        let spaces = (0..n).map(|_| Ns::new("bench")).collect::<Result<Vec<_>>>()?;
        for (verb, out) in [("ADD", &mut times.add), ("DEL", &mut times.del)] {
            let start = Instant::now();
            std::thread::scope(|scope| {
                let calls: Vec<_> = spaces
                    .iter()
                    .map(|ns| {
                        scope.spawn(move || self.call(verb, &format!("parallel-{}", ns.name()), ns.path()))
                    })
                    .collect();
                calls
                    .into_iter()
                    .try_for_each(|c| c.join().map_err(|_| anyhow::anyhow!("a call panicked"))?.map(drop))
            })?;
            out.push(millis(start.elapsed()) / n as f64);
        }
        Ok(())
    }
}

fn millis(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

/// The reference plugins' configuration; `data` keeps the allocator's files.
#[must_use]
pub fn reference(kind: &str, data: &Path) -> String {
    serde_json::json!({
        "cniVersion": "1.0.0", "name": format!("bench-{kind}"), "type": kind, "bridge": "cni0", "isGateway": true,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.8.0.0/16"}]], "dataDir": data, "routes": [{"dst": "0.0.0.0/0"}]},
    })
    .to_string()
}
