//! Everything of ours that the kernel holds, as values.

use std::collections::BTreeMap;

use flowloom_bpf_abi as abi;
use flowloom_compiler::PolicyEntries;

use crate::services::ServiceState;

/// Contents of the maps that plans decide. Equal states are the same node; the generation of a VPC is the kernel's own.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KernelState {
    /// The node's settings.
    pub config: abi::NodeConfig,
    /// By ifindex.
    pub devices: BTreeMap<u32, abi::DeviceRecord>,
    /// By id, records in use only.
    pub endpoints: BTreeMap<u32, abi::EndpointRecord>,
    /// By (VPC, address).
    pub addresses: BTreeMap<abi::AddressKey, abi::AddressRecord>,
    /// The ipcache.
    pub peers: BTreeMap<abi::PeerKey, abi::PeerRecord>,
    /// By number.
    pub vpcs: BTreeMap<u32, abi::VpcRecord>,
    /// By underlay address.
    pub nodes: BTreeMap<abi::Addr, abi::NodeRecord>,
    /// By slot.
    pub policies: BTreeMap<u32, PolicyEntries>,
    /// Network namespaces by cookie.
    pub namespaces: BTreeMap<u64, abi::NetnsRecord>,
    /// Services.
    pub services: ServiceState,
}

impl KernelState {
    /// The default VPC, when one is in force.
    #[must_use]
    pub fn default_vpc(&self) -> Option<u32> {
        self.vpcs.iter().find(|(_, r)| r.flags & abi::vpc_flags::DEFAULT != 0).map(|(id, _)| *id)
    }

    /// What the longest prefix covering `key`, but shorter than it, says.
    #[must_use]
    pub fn covering(&self, key: &abi::PeerKey) -> Option<&abi::PeerRecord> {
        (abi::PeerKey::VPC_BITS..key.prefixlen).rev().find_map(|bits| {
            let addr = abi::Addr(mask(key.addr.0, bits - abi::PeerKey::VPC_BITS));
            self.peers.get(&abi::PeerKey { prefixlen: bits, vpc: key.vpc, addr })
        })
    }
}

fn mask(addr: [u8; 16], bits: u32) -> [u8; 16] {
    let keep = if bits == 0 { 0 } else { u128::MAX << (128 - bits.min(128)) };
    (u128::from_be_bytes(addr) & keep).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::peer_key;
    use flowloom_compiler::VpcId;

    #[test]
    fn covering_finds_the_longest_shorter_prefix_of_the_same_vpc() {
        let record = |identity| abi::PeerRecord { identity, ..Default::default() };
        let mut state = KernelState::default();
        for (vpc, net, identity) in
            [(1, "10.0.0.0/8", 8), (1, "10.1.0.0/16", 16), (1, "10.1.2.3/32", 32), (2, "10.1.2.0/24", 24)]
        {
            state.peers.insert(peer_key(VpcId(vpc), net.parse().unwrap()), record(identity));
        }
        let covering =
            |net: &str| state.covering(&peer_key(VpcId(1), net.parse().unwrap())).map(|r| r.identity);
        assert_eq!(covering("10.1.2.3/32"), Some(16));
        assert_eq!(covering("10.1.0.0/16"), Some(8));
        assert_eq!(covering("10.0.0.0/8"), None);
        assert_eq!(covering("192.0.2.1/32"), None);
    }
}
