//! ARP (RFC 826).

use std::net::Ipv4Addr;

use flowloom_netlink::Mac;

/// Everyone.
pub const BROADCAST: Mac = Mac([0xff; 6]);

/// Sender and target as the packet claims them; `frame_source` and `frame_destination` of [`Arp::frame`] may differ.
#[derive(Debug, Clone, Copy)]
pub struct Arp {
    /// Asks (1) or answers (2).
    pub operation: u16,
    /// Claimed hardware address of the sender.
    pub sender_mac: Mac,
    /// Claimed address of the sender.
    pub sender_ip: Ipv4Addr,
    /// Hardware address of the target, zero when asked for.
    pub target_mac: Mac,
    /// Address of the target.
    pub target_ip: Ipv4Addr,
}

impl Arp {
    /// "Who has `target`? Tell `sender`."
    #[must_use]
    pub fn request(sender_mac: Mac, sender_ip: Ipv4Addr, target_ip: Ipv4Addr) -> Self {
        Self { operation: 1, sender_mac, sender_ip, target_mac: Mac([0; 6]), target_ip }
    }

    /// "`sender` is at `sender_mac`."
    #[must_use]
    pub fn reply(sender_mac: Mac, sender_ip: Ipv4Addr, target_mac: Mac, target_ip: Ipv4Addr) -> Self {
        Self { operation: 2, sender_mac, sender_ip, target_mac, target_ip }
    }

    /// The frame.
    #[must_use]
    pub fn frame(&self, source: Mac, destination: Mac) -> Vec<u8> {
        let mut b = Vec::with_capacity(42);
        b.extend(destination.0);
        b.extend(source.0);
        b.extend([0x08, 0x06, 0, 1, 0x08, 0, 6, 4]);
        b.extend(self.operation.to_be_bytes());
        b.extend(self.sender_mac.0);
        b.extend(self.sender_ip.octets());
        b.extend(self.target_mac.0);
        b.extend(self.target_ip.octets());
        b
    }

    /// Takes a frame apart; `None` when it is not ARP for IPv4 over Ethernet.
    #[must_use]
    pub fn from_frame(frame: &[u8]) -> Option<Self> {
        let b = frame.get(..42)?;
        if b[12..20] != [0x08, 0x06, 0, 1, 0x08, 0, 6, 4] {
            return None;
        }
        let mac = |at: usize| b[at..at + 6].first_chunk::<6>().map(|m| Mac(*m));
        let ip = |at: usize| Ipv4Addr::new(b[at], b[at + 1], b[at + 2], b[at + 3]);
        Some(Self {
            operation: u16::from_be_bytes([b[20], b[21]]),
            sender_mac: mac(22)?,
            sender_ip: ip(28),
            target_mac: mac(32)?,
            target_ip: ip(38),
        })
    }
}
