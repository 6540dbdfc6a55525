//! Root's rights.

/// Fails the test when it lacks root's rights: a kernel test that skips itself proves nothing.
///
/// # Panics
/// Without an effective user id of 0, or in a container that may not make namespaces.
pub fn require_root() {
    assert!(
        nix::unistd::geteuid().is_root(),
        "this test changes network namespaces and BPF state: run it as root (sudo -E cargo test ...)"
    );
    let child = std::thread::spawn(|| nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)).join();
    assert!(
        matches!(child, Ok(Ok(()))),
        "root, but a network namespace cannot be made ({child:?}): CAP_SYS_ADMIN and CAP_NET_ADMIN are needed"
    );
}
