//! Ports that Services need for themselves are kept from sockets that ask for any port: a program's connection from a node
//! port would get no answers, they would go to the Service.
//!
//! Only what was not reserved before is taken back, and only while the setting is as this agent left it: a list that somebody wrote since is
//! theirs, whatever is in it. What was added, and what the list was before and after, is kept on disk for the boot that it was done in.

use flowloom_netlink::sysctl::{self, PortSet, PortSetError};
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::store::Store;
use crate::writes;

pub(crate) const FILE: &str = "reserved-ports.json";

/// What flowloom added.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Added {
    /// The setting does not outlive it.
    boot: String,
    ports: String,
    /// The whole list, before that and after.
    #[serde(default)]
    was: String,
    #[serde(default)]
    left: String,
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
    let (after, added) = plan(&there, &kept, &wanted, boot).map_err(|e| text(&e))?;
    // On disk before it is so: what nobody knows of would never be taken back.
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

/// The list as it shall be, and what to remember of that.
fn plan(
    there: &PortSet,
    kept: &Added,
    wanted: &PortSet,
    boot: String,
) -> Result<(PortSet, Added), PortSetError> {
    let theirs = theirs(there, Some(kept).filter(|k| k.boot == boot))?;
    let (after, ours) = (theirs.union(wanted), wanted.without(&theirs));
    let (ports, left) = (ours.to_string(), after.to_string());
    // Nothing to write: the memory of what was before the last write is as good as ever.
    let was = if after == *there && left == kept.left { kept.was.clone() } else { there.to_string() };
    Ok((after, Added { boot, ports, was, left }))
}

/// What of the list is not flowloom's.
fn theirs(there: &PortSet, kept: Option<&Added>) -> Result<PortSet, PortSetError> {
    let Some(kept) = kept else { return Ok(there.clone()) };
    let (ours, was, left) = (kept.ports.parse()?, kept.was.parse()?, kept.left.parse::<PortSet>()?);
    // As it was: the agent ended before it could write.
    if *there == left || *there == was {
        return Ok(left.without(&ours));
    }
    if !ours.common(there).is_empty() {
        tracing::warn!(ports = %there, "somebody set the reserved ports since: all of them stay when flowloom goes");
    }
    Ok(there.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> PortSet {
        text.parse().unwrap()
    }

    /// A start with this configuration (none: `uninstall`), one that dies before it writes the list, and somebody's own list.
    enum Then {
        Wants(&'static str),
        Dies(&'static str),
        Sets(&'static str),
    }
    use Then::{Dies, Sets, Wants};

    #[test]
    fn what_others_reserved_stays_and_what_was_ours_goes() {
        let cases: &[(&str, &[Then], &str)] = &[
            ("", &[Wants("30000-32767"), Wants("")], ""),
            ("8080", &[Wants("30000-32767"), Wants("30000-32767"), Wants("")], "8080"),
            // Partly or wholly somebody else's before.
            ("32000-33000", &[Wants("30000-32767"), Wants("")], "32000-33000"),
            ("30000-32767", &[Wants("30000-32767"), Wants("30000-32767"), Wants("")], "30000-32767"),
            // Another range.
            ("8080", &[Wants("30000-32767"), Wants("20000-20100"), Wants("")], "8080"),
            // It died before it could write, the first time or the second.
            ("8080", &[Dies("30000-32767"), Wants("30000-32767"), Wants("")], "8080"),
            ("8080", &[Wants("30000-32767"), Dies("20000-20100"), Wants("20000-20100"), Wants("")], "8080"),
            ("8080", &[Wants("30000-32767"), Dies(""), Wants("")], "8080"),
            // Somebody set it anew meanwhile: without ours, with ours among theirs, and ours alone.
            ("", &[Wants("30000-32767"), Sets("8080"), Wants("")], "8080"),
            ("", &[Wants("30000-32767"), Sets("8080,30000-32767"), Wants("")], "8080,30000-32767"),
            ("8080", &[Wants("30000-32767"), Sets("30000-32767"), Wants("")], "30000-32767"),
            (
                "8080",
                &[Wants("30000-32767"), Sets("30000-32767"), Wants("30000-32767"), Wants("")],
                "30000-32767",
            ),
            ("", &[Wants("30000-32767"), Sets("8080"), Wants("30000-32767"), Wants("")], "8080"),
        ];
        for (number, (before, steps, end)) in cases.iter().enumerate() {
            let (mut there, mut kept) = (set(before), Added::default());
            for step in *steps {
                if let Sets(list) = step {
                    there = set(list);
                    continue;
                }
                let (Wants(wanted) | Dies(wanted) | Sets(wanted)) = step;
                let (after, added) = plan(&there, &kept, &set(wanted), "boot".into()).unwrap();
                kept = added;
                if let Wants(_) = step {
                    assert_eq!(after.common(&set(wanted)), set(wanted), "case {number}");
                    there = after;
                    // A second start writes nothing.
                    assert_eq!(
                        plan(&there, &kept, &set(wanted), "boot".into()).unwrap(),
                        (there.clone(), kept.clone())
                    );
                }
            }
            assert_eq!(there, set(end), "case {number}");
        }
        // What an earlier boot added is not there any more: the same list is somebody's now.
        let (list, earlier) = (set("30000-32767"), Added::default());
        let (_, earlier) = plan(&PortSet::empty(), &earlier, &list, "earlier".into()).unwrap();
        assert_eq!(plan(&list, &earlier, &PortSet::empty(), "boot".into()).unwrap().0, list);
    }
}
