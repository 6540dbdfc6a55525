//! The kit that other tests trust: its probes tell the truth, its captures are whole, its packets are taken by the
//! kernel, and its guards leave nothing behind when a test panics, is interrupted or is killed.
#![expect(clippy::unwrap_used, reason = "helpers of tests, outside test functions")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Result;
use flowloom_netlink::{Address, DEFAULT_DIR, IfIndex, LinkName, Mac};
use flowloom_testkit::{
    Bpffs, Capture, Cmd, Direction, EchoServer, Fault, Mode, Netfilter, Ns, Outcome, PATIENCE, Packet, Probe,
    Proto, RawSender, SctpServer, TcpFlow, TcpServer, Topology, UdpReceiver, UdpSender, arp, connect,
    eventually, icmp, nd, never, probe_all, tcp_flags, temp_dir, vxlan,
};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const SECOND: Duration = Duration::from_secs(1);

fn name(s: &str) -> LinkName {
    LinkName::new(s).unwrap()
}

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

/// Every outcome of every protocol and family, each made by the kernel for a known reason.
#[test]
fn probes_tell_answers_refusals_errors_and_silence_apart() -> Result<()> {
    let lab = Topology::builder().build()?;
    let (a, b) = (&lab.nodes[0], &lab.nodes[1]);
    let mut rules = String::from("table inet t { chain input { type filter hook input priority 0;\n");
    for (port, verdict) in
        [(1001, "drop"), (1002, "reject with icmpx type admin-prohibited"), (1003, "reject with tcp reset")]
    {
        rules.push_str(&format!("tcp dport {port} {verdict}\n"));
        if port != 1003 {
            rules.push_str(&format!("udp dport {port} {verdict}\nsctp dport {port} {verdict}\n"));
        }
    }
    rules.push_str("}\n}\n");
    Cmd::new(&["nft", "-f", "-"]).in_netns(&b.ns)?.input(rules).run()?.success()?;
    let mut servers = Vec::new();
    let mut table: Vec<(Proto, SocketAddr, Outcome)> = Vec::new();
    for (ip, prohibited) in [(b.ip4.into(), Errno::EHOSTUNREACH), (b.ip6.into(), Errno::EACCES)] {
        let nobody: IpAddr =
            if matches!(ip, IpAddr::V4(_)) { "203.0.113.1".parse()? } else { "2001:db8::1".parse()? };
        servers.push((
            TcpServer::start(&b.ns, at(ip, 1000), Mode::Echo)?,
            EchoServer::start(&b.ns, at(ip, 1000))?,
            SctpServer::start(&b.ns, at(ip, 1000))?,
        ));
        for proto in [Proto::Tcp, Proto::Udp, Proto::Sctp, Proto::Icmp] {
            table.push((proto, at(ip, 1000), Outcome::Connected));
            table.push((proto, at(nobody, 1000), Outcome::Unreachable(Errno::ENETUNREACH)));
            if proto != Proto::Icmp {
                table.push((proto, at(ip, 1001), Outcome::TimedOut));
                table.push((proto, at(ip, 1002), Outcome::Unreachable(prohibited)));
            }
        }
        table.push((Proto::Tcp, at(ip, 999), Outcome::Refused));
        table.push((Proto::Tcp, at(ip, 1003), Outcome::Refused));
        table.push((Proto::Udp, at(ip, 999), Outcome::Refused));
        table.push((Proto::Sctp, at(ip, 999), Outcome::TimedOut));
    }
    // One after the other: an ICMP error about a raw socket's packet reaches every raw socket with that destination.
    for (proto, to, wanted) in &table {
        let patience = if *wanted == Outcome::TimedOut { Duration::from_millis(250) } else { PATIENCE };
        let got = Probe::new(*proto, &a.ns, *to).timeout(patience).run()?;
        assert_eq!(got, *wanted, "{proto:?} to {to}");
    }
    for (tcp, udp, sctp) in &servers {
        assert_eq!((tcp.accepted(), udp.received(), sctp.received()), (1, 1, 1));
    }
    Ok(())
}

