//! What the allocator has assigned: `<file>.lock.yaml` beside the document, written by `flowloom apply`, read by every agent.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::document::yaml_options;
use crate::{EndpointKey, EndpointName, Fault, Mac, Reason, Timestamp, Vni, VpcName, World};

/// Largest lock file, bytes.
const MAX_LOCK_BYTES: usize = 64 * 1024 * 1024;
const VERSION: u32 = 1;
const HEADER: &str = "# Assigned by `flowloom apply`; kept beside the document, and not for editing.\n";

/// Assignments, and what was released lately.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lock {
    /// Numbers of VPCs.
    pub vpcs: BTreeMap<VpcName, Vni>,
    /// Addresses of endpoints.
    pub endpoints: BTreeMap<EndpointKey, Vec<IpAddr>>,
    /// Addresses that rest, with the time of their release.
    pub released: BTreeMap<(VpcName, IpAddr), Timestamp>,
    /// Numbers that rest, with the time of their release.
    pub released_vnis: BTreeMap<Vni, Timestamp>,
}

/// The file's shape.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: u32,
    vpcs: BTreeMap<VpcName, Vni>,
    endpoints: Vec<Entry>,
    released: Vec<Released>,
    released_vnis: Vec<ReleasedVni>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    vpc: VpcName,
    name: EndpointName,
    ips: Vec<IpAddr>,
    /// For people: it follows from VPC and first address.
    mac: Option<Mac>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Released {
    vpc: VpcName,
    ip: IpAddr,
    at: Timestamp,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReleasedVni {
    vni: Vni,
    at: Timestamp,
}

fn fault(message: impl Into<String>) -> Fault {
    let advice = "delete the lock file and run `flowloom apply` to assign anew";
    Fault::new(Reason::SyntaxError, "lock", "", format!("{}; {advice}", message.into()))
}

impl Lock {
    /// What a world's objects have.
    #[must_use]
    pub fn of(world: &World) -> Self {
        let addressed = world.endpoints.values().filter(|e| !e.ips.is_empty());
        Self {
            vpcs: world.vpcs.values().filter_map(|v| Some((v.name.clone(), v.vni?))).collect(),
            endpoints: addressed.map(|e| (e.key(), e.ips.clone())).collect(),
            ..Self::default()
        }
    }

    /// Reads a lock file. An empty one assigns nothing.
    ///
    /// # Errors
    /// When it is no lock of this version, or assigns one thing twice.
    pub fn parse(bytes: &[u8]) -> Result<Self, Fault> {
        if bytes.len() > MAX_LOCK_BYTES {
            return Err(fault(format!("the lock file is larger than {MAX_LOCK_BYTES} bytes")));
        }
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(Self::default());
        }
        let text = std::str::from_utf8(bytes).map_err(|_| fault("the lock file is not UTF-8"))?;
        let mut options = yaml_options(MAX_LOCK_BYTES);
        options.duplicate_keys = serde_saphyr::DuplicateKeyPolicy::Error;
        let file: File = serde_saphyr::from_str_with_options(text, options)
            .map_err(|e| fault(format!("not a lock file: {e}")))?;
        if file.version != VERSION {
            return Err(fault(format!(
                "the lock file has version {}, this program reads {VERSION}",
                file.version
            )));
        }
        let mut lock = Self { vpcs: file.vpcs, ..Self::default() };
        let mut vnis = BTreeSet::new();
        if let Some(vni) = lock.vpcs.values().find(|v| !vnis.insert(**v)) {
            return Err(fault(format!("the lock file assigns VNI {vni} twice")));
        }
        let mut addresses = BTreeSet::new();
        for e in file.endpoints {
            if let Some(ip) = e.ips.iter().find(|ip| !addresses.insert((e.vpc.clone(), **ip))) {
                return Err(fault(format!("the lock file assigns {ip} of vpc {} twice", e.vpc)));
            }
            let key = EndpointKey { vpc: e.vpc, name: e.name };
            if lock.endpoints.insert(key.clone(), e.ips).is_some() {
                return Err(fault(format!("the lock file has endpoint {key} twice")));
            }
        }
        lock.released = file.released.into_iter().map(|r| ((r.vpc, r.ip), r.at)).collect();
        lock.released_vnis = file.released_vnis.into_iter().map(|r| (r.vni, r.at)).collect();
        Ok(lock)
    }

    /// The file's text; equal locks have equal texts.
    ///
    /// # Errors
    /// Never for values of these types; the serializer's signature says it could.
    pub fn to_yaml(&self) -> Result<String, Fault> {
        let entry = |(key, ips): (&EndpointKey, &Vec<IpAddr>)| Entry {
            vpc: key.vpc.clone(),
            name: key.name.clone(),
            ips: ips.clone(),
            mac: ips.first().map(|ip| Mac::derive(&key.vpc, *ip)),
        };
        let file = File {
            version: VERSION,
            vpcs: self.vpcs.clone(),
            endpoints: self.endpoints.iter().map(entry).collect(),
            released: self
                .released
                .iter()
                .map(|((vpc, ip), at)| Released { vpc: vpc.clone(), ip: *ip, at: *at })
                .collect(),
            released_vnis: self
                .released_vnis
                .iter()
                .map(|(vni, at)| ReleasedVni { vni: *vni, at: *at })
                .collect(),
        };
        serde_saphyr::to_string(&file).map(|body| format!("{HEADER}{body}")).map_err(|e| fault(e.to_string()))
    }
}
