//! The one allocator of a document: completes addresses and VNIs, stable from run to run. Without randomness: the lowest free value.
//!
//! What the document says wins; what the lock says stays while it is still right; the rest is assigned. MACs need no assignment: an endpoint that pins
//! none has [`crate::Mac::derive`] of its VPC and first address ([`crate::Endpoint::effective_mac`]).

mod lock;
mod pool;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

pub use self::lock::Lock;
pub use self::pool::{AddressPool, COOL_DOWN, PoolError, PoolStats};
use crate::ranges::{Family, Ranges, bits, net_bits};
use crate::{
    DEFAULT_VNI, Endpoint, EndpointKey, Fault, ObjectRef, Reason, Subnet, SubnetName, Timestamp, Vni,
    VpcName, World,
};

/// What [`allocate`] did.
#[derive(Clone, Debug)]
pub struct Allocation {
    /// The world, completed.
    pub world: World,
    /// The next lock: to be written before anything acts on `world`.
    pub lock: Lock,
    /// Objects that could not be completed.
    pub faults: Vec<Fault>,
}

/// Completes a validated world. Nothing changes when nothing has to: the second run returns the same lock.
#[must_use]
pub fn allocate(world: &World, lock: &Lock, now: Timestamp) -> Allocation {
    let mut out = Allocation { world: world.clone(), lock: Lock::default(), faults: Vec::new() };
    let resting = |at: &Timestamp| now.seconds_since(*at) < COOL_DOWN;
    number_vpcs(&mut out, lock, now);
    let released = lock.released.iter().filter(|(_, at)| resting(at));
    let mut cooling: BTreeMap<&VpcName, Vec<(IpAddr, Timestamp)>> = BTreeMap::new();
    released.for_each(|((vpc, ip), at)| cooling.entry(vpc).or_default().push((*ip, *at)));
    for (key, ip) in newly_released(world, lock) {
        cooling.entry(&key.vpc).or_default().push((ip, now));
    }
    address_endpoints(&mut out, world, lock, &cooling, now);

    out.lock = Lock::of(&out.world);
    let used: BTreeSet<Vni> = out.lock.vpcs.values().copied().collect();
    out.lock.released_vnis = lock
        .released_vnis
        .iter()
        .filter(|(v, at)| resting(at) && !used.contains(v))
        .map(|(v, at)| (*v, *at))
        .collect();
    out.lock.released_vnis.extend(lock.vpcs.values().filter(|v| !used.contains(v)).map(|v| (*v, now)));

    let used: BTreeSet<(&VpcName, IpAddr)> =
        out.lock.endpoints.iter().flat_map(|(k, ips)| ips.iter().map(|ip| (&k.vpc, *ip))).collect();
    let gone =
        cooling.into_iter().flat_map(|(vpc, list)| list.into_iter().map(move |(ip, at)| (vpc, ip, at)));
    let mut released: BTreeMap<(VpcName, IpAddr), Timestamp> = gone
        .filter(|(vpc, ip, _)| !used.contains(&(*vpc, *ip)))
        .map(|(vpc, ip, at)| ((vpc.clone(), ip), at))
        .collect();
    // An endpoint may have left an address by not being completed with it again.
    for (key, ips) in &lock.endpoints {
        for ip in ips.iter().filter(|ip| !used.contains(&(&key.vpc, **ip))) {
            released.entry((key.vpc.clone(), *ip)).or_insert(now);
        }
    }
    out.lock.released = released;
    out
}

/// Addresses of the lock whose endpoint is gone or has other addresses by the document now.
fn newly_released<'l>(world: &'l World, lock: &'l Lock) -> impl Iterator<Item = (&'l EndpointKey, IpAddr)> {
    lock.endpoints.iter().flat_map(move |(key, ips)| {
        let endpoint = world.endpoints.get(key);
        let home = endpoint.and_then(|e| world.subnets.get(&(e.vpc.clone(), e.subnet.clone())));
        let inside = move |ip: &IpAddr| home.is_some_and(|s| s.cidrs.iter().any(|n| n.contains(ip)));
        let left = move |ip: &&IpAddr| {
            endpoint.is_none_or(|e| if e.ips.is_empty() { !inside(ip) } else { !e.ips.contains(ip) })
        };
        ips.iter().filter(left).map(move |ip| (key, *ip))
    })
}

