//! Tracked connections: listing, flushing, sweeping, quotas.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::OnceLock;

use flowloom_bpf_abi::{self as abi, ct_flags, map_name as name};
use flowloom_bpf_logic::{expired, timeout};
use flowloom_compiler::{EndpointId, Identity, PolicySlot, RuleId, VpcId};

use crate::error::{Context as _, Result};
use crate::kernel::Maps;
use crate::lower::some_address;
use crate::sys::{self, Insn};

/// Which connections; every field that is set must agree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CtFilter {
    /// VPC.
    pub vpc: Option<VpcId>,
    /// Either side's address.
    pub ip: Option<IpAddr>,
    /// Either side's port (echo: the identifier).
    pub port: Option<u16>,
    /// IP protocol number.
    pub protocol: Option<u8>,
    /// Either side's local endpoint.
    pub endpoint: Option<EndpointId>,
}

impl CtFilter {
    fn matches(&self, key: &abi::CtKey, entry: &abi::CtEntry) -> bool {
        let port = |p: u16| [key.lo_port, key.hi_port].contains(&p.to_be_bytes());
        self.vpc.is_none_or(|v| v.0 == key.vpc)
            && self.ip.is_none_or(|ip| [key.lo, key.hi].contains(&ip.into()))
            && self.port.is_none_or(port)
            && self.protocol.is_none_or(|p| p == key.protocol)
            && self.endpoint.is_none_or(|e| [entry.orig_endpoint, entry.reply_endpoint].contains(&e.0))
    }
}

/// One side of a connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Side {
    /// Address.
    pub ip: IpAddr,
    /// Port; echo: the identifier; 0 for protocols without ports.
    pub port: u16,
    /// Local endpoint.
    pub endpoint: Option<EndpointId>,
    /// Identity that the other side's policy judged.
    pub identity: Identity,
    /// Packets it sent.
    pub packets: u64,
    /// Bytes it sent.
    pub bytes: u64,
}

/// A tracked connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConntrackRow {
    /// VPC.
    pub vpc: VpcId,
    /// IP protocol number.
    pub protocol: u8,
    /// Who sent the first packet.
    pub origin: Side,
    /// Whom it was for.
    pub responder: Side,
    /// In the map that never evicts.
    pub established: bool,
    /// `flowloom_bpf_abi::ct_state`.
    pub state: u8,
    /// `flowloom_bpf_abi::ct_flags`.
    pub flags: u16,
    /// What the originator's egress policy said; `None` = never asked here.
    pub egress: Option<abi::CtDecision>,
    /// What the responder's ingress policy said.
    pub ingress: Option<abi::CtDecision>,
    /// Cached tunnel endpoint of the remote side.
    pub tunnel: Option<IpAddr>,
    /// Seconds since the first packet.
    pub age: u32,
    /// Seconds since the last packet.
    pub idle: u32,
    /// Seconds until it expires when no packet comes.
    pub expires_in: u32,
}

impl ConntrackRow {
    fn new(key: &abi::CtKey, entry: &abi::CtEntry, established: bool, now: u32) -> Self {
        let orig_is_lo = entry.flags & ct_flags::ORIG_IS_LO != 0;
        let ((orig, orig_port), (reply, reply_port)) = if orig_is_lo {
            ((key.lo, key.lo_port), (key.hi, key.hi_port))
        } else {
            ((key.hi, key.hi_port), (key.lo, key.lo_port))
        };
        let side = |ip: abi::Addr, port, endpoint, identity, n: usize| Side {
            ip: ip.into(),
            port: u16::from_be_bytes(port),
            endpoint: (endpoint != 0).then_some(EndpointId(endpoint)),
            identity: Identity(identity),
            packets: entry.packets[n],
            bytes: entry.bytes[n],
        };
        let decision = |d: abi::CtDecision| (d.revision != 0).then_some(d);
        let idle = seconds_since(entry.last_seen, now);
        Self {
            vpc: VpcId(key.vpc),
            protocol: key.protocol,
            origin: side(orig, orig_port, entry.orig_endpoint, entry.orig_identity, 0),
            responder: side(reply, reply_port, entry.reply_endpoint, entry.reply_identity, 1),
            established,
            state: entry.state,
            flags: entry.flags,
            egress: decision(entry.decision[usize::from(abi::direction::EGRESS)]),
            ingress: decision(entry.decision[usize::from(abi::direction::INGRESS)]),
            tunnel: some_address(entry.tunnel),
            age: seconds_since(entry.created, now),
            idle,
            expires_in: timeout(key.protocol, entry.state).saturating_sub(idle),
        }
    }
}

