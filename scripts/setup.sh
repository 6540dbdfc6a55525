#!/usr/bin/env bash
# Installs what building and testing need on Debian 12 (as root). Idempotent; prints nothing when all is there.
# Usage: scripts/setup.sh [--k8s|--vm]     --k8s: also what a Kubernetes cluster on this machine needs (docs/lab.md);
#                                          --vm: also what another kernel in a virtual machine needs
set -euo pipefail
cd "$(dirname "$0")/.."

[ "$(id -u)" = 0 ] || { echo "setup: root is needed: namespaces, BPF and packages" >&2; exit 1; }
export PATH="$HOME/.cargo/bin:$PATH"

packages=(build-essential pkg-config iproute2 nftables libzstd-dev zlib1g-dev ca-certificates
          rustc-web rust-web-src rust-web-clippy llvm-22-dev containernetworking-plugins strace iperf3 iputils-ping procps bpftool)
# Without a Rust of its own the machine gets Debian's (1.96): compiler, cargo, formatter and linter of one version.
command -v cargo >/dev/null || packages+=(cargo-web rustfmt-web)
if [ "${1-}" = --k8s ]; then
  # Runtime and store; then what images are made of: the suites run these tools inside their Pods.
  packages+=(containerd runc etcd-server gcc libc6-dev util-linux
             busybox-static bash dash curl wget bind9-dnsutils bind9-host netcat-openbsd iperf conntrack iptables)
  command -v go >/dev/null || { echo "setup: Go 1.21 or later is needed (https://go.dev/dl): Kubernetes is built from its modules" >&2; exit 1; }
fi
# The emulator for its libraries: a newer one of its kind is unpacked beside the system (xtask/src/vm.rs).
[ "${1-}" != --vm ] || packages+=(qemu-system-x86 seabios busybox-static kmod cpio)

missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'install ok installed' || missing+=("$p")
done
if [ "${#missing[@]}" -gt 0 ]; then
  echo "setup: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q >/dev/null
  apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
fi

if ! command -v bpf-linker >/dev/null; then
  echo "setup: building bpf-linker (about a minute)"
  # In its own folder, so that this repository's toolchain file does not choose for it.
  (cd / && LLVM_PREFIX=/usr/lib/llvm-22 cargo install --quiet --locked bpf-linker --version 0.13.0 \
    --no-default-features --features llvm-22)
fi

mountpoint -q /sys/fs/bpf 2>/dev/null || mount -t bpf bpf /sys/fs/bpf