fn number_vpcs(out: &mut Allocation, lock: &Lock, now: Timestamp) {
    let mut used: BTreeSet<Vni> = out.world.vpcs.values().filter_map(|v| v.vni).collect();
    for vpc in out.world.vpcs.values_mut().filter(|v| v.vni.is_none()) {
        let kept = if vpc.name.is_default() { Some(DEFAULT_VNI) } else { lock.vpcs.get(&vpc.name).copied() };
        vpc.vni = kept.filter(|v| used.insert(*v));
    }
    // The default VPC's number stays free for it; released ones rest, and so does what the lock is about to release.
    let resting: BTreeSet<Vni> = lock
        .released_vnis
        .iter()
        .filter(|(_, at)| now.seconds_since(**at) < COOL_DOWN)
        .map(|(v, _)| *v)
        .chain(lock.vpcs.values().copied())
        .collect();
    let mut next = (2..=Vni::MAX).filter_map(Vni::new).filter(|v| !used.contains(v) && !resting.contains(v));
    for vpc in out.world.vpcs.values_mut().filter(|v| v.vni.is_none()) {
        vpc.vni = next.next();
        if vpc.vni.is_none() {
            let object = ObjectRef::Vpc(vpc.name.clone());
            let message = format!("no VNI is left for {object}");
            out.faults.push(
                Fault::new(Reason::VniExhausted, format!("{}.vni", object.path()), "", message).on(object),
            );
        }
    }
}

fn address_endpoints(
    out: &mut Allocation,
    world: &World,
    lock: &Lock,
    cooling: &BTreeMap<&VpcName, Vec<(IpAddr, Timestamp)>>,
    now: Timestamp,
) {
    let mut by_subnet: BTreeMap<(&VpcName, &SubnetName), Vec<&Endpoint>> = BTreeMap::new();
    for e in world.endpoints.values() {
        by_subnet.entry((&e.vpc, &e.subnet)).or_default().push(e);
    }
    for ((vpc, name), endpoints) in by_subnet {
        let Some(subnet) = world.subnets.get(&(vpc.clone(), name.clone())) else { continue };
        if endpoints.iter().all(|e| !e.ips.is_empty()) {
            continue;
        }
        let mut pools = SubnetPools::new(subnet, cooling.get(vpc).map_or(&[][..], Vec::as_slice));
        pools.keep(&endpoints, lock);
        for e in endpoints.iter().filter(|e| e.ips.is_empty()) {
            match pools.complete(&e.key(), now) {
                Ok(ips) => {
                    if let Some(e) = out.world.endpoints.get_mut(&e.key()) {
                        Arc::make_mut(e).ips = ips;
                    }
                }
                Err(error) => out.faults.push(exhausted(e, subnet, &error)),
            }
        }
    }
}

fn exhausted(e: &Endpoint, subnet: &Subnet, error: &PoolError) -> Fault {
    let (object, home) =
        (ObjectRef::Endpoint(e.key()), ObjectRef::Subnet(subnet.vpc.clone(), subnet.name.clone()));
    let hint = if subnet.node.is_some() || !subnet.cni_ranges.is_empty() {
        " (parts that nodes hand out to CNI attachments are not used for the document: give the endpoint an ip, or narrow cni_ranges)"
    } else {
        ""
    };
    let message = format!("{object} gets no address from {home}: {error}{hint}");
    Fault::new(Reason::AddressPoolExhausted, format!("{}.ips", object.path()), "", message)
        .on(object)
        .with(home)
}

/// The pools of a subnet, one per family.
struct SubnetPools<'w> {
    subnet: &'w Subnet,
    pools: Vec<AddressPool<EndpointKey>>,
}

impl<'w> SubnetPools<'w> {
    fn new(subnet: &'w Subnet, cooling: &[(IpAddr, Timestamp)]) -> Self {
        let pool = |net: &ipnet::IpNet| {
            let family = Family::of_net(net);
            let universe = Ranges::new(vec![net_bits(net)]).minus(&subnet.all_cni_parts(family));
            let mut pool = AddressPool::new(family, universe, subnet.barred(family, []));
            for (ip, at) in cooling.iter().filter(|(ip, _)| net.contains(ip)) {
                pool.cool(*ip, *at);
            }
            pool
        };
        Self { subnet, pools: subnet.cidrs.iter().map(pool).collect() }
    }

