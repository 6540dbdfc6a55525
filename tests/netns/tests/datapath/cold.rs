//! A start where nothing is in force: maps at once, each program when the kernel has looked at it, pins when it has looked at all.

use std::fs;

use crate::common::*;
use flowloom_bpf_abi::map_name::PINNED;
use flowloom_compiler::EndpointId;
use flowloom_datapath::{Datapath, Hook, SocketHook};
use flowloom_testkit::Bpffs;

fn programs(datapath: &Datapath) -> usize {
    tree(&datapath.pin_dir().join("programs")).iter().filter(|p| !p.ends_with("programs")).count()
}

/// The object with a program that reads a register nobody wrote.
fn spoiled(program: &str) -> Result<&'static [u8]> {
    let mut bytes = flowloom_bpf_object::object()?.to_vec();
    let at = first_instruction(&bytes, program).ok_or("the object has no such program")?;
    // `r0 = r5`
    bytes[at..at + 8].copy_from_slice(&[0xbf, 0x50, 0, 0, 0, 0, 0, 0]);
    aligned(bytes)
}

/// Where a function begins in an ELF file (64 bits, little endian): elf(5).
fn first_instruction(elf: &[u8], function: &str) -> Option<usize> {
    let number = |at: usize, len: usize| {
        let mut word = [0; 8];
        word[..len].copy_from_slice(elf.get(at..at + len)?);
        usize::try_from(u64::from_le_bytes(word)).ok()
    };
    let (sections, size, count) = (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?);
    let section = |n: usize| sections + n * size;
    let symbols = (0..count).map(section).find(|s| number(s + 4, 4) == Some(2))?;
    let names = number(section(number(symbols + 0x28, 4)?) + 0x18, 8)?;
    let (start, len) = (number(symbols + 0x18, 8)?, number(symbols + 0x20, 8)?);
    (start..start + len).step_by(24).find_map(|symbol| {
        let name = elf.get(names + number(symbol, 4)?..)?;
        let own = name.strip_prefix(function.as_bytes())?.first() == Some(&0);
        let home = section(number(symbol + 6, 2)?);
        own.then_some(number(home + 0x18, 8)? + number(symbol + 8, 8)?)
    })
}

#[test]
fn maps_are_there_at_once_and_programs_are_pinned_together() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut first = Datapath::start(config(&fs))?;
    assert!(first.is_loading());
    assert_eq!(first.read_back()?.endpoints.len(), 0);
    // Whoever needs a program waits for it.
    let devices = populate(&mut node, &mut first)?;
    assert!(first.is_loading());
    assert_eq!(
        programs(&first),
        0,
        "a life that ends now leaves programs that the next one could take for all"
    );
    first.finish()?;
    assert!(!first.is_loading());
    first.verified().wait()?;
    assert_eq!(node.inside(|| first.audit())?, []);
    let ids = pinned_ids(&config(&fs).pin_root);
    assert_eq!(ids.len(), PINNED.len() + Hook::ALL.len() + SocketHook::ALL.len() + 2 * devices.len());
    let writes = first.writes();
    first.finish()?;
    assert_eq!(first.writes(), writes);
    drop(first);
    let again = Datapath::start(config(&fs))?;
    assert!(again.opened().adopted_programs && !again.is_loading());
    assert_eq!(again.writes(), 0);
    assert_eq!(pinned_ids(&config(&fs).pin_root), ids);
    Ok(())
}

#[test]
fn a_life_that_ends_while_programs_load_leaves_nothing_that_the_next_one_trusts() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    drop(Datapath::start(config(&fs))?);
    let mut again = Datapath::start(config(&fs))?;
    assert_eq!((again.opened().adopted_maps, again.opened().adopted_programs), (PINNED.len(), false));
    // With maps of an earlier life there may be flows and records: no half start on these.
    assert!(!again.is_loading());
    populate(&mut node, &mut again)?;
    drop(again);

    // The same, when endpoints were served already.
    let elsewhere = Bpffs::mount()?;
    let mut other = Node::new()?;
    let mut first = Datapath::start(config(&elsewhere))?;
    populate(&mut other, &mut first)?;
    let (links, state) = (first.attached()?, first.read_back()?);
    assert!(first.is_loading());
    drop(first);
    let again = Datapath::start(config(&elsewhere))?;
    assert!(!again.is_loading() && !again.opened().adopted_programs);
    let now = again.attached()?;
    for (was, is) in links.iter().zip(&now) {
        assert_eq!((was.hook, was.ifindex, was.link_id), (is.hook, is.ifindex, is.link_id));
        assert_ne!(was.prog_id, is.prog_id);
    }
    assert_eq!((now.len(), again.read_back()?), (links.len(), state));
    assert_eq!(other.inside(|| again.audit())?, []);
    Ok(())
}

#[test]
fn a_program_that_the_kernel_refuses_is_named_to_everybody_and_nothing_is_pinned() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let device = node.workload("wl1")?;
    let mut datapath = Datapath::start_object(config(&fs), spoiled("from_overlay")?)?;
    // Those of endpoints come first, and are good.
    node.inside(|| datapath.attach_endpoint(EndpointId(1), &device))?;
    let whole = |e: flowloom_datapath::Error| {
        let text = e.to_string();
        assert!(text.contains("verifying from_overlay") && text.contains("R5 !read_ok"), "{text}");
    };
    whole(node.inside(|| datapath.attach_overlay(device.ifindex)).expect_err("attached"));
    whole(datapath.verified().wait().expect_err("verified"));
    for _ in 0..2 {
        whole(datapath.finish().expect_err("finished"));
    }
    assert!(datapath.is_loading());
    assert_eq!(programs(&datapath), 0);
    drop(datapath);
    // As ever where all are waited for.
    let other = Bpffs::mount()?;
    whole(Datapath::open_object(config(&other), spoiled("from_overlay")?).map(drop).expect_err("opened"));
    // The next build takes over.
    let good = Datapath::start(config(&fs))?;
    assert!(!good.is_loading());
    assert_eq!(node.inside(|| good.audit())?, []);
    Ok(())
}

#[test]
fn a_device_whose_program_is_refused_is_bound_to_nobody() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let device = node.workload("wl1")?;
    let mut datapath = Datapath::start_object(config(&fs), spoiled("to_endpoint")?)?;
    let error = node.inside(|| datapath.attach_endpoint(EndpointId(1), &device)).expect_err("attached");
    assert!(error.to_string().contains("verifying to_endpoint"), "{error}");
    assert!(datapath.program(Hook::ToEndpoint).is_err());
    assert!(datapath.read_back()?.devices.is_empty());
    Ok(())
}

#[test]
fn links_without_maps_wait_for_every_program() -> Result {
    let fs = Bpffs::mount()?;
    let mut node = Node::new()?;
    let mut first = Datapath::open(config(&fs))?;
    populate(&mut node, &mut first)?;
    let maps = first.pin_dir().join("maps");
    drop(first);
    for map in fs::read_dir(&maps)? {
        fs::remove_file(map?.path())?;
    }
    let again = Datapath::start(config(&fs))?;
    assert_eq!((again.opened().adopted_maps, again.is_loading()), (0, false));
    assert_eq!(node.inside(|| again.audit())?, []);
    Ok(())
}
