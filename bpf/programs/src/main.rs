//! The programs of flowloom's datapath: one entry point per hook. Decisions are in `flowloom-bpf-logic`.
#![no_std]
#![no_main]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

mod kernel;
mod maps;
mod skb;
mod sock;

use aya_ebpf::EbpfContext as _;
use aya_ebpf::macros::{cgroup_sock_addr, classifier};
use aya_ebpf::programs::{SockAddrContext, TcContext};
use flowloom_bpf_logic as logic;

use crate::kernel::Kernel;
use crate::skb::Skb;
use crate::sock::Sock;

macro_rules! hook {
    ($(#[doc = $doc:literal] $name:ident;)*) => {
        $(
            #[doc = $doc]
            #[classifier]
            pub fn $name(ctx: TcContext) -> i32 {
                let Some(scratch) = maps::SCRATCH.get_ptr_mut(0) else { return logic::Verdict::DROP.0 };
                // SAFETY: this processor's own value, and no program of ours interrupts another on a processor.
                let packet = unsafe { &mut *scratch };
                logic::$name(Skb(ctx.as_ptr().cast()), Kernel, packet).0
            }
        )*
    };
}

hook! {
    #[doc = "TCX ingress of an endpoint's host-side device."]
    from_endpoint;
    #[doc = "TCX egress of an endpoint's host-side device."]
    to_endpoint;
    #[doc = "TCX ingress of the VXLAN device."]
    from_overlay;
    #[doc = "TCX egress of the VXLAN device."]
    to_overlay;
    #[doc = "TCX ingress of an uplink."]
    from_uplink;
    #[doc = "TCX egress of an uplink."]
    to_uplink;
}

macro_rules! socket_hook {
    ($(#[doc = $doc:literal] $name:ident($attach:ident): $family:literal $logic:ident;)*) => {
        $(
            #[doc = $doc]
            #[cgroup_sock_addr($attach)]
            pub fn $name(ctx: SockAddrContext) -> i32 {
                logic::socket::$logic(Sock::<$family>(ctx.sock_addr), Kernel).0
            }
        )*
    };
}

socket_hook! {
    #[doc = "`connect`, IPv4."]
    connect4(connect4): 4 connect;
    #[doc = "`connect`, IPv6."]
    connect6(connect6): 6 connect;
    #[doc = "`sendmsg` with an address, IPv4."]
    sendmsg4(sendmsg4): 4 sendmsg;
    #[doc = "`sendmsg` with an address, IPv6."]
    sendmsg6(sendmsg6): 6 sendmsg;
    #[doc = "`recvmsg` that asks for the sender, IPv4."]
    recvmsg4(recvmsg4): 4 shown;
    #[doc = "`recvmsg` that asks for the sender, IPv6."]
    recvmsg6(recvmsg6): 6 shown;
    #[doc = "`getpeername`, IPv4."]
    getpeername4(getpeername4): 4 shown;
    #[doc = "`getpeername`, IPv6."]
    getpeername6(getpeername6): 6 shown;
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";
