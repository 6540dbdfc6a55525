//! TCP connections to a Service: one after the other as fast as they go, and until one is answered (or none is).

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::side::Side;
use crate::traffic::{Outcome, pin, reset_on_close, thread_cpu};

/// How long one attempt may take where nothing answers yet. An answer on one node takes a tenth of it.
const ATTEMPT: Duration = Duration::from_millis(5);
/// Between two attempts that are refused at once.
const PAUSE: Duration = Duration::from_micros(500);
/// A busy machine may miss an attempt, not as many as fit here.
const SILENCE: Duration = Duration::from_millis(500);
/// How long a connection may take that is made under load.
const CONNECT: Duration = Duration::from_secs(5);

/// Every backend of a node, on one thread (of the second processor) that answers one connection after the other.
pub(super) struct Backends {
    stop: Arc<AtomicBool>,
    /// CPU nanoseconds when the last connection was closed.
    cpu: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Backends {
    pub(super) fn start(listeners: Vec<TcpListener>) -> Result<Self> {
        for listener in &listeners {
            listener.set_nonblocking(true)?;
        }
        let (stop, cpu) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, spent) = (Arc::clone(&stop), Arc::clone(&cpu));
        let thread = std::thread::Builder::new().name("backends".into()).spawn(move || {
            pin(1);
            while !stopped.load(Ordering::Relaxed) {
                if let Err(e) = round(&listeners, &spent) {
                    eprintln!("backends: {e}");
                    return;
                }
            }
        })?;
        Ok(Self { stop, cpu, thread: Some(thread) })
    }
}

impl Drop for Backends {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Waits for connections and serves one of each listener.
fn round(listeners: &[TcpListener], spent: &AtomicU64) -> std::io::Result<()> {
    let mut list: Vec<PollFd<'_>> =
        listeners.iter().map(|l| PollFd::new(l.as_fd(), PollFlags::POLLIN)).collect();
    // The bound is how late an end is noticed.
    match poll(&mut list, PollTimeout::from(100u8)) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(e) => return Err(e.into()),
    }
    let ready: Vec<bool> = list.iter().map(|fd| fd.any().unwrap_or(false)).collect();
    for (listener, _) in listeners.iter().zip(ready).filter(|(_, ready)| *ready) {
        // Who only looked whether anybody answers may be gone again: nothing here is an error.
        if let Ok((mut stream, _)) = listener.accept() {
            let mut byte = [0u8; 1];
            if stream.set_nonblocking(false).is_ok()
                && stream.set_read_timeout(Some(CONNECT)).is_ok()
                && stream.read(&mut byte).is_ok_and(|n| n == 1)
                && stream.write_all(&byte).is_ok()
            {
                // The client reads the end, closes first and keeps the port out of our TIME_WAIT.
                let _ = stream.read(&mut byte);
            }
        }
    }
    spent.store(thread_cpu(), Ordering::Relaxed);
    Ok(())
}

/// Connect (to one after the other), one byte each way, close, for `time`; how often, CPU nanoseconds of this thread, time taken.
fn ask(to: &[SocketAddr], time: Duration) -> Result<(u64, u64, Duration)> {
    let (cpu, begin) = (thread_cpu(), Instant::now());
    let mut operations = 0;
    for to in to.iter().cycle().take_while(|_| begin.elapsed() < time) {
        let mut byte = [b'x'];
        let mut stream = TcpStream::connect_timeout(to, CONNECT).context("connect")?;
        // A reset at the end frees the port at once: no run is limited by ports in TIME_WAIT.
        reset_on_close(&stream);
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        operations += 1;
    }
    Ok((operations, thread_cpu() - cpu, begin.elapsed()))
}

/// Connections from the client of a node to `to`.
pub(super) fn run(side: &Side, to: &[SocketAddr], time: Duration) -> Result<Outcome> {
    let before = side.backends.cpu.load(Ordering::Relaxed);
    let (operations, asked, taken) = side.inside(|| {
        pin(0);
        ask(to, time)
    })?;
    let served = side.backends.cpu.load(Ordering::Relaxed) - before;
    let n = operations.max(1) as f64;
    Ok(Outcome { rate: n / taken.as_secs_f64(), cpu_ns: (asked + served) as f64 / n })
}

