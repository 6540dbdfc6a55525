//! What kernel and end-to-end tests are made of: namespaces and topologies that undo themselves, traffic, crafted
//! packets, captures, probes, and waiting with a bound. For tests only; every guard cleans up when it is dropped,
//! also by a panic, and as far as possible on SIGINT and SIGTERM. What a killed run leaves is removed by the next.

#[cfg(feature = "kubernetes")]
pub mod api_server;
mod bpffs;
mod capture;
mod exec;
mod net;
mod ns;
mod packet;
mod parsed;
mod probe;
mod process;
mod root;
mod stop;
mod tcp;
mod temp;
mod time;
mod topology;
mod udp;
mod undo;

pub use bpffs::Bpffs;
pub use capture::{Capture, Direction, Frame, RawSender};
pub use exec::{Cmd, Output};
pub use ns::Ns;
pub use packet::{
    Fault, Packet, Transport, arp, checksum, icmp, ip_protocol, nd, sctp_chunk, sctp_packet, tcp_flags, vxlan,
};
pub use parsed::Parsed;
pub use probe::{Outcome, Probe, Proto, probe_all};
pub use process::Process;
pub use root::require_root;
pub use tcp::{FlowReport, Mode, TcpClient, TcpFlow, TcpServer};
pub use temp::{TempDir, temp_dir};
pub use time::{PATIENCE, eventually, never, settled_second};
pub use topology::{External, Netfilter, Node, Topology, TopologyBuilder, connect};
pub use udp::{Arrival, EchoServer, SctpServer, UdpReceiver, UdpSender};