/// The clock is the programs': a packet may have come after `now` was read.
fn seconds_since(then: u32, now: u32) -> u32 {
    let d = now.wrapping_sub(then);
    if d > u32::MAX / 2 { 0 } else { d }
}

/// Seconds of `CLOCK_MONOTONIC`, the clock of conntrack entries.
///
/// # Errors
/// When the clock cannot be read.
pub fn now_seconds() -> Result<u32> {
    Ok(sys::monotonic().kernel("reading the monotonic clock")?.as_secs() as u32)
}

/// What a sweep did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SweepReport {
    /// Entries looked at.
    pub examined: u64,
    /// Entries removed.
    pub removed: u64,
    /// Established entries left.
    pub established: u64,
    /// Seconds until the next entry can expire; `None` = none left.
    pub next: Option<u32>,
    /// Clock second ([`now_seconds`]) at which the oldest connection left began; `None` = none left.
    ///
    /// What retired before it is named by no connection any more (`Numbers::release_before`).
    pub oldest: Option<u32>,
}

/// Numbers that live connections name: none of them may come to mean something else.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Named {
    /// Local endpoints.
    pub endpoints: BTreeSet<EndpointId>,
    /// Identities that were judged.
    pub identities: BTreeSet<Identity>,
    /// Policies that decided.
    pub slots: BTreeSet<PolicySlot>,
    /// Rules that decided.
    pub rules: BTreeSet<RuleId>,
}

impl Named {
    fn add(&mut self, entry: &abi::CtEntry) {
        let ids = [entry.orig_endpoint, entry.reply_endpoint];
        self.endpoints.extend(ids.into_iter().filter(|id| *id != 0).map(EndpointId));
        self.identities.extend([entry.orig_identity, entry.reply_identity].map(Identity));
        for decision in entry.decision.iter().filter(|d| d.revision != 0) {
            self.slots.insert(PolicySlot(decision.slot));
            self.rules.insert(RuleId(decision.rule));
        }
    }
}

/// Connections taken away, by what they counted against.
type Given = BTreeMap<(u32, u32), u32>;

fn give(given: &mut Given, key: &abi::CtKey, entry: &abi::CtEntry) {
    if entry.flags & ct_flags::COUNTED == 0 {
        return;
    }
    *given.entry((key.vpc, 0)).or_default() += 1;
    for endpoint in [entry.orig_endpoint, entry.reply_endpoint] {
        if endpoint != 0 {
            *given.entry((key.vpc, endpoint)).or_default() += 1;
        }
    }
}

/// Connection tables and quotas of an open datapath.
#[derive(Debug)]
pub(crate) struct Conntrack<'a> {
    pub(crate) maps: &'a Maps,
    pub(crate) quota: &'a OnceLock<QuotaProgram>,
}

