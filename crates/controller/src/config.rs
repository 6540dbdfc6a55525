//! The controller's configuration file. `docs/controller-config.md` documents every key; a test compares the two.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use flowloom_api::config::with_suggestion;
use serde::{Deserialize, Serialize};

use crate::lease::Times;
use crate::publish::Pace;

/// Everything the controller is told. Every key has a default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Unique name of this process among the candidates; empty = host name and a random part.
    pub identity: String,
    /// Unix socket of the API; mode 0600.
    pub socket: PathBuf,
    /// Log filter (`info`, `flowloom_controller=debug`).
    pub log: String,
    /// Connection to the API server.
    pub kubernetes: Kubernetes,
    /// Leadership.
    pub lease: Lease,
    /// Publishing of workload slices.
    pub slices: Slices,
    /// Listener of metrics and probes.
    pub metrics: Metrics,
    /// Limits of the API.
    pub api: Api,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            identity: String::new(),
            socket: "/run/flowloom/controller.sock".into(),
            log: "info".into(),
            kubernetes: Kubernetes::default(),
            lease: Lease::default(),
            slices: Slices::default(),
            metrics: Metrics::default(),
            api: Api::default(),
        }
    }
}

/// Connection to the API server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Kubernetes {
    /// A kubeconfig file; empty = the service account of this Pod.
    pub kubeconfig: PathBuf,
    /// Requests of watches per second.
    pub qps: u32,
    /// The same, at once after a quiet time.
    pub burst: u32,
}

impl Default for Kubernetes {
    fn default() -> Self {
        Self { kubeconfig: PathBuf::new(), qps: 10, burst: 20 }
    }
}

/// Leadership.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Lease {
    /// Namespace of the lease.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Seconds after which a standby takes a lease that did not change.
    pub duration_seconds: u64,
    /// Seconds without a renewal after which a leader stops writing.
    pub deadline_seconds: u64,
    /// Seconds between renewals, and between looks of a standby.
    pub retry_seconds: u64,
}

impl Default for Lease {
    fn default() -> Self {
        Self {
            namespace: flowloom_k8s::access::NAMESPACE.into(),
            name: flowloom_k8s::access::LEASE.into(),
            duration_seconds: 15,
            deadline_seconds: 10,
            retry_seconds: 2,
        }
    }
}

/// Publishing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Slices {
    /// Milliseconds after the first change of a quiet slice.
    pub settle_ms: u64,
    /// Milliseconds between writes of one slice.
    pub interval_ms: u64,
    /// Writes per second, all slices together.
    pub writes_per_second: u32,
    /// Seconds between steps of tidying.
    pub tidy_seconds: u64,
}

impl Default for Slices {
    fn default() -> Self {
        Self { settle_ms: 20, interval_ms: 500, writes_per_second: 50, tidy_seconds: 60 }
    }
}

/// Listener of metrics and probes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Metrics {
    /// Address and port; empty = no listener.
    pub listen: String,
}

impl Default for Metrics {
    fn default() -> Self {
        Self { listen: "127.0.0.1:9966".into() }
    }
}

/// Limits of the API and of the metrics listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Api {
    /// Connections at once; more wait.
    pub connections: usize,
    /// Seconds for a request's header to arrive.
    pub header_seconds: u64,
}

