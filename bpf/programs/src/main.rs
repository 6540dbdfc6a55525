//! The programs of flowloom's datapath: one entry point per hook. Decisions are in `flowloom-bpf-logic`.
#![no_std]
#![no_main]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

mod kernel;
mod maps;
mod skb;

use aya_ebpf::EbpfContext as _;
use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use flowloom_bpf_logic as logic;

use crate::kernel::Kernel;
use crate::skb::Skb;

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

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";
