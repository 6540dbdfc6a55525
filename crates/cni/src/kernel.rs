//! [`Sandbox`] over netlink.

use crate::error::CniError;
use crate::sandbox::{Sandbox, SandboxInterface};

/// The kernel's namespaces.
#[derive(Debug, Clone, Copy)]
pub struct KernelSandbox;

impl Sandbox for KernelSandbox {
    fn interface(&self, _netns: &str, _name: &str) -> Result<Option<SandboxInterface>, CniError> {
        Err(CniError::new(crate::error::code::IO, "not yet"))
    }

    fn set_loopback(&self, _netns: &str, _up: bool) -> Result<(), CniError> {
        Err(CniError::new(crate::error::code::IO, "not yet"))
    }
}