#[test]
fn many_probes_run_at_the_same_time_and_keep_their_order() -> Result<()> {
    let lab = Topology::builder().build()?;
    let (a, b) = (&lab.nodes[0], &lab.nodes[1]);
    let server = TcpServer::start(&b.ns, at(b.ip4.into(), 0), Mode::Discard)?;
    let echo = EchoServer::start(&b.ns, at(b.ip6.into(), 0))?;
    Cmd::new(&["nft", "-f", "-"])
        .in_netns(&b.ns)?
        .input("table inet t { chain i { type filter hook input priority 0; tcp dport 9 drop; }; }\n")
        .run()?
        .success()?;
    let silent = at(b.ip4.into(), 9);
    let probes: Vec<Probe<'_>> = (0..600)
        .map(|i| match i % 3 {
            0 => Probe::tcp(&a.ns, server.addr()),
            1 => Probe::udp(&a.ns, echo.addr()),
            _ => Probe::tcp(&a.ns, silent),
        })
        .map(|p| p.timeout(if p.to == silent { SECOND } else { PATIENCE }))
        .collect();
    let start = Instant::now();
    let outcomes = probe_all(&probes)?;
    let wanted = [Outcome::Connected, Outcome::Connected, Outcome::TimedOut];
    for (i, outcome) in outcomes.iter().enumerate() {
        assert_eq!(*outcome, wanted[i % 3], "probe {i}");
    }
    assert_eq!(outcomes.len(), probes.len());
    // 200 of them wait a second each; together that is a second per 200 sockets, one after the other 200.
    assert!(start.elapsed() < 100 * SECOND, "{:?}", start.elapsed());
    let from = at(a.ip4.into(), 4321);
    assert_eq!(Probe::tcp(&a.ns, server.addr()).source(from).timeout(PATIENCE).run()?, Outcome::Connected);
    eventually(PATIENCE, || if server.peers().contains(&from) { Ok(()) } else { Err(server.peers().len()) });
    Ok(())
}

#[test]
fn with_forward_drop_the_stack_carries_nothing_between_workloads() -> Result<()> {
    for netfilter in [Netfilter::Open, Netfilter::ForwardDrop, Netfilter::InvalidDrop] {
        let lab = Topology::builder().nodes(1).netfilter(netfilter).build()?;
        let node = &lab.nodes[0];
        let gateways: [IpAddr; 2] = ["10.7.0.1".parse()?, "fd07::1".parse()?];
        let w1 = node.plain_workload(
            "w1",
            &name("flw1"),
            &["10.7.0.5/24".parse()?, "fd07::5/64".parse()?],
            &gateways,
        )?;
        let w2 = node.plain_workload(
            "w2",
            &name("flw2"),
            &["10.7.0.6/24".parse()?, "fd07::6/64".parse()?],
            &gateways,
        )?;
        let (wanted, patience) = match netfilter {
            Netfilter::Open => (Outcome::Connected, PATIENCE),
            _ => (Outcome::TimedOut, Duration::from_millis(300)),
        };
        for ip in ["10.7.0.6", "fd07::6"] {
            let server = TcpServer::start(&w2, at(ip.parse()?, 0), Mode::Echo)?;
            let probe = Probe::tcp(&w1, server.addr()).timeout(patience);
            assert_eq!(probe.run()?, wanted, "{netfilter:?} {ip}");
            // The node itself still reaches its workloads.
            assert_eq!(Probe::tcp(&node.ns, server.addr()).timeout(PATIENCE).run()?, Outcome::Connected);
        }
    }
    Ok(())
}

struct Wire {
    a: Ns,
    b: Ns,
    a_mac: Mac,
    b_mac: Mac,
}

