//! Programs on a link by the classic path (clsact). They are in force at once, while a TCX link makes the kernel wait for
//! all CPUs; so they guard a new device until its links are there. TCX runs first, so both together are only slower.

use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::NLM_F_CREATE;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{
    TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcMessage, TcOption,
};
use nix::errno::Errno;

use crate::error::{Action, Result};
use crate::handle::Handle;
use crate::socket::Request;
use crate::types::IfIndex;

/// Preference of flowloom's filters: `tc filter show` names it, nobody else's number.
pub const PREFERENCE: u16 = 0xf10e;
/// `ETH_P_ALL` (linux/if_ether.h).
const EVERY_PROTOCOL: u16 = 3;
const HANDLE: TcHandle = TcHandle { major: 0, minor: 1 };

fn message(link: IfIndex, handle: TcHandle, minor: u16, info: u32) -> TcMessage {
    let mut m = TcMessage::with_index(i32::try_from(link.0).unwrap_or(0));
    m.header.handle = handle;
    m.header.parent = TcHandle { major: u16::MAX, minor };
    m.header.info = info;
    m
}

fn filter(link: IfIndex, minor: u16) -> TcMessage {
    let info = (u32::from(PREFERENCE) << 16) | u32::from(EVERY_PROTOCOL.to_be());
    let mut m = message(link, HANDLE, minor, info);
    m.attributes.push(TcAttribute::Kind(TcFilterBpf::KIND.to_owned()));
    m
}

impl Handle {
    /// Runs the programs (of type `SCHED_CLS`) on what comes in on a link and on what goes out. All or nothing.
    ///
    /// # Errors
    /// When the kernel refuses one of them.
    pub fn guard_classic(
        &mut self,
        link: IfIndex,
        ingress: BorrowedFd<'_>,
        egress: BorrowedFd<'_>,
    ) -> Result<()> {
        let object = format!("classic programs of link {link}");
        let create = |message, already| Request {
            message,
            flags: NLM_F_CREATE,
            action: Action::Create,
            object: object.clone(),
            already,
        };
        let mut qdisc = message(link, TcHandle { major: u16::MAX, minor: 0 }, TcHandle::CLSACT.minor, 0);
        qdisc.attributes.push(TcAttribute::Kind("clsact".to_owned()));
        let mut requests = vec![create(RouteNetlinkMessage::NewQueueDiscipline(qdisc), &[Errno::EEXIST][..])];
        for (minor, program, name) in
            [(TcHandle::MIN_INGRESS, ingress, "flowloom-in"), (TcHandle::MIN_EGRESS, egress, "flowloom-out")]
        {
            let mut m = filter(link, minor);
            m.attributes.push(TcAttribute::Options(vec![
                TcOption::Bpf(TcFilterBpfOption::ProgFd(
                    u32::try_from(program.as_raw_fd()).unwrap_or(u32::MAX),
                )),
                TcOption::Bpf(TcFilterBpfOption::ProgName(name.to_owned())),
                TcOption::Bpf(TcFilterBpfOption::Flags(TcBpfFlags::DirectAction)),
            ]));
            requests.push(create(RouteNetlinkMessage::NewTrafficFilter(m), &[]));
        }
        let result = self.transact(requests);
        if result.is_err() {
            let _ = self.unguard_classic(&[link]);
        }
        result.map(drop)
    }

    /// Takes flowloom's filters off links; returns how many there were. The empty qdisc goes with its link.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn unguard_classic(&mut self, links: &[IfIndex]) -> Result<usize> {
        let mut requests = Vec::with_capacity(links.len() * 2);
        for link in links {
            for minor in [TcHandle::MIN_INGRESS, TcHandle::MIN_EGRESS] {
                requests.push(Request {
                    message: RouteNetlinkMessage::DelTrafficFilter(filter(*link, minor)),
                    flags: 0,
                    action: Action::Delete,
                    object: format!("classic programs of link {link}"),
                    // No filter, no qdisc, no link.
                    already: &[Errno::ENOENT, Errno::EINVAL, Errno::ENODEV],
                });
            }
        }
        Ok(self.transact(requests)?.iter().filter(|a| a.wrote).count())
    }
}
