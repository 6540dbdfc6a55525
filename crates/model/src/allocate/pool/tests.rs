//! Address arithmetic, and what goes wrong in it elsewhere.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

type Pool = AddressPool<String>;

fn subnet(cidr: &str, exclude: &[&str]) -> Subnet {
    let text = format!(
        "version: 1\nnodes: [{{name: n1, address: 192.0.2.1}}]\nsubnets: [{{name: s, vpc: default, cidr: \"{cidr}\", node: n1, exclude_cidrs: {exclude:?}}}]"
    );
    let w = crate::parse(text.as_bytes(), crate::Format::Yaml).unwrap().world;
    w.subnets.into_values().next().unwrap()
}

fn pool(cidr: &str, exclude: &[&str]) -> Pool {
    let s = subnet(cidr, exclude);
    let family = Family::of_net(&s.cidrs[0]);
    Pool::for_node(&s, &"n1".parse().unwrap(), family, []).unwrap()
}

fn ip(s: &str) -> IpAddr {
    s.parse().unwrap()
}

fn acquire(p: &mut Pool, owner: &str, now: u64) -> Result<String, PoolError> {
    p.acquire(&owner.to_owned(), Timestamp(now)).map(|a| a.to_string())
}

#[test]
fn the_same_key_gets_the_same_address_and_another_key_is_refused_it() {
    let mut p = pool("10.0.0.0/24", &[]);
    assert_eq!(acquire(&mut p, "id1/eth0", 0).as_deref(), Ok("10.0.0.2"));
    assert_eq!(acquire(&mut p, "id1/eth0", 5).as_deref(), Ok("10.0.0.2"));
    assert_eq!(acquire(&mut p, "id1/eth1", 5).as_deref(), Ok("10.0.0.3"));
    // By name: again for the same key, never for another, never a second one.
    assert_eq!(p.acquire_address(&"id2".into(), ip("10.0.0.9")), Ok(()));
    assert_eq!(p.acquire_address(&"id2".into(), ip("10.0.0.9")), Ok(()));
    assert_eq!(
        p.acquire_address(&"id3".into(), ip("10.0.0.9")),
        Err(PoolError::InUse { address: ip("10.0.0.9"), owner: "id2".into() })
    );
    assert_eq!(
        p.acquire_address(&"id2".into(), ip("10.0.0.10")),
        Err(PoolError::OwnerHolds { owner: "id2".into(), address: ip("10.0.0.9") })
    );
    assert_eq!(p.stats().used, 3);
}

#[test]
fn a_range_that_starts_in_the_middle_neither_doubles_nor_blocks_its_first_addresses() {
    let text = "version: 1\nnodes: [{name: n1, address: 192.0.2.1}]\nsubnets: [{name: s, vpc: default, cidr: 10.0.0.0/24, cni_ranges: [{node: n1, cidr: 10.0.0.64/30}, {node: n1, cidr: 10.0.0.128/31}]}]";
    let w = crate::parse(text.as_bytes(), crate::Format::Yaml).unwrap().world;
    let s = w.subnets.values().next().unwrap();
    let mut p = Pool::for_node(s, &"n1".parse().unwrap(), Family::V4, [ip("10.0.0.65")]).unwrap();
    let got: Vec<String> = (0..5).map(|i| acquire(&mut p, &i.to_string(), 0).unwrap()).collect();
    assert_eq!(got, ["10.0.0.64", "10.0.0.66", "10.0.0.67", "10.0.0.128", "10.0.0.129"]);
    assert!(matches!(acquire(&mut p, "more", 0), Err(PoolError::Exhausted { .. })));
    assert!(Pool::for_node(s, &"n2".parse().unwrap(), Family::V4, []).is_none());
    assert!(Pool::for_node(s, &"n1".parse().unwrap(), Family::V6, []).is_none());
}

