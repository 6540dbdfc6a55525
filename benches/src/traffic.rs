//! TCP load between two namespaces, both ends pinned, with the CPU time that both ends took.
//!
//! This kernel accounts softirq work to the thread it interrupts (no `IRQ_TIME_ACCOUNTING`), so the CPU time of both threads holds the network's work too.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use flowloom_netlink::Netns;

/// What to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// As many bytes as go.
    Stream,
    /// One byte each way, again and again on one connection.
    RequestResponse,
    /// Connect, one byte each way, close.
    ConnectRequestClose,
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Operations (stream: KiB received) per second.
    pub rate: f64,
    /// CPU nanoseconds per operation, both ends.
    pub cpu_ns: f64,
}

/// What came of many runs, by contender.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Turns {
    /// See [`Outcome::rate`].
    pub rates: Vec<Vec<f64>>,
    /// See [`Outcome::cpu_ns`].
    pub costs: Vec<Vec<f64>>,
}

/// Contenders take turns for so many rounds.
///
/// # Errors
/// The first of `run`, which is asked for one contender by its number.
pub fn take_turns(
    contenders: usize,
    rounds: usize,
    mut run: impl FnMut(usize) -> Result<Outcome>,
) -> Result<Turns> {
    let mut turns = Turns { rates: vec![Vec::new(); contenders], costs: vec![Vec::new(); contenders] };
    for round in 0..=rounds {
        // Every other round the other way round: who comes first finds what the last one left behind.
        let mut order: Vec<usize> = (0..contenders).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for i in order {
            let outcome = run(i)?;
            // The first round warms caches and neighbour entries.
            if round > 0 {
                turns.rates[i].push(outcome.rate);
                turns.costs[i].push(outcome.cpu_ns);
            }
        }
    }
    Ok(turns)
}

/// Runs `load` from `client` to `address` in `server` for `time`.
///
/// # Errors
/// When a namespace cannot be entered or the connection fails.
pub fn run(
    load: Load,
    server: &Netns,
    client: &Netns,
    address: SocketAddr,
    time: Duration,
) -> Result<Outcome> {
    let stop = Arc::new(AtomicBool::new(false));
    let operations = Arc::new(AtomicU64::new(0));
    let listener = server.run_in(move || TcpListener::bind(address))?.context("bind")?;
    let address = listener.local_addr()?;
    std::thread::scope(|scope| {
        let counted = Arc::clone(&operations);
        let stopped = Arc::clone(&stop);
        let serving = scope.spawn(move || -> Result<u64> {
            pin(1);
            let start = thread_cpu();
            serve(load, &listener, &stopped, &counted)?;
            Ok(thread_cpu() - start)
        });
        let stopped = Arc::clone(&stop);
        let counted = Arc::clone(&operations);
        let asking = scope.spawn(move || -> Result<(u64, Duration)> {
            client.run_in(move || -> Result<(u64, Duration)> {
                pin(0);
                let (cpu, begin) = (thread_cpu(), Instant::now());
                ask(load, address, begin + time, &counted)?;
                let taken = begin.elapsed();
                stopped.store(true, Ordering::Relaxed);
                Ok((thread_cpu() - cpu, taken))
            })?
        });
        let asked = asking.join().map_err(|_| anyhow::anyhow!("the client panicked"))?;
        stop.store(true, Ordering::Relaxed);
        if asked.is_err() {
            // Wakes an accept that would wait for ever.
            let _ = client
                .run_in(move || TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_ok());
        }
        let served = serving.join().map_err(|_| anyhow::anyhow!("the server panicked"))?;
        let ((client_cpu, taken), server_cpu) = (asked?, served?);
        let n = operations.load(Ordering::Relaxed).max(1) as f64;
        Ok(Outcome { rate: n / taken.as_secs_f64(), cpu_ns: (client_cpu + server_cpu) as f64 / n })
    })
}

fn serve(load: Load, listener: &TcpListener, stop: &AtomicBool, operations: &AtomicU64) -> Result<()> {
    let mut buffer = vec![0u8; 256 * 1024];
    loop {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        match load {
            Load::Stream => loop {
                let n = stream.read(&mut buffer)?;
                if n == 0 {
                    return Ok(());
                }
                operations.fetch_add(n as u64 / 1024, Ordering::Relaxed);
            },
            Load::RequestResponse => {
                let mut byte = [0u8; 1];
                while stream.read(&mut byte)? == 1 {
                    stream.write_all(&byte)?;
                }
                return Ok(());
            }
            Load::ConnectRequestClose => {
                let mut byte = [0u8; 1];
                if stream.read(&mut byte)? == 1 {
                    stream.write_all(&byte)?;
                }
                // The client reads the end, closes first and keeps the port out of our TIME_WAIT.
                let _ = stream.read(&mut byte);
                if stop.load(Ordering::Relaxed) || byte == [b'q'] {
                    return Ok(());
                }
            }
        }
    }
}

fn ask(load: Load, address: SocketAddr, end: Instant, operations: &AtomicU64) -> Result<()> {
    let mut byte = [b'x'; 1];
    match load {
        Load::Stream => {
            let buffer = vec![0u8; 128 * 1024];
            let mut stream =
                TcpStream::connect_timeout(&address, Duration::from_secs(5)).context("connect")?;
            while Instant::now() < end {
                stream.write_all(&buffer)?;
            }
        }
        Load::RequestResponse => {
            let mut stream =
                TcpStream::connect_timeout(&address, Duration::from_secs(5)).context("connect")?;
            stream.set_nodelay(true)?;
            while Instant::now() < end {
                for _ in 0..64 {
                    stream.write_all(&byte)?;
                    stream.read_exact(&mut byte)?;
                }
                operations.fetch_add(64, Ordering::Relaxed);
            }
        }
        Load::ConnectRequestClose => loop {
            let last = Instant::now() >= end;
            let mut stream =
                TcpStream::connect_timeout(&address, Duration::from_secs(5)).context("connect")?;
            // A reset at the end frees the port at once: no run is limited by ports in TIME_WAIT.
            reset_on_close(&stream);
            byte = [if last { b'q' } else { b'x' }];
            stream.write_all(&byte)?;
            stream.read_exact(&mut byte)?;
            operations.fetch_add(1, Ordering::Relaxed);
            if last {
                return Ok(());
            }
        },
    }
    Ok(())
}

pub(crate) fn reset_on_close(stream: &TcpStream) {
    let linger = nix::libc::linger { l_onoff: 1, l_linger: 0 };
    let _ = nix::sys::socket::setsockopt(stream, nix::sys::socket::sockopt::Linger, &linger);
}

pub(crate) fn pin(cpu: usize) {
    let mut set = nix::sched::CpuSet::new();
    // On a machine with one processor both ends share it.
    if set.set(cpu).is_ok() {
        let _ = nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set);
    }
}

/// CPU nanoseconds of this thread (schedstat; up to a tick behind, which a run of a second does not feel).
pub(crate) fn thread_cpu() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|t| t.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contenders_take_turns_and_the_round_that_warms_up_does_not_count() {
        let mut order = Vec::new();
        let turns = take_turns(2, 2, |i| {
            order.push(i);
            Ok(Outcome { rate: order.len() as f64, cpu_ns: i as f64 })
        });
        let (rates, costs) = (vec![vec![4.0, 5.0], vec![3.0, 6.0]], vec![vec![0.0; 2], vec![1.0; 2]]);
        assert_eq!(turns.unwrap(), Turns { rates, costs });
        assert_eq!(order, [0, 1, 1, 0, 0, 1]);
        assert!(take_turns(1, 1, |_| anyhow::bail!("broken")).is_err());
    }
}