    /// First the document's addresses, then the lock's that are still right.
    fn keep(&mut self, endpoints: &[&Endpoint], lock: &Lock) {
        for e in endpoints {
            for ip in &e.ips {
                self.adopt(&e.key(), *ip);
            }
        }
        for e in endpoints.iter().filter(|e| e.ips.is_empty()) {
            let key = e.key();
            for ip in lock.endpoints.get(&key).into_iter().flatten() {
                let home = self.subnet.cidr(Family::of(*ip));
                if home.is_some_and(|n| n.contains(ip)) {
                    self.adopt(&key, *ip);
                }
            }
        }
    }

    fn adopt(&mut self, key: &EndpointKey, ip: IpAddr) {
        for pool in self.pools.iter_mut().filter(|p| p.family() == Family::of(ip) && !p.bars(ip)) {
            // Refused when another has it: validation has named a duplicate of the document, and the lock gives way.
            let _kept = pool.adopt(key, ip);
        }
    }

    /// One address per family, or none at all.
    fn complete(&mut self, key: &EndpointKey, now: Timestamp) -> Result<Vec<IpAddr>, PoolError> {
        self.pools.iter_mut().map(|p| p.acquire(key, now)).collect()
    }
}

/// Completes a world from a lock without assigning anything: what an agent does. What the lock does not know stays open and becomes a fault of its own.
#[must_use]
pub fn complete(world: &World, lock: &Lock) -> (World, Vec<Fault>) {
    let mut out = world.clone();
    let mut faults = Vec::new();
    let mut vnis: BTreeSet<Vni> = world.vpcs.values().filter_map(|v| v.vni).collect();
    for vpc in out.vpcs.values_mut().filter(|v| v.vni.is_none()) {
        let kept = if vpc.name.is_default() { Some(DEFAULT_VNI) } else { lock.vpcs.get(&vpc.name).copied() };
        vpc.vni = kept.filter(|v| vnis.insert(*v));
        if vpc.vni.is_none() {
            let object = ObjectRef::Vpc(vpc.name.clone());
            let message = format!("{object} waits for a VNI: run `flowloom apply`, which numbers it");
            faults.push(
                Fault::new(Reason::AwaitingVni, format!("{}.vni", object.path()), "", message).on(object),
            );
        }
    }
    let mut used: BTreeSet<(VpcName, IpAddr)> =
        world.endpoints.values().flat_map(|e| e.ips.iter().map(|ip| (e.vpc.clone(), *ip))).collect();
    let mut barred: BTreeMap<(&VpcName, &SubnetName, Family), Ranges> = BTreeMap::new();
    for (key, e) in out.endpoints.iter_mut().filter(|(_, e)| e.ips.is_empty()) {
        let Some(subnet) = world.subnets.get(&(e.vpc.clone(), e.subnet.clone())) else { continue };
        let locked = lock.endpoints.get(key).map_or(&[][..], Vec::as_slice);
        let mut may_have = |ip: &IpAddr| {
            let family = Family::of(*ip);
            let holes = barred
                .entry((&subnet.vpc, &subnet.name, family))
                .or_insert_with(|| subnet.barred(family, []));
            subnet.cidr(family).is_some_and(|n| n.contains(ip))
                && !holes.contains(bits(*ip))
                && !used.contains(&(key.vpc.clone(), *ip))
        };
        let right = !locked.is_empty() && locked.iter().all(&mut may_have);
        if right {
            Arc::make_mut(e).ips = locked.to_vec();
            used.extend(locked.iter().map(|ip| (key.vpc.clone(), *ip)));
        } else {
            let object = ObjectRef::Endpoint(key.clone());
            let message = format!("{object} waits for an address: run `flowloom apply`, which assigns one");
            faults.push(
                Fault::new(Reason::AwaitingAddress, format!("{}.ips", object.path()), "", message).on(object),
            );
        }
    }
    (out, faults)
}

#[cfg(test)]
mod tests;
