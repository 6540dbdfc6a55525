//! What the CNI plugin itself does and sees in a container's namespace.
#![expect(clippy::unwrap_used, reason = "helpers of tests, outside test functions")]

use anyhow::Result;
use flowloom_cni::KernelSandbox;
use flowloom_cni::error::code;
use flowloom_cni::sandbox::Sandbox;
use flowloom_netlink::{Address, LinkChange, LinkName};
use flowloom_testkit::{Cmd, Ns};

fn path(ns: &Ns) -> String {
    ns.path().to_str().unwrap().to_owned()
}

#[test]
fn loopback_goes_up_and_down_and_nothing_else_changes() -> Result<()> {
    let ns = Ns::new("cnilo")?;
    let netns = path(&ns);
    let links = |ns: &Ns| -> Result<Vec<(String, bool)>> {
        Ok(ns.handle()?.links()?.into_iter().map(|l| (l.name, l.up)).collect())
    };
    let before = links(&ns)?;
    for up in [false, false, true, true] {
        KernelSandbox.set_loopback(&netns, up)?;
        let lo = KernelSandbox.interface(&netns, "lo")?.unwrap();
        assert_eq!(lo.up, up);
    }
    assert_eq!(links(&ns)?, before);
    assert_eq!(KernelSandbox.interface(&netns, "lo")?.unwrap().addresses, ["127.0.0.1/8", "::1/128"]);
    Ok(())
}

#[test]
fn check_sees_mac_state_and_every_address() -> Result<()> {
    let ns = Ns::new("cnichk")?;
    let netns = path(&ns);
    let make = "ip link add eth0 address 02:00:00:00:00:05 type veth peer name p0";
    Cmd::new(&make.split(' ').collect::<Vec<_>>()).in_netns(&ns)?.run()?.success()?;
    let mut handle = ns.handle()?;
    let link = handle.link(&LinkName::new("eth0")?)?.unwrap();
    for net in ["10.0.0.5/24", "fd00::5/64"] {
        handle.ensure_address(&Address::new(link.index, net.parse()?))?;
    }
    let down = KernelSandbox.interface(&netns, "eth0")?.unwrap();
    assert!(!down.up);
    handle.change_link(link.index, &LinkChange::up())?;
    let found = KernelSandbox.interface(&netns, "eth0")?.unwrap();
    assert_eq!((found.mac.as_str(), found.up), ("02:00:00:00:00:05", true));
    for net in ["10.0.0.5/24", "fd00::5/64"] {
        assert!(found.addresses.iter().any(|a| a == net), "{found:?} lacks {net}");
    }
    assert_eq!(KernelSandbox.interface(&netns, "eth1")?, None);
    assert_eq!(KernelSandbox.interface(&netns, "no such/name")?, None);
    Ok(())
}

#[test]
fn a_namespace_that_is_gone_is_down_already_and_cannot_come_up() -> Result<()> {
    let ns = Ns::new("cnigone")?;
    let netns = path(&ns);
    drop(ns);
    KernelSandbox.set_loopback(&netns, false)?;
    for e in [
        KernelSandbox.set_loopback(&netns, true).unwrap_err(),
        KernelSandbox.interface(&netns, "lo").unwrap_err(),
        KernelSandbox.interface("/etc/hostname", "lo").unwrap_err(),
    ] {
        assert_eq!(e.code, code::IO);
    }
    Ok(())
}
