//! The outside world in memory: shared with the test, which may look, break things and start another agent on it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};

use flowloom_compiler::{EndpointId, NodePlan, Op, VpcId};
use flowloom_datapath::realise::{Memory, Realise, Write};
use flowloom_datapath::{
    ApplyReport, Delivery, DeviceInfo, Devices, Error, NodeSettings, Result, View, adopt, apply,
};
use flowloom_model::Mac;
use flowloom_netlink::NetnsCookie;

use crate::detach::Remover;
use crate::plane::Plane;
use crate::wiring::{HostRoute, MasqueradeSpec, NodeSpec, NodeState, Wire, WireSpec, Wiring, WiringError};

#[derive(Debug, Default)]
pub(crate) struct Net {
    /// Devices by name, as they were asked for.
    pub(crate) devices: BTreeMap<String, WireSpec>,
    /// Devices that are switched on.
    pub(crate) raised: BTreeSet<u32>,
    /// The overlay device, when it is switched on.
    pub(crate) open: Option<u32>,
    pub(crate) routes: BTreeSet<HostRoute>,
    pub(crate) masquerade: Option<MasqueradeSpec>,
    pub(crate) node: Option<NodeSpec>,
    /// Changes made.
    pub(crate) changes: u64,
    /// Endpoints whose device is refused.
    pub(crate) refuse: BTreeSet<String>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct FakeNet(pub(crate) Arc<Mutex<Net>>);

pub(crate) fn index(device: &str) -> u32 {
    100 + device.bytes().fold(0u32, |h, b| h.wrapping_mul(31).wrapping_add(u32::from(b))) % 1_000_000
}

impl Wiring for FakeNet {
    fn wire(&mut self, spec: &WireSpec) -> std::result::Result<Option<NetnsCookie>, WiringError> {
        let mut net = self.0.lock().unwrap();
        if net.refuse.contains(&spec.name) {
            return Err(WiringError::Mismatch(format!("{} is refused", spec.name)));
        }
        if net.devices.get(spec.wire.device()) != Some(spec) {
            net.devices.insert(spec.wire.device().to_owned(), spec.clone());
            net.changes += 1;
        }
        Ok(None)
    }

    fn raise(&mut self, ifindex: u32) -> std::result::Result<(), WiringError> {
        let mut net = self.0.lock().unwrap();
        net.changes += u64::from(net.raised.insert(ifindex));
        Ok(())
    }

    fn open_overlay(&mut self, ifindex: u32) -> std::result::Result<(), WiringError> {
        let mut net = self.0.lock().unwrap();
        net.changes += u64::from(net.open.replace(ifindex) != Some(ifindex));
        Ok(())
    }

    fn unwire(&mut self, wire: &Wire) -> std::result::Result<(), WiringError> {
        let mut net = self.0.lock().unwrap();
        net.raised.remove(&index(wire.device()));
        net.changes += u64::from(net.devices.remove(wire.device()).is_some());
        Ok(())
    }

    fn remover(&self) -> Remover {
        let net = self.clone();
        Box::new(move |wire| net.clone().unwire(wire))
    }

    fn is_wired(&mut self, wire: &Wire) -> std::result::Result<bool, WiringError> {
        Ok(self.0.lock().unwrap().devices.contains_key(wire.device()))
    }

    fn check(&mut self, spec: &WireSpec) -> std::result::Result<(), WiringError> {
        match self.0.lock().unwrap().devices.get(spec.wire.device()) {
            Some(there) if there == spec => Ok(()),
            other => Err(WiringError::Mismatch(format!("{other:?}"))),
        }
    }

    fn node(&mut self, spec: &NodeSpec) -> std::result::Result<NodeState, WiringError> {
        let mut net = self.0.lock().unwrap();
        if net.node.as_ref() != Some(spec) {
            net.node = Some(spec.clone());
            net.changes += 1;
        }
        Ok(NodeState {
            uplinks: vec![("up0".into(), 2)],
            overlay: spec.overlay.as_ref().map(|_| ("ov0".into(), 3)),
            uplink_mtu: 1500,
            overlay_mtu: 1450,
        })
    }

    fn add_routes(&mut self, routes: &[HostRoute]) -> std::result::Result<(), WiringError> {
        let mut net = self.0.lock().unwrap();
        for route in routes {
            net.changes += u64::from(net.routes.insert(route.clone()));
        }
        Ok(())
    }

    fn routes(&mut self, routes: &[HostRoute]) -> std::result::Result<(), WiringError> {
        let mut net = self.0.lock().unwrap();
        let wanted: BTreeSet<HostRoute> = routes.iter().cloned().collect();
        net.changes += u64::from(net.routes != wanted);
        net.routes = wanted;
        Ok(())
    }

    fn masquerade(&mut self, spec: Option<&MasqueradeSpec>) -> std::result::Result<(), WiringError> {
        let mut net = self.0.lock().unwrap();
        net.changes += u64::from(net.masquerade.as_ref() != spec);
        net.masquerade = spec.cloned();
        Ok(())
    }

