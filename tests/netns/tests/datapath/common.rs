//! A bpffs of its own per test, a node namespace, endpoints on veth pairs.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use flowloom_bpf_abi::{self as abi, PolicyKey, PolicyValue, identity, peer_flags, verdict};
use flowloom_compiler::{
    EndpointId, EndpointPlan, Identity, NodeAddress, Op, Peer, PolicyEntries, PolicySlot, VpcId, VpcPlan,
};
use flowloom_datapath::{Config, Datapath, DeviceInfo, Forwarding, sys};
use flowloom_netlink::{LinkName, Netns, VethEnd, VethSpec};
use flowloom_testkit::{Bpffs, Ns};

pub(crate) type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Small tables: tests open many datapaths.
pub(crate) fn config(fs: &Bpffs) -> Config {
    Config {
        pin_root: fs.path().join("fl"),
        conntrack_entries: 8192,
        conntrack_new_entries: 8192,
        event_rate: 0,
        ..Config::default()
    }
}

/// A node with workloads.
pub(crate) struct Node {
    pub(crate) ns: Ns,
    workloads: Vec<Ns>,
}

impl Node {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { ns: Ns::new("node")?, workloads: Vec::new() })
    }

    /// A veth pair into a namespace of its own; what the datapath sees of it.
    pub(crate) fn workload(&mut self, name: &str) -> Result<DeviceInfo> {
        let far = Ns::new(name)?;
        self.veth(name, Some(&far))?;
        self.workloads.push(far);
        Ok(self.ns.run_in(|| DeviceInfo::inspect(name, Forwarding::Ebpf))??)
    }

    /// A veth pair; both ends in the node when `far` is absent.
    pub(crate) fn veth(&self, name: &str, far: Option<&Netns>) -> Result {
        let (near_name, far_name) = (LinkName::new(name)?, LinkName::new(format!("{name}-p"))?);
        let spec = VethSpec {
            near: VethEnd { name: &near_name, mac: None },
            far: VethEnd { name: &far_name, mac: None },
            far_netns: far,
            mtu: 1450,
            alias: None,
            near_addr_gen_none: true,
            near_up: true,
            queues: None,
        };
        self.ns.handle()?.create_veth(&spec)?;
        Ok(())
    }

    /// The namespace of the `n`th workload, from 1.
    pub(crate) fn peer(&self, n: usize) -> &Ns {
        &self.workloads[n - 1]
    }

    pub(crate) fn inside<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.ns.run_in(f).expect("enter the node")
    }
}

pub(crate) fn endpoint(id: u32, ip: &str, slots: (u32, u32)) -> EndpointPlan {
    EndpointPlan {
        key: format!("red/e{id}").parse().expect("key"),
        id: EndpointId(id),
        vpc: VpcId(100),
        ips: vec![ip.parse().expect("ip")],
        subnets: vec!["10.0.0.0/24".parse().expect("net")],
        gateways: vec!["10.0.0.1".parse().expect("gateway")],
        mac: format!("02:00:00:00:00:{id:02x}").parse().expect("mac"),
        mac_pinned: false,
        identity: Identity(256 + id),
        egress_slot: PolicySlot(slots.0),
        ingress_slot: PolicySlot(slots.1),
        revision: 1,
        judge_host: false,
        mtu: None,
    }
}

pub(crate) fn vpc() -> VpcPlan {
    VpcPlan {
        name: "red".parse().expect("name"),
        default: false,
        gateways: ["10.0.0.1".parse().expect("ip")].into(),
        subnets: ["10.0.0.0/24".parse().expect("net")].into(),
    }
}

pub(crate) fn local_node() -> NodeAddress {
    let address = "192.0.2.1".parse().expect("ip");
    NodeAddress { node: "n1".parse().expect("name"), local: true, tunnel: address }
}

pub(crate) fn entry(identity: u32, verdict: u8) -> (PolicyKey, PolicyValue) {
    let key = PolicyKey { prefixlen: PolicyKey::IDENTITY_BITS, identity, ..PolicyKey::default() };
    (key, PolicyValue { precedence: 1, rule: identity, verdict, ..PolicyValue::default() })
}

