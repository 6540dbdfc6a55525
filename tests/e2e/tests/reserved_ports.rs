//! Ports of Services are kept from sockets that ask for any port.

use std::net::{SocketAddr, UdpSocket};

use anyhow::Result;
use flowloom_testkit::{PATIENCE, eventually};
use flowloom_tests_e2e::Lab;

const SETTING: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// Sockets of the node that ask for any port, until there is none left.
fn any_ports(lab: &Lab) -> Result<Vec<u16>> {
    lab.node(0).ns.run_in(|| {
        let any = SocketAddr::from(([0, 0, 0, 0], 0));
        let sockets: Vec<_> = (0..200).map_while(|_| UdpSocket::bind(any).ok()).collect();
        let mut ports = sockets.iter().map(|s| Ok(s.local_addr()?.port())).collect::<Result<Vec<_>>>()?;
        ports.sort_unstable();
        Ok(ports)
    })?
}

#[test]
fn no_socket_gets_a_port_of_services_and_what_was_reserved_before_stays() -> Result<()> {
    // Nobody answers there: the ports are reserved all the same.
    let mut lab = Lab::builder()
        .nodes(1)
        .config("kubernetes: {enabled: true, kubeconfig: /nowhere/kubeconfig, health_address: '', proxy_mode_address: ''}")
        .unready()
        .start()?;
    let reserved = |lab: &Lab| {
        Ok::<_, anyhow::Error>(lab.node(0).ns.exec_ok(&["cat", SETTING])?.stdout.trim().to_owned())
    };
    let wait_reserved = |lab: &Lab, wanted: &str| {
        eventually(PATIENCE, || match reserved(lab) {
            Ok(ports) if ports == wanted => Ok(()),
            other => Err(format!("{other:?}")),
        });
    };
    wait_reserved(&lab, "30000-32767,61000-65535");
    lab.agents[0].uninstall()?.success()?;
    assert_eq!(reserved(&lab)?, "");

    // What the administrator keeps is beside and within it, and sockets get ports on both sides of the ranges' ends.
    let ns = &lab.node(0).ns;
    ns.exec_ok(&["sysctl", "-w", "net.ipv4.ip_local_reserved_ports=8080,32760-32770"])?;
    ns.exec_ok(&["sysctl", "-w", "net.ipv4.ip_local_port_range=32700 32800"])?;
    let before = any_ports(&lab)?;
    assert!(before.contains(&32700) && before.len() == 90, "{before:?}");
    lab.agents[0].start()?;
    let both = "8080,30000-32770,61000-65535";
    wait_reserved(&lab, both);
    assert_eq!(any_ports(&lab)?, (32771..=32800).collect::<Vec<u16>>());
    // A second life knows what the first one did.
    lab.agents[0].kill()?;
    lab.agents[0].start()?;
    let client = lab.agents[0].client();
    eventually(PATIENCE, || client.health().map(drop));
    assert_eq!(reserved(&lab)?, both);
    lab.agents[0].uninstall()?.success()?;
    assert_eq!(reserved(&lab)?, "8080,32760-32770");
    assert_eq!(any_ports(&lab)?, before);

    // A list that the administrator wrote meanwhile is the administrator's, whatever is in it.
    lab.agents[0].start()?;
    wait_reserved(&lab, both);
    let set = "8080,9000,30000-32770";
    lab.node(0).ns.exec_ok(&["sysctl", "-w", &format!("net.ipv4.ip_local_reserved_ports={set}")])?;
    lab.agents[0].uninstall()?.success()?;
    assert_eq!(reserved(&lab)?, set);
    Ok(())
}
