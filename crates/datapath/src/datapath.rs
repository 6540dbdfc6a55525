//! One node's kernel state: opening, adopting, attaching, applying.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use flowloom_bpf_abi::map_name::PINNED;
use flowloom_bpf_abi::{self as abi, map_name as name};
use flowloom_compiler::{EndpointId, NodePlan, Op, VpcId};

use crate::adopt;
use crate::apply::{self, ApplyReport, Devices};
use crate::config::{Config, NodeSettings, node_settings};
use crate::device::DeviceInfo;
use crate::error::{Context as _, Error, Result};
use crate::kernel::{Kernel, Maps, Writes};
use crate::links::{Attached, Finding, Hook, Links};
use crate::loading::{Loading, Programs, Verified, needed};
use crate::lower;
use crate::object::Object;
use crate::pins::{self, Pins};
use crate::realise::{Realise as _, Write, WriteHook};
use crate::sockets::{self, SocketHook};
use crate::state::KernelState;
use crate::sys;
use crate::view::{Shared, View};

/// Oldest kernel: TCX links and what the programs need, with a distribution kernel to prove it on.
const OLDEST: (u32, u32) = (6, 12);

/// The kernel state of one node. Dropping it leaves everything running.
#[derive(Debug)]
pub struct Datapath {
    shared: Arc<Shared>,
    config: Config,
    pins: Pins,
    links: Links,
    programs: Programs<Hook>,
    sockets: Programs<SocketHook>,
    /// Programs that are not pinned yet.
    loading: Option<Loading>,
    writes: Writes,
    devices: Devices,
    default_vpc: Option<VpcId>,
    opened: Opened,
}

/// What opening found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Opened {
    /// Pinned programs of the same build were taken over as they are; none was loaded.
    pub adopted_programs: bool,
    /// Pinned maps that were taken over.
    pub adopted_maps: usize,
}

impl Datapath {
    /// Opens the datapath with the embedded object: adopts what is pinned, makes what is missing.
    ///
    /// # Errors
    /// A stub object, an old kernel, pins of another ABI version or of another shape, another process at work, or whatever the kernel refuses.
    pub fn open(config: Config) -> Result<Self> {
        let object = flowloom_bpf_object::object().map_err(|e| Error::NoObject { detail: e.to_string() })?;
        Self::open_object(config, object)
    }

    /// As [`Self::open`], with a given object.
    ///
    /// # Errors
    /// As there.
    pub fn open_object(config: Config, object: &'static [u8]) -> Result<Self> {
        let mut datapath = Self::start_object(config, object)?;
        datapath.finish()?;
        Ok(datapath)
    }

    /// As [`Self::open`], but where nothing is in force yet (there are no maps and no links), this returns once the maps are there: the
    /// kernel looks at the programs meanwhile, and whoever attaches one waits for that one. [`Self::finish`] has to follow.
    ///
    /// # Errors
    /// As there; what is wrong with a program is told by whatever needs it, by [`Self::finish`] and by [`Self::verified`].
    pub fn start(config: Config) -> Result<Self> {
        let object = flowloom_bpf_object::object().map_err(|e| Error::NoObject { detail: e.to_string() })?;
        Self::start_object(config, object)
    }

