//! Services for sockets: an address is translated once, when the socket is connected or a datagram is addressed.

use flowloom_bpf_abi::{
    Addr, ServiceKey, SocketKey, SocketValue, ct_timeout, endpoint_flags, service_scope, socket_kind,
};

use crate::Step;
use crate::service::{self, Query};
use crate::tables::Tables;

/// The address that a system call names.
pub trait Socket: Copy {
    /// Cookie of the network namespace.
    fn netns(self) -> u64;
    /// Cookie of the socket.
    fn cookie(self) -> u64;
    /// IP protocol number.
    fn protocol(self) -> u8;
    /// Address; IPv4 in mapped form, whatever the socket's own family.
    fn addr(self) -> Addr;
    /// Port, big endian.
    fn port(self) -> [u8; 2];
    /// Puts another one in its place.
    fn set(self, addr: &Addr, port: [u8; 2]);
    /// Makes the system call fail with "connection refused".
    fn refuse(self);
}

/// What a program of a socket tells the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
#[must_use]
pub struct Answer(pub i32);

impl Answer {
    /// The system call goes on.
    pub const GO: Self = Self(1);
    /// It fails.
    pub const FAIL: Self = Self(0);
}

/// `connect`: the socket gets a backend for good.
#[inline(always)]
pub fn connect<S: Socket, T: Tables>(s: S, t: T) -> Answer {
    let mut q = Query::default();
    if !asks(s, t, &mut q) {
        return Answer::GO;
    }
    let step = service::select(t, &mut q);
    if step == Step::GO {
        return Answer::GO;
    }
    if step != Step::DONE {
        s.refuse();
        return Answer::FAIL;
    }
    answered(s, t, &q);
    Answer::GO
}

/// `sendmsg` with an address: the datagrams of a socket to a service stay with one backend while they come often enough and it is there.
#[inline(always)]
pub fn sendmsg<S: Socket, T: Tables>(s: S, t: T) -> Answer {
    let mut q = Query::default();
    if !asks(s, t, &mut q) {
        return Answer::GO;
    }
    if stays(s, t, &mut q) {
        s.set(&q.backend, q.port);
        return Answer::GO;
    }
    let step = service::select(t, &mut q);
    if step == Step::GO {
        return Answer::GO;
    }
    if step != Step::DONE {
        s.refuse();
        return Answer::FAIL;
    }
    let forward = SocketKey {
        cookie: s.cookie(),
        addr: q.key.addr,
        port: q.key.port,
        protocol: q.key.protocol,
        kind: socket_kind::FORWARD,
        pad: 0,
    };
    t.learn_socket(
        &forward,
        &SocketValue {
            addr: q.backend,
            port: q.port,
            pad: [0; 2],
            service: q.record.service,
            last_used: q.now,
            pad2: 0,
        },
    );
    answered(s, t, &q);
    Answer::GO
}

/// `recvmsg` and `getpeername`: what came from a backend came from the service that was asked for.
#[inline(always)]
pub fn shown<S: Socket, T: Tables>(s: S, t: T) -> Answer {
    let key = SocketKey {
        cookie: s.cookie(),
        addr: s.addr(),
        port: s.port(),
        protocol: s.protocol(),
        kind: socket_kind::REVERSE,
        pad: 0,
    };
    let mut value = SocketValue::default();
    if t.socket(&key, &mut value) {
        s.set(&value.addr, value.port);
    }
    Answer::GO
}

/// Who asks for what; false for sockets that are not ours.
#[inline(never)]
fn asks<S: Socket, T: Tables>(s: S, t: T, q: &mut Query) -> bool {
    let Some(netns) = t.netns(s.netns()) else { return false };
    q.key = ServiceKey {
        vpc: 0,
        addr: s.addr(),
        port: s.port(),
        protocol: s.protocol(),
        scope: service_scope::INSIDE,
    };
    if q.key.port == [0; 2] {
        return false;
    }
    q.now = (t.now_ns() / 1_000_000_000) as u32;
    if netns.endpoint == 0 {
        let Some(config) = t.config() else { return false };
        q.key.vpc = config.default_vpc;
    } else {
        let Some(ep) = t.endpoint(netns.endpoint) else { return false };
        if ep.flags & endpoint_flags::VALID == 0 {
            return false;
        }
        q.key.vpc = ep.vpc;
        q.client = if q.key.addr.is_v4() { ep.ip4 } else { ep.ip6 };
        q.client_known = u32::from(!q.client.is_zero());
    }
    if q.client_known == 0 {
        // Whoever has no address here is told apart by its namespace.
        q.client = Addr(u128::from(s.netns()).to_be_bytes());
    }
    q.key.vpc != 0
}

/// The backend of this socket's datagrams to the service.
#[inline(never)]
fn stays<S: Socket, T: Tables>(s: S, t: T, q: &mut Query) -> bool {
    let key = SocketKey {
        cookie: s.cookie(),
        addr: q.key.addr,
        port: q.key.port,
        protocol: q.key.protocol,
        kind: socket_kind::FORWARD,
        pad: 0,
    };
    let mut value = SocketValue::default();
    if !t.socket(&key, &mut value)
        || q.now.wrapping_sub(value.last_used) > ct_timeout::UDP_STREAM
        || !service::still(t, q, &value.addr, value.port)
    {
        return false;
    }
    // Its answers must still be known by the address that it asked for.
    if value.last_used != q.now {
        t.touch_socket(&key, q.now);
        q.backend = value.addr;
        q.port = value.port;
        reverse(s, t, q);
    }
    q.backend = value.addr;
    q.port = value.port;
    true
}

#[inline(never)]
fn answered<S: Socket, T: Tables>(s: S, t: T, q: &Query) {
    reverse(s, t, q);
    s.set(&q.backend, q.port);
}

/// Notes what the backend stands for.
#[inline(never)]
fn reverse<S: Socket, T: Tables>(s: S, t: T, q: &Query) {
    let key = SocketKey {
        cookie: s.cookie(),
        addr: q.backend,
        port: q.port,
        protocol: q.key.protocol,
        kind: socket_kind::REVERSE,
        pad: 0,
    };
    t.learn_socket(
        &key,
        &SocketValue {
            addr: q.key.addr,
            port: q.key.port,
            pad: [0; 2],
            service: q.record.service,
            last_used: q.now,
            pad2: 0,
        },
    );
}
