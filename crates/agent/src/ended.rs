//! Ends what backends that are gone leave behind: connections, and UDP sockets that would wait for ever. Beside the core, which waits for none of it.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::thread;

use flowloom_compiler::EndedBackend;
use flowloom_datapath::View;
use flowloom_netlink::{Diag, Netns};

/// Protocol number of UDP.
const UDP: u8 = 17;

/// Starts a thread that ends everything through these services to these backends, in this namespace and in `namespaces`.
pub(crate) fn end(view: View, ended: Vec<EndedBackend>, namespaces: Vec<PathBuf>) {
    let work = move || match run(&view, &ended, &namespaces) {
        Ok((0, 0)) => {}
        Ok((connections, sockets)) => {
            tracing::info!(connections, sockets, "ended with their backends");
        }
        Err(e) => tracing::warn!(error = %e, "connections to backends that are gone stay until they expire"),
    };
    if let Err(e) = thread::Builder::new().name("ended".into()).spawn(work) {
        tracing::warn!(error = %e, "connections to backends that are gone stay until they expire");
    }
}

/// Connections and sockets ended.
fn run(view: &View, ended: &[EndedBackend], namespaces: &[PathBuf]) -> anyhow::Result<(u64, u64)> {
    let found = view.end_backends(ended)?;
    let mut count = 0;
    if found.sockets.is_empty() {
        return Ok((found.connections, count));
    }
    let gone: BTreeSet<(IpAddr, u16)> =
        ended.iter().filter(|e| e.protocol == UDP).map(|e| e.backend).collect();
    let own = std::iter::once(Diag::open());
    let others = namespaces.iter().map(|path| Diag::in_netns(&Netns::open(path)?));
    for diag in own.chain(others) {
        // A namespace that went meanwhile took its sockets with it.
        let Ok(mut diag) = diag else { continue };
        for socket in diag.connected_udp()? {
            let remote = (socket.remote.ip(), socket.remote.port());
            // The cookie says that it asked for the service; the address, that it still speaks to this backend.
            if found.sockets.contains(&socket.cookie) && gone.contains(&remote) {
                count += u64::from(diag.destroy(&socket)?);
            }
        }
    }
    Ok((found.connections, count))
}
