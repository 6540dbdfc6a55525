//! The packet: [`Frame`] over `__sk_buff` and helpers only, so nothing depends on how much of it is linear.

use core::mem::MaybeUninit;
use core::ptr;

use aya_ebpf::bindings::{
    __sk_buff, BPF_F_INGRESS, BPF_F_INVALIDATE_HASH, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR,
    BPF_F_RECOMPUTE_CSUM, BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX,
};
use aya_ebpf::helpers as bpf;
use flowloom_bpf_abi::{Addr, FlowKey};
use flowloom_bpf_logic::{Frame, MAX_SUMMED, TunnelKey, Verdict, fold};

/// `PACKET_HOST` of linux/if_packet.h.
const PACKET_HOST: u32 = 0;
/// `BPF_ADJ_ROOM_MAC`: between link and network layer.
const ROOM_MAC: u32 = 1;
/// `BPF_F_ADJ_ROOM_DECAP_L3_IPV4` and `_IPV6`: what is there afterwards.
const DECAP_L3_IPV4: u64 = 1 << 7;
const DECAP_L3_IPV6: u64 = 1 << 8;
/// `BPF_F_IPV6` of `bpf_l4_csum_replace`.
const F_IPV6: u64 = 1 << 7;
/// `struct bpf_tunnel_key`: id, remote, tos and ttl, label, local.
type RawTunnelKey = [u32; 11];
const RAW_TUNNEL_KEY: u32 = size_of::<RawTunnelKey>() as u32;
const OUTER_TTL: u32 = 64;
/// `struct bpf_sock_tuple`: addresses, then ports, of either family; the size says which.
type RawTuple = [u32; 9];
const TUPLE_V4: u32 = 12;
const TUPLE_V6: u32 = 36;
const PROTOCOL_TCP: u8 = 6;
/// The namespace of the hook's device (`BPF_F_CURRENT_NETNS`).
const OWN_NETNS: u64 = u64::MAX;

/// One packet. The pointer is the program's context.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Skb(pub *mut __sk_buff);

macro_rules! field {
    ($self:ident.$name:ident) => {
        // SAFETY: the context is valid while the program runs; the verifier checks offset and width.
        unsafe { ptr::read_volatile(&raw const (*$self.0).$name) }
    };
}

/// Fills a key with an id and a remote address. In place and word by word: a plain assignment of zeros becomes a loop over bytes on this target.
#[inline(always)]
fn fill(raw: &mut MaybeUninit<RawTunnelKey>, id: u32, a: u32, b: u32, c: u32, d: u32) {
    let to = raw.as_mut_ptr().cast::<u32>();
    // SAFETY: eleven words, all inside the array.
    unsafe {
        ptr::write_volatile(to, id);
        ptr::write_volatile(to.add(1), a);
        ptr::write_volatile(to.add(2), b);
        ptr::write_volatile(to.add(3), c);
        ptr::write_volatile(to.add(4), d);
        ptr::write_volatile(to.add(5), OUTER_TTL << 8);
        ptr::write_volatile(to.add(6), 0);
        ptr::write_volatile(to.add(7), 0);
        ptr::write_volatile(to.add(8), 0);
        ptr::write_volatile(to.add(9), 0);
        ptr::write_volatile(to.add(10), 0);
    }
}

/// The words of an address, in memory order.
#[inline(always)]
fn words(a: &Addr) -> [u32; 4] {
    let p = ptr::from_ref(a).cast::<u32>();
    // SAFETY: an address has 16 bytes and the alignment of a word.
    unsafe { [*p, *p.add(1), *p.add(2), *p.add(3)] }
}

impl Skb {
    #[inline(always)]
    fn write<const N: usize>(self, at: u32, bytes: &[u8; N], flags: u64) -> bool {
        // SAFETY: the helper checks offset and length; the source is N readable bytes.
        unsafe { bpf::bpf_skb_store_bytes(self.0.cast(), at, bytes.as_ptr().cast(), N as u32, flags) == 0 }
    }
}

