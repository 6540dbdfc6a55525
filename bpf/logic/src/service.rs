//! Services: which backend answers for an address. One function for sockets, workloads' packets and packets from outside.

use flowloom_bpf_abi::{
    Addr, AffinityKey, AffinityValue, BackendKey, BackendRecord, DropReason, MemberKey, RangeKey, ServiceKey,
    ServiceRecord, backend_flags, service_flags,
};

use crate::Step;
use crate::tables::Tables;

/// How often a frontend is read again because its list is gone: it has moved on to another one meanwhile.
const READS: u32 = 2;

/// Picks a backend of the list in `q.record`.
pub trait Selector: Copy {
    /// Its place, below `q.record.count`, which is not 0.
    fn pick<T: Tables>(self, t: T, q: &Query) -> u32;
}

/// Every backend is as likely as the others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Random;

impl Selector for Random {
    #[inline(always)]
    fn pick<T: Tables>(self, t: T, q: &Query) -> u32 {
        ((u64::from(t.random()) * u64::from(q.record.count)) >> 32) as u32
    }
}

/// A question to [`select`], and its answer.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(8))]
pub struct Query {
    /// What is asked for.
    pub key: ServiceKey,
    /// Who asks.
    pub client: Addr,
    /// Out: address of the backend.
    pub backend: Addr,
    /// Out: its port, big endian.
    pub port: [u8; 2],
    /// Out: [`backend_flags`] of it.
    pub flags: u16,
    /// Second.
    pub now: u32,
    /// Whether `client` is an address; if not, source ranges judge this node's.
    pub client_known: u32,
    /// Out: the record.
    pub record: ServiceRecord,
}

/// Chooses a backend for a new connection.
///
/// [`Step::GO`]: the address stands for no service. [`Step::DONE`]: the answer is in `q`. Any other says why there is none: a rejection is
/// to be answered, a plain drop is not.
#[inline(never)]
pub(crate) fn select<T: Tables>(t: T, q: &mut Query) -> Step {
    let mut reads = 0;
    while reads < READS {
        reads += 1;
        if !t.service(&q.key, &mut q.record) {
            return no_port(t, q);
        }
        if q.record.flags & service_flags::RANGES != 0 && !admitted(t, q) {
            return Step::drop(DropReason::ServiceSourceRange);
        }
        if q.record.count == 0 || q.record.list == 0 {
            return no_backend(q);
        }
        if q.record.affinity != 0 && remembered(t, q) {
            return Step::DONE;
        }
        if chosen(t, q) {
            if q.record.affinity != 0 {
                remember(t, q);
            }
            return Step::DONE;
        }
    }
    no_backend(q)
}

/// Whether `backend` may still be used for what `q` asks, as the service is now; the record is in `q` when there is one.
#[inline(never)]
pub(crate) fn still<T: Tables>(t: T, q: &mut Query, backend: &Addr, port: [u8; 2]) -> bool {
    if !t.service(&q.key, &mut q.record) || q.record.list == 0 {
        return false;
    }
    let member = MemberKey { list: q.record.list, addr: *backend, port, pad: [0; 2] };
    t.member(&member).is_some()
}

#[inline(always)]
fn no_backend(q: &Query) -> Step {
    if q.record.flags & service_flags::SILENT != 0 {
        Step::drop(DropReason::ServiceNoBackend)
    } else {
        Step::reject(DropReason::ServiceNoBackend)
    }
}

/// The address of a service is nothing else: what it does not serve is refused, never routed.
#[inline(always)]
pub(crate) fn no_port<T: Tables>(t: T, q: &mut Query) -> Step {
    let any = ServiceKey { port: [0; 2], protocol: 0, ..q.key };
    if t.service(&any, &mut q.record) { Step::reject(DropReason::ServiceNoPort) } else { Step::GO }
}

/// Whether source ranges let the client in. This host's programs come from its node's address; where that is not known, nothing is judged.
#[inline(never)]
fn admitted<T: Tables>(t: T, q: &Query) -> bool {
    let mut key = RangeKey { prefixlen: RangeKey::FULL_BITS, service: q.record.service, addr: q.client };
    if q.client_known == 0 {
        let Some(config) = t.config() else { return true };
        key.addr = if q.key.addr.is_v4() { config.node4 } else { config.node6 };
        if key.addr.is_zero() {
            return true;
        }
    }
    t.in_range(&key)
}

#[inline(never)]
fn chosen<T: Tables>(t: T, q: &mut Query) -> bool {
    let index = Random.pick(t, q);
    let mut backend = BackendRecord::default();
    if !t.backend(&BackendKey { list: q.record.list, index }, &mut backend) {
        return false;
    }
    q.backend = backend.addr;
    q.port = backend.port;
    q.flags = backend.flags;
    true
}

/// The backend that this client had last, while that is not too long ago and the list in force names it.
#[inline(never)]
fn remembered<T: Tables>(t: T, q: &mut Query) -> bool {
    let key = AffinityKey { service: q.record.service, pad: 0, client: q.client };
    let mut last = AffinityValue::default();
    // Refreshed by each new connection.
    if !t.affinity(&key, &mut last) || q.now.wrapping_sub(last.last_used) >= q.record.affinity {
        return false;
    }
    let member = MemberKey { list: q.record.list, addr: last.addr, port: last.port, pad: [0; 2] };
    let Some(flags) = t.member(&member) else { return false };
    q.backend = last.addr;
    q.port = last.port;
    q.flags = flags as u16 & backend_flags::LOCAL;
    if last.last_used != q.now {
        t.touch_affinity(&key, q.now);
    }
    true
}

#[inline(never)]
fn remember<T: Tables>(t: T, q: &Query) {
    let key = AffinityKey { service: q.record.service, pad: 0, client: q.client };
    t.learn_affinity(&key, &AffinityValue { addr: q.backend, port: q.port, pad: [0; 2], last_used: q.now });
}
