//! The peer: reference plugins, a bridge per node, static routes between nodes.

use std::path::Path;

use anyhow::Result;
use flowloom_testkit::Cmd;
use serde_json::json;

use crate::addresses::POD_CIDRS;
use crate::files::{install as install_file, write_whole};
use crate::lab::{Lab, routes_to};
use crate::network;

/// Debian's `containernetworking-plugins`.
const PLUGINS: &str = "/usr/lib/cni";

pub(crate) fn install(lab: &Lab, cidrs: &[Vec<String>]) -> Result<()> {
    let nodes = lab.nodes()?;
    for node in &nodes {
        let own = &cidrs[usize::from(node.index()) - 1];
        for plugin in ["bridge", "host-local", "portmap", "loopback"] {
            install_file(&Path::new(PLUGINS).join(plugin), &node.dir().join("cni-bin").join(plugin))?;
        }
        let others = nodes.iter().filter(|o| o.index() != node.index());
        let routes: Vec<_> =
            others.flat_map(|o| routes_to(o.index(), &cidrs[usize::from(o.index()) - 1])).collect();
        network::add_routes(&lab.options.name, node.name(), &routes)?;
        masquerade(node.netns())?;
        let ranges: Vec<_> = own.iter().map(|subnet| json!([{"subnet": subnet}])).collect();
        let defaults: Vec<_> =
            own.iter().map(|c| json!({"dst": if c.contains(':') { "::/0" } else { "0.0.0.0/0" }})).collect();
        let conflist = json!({
            "cniVersion": "1.0.0", "name": "reference",
            "plugins": [
                {
                    "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
                    "ipam": {"type": "host-local", "ranges": ranges, "routes": defaults, "dataDir": "/run/cni-ipam"},
                },
                {"type": "portmap", "capabilities": {"portMappings": true}},
            ],
        });
        let file = node.dir().join("cni-conf/10-reference.conflist");
        write_whole(&file, &serde_json::to_string_pretty(&conflist)?)?;
    }
    Ok(())
}

/// What leaves the cluster leaves with the node's address.
fn masquerade(netns: &str) -> Result<()> {
    let [v4, v6] = POD_CIDRS;
    let rules = format!(
        "table inet reference {{\n  chain leave {{\n    type nat hook postrouting priority srcnat;\n    \
         oifname eth0 ip saddr {v4} ip daddr != {v4} masquerade\n    \
         oifname eth0 ip6 saddr {v6} ip6 daddr != {v6} masquerade\n  }}\n}}\n"
    );
    Cmd::new(&["ip", "netns", "exec", netns, "nft", "-f", "-"]).input(rules).run()?.success().map(drop)
}