impl Frame for Skb {
    #[inline(always)]
    fn len(self) -> u32 {
        field!(self.len)
    }

    #[inline(always)]
    fn load<const N: usize>(self, at: u32, into: &mut [u8; N]) -> bool {
        // SAFETY: the helper checks offset and length; the target is N writable bytes.
        unsafe { bpf::bpf_skb_load_bytes(self.0.cast(), at, into.as_mut_ptr().cast(), N as u32) == 0 }
    }

    #[inline(always)]
    fn store<const N: usize>(self, at: u32, bytes: &[u8; N]) -> bool {
        self.write(at, bytes, 0)
    }

    #[inline(always)]
    fn store_summed<const N: usize>(self, at: u32, bytes: &[u8; N]) -> bool {
        self.write(at, bytes, (BPF_F_RECOMPUTE_CSUM | BPF_F_INVALIDATE_HASH) as u64)
    }

    #[inline(never)]
    fn fix_pseudo(self, at: u32, change: u16, v4: bool, udp: bool) -> bool {
        let mangled = if udp { BPF_F_MARK_MANGLED_0 as u64 } else { 0 };
        let flags = BPF_F_PSEUDO_HDR as u64 | mangled;
        let change = u16::from_ne_bytes(change.to_be_bytes()) as u64;
        // No other header makes up for a change of an IPv6 address; kernels that do not know the flag got it wrong.
        // SAFETY: the helper checks the offset.
        v4 && unsafe { bpf::bpf_l4_csum_replace(self.0, at, 0, change, flags) == 0 }
            || !v4
                && unsafe {
                    bpf::bpf_l4_csum_replace(self.0, at, 0, change, flags | F_IPV6) == 0
                        || bpf::bpf_l4_csum_replace(self.0, at, 0, change, flags) == 0
                }
    }

    #[inline(never)]
    fn fix_payload(self, at: u32, change: u16, udp: bool) -> bool {
        let flags = if udp { BPF_F_MARK_MANGLED_0 as u64 } else { 0 };
        let change = u16::from_ne_bytes(change.to_be_bytes()) as u64;
        // SAFETY: the helper checks the offset.
        unsafe { bpf::bpf_l4_csum_replace(self.0, at, 0, change, flags) == 0 }
    }

    #[inline(always)]
    fn ifindex(self) -> u32 {
        field!(self.ifindex)
    }

    #[inline(always)]
    fn arrived_on(self) -> u32 {
        field!(self.ingress_ifindex)
    }

    #[inline(always)]
    fn mark(self) -> u32 {
        field!(self.mark)
    }

    #[inline(always)]
    fn set_mark(self, mark: u32) {
        // SAFETY: as in `field!`; `mark` is writable for classifiers.
        unsafe { ptr::write_volatile(&raw mut (*self.0).mark, mark) }
    }

    #[inline(always)]
    fn gso_size(self) -> u32 {
        field!(self.gso_size)
    }

    #[inline(always)]
    fn tagged(self) -> bool {
        field!(self.vlan_present) != 0
    }

    #[inline(never)]
    fn checksum_pending(self, at: u32) -> bool {
        let (mut before, mut after) = ([0; 2], [0; 2]);
        // The helper leaves the field alone for a change of the payload when a device is still to sum it up.
        // SAFETY: the helper checks the offset.
        let tried = unsafe { bpf::bpf_l4_csum_replace(self.0, at, 0, 1, 2) == 0 };
        if !self.load(at, &mut before) {
            return false;
        }
        // SAFETY: as above; the second change shows whether the first one was made.
        let again = unsafe { bpf::bpf_l4_csum_replace(self.0, at, 0, 1, 2) == 0 };
        if !tried || !again || !self.load(at, &mut after) {
            return false;
        }
        if before == after {
            return true;
        }
        // SAFETY: as above; undoes both.
        unsafe {
            bpf::bpf_l4_csum_replace(self.0, at, 1, 0, 2);
            bpf::bpf_l4_csum_replace(self.0, at, 1, 0, 2);
        }
        false
    }