    /// As [`Self::start`], with a given object.
    ///
    /// # Errors
    /// As there.
    pub fn start_object(config: Config, object: &'static [u8]) -> Result<Self> {
        check_kernel(&release()?)?;
        let object = Object::parse(object, &config)?;
        let (pins, made) = Pins::open(&config.pin_root)?;
        let mut writes = Writes::default();
        if made {
            writes.step()?;
        }
        let mut opened = Opened { adopted_maps: check_maps(&pins, &object)?, adopted_programs: false };
        // Links without maps: somebody took the maps away. What runs goes on until all of it can be exchanged.
        let cold = opened.adopted_maps == 0 && pins::list(&pins.links())?.is_empty();
        let (programs, sockets, loading) = match adopt_programs(&pins, &object)? {
            Some((programs, sockets)) => {
                opened.adopted_programs = true;
                (programs, sockets, None)
            }
            None => {
                writes.step()?;
                let loading = Loading::start(object.prepare(&pins.maps(), false)?, needed())?;
                let programs = Programs::coming(Hook::ALL.map(|h| (h, h.name())), &loading);
                let sockets = Programs::coming(SocketHook::ALL.map(|h| (h, h.name())), &loading);
                (programs, sockets, Some(loading))
            }
        };
        let maps_dir = pins.maps();
        let maps =
            Maps::open(|name| sys::obj_get(&maps_dir.join(name)).path("opening", &maps_dir.join(name)))?;
        let links = Links::new(pins.links());
        let shared = Arc::new(Shared::new(maps, object, pins.maps()));
        let mut datapath = Self {
            shared,
            config,
            pins,
            links,
            programs,
            sockets,
            loading,
            writes,
            devices: Devices::new(),
            default_vpc: None,
            opened,
        };
        if datapath.loading.is_none() {
            datapath.refresh()?;
        } else if !cold {
            datapath.finish()?;
        }
        datapath.remember()?;
        let node = node_settings(&datapath.config_record()?);
        datapath.set_node(&node)?;
        Ok(datapath)
    }

    /// Whether [`Self::finish`] has something to do.
    #[must_use]
    pub const fn is_loading(&self) -> bool {
        self.loading.is_some()
    }

    /// Tells when the kernel has looked at every program, and what it refused. For a thread that does nothing else.
    #[must_use]
    pub fn verified(&self) -> Verified {
        Verified::of(self.loading.as_ref())
    }

    /// The rest of [`Self::start`]: waits for the programs and pins them, all or none for the next life to adopt.
    ///
    /// # Errors
    /// The program that the kernel refused, and why; what cannot be pinned.
    pub fn finish(&mut self) -> Result<()> {
        let Some(loading) = &self.loading else { return Ok(()) };
        loading.progress().end()?;
        pin_programs(
            &self.pins,
            &self.shared.object.digest,
            &self.programs,
            &self.sockets,
            &mut self.writes,
        )?;
        self.refresh()?;
        self.loading = None;
        Ok(())
    }

    /// Gives every link this load's program and removes other loads.
    fn refresh(&mut self) -> Result<()> {
        self.links.refresh(&self.programs, &mut self.writes)?;
        self.sockets.refresh(&self.pins.links(), &mut self.writes)?;
        remove_other_programs(&self.pins, &self.shared.object.digest, &mut self.writes)
    }

    /// Reads what the maps know of devices and of the default VPC.
    fn remember(&mut self) -> Result<()> {
        let Self { shared, devices, default_vpc, .. } = self;
        let remember = |id: &u32, record: &abi::EndpointRecord| {
            if let Some(device) = lower::device_of(record).filter(|_| lower::is_valid(record)) {
                devices.insert(EndpointId(*id), device);
            }
        };
        shared.maps.endpoints.for_each(remember).in_map("reading", name::ENDPOINTS)?;
        let is_default = |id: &u32, record: &abi::VpcRecord| {
            if record.flags & abi::vpc_flags::DEFAULT != 0 {
                *default_vpc = Some(VpcId(*id));
            }
        };
        shared.maps.vpcs.for_each(is_default).in_map("reading", name::VPCS)
    }

    /// A handle for reading, conntrack and traces, to be shared among threads.
    #[must_use]
    pub fn view(&self) -> View {
        View::new(Arc::clone(&self.shared))
    }

    /// The configuration it was opened with.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// What opening found.
    #[must_use]
    pub const fn opened(&self) -> Opened {
        self.opened
    }