#[test]
fn an_excluded_address_is_never_handed_out_not_even_by_name() {
    let mut p = pool("10.0.0.0/29", &["10.0.0.0/30", "10.0.0.3..10.0.0.5"]);
    // 10.0.0.6 is the first one left: the gateway. Nothing remains.
    assert_eq!(p.stats(), PoolStats { size: 8, excluded: 8, used: 0, available: 0, cooling: 0 });
    assert!(matches!(acquire(&mut p, "a", 0), Err(PoolError::Exhausted { .. })));
    for x in 0..8 {
        let address = ip(&format!("10.0.0.{x}"));
        assert_eq!(p.acquire_address(&"a".into(), address), Err(PoolError::Excluded { address }));
    }
    assert_eq!(
        p.acquire_address(&"a".into(), ip("10.0.1.1")),
        Err(PoolError::OutOfRange { address: ip("10.0.1.1") })
    );
    assert_eq!(
        p.acquire_address(&"a".into(), ip("fd00::1")),
        Err(PoolError::OutOfRange { address: ip("fd00::1") })
    );
}

#[test]
fn a_used_address_inside_an_exclusion_is_counted_once() {
    let mut p = pool("10.0.0.0/24", &["10.0.0.10..10.0.0.19", "10.0.0.15..10.0.0.29"]);
    // 20 excluded once each, network, broadcast, gateway.
    assert_eq!(p.stats(), PoolStats { size: 256, excluded: 23, used: 0, available: 233, cooling: 0 });
    p.adopt(&"restored".into(), ip("10.0.0.12")).unwrap();
    p.adopt(&"plain".into(), ip("10.0.0.40")).unwrap();
    assert_eq!(p.stats(), PoolStats { size: 256, excluded: 23, used: 1, available: 232, cooling: 0 });
    // Released, it does not come back.
    assert_eq!(p.release(&"restored".into(), Timestamp(0)), Some(ip("10.0.0.12")));
    assert_eq!(p.stats(), PoolStats { size: 256, excluded: 23, used: 1, available: 232, cooling: 0 });
    assert_eq!(
        p.acquire_address(&"x".into(), ip("10.0.0.12")),
        Err(PoolError::Excluded { address: ip("10.0.0.12") })
    );
    for i in 0..232 {
        assert_ne!(acquire(&mut p, &i.to_string(), 1000).unwrap(), "10.0.0.12");
    }
}

#[test]
fn only_its_owner_releases_an_address() {
    let mut p = pool("10.0.0.0/24", &[]);
    acquire(&mut p, "old", 0).unwrap();
    // A delayed release under another key, or a second one, gives nothing back.
    assert_eq!(p.release(&"other".into(), Timestamp(1)), None);
    assert_eq!(p.owner(ip("10.0.0.2")), Some(&"old".to_owned()));
    assert_eq!(p.release(&"old".into(), Timestamp(1)), Some(ip("10.0.0.2")));
    assert_eq!(p.release(&"old".into(), Timestamp(1)), None);
    p.acquire_address(&"new".into(), ip("10.0.0.2")).unwrap();
    assert_eq!(p.release(&"old".into(), Timestamp(2)), None);
    assert_eq!(p.held_by(&"new".into()), Some(ip("10.0.0.2")));
}

#[test]
fn a_released_address_rests_while_others_are_free() {
    let mut p = pool("10.0.0.0/29", &[]);
    for (i, want) in ["10.0.0.2", "10.0.0.3", "10.0.0.4"].into_iter().enumerate() {
        assert_eq!(acquire(&mut p, &format!("o{i}"), 0).unwrap(), want);
    }
    p.release(&"o1".into(), Timestamp(100)).unwrap();
    p.release(&"o0".into(), Timestamp(110)).unwrap();
    assert_eq!(p.stats().cooling, 2);
    assert_eq!(acquire(&mut p, "a", 120).unwrap(), "10.0.0.5");
    assert_eq!(acquire(&mut p, "b", 120).unwrap(), "10.0.0.6");
    // Nothing else is free: the one that rests longest.
    assert_eq!(acquire(&mut p, "c", 120).unwrap(), "10.0.0.3");
    assert_eq!(acquire(&mut p, "d", 120).unwrap(), "10.0.0.2");
    assert!(acquire(&mut p, "e", 120).is_err());
    // Rested: lowest free again. A clock that goes back keeps it resting.
    p.release(&"c".into(), Timestamp(200)).unwrap();
    p.release(&"b".into(), Timestamp(200)).unwrap();
    assert_eq!(p.clone().acquire(&"f".into(), Timestamp(10)), Ok(ip("10.0.0.3")));
    assert_eq!(acquire(&mut p, "f", 200 + COOL_DOWN).unwrap(), "10.0.0.3");
    assert_eq!(p.stats().cooling, 0);
}

