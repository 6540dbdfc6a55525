//! `type: loopback`: the container's own loopback device. Asks no agent.

use crate::config::RawConfig;
use crate::environment::{Attachment, Verb};
use crate::error::{CniError, code};
use crate::result::{AddResult, Interface, IpConfig};
use crate::sandbox::Sandbox;

/// The kernel's name of the device, whatever `CNI_IFNAME` says.
pub(crate) const DEVICE: &str = "lo";

pub(crate) fn serve(
    verb: Verb,
    raw: &RawConfig,
    attachment: &Attachment,
    sandbox: &dyn Sandbox,
) -> Result<String, CniError> {
    let netns = match &attachment.netns {
        Some(netns) => netns.as_str(),
        // Only DEL gets here without one: the namespace is gone, its loopback with it.
        None => return Ok(String::new()),
    };
    match verb {
        Verb::Del => {
            sandbox.set_loopback(netns, false)?;
            Ok(String::new())
        }
        Verb::Check => {
            let up = sandbox.interface(netns, DEVICE)?.is_some_and(|i| i.up);
            if up {
                Ok(String::new())
            } else {
                Err(CniError::new(code::CHECK_FAILED, format!("{DEVICE} in {netns} is down")))
            }
        }
        _ => {
            sandbox.set_loopback(netns, true)?;
            if let Some(prev) = raw.prev_result() {
                // In a list, what the plugins before it made is the result.
                let mut result = prev.clone();
                result["cniVersion"] = raw.version.as_str().into();
                return Ok(result.to_string());
            }
            let found = sandbox.interface(netns, DEVICE)?.unwrap_or_default();
            let result = AddResult {
                interfaces: vec![Interface {
                    name: DEVICE.to_owned(),
                    mac: "00:00:00:00:00:00".to_owned(),
                    mtu: None,
                    sandbox: netns.to_owned(),
                }],
                ips: found
                    .addresses
                    .into_iter()
                    .map(|address| IpConfig { address, gateway: None, interface: Some(0) })
                    .collect(),
                ..AddResult::default()
            };
            Ok(result.to_json(raw.version))
        }
    }
}
