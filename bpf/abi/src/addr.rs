//! One address type for both families.

/// `family` value of IPv4 in events and counters.
pub const FAMILY_V4: u8 = 4;
/// `family` value of IPv6 in events and counters.
pub const FAMILY_V6: u8 = 6;

/// An IPv6 address, or an IPv4 address in its mapped form (`::ffff:a.b.c.d`, RFC 4291 section 2.5.5.2).
///
/// Real IPv6 packets that carry a mapped address are dropped at parse time ([`crate::DropReason::InvalidAddress`]), so the two families never alias.
#[repr(C, align(4))]
#[derive(Clone, Copy, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[expect(
    clippy::derived_hash_with_manual_eq,
    reason = "equality is that of the bytes, only written in words"
)]
pub struct Addr(pub [u8; 16]);
crate::assert_layout!(Addr, 16);

impl PartialEq for Addr {
    /// In words: the copies carry the type's alignment, which the bytes alone do not have on the kernel's side.
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (*self, *other);
        u128::from_ne_bytes(a.0) == u128::from_ne_bytes(b.0)
    }
}

/// Prefix bits in front of an IPv4 address in mapped form.
pub const V4_PREFIX_BITS: u8 = 96;

impl Addr {
    /// The unspecified address.
    pub const ZERO: Self = Self([0; 16]);

    /// IPv4 in mapped form.
    #[inline(always)]
    #[must_use]
    pub const fn v4(a: [u8; 4]) -> Self {
        Self((0xffff_0000_0000 | u32::from_be_bytes(a) as u128).to_be_bytes())
    }

    /// IPv6 as it is.
    #[inline(always)]
    #[must_use]
    pub const fn v6(a: [u8; 16]) -> Self {
        Self(a)
    }

    /// Whether this is an IPv4 address in mapped form.
    #[inline(always)]
    #[must_use]
    pub const fn is_v4(&self) -> bool {
        let a = *self;
        u128::from_be_bytes(a.0) >> 32 == 0xffff
    }

    /// Four bytes of it, from the front (0..=3; 0 beyond), as the processor reads them.
    #[inline(always)]
    #[must_use]
    pub const fn word(&self, i: usize) -> u32 {
        let a = self.0;
        match i {
            0 => u32::from_ne_bytes([a[0], a[1], a[2], a[3]]),
            1 => u32::from_ne_bytes([a[4], a[5], a[6], a[7]]),
            2 => u32::from_ne_bytes([a[8], a[9], a[10], a[11]]),
            3 => u32::from_ne_bytes([a[12], a[13], a[14], a[15]]),
            _ => 0,
        }
    }

    /// The last four bytes: the IPv4 address when [`Self::is_v4`].
    #[inline(always)]
    #[must_use]
    pub const fn v4_octets(&self) -> [u8; 4] {
        [self.0[12], self.0[13], self.0[14], self.0[15]]
    }

    /// All bytes zero.
    #[inline(always)]
    #[must_use]
    pub const fn is_zero(&self) -> bool {
        let a = *self;
        u128::from_ne_bytes(a.0) == 0
    }
}

#[cfg(feature = "user")]
impl From<std::net::IpAddr> for Addr {
    fn from(ip: std::net::IpAddr) -> Self {
        match ip {
            std::net::IpAddr::V4(a) => Self::v4(a.octets()),
            std::net::IpAddr::V6(a) => Self::v6(a.octets()),
        }
    }
}

#[cfg(feature = "user")]
impl From<Addr> for std::net::IpAddr {
    fn from(a: Addr) -> Self {
        if a.is_v4() { Self::from(a.v4_octets()) } else { Self::from(a.0) }
    }
}