fn wire() -> Result<Wire> {
    let (a, b) = (Ns::new("a")?, Ns::new("b")?);
    let pair = connect(&a, &name("wire"), &b, &name("wire"), 1500)?;
    let mac = |ns: &Ns, index: IfIndex| -> Result<Mac> {
        Ok(ns.handle()?.link_by_index(index)?.and_then(|l| l.mac).unwrap_or(Mac([0; 6])))
    };
    for (ns, index, n) in [(&a, pair.near, 1), (&b, pair.far, 2)] {
        ns.handle()?.ensure_address(&Address::new(index, format!("10.9.0.{n}/24").parse()?))?;
        ns.handle()?.ensure_address(&Address::new(index, format!("fd09::{n}/64").parse()?))?;
    }
    let (a_mac, b_mac) = (mac(&a, pair.near)?, mac(&b, pair.far)?);
    Ok(Wire { a, b, a_mac, b_mac })
}

/// The kernel is the judge of the builders: it answers what is right and is silent about what is broken.
#[test]
fn the_kernel_answers_crafted_packets_and_drops_broken_ones() -> Result<()> {
    let w = wire()?;
    let raw = RawSender::open(&w.a, &name("wire"))?;
    for n in [1, 2] {
        let (v4_a, v4_b): (IpAddr, IpAddr) = ("10.9.0.1".parse()?, "10.9.0.2".parse()?);
        let (v6_a, v6_b): (IpAddr, IpAddr) = ("fd09::1".parse()?, "fd09::2".parse()?);
        let (a, b, reply) =
            if n == 1 { (v4_a, v4_b, icmp::V4_ECHO_REPLY) } else { (v6_a, v6_b, icmp::V6_ECHO_REPLY) };
        let capture = Capture::start(&w.a, &name("wire"))?;
        let good = Packet::echo(a, b, 7, 1, b"good-payload").macs(w.a_mac, w.b_mac);
        raw.send(&good.frame())?;
        raw.send(&good.clone().payload(b"broken-transport").fault(Fault::TransportChecksum).frame())?;
        raw.send(&good.clone().payload(b"broken-version").fault(Fault::IpVersion(7)).frame())?;
        if n == 1 {
            raw.send(&good.clone().payload(b"broken-header").fault(Fault::IpChecksum).frame())?;
        }
        for fragment in good.clone().payload(&[b'f'; 64]).fragments(24) {
            raw.send(&fragment)?;
        }
        let closed =
            Packet::tcp(at(a, 5000), at(b, 1), tcp_flags::SYN).sequence(77, 0).macs(w.a_mac, w.b_mac);
        raw.send(&closed.frame())?;
        let answers = || -> Vec<_> {
            let frames = capture.frames();
            frames
                .iter()
                .filter(|f| f.direction == Direction::In)
                .filter_map(|f| f.parsed())
                .filter(|p| p.source == b)
                .collect()
        };
        eventually(PATIENCE, || {
            let list = answers();
            let rst = list.iter().any(|p| p.tcp_flags & tcp_flags::RST != 0 && p.tcp_numbers.1 == 78);
            let echoed = list.iter().any(|p| p.icmp.0 == reply && p.payload == b"good-payload");
            let whole = list.iter().any(|p| p.icmp.0 == reply && p.payload == [b'f'; 64]);
            if rst && echoed && whole { Ok(()) } else { Err(format!("{rst} {echoed} {whole} {list:?}")) }
        });
        // The kernel handles the frames of one link in order: what was broken would have been answered by now.
        let frames = capture.stop()?;
        let broken = frames.iter().filter(|f| f.direction == Direction::In && f.contains(b"broken")).count();
        assert_eq!(broken, 0);
        assert_eq!(
            frames.iter().filter(|f| f.direction == Direction::Out && f.contains(b"broken")).count(),
            if n == 1 { 3 } else { 2 }
        );
    }
    Ok(())
}

