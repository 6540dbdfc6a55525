//! Words for numbers.

use std::collections::BTreeMap;

use flowloom_api::v1;
use flowloom_bpf_abi::{self as abi, direction, hook, verdict};

/// A verdict of a program.
#[must_use]
pub(crate) fn verdict(n: u8) -> Option<v1::Verdict> {
    match n {
        verdict::ALLOW => Some(v1::Verdict::Allow),
        verdict::DROP => Some(v1::Verdict::Drop),
        verdict::REJECT => Some(v1::Verdict::Reject),
        _ => None,
    }
}

/// A direction of a program.
#[must_use]
pub(crate) fn direction(n: u8) -> v1::Direction {
    if n == direction::INGRESS { v1::Direction::Ingress } else { v1::Direction::Egress }
}

/// CamelCase drop reason.
#[must_use]
pub(crate) fn reason(n: u8) -> String {
    abi::DropReason::from_u8(n).map_or_else(|| format!("Reason{n}"), |r| r.name().to_owned())
}

/// Where a program runs.
#[must_use]
pub(crate) fn hook(n: u8) -> &'static str {
    match n {
        hook::FROM_ENDPOINT => "from_endpoint",
        hook::TO_ENDPOINT => "to_endpoint",
        hook::FROM_OVERLAY => "from_overlay",
        hook::TO_OVERLAY => "to_overlay",
        hook::FROM_UPLINK => "from_uplink",
        hook::TO_UPLINK => "to_uplink",
        _ => "unknown",
    }
}

/// A protocol's usual name, or its number.
#[must_use]
pub(crate) fn protocol(n: u8) -> String {
    match n {
        1 => "icmp".into(),
        6 => "tcp".into(),
        17 => "udp".into(),
        58 => "icmpv6".into(),
        132 => "sctp".into(),
        n => n.to_string(),
    }
}

/// The number of a protocol's name; `icmp` is 1 or 58 by family.
#[must_use]
pub(crate) fn protocol_number(name: &str, v4: bool) -> Option<u8> {
    match name {
        "icmp" => Some(if v4 { 1 } else { 58 }),
        "icmpv6" => Some(58),
        "tcp" => Some(6),
        "udp" => Some(17),
        "sctp" => Some(132),
        n => n.parse().ok(),
    }
}

/// TCP flags as letters.
#[must_use]
pub(crate) fn tcp_flags(byte: u8) -> String {
    const LETTERS: [(u8, char); 8] =
        [(2, 'S'), (1, 'F'), (4, 'R'), (8, 'P'), (16, 'A'), (32, 'U'), (64, 'E'), (128, 'C')];
    LETTERS.iter().filter(|(bit, _)| byte & bit != 0).map(|(_, c)| c).collect()
}

/// The byte of [`tcp_flags`].
#[must_use]
pub(crate) fn tcp_flags_byte(letters: &str) -> Option<u8> {
    letters.chars().try_fold(0, |byte, c| {
        let bit = match c.to_ascii_uppercase() {
            'S' => 2,
            'F' => 1,
            'R' => 4,
            'P' => 8,
            'A' => 16,
            'U' => 32,
            'E' => 64,
            'C' => 128,
            _ => return None,
        };
        Some(byte | bit)
    })
}

/// A rule's name beside its number.
#[must_use]
pub(crate) fn rule(rules: &BTreeMap<u32, String>, number: u32) -> v1::Named {
    if number == 0 {
        return v1::Named::new("default", 0);
    }
    v1::Named::new(rules.get(&number).cloned().unwrap_or_default(), number)
}

/// A reserved identity's word.
#[must_use]
pub(crate) fn reserved_identity(n: u32) -> Option<&'static str> {
    use abi::identity::{ANY, HEALTH, HOST, INGRESS, REMOTE_NODE, UNMANAGED, WORLD, WORLD_V4, WORLD_V6};
    Some(match n {
        ANY => "any",
        HOST => "host",
        WORLD => "world",
        WORLD_V4 => "world-ipv4",
        WORLD_V6 => "world-ipv6",
        REMOTE_NODE => "remote-node",
        UNMANAGED => "unmanaged",
        HEALTH => "health",
        INGRESS => "ingress",
        _ => return None,
    })
}

/// State of a tracked connection.
#[must_use]
pub(crate) fn ct_state(n: u8) -> &'static str {
    use abi::ct_state::{CLOSED, CLOSING, ESTABLISHED, NEW, SYN_RECV, SYN_SENT};
    match n {
        NEW => "new",
        SYN_SENT => "syn-sent",
        SYN_RECV => "syn-recv",
        ESTABLISHED => "established",
        CLOSING => "closing",
        CLOSED => "closed",
        _ => "unknown",
    }
}

/// Flags of a tracked connection.
#[must_use]
pub(crate) fn ct_flags(flags: u16) -> Vec<String> {
    use abi::ct_flags::{FIN_ORIG, FIN_REPLY, FROM_HOST, MIDSTREAM, REJECTED, RST, SEEN_REPLY};
    [
        (SEEN_REPLY, "seen-reply"),
        (FIN_ORIG, "fin"),
        (FIN_REPLY, "fin-reply"),
        (RST, "rst"),
        (MIDSTREAM, "midstream"),
        (FROM_HOST, "from-host"),
        (REJECTED, "rejected"),
    ]
    .into_iter()
    .filter(|(bit, _)| flags & bit != 0)
    .map(|(_, name)| name.to_owned())
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_and_letters_are_inverse() {
        for byte in 0..=255u8 {
            assert_eq!(tcp_flags_byte(&tcp_flags(byte)), Some(byte));
        }
        assert_eq!(tcp_flags_byte("X"), None);
    }

    #[test]
    fn an_unnamed_number_is_shown_as_number() {
        assert_eq!(rule(&BTreeMap::new(), 9).to_string(), "#9");
        assert_eq!(rule(&BTreeMap::new(), 0).to_string(), "default");
        assert_eq!(reason(250), "Reason250");
        assert_eq!((protocol(47), protocol_number("47", true)), ("47".into(), Some(47)));
    }
}
