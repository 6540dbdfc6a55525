//! The addresses of one range and one family: who holds which, and which is next.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use crate::ranges::{Family, Ranges, bits};
use crate::{NodeName, Subnet, Timestamp};

/// How long a released address rests while others are free, seconds.
pub const COOL_DOWN: u64 = 60;

/// Why an address was not handed out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// Nothing is left.
    #[error("no {family} address is free: {stats}; release some, or exclude less")]
    Exhausted {
        /// The pool's family.
        family: Family,
        /// Its counts.
        stats: PoolStats,
    },
    /// Someone else has it.
    #[error("{address} is in use by {owner}")]
    InUse {
        /// The address asked for.
        address: IpAddr,
        /// Who holds it.
        owner: String,
    },
    /// Never used, not even when asked for by name.
    #[error("{address} is excluded or reserved; choose another, or change exclude_cidrs")]
    Excluded {
        /// The address asked for.
        address: IpAddr,
    },
    /// Not in the range.
    #[error("{address} is outside the range")]
    OutOfRange {
        /// The address asked for.
        address: IpAddr,
    },
    /// One owner holds one address.
    #[error("{owner} holds {address} already; release it first")]
    OwnerHolds {
        /// The owner.
        owner: String,
        /// What it holds.
        address: IpAddr,
    },
}

/// Counts of a pool. `size = excluded + used + available`; a used address inside an exclusion counts as excluded only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolStats {
    /// Addresses of the range.
    pub size: u128,
    /// Of which excluded, reserved or the gateway's.
    pub excluded: u128,
    /// Of which held by an owner.
    pub used: u128,
    /// The rest.
    pub available: u128,
    /// Of the available, released so lately that others go first.
    pub cooling: u128,
}

impl fmt::Display for PoolStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} addresses, {} excluded, {} used, {} available",
            self.size, self.excluded, self.used, self.available
        )
    }
}

/// Addresses handed out to owners, lowest free first. Sparse: a /64 costs what is used of it.
///
/// One owner holds one address of the pool; a token per attachment makes the owner. Every operation costs O(log n).
#[derive(Clone, Debug)]
pub struct AddressPool<O> {
    family: Family,
    universe: Ranges,
    closed: Ranges,
    /// Everything that is not free: outside, excluded, used or cooling. Disjoint, and never adjacent, so the address behind one is free.
    taken: BTreeMap<u128, u128>,
    holders: BTreeMap<u128, O>,
    owners: BTreeMap<O, u128>,
    cooling: BTreeMap<u128, Timestamp>,
    queue: BTreeSet<(Timestamp, u128)>,
}

impl<O: Ord + Clone + fmt::Display> AddressPool<O> {
    /// What a node's agent may hand out of a subnet to CNI attachments; `None` when that is nothing. `reserved` are addresses that endpoints of the document have.
    pub fn for_node(
        subnet: &Subnet,
        node: &NodeName,
        family: Family,
        reserved: impl IntoIterator<Item = IpAddr>,
    ) -> Option<Self> {
        let universe = subnet.cni_parts(node, family);
        (!universe.parts().is_empty()).then(|| Self::new(family, universe, subnet.barred(family, reserved)))
    }

    pub(crate) fn new(family: Family, universe: Ranges, closed: Ranges) -> Self {
        let mut pool = Self {
            family,
            universe,
            closed,
            taken: BTreeMap::new(),
            holders: BTreeMap::new(),
            owners: BTreeMap::new(),
            cooling: BTreeMap::new(),
            queue: BTreeSet::new(),
        };
        pool.rebuild();
        pool
    }

    /// The subnet changed: takes over its ranges and exclusions, and keeps every address that is held. `false` when the node has no part of it any more.
    pub fn reconfigure(
        &mut self,
        subnet: &Subnet,
        node: &NodeName,
        reserved: impl IntoIterator<Item = IpAddr>,
    ) -> bool {
        self.universe = subnet.cni_parts(node, self.family);
        self.closed = subnet.barred(self.family, reserved);
        self.rebuild();
        !self.universe.parts().is_empty()
    }

    fn rebuild(&mut self) {
        let open = self.universe.minus(&self.closed);
        let all = Ranges::new(vec![(0, u128::MAX)]);
        self.taken = all.minus(&open).parts().iter().copied().collect();
        let points: Vec<u128> = self.holders.keys().chain(self.cooling.keys()).copied().collect();
        points.into_iter().for_each(|x| self.take(x));
    }

    /// The pool's family.
    #[must_use]
    pub fn family(&self) -> Family {
        self.family
    }

    /// The owner's address: the one it has, or the lowest free one. Released addresses rest for [`COOL_DOWN`] while others are free.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`].
    pub fn acquire(&mut self, owner: &O, now: Timestamp) -> Result<IpAddr, PoolError> {
        if let Some(&held) = self.owners.get(owner) {
            return Ok(self.family.address(held));
        }
        self.warm_up(now);
        let coolest = || self.queue.iter().map(|&(_, x)| x).find(|&x| self.is_open(x));
        let Some(x) = self.first_free().or_else(coolest) else {
            return Err(PoolError::Exhausted { family: self.family, stats: self.stats() });
        };
        self.hold(owner, x);
        Ok(self.family.address(x))
    }

    /// One address, asked for by name. The same owner may ask again.
    ///
    /// # Errors
    /// When it is held by another, excluded or outside, or the owner holds a different one.
    pub fn acquire_address(&mut self, owner: &O, address: IpAddr) -> Result<(), PoolError> {
        let x = self.own_bits(address)?;
        self.check_owner(owner, address, x)?;
        if self.owners.get(owner) == Some(&x) {
            return Ok(());
        }
        if !self.universe.contains(x) {
            return Err(PoolError::OutOfRange { address });
        }
        if self.closed.contains(x) {
            return Err(PoolError::Excluded { address });
        }
        self.hold(owner, x);
        Ok(())
    }