#[test]
fn crafted_arp_and_neighbour_discovery_are_answered() -> Result<()> {
    let w = wire()?;
    let raw = RawSender::open(&w.a, &name("wire"))?;
    let capture = Capture::start(&w.a, &name("wire"))?;
    let ask = arp::Arp::request(w.a_mac, "10.9.0.1".parse()?, "10.9.0.2".parse()?);
    raw.send(&ask.frame(w.a_mac, arp::BROADCAST))?;
    let target: Ipv6Addr = "fd09::2".parse()?;
    let solicitation = nd::solicitation("fd09::1".parse()?, target, w.a_mac).frame();
    let b_mac = w.b_mac;
    eventually(PATIENCE, || {
        // Asked again, as hosts do: the kernel joins an address's group by a work queue, some time after adding it.
        raw.send(&solicitation).map_err(|e| (false, false, e.raw_os_error().unwrap_or(0) as usize))?;
        let frames = capture.frames();
        let arp_ok = frames
            .iter()
            .filter_map(|f| arp::Arp::from_frame(&f.bytes))
            .any(|a| a.operation == 2 && a.sender_mac == b_mac && a.sender_ip.octets() == [10, 9, 0, 2]);
        let nd_ok =
            frames.iter().filter(|f| f.direction == Direction::In).filter_map(|f| f.parsed()).any(|p| {
                p.icmp.0 == nd::ADVERTISEMENT
                    && p.payload.starts_with(&target.octets())
                    && p.transport_checksum_ok == Some(true)
            });
        if arp_ok && nd_ok { Ok(()) } else { Err((arp_ok, nd_ok, frames.len())) }
    });
    Ok(())
}

/// A VXLAN frame from the builder comes out of the kernel's VXLAN device.
#[test]
fn a_crafted_vxlan_packet_is_decapsulated_by_the_kernel() -> Result<()> {
    let w = wire()?;
    w.b.exec_ok(&[
        "ip", "link", "add", "vx0", "type", "vxlan", "id", "77", "dstport", "4789", "dev", "wire",
    ])?;
    w.b.exec_ok(&["ip", "link", "set", "vx0", "up"])?;
    let capture = Capture::start(&w.b, &name("vx0"))?;
    let raw = RawSender::open(&w.a, &name("wire"))?;
    let inner = Packet::udp("10.1.0.1:1".parse()?, "10.1.0.2:2".parse()?, b"inside").frame();
    for vni in [77, 78] {
        let outer = vxlan::encapsulate("10.9.0.1:5555".parse()?, "10.9.0.2:4789".parse()?, vni, &inner);
        raw.send(&outer.macs(w.a_mac, w.b_mac).frame())?;
    }
    eventually(PATIENCE, || if capture.count() > 0 { Ok(()) } else { Err(0) });
    let frames = capture.stop()?;
    let arrived: Vec<_> = frames.iter().filter(|f| f.contains(b"inside")).collect();
    assert_eq!(arrived.len(), 1);
    assert_eq!(arrived[0].bytes, inner);
    Ok(())
}

#[test]
fn numbered_streams_show_what_was_lost_and_flows_say_when_they_broke() -> Result<()> {
    let w = wire()?;
    let receiver = UdpReceiver::start(&w.b, "10.9.0.2:0".parse()?)?;
    let sender = UdpSender::start(&w.a, None, receiver.addr(), Duration::from_micros(500), 42, 64)?;
    let server = TcpServer::start(&w.b, "10.9.0.2:0".parse()?, Mode::Echo)?;
    let flow = TcpFlow::start(&w.a, server.addr(), Duration::from_millis(1), Duration::from_millis(400))?;
    eventually(PATIENCE, || {
        if receiver.count() > 100 && flow.round_trips() > 20 { Ok(()) } else { Err(receiver.count()) }
    });
    let cut = "table inet t { chain i { type filter hook input priority 0; drop; }; }\n";
    Cmd::new(&["nft", "-f", "-"]).in_netns(&w.b)?.input(cut).run()?.success()?;
    let (before, sent) = (receiver.count(), sender.sent());
    eventually(PATIENCE, || if sender.sent() > sent + 50 { Ok(()) } else { Err(sender.sent()) });
    never(
        Duration::from_millis(50),
        || if receiver.count() == before { Ok(()) } else { Err(receiver.count()) },
    );
    // The flow breaks: a round trip takes longer than its patience.
    eventually(PATIENCE, || if flow.ended() { Ok(()) } else { Err(flow.round_trips()) });
    w.b.exec_ok(&["nft", "flush", "ruleset"])?;
    eventually(PATIENCE, || if receiver.count() > before + 50 { Ok(()) } else { Err(receiver.count()) });
    let report = flow.stop();
    assert!(report.error.is_some() && report.round_trips > 20, "{report:?}");
    let sent = sender.stop();
    eventually(PATIENCE, || {
        if receiver.arrivals().last().is_some_and(|a| a.number + 1 == sent) { Ok(()) } else { Err(()) }
    });
    let missing = receiver.missing(42, sent);
    assert!(missing.len() >= 50, "{missing:?}");
    // One gap, and the stream is whole around it.
    assert_eq!(missing.last().unwrap() - missing[0] + 1, missing.len() as u64);
    assert_eq!(receiver.count() + missing.len(), sent as usize);
    assert_eq!(receiver.missing(43, 3), [0, 1, 2]);
    Ok(())
}

