//! The ring of events.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use aya::maps::{Map, MapData, RingBuf};
use flowloom_bpf_abi::Event;

use crate::error::{Context as _, Error, Result};

/// Reads the programs' events. One reader at a time: two would share one position.
///
/// Readable (as [`AsFd`]) when there is something to [`Self::drain`].
pub struct Events {
    ring: RingBuf<MapData>,
    malformed: u64,
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events")
            .field("fd", &self.ring.as_raw_fd())
            .field("malformed", &self.malformed)
            .finish()
    }
}

impl Events {
    pub(crate) fn new(fd: OwnedFd) -> Result<Self> {
        let failed = |e: &dyn std::fmt::Display| Error::Kernel {
            doing: "mapping the event ring".to_owned(),
            source: io::Error::other(e.to_string()),
        };
        let data = MapData::from_fd(fd).map_err(|e| failed(&e))?;
        let ring = RingBuf::try_from(Map::RingBuf(data)).map_err(|e| failed(&e))?;
        Ok(Self { ring, malformed: 0 })
    }

    /// Hands at most `max` waiting events to `f`. Returns how many.
    pub fn drain(&mut self, max: usize, mut f: impl FnMut(&Event)) -> usize {
        let mut n = 0;
        while n < max {
            let Some(item) = self.ring.next() else { break };
            match parse(&item) {
                Some(event) => f(&event),
                None => self.malformed += 1,
            }
            n += 1;
        }
        n
    }

    /// Records that were no event (another ABI wrote them).
    #[must_use]
    pub const fn malformed(&self) -> u64 {
        self.malformed
    }
}

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the ring, which lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

fn parse(bytes: &[u8]) -> Option<Event> {
    if bytes.len() != std::mem::size_of::<Event>() {
        return None;
    }
    // SAFETY: `Event` is `repr(C)` of integers and byte arrays, valid for every bit pattern, and the length was compared; the read needs no alignment.
    Some(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<Event>()) })
}

/// Nanoseconds of `CLOCK_MONOTONIC`, the clock of [`Event::time_ns`].
///
/// # Errors
/// When the clock cannot be read.
pub fn now_ns() -> Result<u64> {
    Ok(crate::sys::monotonic().kernel("reading the monotonic clock")?.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_events_are_events() {
        let mut bytes = vec![0u8; std::mem::size_of::<Event>() + 1];
        bytes[..8].copy_from_slice(&7u64.to_ne_bytes());
        let n = bytes.len() - 1;
        assert_eq!(parse(&bytes[..n]).map(|e| e.time_ns), Some(7));
        assert_eq!(parse(&bytes), None);
        assert_eq!(parse(&bytes[..n - 1]), None);
    }
}
