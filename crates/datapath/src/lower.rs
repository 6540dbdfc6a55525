//! Plan values to map records and back. Pure.

use std::net::IpAddr;

use flowloom_bpf_abi::{self as abi, address_flags, endpoint_flags, node_flags, peer_flags, vpc_flags};
use flowloom_compiler::{EndpointPlan, Identity, NodeAddress, Peer, VpcId, VpcPlan};
use flowloom_model::Mac;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::device::{Delivery, DeviceInfo};
use crate::error::{Error, Result};

const V4_BITS: u32 = abi::V4_PREFIX_BITS as u32;

/// Key of the ipcache for a prefix of a VPC.
#[must_use]
pub fn peer_key(vpc: VpcId, net: IpNet) -> abi::PeerKey {
    let net = net.trunc();
    let family = if net.addr().is_ipv4() { V4_BITS } else { 0 };
    abi::PeerKey {
        prefixlen: abi::PeerKey::VPC_BITS + family + u32::from(net.prefix_len()),
        vpc: vpc.0,
        addr: net.addr().into(),
    }
}

/// VPC and prefix of an ipcache key; `None` for a key that [`peer_key`] never makes.
#[must_use]
pub fn peer_net(key: &abi::PeerKey) -> Option<(VpcId, IpNet)> {
    let bits = key.prefixlen.checked_sub(abi::PeerKey::VPC_BITS)?;
    let net = match (IpAddr::from(key.addr), bits.checked_sub(V4_BITS)) {
        (IpAddr::V4(a), Some(len)) => IpNet::V4(Ipv4Net::new(a, u8::try_from(len).ok()?).ok()?),
        (IpAddr::V4(_), None) => IpNet::V6(Ipv6Net::new(key.addr.0.into(), u8::try_from(bits).ok()?).ok()?),
        (IpAddr::V6(a), _) => IpNet::V6(Ipv6Net::new(a, u8::try_from(bits).ok()?).ok()?),
    };
    Some((VpcId(key.vpc), net))
}

/// ipcache value.
#[must_use]
pub fn peer_record(peer: &Peer) -> abi::PeerRecord {
    abi::PeerRecord {
        identity: peer.identity.0,
        flags: peer.flags,
        tunnel: peer.tunnel.map_or(abi::Addr::ZERO, Into::into),
    }
}

/// Peer of an ipcache value.
#[must_use]
pub fn peer(record: &abi::PeerRecord) -> Peer {
    Peer { identity: Identity(record.identity), flags: record.flags, tunnel: some_address(record.tunnel) }
}

/// Whether nobody has the addresses under this entry: what comes to be there can have no flows yet.
#[must_use]
pub fn is_unassigned(record: &abi::PeerRecord) -> bool {
    record.flags & peer_flags::UNASSIGNED != 0
}

/// `None` for the zero address that stands for "none".
#[must_use]
pub fn some_address(addr: abi::Addr) -> Option<IpAddr> {
    (!addr.is_zero()).then(|| addr.into())
}

/// Key of the address map.
#[must_use]
pub fn address_key(vpc: VpcId, ip: IpAddr) -> abi::AddressKey {
    abi::AddressKey { vpc: vpc.0, addr: ip.into() }
}

/// Value of the address map for a gateway address.
#[must_use]
pub fn gateway_record(vpc: &VpcPlan) -> abi::AddressRecord {
    let host = if vpc.default { address_flags::HOST } else { 0 };
    abi::AddressRecord { endpoint: 0, flags: address_flags::GATEWAY | host }
}

/// Value of the address map for an address of the node itself (default VPC).
#[must_use]
pub const fn host_record() -> abi::AddressRecord {
    abi::AddressRecord { endpoint: 0, flags: address_flags::HOST }
}

/// Flags of a VPC's record; its generation is the kernel's.
#[must_use]
pub const fn vpc_flag_bits(vpc: &VpcPlan) -> u32 {
    if vpc.default { vpc_flags::DEFAULT } else { 0 }
}

/// Value of the node map.
#[must_use]
pub fn node_record(node: &NodeAddress) -> abi::NodeRecord {
    abi::NodeRecord {
        flags: if node.local { node_flags::LOCAL } else { 0 },
        pad: 0,
        tunnel: node.tunnel.into(),
    }
}