#[test]
fn a_command_that_hangs_is_killed_and_its_output_kept() -> Result<()> {
    let ns = Ns::new("cmd")?;
    let start = Instant::now();
    let error = Cmd::new(&["sh", "-c", "echo spoken; exec tail -f /dev/null"])
        .in_netns(&ns)?
        .timeout(Duration::from_millis(300))
        .run()
        .unwrap_err()
        .to_string();
    assert!(error.contains("spoken") && start.elapsed() < PATIENCE, "{error}");
    let failed = ns.exec(&["sh", "-c", "echo no >&2; exit 3"])?;
    assert_eq!((failed.status.code(), failed.stderr.as_str()), (Some(3), "no\n"));
    assert!(ns.exec_ok(&["false"]).is_err());
    assert!(ns.exec(&["/no/such/program"]).is_err());
    let echoed = Cmd::new(&["cat"]).input("x".repeat(200_000)).run()?.success()?;
    assert_eq!(echoed.stdout.len(), 200_000);
    // It really ran inside.
    let links = ns.exec_ok(&["ip", "-o", "link"])?.stdout;
    assert_eq!(links.lines().count(), 1, "{links}");
    Ok(())
}

fn exists(pid: u32) -> bool {
    // A zombie that its adopter has not read yet is gone all the same.
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|s| !s.rsplit(") ").next().unwrap_or("").starts_with('Z'))
}

fn mounted(path: &Path) -> bool {
    let path = path.display().to_string();
    fs::read_to_string("/proc/self/mounts").unwrap().lines().any(|l| l.split(' ').nth(1) == Some(&path))
}

#[test]
fn guards_undo_themselves_when_a_test_panics() {
    let (tx, rx) = std::sync::mpsc::channel();
    let panicked = std::thread::spawn(move || {
        let ns = Ns::new("panic").unwrap();
        let bpffs = Bpffs::mount().unwrap();
        let child = Cmd::new(&["tail", "-f", "/dev/null"]).in_netns(&ns).unwrap().spawn().unwrap();
        // One that no guard knows: it left its parent.
        ns.exec_ok(&["sh", "-c", "tail -f /dev/null & echo $!"]).unwrap();
        let stray = ns.exec_ok(&["ip", "netns", "pids", ns.name()]).unwrap().stdout;
        let stray: Vec<u32> = stray.lines().map(|l| l.trim().parse().unwrap()).collect();
        tx.send((ns.path().to_path_buf(), bpffs.path().to_path_buf(), child.pid(), stray)).unwrap();
        panic!("on purpose");
    })
    .join();
    assert!(panicked.is_err());
    let (ns, bpffs, child, stray) = rx.recv().unwrap();
    assert!(!ns.exists() && !bpffs.exists() && !mounted(&bpffs));
    assert!(stray.len() >= 2, "{stray:?}");
    eventually(PATIENCE, || if exists(child) || stray.iter().any(|p| exists(*p)) { Err(()) } else { Ok(()) });
}

