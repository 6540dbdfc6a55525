//! The same packets through the kernel's program (`BPF_PROG_TEST_RUN`, real maps) and through the same logic in memory.
//!
//! Every table is written to both sides by one call. [`Twin::run`] compares what became of the packet, [`Twin::compare`] what it left behind.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use aya::programs::{TestRun as _, TestRunOptions};
use flowloom_bpf_abi::{self as abi, Addr, map_name};
use flowloom_bpf_logic::fake::{FakeFrame, FakeTables, Redirect};
use flowloom_bpf_logic::{Packet, Verdict, from_endpoint, to_endpoint};
use flowloom_netlink::LinkName;
use flowloom_testkit::Ns;

use crate::programs::{Entry, Programs};

/// Programs that need nothing that a test run cannot have (a tunnel, an uplink).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hook {
    /// See `from_endpoint`.
    FromEndpoint,
    /// See `to_endpoint`.
    ToEndpoint,
}

impl Hook {
    const fn name(self) -> &'static str {
        match self {
            Self::FromEndpoint => "from_endpoint",
            Self::ToEndpoint => "to_endpoint",
        }
    }

    fn logic(self) -> fn(&FakeFrame, &FakeTables, &mut Packet) -> Verdict {
        match self {
            Self::FromEndpoint => |f, t, p| from_endpoint(f, t, p),
            Self::ToEndpoint => |f, t, p| to_endpoint(f, t, p),
        }
    }
}

/// A packet at a hook.
#[derive(Clone, Debug, Default)]
pub struct Arrival {
    /// The frame; the kernel wants at least 14 bytes, and whole IP headers of 20 and 40.
    pub frame: Vec<u8>,
    /// Device of the hook.
    pub ifindex: u32,
    /// Device it came in on (for `to_endpoint`), 0 = this host.
    pub arrived_on: u32,
    /// `skb->mark`.
    pub mark: u32,
    /// Bytes per segment.
    pub gso_size: u32,
}

/// What both sides made of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// What the program returned.
    pub verdict: Verdict,
    /// The frame afterwards.
    pub frame: Vec<u8>,
    /// `skb->mark` afterwards.
    pub mark: u32,
    /// Where it was sent (known to the logic's side only).
    pub redirect: Option<Redirect>,
}

/// The two sides.
#[derive(Debug)]
pub struct Twin {
    /// Kernel side.
    pub programs: Programs,
    /// Logic side.
    pub fake: FakeTables,
    ns: Ns,
    devices: Vec<u32>,
}

/// Offsets in `struct __sk_buff` (linux/bpf.h).
mod offset {
    pub(super) const MARK: usize = 8;
    pub(super) const INGRESS_IFINDEX: usize = 36;
    pub(super) const IFINDEX: usize = 40;
    pub(super) const GSO_SIZE: usize = 176;
    pub(super) const SIZE: usize = 192;
}

fn put(ctx: &mut [u8; offset::SIZE], at: usize, value: u32) {
    ctx[at..at + 4].copy_from_slice(&value.to_ne_bytes());
}