    #[inline(never)]
    fn sum(self, at: u32, len: u32) -> u32 {
        let mut raw = MaybeUninit::<[u64; MAX_SUMMED as usize / 8]>::uninit();
        let to = raw.as_mut_ptr().cast::<u64>();
        let mut i = 0;
        while i < MAX_SUMMED as usize / 8 {
            // SAFETY: inside the array. Volatile, or it becomes a call of memset; the verifier wants all of it written.
            unsafe { ptr::write_volatile(to.add(i), 0) };
            i += 1;
        }
        if len == 0 || len > MAX_SUMMED {
            return 0;
        }
        // SAFETY: the helpers check offset and length; the array holds as many bytes as `len` may be.
        let sum = unsafe {
            if bpf::bpf_skb_load_bytes(self.0.cast(), at, to.cast(), len) != 0 {
                return 0;
            }
            bpf::bpf_csum_diff(ptr::null_mut(), 0, to.cast(), len, 0)
        };
        // The helper adds words in the processor's order: the same sum with its bytes turned round (RFC 1071 section 2).
        (fold(sum as u32).swap_bytes()) as u32
    }

    #[inline(always)]
    fn resize(self, len: u32) -> bool {
        // SAFETY: the helper checks the length.
        unsafe { bpf::bpf_skb_change_tail(self.0, len, 0) == 0 }
    }

    #[inline(always)]
    fn insert_l3(self, bytes: u32) -> bool {
        // SAFETY: the helper checks the length.
        unsafe { bpf::bpf_skb_adjust_room(self.0, bytes as i32, ROOM_MAC, 0) == 0 }
    }

    #[inline(always)]
    fn unwrap(self, bytes: u32, v4: bool) -> bool {
        let family = if v4 { DECAP_L3_IPV4 } else { DECAP_L3_IPV6 };
        // A sum that the device made over the packet loses what goes; a checksum that it has found right stands for the outer datagram, one that
        // it is still to fill in lies further in.
        // SAFETY: the helper checks the length.
        let done = unsafe { bpf::bpf_skb_adjust_room(self.0, -(bytes as i32), ROOM_MAC, family) == 0 };
        if done && !v4 {
            // The Ethernet header is the outer one's. Where this is refused, what follows finds no header of IPv4 and drops the packet.
            self.store(12, &[0x86, 0xdd]);
        }
        done
    }

    #[inline(always)]
    fn is_for_this_host(self) -> bool {
        field!(self.pkt_type) == PACKET_HOST
    }

    #[inline(always)]
    fn for_this_host(self) {
        if field!(self.pkt_type) != PACKET_HOST {
            // SAFETY: the helper checks the type. A refusal leaves a type that no received packet has.
            unsafe {
                bpf::bpf_skb_change_type(self.0, PACKET_HOST);
            }
        }
    }

