//! The packet as a hook sees it.

use flowloom_bpf_abi::{Addr, FlowKey};

/// What a program returns to the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
#[must_use]
pub struct Verdict(pub i32);

impl Verdict {
    /// The next program, or the stack (`TCX_NEXT`).
    pub const PASS: Self = Self(-1);
    /// Freed (`TCX_DROP`).
    pub const DROP: Self = Self(2);
    /// Sent to where a redirect helper said (`TCX_REDIRECT`).
    pub const REDIRECT: Self = Self(7);
}

/// The outside of a tunnelled packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct TunnelKey {
    /// Network identifier.
    pub vni: u32,
    /// The other node.
    pub remote: Addr,
}

/// Access to one packet. Offsets count from the Ethernet header. A `false` means that the bytes are not there or the kernel refused.
pub trait Frame: Copy {
    /// Bytes, Ethernet header included.
    fn len(self) -> u32;
    /// Whether there is not a single byte.
    fn is_empty(self) -> bool {
        self.len() == 0
    }
    /// Copies bytes out.
    fn load<const N: usize>(self, at: u32, into: &mut [u8; N]) -> bool;
    /// Copies bytes in; what the kernel knows of the checksum is left as it is (MAC addresses, or changes that cancel out).
    fn store<const N: usize>(self, at: u32, bytes: &[u8; N]) -> bool;
    /// Copies bytes in and keeps a checksum that the device computed over the packet right.
    fn store_summed<const N: usize>(self, at: u32, bytes: &[u8; N]) -> bool;
    /// Adds to the transport checksum at `at` what a change of an address in the pseudo header does, with what the kernel knows of the
    /// checksum; the change itself is made by [`Self::store`]. `udp`: a zero stays, and none comes to be.
    fn fix_pseudo(self, at: u32, change: u16, v4: bool, udp: bool) -> bool;
    /// The same for a change of what the checksum covers.
    fn fix_payload(self, at: u32, change: u16, udp: bool) -> bool;
    /// Device of the hook.
    fn ifindex(self) -> u32;
    /// Device that the packet came in on, 0 = made by this host.
    fn arrived_on(self) -> u32;
    /// `skb->mark`.
    fn mark(self) -> u32;
    /// Sets `skb->mark`.
    fn set_mark(self, mark: u32);
    /// Payload bytes per segment when the packet will be segmented, else 0.
    fn gso_size(self) -> u32;
    /// Whether a VLAN tag was taken off the packet.
    fn tagged(self) -> bool;
    /// Whether the transport checksum at this offset is still to be filled in by a device (the field holds the pseudo header's sum).
    fn checksum_pending(self, at: u32) -> bool;
    /// Sum of `len` bytes in big-endian words of 16 bits: a multiple of 4, at most [`crate::MAX_SUMMED`]; 0 where they are not all there.
    fn sum(self, at: u32, len: u32) -> u32;
    /// Cuts or grows the end; a packet to be segmented becomes a plain one.
    fn resize(self, len: u32) -> bool;
    /// Makes room between the Ethernet and the IP header.
    fn insert_l3(self, bytes: u32) -> bool;
    /// Takes bytes off between the Ethernet header and an IP header of this family: a packet that is not segmented, over IPv4.
    fn unwrap(self, bytes: u32, v4: bool) -> bool;
    /// Whether the link meant the packet for the receiving device.
    fn is_for_this_host(self) -> bool;
    /// Declares the packet as meant for the receiving device.
    fn for_this_host(self);
    /// The tunnel it came through.
    fn tunnel(self, key: &mut TunnelKey) -> bool;
    /// The tunnel it shall go through.
    fn set_tunnel(self, key: &TunnelKey) -> bool;
    /// Whether a socket of this host, connected or not, would get a packet of these addresses, ports and protocol (TCP or UDP).
    fn has_socket(self, key: &FlowKey) -> bool;
    /// Out of a device.
    fn redirect(self, ifindex: u32) -> Verdict;
    /// In through a device.
    fn redirect_ingress(self, ifindex: u32) -> Verdict;
    /// In through the other end of a veth.
    fn redirect_peer(self, ifindex: u32) -> Verdict;
    /// Out of a device, to the neighbour that the host's routes name.
    fn redirect_neigh(self, ifindex: u32) -> Verdict;
}
