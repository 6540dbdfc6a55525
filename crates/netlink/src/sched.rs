//! How soon a thread gets a processor when it wakes up.

use std::io;

/// What the kernel takes at least, nanoseconds (its default is 3 ms, less on few processors).
const SLICE: u64 = 100_000;

/// Has the calling thread, and those that it starts from now on, ask for the processor in small pieces. They get no more of it than they did, but
/// sooner when they wake up on a busy machine: a step that answers somebody takes microseconds and needs many wake-ups.
///
/// Source: `sched_setattr(2)`, `sched_runtime` of `SCHED_OTHER` from Linux 6.12 on; an older kernel ignores it.
///
/// # Errors
/// When the kernel refuses; nothing has changed then.
pub fn small_slices() -> io::Result<()> {
    let mut attributes = attributes()?;
    attributes.sched_runtime = SLICE;
    // SAFETY: the kernel reads `size` bytes of a structure that lives on; 0 is the calling thread, and there are no flags.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn attributes() -> io::Result<libc::sched_attr> {
    let size = size_of::<libc::sched_attr>() as u32;
    let mut attributes = libc::sched_attr {
        size,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the kernel writes at most `size` bytes to a structure that lives on; 0 is the calling thread, and there are no flags.
    match unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) } {
        0 => Ok(attributes),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_come_later_ask_for_small_pieces_too_and_nothing_else_changes() {
        std::thread::spawn(|| {
            let before = attributes().unwrap();
            small_slices().unwrap();
            let own = attributes().unwrap();
            let later = std::thread::spawn(|| attributes().unwrap()).join().unwrap();
            for after in [own, later] {
                assert_eq!(after.sched_runtime, SLICE);
                assert_eq!(
                    (after.sched_policy, after.sched_flags, after.sched_nice, after.sched_priority),
                    (before.sched_policy, before.sched_flags, before.sched_nice, before.sched_priority)
                );
            }
        })
        .join()
        .unwrap();
    }
}
