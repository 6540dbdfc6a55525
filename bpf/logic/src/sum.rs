//! Internet checksums (RFC 1071).

use crate::frame::Frame;

/// Most bytes that [`words`] adds up.
pub(crate) const MAX_SUMMED: u32 = 128;

/// Adds big-endian 16-bit words.
#[inline(always)]
pub(crate) fn add<const N: usize>(mut sum: u32, bytes: &[u8; N]) -> u32 {
    let mut i = 0;
    while i + 1 < N {
        sum += u32::from(bytes[i]) << 8 | u32::from(bytes[i + 1]);
        i += 2;
    }
    sum
}

/// Folds to 16 bits.
#[inline(always)]
pub(crate) const fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// Adds `len` bytes of the packet, a multiple of 4 and at most [`MAX_SUMMED`]. Bytes that are not there count as zero.
#[inline(never)]
pub(crate) fn words<F: Frame>(f: F, at: u32, len: u32) -> u32 {
    let mut sum = 0;
    let mut i = 0;
    while i < MAX_SUMMED {
        if i >= len {
            break;
        }
        let mut b = [0; 4];
        if f.load(at + i, &mut b) {
            sum = add(sum, &b);
        }
        i += 4;
    }
    sum
}