    /// Writes since opening began: maps, pins, links. Nothing to change = 0.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.writes.done()
    }

    /// Has `hook` called before each write from now on; its error ends the operation there.
    pub fn set_write_hook(&mut self, hook: Option<WriteHook>) {
        self.writes.set_hook(hook);
    }

    /// Devices of local endpoints: attached ones, and those the kernel remembers from before.
    #[must_use]
    pub const fn devices(&self) -> &Devices {
        &self.devices
    }

    fn kernel(&mut self) -> Kernel<'_> {
        Kernel { maps: &self.shared.maps, writes: &mut self.writes }
    }

    fn config_record(&self) -> Result<abi::NodeConfig> {
        Ok(self.shared.maps.config.get(&0).in_map("reading", name::CONFIG)?.unwrap_or_default())
    }

    /// Tells the programs about the node's devices, in one write when it differs. Returns whether it did.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_node(&mut self, node: &NodeSettings) -> Result<bool> {
        let want = self.config.record(node);
        if self.config_record()? == want {
            return Ok(false);
        }
        self.kernel().write(&Write::Config(want))?;
        Ok(true)
    }

    /// Guards an endpoint's device in both directions and binds it to the endpoint's id. Before the endpoint has a record, every packet of the device is dropped.
    ///
    /// The device is looked up in the caller's network namespace. What is right already is left alone.
    ///
    /// # Errors
    /// When the id is out of range or the kernel refuses; call [`Self::detach_endpoint`] to undo what was done.
    pub fn attach_endpoint(&mut self, id: EndpointId, device: &DeviceInfo) -> Result<()> {
        check_id(id, device)?;
        for hook in [Hook::FromEndpoint, Hook::ToEndpoint] {
            self.links.attach(&self.programs, &mut self.writes, hook, device.ifindex)?;
        }
        self.bind_endpoint(id, device)
    }

    /// The part of [`Self::attach_endpoint`] that waits for nothing: binds a device that the caller has guarded with
    /// [`Self::program`] by other means to the endpoint's id. `attach_endpoint` has to follow.
    ///
    /// # Errors
    /// When the id is out of range or the kernel refuses.
    pub fn bind_endpoint(&mut self, id: EndpointId, device: &DeviceInfo) -> Result<()> {
        check_id(id, device)?;
        let want = abi::DeviceRecord { endpoint: id.0, flags: 0 };
        if self.shared.maps.devices.get(&device.ifindex).in_map("reading", name::DEVICES)? != Some(want) {
            self.kernel().write(&Write::Device(device.ifindex, Some(want)))?;
        }
        self.devices.retain(|_, d| d.ifindex != device.ifindex);
        self.devices.insert(id, device.clone());
        for other in self.devices_of(id)?.into_iter().filter(|i| *i != device.ifindex) {
            self.forget_device(other)?;
        }
        Ok(())
    }

    /// The program of a hook.
    ///
    /// # Errors
    /// When the object has none.
    pub fn program(&self, hook: Hook) -> Result<BorrowedFd<'_>> {
        self.programs.fd(hook)
    }

    /// Forgets an endpoint's devices. A device that still exists passes everything afterwards: remove it (or take it down) first.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn detach_endpoint(&mut self, id: EndpointId) -> Result<()> {
        self.forget_netns(id)?;
        for ifindex in self.devices_of(id)? {
            self.forget_device(ifindex)?;
        }
        if let Some(device) = self.devices.remove(&id) {
            self.forget_device(device.ifindex)?;
        }
        Ok(())
    }

    fn devices_of(&self, id: EndpointId) -> Result<Vec<u32>> {
        let mut out = Vec::new();
        let of_it = |i: &u32, r: &abi::DeviceRecord| out.extend((r.endpoint == id.0).then_some(*i));
        self.shared.maps.devices.for_each(of_it).in_map("reading", name::DEVICES)?;
        Ok(out)
    }

    fn forget_device(&mut self, ifindex: u32) -> Result<()> {
        if self.shared.maps.devices.get(&ifindex).in_map("reading", name::DEVICES)?.is_some() {
            self.kernel().write(&Write::Device(ifindex, None))?;
        }
        for hook in [Hook::FromEndpoint, Hook::ToEndpoint] {
            self.links.detach(&mut self.writes, hook, ifindex)?;
        }
        Ok(())
    }

    /// Runs the overlay programs on the VXLAN device.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn attach_overlay(&mut self, ifindex: u32) -> Result<()> {
        self.attach_pair([Hook::FromOverlay, Hook::ToOverlay], ifindex)
    }

    /// Runs the uplink programs on a device.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn attach_uplink(&mut self, ifindex: u32) -> Result<()> {
        self.attach_pair([Hook::FromUplink, Hook::ToUplink], ifindex)
    }

    fn attach_pair(&mut self, hooks: [Hook; 2], ifindex: u32) -> Result<()> {
        hooks
            .into_iter()
            .try_for_each(|hook| self.links.attach(&self.programs, &mut self.writes, hook, ifindex))
    }

    /// Translates services for the sockets of a cgroup (a directory of a cgroup v2 file system, or its `unified` below), whatever namespace they are in, as far as
    /// [`Self::bind_netns`] knows their namespaces. What is attached already is left alone; a change of the cgroup moves the programs.
    ///
    /// # Errors
    /// When the directory is no cgroup or the kernel refuses.
    pub fn attach_cgroup(&mut self, cgroup: &Path) -> Result<()> {
        self.sockets.attach(cgroup, &self.pins.links(), &mut self.writes)
    }

    /// Leaves sockets alone from now on.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn detach_cgroup(&mut self) -> Result<()> {
        sockets::detach_all(&self.pins.links(), &mut self.writes)
    }

    /// Says whose sockets a network namespace (by its cookie) holds: an endpoint's, or with `None` this host's.
    ///
    /// # Errors
    /// When the map is full or the kernel refuses.
    pub fn bind_netns(&mut self, cookie: u64, endpoint: Option<EndpointId>) -> Result<()> {
        let want = abi::NetnsRecord { endpoint: endpoint.map_or(0, |e| e.0), flags: 0 };
        let mut stale = Vec::new();
        let mut same = false;
        let mut look = |c: &u64, r: &abi::NetnsRecord| {
            same |= *c == cookie && *r == want;
            stale.extend((*c != cookie && r.endpoint == want.endpoint).then_some(*c));
        };
        self.shared.maps.netns.for_each(&mut look).in_map("reading", name::NETNS)?;
        if !same {
            self.kernel().write(&Write::Netns(cookie, Some(want)))?;
        }
        stale.into_iter().try_for_each(|c| self.kernel().write(&Write::Netns(c, None)))
    }

    /// Forgets the namespaces of an endpoint.
    fn forget_netns(&mut self, id: EndpointId) -> Result<()> {
        let mut known = Vec::new();
        let of_it = |c: &u64, r: &abi::NetnsRecord| known.extend((r.endpoint == id.0).then_some(*c));
        self.shared.maps.netns.for_each(of_it).in_map("reading", name::NETNS)?;
        known.into_iter().try_for_each(|c| self.kernel().write(&Write::Netns(c, None)))
    }

    /// Takes one program off a device.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn detach(&mut self, hook: Hook, ifindex: u32) -> Result<()> {
        self.links.detach(&mut self.writes, hook, ifindex)
    }

    /// Every program on a device.
    ///
    /// # Errors
    /// When a pin cannot be read.
    pub fn attached(&self) -> Result<Vec<Attached>> {
        self.links.all()
    }

    /// Compares links and chains with what they must be. Devices are looked up in the caller's network namespace.
    ///
    /// # Errors
    /// When a pin or a chain cannot be read.
    pub fn audit(&self) -> Result<Vec<Finding>> {
        self.links.audit(&self.programs)
    }

    /// Applies operations in their order. Failures stay with their objects.
    pub fn apply(&mut self, ops: &[Op]) -> ApplyReport {
        let mut kernel = Kernel { maps: &self.shared.maps, writes: &mut self.writes };
        apply::apply(&mut kernel, &self.devices, &mut self.default_vpc, ops)
    }

    /// What the kernel holds.
    ///
    /// # Errors
    /// When a map cannot be read.
    pub fn read_back(&self) -> Result<KernelState> {
        self.shared.maps.read()
    }

    /// What is left to do until the kernel holds `plan`; empty is the proof that nothing is.
    ///
    /// # Errors
    /// When a map cannot be read.
    pub fn remaining(&self, plan: &NodePlan) -> Result<Vec<Op>> {
        Ok(adopt::remaining(&self.read_back()?, plan, &self.devices))
    }

    /// Makes the kernel hold `plan`, whatever it holds: after a restart, and after failures. Nothing is written when nothing differs.
    ///
    /// Every step is safe, but only [`flowloom_compiler::diff`] knows both meanings of a rule change. After a restart: sync the plan that was in
    /// force before (nothing to write), then apply the difference to the new one.
    ///
    /// # Errors
    /// When a map cannot be read. What cannot be written is in the report.
    pub fn sync(&mut self, plan: &NodePlan) -> Result<ApplyReport> {
        let ops = self.remaining(plan)?;
        Ok(self.apply(&ops))
    }

    /// Where the pins are.
    #[must_use]
    pub fn pin_dir(&self) -> &Path {
        self.pins.base()
    }
}

