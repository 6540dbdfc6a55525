//! The kernel's decision over compiled entries, in user space.

use flowloom_bpf_abi::{PolicyKey, PolicyValue, identity};

use crate::{Identity, PolicyEntries};

/// Two longest-prefix lookups, exact identity and any identity; the higher precedence decides. `None` = drop (`NoPolicyEntry`).
///
/// `port` is the responder's port, or ICMP type << 8 | code, or 0.
#[must_use]
pub fn lookup(entries: &PolicyEntries, peer: Identity, protocol: u8, port: u16) -> Option<PolicyValue> {
    let exact = longest(entries, peer.0, protocol, port);
    let any = longest(entries, identity::ANY, protocol, port);
    match (exact, any) {
        (Some(exact), Some(any)) => Some(if exact.precedence >= any.precedence { exact } else { any }),
        (one, other) => one.or(other),
    }
}

fn longest(entries: &PolicyEntries, identity: u32, protocol: u8, port: u16) -> Option<PolicyValue> {
    (PolicyKey::IDENTITY_BITS..=PolicyKey::FULL_BITS).rev().find_map(|len| {
        let key = masked(identity, protocol, port, len)?;
        entries.get(&key).copied()
    })
}

/// The key of a prefix; none for lengths inside the protocol byte, which no entry has.
pub(crate) fn masked(identity: u32, protocol: u8, port: u16, len: u32) -> Option<PolicyKey> {
    let (protocol, port) = match len {
        PolicyKey::IDENTITY_BITS => (0, 0),
        PolicyKey::PROTOCOL_BITS..=PolicyKey::FULL_BITS => {
            let keep = len - PolicyKey::PROTOCOL_BITS;
            (protocol, (u32::from(port) & !(0xffff_u32 >> keep)) as u16)
        }
        _ => return None,
    };
    Some(PolicyKey { prefixlen: len, identity, protocol, port: port.to_be_bytes(), pad: 0 })
}
