//! The kernel side: one datapath whose programs stay, plans that come and go, and beside it the tables in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};

use anyhow::{Context as _, Result, ensure};
use flowloom_bpf_abi::{self as abi, map_name};
use flowloom_compiler::{
    CompileOptions, CompilerCache, EndpointId, EndpointPlan, NodePlan, Numbers, compile_with, diff, worldgen,
};
use flowloom_datapath::sys::{self, RunContext};
use flowloom_datapath::{Config, CtFilter, Datapath, Delivery, DeviceInfo, Hook, NodeSettings};
use flowloom_model::{Mac, World};
use flowloom_testkit::{Bpffs, Ns};

use crate::fault::Fault;
use crate::tables::{Compiled, timeless};

/// Enough for the endpoints of two batches, the old and the new.
const DEVICES: usize = 220;
/// The default VPC's number in every batch.
pub(crate) const DEFAULT_VPC: u32 = 1;

/// One datapath.
pub(crate) struct Lab {
    datapath: Datapath,
    programs: BTreeMap<Hook, OwnedFd>,
    connections: [sys::Map<abi::CtKey, abi::CtEntry>; 2],
    drops: sys::PerCpuMap<abi::DropKey, abi::Counter>,
    free: Vec<DeviceInfo>,
    held: BTreeMap<EndpointId, DeviceInfo>,
    numbers: Numbers,
    cache: CompilerCache,
    /// The plan in force.
    pub(crate) plan: NodePlan,
    /// The user-space side.
    pub(crate) tables: Compiled,
    /// Device of what comes from outside.
    pub(crate) uplink: u32,
    fault: Fault,
    // Last: what is pinned there goes after its users.
    _bpffs: Bpffs,
}

/// A namespace with devices, in pairs; the last two are overlay and uplink.
pub(crate) fn devices() -> Result<Ns> {
    let ns = Ns::new("decide")?;
    let mut batch = String::new();
    for pair in 0..DEVICES / 2 + 1 {
        batch.push_str(&format!("link add d{} type veth peer name d{}\n", pair * 2, pair * 2 + 1));
    }
    let script = format!("printf '{batch}' | ip -batch -");
    ns.exec_ok(&["sh", "-c", &script])?;
    Ok(ns)
}

impl Lab {
    /// Opens a datapath; call it inside the namespace of [`devices`].
    pub(crate) fn open() -> Result<Self> {
        let bpffs = Bpffs::mount()?;
        let config = Config {
            pin_root: bpffs.path().join("fl"),
            conntrack_entries: 16_384,
            conntrack_new_entries: 16_384,
            event_rate: 0,
            answer_rate: 0,
            verdict_events: true,
            ..Config::default()
        };
        let mut datapath = Datapath::open(config)?;
        let mut all = (0..DEVICES + 2).map(|n| {
            let device = DeviceInfo::inspect(&format!("d{n}"), flowloom_datapath::Forwarding::Ebpf)?;
            // The frames go nowhere in a test run; the record says what a workload's device says.
            Ok(DeviceInfo { delivery: Delivery::Peer, ..device })
        });
        let mut free = all.by_ref().collect::<Result<Vec<_>>>()?;
        let (uplink, overlay) = (free.pop().context("no uplink")?, free.pop().context("no overlay")?);
        datapath.set_node(&NodeSettings {
            overlay_ifindex: overlay.ifindex,
            uplink_ifindex: uplink.ifindex,
            overlay_mtu: 1450,
            uplink_mtu: 1500,
            default_vpc: DEFAULT_VPC,
            ..NodeSettings::default()
        })?;
        let root = datapath.pin_dir().join("programs");
        let build = fs::read_dir(&root)?.next().context("no programs are pinned")??.path();
        let mut programs = BTreeMap::new();
        for hook in [Hook::FromEndpoint, Hook::ToEndpoint, Hook::FromUplink] {
            programs.insert(hook, sys::obj_get(&build.join(hook.name()))?);
        }
        let map = |name: &str| sys::obj_get(&datapath.pin_dir().join("maps").join(name));
        let connections = [
            sys::Map::from_fd(map(map_name::CONNTRACK)?)?,
            sys::Map::from_fd(map(map_name::CONNTRACK_NEW)?)?,
        ];
        let drops = sys::PerCpuMap::from_fd(map(map_name::DROPS)?)?;
        let tables = Compiled::default();
        tables.configure(datapath.read_back()?.config);
        Ok(Self {
            datapath,
            programs,
            connections,
            drops,
            free,
            held: BTreeMap::new(),
            numbers: Numbers::default(),
            cache: CompilerCache::default(),
            plan: NodePlan::default(),
            tables,
            uplink: uplink.ifindex,
            fault: Fault::None,
            _bpffs: bpffs,
        })
    }

