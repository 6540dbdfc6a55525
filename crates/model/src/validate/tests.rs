//! Rules between objects, each by the smallest document that breaks it.

use crate::{Fault, Format, ObjectRef, World, parse, validate};

fn world(text: &str) -> World {
    match parse(text.as_bytes(), Format::Yaml) {
        Ok(p) => p.world,
        Err(f) => panic!("{f:#?}"),
    }
}

/// `path: code` of each fault.
fn codes(text: &str) -> Vec<String> {
    validate(&world(text)).iter().map(|f| format!("{}: {}", f.path, f.code)).collect()
}

fn only(text: &str) -> Fault {
    let mut all = validate(&world(text));
    assert_eq!(all.len(), 1, "{all:#?}");
    all.remove(0)
}

/// Node n1, VPC red with subnet `s` 10.0.0.0/24 + fd00::/64 (10.0.0.16/28 excluded), then what is given.
fn base(rest: &str) -> String {
    format!(
        "version: 1\nnodes: [{{name: n1, address: 192.0.2.1}}, {{name: n2, address: 192.0.2.2}}]\nvpcs: [{{name: red, vni: 7}}, {{name: blue, vni: 8}}]\nsubnets:\n  - {{name: s, vpc: red, cidrs: [10.0.0.0/24, \"fd00::/64\"], exclude_cidrs: [10.0.0.16/28, 10.0.0.20..10.0.0.40, 10.0.0.50]}}\n  - {{name: s, vpc: blue, cidrs: [10.0.0.0/24, \"fd00::/64\"]}}\n{rest}\n"
    )
}

fn endpoint(extra: &str) -> String {
    base(&format!("endpoints:\n  - {{name: a, vpc: red, subnet: s, node: n1{extra}}}"))
}

fn endpoints(a: &str, b: &str) -> String {
    base(&format!(
        "endpoints:\n  - {{name: a, vpc: red, subnet: s, node: n1{a}}}\n  - {{name: b, vpc: red, subnet: s, node: n1{b}}}"
    ))
}

fn rules(rule: &str) -> String {
    base(&format!(
        "endpoints:\n  - {{name: a, vpc: red, subnet: s, node: n1, security_groups: [g], labels: {{role: a}}, named_ports: [{{name: http, protocol: tcp, port: 80}}]}}\n  - {{name: b, vpc: red, subnet: s, node: n1, security_groups: [h], labels: {{role: b}}}}\ncidr_groups: [{{name: c, vpc: red, cidrs: [192.0.2.0/24]}}]\nsecurity_groups:\n  - {{name: h, vpc: red}}\n  - name: g\n    vpc: red\n    rules: [{{id: r, priority: 5, action: allow, {rule}}}]"
    ))
}

#[test]
fn two_vpcs_with_equal_names_and_addresses_are_right() {
    let both = "endpoints:\n  - {name: a, vpc: red, subnet: s, node: n1, ip: 10.0.0.5, mac: \"02:00:00:00:00:01\"}\n  - {name: a, vpc: blue, subnet: s, node: n1, ip: 10.0.0.5, mac: \"02:00:00:00:00:01\"}";
    assert_eq!(codes(&base(both)), [""; 0]);
}

#[test]
fn dangling_references_name_both_objects() {
    for (text, path, target) in [
        ("subnets: [{name: s, vpc: nope, cidr: 10.0.0.0/24}]", "subnets[nope/s].vpc", "vpc nope"),
        (
            "subnets: [{name: s, vpc: default, cidr: 10.0.0.0/24, node: nope}]",
            "subnets[default/s].node",
            "node nope",
        ),
        (
            "subnets: [{name: s, vpc: default, cidr: 10.0.0.0/24, cni_ranges: [{node: nope, cidr: 10.0.0.64/26}]}]",
            "subnets[default/s].cni_ranges[0].node",
            "node nope",
        ),
        ("security_groups: [{name: g, vpc: nope}]", "security_groups[nope/g].vpc", "vpc nope"),
        ("cidr_groups: [{name: g, vpc: nope, cidrs: []}]", "cidr_groups[nope/g].vpc", "vpc nope"),
    ] {
        let f = only(&format!("version: 1\n{text}"));
        assert_eq!((f.path.as_str(), f.code), (path, crate::Reason::DanglingReference));
        assert!(
            f.message.contains(&f.object.clone().unwrap().to_string()) && f.message.contains(target),
            "{f}"
        );
        assert_eq!(f.other.unwrap().to_string(), target);
    }
    assert_eq!(
        codes(&base("endpoints: [{name: a, vpc: red, subnet: t, node: n3, security_groups: [g]}]")),
        [
            "endpoints[red/a].node: DanglingReference",
            "endpoints[red/a].security_groups: DanglingReference",
            "endpoints[red/a].subnet: DanglingReference"
        ]
    );
    // A group of another VPC is not there.
    let other = "security_groups: [{name: g, vpc: blue}]\nendpoints: [{name: a, vpc: red, subnet: s, node: n1, security_groups: [g]}]";
    assert_eq!(codes(&base(other)), ["endpoints[red/a].security_groups: DanglingReference"]);
    for remote in ["remote_group: x", "remote_cidr_group: x"] {
        let f = only(&rules(&format!("direction: ingress, {remote}")));
        assert_eq!(f.code, crate::Reason::DanglingReference);
    }
}

