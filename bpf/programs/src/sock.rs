//! The address of a system call: [`Socket`] over `bpf_sock_addr`.

use core::ptr;

use aya_ebpf::bindings::bpf_sock_addr;
use aya_ebpf::helpers as bpf;
use flowloom_bpf_abi::Addr;
use flowloom_bpf_logic::socket::Socket;

/// `ECONNREFUSED` of asm-generic/errno.h.
const ECONNREFUSED: i32 = 111;

/// One system call at a hook of family 4 or 6. The pointer is the program's context.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Sock<const FAMILY: u8>(pub *mut bpf_sock_addr);

macro_rules! field {
    ($self:ident.$($name:tt)+) => {
        // SAFETY: the context is valid while the program runs; the verifier checks offset and width.
        unsafe { ptr::read_volatile(&raw const (*$self.0).$($name)+) }
    };
}

macro_rules! set {
    ($self:ident.$name:ident $([$i:literal])?, $value:expr) => {
        // SAFETY: as in `field!`; addresses and ports are writable at these hooks.
        unsafe { ptr::write_volatile(&raw mut (*$self.0).$name $([$i])?, $value) }
    };
}

impl<const FAMILY: u8> Socket for Sock<FAMILY> {
    #[inline(always)]
    fn netns(self) -> u64 {
        // SAFETY: takes the context.
        unsafe { bpf::bpf_get_netns_cookie(self.0.cast()) }
    }

    #[inline(always)]
    fn cookie(self) -> u64 {
        // SAFETY: takes the context.
        unsafe { bpf::bpf_get_socket_cookie(self.0.cast()) }
    }

    #[inline(always)]
    fn protocol(self) -> u8 {
        field!(self.protocol) as u8
    }

    #[inline(always)]
    fn addr(self) -> Addr {
        if FAMILY == 4 {
            return Addr::v4(field!(self.user_ip4).to_ne_bytes());
        }
        let a = field!(self.user_ip6[0]).to_ne_bytes();
        let b = field!(self.user_ip6[1]).to_ne_bytes();
        let c = field!(self.user_ip6[2]).to_ne_bytes();
        let d = field!(self.user_ip6[3]).to_ne_bytes();
        Addr([a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3]])
    }

    #[inline(always)]
    fn port(self) -> [u8; 2] {
        let b = field!(self.user_port).to_ne_bytes();
        [b[0], b[1]]
    }

    #[inline(never)]
    fn set(self, addr: &Addr, port: [u8; 2]) {
        let a = &addr.0;
        let last = u32::from_ne_bytes([a[12], a[13], a[14], a[15]]);
        if FAMILY == 4 {
            set!(self.user_ip4, last);
        } else {
            set!(self.user_ip6[0], u32::from_ne_bytes([a[0], a[1], a[2], a[3]]));
            set!(self.user_ip6[1], u32::from_ne_bytes([a[4], a[5], a[6], a[7]]));
            set!(self.user_ip6[2], u32::from_ne_bytes([a[8], a[9], a[10], a[11]]));
            set!(self.user_ip6[3], last);
        }
        set!(self.user_port, u16::from_ne_bytes(port) as u32);
    }

    #[inline(always)]
    fn refuse(self) {
        // SAFETY: takes a number.
        unsafe {
            bpf::bpf_set_retval(-ECONNREFUSED);
        }
    }
}
