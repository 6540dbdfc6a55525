//! Checksums that are reckoned in words.

use flowloom_bpf_abi::Addr;

use crate::nat::address_delta;
use crate::sum::fold;

/// RFC 1624, word by word.
fn slowly(old: &Addr, new: &Addr) -> u16 {
    let words = |a: &Addr| a.0.chunks_exact(2).map(|w| u16::from_be_bytes([w[0], w[1]])).collect::<Vec<_>>();
    let old: u32 = words(old).into_iter().map(|w| u32::from(!w)).sum();
    fold(old + words(new).into_iter().map(u32::from).sum::<u32>())
}

#[test]
fn a_change_of_address_sums_to_what_its_words_do() {
    let v6 = |n: u128| Addr::v6(n.to_be_bytes());
    let addresses = [
        Addr::ZERO,
        Addr::v4([10, 1, 0, 10]),
        Addr::v4([255, 255, 255, 255]),
        Addr::v4([0, 0, 0, 0]),
        v6(u128::MAX),
        v6(1),
        v6(0x2001_0db8_0000_0001_0000_0000_0000_0042),
        v6(0xfe80_0000_0000_0000_0123_4567_89ab_cdef),
        v6(0xffff_0000_ffff_0000_ffff_0000_ffff_0001),
    ];
    for old in &addresses {
        for new in &addresses {
            assert_eq!(address_delta(old, new), slowly(old, new), "{old:?} -> {new:?}");
        }
    }
}