impl Twin {
    /// Programs with private maps, in a namespace that has this many devices.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn new(devices: usize) -> Result<Self> {
        Self::load(devices, false)
    }

    /// As [`Self::new`], as a trace: both sides leave everything but their steps as it is.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn dry(devices: usize) -> Result<Self> {
        Self::load(devices, true)
    }

    fn load(devices: usize, dry: bool) -> Result<Self> {
        let ns = Ns::new("twin")?;
        let mut indices = Vec::new();
        for pair in 0..devices.div_ceil(2) {
            let (a, b) = (format!("t{}", pair * 2), format!("t{}", pair * 2 + 1));
            ns.exec_ok(&["ip", "link", "add", &a, "type", "veth", "peer", "name", &b])?;
            for name in [a, b] {
                let link = ns.handle()?.link(&LinkName::new(&name)?)?.context("no device")?;
                indices.push(link.index.number());
            }
        }
        indices.truncate(devices);
        let fake = FakeTables::default();
        fake.dry.set(dry);
        Ok(Self { programs: Programs::load(dry)?, fake, ns, devices: indices })
    }

    /// Indices of the devices.
    #[must_use]
    pub fn devices(&self) -> &[u32] {
        &self.devices
    }

    /// Gives a device to an endpoint.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn device(&mut self, ifindex: u32, endpoint: u32) -> Result<()> {
        self.fake.devices.borrow_mut().insert(ifindex, endpoint);
        self.programs.put(map_name::DEVICES, ifindex, abi::DeviceRecord { endpoint, flags: 0 })
    }

    /// Writes an endpoint's record.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn endpoint(&mut self, id: u32, record: abi::EndpointRecord) -> Result<()> {
        self.fake.set_endpoint(id, record);
        self.programs.set(map_name::ENDPOINTS, id, record)
    }

    /// Writes an address of the node.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn address(&mut self, vpc: u32, ip: IpAddr, endpoint: u32, flags: u32) -> Result<()> {
        let key = abi::AddressKey { vpc, addr: Addr::from(ip) };
        let record = abi::AddressRecord { endpoint, flags };
        self.fake.addresses.borrow_mut().insert(key, record);
        self.programs.put(map_name::ADDRESSES, key, record)
    }

    /// Writes a peer; `prefix` counts the bits of the address in its own family.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn peer(&mut self, vpc: u32, ip: IpAddr, prefix: u8, record: abi::PeerRecord) -> Result<()> {
        let prefixlen = 32 + u32::from(prefix) + if ip.is_ipv4() { 96 } else { 0 };
        self.fake.set_peer(abi::PeerKey { prefixlen, vpc, addr: Addr::from(ip) }, record);
        self.programs.peer(vpc, ip, prefix, record)
    }

    /// Writes a VPC.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn vpc(&mut self, id: u32, record: abi::VpcRecord) -> Result<()> {
        self.fake.set_vpc(id, record);
        self.programs.put(map_name::VPCS, id, record)
    }

    /// Fills a slot.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn policy(&mut self, slot: u32, entries: &[Entry]) -> Result<()> {
        self.fake.set_policy(slot, entries);
        self.programs.policy(slot, entries)
    }

    /// Bumps the generation of a VPC.
    ///
    /// # Errors
    /// When there is no such VPC.
    pub fn bump(&mut self, vpc: u32) -> Result<()> {
        self.fake.bump(vpc);
        self.programs.bump(vpc)
    }

    /// Writes the configuration.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn configure(&mut self, config: abi::NodeConfig) -> Result<()> {
        self.fake.set_config(config);
        self.programs.set(map_name::CONFIG, 0, config)
    }

    /// Limits connections.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn quota(&mut self, vpc: u32, endpoint: u32, limit: u32) -> Result<()> {
        let value = abi::QuotaValue { used: 0, limit };
        self.fake.quotas.borrow_mut().insert((vpc, endpoint), value);
        self.programs.put(map_name::QUOTAS, abi::QuotaKey { vpc, endpoint }, value)
    }

    /// Runs a packet through both sides.
    ///
    /// # Errors
    /// When the kernel refuses the run, or the two sides differ.
    pub fn run(&mut self, hook: Hook, arrival: &Arrival) -> Result<Outcome> {
        let mut ctx = [0; offset::SIZE];
        put(&mut ctx, offset::MARK, arrival.mark);
        put(&mut ctx, offset::INGRESS_IFINDEX, arrival.arrived_on);
        put(&mut ctx, offset::IFINDEX, arrival.ifindex);
        put(&mut ctx, offset::GSO_SIZE, arrival.gso_size);
        let mut frame = vec![0; arrival.frame.len() + 256];
        let mut after = [0; offset::SIZE];
        let program = self.programs.program(hook.name())?;
        // What is not TCP becomes a connection by its age.
        self.fake.now_ns.set(flowloom_testkit::settled_second().as_nanos() as u64);
        let ran = self.ns.run_in(|| {
            program.test_run(TestRunOptions {
                data_in: Some(&arrival.frame),
                data_out: Some(&mut frame),
                ctx_in: Some(&ctx),
                ctx_out: Some(&mut after),
                ..TestRunOptions::new()
            })
        })?;
        let ran = ran.with_context(|| format!("test run of {} bytes", arrival.frame.len()))?;
        frame.truncate(ran.data_size_out as usize);
        let mark = u32::from_ne_bytes(after[offset::MARK..offset::MARK + 4].try_into()?);

        let mirror = FakeFrame::new(arrival.frame.clone(), arrival.ifindex);
        {
            let mut bytes = mirror.0.borrow_mut();
            bytes.mark = arrival.mark;
            bytes.arrived_on = arrival.arrived_on;
            bytes.gso_size = arrival.gso_size;
        }
        let verdict = self.fake.run(hook.logic(), &mirror);
        let bytes = mirror.bytes();
        let logic = Outcome { verdict, frame: bytes.data, mark: bytes.mark, redirect: bytes.redirect };
        let kernel =
            Outcome { verdict: Verdict(ran.return_value as i32), frame, mark, redirect: bytes.redirect };
        ensure!(
            kernel == logic,
            "the kernel and the logic differ for {arrival:02x?}\nkernel {kernel:02x?}\nlogic  {logic:02x?}"
        );
        Ok(logic)
    }

    /// Compares the steps of the last packet, and forgets them.
    ///
    /// # Errors
    /// When they differ.
    pub fn compare_steps(&mut self) -> Result<Vec<abi::TraceStep>> {
        let log: abi::TraceLog = self.programs.get(map_name::TRACE, 0)?;
        let kernel = &log.steps[..(log.count as usize).min(abi::MAX_TRACE_STEPS)];
        let logic = self.fake.steps.take();
        ensure!(kernel == logic, "steps: kernel {kernel:?}, logic {logic:?}");
        self.programs.set(map_name::TRACE, 0, abi::TraceLog::default())?;
        Ok(logic)
    }

    /// Compares connections (but for times), drops and quotas of both sides.
    ///
    /// # Errors
    /// When they differ.
    pub fn compare(&mut self) -> Result<()> {
        let timeless = |list: Vec<(abi::CtKey, abi::CtEntry)>| -> BTreeMap<abi::CtKey, abi::CtEntry> {
            list.into_iter().map(|(k, e)| (k, abi::CtEntry { last_seen: 0, created: 0, ..e })).collect()
        };
        let mut kernel = self.programs.dump::<abi::CtKey, abi::CtEntry>(map_name::CONNTRACK)?;
        let begun = self.programs.dump::<abi::CtKey, abi::CtEntry>(map_name::CONNTRACK_NEW)?;
        kernel.extend(begun.into_iter().filter(|(_, e)| e.flags & abi::ct_flags::MOVED == 0));
        let (kernel, logic) = (timeless(kernel), timeless(self.fake.connections()));
        for (key, entry) in &kernel {
            ensure!(
                logic.get(key) == Some(entry),
                "connection {key:?}\nkernel {entry:?}\nlogic  {:?}",
                logic.get(key)
            );
        }
        ensure!(
            kernel.len() == logic.len(),
            "{} connections in the kernel, {} in memory",
            kernel.len(),
            logic.len()
        );
        let drops: BTreeMap<String, u64> =
            self.fake.dropped().into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        let kernel = self.programs.every_drop()?;
        ensure!(kernel == drops, "drops: kernel {kernel:?}, logic {drops:?}");
        for ((vpc, endpoint), value) in self.fake.quotas.borrow().iter() {
            let key = abi::QuotaKey { vpc: *vpc, endpoint: *endpoint };
            let found = self.programs.dump::<abi::QuotaKey, abi::QuotaValue>(map_name::QUOTAS)?;
            let kernel = found.iter().find(|(k, _)| *k == key).map(|(_, v)| *v);
            ensure!(kernel == Some(*value), "quota {key:?}: kernel {kernel:?}, logic {value:?}");
        }
        Ok(())
    }
}
