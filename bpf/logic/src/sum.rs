//! Internet checksums (RFC 1071).

/// Most bytes that [`crate::Frame::sum`] adds up.
pub const MAX_SUMMED: u32 = 128;

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
#[must_use]
pub const fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}