impl Conntrack<'_> {
    /// Loaded when it is first needed: a restart that finds every quota right loads nothing.
    fn quota_program(&self) -> Result<&QuotaProgram> {
        if let Some(loaded) = self.quota.get() {
            return Ok(loaded);
        }
        let fresh = QuotaProgram::load(&self.maps.quotas)?;
        Ok(self.quota.get_or_init(|| fresh))
    }

    fn tables(&self) -> [(&'static str, &sys::Map<abi::CtKey, abi::CtEntry>, bool); 2] {
        [
            (name::CONNTRACK_NEW, &self.maps.conntrack_new, false),
            (name::CONNTRACK, &self.maps.conntrack, true),
        ]
    }

    pub(crate) fn list(&self, filter: &CtFilter, limit: usize) -> Result<Vec<ConntrackRow>> {
        let now = now_seconds()?;
        let mut rows = Vec::new();
        for (name, map, established) in self.tables() {
            map.for_each(|k, e| {
                let live = e.flags & ct_flags::MOVED == 0 && !expired(k.protocol, e.state, e.last_seen, now);
                if rows.len() < limit && live && filter.matches(k, e) {
                    rows.push(ConntrackRow::new(k, e, established, now));
                }
            })
            .in_map("reading", name)?;
        }
        Ok(rows)
    }

    pub(crate) fn flush(&self, filter: &CtFilter) -> Result<u64> {
        self.flush_if(|k, e| filter.matches(k, e))
    }

    /// Removes the connections that a predicate names and gives their quotas back.
    pub(crate) fn flush_if(&self, hit: impl Fn(&abi::CtKey, &abi::CtEntry) -> bool) -> Result<u64> {
        let mut given = Given::new();
        let mut removed = 0;
        for (name, map, _) in self.tables() {
            let batch = |keys: &[abi::CtKey], entries: &[abi::CtEntry]| {
                let hit: Vec<_> = keys.iter().zip(entries).filter(|(k, e)| hit(k, e)).collect();
                let keys: Vec<_> = hit.iter().map(|(k, _)| **k).collect();
                for ((key, entry), gone) in hit.iter().zip(map.remove_batch(&keys)?) {
                    if gone {
                        give(&mut given, key, entry);
                        removed += u64::from(entry.flags & ct_flags::MOVED == 0);
                    }
                }
                Ok(())
            };
            map.for_each_batch(batch).in_map("flushing", name)?;
        }
        self.give_back(&given)?;
        Ok(removed)
    }

    pub(crate) fn sweep(&self, now: u32) -> Result<SweepReport> {
        let mut report = SweepReport::default();
        let mut given = Given::new();
        for (name, map, established) in self.tables() {
            let batch = |keys: &[abi::CtKey], entries: &[abi::CtEntry]| {
                for (key, entry) in keys.iter().zip(entries) {
                    report.examined += 1;
                    // Read again: a packet may have come since the batch was copied.
                    let dead = |e: &abi::CtEntry| expired(key.protocol, e.state, e.last_seen, now);
                    if dead(entry) && map.get(key)?.is_some_and(|e| dead(&e)) && map.remove(key)? {
                        give(&mut given, key, entry);
                        report.removed += u64::from(entry.flags & ct_flags::MOVED == 0);
                        continue;
                    }
                    report.established += u64::from(established);
                    let left = timeout(key.protocol, entry.state)
                        .saturating_sub(seconds_since(entry.last_seen, now));
                    // An entry expires one second after its timeout.
                    report.next = Some(report.next.map_or(left + 1, |n| n.min(left + 1)));
                    report.oldest = Some(report.oldest.map_or(entry.created, |o| o.min(entry.created)));
                }
                Ok(())
            };
            map.for_each_batch(batch).in_map("sweeping", name)?;
        }
        self.give_back(&given)?;
        Ok(report)
    }

    pub(crate) fn named(&self) -> Result<Named> {
        let mut named = Named::default();
        for (name, map, _) in self.tables() {
            map.for_each(|_, e| named.add(e)).in_map("reading", name)?;
        }
        Ok(named)
    }

    fn give_back(&self, given: &Given) -> Result<()> {
        for ((vpc, endpoint), n) in given {
            self.quota_program()?.give(&abi::QuotaKey { vpc: *vpc, endpoint: *endpoint }, *n)?;
        }
        Ok(())
    }

    pub(crate) fn quota(&self, vpc: VpcId, endpoint: Option<EndpointId>) -> Result<Option<abi::QuotaValue>> {
        self.maps.quotas.get(&quota_key(vpc, endpoint)).in_map("reading", name::QUOTAS)
    }

    /// Returns whether anything was written.
    pub(crate) fn set_quota(&self, vpc: VpcId, endpoint: Option<EndpointId>, limit: u32) -> Result<bool> {
        let key = quota_key(vpc, endpoint);
        match self.maps.quotas.get(&key).in_map("reading", name::QUOTAS)? {
            Some(q) if q.limit == limit => return Ok(false),
            Some(_) => {}
            None => {
                // Connections from before the record are counted in, as their end will be counted out.
                let filter = CtFilter { vpc: Some(vpc), endpoint, ..CtFilter::default() };
                let mut used = 0;
                let count = |k: &abi::CtKey, e: &abi::CtEntry| {
                    used += u32::from(e.flags & ct_flags::COUNTED != 0 && filter.matches(k, e));
                };
                self.maps.conntrack.for_each(count).in_map("reading", name::CONNTRACK)?;
                let value = abi::QuotaValue { used, limit };
                if self.maps.quotas.insert_new(&key, &value).in_map("writing", name::QUOTAS)? {
                    return Ok(true);
                }
            }
        }
        self.quota_program()?.set_limit(&key, limit)?;
        Ok(true)
    }

    /// As [`Self::set_quota`] for an endpoint whose number no connection names. Returns whether anything was written.
    pub(crate) fn start_quota(&self, vpc: VpcId, endpoint: EndpointId, limit: u32) -> Result<bool> {
        let value = abi::QuotaValue { used: 0, limit };
        let key = quota_key(vpc, Some(endpoint));
        if self.maps.quotas.insert_new(&key, &value).in_map("writing", name::QUOTAS)? {
            return Ok(true);
        }
        self.set_quota(vpc, Some(endpoint), limit)
    }

    pub(crate) fn remove_quota(&self, vpc: VpcId, endpoint: Option<EndpointId>) -> Result<bool> {
        self.maps.quotas.remove(&quota_key(vpc, endpoint)).in_map("removing from", name::QUOTAS)
    }
}