    /// Plants a fault in what is applied from now on; what a fault before has spoiled is cleared away.
    pub(crate) fn plant(&mut self, fault: Fault) -> Result<()> {
        self.forget()?;
        let report = self.datapath.sync(&NodePlan::default())?;
        ensure!(report.is_clean(), "clearing: {report:?}");
        self.free.extend(std::mem::take(&mut self.held).into_values());
        self.plan = NodePlan::default();
        self.tables = Compiled::default();
        self.tables.configure(self.datapath.read_back()?.config);
        self.tables.fault = Some(fault);
        self.fault = fault;
        Ok(())
    }

    /// Forgets connections and drops on both sides, and lets retired numbers be used again.
    pub(crate) fn forget(&mut self) -> Result<()> {
        self.datapath.view().flush(&CtFilter::default())?;
        let mut keys = Vec::new();
        self.drops.for_each(|key, _| keys.push(*key))?;
        for key in keys {
            self.drops.remove(&key)?;
        }
        self.tables.flush();
        self.tables.drops.borrow_mut().clear();
        self.numbers.release_before(self.numbers.epoch());
        Ok(())
    }

    /// Compiles a world and brings both sides from the plan in force to its plan.
    pub(crate) fn apply(&mut self, world: &World, direct_routes: bool) -> Result<()> {
        let node = worldgen::local_node();
        let options = CompileOptions { direct_routes };
        let plan = compile_with(world, &node, options, &mut self.numbers, &mut self.cache).plan;
        let wanted: BTreeSet<EndpointId> = plan.endpoints.values().map(|e| e.id).collect();
        for id in &wanted {
            if !self.held.contains_key(id) {
                let device = self.free.pop().context("out of devices")?;
                self.datapath.attach_endpoint(*id, &device)?;
                self.held.insert(*id, device);
            }
        }
        let ops = diff(&self.plan, &plan);
        let report = self.datapath.apply(&self.fault.spoil(ops.clone()));
        ensure!(self.fault != Fault::None || report.is_clean(), "applying: {report:?}");
        let gone: Vec<EndpointId> = self.held.keys().filter(|id| !wanted.contains(id)).copied().collect();
        self.free.extend(gone.iter().filter_map(|id| self.held.remove(id)));
        self.tables.hold(&plan, &ops, self.datapath.devices());
        self.plan = plan;
        Ok(())
    }

    /// An endpoint's device.
    pub(crate) fn device(&self, endpoint: &EndpointPlan) -> (u32, Mac) {
        let device = &self.held[&endpoint.id];
        (device.ifindex, device.mac)
    }

    /// Runs the kernel's program: what it returned, and the frame afterwards.
    pub(crate) fn run(&self, hook: Hook, frame: &[u8], context: &RunContext) -> Result<(i32, Vec<u8>)> {
        let ran = sys::test_run(self.programs[&hook].as_fd(), frame, context, 1)
            .with_context(|| format!("test run of {} bytes at {}", frame.len(), hook.name()))?;
        Ok((ran.action, ran.data))
    }

    /// Compares what both sides remember: connections with their decisions, and drops with their reasons.
    pub(crate) fn compare(&self) -> Result<(), String> {
        let mut kernel = BTreeMap::new();
        for map in &self.connections {
            let one = |key: &abi::CtKey, entry: &abi::CtEntry| {
                if entry.flags & abi::ct_flags::MOVED == 0 {
                    kernel.insert(*key, timeless(key, *entry));
                }
            };
            map.for_each(one).map_err(|e| e.to_string())?;
        }
        let tables = self.tables.connections();
        for key in kernel.keys().chain(tables.keys()) {
            let (a, b) = (kernel.get(key), tables.get(key));
            if a != b {
                return Err(format!("connection {key:?}\n  kernel {a:?}\n  tables {b:?}"));
            }
        }
        let mut kernel = BTreeMap::new();
        let sum = |key: &abi::DropKey, per: &[abi::Counter]| {
            kernel.insert(*key, per.iter().map(|c| c.packets).sum::<u64>());
        };
        self.drops.for_each(sum).map_err(|e| e.to_string())?;
        let tables = self.tables.drops.borrow();
        if kernel != *tables {
            return Err(format!("drops\n  kernel {kernel:?}\n  tables {tables:?}"));
        }
        Ok(())
    }

    /// Whether the kernel holds the plan and nothing else.
    pub(crate) fn holds_the_plan(&self) -> Result<(), String> {
        let left = self.datapath.remaining(&self.plan).map_err(|e| e.to_string())?;
        if left.is_empty() { Ok(()) } else { Err(format!("the kernel does not hold the plan: {left:?}")) }
    }
}