#[test]
fn overlapping_subnet_is_refused_and_both_are_named() {
    let doc = |a: &str, b: &str, c: &str| {
        format!(
            "version: 1\nsubnets:\n  - {{name: a, vpc: default, cidr: {a}}}\n  - {{name: b, vpc: default, cidr: {b}}}\n  - {{name: c, vpc: default, cidr: {c}}}"
        )
    };
    let f = only(&doc("10.0.0.0/16", "10.1.0.0/16", "10.0.5.0/24"));
    assert_eq!(
        f.to_string(),
        "subnets[default/c].cidrs = 10.0.5.0/24: subnet default/c (10.0.5.0/24) and subnet default/a (10.0.0.0/16) overlap [SubnetOverlap]"
    );
    // Wider and later in the name order, and equal.
    assert_eq!(
        only(&doc("10.0.5.0/24", "10.1.0.0/16", "10.0.0.0/16")).object,
        only(&doc("10.0.0.0/16", "10.1.0.0/16", "10.0.0.0/16")).object
    );
    assert_eq!(codes(&doc("10.0.0.0/25", "10.0.0.128/25", "10.0.1.0/24")), [""; 0]);
    // Nested three deep: every level is seen.
    assert_eq!(codes(&doc("10.0.0.0/8", "10.0.0.0/16", "10.0.0.0/24")).len(), 2);
}

#[test]
fn an_endpoint_must_have_an_address_it_can_use() {
    for (ip, code) in [
        ("10.0.1.5", "AddressOutsideSubnet"),
        ("\"fd01::5\"", "AddressOutsideSubnet"),
        ("10.0.0.1", "AddressIsGateway"),
        ("\"fd00::1\"", "AddressIsGateway"),
        ("10.0.0.16", "AddressExcluded"),
        ("10.0.0.31", "AddressExcluded"),
        ("10.0.0.40", "AddressExcluded"),
        ("10.0.0.50", "AddressExcluded"),
        ("10.0.0.0", "AddressExcluded"),
        ("10.0.0.255", "AddressExcluded"),
        ("\"fd00::\"", "AddressExcluded"),
    ] {
        assert_eq!(
            codes(&endpoint(&format!(", ip: {ip}"))),
            [format!("endpoints[red/a].ips: {code}")],
            "{ip}"
        );
    }
    for ip in ["10.0.0.15", "10.0.0.41", "10.0.0.254", "\"fd00::ffff\""] {
        assert_eq!(codes(&endpoint(&format!(", ip: {ip}"))), [""; 0], "{ip}");
    }
}

#[test]
fn two_addresses_of_one_family_are_refused_not_taken_for_dual_stack() {
    assert_eq!(codes(&endpoint(", ips: [10.0.0.5, 10.0.0.6]")), ["endpoints[red/a].ips: FamilyMismatch"]);
    assert_eq!(codes(&endpoint(", ips: [10.0.0.5, \"fd00::5\"]")), [""; 0]);
    let v4_only = "version: 1\nnodes: [{name: n1, address: 192.0.2.1}]\nsubnets: [{name: s, vpc: default, cidr: 10.0.0.0/24}]\nendpoints: [{name: a, vpc: default, subnet: s, node: n1, ips: [10.0.0.5, \"fd00::5\"]}]";
    assert_eq!(codes(v4_only), ["endpoints[default/a].ips: FamilyMismatch"]);
    let subnet = "version: 1\nsubnets: [{name: s, vpc: default, cidrs: [10.0.0.0/24, 10.0.1.0/24]}]";
    assert_eq!(codes(subnet), ["subnets[default/s].cidrs: FamilyMismatch"]);
    let node = "version: 1\nnodes: [{name: n, addresses: [192.0.2.1, 192.0.2.2]}]";
    assert_eq!(codes(node), ["nodes[n].addresses: FamilyMismatch"]);
}

