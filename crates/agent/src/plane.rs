//! The datapath behind a trait: the kernel's, or maps in memory for tests.

use flowloom_compiler::{EndpointId, NodePlan, Op};
use flowloom_datapath::Hook::{FromEndpoint, ToEndpoint};
use flowloom_datapath::sys::{TcxHook, tcx_chain};
use flowloom_datapath::{ApplyReport, Datapath, DeviceInfo, Forwarding, NodeSettings, Result, View};

use std::path::{Path, PathBuf};

use flowloom_netlink::{Handle, IfIndex, Netns, NetnsCookie};

use crate::writes;

/// What the core asks of the datapath.
pub(crate) trait Plane: Send {
    /// What the core's thread does first.
    fn begin(&mut self) {}

    /// Whether this life began on a node where nothing was in force, and the kernel still looks at the programs. Who needs one waits.
    fn is_loading(&self) -> bool {
        false
    }

    /// Waits for every program; from then on [`Self::set_node`] puts those of overlay and uplinks in place.
    ///
    /// # Errors
    /// The program that the kernel refused, and why.
    fn finish_loading(&mut self) -> Result<()> {
        Ok(())
    }

    /// Puts the programs on an endpoint's device and binds it to the id; until the endpoint has a record everything is dropped.
    ///
    /// # Errors
    /// When the device does not exist or the kernel refuses.
    fn attach_endpoint(&mut self, id: EndpointId, device: &str) -> Result<DeviceInfo>;

    /// As [`Self::attach_endpoint`], at once: the programs guard the device by the classic path, because links make the
    /// kernel wait for all CPUs. `true`: [`Self::attach_endpoint`] has to follow, in a quiet moment.
    ///
    /// # Errors
    /// As there.
    fn guard_endpoint(&mut self, id: EndpointId, device: &str) -> Result<(DeviceInfo, bool)>;

    /// Tells the programs of sockets that a namespace's are the endpoint's. Opened only when its cookie is not `known`.
    ///
    /// # Errors
    /// When there is no such namespace or the kernel refuses.
    fn bind_netns(&mut self, id: EndpointId, netns: &Path, known: Option<NetnsCookie>) -> anyhow::Result<()>;

    /// Whether somebody's programs run on a device that [`Self::guard_endpoint`] guards: before ours, while ours have no links.
    fn is_preceded(&mut self, ifindex: u32) -> bool;

    /// Forgets an endpoint's device, which is gone or down by now.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn detach_endpoint(&mut self, id: EndpointId) -> Result<()>;

    /// Tells the programs about the node's devices and puts those of overlay and uplinks in place, and nowhere else; none while they load.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn set_node(&mut self, node: &NodeSettings, uplinks: &[u32]) -> Result<()>;

    /// Removes links of devices that are no endpoint's.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn detach_strangers(&mut self, known: &[u32]) -> Result<()>;

    /// Applies operations in order.
    fn apply(&mut self, ops: &[Op]) -> ApplyReport;

    /// Makes the kernel hold `plan`, whatever it holds.
    ///
    /// # Errors
    /// When a map cannot be read.
    fn sync(&mut self, plan: &NodePlan) -> Result<ApplyReport>;

    /// The reading side; `None` in tests.
    fn view(&self) -> Option<View>;
}

/// The kernel's.
#[derive(Debug)]
pub(crate) struct Kernel {
    datapath: Datapath,
    /// For the classic path; without it links are made at once.
    netlink: Option<Handle>,
    forwarding: Forwarding,
    /// Whose sockets are served.
    cgroup: PathBuf,
}

impl Kernel {
    /// Wraps an open datapath; services of this cgroup's sockets are translated.
    #[must_use]
    pub(crate) fn new(mut datapath: Datapath, cgroup: &Path) -> Self {
        let forwarding = datapath.config().forwarding;
        if cfg!(feature = "kill-points") {
            datapath.set_write_hook(Some(Box::new(|_| {
                writes::before("datapath");
                Ok(())
            })));
        }
        Self { datapath, forwarding, netlink: Handle::new().ok(), cgroup: cgroup.to_owned() }
    }

    /// Translates services for the sockets of the cgroup; this namespace's are the host's.
    fn serve_sockets(&mut self) -> anyhow::Result<()> {
        let cookie = Netns::current()?.cookie()?;
        let cgroup = self.cgroup.clone();
        self.counted(|d| {
            d.bind_netns(cookie.0, None)?;
            d.attach_cgroup(&cgroup)
        })?;
        Ok(())
    }

    /// Takes the classic guard off devices that have links now. Left in place it costs time and decides nothing else.
    fn unguard(&mut self, devices: &[u32]) {
        let Some(netlink) = &mut self.netlink else { return };
        let links: Vec<IfIndex> = devices.iter().map(|i| IfIndex(*i)).collect();
        writes::before("classic guard removal");
        match netlink.unguard_classic(&links) {
            Ok(n) => writes::made(n),
            Err(e) => tracing::warn!(error = %e, "classic guards stay beside the links"),
        }
    }

