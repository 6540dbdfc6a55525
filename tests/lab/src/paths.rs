//! Where things are: caches, state, names of namespaces.

use std::path::{Path, PathBuf};

/// Programs and images, kept from lab to lab: `$FLOWLOOM_K8S_CACHE`, else `~/.cache/flowloom/k8s`.
#[must_use]
pub(crate) fn cache() -> PathBuf {
    std::env::var_os("FLOWLOOM_K8S_CACHE").map_or_else(
        || {
            let home = std::env::var_os("HOME").map_or_else(|| PathBuf::from("/root"), PathBuf::from);
            home.join(".cache/flowloom/k8s")
        },
        PathBuf::from,
    )
}

/// Kubernetes' programs.
#[must_use]
pub fn programs() -> PathBuf {
    cache().join("bin")
}

/// Image archives.
#[must_use]
pub(crate) fn images() -> PathBuf {
    cache().join("images")
}

/// All labs' states: `$FLOWLOOM_LAB_DIR`, else `/var/tmp/flowloom-lab`. Never below a directory that nodes overlay,
/// and on a file system that can be an overlay's upper layer.
#[must_use]
pub(crate) fn states() -> PathBuf {
    std::env::var_os("FLOWLOOM_LAB_DIR").map_or_else(|| PathBuf::from("/var/tmp/flowloom-lab"), PathBuf::from)
}

/// One lab's state.
#[must_use]
pub(crate) fn state(name: &str) -> PathBuf {
    states().join(name)
}

/// The network namespace of a member of a lab.
#[must_use]
pub(crate) fn netns(lab: &str, member: &str) -> String {
    format!("fl-lab-{lab}-{member}")
}

/// This crate's source: build pins, manifests, exclusions.
#[must_use]
pub(crate) fn source() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where this workspace's programs are: `$FLOWLOOM_BIN_DIR`, else beside the running program (a test's is one up).
#[must_use]
pub fn own_bin_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("FLOWLOOM_BIN_DIR") {
        return PathBuf::from(dir);
    }
    let exe = std::env::current_exe().unwrap_or_default();
    let dir = exe.parent().unwrap_or(Path::new("."));
    let dir = if dir.ends_with("deps") { dir.parent().unwrap_or(dir) } else { dir };
    dir.to_path_buf()
}