/// Removes everything pinned under `pin_root`, of this ABI version or any other: links first, then programs and maps. Nothing there is fine.
///
/// # Errors
/// [`Error::Leftovers`] with everything that could not be removed; the rest is gone.
pub fn uninstall(pin_root: &Path) -> Result<()> {
    let Some(pins) = Pins::existing(pin_root)? else { return Ok(()) };
    let mut left = Vec::new();
    for version in pins::list_root(pins.root())? {
        let digits =
            version.strip_prefix('v').is_some_and(|v| !v.is_empty() && v.bytes().all(|b| b.is_ascii_digit()));
        if !digits {
            left.push(format!("{}: not flowloom's", pins.root().join(&version).display()));
            continue;
        }
        let base = pins.root().join(version);
        let links = base.join("links");
        // Closing a link's last reference detaches it some time later; detaching says when.
        for name in pins::list(&links).unwrap_or_default() {
            let path = links.join(&name);
            match sys::obj_get(&path).and_then(|link| sys::link_detach(link.as_fd())) {
                Ok(()) => {}
                Err(e) if e.raw_os_error() == Some(libc::ENOLINK) => {}
                Err(e) => left.push(format!("{}: {e}", path.display())),
            }
        }
        remove_tree(&base, &mut left);
    }
    // A root that is itself a mount point stays, empty.
    match fs::remove_dir(pins.root()) {
        Ok(()) => {}
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ResourceBusy) => {}
        Err(e) if left.is_empty() => left.push(format!("{}: {e}", pins.root().display())),
        Err(_) => {}
    }
    if left.is_empty() { Ok(()) } else { Err(Error::Leftovers(left)) }
}