    /// Records an address that is in use already, wherever it lies: a restored workload keeps its address though the subnet excludes it now.
    ///
    /// # Errors
    /// When another holds it, or the owner holds a different one.
    pub fn adopt(&mut self, owner: &O, address: IpAddr) -> Result<(), PoolError> {
        let x = self.own_bits(address)?;
        self.check_owner(owner, address, x)?;
        self.hold(owner, x);
        Ok(())
    }

    /// Records that an address was released at a time.
    pub fn cool(&mut self, address: IpAddr, released: Timestamp) {
        let Ok(x) = self.own_bits(address) else { return };
        if !self.holders.contains_key(&x) {
            self.start_cooling(x, released);
        }
    }

    /// Gives back what the owner holds; nothing when it holds nothing. No one else can.
    pub fn release(&mut self, owner: &O, now: Timestamp) -> Option<IpAddr> {
        let x = self.owners.remove(owner)?;
        self.holders.remove(&x);
        self.start_cooling(x, now);
        Some(self.family.address(x))
    }

    /// Who holds an address.
    #[must_use]
    pub fn owner(&self, address: IpAddr) -> Option<&O> {
        self.own_bits(address).ok().and_then(|x| self.holders.get(&x))
    }

    /// What an owner holds.
    #[must_use]
    pub fn held_by(&self, owner: &O) -> Option<IpAddr> {
        self.owners.get(owner).map(|&x| self.family.address(x))
    }

    /// Every held address with its owner, in order of addresses.
    pub fn held(&self) -> impl Iterator<Item = (IpAddr, &O)> {
        self.holders.iter().map(|(&x, o)| (self.family.address(x), o))
    }

    /// Released addresses that others go before, with the seconds they rest still.
    pub fn cooling(&self, now: Timestamp) -> impl Iterator<Item = (IpAddr, u64)> {
        let left = move |at: Timestamp| COOL_DOWN.saturating_sub(now.seconds_since(at));
        let resting = self.cooling.iter().map(move |(&x, &at)| (self.family.address(x), left(at)));
        resting.filter(|(ip, left)| *left > 0 && !self.bars(*ip))
    }

    /// Counts.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let size = self.universe.count();
        let open = self.universe.minus(&self.closed).count();
        let used = self.holders.keys().filter(|&&x| self.is_open(x)).count() as u128;
        let cooling = self.cooling.keys().filter(|&&x| self.is_open(x)).count() as u128;
        PoolStats { size, excluded: size - open, used, available: open - used, cooling }
    }

    /// Whether the address is excluded, reserved or the gateway's.
    #[must_use]
    pub fn bars(&self, address: IpAddr) -> bool {
        self.own_bits(address).is_ok_and(|x| self.closed.contains(x))
    }

    fn own_bits(&self, address: IpAddr) -> Result<u128, PoolError> {
        if Family::of(address) == self.family {
            Ok(bits(address))
        } else {
            Err(PoolError::OutOfRange { address })
        }
    }

    fn is_open(&self, x: u128) -> bool {
        self.universe.contains(x) && !self.closed.contains(x)
    }

    fn check_owner(&self, owner: &O, address: IpAddr, x: u128) -> Result<(), PoolError> {
        if let Some(other) = self.holders.get(&x).filter(|o| *o != owner) {
            return Err(PoolError::InUse { address, owner: other.to_string() });
        }
        match self.owners.get(owner) {
            Some(&held) if held != x => {
                Err(PoolError::OwnerHolds { owner: owner.to_string(), address: self.family.address(held) })
            }
            _ => Ok(()),
        }
    }

    fn hold(&mut self, owner: &O, x: u128) {
        if let Some(at) = self.cooling.remove(&x) {
            self.queue.remove(&(at, x));
        }
        self.holders.insert(x, owner.clone());
        self.owners.insert(owner.clone(), x);
        self.take(x);
    }

    fn start_cooling(&mut self, x: u128, at: Timestamp) {
        if let Some(earlier) = self.cooling.insert(x, at) {
            self.queue.remove(&(earlier, x));
        }
        self.queue.insert((at, x));
        self.take(x);
    }

    /// Frees what has rested long enough.
    fn warm_up(&mut self, now: Timestamp) {
        while let Some(&(at, x)) = self.queue.first() {
            if now.seconds_since(at) < COOL_DOWN {
                break;
            }
            self.queue.pop_first();
            self.cooling.remove(&x);
            if self.is_open(x) {
                self.give(x);
            }
        }
    }

    fn first_free(&self) -> Option<u128> {
        // What lies before the range is taken as well, so the first gap is the lowest free address.
        match self.taken.first_key_value() {
            Some((&0, &end)) => end.checked_add(1),
            _ => Some(0),
        }
    }

    fn take(&mut self, x: u128) {
        let (mut start, mut end) = (x, x);
        if let Some((&a, &b)) = self.taken.range(..=x).next_back() {
            if b >= x {
                return;
            }
            if b + 1 == x {
                start = a;
            }
        }
        if let Some(next) = x.checked_add(1)
            && let Some(b) = self.taken.remove(&next)
        {
            end = b;
        }
        self.taken.insert(start, end);
    }

    fn give(&mut self, x: u128) {
        let Some((&a, &b)) = self.taken.range(..=x).next_back() else { return };
        if b < x {
            return;
        }
        self.taken.remove(&a);
        if a < x {
            self.taken.insert(a, x - 1);
        }
        if x < b {
            self.taken.insert(x + 1, b);
        }
    }
}

#[cfg(test)]
mod tests;
