//! Command lines and configurations of Kubernetes' programs. Why a flag is there stands beside it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::{Value, json};

use crate::addresses::{self, DNS_SERVICE, POD_CIDRS, SERVICE_CIDRS, list};
use crate::audit;
use crate::files::write_whole;
use crate::images::PAUSE;
use crate::member::Member;
use crate::options::{Families, Options};
use crate::paths;
use crate::supervisor::Service;

/// Paths that several programs need.
pub(crate) struct Context<'a> {
    pub(crate) state: &'a Path,
    pub(crate) options: &'a Options,
}

impl Context<'_> {
    fn pki(&self, file: &str) -> String {
        self.state.join("pki").join(file).display().to_string()
    }

    fn kubeconfig(&self, who: &str) -> String {
        self.pki(&format!("{who}.kubeconfig"))
    }

    fn service_cidrs(&self) -> String {
        list(self.options.families, SERVICE_CIDRS)
    }

    fn all_addresses(&self) -> &'static str {
        match self.options.families {
            Families::Dual => "::",
            Families::Ipv4 => "0.0.0.0",
        }
    }

    pub(crate) fn etcd(&self, member: &Member) -> Service {
        let client = "http://127.0.0.1:2379";
        let data = member.dir.join("etcd").display().to_string();
        service(
            member,
            "etcd",
            "etcd",
            &[
                ("data-dir", &data),
                ("log-level", "error"),
                ("listen-client-urls", client),
                ("advertise-client-urls", client),
                ("listen-peer-urls", "http://127.0.0.1:2380"),
                // A lab's data need not survive a power cut.
                ("unsafe-no-fsync", "true"),
            ],
        )
    }

    pub(crate) fn api_server(&self, member: &Member) -> Result<Service> {
        let mut service = service(
            member,
            "kube-apiserver",
            &program("kube-apiserver"),
            &[
                ("etcd-servers", "http://127.0.0.1:2379"),
                ("bind-address", self.all_addresses()),
                ("advertise-address", &addresses::control_plane()[0].to_string()),
                ("secure-port", "6443"),
                ("tls-cert-file", &self.pki("apiserver.crt")),
                ("tls-private-key-file", &self.pki("apiserver.key")),
                ("client-ca-file", &self.pki("ca.crt")),
                ("kubelet-client-certificate", &self.pki("admin.crt")),
                ("kubelet-client-key", &self.pki("admin.key")),
                // Nobody resolves node names here: `exec` and `logs` would hang.
                ("kubelet-preferred-address-types", "InternalIP"),
                ("service-account-key-file", &self.pki("sa.pub")),
                ("service-account-signing-key-file", &self.pki("sa.key")),
                ("service-account-issuer", "https://kubernetes.default.svc"),
                ("service-cluster-ip-range", &self.service_cidrs()),
                ("authorization-mode", "Node,RBAC"),
                ("enable-admission-plugins", "NodeRestriction"),
                ("allow-privileged", "true"),
            ],
        );
        if self.options.objects_only {
            let policy = member.dir.join("audit.json");
            write_whole(&policy, &audit::policy().to_string())?;
            service.argv.extend([
                format!("--audit-policy-file={}", policy.display()),
                format!("--audit-log-path={}", audit_log(member).display()),
            ]);
        }
        Ok(service)
    }

    pub(crate) fn controller_manager(&self, member: &Member) -> Service {
        let mut flags = vec![
            ("kubeconfig", self.kubeconfig("admin")),
            ("leader-elect", "false".to_owned()),
            // One service account per controller comes first; at the default rate that is seconds of a start.
            ("kube-api-qps", "200".to_owned()),
            ("kube-api-burst", "400".to_owned()),
            ("use-service-account-credentials", "true".to_owned()),
            ("service-account-private-key-file", self.pki("sa.key")),
            ("root-ca-file", self.pki("ca.crt")),
            ("cluster-signing-cert-file", self.pki("ca.crt")),
            ("cluster-signing-key-file", self.pki("ca.key")),
            // The default is below the host's /usr/libexec.
            ("flex-volume-plugin-dir", "/var/lib/kubelet/volume-plugins".to_owned()),
            ("allocate-node-cidrs", "true".to_owned()),
            ("cluster-cidr", list(self.options.families, POD_CIDRS)),
            ("service-cluster-ip-range", self.service_cidrs()),
        ];
        match self.options.families {
            Families::Dual => flags.extend([
                ("node-cidr-mask-size-ipv4", "24".to_owned()),
                ("node-cidr-mask-size-ipv6", "64".to_owned()),
            ]),
            Families::Ipv4 => flags.push(("node-cidr-mask-size", "24".to_owned())),
        }
        let flags: Vec<_> = flags.iter().map(|(k, v)| (*k, v.as_str())).collect();
        service(member, "kube-controller-manager", &program("kube-controller-manager"), &flags)
    }

    pub(crate) fn scheduler(&self, member: &Member) -> Service {
        service(
            member,
            "kube-scheduler",
            &program("kube-scheduler"),
            &[("kubeconfig", &self.kubeconfig("admin")), ("leader-elect", "false")],
        )
    }

    /// Answers every question with REFUSED at once: without, names outside the cluster take seconds to fail.
    pub(crate) fn name_server(&self, member: &Member) -> Service {
        let lab = self.options.bin_dir.join("flowloom-lab").display().to_string();
        Service { argv: vec![lab, "name-server".into()], ..service(member, "name-server", "", &[]) }
    }

    pub(crate) fn containerd(&self, member: &Member) -> Result<Service> {
        let config = member.dir.join("containerd.toml");
        // Without CAP_SYS_RESOURCE nobody may lower an OOM score: the runtime must not try.
        let text = format!(
            "version = 2\n\
             disabled_plugins = [{}]\n\
             [metrics]\n\
             address = \"127.0.0.1:1338\"\n\
             [plugins.\"io.containerd.grpc.v1.cri\"]\n\
             sandbox_image = \"{PAUSE}\"\n\
             restrict_oom_score_adj = true\n",
            [
                "snapshotter.v1.aufs",
                "snapshotter.v1.btrfs",
                "snapshotter.v1.devmapper",
                "snapshotter.v1.zfs",
                "internal.v1.opt",
                "tracing.processor.v1.otlp"
            ]
            .map(|p| format!("\"io.containerd.{p}\""))
            .join(", ")
        );
        fs::write(&config, text)?;
        Ok(service(member, "containerd", "containerd", &[("config", &config.display().to_string())]))
    }

    pub(crate) fn kubelet(&self, member: &Member, index: u8) -> Result<Service> {
        let config = member.dir.join("kubelet.yaml");
        let text = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "address": self.all_addresses(),
            "authentication": {
                "anonymous": {"enabled": false}, "webhook": {"enabled": true},
                "x509": {"clientCAFile": self.pki("ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            // Hosts with controllers in v1 hierarchies are refused otherwise.
            "failCgroupV1": false,
            "failSwapOn": false,
            "oomScoreAdj": 0,
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            "clusterDomain": "cluster.local", "clusterDNS": [DNS_SERVICE],
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            // An image that was collected cannot be pulled again: there is no registry.
            "imageGCHighThresholdPercent": 100,
            "makeIPTablesUtilChains": false,
            // A burst of Pods must not wait for this client's own limits.
            "kubeAPIQPS": 200, "kubeAPIBurst": 400, "serializeImagePulls": false,
            "shutdownGracePeriod": "0s",
        });
        write_whole(&config, &serde_json::to_string_pretty(&text)?)?;
        Ok(service(
            member,
            "kubelet",
            &program("kubelet"),
            &[
                ("config", &config.display().to_string()),
                ("kubeconfig", &self.kubeconfig(&member.name)),
                ("hostname-override", &member.name),
                ("node-ip", &list(self.options.families, addresses::node(index))),
                ("node-labels", &format!("topology.kubernetes.io/zone={}", zone(index))),
            ],
        ))
    }

    pub(crate) fn kube_proxy(&self, member: &Member) -> Result<Service> {
        let config = member.dir.join("kube-proxy.yaml");
        let cidrs = list(self.options.families, POD_CIDRS);
        let text = kube_proxy_config(&member.name, &self.kubeconfig("kube-proxy"), &cidrs);
        write_whole(&config, &serde_json::to_string_pretty(&text)?)?;
        Ok(service(
            member,
            "kube-proxy",
            &program("kube-proxy"),
            &[("config", &config.display().to_string())],
        ))
    }

    /// `flowloom-agent`, with standard paths: every node has a file system view of its own.
    pub(crate) fn agent(&self, member: &Member) -> Service {
        let program = self.options.bin_dir.join("flowloom-agent").display().to_string();
        let config = member.dir.join("agent.yaml").display().to_string();
        let argv = vec![program, "--config".into(), config, "--node".into(), member.name.clone()];
        Service { argv, ..service(member, "flowloom-agent", "", &[]) }
    }

    /// `flowloom-controller` on the control plane.
    pub(crate) fn controller(&self, member: &Member) -> Service {
        let program = self.options.bin_dir.join("flowloom-controller").display().to_string();
        let config = member.dir.join("controller.yaml").display().to_string();
        Service {
            argv: vec![program, "--config".into(), config],
            ..service(member, "flowloom-controller", "", &[])
        }
    }
}