/// An endpoint's record on its device.
///
/// # Errors
/// When the plan holds what no record can: an id out of range, revision 0, two addresses of one family, a gateway of a family without address.
pub fn endpoint_record(plan: &EndpointPlan, device: &DeviceInfo) -> Result<abi::EndpointRecord> {
    let invalid = |detail: String| Error::Invalid { object: format!("endpoint {}", plan.key), detail };
    if plan.id.0 == 0 || plan.id.0 >= abi::MAX_ENDPOINTS {
        return Err(invalid(format!("id {} is outside 1..={}", plan.id, abi::MAX_ENDPOINTS - 1)));
    }
    if plan.revision == 0 {
        return Err(invalid("revision 0 means undecided and is never in force".to_owned()));
    }
    let mut record = abi::EndpointRecord {
        vpc: plan.vpc.0,
        identity: plan.identity.0,
        ifindex: device.ifindex,
        revision: plan.revision,
        egress_slot: plan.egress_slot.0,
        ingress_slot: plan.ingress_slot.0,
        flags: endpoint_flags::VALID,
        delivery: device.delivery as u8,
        mac: plan.mac.0,
        host_mac: device.mac.0,
        mtu: plan.mtu.map_or(device.mtu, |m| m.min(device.mtu)),
        ..abi::EndpointRecord::default()
    };
    if plan.mac_pinned {
        record.flags |= endpoint_flags::MAC_PINNED;
    }
    if plan.judge_host {
        record.flags |= endpoint_flags::JUDGE_HOST;
    }
    for ip in &plan.ips {
        let subnet = plan.subnets.iter().find(|n| n.contains(ip)).map_or(0, IpNet::prefix_len);
        let (slot, plen) = match ip {
            IpAddr::V4(_) => (&mut record.ip4, &mut record.plen4),
            IpAddr::V6(_) => (&mut record.ip6, &mut record.plen6),
        };
        if !slot.is_zero() {
            return Err(invalid(format!("{ip} is its second address of that family")));
        }
        (*slot, *plen) = ((*ip).into(), subnet);
    }
    for gateway in &plan.gateways {
        let (slot, own) = match gateway {
            IpAddr::V4(_) => (&mut record.gateway4, record.ip4),
            IpAddr::V6(_) => (&mut record.gateway6, record.ip6),
        };
        if own.is_zero() || !slot.is_zero() {
            return Err(invalid(format!("gateway {gateway} has no address of its family, or a second one")));
        }
        *slot = (*gateway).into();
    }
    Ok(record)
}

/// The device part of a record: what the kernel remembers of a device while its agent was away.
#[must_use]
pub fn device_of(record: &abi::EndpointRecord) -> Option<DeviceInfo> {
    Some(DeviceInfo {
        name: format!("ifindex {}", record.ifindex),
        ifindex: record.ifindex,
        mac: Mac(record.host_mac),
        mtu: record.mtu,
        delivery: Delivery::from_number(record.delivery)?,
    })
}

/// The addresses of a record.
#[must_use]
pub fn addresses_of(record: &abi::EndpointRecord) -> Vec<IpAddr> {
    [record.ip4, record.ip6].into_iter().filter_map(some_address).collect()
}

