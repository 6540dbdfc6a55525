//! Faults planted on purpose, each compiled in for this test only: in the kernel's maps, or in what the user-space side's tables answer.

use flowloom_bpf_abi::{PolicyKey, PolicyValue, policy_flags};
use flowloom_compiler::{Op, PolicyEntries};
use ipnet::IpNet;

/// A fault to plant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// None.
    None,
    /// Kernel: ports of policy keys are little endian.
    PortByteOrder,
    /// Kernel: port prefixes are one bit short.
    PortPrefixOffByOne,
    /// Kernel: prefixes of CIDRs are one bit short.
    CidrPrefixOffByOne,
    /// Kernel: the lower precedence wins.
    PrecedenceFlip,
    /// Kernel: an endpoint's egress slot is read as its ingress slot, and the other way round.
    EgressAsIngress,
    /// Kernel: the generation of a VPC is never bumped.
    GenerationIgnored,
    /// Kernel: stateless rules keep state.
    StatelessForgotten,
    /// Kernel: what rejects drops in silence.
    RejectInSilence,
    /// Tables: the any-identity entry is asked only when the identity has none.
    AnyIdentityIgnored,
    /// Tables: decisions are current whatever the policy's revision.
    RevisionIgnored,
    /// Tables: a reply finds no connection.
    ReplyAsNew,
    /// Tables: connections of all VPCs share their keys.
    VpcNotInConntrackKey,
    /// Tables: the default VPC's peers are everyone's.
    VpcNotInPeerKey,
    /// Tables: decisions about an address that nobody has are kept, although its next owner bumps no generation.
    NobodyRemembered,
    /// Tables: the receiver's policy allows what its sender's policy allowed.
    ReceiverNotAsked,
}

impl Fault {
    /// Every fault.
    pub(crate) const ALL: [Self; 15] = [
        Self::PortByteOrder,
        Self::PortPrefixOffByOne,
        Self::CidrPrefixOffByOne,
        Self::PrecedenceFlip,
        Self::EgressAsIngress,
        Self::GenerationIgnored,
        Self::StatelessForgotten,
        Self::RejectInSilence,
        Self::AnyIdentityIgnored,
        Self::RevisionIgnored,
        Self::ReplyAsNew,
        Self::VpcNotInConntrackKey,
        Self::VpcNotInPeerKey,
        Self::NobodyRemembered,
        Self::ReceiverNotAsked,
    ];

    fn key(self, key: &PolicyKey) -> PolicyKey {
        let mut key = *key;
        match self {
            Self::PortByteOrder => key.port.reverse(),
            Self::PortPrefixOffByOne if key.prefixlen > PolicyKey::PROTOCOL_BITS => {
                key.prefixlen -= 1;
                let keep = key.prefixlen - PolicyKey::PROTOCOL_BITS;
                let port = u32::from(u16::from_be_bytes(key.port)) & !(0xffff >> keep);
                key.port = (port as u16).to_be_bytes();
            }
            _ => {}
        }
        key
    }

    fn value(self, value: &PolicyValue) -> PolicyValue {
        let mut value = *value;
        match self {
            Self::PrecedenceFlip => value.precedence = u32::MAX - value.precedence,
            Self::StatelessForgotten => value.flags &= !policy_flags::STATELESS,
            Self::RejectInSilence if value.verdict == flowloom_bpf_abi::verdict::REJECT => {
                value.verdict = flowloom_bpf_abi::verdict::DROP;
            }
            _ => {}
        }
        value
    }

    fn entries(self, entries: &PolicyEntries) -> PolicyEntries {
        entries.iter().map(|(k, v)| (self.key(k), self.value(v))).collect()
    }

    fn net(self, net: IpNet) -> IpNet {
        let whole = net.prefix_len() == net.max_prefix_len();
        if self == Self::CidrPrefixOffByOne && !whole { net.supernet().unwrap_or(net) } else { net }
    }

    /// What the kernel is told instead.
    pub(crate) fn spoil(self, ops: Vec<Op>) -> Vec<Op> {
        let spoiled = |op: Op| match op {
            Op::PutSlots(slots) => {
                Some(Op::PutSlots(slots.iter().map(|(s, e)| (*s, self.entries(e))).collect()))
            }
            Op::AddEntries { slot, entries } => {
                Some(Op::AddEntries { slot, entries: self.entries(&entries) })
            }
            Op::RemoveEntries { slot, keys } => {
                Some(Op::RemoveEntries { slot, keys: keys.iter().map(|k| self.key(k)).collect() })
            }
            Op::PutPeers(peers) => {
                Some(Op::PutPeers(peers.into_iter().map(|((v, n), p)| ((v, self.net(n)), p)).collect()))
            }
            Op::RemovePeers(keys) => {
                Some(Op::RemovePeers(keys.into_iter().map(|(v, n)| (v, self.net(n))).collect()))
            }
            Op::PutEndpoint(mut endpoint) if self == Self::EgressAsIngress => {
                std::mem::swap(&mut endpoint.egress_slot, &mut endpoint.ingress_slot);
                Some(Op::PutEndpoint(endpoint))
            }
            Op::BumpGeneration(_) if self == Self::GenerationIgnored => None,
            other => Some(other),
        };
        if self == Self::None { ops } else { ops.into_iter().filter_map(spoiled).collect() }
    }
}