#[test]
fn tiny_ranges_use_what_rfc_3021_and_6164_allow() {
    for (cidr, one) in [("10.0.0.0/31", "10.0.0.1"), ("fd00::/127", "fd00::1"), ("10.0.0.0/30", "10.0.0.2")] {
        let mut p = pool(cidr, &[]);
        assert_eq!(acquire(&mut p, "a", 0).as_deref(), Ok(one));
        assert!(acquire(&mut p, "b", 0).is_err(), "{cidr}");
        assert_eq!(p.release(&"a".into(), Timestamp(0)), Some(ip(one)));
        assert_eq!(acquire(&mut p, "b", 1).as_deref(), Ok(one));
    }
}

#[test]
fn a_large_range_costs_what_is_used_of_it() {
    let mut p = pool("fd00::/64", &["fd00::2..fd00::ffff", "fd00:0:0:0:8000::/65"]);
    assert_eq!(acquire(&mut p, "a", 0).as_deref(), Ok("fd00::1:0"));
    let s = p.stats();
    assert_eq!(s.size, 1 << 64);
    assert_eq!(s.excluded, (1 << 63) + 0x1_0000);
    assert_eq!(s.available, s.size - s.excluded - 1);
    let mut all = pool("10.0.0.0/8", &[]);
    assert_eq!(acquire(&mut all, "a", 0).as_deref(), Ok("10.0.0.2"));
    assert_eq!(all.stats().size, 1 << 24);
}

#[test]
fn ten_thousand_restored_addresses_take_linear_time() {
    let start = std::time::Instant::now();
    let mut p = pool("10.0.0.0/8", &[]);
    for i in 0..10_000u32 {
        p.adopt(&format!("c{i}"), std::net::Ipv4Addr::from(0x0a00_0002 + i * 3).into()).unwrap();
    }
    for i in 0..10_000 {
        acquire(&mut p, &format!("new{i}"), 0).unwrap();
    }
    for i in 0..10_000 {
        p.release(&format!("c{i}"), Timestamp(0)).unwrap();
    }
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}

#[test]
fn a_changed_subnet_keeps_what_is_held() {
    let mut p = pool("10.0.0.0/24", &[]);
    acquire(&mut p, "a", 0).unwrap();
    let changed = subnet("10.0.0.0/24", &["10.0.0.2..10.0.0.9"]);
    assert!(p.reconfigure(&changed, &"n1".parse().unwrap(), [ip("10.0.0.10")]));
    assert_eq!(acquire(&mut p, "a", 0).as_deref(), Ok("10.0.0.2"));
    assert_eq!(acquire(&mut p, "b", 0).as_deref(), Ok("10.0.0.11"));
    assert!(!p.reconfigure(&changed, &"n9".parse().unwrap(), []));
    assert_eq!(p.owner(ip("10.0.0.2")), Some(&"a".to_owned()));
    assert!(acquire(&mut p, "c", 0).is_err());
}