fn quota_key(vpc: VpcId, endpoint: Option<EndpointId>) -> abi::QuotaKey {
    abi::QuotaKey { vpc: vpc.0, endpoint: endpoint.map_or(0, |e| e.0) }
}

/// Changes quota records where the programs count: an update from user space would overwrite what they counted meanwhile.
#[derive(Debug)]
pub(crate) struct QuotaProgram(OwnedFd);

/// Words of the program's context: key (2), connections to give back, whether to set the limit, limit, padding.
const QUOTA_CONTEXT: usize = 6;

impl QuotaProgram {
    pub(crate) fn load(quotas: &sys::Map<abi::QuotaKey, abi::QuotaValue>) -> Result<Self> {
        let fd = quotas.as_fd().as_raw_fd();
        sys::prog_load("fl_quota", &quota_program(fd)).map(Self).kernel("loading the quota helper")
    }

    fn give(&self, key: &abi::QuotaKey, n: u32) -> Result<()> {
        self.run([key.vpc, key.endpoint, n, 0, 0, 0])
    }

    fn set_limit(&self, key: &abi::QuotaKey, limit: u32) -> Result<()> {
        self.run([key.vpc, key.endpoint, 0, 1, limit, 0])
    }

    fn run(&self, mut context: [u32; QUOTA_CONTEXT]) -> Result<()> {
        sys::test_run_syscall(self.0.as_fd(), &mut context).kernel("changing a quota").map(drop)
    }
}