    fn remove_strangers(&mut self, known: &BTreeSet<String>) -> std::result::Result<(), WiringError> {
        let mut net = self.0.lock().unwrap();
        let before = net.devices.len();
        net.devices.retain(|name, _| known.contains(name));
        net.changes += (before - net.devices.len()) as u64;
        Ok(())
    }

    fn purge(&mut self) -> std::result::Result<(), Vec<WiringError>> {
        *self.0.lock().unwrap() = Net::default();
        Ok(())
    }
}

#[derive(Debug, Default)]
pub(crate) struct Maps {
    pub(crate) memory: Memory,
    pub(crate) devices: Devices,
    default_vpc: Option<VpcId>,
    node: Option<NodeSettings>,
    /// Added to the index of every device.
    pub(crate) generation: u32,
    /// Devices on which somebody's programs are.
    pub(crate) preceded: BTreeSet<u32>,
    /// Devices with programs.
    pub(crate) guarded: BTreeSet<u32>,
    /// Of these, the ones with links.
    pub(crate) linked: BTreeSet<u32>,
    /// The kernel still looks at the programs.
    pub(crate) loading: bool,
    /// What it says of one of them.
    pub(crate) refused: Option<String>,
    /// The programs of overlay and uplinks find no place.
    pub(crate) unattached: bool,
    /// It is one of those of endpoints.
    pub(crate) unguarded: bool,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct FakePlane(pub(crate) Arc<Mutex<Maps>>);

impl Plane for FakePlane {
    fn bind_netns(
        &mut self,
        _id: EndpointId,
        _netns: &Path,
        _known: Option<NetnsCookie>,
    ) -> anyhow::Result<()> {
        Ok(())
    }

    fn attach_endpoint(&mut self, id: EndpointId, device: &str) -> Result<DeviceInfo> {
        let info = DeviceInfo {
            name: device.to_owned(),
            ifindex: index(device) + self.0.lock().unwrap().generation,
            mac: Mac([2, 0, 0, 0, 0, 9]),
            mtu: 1450,
            delivery: Delivery::Peer,
        };
        let mut maps = self.0.lock().unwrap();
        maps.guarded.insert(info.ifindex);
        maps.linked.insert(info.ifindex);
        let want = flowloom_bpf_abi::DeviceRecord { endpoint: id.0, flags: 0 };
        if maps.memory.state.devices.get(&info.ifindex) != Some(&want) {
            maps.memory.write(&Write::Device(info.ifindex, Some(want)))?;
        }
        maps.devices.insert(id, info.clone());
        Ok(info)
    }

    fn guard_endpoint(&mut self, id: EndpointId, device: &str) -> Result<(DeviceInfo, bool)> {
        {
            let maps = self.0.lock().unwrap();
            if let Some(why) = maps.refused.as_ref().filter(|_| maps.unguarded) {
                return Err(Error::Load { doing: "verifying from_endpoint".into(), detail: why.clone() });
            }
        }
        let info = self.attach_endpoint(id, device)?;
        self.0.lock().unwrap().linked.remove(&info.ifindex);
        Ok((info, true))
    }

    fn is_loading(&self) -> bool {
        self.0.lock().unwrap().loading
    }

    fn finish_loading(&mut self) -> Result<()> {
        let mut maps = self.0.lock().unwrap();
        if let Some(why) = &maps.refused {
            return Err(Error::Load { doing: "verifying from_overlay".into(), detail: why.clone() });
        }
        maps.loading = false;
        Ok(())
    }

    fn is_preceded(&mut self, ifindex: u32) -> bool {
        self.0.lock().unwrap().preceded.contains(&ifindex)
    }

    fn detach_endpoint(&mut self, id: EndpointId) -> Result<()> {
        let mut maps = self.0.lock().unwrap();
        if let Some(device) = maps.devices.remove(&id) {
            maps.guarded.remove(&device.ifindex);
            maps.linked.remove(&device.ifindex);
            maps.memory.write(&Write::Device(device.ifindex, None))?;
        }
        Ok(())
    }

    fn set_node(&mut self, node: &NodeSettings, _uplinks: &[u32]) -> Result<()> {
        let mut maps = self.0.lock().unwrap();
        if maps.unattached {
            return Err(Error::Aborted("told to".into()));
        }
        maps.node = Some(*node);
        Ok(())
    }

    fn detach_strangers(&mut self, known: &[u32]) -> Result<()> {
        self.0.lock().unwrap().guarded.retain(|i| known.contains(i));
        Ok(())
    }

    fn apply(&mut self, ops: &[Op]) -> ApplyReport {
        let Maps { memory, devices, default_vpc, .. } = &mut *self.0.lock().unwrap();
        apply::apply(memory, devices, default_vpc, ops)
    }

    fn sync(&mut self, plan: &NodePlan) -> Result<ApplyReport> {
        let ops = {
            let maps = self.0.lock().unwrap();
            if maps.memory.abort_at == Some(0) {
                return Err(Error::Aborted("told to".into()));
            }
            adopt::remaining(&maps.memory.state, plan, &maps.devices)
        };
        Ok(self.apply(&ops))
    }

    fn view(&self) -> Option<View> {
        None
    }
}
