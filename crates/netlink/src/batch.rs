//! Several changes in one system call.

use crate::address::Address;
use crate::error::Result;
use crate::handle::Handle;
use crate::link::{LinkChange, delete_request};
use crate::neighbour::Neighbour;
use crate::route::Route;
use crate::socket::Request;
use crate::types::IfIndex;
use nix::errno::Errno;

/// Changes that are sent together and handled in order. The kernel goes on after one is refused: use it for what is
/// undone as a whole (a workload's fresh namespace), and the `ensure_*` functions for what is shared.
#[derive(Debug, Default)]
pub struct Batch {
    requests: Vec<Request>,
}

impl Batch {
    /// Empty.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Changes a link.
    #[must_use]
    pub fn link(mut self, index: IfIndex, change: &LinkChange) -> Self {
        self.requests.extend(change.requests(index));
        self
    }

    /// Adds an address; one that is there already counts as no write.
    #[must_use]
    pub fn address(mut self, address: &Address) -> Self {
        self.requests.push(address.add_request());
        self
    }

    /// Adds a route. One with the same destination, table and metric counts as no write, so this is for fresh
    /// namespaces only; elsewhere [`Handle::ensure_route`] compares.
    #[must_use]
    pub fn route(mut self, route: &Route) -> Self {
        self.requests.push(route.create_request(&[Errno::EEXIST]));
        self
    }

    /// Sets a permanent neighbour.
    #[must_use]
    pub fn neighbour(mut self, neighbour: &Neighbour) -> Self {
        self.requests.push(neighbour.replace_request());
        self
    }

    /// Deletes a link; one that is gone already counts as no write.
    #[must_use]
    pub fn delete_link(mut self, index: IfIndex) -> Self {
        self.requests.push(delete_request(index));
        self
    }
}

impl Handle {
    /// Sends the batch; returns how many of its requests changed something.
    ///
    /// # Errors
    /// The first refusal, after all were handled.
    pub fn apply(&mut self, batch: Batch) -> Result<usize> {
        Ok(self.transact(batch.requests)?.iter().filter(|a| a.wrote).count())
    }
}