/// Whether a record is in use.
#[must_use]
pub const fn is_valid(record: &abi::EndpointRecord) -> bool {
    record.flags & endpoint_flags::VALID != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use flowloom_compiler::{EndpointId, PolicySlot};

    fn plan() -> EndpointPlan {
        EndpointPlan {
            key: "red/web".parse().unwrap(),
            id: EndpointId(7),
            vpc: VpcId(100),
            ips: vec!["10.0.0.5".parse().unwrap(), "fd00::5".parse().unwrap()],
            subnets: vec!["10.0.0.0/24".parse().unwrap(), "fd00::/64".parse().unwrap()],
            gateways: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            mac: "02:00:00:00:00:05".parse().unwrap(),
            mac_pinned: true,
            identity: Identity(300),
            egress_slot: PolicySlot(3),
            ingress_slot: PolicySlot(4),
            revision: 9,
            judge_host: false,
            mtu: Some(1400),
        }
    }

    fn device() -> DeviceInfo {
        DeviceInfo {
            name: "fl7".into(),
            ifindex: 42,
            mac: "02:00:00:00:00:99".parse().unwrap(),
            mtu: 1450,
            delivery: Delivery::Peer,
        }
    }

    #[test]
    fn prefixes_count_the_vpc_and_the_mapped_part() {
        let key = |s: &str| peer_key(VpcId(5), s.parse().unwrap());
        assert_eq!(key("10.0.0.0/8").prefixlen, 32 + 96 + 8);
        assert_eq!(key("10.1.2.3/32").prefixlen, abi::PeerKey::FULL_BITS);
        assert_eq!(key("0.0.0.0/0").prefixlen, 128);
        assert_eq!(key("::/0").prefixlen, 32);
        assert_eq!(key("fd00::/64").prefixlen, 96);
        assert_eq!(key("10.1.2.3/8"), key("10.0.0.0/8"));
    }

    #[test]
    fn keys_come_back_as_what_they_were() {
        for net in
            ["0.0.0.0/0", "10.0.0.0/8", "10.1.2.3/32", "::/0", "fd00::/64", "fd00::1/128", "2001:db8::/33"]
        {
            let net: IpNet = net.parse().unwrap();
            assert_eq!(peer_net(&peer_key(VpcId(9), net)), Some((VpcId(9), net)));
        }
        assert_eq!(peer_net(&abi::PeerKey { prefixlen: 31, ..Default::default() }), None);
        assert_eq!(
            peer_net(&abi::PeerKey { prefixlen: 161, addr: abi::Addr::v4([1; 4]), ..Default::default() }),
            None
        );
    }

    #[test]
    fn peers_come_back_as_what_they_were() {
        for tunnel in [None, Some("192.0.2.1".parse().unwrap()), Some("2001:db8::1".parse().unwrap())] {
            let p = Peer { identity: Identity(256), flags: peer_flags::REMOTE, tunnel };
            assert_eq!(peer(&peer_record(&p)), p);
        }
    }

    #[test]
    fn a_record_holds_the_plan_and_the_device() {
        let r = endpoint_record(&plan(), &device()).unwrap();
        let want = abi::EndpointRecord {
            vpc: 100,
            identity: 300,
            ifindex: 42,
            revision: 9,
            egress_slot: 3,
            ingress_slot: 4,
            flags: endpoint_flags::VALID | endpoint_flags::MAC_PINNED,
            delivery: abi::delivery::PEER,
            plen4: 24,
            mac: [2, 0, 0, 0, 0, 5],
            host_mac: [2, 0, 0, 0, 0, 0x99],
            plen6: 64,
            pad: 0,
            mtu: 1400,
            ip4: abi::Addr::v4([10, 0, 0, 5]),
            ip6: "fd00::5".parse::<IpAddr>().unwrap().into(),
            gateway4: abi::Addr::v4([10, 0, 0, 1]),
            gateway6: "fd00::1".parse::<IpAddr>().unwrap().into(),
        };
        assert_eq!(r, want);
        assert_eq!(addresses_of(&r), plan().ips);
        assert_eq!(device_of(&r).unwrap().ifindex, 42);
    }

    #[test]
    fn a_subnets_mtu_never_exceeds_the_devices() {
        let mtu = |asked| endpoint_record(&EndpointPlan { mtu: asked, ..plan() }, &device()).unwrap().mtu;
        assert_eq!((mtu(None), mtu(Some(9000)), mtu(Some(1280))), (1450, 1450, 1280));
    }

    #[test]
    fn what_no_record_can_hold_is_refused() {
        let refused = |p: EndpointPlan| endpoint_record(&p, &device()).unwrap_err().to_string();
        assert!(refused(EndpointPlan { id: EndpointId(0), ..plan() }).contains("id 0"));
        assert!(refused(EndpointPlan { id: EndpointId(4096), ..plan() }).contains("1..=4095"));
        assert!(refused(EndpointPlan { revision: 0, ..plan() }).contains("revision 0"));
        let two = vec!["10.0.0.5".parse().unwrap(), "10.0.0.6".parse().unwrap()];
        assert!(refused(EndpointPlan { ips: two, ..plan() }).contains("second address"));
        let v6_only = vec!["fd00::5".parse().unwrap()];
        assert!(refused(EndpointPlan { ips: v6_only, ..plan() }).contains("gateway 10.0.0.1"));
    }
}
