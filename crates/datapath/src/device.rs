//! What the kernel knows about an endpoint's device, and how packets reach it.

use std::io;

use flowloom_bpf_abi::delivery;
use flowloom_model::Mac;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, sendto, socket,
};

use crate::config::Forwarding;
use crate::error::{Context as _, Result};
use std::os::fd::AsRawFd as _;

/// How a packet is handed to a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Delivery {
    /// `bpf_redirect_peer`: a veth whose other end is in another namespace.
    Peer = delivery::PEER,
    /// `bpf_redirect` to its egress: tap, macvtap, a veth whose peer is in the same namespace.
    Redirect = delivery::REDIRECT,
    /// Through the host's stack.
    Stack = delivery::STACK,
}

impl Delivery {
    /// From the number in an endpoint record.
    #[must_use]
    pub fn from_number(n: u8) -> Option<Self> {
        match n {
            delivery::PEER => Some(Self::Peer),
            delivery::REDIRECT => Some(Self::Redirect),
            delivery::STACK => Some(Self::Stack),
            _ => None,
        }
    }
}

/// An endpoint's host-side device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// Name in the node's namespace (for messages).
    pub name: String,
    /// Index in the node's namespace.
    pub ifindex: u32,
    /// MAC of the host-side device: what the workload sees as its gateway.
    pub mac: Mac,
    /// Largest IP packet, bytes.
    pub mtu: u16,
    /// How packets reach it.
    pub delivery: Delivery,
}

impl DeviceInfo {
    /// Reads a device of the calling thread's network namespace and decides how to deliver to it.
    ///
    /// # Errors
    /// When there is no such device or the kernel's answer cannot be read.
    pub fn inspect(name: &str, forwarding: Forwarding) -> Result<Self> {
        let link = read_link(Query::Name(name)).device("inspecting", name)?;
        Ok(Self::from_link(link, forwarding))
    }

    /// As [`Self::inspect`], by index.
    ///
    /// # Errors
    /// As there.
    pub fn inspect_index(ifindex: u32, forwarding: Forwarding) -> Result<Self> {
        let link = read_link(Query::Index(ifindex)).device("inspecting", format!("ifindex {ifindex}"))?;
        Ok(Self::from_link(link, forwarding))
    }

    fn from_link(link: Link, forwarding: Forwarding) -> Self {
        let delivery = match forwarding {
            Forwarding::Stack => Delivery::Stack,
            Forwarding::Ebpf if link.kind == "veth" && link.peer_netns => Delivery::Peer,
            Forwarding::Ebpf => Delivery::Redirect,
        };
        Self {
            name: link.name,
            ifindex: link.ifindex,
            mac: Mac(link.mac),
            mtu: u16::try_from(link.mtu).unwrap_or(u16::MAX),
            delivery,
        }
    }
}

/// What RTM_NEWLINK said.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Link {
    name: String,
    ifindex: u32,
    mac: [u8; 6],
    mtu: u32,
    kind: String,
    /// `IFLA_LINK_NETNSID` was present: the peer is in another namespace.
    peer_netns: bool,
}

enum Query<'a> {
    Name(&'a str),
    Index(u32),
}

const NLMSG_HEADER: usize = 16;
const IFINFO: usize = 16;
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_LINK_NETNSID: u16 = 37;
const NLA_TYPE_MASK: u16 = 0x3fff;

/// One RTM_GETLINK (rtnetlink(7)) in the calling thread's namespace.
fn read_link(query: Query<'_>) -> io::Result<Link> {
    let sock =
        socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)?;
    bind(sock.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    let request = link_request(&query)?;
    sendto(sock.as_raw_fd(), &request, &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
    let mut buffer = vec![0u8; 32 * 1024];
    let n = recv(sock.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
    parse_link(&buffer[..n])
}

fn link_request(query: &Query<'_>) -> io::Result<Vec<u8>> {
    let mut out = vec![0u8; NLMSG_HEADER + IFINFO];
    match query {
        Query::Index(i) => out[NLMSG_HEADER + 4..NLMSG_HEADER + 8].copy_from_slice(&i.to_ne_bytes()),
        Query::Name(name) => {
            if name.is_empty() || name.len() > 15 || name.contains('\0') {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "a device name has 1..15 bytes"));
            }
            out.extend_from_slice(&(4 + name.len() as u16 + 1).to_ne_bytes());
            out.extend_from_slice(&IFLA_IFNAME.to_ne_bytes());
            out.extend_from_slice(name.as_bytes());
            out.push(0);
            out.resize(out.len().next_multiple_of(4), 0);
        }
    }
    let len = out.len() as u32;
    out[0..4].copy_from_slice(&len.to_ne_bytes());
    out[4..6].copy_from_slice(&RTM_GETLINK.to_ne_bytes());
    out[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    out[8..12].copy_from_slice(&1u32.to_ne_bytes());
    Ok(out)
}

fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(b.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(b: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(b.get(at..at + 4)?.try_into().ok()?))
}

/// Attributes of a netlink message: (type without flags, payload).
fn attributes(mut b: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (len, kind) = (usize::from(u16_at(b, 0)?), u16_at(b, 2)?);
        let payload = b.get(4..len)?;
        b = b.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind & NLA_TYPE_MASK, payload))
    })
}