#[test]
fn two_endpoints_never_share_address_mac_or_wire() {
    let f = only(&endpoints(", ip: \"fd00::5\"", ", ip: \"FD00:0::5\", mac: \"02:00:00:00:00:05\""));
    assert_eq!(
        f.to_string(),
        "endpoints[red/b].ips = fd00::5: endpoint red/b and endpoint red/a have the same address [DuplicateAddress]"
    );
    assert_eq!(
        codes(&endpoints(", mac: \"02:00:00:00:00:01\"", ", mac: \"02:00:00:00:00:01\"")),
        ["endpoints[red/b].mac: DuplicateMac"]
    );
    let derived = crate::Mac::derive(&"red".parse().unwrap(), "10.0.0.5".parse().unwrap());
    assert_eq!(
        codes(&endpoints(", ip: 10.0.0.5", &format!(", mac: \"{derived}\""))),
        ["endpoints[red/b].mac: DuplicateMac"]
    );
    assert_eq!(codes(&endpoint(", mac: \"0a:66:6c:00:00:01\"")), ["endpoints[red/a].mac: MacIsGateway"]);
    assert_eq!(
        codes(&endpoints(", device: tap0", ", device: tap0")),
        ["endpoints[red/b].device: AttachmentConflict"]
    );
    assert_eq!(
        codes(&endpoints(", netns: /run/netns/x", ", netns: /run/netns/x")),
        ["endpoints[red/b].netns: AttachmentConflict"]
    );
    assert_eq!(codes(&endpoints(", netns: /run/netns/x", ", netns: /run/netns/x, interface: eth1")), [""; 0]);
}

#[test]
fn tiny_subnets_follow_rfc_3021_and_6164_and_a_gateway_is_a_host_address() {
    let subnet = |rest: &str| {
        format!(
            "version: 1\nnodes: [{{name: n1, address: 192.0.2.1}}]\nsubnets: [{{name: s, vpc: default, {rest}}}]\n"
        )
    };
    for (rest, code) in [
        ("cidr: 10.0.0.0/32", "cidrs: SubnetUnusable"),
        ("cidr: \"fd00::/128\"", "cidrs: SubnetUnusable"),
        ("cidr: 10.0.0.0/24, gateway: 10.0.0.0", "gateways: InvalidGateway"),
        ("cidr: 10.0.0.0/24, gateway: 10.0.0.255", "gateways: InvalidGateway"),
        ("cidr: 10.0.0.0/24, gateway: 10.0.1.1", "gateways: InvalidGateway"),
        ("cidr: \"fd00::/64\", gateway: \"fd00::\"", "gateways: InvalidGateway"),
        ("cidr: 10.0.0.0/24, gateway: 10.0.0.9, exclude_cidrs: [10.0.0.8/30]", "gateways: InvalidGateway"),
        ("cidr: 10.0.0.0/30, exclude_cidrs: [10.0.0.0/30]", "gateways: InvalidGateway"),
        ("cidr: 10.0.0.0/24, exclude_cidrs: [10.0.1.0/30]", "exclude_cidrs: OutsideRange"),
        ("cidr: 10.0.0.0/24, exclude_cidrs: [10.0.0.250..10.0.1.3]", "exclude_cidrs: OutsideRange"),
        ("cidr: 10.0.0.0/24, exclude_cidrs: [\"fd00::1\"]", "exclude_cidrs: OutsideRange"),
        ("cidr: 224.0.0.0/24", "cidrs: SubnetUnusable"),
        ("cidr: 127.0.0.0/24", "cidrs: SubnetUnusable"),
        ("cidr: 169.254.0.0/16", "cidrs: SubnetUnusable"),
        ("cidr: \"fe80::/64\"", "cidrs: SubnetUnusable"),
        ("cidr: \"ff00::/64\"", "cidrs: SubnetUnusable"),
        ("cidr: \"fd00::/64\", mtu: 1200", "mtu: OutOfRange"),
    ] {
        assert_eq!(codes(&subnet(rest)), [format!("subnets[default/s].{code}")], "{rest}");
    }
    for rest in [
        "cidr: 10.0.0.0/31",
        "cidr: \"fd00::/127\"",
        "cidr: 10.0.0.0/31, gateway: 10.0.0.1",
        "cidr: 10.0.0.0/24, mtu: 1200",
    ] {
        assert_eq!(codes(&subnet(rest)), [""; 0], "{rest}");
    }
    let both = subnet("cidr: 10.0.0.0/31")
        + "endpoints: [{name: a, vpc: default, subnet: s, node: n1, ip: 10.0.0.1}]";
    assert_eq!(codes(&both), [""; 0]);
}

