//! The programs of flowloom's datapath: one entry point per hook. Decisions are in `flowloom-bpf-logic`.
#![no_std]
#![no_main]

mod maps;

use aya_ebpf::bindings::tcx_action_base::TCX_NEXT;
use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;

/// TCX ingress of an endpoint's host-side device.
#[classifier]
pub fn from_endpoint(_ctx: TcContext) -> i32 {
    TCX_NEXT
}

/// TCX egress of an endpoint's host-side device.
#[classifier]
pub fn to_endpoint(_ctx: TcContext) -> i32 {
    TCX_NEXT
}

/// TCX ingress of the VXLAN device.
#[classifier]
pub fn from_overlay(_ctx: TcContext) -> i32 {
    TCX_NEXT
}

/// TCX egress of the VXLAN device.
#[classifier]
pub fn to_overlay(_ctx: TcContext) -> i32 {
    TCX_NEXT
}

/// TCX ingress of an uplink.
#[classifier]
pub fn from_uplink(_ctx: TcContext) -> i32 {
    TCX_NEXT
}

/// TCX egress of an uplink.
#[classifier]
pub fn to_uplink(_ctx: TcContext) -> i32 {
    TCX_NEXT
}

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";
