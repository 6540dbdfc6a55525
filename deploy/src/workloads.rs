//! The agent on every node, the controller twice, and their configuration.

use flowloom_k8s::access::{AGENT, CONTROLLER, NAMESPACE};

/// Kept off a new node until its agent is ready (`kubelet --register-with-taints=...:NoSchedule`).
const STARTUP_TAINT: &str = "node.flowloom.io/agent-not-ready";
/// Of this version.
const IMAGE: &str = concat!("flowloom:", env!("CARGO_PKG_VERSION"));

/// Port of the controller's metrics and probes.
const CONTROLLER_PORT: u16 = 9966;

/// The agent's configuration: every default but what a cluster needs.
pub(crate) const AGENT_CONFIG: &str = "# Every key: docs/agent-config.md. The node's name comes with --node.
kubernetes:
  enabled: true
  peers: slices
cni:
  conf_dir: /etc/cni/net.d
  bin_dir: /opt/cni/bin
  port_mappings: true
masquerade:
  enabled: true
";

/// The controller's configuration.
pub(crate) fn controller_config() -> String {
    format!(
        "# Every key: docs/controller-config.md.
metrics:
  # The kubelet probes the node's address.
  listen: 0.0.0.0:{CONTROLLER_PORT}
"
    )
}

fn indented(text: &str, by: usize) -> String {
    text.lines().map(|l| format!("{:by$}{l}\n", "")).collect()
}

pub(crate) fn configuration() -> String {
    let map = |name: &str, file: &str, text: &str| {
        format!(
            "apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
  namespace: {NAMESPACE}
data:
  {file}: |
{}",
            indented(text, 4)
        )
    };
    [
        map(AGENT.name, "agent.yaml", AGENT_CONFIG),
        map(CONTROLLER.name, "controller.yaml", &controller_config()),
    ]
    .join("---\n")
}

pub(crate) fn agent() -> String {
    let name = AGENT.name;
    format!(
        "apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {name}
  namespace: {NAMESPACE}
  labels: {{app.kubernetes.io/name: {name}}}
spec:
  selector:
    matchLabels: {{app.kubernetes.io/name: {name}}}
  updateStrategy:
    # What is in force stays in force while an agent is replaced.
    rollingUpdate: {{maxUnavailable: 10%}}
  template:
    metadata:
      labels: {{app.kubernetes.io/name: {name}}}
    spec:
      serviceAccountName: {name}
      automountServiceAccountToken: true
      priorityClassName: system-node-critical
      # It makes the network that other Pods get: it uses the node's own, its links, routes and namespaces.
      hostNetwork: true
      dnsPolicy: Default
      nodeSelector: {{kubernetes.io/os: linux}}
      tolerations:
        # On every node, whatever its taints: without an agent no Pod of it has a network. {STARTUP_TAINT} is among them.
        - operator: Exists
      terminationGracePeriodSeconds: 10
      containers:
        - name: agent
          image: {IMAGE}
          imagePullPolicy: IfNotPresent
          command: [/usr/bin/flowloom-agent, --config, /etc/flowloom/agent.yaml, --node, $(NODE_NAME)]
          env:
            - name: NODE_NAME
              valueFrom: {{fieldRef: {{fieldPath: spec.nodeName}}}}
          securityContext:
            # Not privileged: no devices, no host PIDs. The mounts below that propagate are made by the node, not by the container.
            privileged: false
            readOnlyRootFilesystem: true
            capabilities:
              drop: [ALL]
              add:
                - NET_ADMIN # links, routes, nftables, TCX
                - NET_RAW # traces
                - SYS_ADMIN # enters network namespaces of Pods (setns)
                - BPF # programs and maps
                - PERFMON # programs that compare pointers, the ring buffer of events
                - SYS_PTRACE # /proc/PID/ns/net of containers
                - SYS_RESOURCE # locked memory on kernels that count maps as such
                - DAC_OVERRIDE # files that runtimes made for other users
            # AppArmor's and seccomp's container profiles refuse bpf(2), setns(2) and writes below /proc/sys.
            appArmorProfile: {{type: Unconfined}}
            seccompProfile: {{type: Unconfined}}
          # No liveness probe: killing an agent that waits for the API server helps nobody. Not by HTTP either: while a node still runs another
          # service proxy, that one has the port and answers for itself; the socket is the agent's alone.
          readinessProbe:
            exec: {{command: [/usr/bin/flowloom, status, --wait, 3s]}}
            periodSeconds: 10
            timeoutSeconds: 5
          resources:
            requests: {{cpu: 50m, memory: 128Mi}}
          volumeMounts:
            - {{name: config, mountPath: /etc/flowloom, readOnly: true}}
            - {{name: run, mountPath: /run/flowloom}}
            - {{name: state, mountPath: /var/lib/flowloom}}
            - {{name: bpf, mountPath: /sys/fs/bpf}}
            - {{name: cgroup, mountPath: /sys/fs/cgroup}}
            # Namespaces that a runtime mounts after the agent started must be seen here.
            - {{name: netns, mountPath: /run/netns, mountPropagation: HostToContainer}}
            - {{name: proc-sys-net, mountPath: /proc/sys/net}}
            - {{name: cni-conf, mountPath: /etc/cni/net.d}}
            - {{name: cni-bin, mountPath: /opt/cni/bin}}
      volumes:
        - name: config
          configMap: {{name: {name}}}
        # The API's socket: the CNI plugin, which the kubelet's runtime starts on the node, finds it there.
        - name: run
          hostPath: {{path: /run/flowloom, type: DirectoryOrCreate}}
        # Attachments, numbers, queued DELs: survive the container and a reboot.
        - name: state
          hostPath: {{path: /var/lib/flowloom, type: DirectoryOrCreate}}
        # Pinned programs and maps: in force while no agent runs.
        - name: bpf
          hostPath: {{path: /sys/fs/bpf, type: Directory}}
        # Sockets of this node are told from others by its cgroup.
        - name: cgroup
          hostPath: {{path: /sys/fs/cgroup, type: Directory}}
        - name: netns
          hostPath: {{path: /run/netns, type: DirectoryOrCreate}}
        # Forwarding and neighbour settings of the links it makes.
        - name: proc-sys-net
          hostPath: {{path: /proc/sys/net, type: Directory}}
        - name: cni-conf
          hostPath: {{path: /etc/cni/net.d, type: DirectoryOrCreate}}
        - name: cni-bin
          hostPath: {{path: /opt/cni/bin, type: DirectoryOrCreate}}
"
    )
}

