//! Addresses for CNI attachments, from the subnets and ranges that are bound to this node.

use std::collections::BTreeMap;
use std::net::IpAddr;

use flowloom_api::v1::{ApiError, CniAttachment, ErrorCode};
use flowloom_model::{
    AddressPool, Family, NodeName, PoolError, PoolStats, Subnet, SubnetName, Timestamp, VpcName, World,
};

use crate::record::Record;

type PoolKey = (VpcName, SubnetName, Family);

/// The pools of this node. The owner of an address is the attachment.
#[derive(Debug, Default)]
pub(crate) struct Ipam {
    pools: BTreeMap<PoolKey, AddressPool<CniAttachment>>,
}

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

impl Ipam {
    /// Takes over the document's subnets and the addresses in it, and what the attachments hold.
    pub(crate) fn follow<'a>(
        &mut self,
        world: &World,
        node: &NodeName,
        records: impl Iterator<Item = &'a Record>,
    ) {
        let reserved = |subnet: &Subnet| -> Vec<IpAddr> {
            let of_it = |e: &&std::sync::Arc<flowloom_model::Endpoint>| {
                e.vpc == subnet.vpc && e.subnet == subnet.name
            };
            world.endpoints.values().filter(of_it).flat_map(|e| e.ips.iter().copied()).collect()
        };
        self.pools.retain(|(vpc, name, _), _| world.subnets.contains_key(&(vpc.clone(), name.clone())));
        for subnet in world.subnets.values() {
            if subnet.node.as_ref() != Some(node) && !subnet.cni_ranges.iter().any(|r| r.node == *node) {
                for family in FAMILIES {
                    self.pools.remove(&(subnet.vpc.clone(), subnet.name.clone(), family));
                }
                continue;
            }
            let taken = reserved(subnet);
            for family in FAMILIES {
                let key = (subnet.vpc.clone(), subnet.name.clone(), family);
                let of_family = taken.iter().copied().filter(|ip| Family::of(*ip) == family);
                if let Some(pool) = self.pools.get_mut(&key) {
                    if !pool.reconfigure(subnet, node, of_family) {
                        self.pools.remove(&key);
                    }
                } else if let Some(pool) = AddressPool::for_node(subnet, node, family, of_family) {
                    self.pools.insert(key, pool);
                }
            }
        }
        for record in records {
            let Some(cni) = &record.cni else { continue };
            let Some(own) = &cni.endpoint else { continue };
            for ip in &own.ips {
                let key = (record.key.vpc.clone(), own.subnet.clone(), Family::of(*ip));
                if let Some(pool) = self.pools.get_mut(&key)
                    && let Err(e) = pool.adopt(&cni.attachment, *ip)
                {
                    tracing::error!(endpoint = %record.key, error = %e, "two attachments claim one address");
                }
            }
        }
    }

    /// Whether this node allocates from a subnet.
    pub(crate) fn serves(&self, vpc: &VpcName, subnet: &SubnetName) -> bool {
        FAMILIES.iter().any(|family| self.pools.contains_key(&(vpc.clone(), subnet.clone(), *family)))
    }

    /// Names of the VPC's subnets that this node may allocate from: `wanted`, or all.
    fn bound(&self, vpc: &VpcName, wanted: Option<&SubnetName>) -> Result<Vec<SubnetName>, ApiError> {
        let mut subnets: Vec<SubnetName> = self
            .pools
            .keys()
            .filter(|(v, name, _)| v == vpc && wanted.is_none_or(|w| w == name))
            .map(|(_, name, _)| name.clone())
            .collect();
        subnets.dedup();
        if !subnets.is_empty() {
            return Ok(subnets);
        }
        let which = wanted
            .map_or_else(|| format!("no subnet of vpc {vpc} is"), |w| format!("subnet {vpc}/{w} is not"));
        let message = format!(
            "{which} bound to this node; set the subnet's `node` or a `cni_ranges` entry in the document"
        );
        Err(ApiError::new(ErrorCode::InvalidRequest, message))
    }

    /// One address per family of a subnet of the VPC: of `wanted`, or of the first (by name) that has some free and holds the
    /// addresses in `asked`, at most one of each family.
    ///
    /// # Errors
    /// [`ErrorCode::AddressesExhausted`]; [`ErrorCode::InvalidRequest`] when this node may allocate from none, or not what is asked
    /// for; [`ErrorCode::InUse`] when another has that.
    pub(crate) fn acquire(
        &mut self,
        vpc: &VpcName,
        wanted: Option<&SubnetName>,
        asked: &[IpAddr],
        owner: &CniAttachment,
        now: Timestamp,
    ) -> Result<(SubnetName, Vec<IpAddr>), ApiError> {
        let subnets = self.bound(vpc, wanted)?;
        let first = &subnets[0];
        let mut error =
            ApiError::new(ErrorCode::AddressesExhausted, format!("subnet {vpc}/{first} has no pool"));
        for subnet in subnets {
            match self.acquire_in(vpc, &subnet, asked, owner, now) {
                Ok(ips) => return Ok((subnet, ips)),
                // What somebody has says more than where it does not lie.
                Err(e) if error.code == ErrorCode::InUse && e.code != ErrorCode::InUse => {}
                Err(e) => error = e,
            }
        }
        Err(error)
    }

    fn acquire_in(
        &mut self,
        vpc: &VpcName,
        subnet: &SubnetName,
        asked: &[IpAddr],
        owner: &CniAttachment,
        now: Timestamp,
    ) -> Result<Vec<IpAddr>, ApiError> {
        let mut ips = Vec::new();
        for family in FAMILIES {
            let named = asked.iter().copied().find(|ip| Family::of(*ip) == family);
            let result = match (self.pools.get_mut(&(vpc.clone(), subnet.clone(), family)), named) {
                (Some(pool), Some(ip)) => pool.acquire_address(owner, ip).map(|()| ip),
                (Some(pool), None) => pool.acquire(owner, now),
                (None, Some(address)) => Err(PoolError::OutOfRange { address }),
                (None, None) => continue,
            };
            match result {
                Ok(ip) => ips.push(ip),
                Err(e) => {
                    self.release_in(vpc, subnet, owner, now);
                    let code = match e {
                        PoolError::Exhausted { .. } => ErrorCode::AddressesExhausted,
                        PoolError::InUse { .. } | PoolError::OwnerHolds { .. } => ErrorCode::InUse,
                        _ => ErrorCode::InvalidRequest,
                    };
                    return Err(ApiError::new(code, format!("subnet {vpc}/{subnet}: {e}")));
                }
            }
        }
        Ok(ips)
    }

    /// Gives back what the attachment holds in a subnet.
    pub(crate) fn release_in(
        &mut self,
        vpc: &VpcName,
        subnet: &SubnetName,
        owner: &CniAttachment,
        now: Timestamp,
    ) {
        for family in FAMILIES {
            if let Some(pool) = self.pools.get_mut(&(vpc.clone(), subnet.clone(), family)) {
                pool.release(owner, now);
            }
        }
    }

    /// Released addresses of a pool that rest, with the seconds that are left.
    pub(crate) fn cooling(
        &self,
        vpc: &VpcName,
        subnet: &SubnetName,
        family: Family,
        now: Timestamp,
    ) -> Vec<(IpAddr, u64)> {
        let pool = self.pools.get(&(vpc.clone(), subnet.clone(), family));
        pool.map_or_else(Vec::new, |pool| pool.cooling(now).collect())
    }

    /// Counts of a pool; `None` when this node allocates nothing there.
    #[must_use]
    pub(crate) fn stats(&self, vpc: &VpcName, subnet: &SubnetName, family: Family) -> Option<PoolStats> {
        self.pools.get(&(vpc.clone(), subnet.clone(), family)).map(AddressPool::stats)
    }

    /// How many attachments can get their addresses from a VPC's subnets (`wanted`, or all) on this node, saturating.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`] when this node may allocate from none.
    pub(crate) fn grantable(&self, vpc: &VpcName, wanted: Option<&SubnetName>) -> Result<u64, ApiError> {
        let of_subnet = |subnet: &SubnetName| {
            let pools = FAMILIES.iter().filter_map(|f| self.pools.get(&(vpc.clone(), subnet.clone(), *f)));
            pools.map(|p| p.stats().available).min().unwrap_or(0)
        };
        let all = self.bound(vpc, wanted)?.iter().map(of_subnet).fold(0u128, u128::saturating_add);
        Ok(u64::try_from(all).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use flowloom_model::Format;

    use super::*;

    fn world(cidr: &str) -> World {
        let text = format!(
            "version: 1\nnodes: [{{name: n1, address: 192.0.2.1}}]\nsubnets: [{{name: pods, vpc: default, cidr: {cidr}, node: n1}}]\n"
        );
        flowloom_model::parse(text.as_bytes(), Format::Yaml).map_err(|f| format!("{f:?}")).unwrap().world
    }

    fn owner(id: &str) -> CniAttachment {
        CniAttachment { container_id: id.into(), ifname: "eth0".into() }
    }

    #[test]
    fn an_address_is_given_back_by_its_owner_only_and_the_last_one_goes_out_again() {
        let (vpc, node): (VpcName, NodeName) = ("default".parse().unwrap(), "n1".parse().unwrap());
        let mut ipam = Ipam::default();
        ipam.follow(&world("10.0.0.0/30"), &node, std::iter::empty());
        // .0 and .3 are reserved, .1 is the gateway: one is left.
        let (subnet, ips) = ipam.acquire(&vpc, None, &[], &owner("a"), Timestamp(0)).unwrap();
        assert_eq!(ips, vec!["10.0.0.2".parse::<IpAddr>().unwrap()]);
        let e = ipam.acquire(&vpc, None, &[], &owner("b"), Timestamp(0)).unwrap_err();
        assert_eq!(e.code, ErrorCode::AddressesExhausted);
        ipam.release_in(&vpc, &subnet, &owner("b"), Timestamp(0));
        assert!(ipam.acquire(&vpc, None, &[], &owner("b"), Timestamp(0)).is_err());
        ipam.release_in(&vpc, &subnet, &owner("a"), Timestamp(0));
        // Cooling down, and nothing else is free.
        assert_eq!(ipam.acquire(&vpc, None, &[], &owner("b"), Timestamp(1)).unwrap().1, ips);
    }

    #[test]
    fn a_subnet_of_another_node_is_refused_with_what_to_do() {
        let mut ipam = Ipam::default();
        ipam.follow(&world("10.0.0.0/24"), &"n2".parse().unwrap(), std::iter::empty());
        let e = ipam.acquire(&"default".parse().unwrap(), None, &[], &owner("a"), Timestamp(0)).unwrap_err();
        assert!(e.code == ErrorCode::InvalidRequest && e.message.contains("cni_ranges"), "{e}");
    }

    #[test]
    fn an_address_asked_for_by_name_is_given_once_and_the_other_family_follows() {
        let (vpc, node): (VpcName, NodeName) = ("default".parse().unwrap(), "n1".parse().unwrap());
        let text = "version: 1\nnodes: [{name: n1, address: 192.0.2.1}]\nsubnets:\n- {name: a, vpc: default, cidr: 10.0.0.0/24, node: n1}\n- {name: b, vpc: default, cidrs: [10.0.1.0/24, 'fd00::/64'], node: n1}\n";
        let world =
            flowloom_model::parse(text.as_bytes(), Format::Yaml).map_err(|f| format!("{f:?}")).unwrap().world;
        let mut ipam = Ipam::default();
        ipam.follow(&world, &node, std::iter::empty());
        let asked: Vec<IpAddr> = vec!["10.0.1.9".parse().unwrap()];
        let (subnet, ips) = ipam.acquire(&vpc, None, &asked, &owner("x"), Timestamp(0)).unwrap();
        assert_eq!((subnet.as_str(), ips.len(), ips[0]), ("b", 2, asked[0]));
        // For its own owner it is no other's.
        assert_eq!(ipam.acquire(&vpc, None, &asked, &owner("x"), Timestamp(0)).unwrap().1, ips);
        let refused = |ipam: &mut Ipam, ip: &str| {
            ipam.acquire(&vpc, None, &[ip.parse().unwrap()], &owner("y"), Timestamp(0)).unwrap_err().code
        };
        assert_eq!(refused(&mut ipam, "10.0.1.9"), ErrorCode::InUse);
        assert_eq!(refused(&mut ipam, "10.0.1.1"), ErrorCode::InvalidRequest, "the gateway's");
        assert_eq!(refused(&mut ipam, "10.9.9.9"), ErrorCode::InvalidRequest);
        // What is refused holds nothing.
        assert_eq!(ipam.grantable(&vpc, Some(&subnet)).unwrap(), 252);
    }
}