#[test]
fn two_nodes_never_hand_out_one_address() {
    let doc = |rest: &str| base(&format!("  - {{name: p, vpc: blue, cidr: 10.9.0.0/16, {rest}}}"));
    for (rest, n) in [
        ("cni_ranges: [{node: n1, cidr: 10.9.0.0/24}, {node: n2, cidr: 10.9.1.0/24}]", 0),
        ("cni_ranges: [{node: n1, cidr: 10.9.0.0/24}, {node: n2, cidr: 10.9.0.128/25}]", 1),
        ("cni_ranges: [{node: n1, cidr: 10.9.0.0/24}, {node: n2, cidr: 10.9.0.0/24}]", 1),
        ("cni_ranges: [{node: n1, cidr: 10.9.0.0/24}, {node: n1, cidr: 10.9.0.128/25}]", 0),
        ("node: n1, cni_ranges: [{node: n2, cidr: 10.9.0.0/24}]", 1),
        ("node: n1, cni_ranges: [{node: n1, cidr: 10.9.0.0/24}]", 0),
        ("node: n1", 0),
    ] {
        let found = codes(&doc(rest));
        assert_eq!(found, vec!["subnets[blue/p].cni_ranges: CniRangeConflict"; n], "{rest}");
    }
    assert_eq!(
        codes(&doc("cni_ranges: [{node: n1, cidr: 10.8.0.0/24}]")),
        ["subnets[blue/p].cni_ranges[0].cidr: OutsideRange"]
    );
}

#[test]
fn numbers_and_underlay_addresses_are_unique() {
    let f = only("version: 1\nvpcs: [{name: a, vni: 5}, {name: b, vni: 5}]");
    assert_eq!((f.path.as_str(), f.code), ("vpcs[b].vni", crate::Reason::DuplicateVni));
    assert_eq!(f.other, Some(ObjectRef::Vpc("a".parse().unwrap())));
    // The default VPC's number is taken, whoever sorts first.
    assert_eq!(codes("version: 1\nvpcs: [{name: a, vni: 1}]"), ["vpcs[a].vni: DuplicateVni"]);
    assert_eq!(codes("version: 1\nvpcs: [{name: a, vni: 1}, {name: default, vni: 9}]"), [""; 0]);
    assert_eq!(
        codes("version: 1\nnodes: [{name: a, address: 192.0.2.1}, {name: b, address: 192.0.2.1}]"),
        ["nodes[b].addresses: NodeAddressConflict"]
    );
    assert_eq!(
        codes(
            "version: 1\nnodes: [{name: a, address: 10.0.0.9}]\nsubnets: [{name: s, vpc: default, cidr: 10.0.0.0/24}]"
        ),
        ["subnets[default/s].cidrs: NodeAddressConflict"]
    );
    assert_eq!(
        codes("version: 1\nnodes: [{name: a, address: 224.0.0.9}]"),
        ["nodes[a].addresses: InvalidValue"]
    );
}

