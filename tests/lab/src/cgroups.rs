//! A group per member in every hierarchy of the host. Inside the member it is the root (cgroup namespace).
//!
//! Two kinds of host: controllers in v1 hierarchies with a bare v2 one on `/sys/fs/cgroup/unified`, or v2 alone. In v2
//! a group with controllers for its children may hold no process itself, so there the member's own processes live
//! in a leaf (`system`) and Pods beside it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::wait;

const MOUNTS: &str = "/sys/fs/cgroup";
const LEAF: &str = "system";

/// One hierarchy of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hierarchy {
    /// Mount option that names it (`memory`, `none,name=systemd`); empty for v2.
    pub(crate) option: String,
    /// Where it is mounted, on the host and in members.
    pub(crate) mount: PathBuf,
    /// Whether it is v2 and has controllers.
    pub(crate) pure_v2: bool,
}

/// The member's group in one hierarchy.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Group {
    pub(crate) hierarchy: Hierarchy,
    /// Directory on the host.
    pub(crate) path: PathBuf,
}

/// Reads `/proc/mounts`.
fn hierarchies(mounts: &str) -> Result<Vec<Hierarchy>> {
    let mut found = Vec::new();
    for line in mounts.lines() {
        let mut fields = line.split(' ');
        let (Some(_), Some(mount), Some(kind), Some(options)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let pure_v2 = mount == MOUNTS;
        match kind {
            "cgroup2" => found.push(Hierarchy { option: String::new(), mount: mount.into(), pure_v2 }),
            "cgroup" => {
                let option: Vec<_> = options
                    .split(',')
                    .filter(|o| {
                        !matches!(
                            *o,
                            "rw" | "ro"
                                | "relatime"
                                | "nosuid"
                                | "nodev"
                                | "noexec"
                                | "xattr"
                                | "clone_children"
                        ) && !o.starts_with("release_agent=")
                    })
                    .collect();
                let named = option.iter().any(|o| o.starts_with("name=")) && option.len() == 1;
                let option = if named { format!("none,{}", option.join(",")) } else { option.join(",") };
                found.push(Hierarchy { option, mount: mount.into(), pure_v2: false });
            }
            _ => {}
        }
    }
    if found.iter().filter(|h| h.option.is_empty()).count() != 1 {
        bail!("exactly one cgroup2 mount is needed below {MOUNTS}; /proc/mounts has:\n{mounts}");
    }
    Ok(found)
}

/// Makes the groups of a member; `taken` learns each before it is made, for the guard.
pub(crate) fn create(lab: &str, member: &str) -> Result<Vec<Group>> {
    let mounts = fs::read_to_string("/proc/mounts")?;
    let mut groups = Vec::new();
    for hierarchy in hierarchies(&mounts)? {
        let top = hierarchy.mount.join(format!("flowloom-{lab}"));
        let path = top.join(member);
        fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        if hierarchy.option.split(',').any(|o| o == "cpuset") {
            // A new cpuset is empty, and an empty one takes no process.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let value = fs::read_to_string(hierarchy.mount.join(file))?;
                fs::write(top.join(file), value.trim())?;
                fs::write(path.join(file), value.trim())?;
            }
        }
        if hierarchy.pure_v2 {
            for dir in [&hierarchy.mount, &top] {
                delegate(dir)?;
            }
            fs::create_dir_all(path.join(LEAF))?;
        }
        groups.push(Group { hierarchy, path });
    }
    Ok(groups)
}

/// Hands a v2 group's controllers to its children.
fn delegate(dir: &Path) -> Result<()> {
    let controllers = fs::read_to_string(dir.join("cgroup.controllers"))?;
    let all: Vec<_> = controllers.split_whitespace().map(|c| format!("+{c}")).collect();
    fs::write(dir.join("cgroup.subtree_control"), all.join(" "))
        .with_context(|| format!("delegating controllers of {}", dir.display()))
}

/// Moves the calling process into the groups themselves, which a cgroup namespace made next takes as its root.
pub(crate) fn join_roots(groups: &[Group]) -> Result<()> {
    groups.iter().try_for_each(|g| join(&g.path))
}

/// Moves the calling process to where the member's own processes live.
pub(crate) fn join_member(groups: &[Group]) -> Result<()> {
    groups
        .iter()
        .try_for_each(|g| join(&if g.hierarchy.pure_v2 { g.path.join(LEAF) } else { g.path.clone() }))
}

/// From inside the member: out of the root, into the leaf.
pub(crate) fn join_leaf_inside(groups: &[Group]) -> Result<()> {
    groups.iter().filter(|g| g.hierarchy.pure_v2).try_for_each(|g| join(&g.hierarchy.mount.join(LEAF)))
}

fn join(dir: &Path) -> Result<()> {
    fs::write(dir.join("cgroup.procs"), "0").with_context(|| format!("joining {}", dir.display()))
}

/// The v2 directory as the member sees it: where socket programs attach.
pub(crate) fn v2_inside(groups: &[Group]) -> Option<&Path> {
    groups.iter().find(|g| g.hierarchy.option.is_empty()).map(|g| g.hierarchy.mount.as_path())
}

/// Every process in a group and below, by the host's numbers.
pub(crate) fn processes(dir: &Path) -> Vec<u32> {
    let mut all = Vec::new();
    walk(dir, &mut |d| {
        let text = fs::read_to_string(d.join("cgroup.procs")).unwrap_or_default();
        all.extend(text.lines().filter_map(|l| l.parse::<u32>().ok()));
    });
    all
}

/// Removes a lab's groups in every hierarchy once their processes are gone.
pub(crate) fn remove(lab: &str) -> Result<()> {
    let mounts = fs::read_to_string("/proc/mounts")?;
    let mut failed = Vec::new();
    for hierarchy in hierarchies(&mounts)? {
        let top = hierarchy.mount.join(format!("flowloom-{lab}"));
        if !top.exists() {
            continue;
        }
        let gone = wait::until(Duration::from_secs(30), "processes of the lab's control groups", || {
            // Children first; a group with a process that is about to end refuses.
            walk(&top, &mut |dir| {
                let _ = fs::remove_dir(dir);
            });
            anyhow::ensure!(!top.exists(), "{} has processes {:?}", top.display(), processes(&top));
            Ok(())
        });
        failed.extend(gone.err().map(|e| format!("{e:#}")));
    }
    if failed.is_empty() { Ok(()) } else { bail!("{}", failed.join("; ")) }
}

/// Visits a directory after everything below it.
fn walk(dir: &Path, visit: &mut impl FnMut(&Path)) {
    if let Ok(entries) = fs::read_dir(dir) {
        for entry in entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
            walk(&entry.path(), visit);
        }
    }
    visit(dir);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_host_are_understood() {
        let hybrid = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
            cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
            cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,nosuid,nodev,noexec,relatime,cpu,cpuacct 0 0\n\
            cgroup /sys/fs/cgroup/systemd cgroup rw,relatime,xattr,name=systemd 0 0\n\
            cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0\n";
        let got = hierarchies(hybrid).unwrap();
        let options: Vec<_> = got.iter().map(|h| h.option.as_str()).collect();
        assert_eq!(options, ["memory", "cpu,cpuacct", "none,name=systemd", ""]);
        assert!(got.iter().all(|h| !h.pure_v2));
        let pure = hierarchies("cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n").unwrap();
        assert!(pure.len() == 1 && pure[0].pure_v2);
        assert!(hierarchies("proc /proc proc rw 0 0\n").is_err());
    }
}