    #[inline(never)]
    fn tunnel(self, key: &mut TunnelKey) -> bool {
        let mut raw = MaybeUninit::uninit();
        fill(&mut raw, 0, 0, 0, 0, 0);
        let to: *mut RawTunnelKey = raw.as_mut_ptr();
        // SAFETY: the helper writes at most the size it is told.
        let v4 = unsafe { bpf::bpf_skb_get_tunnel_key(self.0, to.cast(), RAW_TUNNEL_KEY, 0) == 0 };
        // SAFETY: as above.
        let ok = v4
            || unsafe {
                bpf::bpf_skb_get_tunnel_key(self.0, to.cast(), RAW_TUNNEL_KEY, BPF_F_TUNINFO_IPV6 as u64) == 0
            };
        // SAFETY: every word was written above; read where the helper wrote.
        let [vni, a, b, c, d, ..] = unsafe { ptr::read_volatile(to) };
        key.vni = vni;
        key.remote = if v4 {
            Addr::v4(a.to_be_bytes())
        } else {
            let (a, b, c, d) = (a.to_ne_bytes(), b.to_ne_bytes(), c.to_ne_bytes(), d.to_ne_bytes());
            Addr([
                a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2],
                d[3],
            ])
        };
        ok
    }

    #[inline(never)]
    fn set_tunnel(self, key: &TunnelKey) -> bool {
        let [a, b, c, d] = words(&key.remote);
        let v4 = key.remote.is_v4();
        let (a, b, c, d) = if v4 { (u32::from_be(d), 0, 0, 0) } else { (a, b, c, d) };
        let flags = if v4 { BPF_F_ZERO_CSUM_TX } else { BPF_F_TUNINFO_IPV6 };
        let mut raw = MaybeUninit::uninit();
        fill(&mut raw, key.vni, a, b, c, d);
        // SAFETY: the helper reads the size it is told; every word is written.
        unsafe {
            bpf::bpf_skb_set_tunnel_key(self.0, raw.as_mut_ptr().cast(), RAW_TUNNEL_KEY, flags as u64) == 0
        }
    }

    #[inline(never)]
    fn has_socket(self, key: &FlowKey) -> bool {
        let (s, d) = (words(&key.src), words(&key.dst));
        let ports = u32::from_ne_bytes([key.sport[0], key.sport[1], key.dport[0], key.dport[1]]);
        let mut raw = MaybeUninit::<RawTuple>::uninit();
        let to = raw.as_mut_ptr().cast::<u32>();
        let v4 = key.src.is_v4();
        // SAFETY: nine words, all inside the array.
        unsafe {
            ptr::write_volatile(to, if v4 { s[3] } else { s[0] });
            ptr::write_volatile(to.add(1), if v4 { d[3] } else { s[1] });
            ptr::write_volatile(to.add(2), if v4 { ports } else { s[2] });
            ptr::write_volatile(to.add(3), s[3]);
            ptr::write_volatile(to.add(4), d[0]);
            ptr::write_volatile(to.add(5), d[1]);
            ptr::write_volatile(to.add(6), d[2]);
            ptr::write_volatile(to.add(7), d[3]);
            ptr::write_volatile(to.add(8), ports);
        }
        let size = if v4 { TUPLE_V4 } else { TUPLE_V6 };
        // SAFETY: the helpers read at most the size they are told; every word is written.
        let socket = unsafe {
            if key.protocol == PROTOCOL_TCP {
                bpf::bpf_skc_lookup_tcp(self.0.cast(), raw.as_mut_ptr().cast(), size, OWN_NETNS, 0)
            } else {
                bpf::bpf_sk_lookup_udp(self.0.cast(), raw.as_mut_ptr().cast(), size, OWN_NETNS, 0)
            }
        };
        if socket.is_null() {
            return false;
        }
        // SAFETY: a socket that was found, given back once.
        unsafe { bpf::bpf_sk_release(socket.cast()) };
        true
    }

    #[inline(always)]
    fn redirect(self, ifindex: u32) -> Verdict {
        // SAFETY: takes numbers only.
        Verdict(unsafe { bpf::bpf_redirect(ifindex, 0) } as i32)
    }

    #[inline(always)]
    fn redirect_ingress(self, ifindex: u32) -> Verdict {
        // SAFETY: takes numbers only.
        Verdict(unsafe { bpf::bpf_redirect(ifindex, BPF_F_INGRESS as u64) } as i32)
    }

    #[inline(always)]
    fn redirect_peer(self, ifindex: u32) -> Verdict {
        // SAFETY: takes numbers only.
        Verdict(unsafe { bpf::bpf_redirect_peer(ifindex, 0) } as i32)
    }

    #[inline(always)]
    fn redirect_neigh(self, ifindex: u32) -> Verdict {
        // SAFETY: no parameters: the helper asks the host's routes.
        Verdict(unsafe { bpf::bpf_redirect_neigh(ifindex, ptr::null_mut(), 0, 0) } as i32)
    }
}