impl Default for Api {
    fn default() -> Self {
        Self { connections: 64, header_seconds: 10 }
    }
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("the configuration {} cannot be read: {source}", path.display())]
    Read {
        /// File.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is not what it must be.
    #[error("{}: {message}", path.display())]
    Invalid {
        /// File.
        path: PathBuf,
        /// What is wrong, with the key.
        message: String,
    },
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// What is wrong with it, naming the key and, for unknown ones, the nearest known.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text).map_err(|message| ConfigError::Invalid { path: path.to_owned(), message })
    }

    /// Parses and checks a text.
    ///
    /// # Errors
    /// One line.
    pub fn parse(text: &str) -> Result<Self, String> {
        // An empty file is a file with every default.
        let blank = text.lines().all(|l| l.trim().is_empty() || l.trim_start().starts_with('#'));
        let text = if blank { "{}" } else { text };
        let config: Self = serde_saphyr::from_str(text).map_err(|e| with_suggestion(&e.to_string()))?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        if !self.socket.is_absolute() {
            return Err(format!("socket: {:?} is not an absolute path", self.socket.display().to_string()));
        }
        // sun_path has 108 bytes with its zero (unix(7)).
        if self.socket.as_os_str().len() > 107 {
            return Err("socket: a Unix socket's path has at most 107 bytes".into());
        }
        if !self.kubernetes.kubeconfig.as_os_str().is_empty() && !self.kubernetes.kubeconfig.is_absolute() {
            return Err("kubernetes.kubeconfig: not an absolute path".into());
        }
        let lease = &self.lease;
        if lease.name.is_empty() || lease.namespace.is_empty() {
            return Err("lease: name and namespace cannot be empty".into());
        }
        // A renewal that hangs is given up after duration - deadline; one more must fit.
        if lease.retry_seconds == 0
            || lease.deadline_seconds <= lease.retry_seconds
            || lease.duration_seconds <= lease.deadline_seconds
        {
            return Err(format!(
                "lease: retry_seconds ({}) must be at least 1 and less than deadline_seconds ({}), that less than duration_seconds ({})",
                lease.retry_seconds, lease.deadline_seconds, lease.duration_seconds
            ));
        }
        if lease.duration_seconds > 3600 {
            return Err("lease.duration_seconds: more than an hour without a leader is no failover".into());
        }
        for (key, n) in [
            ("kubernetes.qps", u64::from(self.kubernetes.qps)),
            ("kubernetes.burst", u64::from(self.kubernetes.burst)),
            ("slices.writes_per_second", u64::from(self.slices.writes_per_second)),
            ("slices.tidy_seconds", self.slices.tidy_seconds),
            ("api.connections", self.api.connections as u64),
            ("api.header_seconds", self.api.header_seconds),
        ] {
            if n == 0 {
                return Err(format!("{key}: 0 would stop it from working"));
            }
        }
        if self.slices.interval_ms > 60_000 || self.slices.settle_ms > 60_000 {
            return Err("slices: settle_ms and interval_ms are at most a minute: peers wait for them".into());
        }
        self.listen().map(drop)
    }

    /// Where metrics are served.
    ///
    /// # Errors
    /// When `metrics.listen` is no address with a port.
    pub fn listen(&self) -> Result<Option<SocketAddr>, String> {
        let text = &self.metrics.listen;
        if text.is_empty() {
            return Ok(None);
        }
        text.parse().map(Some).map_err(|_| format!("metrics.listen: {text:?} is not ADDRESS:PORT"))
    }

    /// Times of the lease.
    #[must_use]
    pub fn times(&self) -> Times {
        Times {
            duration: Duration::from_secs(self.lease.duration_seconds),
            deadline: Duration::from_secs(self.lease.deadline_seconds),
            retry: Duration::from_secs(self.lease.retry_seconds),
        }
    }

    /// Pace of publishing.
    #[must_use]
    pub fn pace(&self) -> Pace {
        Pace {
            settle: Duration::from_millis(self.slices.settle_ms),
            interval: Duration::from_millis(self.slices.interval_ms),
            per_second: self.slices.writes_per_second,
            tidy: Duration::from_secs(self.slices.tidy_seconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn keys(prefix: &str, value: &serde_json::Value, out: &mut BTreeSet<String>) {
        for (key, value) in value.as_object().into_iter().flatten() {
            let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            if value.is_object() {
                keys(&path, value, out);
            } else {
                out.insert(path);
            }
        }
    }

    #[test]
    fn every_key_is_documented_with_its_default_and_nothing_else_is() {
        let value = serde_json::to_value(Config::default()).unwrap();
        let mut wanted = BTreeSet::new();
        keys("", &value, &mut wanted);
        let page = include_str!("../../../docs/controller-config.md");
        let mut documented = BTreeSet::new();
        for line in page.lines().filter(|l| l.starts_with("| `")) {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let key = cells[1].trim_matches('`').to_owned();
            let default = value
                .pointer(&format!("/{}", key.replace('.', "/")))
                .unwrap_or_else(|| panic!("{key} is documented and does not exist"));
            let shown = default.as_str().map_or_else(|| default.to_string(), str::to_owned);
            let cell = if cells[2] == "empty" { "" } else { cells[2].trim_matches('`') };
            assert_eq!(cell, shown, "documented default of {key}");
            assert!(cells[3].len() > 10, "{key} has no description");
            documented.insert(key);
        }
        assert_eq!(documented, wanted);
    }

    #[test]
    fn an_empty_file_gives_every_default_and_unknown_keys_are_refused() {
        assert_eq!(Config::parse("# nothing\n").unwrap(), Config::default());
        let e = Config::parse("lease:\n  duration_second: 3\n").unwrap_err();
        assert!(e.contains("did you mean `duration_seconds`?"), "{e}");
    }

    #[test]
    fn values_that_cannot_work_are_refused_by_key() {
        for (text, key) in [
            ("socket: run/x", "socket"),
            ("lease: {duration_seconds: 10}", "duration_seconds"),
            ("lease: {retry_seconds: 0}", "retry_seconds"),
            ("slices: {writes_per_second: 0}", "slices.writes_per_second"),
            ("slices: {interval_ms: 100000}", "interval_ms"),
            ("metrics: {listen: localhost}", "metrics.listen"),
            ("kubernetes: {kubeconfig: x}", "kubernetes.kubeconfig"),
        ] {
            let e = Config::parse(&format!("{text}\n")).unwrap_err();
            assert!(e.contains(key), "{text}: {e}");
        }
    }
}
