//! Leaves nothing behind: devices, namespaces, routes, tables, links, maps, state.

use std::fs;
use std::os::unix::net::UnixStream;

use anyhow::{Result, bail};

use crate::config::Config;
use crate::keeper;
use crate::record::Record;
use crate::reserve;
use crate::store::Store;
use crate::wiring::{Host, Wire, Wiring};

/// Goes on after errors and tells them all.
///
/// # Errors
/// When an agent still runs, or with everything that could not be removed.
pub(crate) fn uninstall(config: &Config) -> Result<()> {
    if UnixStream::connect(&config.socket).is_ok() {
        bail!("an agent runs on {}; stop it first", config.socket.display());
    }
    // First: no runtime starts another container meanwhile.
    let mut errors: Vec<String> = keeper::remove(config);
    let store = if config.state_dir.is_dir() { Some(Store::open(&config.state_dir)?) } else { None };
    let mut host = Host::open(&config.masquerade.table, &config.overlay_device)?;
    if let Some(store) = &store {
        if let Err(e) = reserve::give_back(store) {
            errors.push(format!("reserved ports: {e}"));
        }
        let (records, damaged) = store.endpoints::<Record>()?;
        errors.extend(damaged.iter().map(ToString::to_string));
        for record in records {
            // Somebody's own device goes back to its owner as it is, without programs.
            if matches!(record.wire, Wire::Device { .. }) {
                continue;
            }
            if let Err(e) = host.unwire(&record.wire) {
                errors.push(format!("endpoint {}: {e}", record.key));
            }
        }
    }
    if let Err(list) = host.purge() {
        errors.extend(list.iter().map(ToString::to_string));
    }
    if let Err(e) = flowloom_datapath::uninstall(&config.pin_root) {
        errors.push(e.to_string());
    }
    // A dead socket.
    let _ = fs::remove_file(&config.socket);
    if errors.is_empty()
        && let Some(store) = store
        && let Err(e) = store.destroy()
    {
        errors.push(e.to_string());
    }
    if !errors.is_empty() {
        bail!("not everything could be removed:\n  {}", errors.join("\n  "));
    }
    Ok(())
}