pub(crate) fn controller() -> String {
    let name = CONTROLLER.name;
    format!(
        "apiVersion: apps/v1
kind: Deployment
metadata:
  name: {name}
  namespace: {NAMESPACE}
  labels: {{app.kubernetes.io/name: {name}}}
spec:
  # One leads, one stands by with everything in memory.
  replicas: 2
  selector:
    matchLabels: {{app.kubernetes.io/name: {name}}}
  strategy:
    rollingUpdate: {{maxSurge: 0, maxUnavailable: 1}}
  template:
    metadata:
      labels: {{app.kubernetes.io/name: {name}}}
    spec:
      serviceAccountName: {name}
      automountServiceAccountToken: true
      priorityClassName: system-cluster-critical
      # It runs before the Pod network does.
      hostNetwork: true
      dnsPolicy: Default
      nodeSelector: {{kubernetes.io/os: linux}}
      affinity:
        podAntiAffinity:
          # Leader and standby do not die with one node.
          requiredDuringSchedulingIgnoredDuringExecution:
            - topologyKey: kubernetes.io/hostname
              labelSelector:
                matchLabels: {{app.kubernetes.io/name: {name}}}
      tolerations:
        - {{key: {STARTUP_TAINT}, operator: Exists}}
        - {{key: node.kubernetes.io/not-ready, operator: Exists, effect: NoSchedule}}
        - {{key: node.kubernetes.io/network-unavailable, operator: Exists}}
        - {{key: node-role.kubernetes.io/control-plane, operator: Exists}}
      # Longer than a write may take: the lease is given back.
      terminationGracePeriodSeconds: 15
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        runAsGroup: 65532
        seccompProfile: {{type: RuntimeDefault}}
      containers:
        - name: controller
          image: {IMAGE}
          imagePullPolicy: IfNotPresent
          command: [/usr/bin/flowloom-controller, --config, /etc/flowloom/controller.yaml]
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {{drop: [ALL]}}
          ports:
            - {{name: metrics, containerPort: {CONTROLLER_PORT}}}
          livenessProbe:
            httpGet: {{path: /healthz, port: metrics}}
            periodSeconds: 10
            failureThreshold: 6
          readinessProbe:
            httpGet: {{path: /readyz, port: metrics}}
            periodSeconds: 5
          resources:
            requests: {{cpu: 20m, memory: 64Mi}}
          volumeMounts:
            - {{name: config, mountPath: /etc/flowloom, readOnly: true}}
            - {{name: run, mountPath: /run/flowloom}}
      volumes:
        - name: config
          configMap: {{name: {name}}}
        - name: run
          emptyDir: {{}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {name}
  namespace: {NAMESPACE}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{app.kubernetes.io/name: {name}}}
"
    )
}