/// Whether somebody answers within [`ATTEMPT`].
fn answers(to: SocketAddr) -> bool {
    TcpStream::connect_timeout(&to, ATTEMPT).inspect(reset_on_close).is_ok()
}

/// Returns when all of them have answered; called as the client.
pub(super) fn until_all_answer(all: &[SocketAddr], patience: Duration) -> Result<()> {
    let begin = Instant::now();
    for to in all {
        while !answers(*to) {
            if begin.elapsed() > patience {
                bail!("{to} did not answer within {patience:?}");
            }
            // A refusal comes at once: asking without a pause would take the processor from who is measured.
            std::thread::park_timeout(PAUSE);
        }
    }
    Ok(())
}

/// Where a connection to `to` really leads: `getpeername` would tell what was asked for. Called as the client.
pub(super) fn destination(to: SocketAddr) -> Result<SocketAddr> {
    let stream = TcpStream::connect_timeout(&to, CONNECT).context("connect")?;
    let inode = nix::sys::stat::fstat(&stream)?.st_ino;
    let table = std::fs::read_to_string("/proc/thread-self/net/tcp")?;
    remote(&table, inode).with_context(|| format!("the kernel's table has no socket {inode}"))
}

/// The remote end of a socket, in `/proc/net/tcp`.
fn remote(table: &str, inode: u64) -> Option<SocketAddr> {
    let wanted = inode.to_string();
    let mut lines = table.lines().map(|l| l.split_whitespace().collect::<Vec<_>>());
    let fields = lines.find(|f| f.get(9) == Some(&wanted.as_str()))?;
    let (ip, port) = fields.get(2)?.split_once(':')?;
    // The address as the kernel has it in memory.
    let ip = u32::from_str_radix(ip, 16).ok()?.to_ne_bytes();
    Some((ip, u16::from_str_radix(port, 16).ok()?).into())
}

/// When the first attempt began after which none was answered for [`SILENCE`]; called as the client.
pub(super) fn until_silent(to: SocketAddr, patience: Duration) -> Result<Instant> {
    let begin = Instant::now();
    let mut silent: Option<Instant> = None;
    loop {
        let attempt = Instant::now();
        if answers(to) {
            silent = None;
        } else {
            let since = *silent.get_or_insert(attempt);
            if since.elapsed() > SILENCE {
                return Ok(since);
            }
        }
        if begin.elapsed() > patience {
            bail!("{to} still answers after {patience:?}");
        }
        std::thread::park_timeout(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddrV4;
    use std::os::fd::AsRawFd as _;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, socket};

    use super::*;

    #[test]
    fn the_remote_end_is_read_from_the_kernels_table() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        assert_eq!(destination(to).unwrap(), to);
        assert_eq!(remote("", 1), None);
    }

    #[test]
    fn connections_of_every_listener_are_counted() {
        let listeners: Vec<_> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let all: Vec<_> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
        let backends = Backends::start(listeners).unwrap();
        until_all_answer(&all, CONNECT).unwrap();
        for to in &all {
            let (operations, cpu, taken) = ask(&[*to], Duration::from_millis(50)).unwrap();
            assert!(operations > 0 && cpu > 0 && taken >= Duration::from_millis(50));
        }
        assert!(backends.cpu.load(Ordering::Relaxed) > 0);
    }

    #[test]
    fn silence_is_noticed_and_waiting_for_an_answer_ends() {
        // Bound and not listening: nobody else gets the port.
        let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(socket.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
        let to: SocketAddr =
            SocketAddrV4::from(getsockname::<SockaddrIn>(socket.as_raw_fd()).unwrap()).into();
        let begin = Instant::now();
        assert!(until_silent(to, CONNECT).unwrap() >= begin);
        let e = until_all_answer(&[to], Duration::from_millis(5)).unwrap_err();
        assert!(e.to_string().contains("did not answer"), "{e}");
    }
}
