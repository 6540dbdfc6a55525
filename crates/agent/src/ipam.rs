//! Addresses for CNI attachments, from the subnets and ranges that are bound to this node.

use std::collections::BTreeMap;
use std::net::IpAddr;

use flowloom_api::v1::{ApiError, CniAttachment, ErrorCode};
use flowloom_model::{
    AddressPool, Family, NodeName, PoolStats, Subnet, SubnetName, Timestamp, VpcName, World,
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
            let of_it = |e: &&std::sync::Arc<flowloom_model::Endpoint>| e.vpc == subnet.vpc && e.subnet == subnet.name;
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

    /// One address per family of a subnet of the VPC: of `wanted`, or of the first (by name) that has some free.
    ///
    /// # Errors
    /// [`ErrorCode::AddressesExhausted`], or [`ErrorCode::InvalidRequest`] when this node may allocate from none.
    pub(crate) fn acquire(
        &mut self,
        vpc: &VpcName,
        wanted: Option<&SubnetName>,
        owner: &CniAttachment,
        now: Timestamp,
    ) -> Result<(SubnetName, Vec<IpAddr>), ApiError> {
        let mut subnets: Vec<SubnetName> = self
            .pools
            .keys()
            .filter(|(v, name, _)| v == vpc && wanted.is_none_or(|w| w == name))
            .map(|(_, name, _)| name.clone())
            .collect();
        subnets.dedup();
        let Some(first) = subnets.first() else {
            let which = wanted
                .map_or_else(|| format!("no subnet of vpc {vpc}"), |w| format!("subnet {vpc}/{w} is not"));
            let message = format!(
                "{which} bound to this node; set the subnet's `node` or a `cni_ranges` entry in the document"
            );
            return Err(ApiError::new(ErrorCode::InvalidRequest, message));
        };
        let mut error =
            ApiError::new(ErrorCode::AddressesExhausted, format!("subnet {vpc}/{first} has no pool"));
        for subnet in subnets {
            match self.acquire_in(vpc, &subnet, owner, now) {
                Ok(ips) => return Ok((subnet, ips)),
                Err(e) => error = e,
            }
        }
        Err(error)
    }

    fn acquire_in(
        &mut self,
        vpc: &VpcName,
        subnet: &SubnetName,
        owner: &CniAttachment,
        now: Timestamp,
    ) -> Result<Vec<IpAddr>, ApiError> {
        let mut ips = Vec::new();
        for family in FAMILIES {
            let Some(pool) = self.pools.get_mut(&(vpc.clone(), subnet.clone(), family)) else { continue };
            match pool.acquire(owner, now) {
                Ok(ip) => ips.push(ip),
                Err(e) => {
                    self.release_in(vpc, subnet, owner, now);
                    return Err(ApiError::new(
                        ErrorCode::AddressesExhausted,
                        format!("subnet {vpc}/{subnet}: {e}"),
                    ));
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

    /// Counts of a pool; `None` when this node allocates nothing there.
    #[must_use]
    pub(crate) fn stats(&self, vpc: &VpcName, subnet: &SubnetName, family: Family) -> Option<PoolStats> {
        self.pools.get(&(vpc.clone(), subnet.clone(), family)).map(AddressPool::stats)
    }

    /// Free addresses of a VPC, all pools of the family that has least.
    #[must_use]
    pub(crate) fn available(&self, vpc: &VpcName) -> u64 {
        let of = |family: Family| {
            let pools: Vec<u128> = self
                .pools
                .iter()
                .filter(|((v, _, f), _)| v == vpc && *f == family)
                .map(|(_, p)| p.stats().available)
                .collect();
            (!pools.is_empty()).then(|| pools.into_iter().fold(0u128, u128::saturating_add))
        };
        let least = FAMILIES.into_iter().filter_map(of).min().unwrap_or(0);
        u64::try_from(least).unwrap_or(u64::MAX)
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
        let (subnet, ips) = ipam.acquire(&vpc, None, &owner("a"), Timestamp(0)).unwrap();
        assert_eq!(ips, vec!["10.0.0.2".parse::<IpAddr>().unwrap()]);
        let e = ipam.acquire(&vpc, None, &owner("b"), Timestamp(0)).unwrap_err();
        assert_eq!(e.code, ErrorCode::AddressesExhausted);
        ipam.release_in(&vpc, &subnet, &owner("b"), Timestamp(0));
        assert!(ipam.acquire(&vpc, None, &owner("b"), Timestamp(0)).is_err());
        ipam.release_in(&vpc, &subnet, &owner("a"), Timestamp(0));
        // Cooling down, and nothing else is free.
        assert_eq!(ipam.acquire(&vpc, None, &owner("b"), Timestamp(1)).unwrap().1, ips);
    }

    #[test]
    fn a_subnet_of_another_node_is_refused_with_what_to_do() {
        let mut ipam = Ipam::default();
        ipam.follow(&world("10.0.0.0/24"), &"n2".parse().unwrap(), std::iter::empty());
        let e = ipam.acquire(&"default".parse().unwrap(), None, &owner("a"), Timestamp(0)).unwrap_err();
        assert!(e.code == ErrorCode::InvalidRequest && e.message.contains("cni_ranges"), "{e}");
    }
}