/// `used -= min(used, context[2])`, atomically; `limit = context[4]` when `context[3]` is set. A missing record has nothing to change.
fn quota_program(map: i32) -> [Insn; 24] {
    let i = |code, dst: u8, src: u8, off, imm| Insn { code, regs: src << 4 | dst, off, imm };
    [
        i(0xbf, 6, 1, 0, 0),   //  0: r6 = context
        i(0x61, 2, 6, 0, 0),   //  1: r2 = context[0]
        i(0x63, 10, 2, -8, 0), //  2: key.vpc = r2
        i(0x61, 2, 6, 4, 0),   //  3: r2 = context[1]
        i(0x63, 10, 2, -4, 0), //  4: key.endpoint = r2
        i(0x18, 1, 1, 0, map), //  5: r1 = map
        i(0x00, 0, 0, 0, 0),   //  6:   (second half)
        i(0xbf, 2, 10, 0, 0),  //  7: r2 = frame
        i(0x07, 2, 0, 0, -8),  //  8: r2 = &key
        i(0x85, 0, 0, 0, 1),   //  9: r0 = bpf_map_lookup_elem(r1, r2)
        i(0x15, 0, 0, 11, 0),  // 10: none: goto 22
        i(0x61, 1, 6, 8, 0),   // 11: r1 = context[2]
        i(0x15, 1, 0, 5, 0),   // 12: nothing to give: goto 18
        i(0x61, 2, 0, 0, 0),   // 13: r2 = used
        i(0x3d, 2, 1, 1, 0),   // 14: r2 >= r1: goto 16
        i(0xbf, 1, 2, 0, 0),   // 15: r1 = r2
        i(0x87, 1, 0, 0, 0),   // 16: r1 = -r1
        i(0xc3, 0, 1, 0, 0),   // 17: lock used += r1
        i(0x61, 2, 6, 12, 0),  // 18: r2 = context[3]
        i(0x15, 2, 0, 2, 0),   // 19: no limit given: goto 22
        i(0x61, 3, 6, 16, 0),  // 20: r3 = context[4]
        i(0x63, 0, 3, 4, 0),   // 21: limit = r3
        i(0xb7, 0, 0, 0, 0),   // 22: r0 = 0
        i(0x95, 0, 0, 0, 0),   // 23: exit
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(flags: u16) -> abi::CtEntry {
        abi::CtEntry {
            packets: [3, 2],
            bytes: [300, 200],
            orig_endpoint: 7,
            reply_endpoint: 0,
            orig_identity: 300,
            reply_identity: 400,
            last_seen: 90,
            created: 40,
            state: abi::ct_state::ESTABLISHED,
            flags,
            ..abi::CtEntry::default()
        }
    }

    fn key() -> abi::CtKey {
        abi::CtKey {
            vpc: 5,
            lo: abi::Addr::v4([10, 0, 0, 1]),
            hi: abi::Addr::v4([10, 0, 0, 2]),
            lo_port: 40000u16.to_be_bytes(),
            hi_port: 80u16.to_be_bytes(),
            protocol: 17,
            pad: [0; 3],
        }
    }

    #[test]
    fn sides_follow_the_originator_not_the_order_of_the_key() {
        let row = ConntrackRow::new(&key(), &entry(ct_flags::ORIG_IS_LO), true, 100);
        assert_eq!((row.origin.port, row.responder.port), (40000, 80));
        let row = ConntrackRow::new(&key(), &entry(0), true, 100);
        assert_eq!((row.origin.port, row.responder.port), (80, 40000));
        assert_eq!(
            (row.origin.packets, row.origin.endpoint, row.origin.identity),
            (3, Some(EndpointId(7)), Identity(300))
        );
        assert_eq!((row.age, row.idle, row.expires_in), (60, 10, abi::ct_timeout::UDP_STREAM - 10));
        assert_eq!((row.egress, row.ingress), (None, None));
    }

    #[test]
    fn a_packet_after_the_clock_was_read_is_not_four_billion_seconds_old() {
        let row = ConntrackRow::new(&key(), &entry(0), true, 89);
        assert_eq!((row.idle, row.expires_in), (0, abi::ct_timeout::UDP_STREAM));
    }

    #[test]
    fn each_filter_field_decides_alone() {
        let (k, e) = (key(), entry(0));
        let hit = |f: CtFilter| f.matches(&k, &e);
        let none = CtFilter::default();
        assert!(hit(none));
        assert!(
            hit(CtFilter { vpc: Some(VpcId(5)), ..none }) && !hit(CtFilter { vpc: Some(VpcId(6)), ..none })
        );
        let ip = |s: &str| CtFilter { ip: Some(s.parse().unwrap()), ..none };
        assert!(hit(ip("10.0.0.1")) && hit(ip("10.0.0.2")) && !hit(ip("10.0.0.3")));
        let port = |p| CtFilter { port: Some(p), ..none };
        assert!(hit(port(80)) && hit(port(40000)) && !hit(port(20480)));
        let protocol = |p| CtFilter { protocol: Some(p), ..none };
        assert!(hit(protocol(17)) && !hit(protocol(6)));
        let endpoint = |e| CtFilter { endpoint: Some(EndpointId(e)), ..none };
        assert!(hit(endpoint(7)) && !hit(endpoint(8)));
        assert!(!hit(CtFilter { port: Some(80), protocol: Some(6), ..none }));
    }

    #[test]
    fn connections_name_what_they_were_decided_with() {
        let decision = abi::CtDecision { revision: 3, slot: 5, rule: 0, ..abi::CtDecision::default() };
        let undecided = abi::CtDecision { slot: 9, rule: 9, ..abi::CtDecision::default() };
        let mut named = Named::default();
        named.add(&abi::CtEntry { decision: [decision, undecided], ..entry(0) });
        let want = Named {
            endpoints: [EndpointId(7)].into(),
            identities: [Identity(300), Identity(400)].into(),
            slots: [PolicySlot(5)].into(),
            rules: [RuleId(0)].into(),
        };
        assert_eq!(named, want);
    }

    #[test]
    fn only_counted_connections_are_given_back_once_per_side() {
        let mut given = Given::new();
        give(&mut given, &key(), &entry(0));
        assert!(given.is_empty());
        give(&mut given, &key(), &entry(ct_flags::COUNTED));
        let both = abi::CtEntry { reply_endpoint: 9, ..entry(ct_flags::COUNTED) };
        give(&mut given, &key(), &both);
        assert_eq!(given, Given::from([((5, 0), 2), ((5, 7), 2), ((5, 9), 1)]));
    }
}