fn check_id(id: EndpointId, device: &DeviceInfo) -> Result<()> {
    if id.0 != 0 && id.0 < abi::MAX_ENDPOINTS {
        return Ok(());
    }
    let detail = format!("endpoint id {id} is outside 1..={}", abi::MAX_ENDPOINTS - 1);
    Err(Error::Invalid { object: format!("device {}", device.name), detail })
}

fn remove_tree(dir: &Path, left: &mut Vec<String>) {
    let entries = match fs::read_dir(dir) {
        Ok(e) => e,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return,
        Err(e) => return left.push(format!("{}: {e}", dir.display())),
    };
    for entry in entries.flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove_tree(&path, left);
        } else if let Err(e) = fs::remove_file(&path) {
            left.push(format!("{}: {e}", path.display()));
        }
    }
    if let Err(e) = fs::remove_dir(dir) {
        left.push(format!("{}: {e}", dir.display()));
    }
}

fn release() -> Result<String> {
    let path = Path::new("/proc/sys/kernel/osrelease");
    Ok(fs::read_to_string(path).path("reading", path)?.trim().to_owned())
}

fn check_kernel(release: &str) -> Result<()> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        return Err(Error::KernelUnknown { found: release.to_owned() });
    };
    if (major, minor) < OLDEST {
        return Err(Error::KernelTooOld { found: release.to_owned(), need: "6.12" });
    }
    Ok(())
}

/// Compares pinned maps with their declarations before anything uses them. Returns how many there are. Maps of ours that only another build knows stay.
fn check_maps(pins: &Pins, object: &Object) -> Result<usize> {
    let mut known = 0;
    for name in pins::list(&pins.maps())? {
        let path = pins.maps().join(&name);
        let Some(declared) = object.declared.get(name.as_str()) else {
            if name.starts_with("fl_") {
                continue;
            }
            return Err(Error::ForeignPin { path, detail: "this agent has no such map".to_owned() });
        };
        let fd = sys::obj_get(&path).path("opening", &path)?;
        let facts = sys::map_facts(fd.as_fd())
            .map_err(|_| Error::ForeignPin { path: path.clone(), detail: "it is not a map".to_owned() })?;
        let difference = declared.difference(&facts);
        if !difference.is_empty() {
            return Err(Error::PinMismatch { path, difference });
        }
        known += 1;
    }
    Ok(known)
}