#[test]
fn rules_that_contradict_themselves_are_refused() {
    for (rule, code) in [
        ("direction: ingress, protocol: tcp, ports: [{from: 9, to: 8}]", "rules[r].ports[0]: InvalidRule"),
        ("direction: ingress, ports: [{from: 8, to: 9}]", "rules[r].protocol: InvalidRule"),
        ("direction: ingress, protocol: icmp, ports: [{from: 8, to: 9}]", "rules[r].protocol: InvalidRule"),
        ("direction: ingress, protocol: tcp, icmp_type: 8", "rules[r].icmp_type: InvalidRule"),
        (
            "direction: ingress, remote_cidr: 10.0.0.0/8, except_cidrs: [11.0.0.0/16]",
            "rules[r].remote_cidr.except_cidrs: OutsideRange",
        ),
        (
            "direction: ingress, remote_cidr: 10.0.0.0/8, except_cidrs: [0.0.0.0/0]",
            "rules[r].remote_cidr.except_cidrs: OutsideRange",
        ),
        (
            "direction: ingress, remote_cidr: 10.0.0.0/8, except_cidrs: [\"fd00::/64\"]",
            "rules[r].remote_cidr.except_cidrs: FamilyMismatch",
        ),
        (
            "direction: ingress, remote_endpoint_expressions: [{key: a, operator: In}]",
            "rules[r].remote_endpoint_expressions[0].values: InvalidRule",
        ),
        (
            "direction: ingress, remote_endpoint_expressions: [{key: a, operator: Exists, values: [b]}]",
            "rules[r].remote_endpoint_expressions[0].values: InvalidRule",
        ),
        ("direction: egress, protocol: tcp, named_ports: [http]", "rules[r].named_ports: InvalidRule"),
        (
            "direction: egress, protocol: tcp, named_ports: [http], remote_cidr: 10.0.0.0/8",
            "rules[r].named_ports: InvalidRule",
        ),
    ] {
        assert_eq!(codes(&rules(rule)), [format!("security_groups[red/g].{code}")], "{rule}");
    }
    for rule in [
        "direction: ingress, protocol: tcp, ports: [{from: 1, to: 65535}]",
        "direction: egress, protocol: icmp, icmp_type: 0",
        "direction: ingress, remote_cidr: 10.0.0.0/8, except_cidrs: [10.0.0.0/8]",
    ] {
        assert_eq!(codes(&rules(rule)), [""; 0], "{rule}");
    }
    let group = base(
        "cidr_groups: [{name: c, vpc: red, cidrs: [10.0.0.0/8], entries: [{cidr: 10.0.0.0/8}, {cidr: 11.0.0.0/8, except_cidrs: [12.0.0.0/8]}]}]",
    );
    assert_eq!(
        codes(&group),
        [
            "cidr_groups[red/c].entries[1].cidr: DuplicateName",
            "cidr_groups[red/c].entries[2].except_cidrs: OutsideRange"
        ]
    );
}

#[test]
fn a_named_port_that_nobody_defines_is_reported() {
    let undefined = ["security_groups[red/g].rules[r].named_ports: UndefinedNamedPort"];
    for (rule, faulty) in [
        ("direction: ingress, protocol: tcp, named_ports: [http]", false),
        ("direction: ingress, protocol: tcp, named_ports: [https]", true),
        // Defined for another protocol.
        ("direction: ingress, protocol: udp, named_ports: [http]", true),
        ("direction: egress, protocol: tcp, named_ports: [http], remote_group: g", false),
        ("direction: egress, protocol: tcp, named_ports: [http], remote_group: h", true),
        ("direction: egress, protocol: tcp, named_ports: [http], remote_endpoint_selector: {role: a}", false),
        ("direction: egress, protocol: tcp, named_ports: [http], remote_endpoint_selector: {role: b}", true),
        (
            "direction: egress, protocol: tcp, named_ports: [http], remote_endpoint_expressions: [{key: role, operator: NotIn, values: [a]}]",
            true,
        ),
        // Nobody is selected yet.
        ("direction: egress, protocol: tcp, named_ports: [x], remote_endpoint_selector: {role: c}", false),
    ] {
        assert_eq!(codes(&rules(rule)), undefined[..usize::from(faulty)], "{rule}");
    }
}

#[test]
fn counts_have_limits() {
    let groups: Vec<String> = (0..1025).map(|i| format!("g{i}")).collect();
    let defined: Vec<String> = groups.iter().map(|g| format!("{{name: {g}, vpc: red}}")).collect();
    let text = endpoint(&format!(", security_groups: [{}]", groups.join(",")))
        + &format!("\nsecurity_groups: [{}]", defined.join(","));
    assert_eq!(codes(&text), ["endpoints[red/a].security_groups: LimitExceeded"]);
    let vpcs: Vec<String> = (0..=super::limits::VPCS).map(|i| format!("{{name: v{i:05}}}")).collect();
    let text = format!("version: 1\nvpcs: [{}]", vpcs.join(","));
    assert_eq!(codes(&text), ["vpcs[v04095]: LimitExceeded", "vpcs[v04096]: LimitExceeded"]);
}