#[derive(Debug, Clone)]
enum Op {
    Acquire(u8),
    Named(u8, u8),
    Adopt(u8, u8),
    Release(u8),
    Wait(u8),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        any::<u8>().prop_map(|o| Op::Acquire(o % 24)),
        (any::<u8>(), any::<u8>()).prop_map(|(o, a)| Op::Named(o % 24, a % 34)),
        (any::<u8>(), any::<u8>()).prop_map(|(o, a)| Op::Adopt(o % 24, a % 34)),
        any::<u8>().prop_map(|o| Op::Release(o % 24)),
        any::<u8>().prop_map(Op::Wait),
    ]
}

proptest! {
    /// Against a plain model: no address twice, none outside, none excluded, the lowest free, rest respected, counts right.
    #[test]
    fn the_pool_agrees_with_a_plain_list(
        ops in proptest::collection::vec(op(), 0..120),
        exclude in proptest::collection::vec((0u8..32, 0u8..6), 0..4),
        v6 in any::<bool>(),
    ) {
        let base: u128 = if v6 { 0xfd00 << 112 } else { 0x0a00_0000 };
        let family = if v6 { Family::V6 } else { Family::V4 };
        let closed = Ranges::new(exclude.iter().map(|&(a, n)| (base + u128::from(a), base + u128::from(a + n))).collect());
        let mut pool: AddressPool<u8> = AddressPool::new(family, Ranges::new(vec![(base, base + 31)]), closed.clone());
        let open = |x: u128| (base..=base + 31).contains(&x) && !closed.contains(x);
        let mut held: BTreeMap<u8, u128> = BTreeMap::new();
        let mut rest: BTreeMap<u128, u64> = BTreeMap::new();
        let mut now = 1000u64;
        for op in ops {
            match op {
                Op::Wait(s) => now += u64::from(s),
                Op::Acquire(o) => {
                    let got = pool.acquire(&o, Timestamp(now)).ok().map(bits);
                    let used = |x: &u128| held.values().any(|h| h == x);
                    rest.retain(|_, at| now - *at < COOL_DOWN);
                    let free = (base..=base + 31).find(|x| open(*x) && !used(x) && !rest.contains_key(x));
                    let oldest = rest.iter().filter(|(x, _)| open(**x)).min_by_key(|(x, at)| (**at, **x)).map(|(x, _)| *x);
                    let want = held.get(&o).copied().or(free).or(oldest);
                    prop_assert_eq!(got, want);
                    if let Some(x) = want {
                        held.insert(o, x);
                        rest.remove(&x);
                    }
                }
                Op::Named(o, a) => {
                    let x = base + u128::from(a);
                    let taken = held.iter().any(|(k, h)| *h == x && *k != o);
                    let right = held.get(&o) == Some(&x) || (!held.contains_key(&o) && open(x) && !taken);
                    prop_assert_eq!(pool.acquire_address(&o, family.address(x)).is_ok(), right);
                    if right {
                        held.insert(o, x);
                        rest.remove(&x);
                    }
                }
                Op::Adopt(o, a) => {
                    let x = base + u128::from(a);
                    let taken = held.iter().any(|(k, h)| *h == x && *k != o);
                    let right = held.get(&o).is_none_or(|h| *h == x) && !taken;
                    prop_assert_eq!(pool.adopt(&o, family.address(x)).is_ok(), right);
                    if right {
                        held.insert(o, x);
                        rest.remove(&x);
                    }
                }
                Op::Release(o) => {
                    let got = pool.release(&o, Timestamp(now)).map(bits);
                    prop_assert_eq!(got, held.remove(&o));
                    if let Some(x) = got {
                        rest.insert(x, now);
                    }
                }
            }
            let stats = pool.stats();
            let used = held.values().filter(|x| open(**x)).count() as u128;
            prop_assert_eq!((stats.size, stats.used), (32, used));
            prop_assert_eq!(stats.available + stats.used + stats.excluded, 32);
            let list: Vec<(u128, u8)> = pool.held().map(|(a, o)| (bits(a), *o)).collect();
            let mut want: Vec<(u128, u8)> = held.iter().map(|(o, x)| (*x, *o)).collect();
            want.sort_unstable();
            prop_assert_eq!(list, want);
        }
    }
}