/// What flowloom's programs asked an API server whose lab is for objects only.
pub(crate) fn audit_log(member: &Member) -> PathBuf {
    member.dir.join("audit.log")
}

/// What kube-proxy is told: nftables mode, and what a namespace's own needs.
#[must_use]
pub fn kube_proxy_config(node: &str, kubeconfig: &str, pod_cidrs: &str) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": node,
        "clientConnection": {"kubeconfig": kubeconfig},
        "clusterCIDR": pod_cidrs,
        // The table's size is machine-wide and not a namespace's to set: leave all of it alone.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    })
}

/// Three zones, as far as there are nodes: what upstream's tests of traffic between zones ask for.
fn zone(index: u8) -> String {
    format!("zone-{}", (index.max(1) - 1) % 3 + 1)
}

fn program(name: &str) -> String {
    paths::programs().join(name).display().to_string()
}

fn service(member: &Member, name: &str, program: &str, flags: &[(&str, &str)]) -> Service {
    let mut argv = vec![program.to_owned()];
    argv.extend(flags.iter().map(|(key, value)| format!("--{key}={value}")));
    Service { name: name.to_owned(), argv, env: Vec::new(), log: member.dir.join(format!("{name}.log")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_in_three_zones_in_turn() {
        let zones: Vec<_> = (1..=4).map(zone).collect();
        assert_eq!(zones, ["zone-1", "zone-2", "zone-3", "zone-1"]);
    }
}