/// Not a test of its own: the two below start it in a process that they end.
#[test]
#[ignore = "run as a child by the two tests after it"]
fn child_that_holds_guards_and_waits() {
    let ns = Ns::new("child").unwrap();
    let bpffs = Bpffs::mount().unwrap();
    let process = Cmd::new(&["tail", "-f", "/dev/null"]).in_netns(&ns).unwrap().spawn().unwrap();
    // As an agent under test leaves them: namespaces of workloads, mounted below the test's directory.
    let dir = temp_dir("child").unwrap();
    for name in ["one", "two"] {
        let target = dir.path().join(name);
        fs::write(&target, "").unwrap();
        let bind = nix::mount::MsFlags::MS_BIND;
        nix::mount::mount(Some(ns.path()), &target, None::<&str>, bind, None::<&str>).unwrap();
    }
    let shown = [ns.path(), bpffs.path(), dir.path()].map(|p| p.display().to_string()).join(" ");
    println!("ready {shown} {}", process.pid());
    eventually(Duration::from_secs(60), || Err::<(), _>("nobody ended this process"));
}

fn start_child() -> Result<(std::process::Child, Vec<String>)> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["child_that_holds_guards_and_waits", "--exact", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()?;
    let output = BufReader::new(child.stdout.take().unwrap());
    for line in output.lines() {
        let line = line?;
        if let Some((_, words)) = line.split_once("ready ") {
            return Ok((child, words.split(' ').map(str::to_owned).collect()));
        }
    }
    anyhow::bail!("the child never was ready: {:?}", child.wait()?)
}

#[test]
fn an_interrupted_test_process_leaves_nothing_behind() -> Result<()> {
    let (mut child, words) = start_child()?;
    let [ns, bpffs, dir] = [0, 1, 2].map(|n| Path::new(&words[n]));
    let pid = words[3].parse()?;
    assert!(ns.exists() && mounted(bpffs) && mounted(&dir.join("two")) && exists(pid));
    kill(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGTERM)?;
    let status = child.wait()?;
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGTERM));
    assert!(!ns.exists() && !bpffs.exists() && !mounted(bpffs) && !dir.exists());
    eventually(PATIENCE, || if exists(pid) { Err(pid) } else { Ok(()) });
    Ok(())
}

#[test]
fn what_a_killed_test_process_left_is_swept_by_the_next() -> Result<()> {
    let (mut child, words) = start_child()?;
    let [ns, bpffs, dir] = [0, 1, 2].map(|n| Path::new(&words[n]));
    let pid = words[3].parse()?;
    child.kill()?;
    child.wait()?;
    assert!(ns.exists() && exists(pid) && mounted(bpffs) && mounted(&dir.join("two")));
    let (mut second, others) = start_child()?;
    assert_ne!(words[0], others[0]);
    assert!(!ns.exists());
    eventually(PATIENCE, || if exists(pid) || mounted(bpffs) || dir.exists() { Err(pid) } else { Ok(()) });
    kill(Pid::from_raw(i32::try_from(second.id())?), Signal::SIGINT)?;
    second.wait()?;
    let left: Vec<_> = fs::read_dir(DEFAULT_DIR)?
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().contains("-child"))
        .map(|e| e.path())
        .collect();
    assert!(!left.iter().any(|p| p == ns || *p == Path::new(&others[0])), "{left:?}");
    Ok(())
}

/// A server of a test was ended and the next could not have its address: a process forked meanwhile held it.
#[test]
fn an_address_a_dying_process_still_holds_is_waited_for() -> Result<()> {
    let ns = Ns::new("held")?;
    let to = at(std::net::Ipv4Addr::LOCALHOST.into(), 8_080);
    let (tcp, udp) = (TcpServer::start(&ns, to, Mode::Echo)?, EchoServer::start(&ns, to)?);
    let (_never_sent, wait) = std::sync::mpsc::channel::<()>();
    let ends = std::thread::spawn(move || {
        let _ = wait.recv_timeout(SECOND / 2);
        drop((tcp, udp));
    });
    let _next = (TcpServer::start(&ns, to, Mode::Echo)?, EchoServer::start(&ns, to)?);
    ends.join().unwrap();
    let taken = TcpServer::start(&ns, to, Mode::Echo).unwrap_err();
    assert!(format!("{taken:#}").contains("Address already in use"), "{taken:#}");
    Ok(())
}