/// The default and `n` identities from `first`.
pub(crate) fn policy(first: u32, n: u32, verdict: u8) -> PolicyEntries {
    let any = entry(identity::ANY, verdict::DROP);
    std::iter::once(any).chain((first..first + n).map(|i| entry(i, verdict))).collect()
}

pub(crate) fn local_peer(id: u32) -> Peer {
    Peer { identity: Identity(256 + id), flags: peer_flags::ENDPOINT, tunnel: None }
}

/// Two endpoints of one VPC that may talk.
pub(crate) fn pair() -> Vec<Op> {
    let (a, b) = (endpoint(1, "10.0.0.11", (1, 2)), endpoint(2, "10.0.0.12", (1, 2)));
    let peers = [(&a, 1), (&b, 2)].map(|(e, id)| ((e.vpc, e.ips[0].into()), local_peer(id)));
    vec![
        Op::PutVpc { id: VpcId(100), vpc: vpc(), stale_gateways: Vec::new() },
        Op::PutNode { address: local_node().tunnel, node: local_node() },
        Op::PutPeers(peers.into()),
        Op::PutSlots(vec![
            (PolicySlot(1), policy(257, 2, verdict::ALLOW)),
            (PolicySlot(2), policy(257, 2, verdict::ALLOW)),
        ]),
        Op::PutEndpoint(a),
        Op::PutEndpoint(b),
    ]
}

/// Attaches two workloads and gives them their place.
pub(crate) fn populate(node: &mut Node, datapath: &mut Datapath) -> Result<Vec<DeviceInfo>> {
    let devices = vec![node.workload("wl1")?, node.workload("wl2")?];
    for (id, device) in (1..).zip(&devices) {
        node.inside(|| datapath.attach_endpoint(EndpointId(id), device))?;
    }
    let report = datapath.apply(&pair());
    assert!(report.is_clean(), "{:?}", report.failures);
    Ok(devices)
}

/// Every file below a directory, relative, sorted.
pub(crate) fn tree(root: &Path) -> Vec<PathBuf> {
    fn walk(root: &Path, dir: &Path, out: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                walk(root, &entry.path(), out);
            } else {
                out.push(entry.path().strip_prefix(root).expect("below").to_owned());
            }
        }
    }
    let mut out = Vec::new();
    walk(root, root, &mut out);
    out.sort();
    out
}

/// Kernel id of every pinned map and program: what must be the same objects after a restart.
pub(crate) fn pinned_ids(root: &Path) -> BTreeMap<PathBuf, u32> {
    let id = |path: PathBuf| {
        let fd = sys::obj_get(&root.join(&path)).expect("pin");
        let map = sys::map_facts(fd.as_fd()).ok().filter(|f| f.max_entries > 0).map(|f| f.id);
        let link = sys::link_info(fd.as_fd()).ok().map(|i| i.id);
        let id = match path.iter().nth(1).and_then(|s| s.to_str()) {
            Some("maps") => map,
            Some("links") => link,
            _ => sys::prog_facts(fd.as_fd()).ok().map(|p| p.id),
        };
        (path, id.expect("a map, link or program"))
    };
    tree(root).into_iter().map(id).collect()
}

/// The same programs as another build: bytes after the ELF mean nothing to a loader.
pub(crate) fn other_build() -> Result<&'static [u8]> {
    let mut bytes = flowloom_bpf_object::object()?.to_vec();
    bytes.extend_from_slice(&[0; 8]);
    aligned(bytes)
}

/// An object as it must lie in memory.
pub(crate) fn aligned(bytes: Vec<u8>) -> Result<&'static [u8]> {
    let words = bytes.chunks(8).map(|c| {
        let mut word = [0; 8];
        word[..c.len()].copy_from_slice(c);
        u64::from_ne_bytes(word)
    });
    let aligned: &'static [u64] = words.collect::<Vec<_>>().leak();
    // SAFETY: the words live for ever and any byte is a byte.
    Ok(unsafe { std::slice::from_raw_parts(aligned.as_ptr().cast::<u8>(), aligned.len() * 8) })
}

/// A conntrack map of an open datapath.
pub(crate) fn conntrack(datapath: &Datapath) -> sys::Map<abi::CtKey, abi::CtEntry> {
    let path = datapath.pin_dir().join("maps").join(abi::map_name::CONNTRACK);
    sys::Map::from_fd(sys::obj_get(&path).expect("pin")).expect("map")
}
