//! The object loads: every program passes this kernel's verifier, every map has the shape that user space expects.

use std::collections::BTreeSet;

use aya::maps::{Array, HashMap, HashOfMaps, LpmTrie, MapData};
use flowloom_bpf_abi as abi;
use flowloom_tests_netns::programs;

#[test]
fn every_program_loads() {
    programs::Programs::load(false).expect("load");
    programs::Programs::load(true).expect("dry run");
}

#[test]
fn the_object_has_the_maps_of_the_abi_and_no_others() {
    let ebpf = programs::Programs::load(false).expect("load").ebpf;
    let found: BTreeSet<&str> = ebpf.maps().map(|(name, _)| name).filter(|n| !n.starts_with('.')).collect();
    let mut expected: BTreeSet<&str> = abi::map_name::PINNED.into();
    expected.extend([abi::map_name::SCRATCH, abi::map_name::TRACE]);
    assert_eq!(found, expected);
}

#[test]
fn an_inner_policy_map_of_any_size_fits_the_outer_one() {
    let mut ebpf = programs::Programs::load(false).expect("load").ebpf;
    let mut outer: HashOfMaps<_, u32, LpmTrie<MapData, [u8; 8], abi::PolicyValue>> =
        HashOfMaps::try_from(ebpf.map_mut(abi::map_name::POLICY).expect("policy")).expect("type");
    for (slot, size) in [(1, abi::POLICY_MIN_ENTRIES), (2, 20_000)] {
        let inner = LpmTrie::<MapData, [u8; 8], abi::PolicyValue>::create(size, 1).expect("inner");
        outer.insert(slot, &inner, 0).expect("slot");
    }
}

#[test]
fn records_go_in_and_come_out() {
    let mut ebpf = programs::Programs::load(false).expect("load").ebpf;
    let mut endpoints: Array<_, abi::EndpointRecord> =
        ebpf.map_mut(abi::map_name::ENDPOINTS).expect("map").try_into().expect("type");
    let record = abi::EndpointRecord { vpc: 7, revision: 3, plen6: 64, ..Default::default() };
    endpoints.set(5, record, 0).expect("set");
    assert_eq!(endpoints.get(&5, 0).expect("get"), record);
    let mut quotas: HashMap<_, abi::QuotaKey, abi::QuotaValue> =
        ebpf.map_mut(abi::map_name::QUOTAS).expect("map").try_into().expect("type");
    quotas
        .insert(abi::QuotaKey { vpc: 9, endpoint: 9 }, abi::QuotaValue { used: 0, limit: 9 }, 0)
        .expect("insert");
}