fn text(b: &[u8]) -> String {
    String::from_utf8_lossy(b.split(|c| *c == 0).next().unwrap_or_default()).into_owned()
}

fn parse_link(message: &[u8]) -> io::Result<Link> {
    let bad =
        || io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer to RTM_GETLINK is not a link");
    let body = message.get(NLMSG_HEADER..).ok_or_else(bad)?;
    match u16_at(message, 4).ok_or_else(bad)? {
        RTM_NEWLINK => {}
        NLMSG_ERROR => {
            let code = u32_at(body, 0).ok_or_else(bad)? as i32;
            return Err(io::Error::from_raw_os_error(-code));
        }
        _ => return Err(bad()),
    }
    let mut link = Link { ifindex: u32_at(body, 4).ok_or_else(bad)?, ..Link::default() };
    for (kind, payload) in attributes(body.get(IFINFO..).ok_or_else(bad)?) {
        match kind {
            IFLA_IFNAME => link.name = text(payload),
            IFLA_MTU => link.mtu = u32_at(payload, 0).ok_or_else(bad)?,
            IFLA_ADDRESS => {
                if let Ok(mac) = payload.try_into() {
                    link.mac = mac;
                }
            }
            IFLA_LINK_NETNSID => link.peer_netns = true,
            IFLA_LINKINFO => {
                for (kind, payload) in attributes(payload) {
                    if kind == IFLA_INFO_KIND {
                        link.kind = text(payload);
                    }
                }
            }
            _ => {}
        }
    }
    Ok(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(kind: u16, payload: &[u8]) -> Vec<u8> {
        let mut out = (4 + payload.len() as u16).to_ne_bytes().to_vec();
        out.extend_from_slice(&kind.to_ne_bytes());
        out.extend_from_slice(payload);
        out.resize(out.len().next_multiple_of(4), 0);
        out
    }

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut out = (16 + body.len() as u32).to_ne_bytes().to_vec();
        out.extend_from_slice(&kind.to_ne_bytes());
        out.resize(16, 0);
        out.extend_from_slice(body);
        out
    }

    fn newlink(kind: &str, other_netns: bool) -> Vec<u8> {
        let mut body = vec![0; 16];
        body[4..8].copy_from_slice(&7u32.to_ne_bytes());
        body.extend(attr(IFLA_IFNAME, b"fl0\0"));
        body.extend(attr(IFLA_ADDRESS, &[2, 0, 0, 0, 0, 9]));
        body.extend(attr(IFLA_MTU, &1450u32.to_ne_bytes()));
        body.extend(attr(IFLA_LINKINFO | 0x8000, &attr(IFLA_INFO_KIND, format!("{kind}\0").as_bytes())));
        if other_netns {
            body.extend(attr(IFLA_LINK_NETNSID, &0u32.to_ne_bytes()));
        }
        message(RTM_NEWLINK, &body)
    }

    #[test]
    fn delivery_follows_the_kind_and_the_peers_namespace() {
        let delivery = |kind, other, mode| {
            DeviceInfo::from_link(parse_link(&newlink(kind, other)).unwrap(), mode).delivery
        };
        assert_eq!(delivery("veth", true, Forwarding::Ebpf), Delivery::Peer);
        assert_eq!(delivery("veth", false, Forwarding::Ebpf), Delivery::Redirect);
        assert_eq!(delivery("tun", false, Forwarding::Ebpf), Delivery::Redirect);
        assert_eq!(delivery("macvtap", true, Forwarding::Ebpf), Delivery::Redirect);
        assert_eq!(delivery("veth", true, Forwarding::Stack), Delivery::Stack);
    }

    #[test]
    fn a_link_is_read_whole() {
        let link = parse_link(&newlink("veth", true)).unwrap();
        let want = Link {
            name: "fl0".into(),
            ifindex: 7,
            mac: [2, 0, 0, 0, 0, 9],
            mtu: 1450,
            kind: "veth".into(),
            peer_netns: true,
        };
        assert_eq!(link, want);
    }

    #[test]
    fn errors_and_short_answers_are_errors() {
        let error = parse_link(&message(NLMSG_ERROR, &(-19i32).to_ne_bytes())).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        let whole = newlink("veth", true);
        for n in 0..32 {
            assert!(parse_link(&whole[..n]).is_err(), "{n} bytes");
        }
    }

    #[test]
    fn loopback_is_read_from_the_kernel() {
        let lo = DeviceInfo::inspect("lo", Forwarding::Ebpf).unwrap();
        assert_eq!((lo.ifindex, lo.delivery), (1, Delivery::Redirect));
        assert_eq!(DeviceInfo::inspect_index(1, Forwarding::Ebpf).unwrap(), lo);
        let error = DeviceInfo::inspect("no-such-dev", Forwarding::Ebpf).unwrap_err();
        assert!(error.to_string().contains("no-such-dev"), "{error}");
    }
}