type Adopted = (Programs<Hook>, Programs<SocketHook>);

/// The pinned programs of this very object, if they are all there and use the pinned maps.
fn adopt_programs(pins: &Pins, object: &Object) -> Result<Option<Adopted>> {
    let dir = pins.programs(&object.digest);
    let mut map_ids = BTreeMap::new();
    for name in PINNED {
        let path = pins.maps().join(name);
        match sys::obj_get(&path) {
            Ok(fd) => drop(map_ids.insert(name, sys::map_facts(fd.as_fd()).path("reading", &path)?.id)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).path("opening", &path),
        }
    }
    let mut all = BTreeMap::new();
    let names = Hook::ALL.map(Hook::name).into_iter().chain(SocketHook::ALL.map(SocketHook::name));
    for program in names {
        let path = dir.join(program);
        let fd = match sys::obj_get(&path) {
            Ok(fd) => fd,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).path("opening", &path),
        };
        let facts = sys::prog_facts(fd.as_fd()).path("reading", &path)?;
        for id in facts.map_ids {
            let Ok(map) = sys::map_by_id(id) else { return Ok(None) };
            let map = sys::map_facts(map.as_fd()).path("reading", &path)?;
            // A map of that name that is not the pinned one: the pins were tampered with, load anew.
            if map_ids.get(map.name.as_str()).is_some_and(|pinned| *pinned != map.id) {
                return Ok(None);
            }
        }
        all.insert(program, fd);
    }
    let programs = Hook::ALL.into_iter().filter_map(|h| Some((h, h.name(), all.remove(h.name())?)));
    let programs = Programs::there(programs.collect::<Vec<_>>())?;
    let sockets = SocketHook::ALL.into_iter().filter_map(|h| Some((h, h.name(), all.remove(h.name())?)));
    Ok(Some((programs, Programs::there(sockets.collect::<Vec<_>>())?)))
}

/// Pins a load that is verified as a whole.
fn pin_programs(
    pins: &Pins,
    digest: &str,
    programs: &Programs<Hook>,
    sockets: &Programs<SocketHook>,
    writes: &mut Writes,
) -> Result<()> {
    let dir = pins.programs(digest);
    // What an interrupted run left behind.
    for name in pins::list(&dir)? {
        writes.step()?;
        fs::remove_file(dir.join(&name)).path("removing", &dir.join(&name))?;
    }
    pins::make_dir(&dir)?;
    let devices = Hook::ALL.into_iter().map(|h| (h.name(), programs.of(h, h.name())));
    let sockets = SocketHook::ALL.into_iter().map(|h| (h.name(), sockets.of(h, h.name())));
    for (name, program) in devices.chain(sockets) {
        let (fd, _) = program?;
        let path = dir.join(name);
        writes.step()?;
        sys::obj_pin(fd, &path).path("pinning", &path)?;
    }
    Ok(())
}

/// Programs of earlier builds, which no link runs any more.
fn remove_other_programs(pins: &Pins, digest: &str, writes: &mut Writes) -> Result<()> {
    for other in pins::list(&pins.programs_root())?.into_iter().filter(|d| d != digest) {
        writes.step()?;
        let mut left = Vec::new();
        remove_tree(&pins.programs_root().join(other), &mut left);
        if !left.is_empty() {
            return Err(Error::Leftovers(left));
        }
    }
    Ok(())
}

/// A lock whose holder panicked still guards valid data: every change under it is one assignment.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_kernels_are_refused_by_name() {
        for ok in ["6.12.0", "6.18.44-fc-v657", "7.0", "6.12.1-cloud-amd64", "10.1.2"] {
            assert!(check_kernel(ok).is_ok(), "{ok}");
        }
        for old in ["6.1.0-30-amd64", "5.15.0", "6.11.9"] {
            let error = check_kernel(old).unwrap_err().to_string();
            assert!(error.contains(old) && error.contains("6.12"), "{error}");
        }
        assert!(matches!(check_kernel("linux"), Err(Error::KernelUnknown { .. })));
    }
}