    /// Counts what the datapath wrote in `f`.
    fn counted<T>(&mut self, f: impl FnOnce(&mut Datapath) -> T) -> T {
        let before = self.datapath.writes();
        let result = f(&mut self.datapath);
        writes::made(usize::try_from(self.datapath.writes() - before).unwrap_or(usize::MAX));
        result
    }
}

impl Plane for Kernel {
    fn begin(&mut self) {
        // Packets are translated all the same, on devices of endpoints.
        if let Err(e) = self.serve_sockets() {
            tracing::error!(cgroup = %self.cgroup.display(), error = %e, "services of sockets are off; set cgroup_root to a cgroup v2 directory");
        }
    }

    fn is_loading(&self) -> bool {
        self.datapath.is_loading()
    }

    fn finish_loading(&mut self) -> Result<()> {
        self.counted(Datapath::finish)
    }

    fn attach_endpoint(&mut self, id: EndpointId, device: &str) -> Result<DeviceInfo> {
        let info = DeviceInfo::inspect(device, self.forwarding)?;
        let before = self.datapath.writes();
        self.counted(|d| d.attach_endpoint(id, &info))?;
        if self.datapath.writes() != before {
            self.unguard(&[info.ifindex]);
        }
        Ok(info)
    }

    fn guard_endpoint(&mut self, id: EndpointId, device: &str) -> Result<(DeviceInfo, bool)> {
        let info = DeviceInfo::inspect(device, self.forwarding)?;
        let (ingress, egress) = (self.datapath.program(FromEndpoint)?, self.datapath.program(ToEndpoint)?);
        let guarded = self.netlink.as_mut().map(|netlink| {
            writes::before("classic guard");
            netlink.guard_classic(IfIndex(info.ifindex), ingress, egress)
        });
        match guarded {
            Some(Ok(())) => writes::made(3),
            other => {
                tracing::debug!(result = ?other, device, "no classic guard: links are made at once");
                return Ok((self.attach_endpoint(id, device)?, false));
            }
        }
        self.counted(|d| d.bind_endpoint(id, &info))?;
        Ok((info, true))
    }

    fn bind_netns(&mut self, id: EndpointId, netns: &Path, known: Option<NetnsCookie>) -> anyhow::Result<()> {
        let cookie = match known {
            Some(cookie) => cookie,
            None => Netns::open(netns)?.cookie()?,
        };
        Ok(self.counted(|d| d.bind_netns(cookie.0, Some(id)))?)
    }

    fn is_preceded(&mut self, ifindex: u32) -> bool {
        // A device has programs at these hooks by links only, and ours has none yet. What cannot be read is not worth a grace period.
        [TcxHook::Ingress, TcxHook::Egress]
            .into_iter()
            .any(|hook| tcx_chain(ifindex, hook).is_ok_and(|chain| !chain.programs.is_empty()))
    }

    fn detach_endpoint(&mut self, id: EndpointId) -> Result<()> {
        self.counted(|d| d.detach_endpoint(id))
    }

    fn set_node(&mut self, node: &NodeSettings, uplinks: &[u32]) -> Result<()> {
        use flowloom_datapath::Hook::{
            FromEndpoint, FromOverlay, FromUplink, ToEndpoint, ToOverlay, ToUplink,
        };
        self.counted(|d| {
            d.set_node(node)?;
            if d.is_loading() {
                return Ok(());
            }
            // What came through an uplink goes on to the tunnel's device.
            for ifindex in uplinks {
                d.attach_uplink(*ifindex)?;
            }
            if node.overlay_ifindex != 0 {
                d.attach_overlay(node.overlay_ifindex)?;
            }
            for link in d.attached()? {
                let wanted = match link.hook {
                    FromEndpoint | ToEndpoint => true,
                    FromOverlay | ToOverlay => link.ifindex == node.overlay_ifindex && !link.dead,
                    FromUplink | ToUplink => uplinks.contains(&link.ifindex) && !link.dead,
                };
                if !wanted {
                    d.detach(link.hook, link.ifindex)?;
                }
            }
            Ok(())
        })
    }

    fn detach_strangers(&mut self, known: &[u32]) -> Result<()> {
        // What a life before this one did not come to.
        self.unguard(known);
        self.counted(|d| {
            for link in d.attached()? {
                let of_endpoint = matches!(link.hook, FromEndpoint | ToEndpoint);
                if of_endpoint && (link.dead || !known.contains(&link.ifindex)) {
                    d.detach(link.hook, link.ifindex)?;
                }
            }
            Ok(())
        })
    }

    fn apply(&mut self, ops: &[Op]) -> ApplyReport {
        self.counted(|d| d.apply(ops))
    }

    fn sync(&mut self, plan: &NodePlan) -> Result<ApplyReport> {
        self.counted(|d| d.sync(plan))
    }

    fn view(&self) -> Option<View> {
        Some(self.datapath.view())
    }
}