/// 20,000 endpoints, 2,000 subnets, 2,000 groups with selectors: far beyond what a quadratic check does in the time.
#[test]
fn validation_does_not_slow_down_with_the_square_of_the_objects() {
    let build = |n: usize| {
        let mut w = world(&base(""));
        let text = rules(
            "direction: egress, protocol: tcp, named_ports: [http], remote_endpoint_selector: {role: a}",
        );
        let sample = world(&text);
        let template = sample.endpoints.values().next().unwrap();
        let group = sample.security_groups.values().next().unwrap();
        for i in 0..n {
            let [.., a, b] = u32::try_from(i).unwrap().to_be_bytes();
            let mut e = (**template).clone();
            e.name = format!("e{i}").parse().unwrap();
            e.subnet = format!("s{a}").parse().unwrap();
            e.ips = vec![std::net::Ipv4Addr::new(10, 1, a, b).into()];
            e.node = format!("n{}", i / 4000).parse().unwrap();
            e.labels.insert("i".into(), i.to_string());
            w.endpoints.insert(e.key(), e.into());
            let mut g = group.clone();
            g.name = format!("g{i}").parse().unwrap();
            w.security_groups.insert((g.vpc.clone(), g.name.clone()), g);
        }
        w
    };
    // The best of three: the machine is shared.
    let time = |n: usize| {
        let w = build(n);
        let run = || {
            let start = std::time::Instant::now();
            std::hint::black_box(validate(&w));
            start.elapsed()
        };
        (0..3).map(|_| run()).min().unwrap()
    };
    let (small, large) = (time(2_000), time(16_000));
    // Eight times the objects; a quadratic check would take 64 times as long.
    assert!(large < small * 32, "{small:?} for 2,000, {large:?} for 16,000");
}

fn balancer(rest: &str) -> String {
    base(&format!("load_balancers: [{{name: lb, vpc: red, {rest}}}]"))
}

#[test]
fn load_balancers_of_two_tenants_may_be_equal() {
    let one = |vpc: &str| {
        format!(
            "{{name: lb, vpc: {vpc}, vips: [10.96.0.1, \"fd00:96::1\"], session_affinity: true, ports: [{{port: 80, backends: [{{ip: 10.0.0.5, port: 8080}}, {{ip: \"fd00::5\", port: 8080, healthy: false}}]}}, {{port: 80, protocol: udp}}]}}"
        )
    };
    let text = base(&format!("load_balancers: [{}, {}]", one("red"), one("blue")));
    assert_eq!(codes(&text), [""; 0]);
    let world = world(&text);
    assert_eq!(world.services.len(), 2);
    let lb = world.services.values().next().unwrap();
    assert_eq!((lb.affinity, lb.ports.len(), lb.cluster_ips.len()), (Some(10_800), 2, 2));
    let states: Vec<_> = lb.ports[0].backends.values().map(|b| b.state).collect();
    assert_eq!(states, [crate::BackendState::Ready, crate::BackendState::NotReady]);
}

#[test]
fn what_is_wrong_with_a_load_balancer() {
    for (text, path, code) in [
        ("vip: 10.0.0.77, ports: [{port: 80}]", "load_balancers[red/lb].vips", "InvalidVip"),
        (
            "vips: [10.96.0.1, 10.96.0.2], ports: [{port: 80}]",
            "load_balancers[red/lb].vips",
            "FamilyMismatch",
        ),
        ("vip: 224.0.0.1, ports: [{port: 80}]", "load_balancers[red/lb].vips", "InvalidValue"),
        ("vip: 10.96.0.1, ports: []", "load_balancers[red/lb].ports", "MissingField"),
        (
            "vip: 10.96.0.1, ports: [{port: 80}, {port: 80, protocol: tcp}]",
            "load_balancers[red/lb].ports[1]",
            "DuplicateFrontend",
        ),
        (
            "vip: 10.96.0.1, ports: [{port: 80, backends: [{ip: 192.0.2.9, port: 1}]}]",
            "load_balancers[red/lb].ports[0].backends",
            "AddressOutsideSubnet",
        ),
        (
            "vip: 10.96.0.1, ports: [{port: 80, backends: [{ip: \"fd00::9\", port: 1}]}]",
            "load_balancers[red/lb].ports[0].backends",
            "FamilyMismatch",
        ),
    ] {
        let fault = only(&balancer(text));
        assert_eq!((fault.path.as_str(), fault.code.as_str()), (path, code), "{text}");
    }
    let two = "load_balancers: [{name: a, vpc: red, vip: 10.96.0.1, ports: [{port: 80}]}, {name: b, vpc: red, vip: 10.96.0.1, ports: [{port: 443}, {port: 80}]}]";
    let fault = only(&base(two));
    assert_eq!(
        (fault.path.as_str(), fault.code.as_str()),
        ("load_balancers[red/b].ports[1]", "DuplicateFrontend")
    );
    let node = "load_balancers: [{name: lb, vpc: default, vip: 192.0.2.1, ports: [{port: 80}]}]";
    assert_eq!(only(&base(node)).code.as_str(), "InvalidVip");
}
