//! Ports that Services need for themselves are kept from sockets that ask for any port: a program's connection from a node
//! port would get no answers, they would go to the Service.
//!
//! Only what was not reserved before is taken back; what that was is kept on disk, for the boot that it was done in.

use flowloom_netlink::sysctl::{self, PortSet};
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::store::Store;
use crate::writes;

pub(crate) const FILE: &str = "reserved-ports.json";

/// What flowloom added.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Added {
    /// The setting does not outlive it.
    boot: String,
    ports: String,
}

/// Reserves what the configuration says, beside what is reserved. Services work without, so a refusal is only told.
pub(crate) fn take(config: &Config, store: &Store) {
    let wanted = match config.kubernetes.enabled {
        true => config.kubernetes.reserved_ports.as_str(),
        false => "",
    };
    if let Err(error) = change(store, wanted) {
        tracing::warn!(error, ports = wanted, "ports of Services are not kept from other sockets");
    }
}

/// Takes back what [`take`] added.
///
/// # Errors
/// What the kernel or the file system refuses.
pub(crate) fn give_back(store: &Store) -> Result<(), String> {
    change(store, "")
}

fn change(store: &Store, wanted: &str) -> Result<(), String> {
    let text = |e: &dyn std::error::Error| e.to_string();
    let wanted: PortSet = wanted.parse().map_err(|e| text(&e))?;
    let kept: Added = store.read(FILE).map_err(|e| text(&e))?.unwrap_or_default();
    if wanted.is_empty() && kept.ports.is_empty() {
        return Ok(());
    }
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(|e| text(&e))?;
    let there = sysctl::reserved_ports().map_err(|e| text(&e))?;
    let before = match kept.boot == boot {
        true => kept.ports.parse().map_err(|e| text(&e))?,
        false => PortSet::empty(),
    };
    let (after, ours) = plan(&there, &before, &wanted);
    // On disk before it is so: what nobody knows of would never be taken back.
    let added = Added { boot, ports: ours.to_string() };
    if added != kept {
        store.write(FILE, &added).map_err(|e| text(&e))?;
    }
    if after != there {
        writes::before("reserved ports");
        sysctl::set_reserved_ports(&after).map_err(|e| text(&e))?;
        writes::made(1);
    }
    Ok(())
}

/// What shall be reserved, and which of it is ours.
fn plan(there: &PortSet, before: &PortSet, wanted: &PortSet) -> (PortSet, PortSet) {
    let held = before.common(there);
    let theirs = there.without(&held);
    (theirs.union(wanted), wanted.without(&theirs))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> PortSet {
        text.parse().unwrap()
    }

    #[test]
    fn what_others_reserved_stays_and_what_was_ours_goes() {
        for (there, before, wanted, after, ours) in [
            ("", "", "30000-32767", "30000-32767", "30000-32767"),
            ("8080", "", "30000-32767", "8080,30000-32767", "30000-32767"),
            // Partly somebody else's.
            ("32000-33000", "", "30000-32767", "30000-33000", "30000-31999"),
            // A second start.
            ("8080,30000-32767", "30000-32767", "30000-32767", "8080,30000-32767", "30000-32767"),
            // Another range; none any more.
            ("8080,30000-32767", "30000-32767", "20000-20100", "8080,20000-20100", "20000-20100"),
            ("8080,30000-32767", "30000-32767", "", "8080", ""),
            // Somebody set it anew meanwhile.
            ("8080", "30000-32767", "30000-32767", "8080,30000-32767", "30000-32767"),
            ("8080", "30000-32767", "", "8080", ""),
        ] {
            let expected = (set(after), set(ours));
            assert_eq!(plan(&set(there), &set(before), &set(wanted)), expected, "{there} {before} {wanted}");
        }
    }
}
