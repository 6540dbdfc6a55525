//! The first process of a member: gives it its own view of the file system, then starts and reaps its services.
//! When it is killed, the kernel ends everything in the member and drops its mounts.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::member::Member;
use crate::{cgroups, supervisor};

/// Directories whose writes stay in the member's own.
const OVERLAID: [&str; 4] = ["etc", "opt", "var/lib", "var/log"];

/// Machine-wide settings that kubelet insists on and would write: it is shown the values it wants.
const SHOWN_SYSCTLS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// Hidden command `member-init DIR`.
///
/// # Errors
/// When a mount fails; it does not return while the member lives.
pub fn command(dir: &Path) -> Result<()> {
    let member = Member::load(dir)?;
    view(&member)?;
    cgroups::join_leaf_inside(&member.groups)?;
    supervisor::serve(&member.socket())
}

fn view(member: &Member) -> Result<()> {
    // Nothing mounted here may show outside.
    change("/", MsFlags::MS_REC | MsFlags::MS_PRIVATE)?;
    on("proc", "/proc", "proc", "")?;
    fs::write("/proc/sys/kernel/hostname", &member.name)?;

    umount2("/sys", MntFlags::MNT_DETACH).context("leaving the host's /sys")?;
    on("sysfs", "/sys", "sysfs", "")?;
    if !member.groups.iter().any(|g| g.hierarchy.pure_v2) {
        on("tmpfs", "/sys/fs/cgroup", "tmpfs", "mode=755")?;
    }
    for group in &member.groups {
        let at = group.hierarchy.mount.to_string_lossy();
        fs::create_dir_all(&group.hierarchy.mount)?;
        let kind = if group.hierarchy.option.is_empty() { "cgroup2" } else { "cgroup" };
        on(kind, &at, kind, &group.hierarchy.option)?;
    }
    on("bpf", "/sys/fs/bpf", "bpf", "")?;

    on("tmpfs", "/run", "tmpfs", "mode=755")?;
    for lower in OVERLAID {
        let own = member.dir.join("overlay").join(lower);
        let (upper, work) = (own.join("upper"), own.join("work"));
        fs::create_dir_all(&upper)?;
        fs::create_dir_all(&work)?;
        let options = format!("lowerdir=/{lower},upperdir={},workdir={}", upper.display(), work.display());
        on("overlay", &format!("/{lower}"), "overlay", &options)?;
    }
    let servers: String = member.resolvers.iter().map(|r| format!("nameserver {r}\n")).collect();
    // A link into /run on some hosts, and /run is empty now.
    let _ = fs::remove_file("/etc/resolv.conf");
    fs::write("/etc/resolv.conf", servers)?;
    fs::write("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")?;

    // An overlay cannot be another overlay's upper layer: the runtime gets plain directories. The CNI directories are
    // shared with the outside, where plugins are dropped into.
    for (own, inside) in [
        ("containerd", "/var/lib/containerd"),
        ("kubelet", "/var/lib/kubelet"),
        ("cni-conf", "/etc/cni/net.d"),
        ("cni-bin", "/opt/cni/bin"),
    ] {
        let own = member.dir.join(own);
        fs::create_dir_all(&own)?;
        fs::create_dir_all(inside)?;
        bind(&own, Path::new(inside))?;
    }
    for dir in ["/run/netns", "/run/flowloom", "/var/lib/cni"] {
        fs::create_dir_all(dir)?;
    }
    for (key, value) in SHOWN_SYSCTLS {
        let shown = member.dir.join("sysctl").join(key);
        fs::create_dir_all(shown.parent().unwrap_or(&shown))?;
        fs::write(&shown, value)?;
        bind(&shown, &Path::new("/proc/sys").join(key))?;
    }
    // kubelet and runtime hand mounts on to containers.
    change("/", MsFlags::MS_REC | MsFlags::MS_SHARED)
}

fn on(source: &str, target: &str, kind: &str, options: &str) -> Result<()> {
    mount(Some(source), target, Some(kind), MsFlags::empty(), Some(options))
        .with_context(|| format!("mounting {kind} on {target} ({options})"))
}

fn bind(from: &Path, to: &Path) -> Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .with_context(|| format!("binding {} to {}", from.display(), to.display()))
}

fn change(target: &str, flags: MsFlags) -> Result<()> {
    mount(None::<&str>, target, None::<&str>, flags, None::<&str>).context("changing mount propagation")
}
