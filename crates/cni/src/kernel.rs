//! [`Sandbox`] over netlink.

use flowloom_netlink::{Error, Handle, Link, LinkChange, LinkName, Netns};

use crate::error::{CniError, code};
use crate::loopback::DEVICE;
use crate::sandbox::{Sandbox, SandboxInterface};

/// The kernel's namespaces.
#[derive(Debug, Clone, Copy)]
pub struct KernelSandbox;

impl Sandbox for KernelSandbox {
    fn interface(&self, netns: &str, name: &str) -> Result<Option<SandboxInterface>, CniError> {
        let mut handle = open(netns).map_err(|e| failed(netns, name, &e))?;
        read(&mut handle, name).map_err(|e| failed(netns, name, &e))
    }

    fn set_loopback(&self, netns: &str, up: bool) -> Result<(), CniError> {
        let mut handle = match open(netns) {
            Err(Error::Missing { .. }) if !up => return Ok(()),
            other => other.map_err(|e| failed(netns, DEVICE, &e))?,
        };
        (|| {
            if let Some(link) = find(&mut handle, DEVICE)? {
                handle.ensure_link(link.index, &LinkChange { up: Some(up), ..LinkChange::default() })?;
            }
            Ok(())
        })()
        .map_err(|e| failed(netns, DEVICE, &e))
    }
}

fn open(netns: &str) -> Result<Handle, Error> {
    Handle::in_netns(&Netns::open(netns)?)
}

/// `None` also for a name that no interface can have.
fn find(handle: &mut Handle, name: &str) -> Result<Option<Link>, Error> {
    match LinkName::new(name) {
        Ok(name) => handle.link(&name),
        Err(_) => Ok(None),
    }
}

fn read(handle: &mut Handle, name: &str) -> Result<Option<SandboxInterface>, Error> {
    let Some(link) = find(handle, name)? else {
        return Ok(None);
    };
    let addresses = handle.addresses(Some(link.index))?.iter().map(|a| a.net.to_string()).collect();
    let mac = link.mac.map(|m| m.to_string()).unwrap_or_default();
    Ok(Some(SandboxInterface { mac, up: link.up, addresses }))
}

fn failed(netns: &str, name: &str, e: &Error) -> CniError {
    let mut causes = Vec::new();
    let mut cause = std::error::Error::source(e);
    while let Some(c) = cause {
        causes.push(c.to_string());
        cause = c.source();
    }
    CniError::new(code::IO, format!("interface {name} in {netns}: {e}")).with_details(causes.join(": "))
}
