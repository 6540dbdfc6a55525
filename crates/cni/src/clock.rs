//! The clock that plugin and agent compare: nobody sets it, and it goes on over restarts of either.

use std::io;

use flowloom_api::v1::Moment;
use nix::time::{ClockId, clock_gettime};

/// The kernel's id of this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Now.
///
/// # Errors
/// When `/proc` is not there.
pub fn now() -> io::Result<Moment> {
    let boot =
        std::fs::read_to_string(BOOT_ID).map_err(|e| io::Error::new(e.kind(), format!("{BOOT_ID}: {e}")))?;
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME)?;
    let part = |n: i64| u64::try_from(n).unwrap_or(0);
    Ok(Moment {
        boot: boot.trim().to_owned(),
        ns: part(time.tv_sec()) * 1_000_000_000 + part(time.tv_nsec()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on_within_a_boot() {
        let (first, second) = (now().unwrap(), now().unwrap());
        assert_eq!(first.is_after(&second), Some(false));
        assert!(!first.boot.is_empty() && first.ns > 0);
    }
}
