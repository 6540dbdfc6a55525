//! Reading documents.

use super::*;
use crate::{Action, AllowLocalhost, Attachment, Entity, Operator, Protocol, Remote};

fn faults(text: &str) -> Vec<Fault> {
    parse(text.as_bytes(), Format::Yaml).expect_err("the document has a fault")
}

/// `path: code` of every fault, sorted.
fn codes(text: &str) -> Vec<String> {
    let mut all: Vec<String> = faults(text).iter().map(|f| format!("{}: {}", f.path, f.code)).collect();
    all.sort();
    all
}

fn only(text: &str) -> Fault {
    let mut all = faults(text);
    assert_eq!(all.len(), 1, "{all:#?}");
    all.remove(0)
}

fn world(text: &str) -> World {
    match parse(text.as_bytes(), Format::Yaml) {
        Ok(p) => p.world,
        Err(f) => panic!("{f:#?}"),
    }
}

/// A document around one rule of group `default/g`.
fn with_rule(rule: &str) -> String {
    format!(
        "version: 1\nsecurity_groups:\n  - name: g\n    vpc: default\n    rules:\n      - {{id: r, priority: 5, direction: ingress, action: allow{rule}}}\n"
    )
}

fn rule(extra: &str) -> crate::Rule {
    let w = world(&with_rule(extra));
    w.security_groups.into_values().next().unwrap().rules.remove(0)
}

#[test]
fn every_fault_of_a_document_is_reported_at_once_with_path_value_line_and_suggestion() {
    let text = include_str!("../../../../examples/faults.yaml");
    let all = faults(text);
    let shown: Vec<String> = all.iter().map(ToString::to_string).collect();
    assert_eq!(
        shown,
        [
            "nat_rules (line 15) = [1 items]: nat_rules is not supported yet; this version would not act on it [NotSupportedYet]",
            "subnets[0].cidr (line 6) = \"10.1.0.1/24\": has bits set behind its prefix; did you mean 10.1.0.0/24? [InvalidValue]",
            "endpoints[0].ip (line 8) = \"010.1.0.10\": is not an IP address; did you mean 10.1.0.10? [InvalidValue]",
            "security_groups[0].rules[0].prioirty (line 13) = 100: security_groups[].rules[] has no such field; did you mean priority? [UnknownField]",
            "security_groups[0].rules[0].priority (line 13): priority is required [MissingField]",
            "endpoints[default/web].node (line 8) = n2: endpoint default/web names node n2, which does not exist [DanglingReference]",
        ],
        "{shown:#?}"
    );
    assert_eq!(all[2].object, Some(ObjectRef::Endpoint("default/web".parse().unwrap())));
}

#[test]
fn json_and_yaml_say_the_same() {
    let yaml = include_str!("../../../../examples/two-tenants.yaml");
    let tree = tree::read(yaml.as_bytes(), Format::Yaml).unwrap();
    let json = to_json(&tree);
    assert_eq!(parse(json.as_bytes(), Format::Json).unwrap().world, world(yaml));
    // JSON is YAML, too.
    assert_eq!(world(&json), world(yaml));
}

fn to_json(t: &Tree) -> String {
    match &t.node {
        Value::Null => "null".into(),
        Value::Text(s) => serde_json::to_string(s).unwrap(),
        Value::List(v) => format!("[{}]", v.iter().map(to_json).collect::<Vec<_>>().join(",")),
        Value::Map(v) => {
            let fields: Vec<_> = v
                .iter()
                .map(|(k, t)| format!("{}:{}", serde_json::to_string(k).unwrap(), to_json(t)))
                .collect();
            format!("{{{}}}", fields.join(","))
        }
        other => other.to_string(),
    }
}

#[test]
fn the_example_with_two_tenants_means_what_it_says() {
    let w = world(include_str!("../../../../examples/two-tenants.yaml"));
    assert_eq!(crate::validate(&w), []);
    assert_eq!(w.vpcs.len(), 3);
    assert_eq!(w.vpcs[&VpcName::new("default").unwrap()].vni, Some(crate::DEFAULT_VNI));
    let subnet = &w.subnets[&("red".parse().unwrap(), "app".parse().unwrap())];
    assert_eq!(
        subnet.gateways,
        ["10.1.0.1".parse::<std::net::IpAddr>().unwrap(), "fd10:1::1".parse().unwrap()]
    );
    assert_eq!(subnet.exclude, [("10.1.0.200".parse().unwrap(), "10.1.0.254".parse().unwrap())]);
    let web = &w.endpoints[&"red/web".parse().unwrap()];
    assert_eq!(web.ips.len(), 2);
    assert_eq!(web.attachment, Attachment::Managed);
    assert_eq!(web.allow_localhost, AllowLocalhost::Always);
    assert_eq!(web.named_ports[0].port, 8080);
    assert!(w.endpoints[&"red/batch".parse().unwrap()].ips.is_empty());
    let group = &w.security_groups[&("red".parse().unwrap(), "web".parse().unwrap())];
    assert_eq!((group.tier, group.default_deny_ingress, group.default_deny_egress), (1, None, Some(false)));
    assert_eq!(
        group.rules.iter().map(|r| r.action).collect::<Vec<_>>(),
        [Action::Allow, Action::Log, Action::Reject, Action::Allow]
    );
    let Remote::Selector(s) = &group.rules[2].remote else { panic!("{:?}", group.rules[2]) };
    assert_eq!(s.expressions[0].operator, Operator::In);
}

#[test]
fn the_minimal_example_is_right() {
    let p = parse(include_bytes!("../../../../examples/minimal.json"), Format::Json).unwrap();
    assert_eq!(crate::validate(&p.world), []);
    assert_eq!(p.place(&ObjectRef::Node("n1".parse().unwrap())).unwrap().path, "nodes[0]");
}

#[test]
fn unknown_fields_name_the_nearest_known_one_at_every_level() {
    for (text, path, near) in [
        ("version: 1\nendpoint: []", "endpoint", Some("endpoints")),
        ("version: 1\nfoo: []", "foo", None),
        ("version: 1\nvpcs: [{name: a, vnid: 5}]", "vpcs[0].vnid", Some("vni")),
        (
            "version: 1\nvpcs: [{name: a, defaultPolicy: deny}]",
            "vpcs[0].defaultPolicy",
            Some("default_policy"),
        ),
    ] {
        let f = only(text);
        assert_eq!((f.path.as_str(), f.code, f.suggestion.as_deref()), (path, Reason::UnknownField, near));
    }
    let f = only(&with_rule(", protocol: tcp, ports: [{from: 1, to: 2, too: 3}]"));
    assert_eq!(
        (f.path.as_str(), f.suggestion.as_deref()),
        ("security_groups[0].rules[0].ports[0].too", Some("to"))
    );
}

#[test]
fn kinds_and_fields_of_later_work_are_refused_by_name_not_ignored() {
    for k in [
        "provider_networks",
        "route_tables",
        "policy_routes",
        "gateways",
        "nat_rules",
        "dns_records",
        "identity_groups",
        "policy_rollouts",
    ] {
        let f = only(&format!("version: 1\n{k}: [{{name: x}}]"));
        assert_eq!((f.path.as_str(), f.code), (k, Reason::NotSupportedYet));
        assert!(f.message.contains("not supported yet"), "{f}");
        // Nothing is ignored where nothing is said.
        world(&format!("version: 1\n{k}: []"));
    }
    for remote in ["remote_fqdns: [{match_name: a.example}]", "remote_service: shop"] {
        let f = only(&with_rule(&format!(", {remote}")));
        assert_eq!(f.code, Reason::NotSupportedYet, "{f}");
        assert!(f.path.starts_with("security_groups[0].rules[0].remote_"), "{f}");
    }
}

#[test]
fn a_document_says_its_version() {
    assert_eq!(only("vpcs: []").suggestion.as_deref(), Some("version: 1"));
    assert_eq!(only("version: 2").code, Reason::UnsupportedVersion);
    assert_eq!(only("version: \"1\"").code, Reason::UnsupportedVersion);
    assert_eq!(only("").path, "version");
    assert_eq!(only("[]").code, Reason::WrongType);
}

#[test]
fn addresses_are_compared_as_addresses_and_written_one_way() {
    let ip = |s: &str| reader::parse_ip(s);
    assert_eq!(ip("fd00::1"), ip("FD00:0::1"));
    for (bad, near) in [
        ("010.0.0.1", Some("10.0.0.1")),
        ("10.0.0.1/24", Some("10.0.0.1")),
        ("::ffff:10.0.0.1", Some("10.0.0.1")),
        ("10.0.0.256", None),
        ("10.0.0", None),
        ("fe80::1%eth0", None),
        ("", None),
        ("host.example", None),
    ] {
        assert_eq!(ip(bad).unwrap_err().suggestion.as_deref(), near, "{bad}");
    }
    for (bad, near) in [
        ("10.0.0.1/24", Some("10.0.0.0/24")),
        ("10.0.0.1", Some("10.0.0.1/32")),
        ("010.0.0.0/24", Some("10.0.0.0/24")),
        ("10.0.0.0/33", None),
        ("10.0.0.0/08", None),
        ("10.0.0.0/+8", None),
        ("10.0.0.0/", None),
        ("fd00::1/64", Some("fd00::/64")),
        ("fd00::/129", None),
        ("/24", None),
    ] {
        assert_eq!(reader::parse_cidr(bad).unwrap_err().suggestion.as_deref(), near, "{bad}");
    }
    let range = |s: &str| reader::parse_range(s).map(|(a, b)| format!("{a}-{b}"));
    assert_eq!(range("10.0.0.3").as_deref(), Ok("10.0.0.3-10.0.0.3"));
    assert_eq!(range("10.0.0.4/30").as_deref(), Ok("10.0.0.4-10.0.0.7"));
    assert_eq!(range("10.0.0.3..10.0.0.9").as_deref(), Ok("10.0.0.3-10.0.0.9"));
    assert_eq!(range("10.0.0.9..10.0.0.3").unwrap_err().suggestion.as_deref(), Some("10.0.0.3..10.0.0.9"));
    assert!(range("10.0.0.9..fd00::1").is_err());
    assert!(range("10.0.0.1/30").is_err());
    assert!(range("..").is_err());
}

#[test]
fn duplicate_keys_and_names_and_second_documents_are_refused() {
    assert_eq!(codes("version: 1\nversion: 1"), ["version: DuplicateField"]);
    assert_eq!(codes("version: 1\nvpcs: [{name: a, name: b}]"), ["vpcs[0].name: DuplicateField"]);
    let json = br#"{"version": 1, "vpcs": [{"name": "a", "vni": 1, "vni": 2}]}"#;
    let all = parse(json, Format::Json).unwrap_err();
    assert_eq!((all[0].path.as_str(), all[0].code), ("vpcs[0].vni", Reason::DuplicateField));

    let f = only("version: 1\nvpcs: [{name: a, vni: 5}, {name: a, vni: 6}]");
    assert_eq!((f.path.as_str(), f.code), ("vpcs[1]", Reason::DuplicateName));
    assert!(f.message.contains("vpcs[0]"), "{f}");
    let two = "version: 1\n---\nversion: 1\n";
    assert_eq!(only(two).code, Reason::SyntaxError);
    assert_eq!(
        parse(b"{\"version\":1}{\"version\":1}", Format::Json).unwrap_err()[0].code,
        Reason::SyntaxError
    );
    assert_eq!(
        codes(
            "version: 1\nsecurity_groups: [{name: g, vpc: default, rules: [{id: r, priority: 1, direction: egress, action: drop}, {id: r, priority: 1, direction: egress, action: drop}]}]"
        ),
        ["security_groups[0].rules[1]: DuplicateName"]
    );
    // The same name in two VPCs, or of two kinds, is not the same object.
    world(
        "version: 1\nvpcs: [{name: a}]\nsecurity_groups: [{name: g, vpc: default}, {name: g, vpc: a}]\ncidr_groups: [{name: g, vpc: a, cidrs: []}]",
    );
}

#[test]
fn wrong_types_and_values_are_named() {
    for (value, code, suggestion) in [
        ("tier: 2", Reason::OutOfRange, None),
        ("tier: \"1\"", Reason::WrongType, Some("1")),
        ("tier: 1.0", Reason::WrongType, None),
        ("tier: .nan", Reason::WrongType, None),
        ("tier: 01", Reason::WrongType, Some("1")),
        ("tier: 99999999999999999999999999999999999999999999", Reason::WrongType, None),
        ("tier: -1", Reason::OutOfRange, None),
        ("tier: [1]", Reason::WrongType, None),
        ("tier:", Reason::EmptyValue, None),
        ("default_deny_ingress: yes", Reason::WrongType, Some("true")),
        ("default_deny_ingress: Off", Reason::WrongType, Some("false")),
        ("default_deny_ingress: 0", Reason::WrongType, None),
        ("description: 5", Reason::WrongType, Some("\"5\"")),
        ("rules: {}", Reason::WrongType, None),
    ] {
        let f = only(&format!("version: 1\nsecurity_groups:\n - name: g\n   vpc: default\n   {value}\n"));
        assert_eq!((f.code, f.suggestion.as_deref()), (code, suggestion), "{value}: {f}");
    }
    assert_eq!(parse(br#"{"version": NaN}"#, Format::Json).unwrap_err()[0].code, Reason::SyntaxError);
    assert_eq!(only("version: 1\nvpcs: [{name: Red_1}]").suggestion.as_deref(), Some("red-1"));
    assert_eq!(only("version: 1\nvpcs: [{name: 7}]").suggestion.as_deref(), Some("\"7\""));
    assert_eq!(only("version: 1\nvpcs: [{name: x, vni: 16777216}]").code, Reason::OutOfRange);
    assert_eq!(only("version: 1\nvpcs: [{name: x, vni: 0}]").code, Reason::OutOfRange);
}

#[test]
fn missing_fields_are_listed() {
    assert_eq!(
        codes("version: 1\nendpoints: [{}]\nsubnets: [{}]\nnodes: [{}]"),
        [
            "endpoints[0].name: MissingField",
            "endpoints[0].node: MissingField",
            "endpoints[0].subnet: MissingField",
            "endpoints[0].vpc: MissingField",
            "nodes[0].name: MissingField",
            "subnets[0].cidr: MissingField",
            "subnets[0].name: MissingField",
            "subnets[0].vpc: MissingField",
        ]
    );
}

#[test]
fn a_rule_has_defaults_and_every_remote() {
    let r = rule("");
    assert_eq!((r.protocol, r.stateful, r.log, &r.remote), (Protocol::Any, true, false, &Remote::Any));
    assert!(
        matches!(rule(", remote_cidr: 10.0.0.0/8, except_cidrs: [10.1.0.0/16]").remote, Remote::Cidr(e) if e.except.len() == 1)
    );
    let Remote::Entities(e) = rule(", remote_entities: [world-ipv4, remote-node]").remote else { panic!() };
    assert!(e.contains(&Entity::WorldIpv4) && e.contains(&Entity::RemoteNode));
    let text = with_rule(
        ", remote_endpoint_selector: {a: b}, remote_endpoint_expressions: [{key: c, operator: not_in, values: [d]}, {key: e, operator: does-not-exist}]",
    );
    let w = world(&text);
    let Remote::Selector(s) = &w.security_groups.values().next().unwrap().rules[0].remote else { panic!() };
    assert_eq!(
        s.expressions.iter().map(|e| e.operator).collect::<Vec<_>>(),
        [Operator::NotIn, Operator::DoesNotExist]
    );
    // An empty selector is a selector: it selects nobody, not everybody.
    assert!(matches!(rule(", remote_endpoint_selector: {}").remote, Remote::Selector(s) if s.is_empty()));
    assert_eq!(rule(", protocol: icmp, icmp_type: 3, icmp_code: 4").icmp, Some((3, Some(4))));
    assert_eq!(rule(", protocol: icmp, icmp_type: 8").icmp, Some((8, None)));
}

#[test]
fn nothing_left_out_by_accident_opens_a_rule_to_anyone() {
    for (extra, code) in [
        (", remote_cidr: ", Reason::EmptyValue),
        (", remote_group: ~", Reason::EmptyValue),
        (", remote_entities: []", Reason::EmptyValue),
        (", remote_endpoint_selector: ", Reason::WrongType),
        (", ports: ", Reason::EmptyValue),
        (", except_cidrs: [10.0.0.0/8]", Reason::ConflictingFields),
        (", remote_cidr: 10.0.0.0/8, remote_group: g", Reason::ConflictingFields),
        (", protocol: icmp, icmp_code: 4", Reason::ConflictingFields),
    ] {
        let all = faults(&with_rule(extra));
        assert_eq!(all[0].code, code, "{extra}: {all:#?}");
    }
}

#[test]
fn an_endpoint_is_wired_in_one_way() {
    let doc = |extra: &str| {
        format!(
            "version: 1\nnodes: [{{name: n1, address: 192.0.2.1}}]\nsubnets: [{{name: s, vpc: default, cidr: 10.0.0.0/24}}]\nsecurity_groups: [{{name: g, vpc: default}}]\nendpoints: [{{id: e, vpc: default, subnet: s, node: n1{extra}}}]\n"
        )
    };
    let wired = |extra: &str| world(&doc(extra)).endpoints.into_values().next().unwrap().attachment.clone();
    assert_eq!(wired(""), Attachment::Managed);
    assert_eq!(wired(", name: e"), Attachment::Managed);
    assert_eq!(
        wired(", netns: /run/netns/x"),
        Attachment::Netns { path: "/run/netns/x".into(), interface: "eth0".into() }
    );
    assert_eq!(wired(", device: tap0"), Attachment::Device { name: "tap0".into() });
    assert_eq!(wired(", cni: true"), Attachment::Cni);
    for (extra, path) in [
        (", netns: /x, device: tap0", "endpoints[0].device"),
        (", interface: eth1", "endpoints[0].interface"),
        (", cni: true, device: tap0", "endpoints[0].cni"),
        (", name: other", "endpoints[0].name"),
        (", netns: x", "endpoints[0].netns"),
        (", netns: /run/../x", "endpoints[0].netns"),
        (", device: a-name-too-long-for-it", "endpoints[0].device"),
        (", device: a/b", "endpoints[0].device"),
        (", ip: 10.0.0.5, ips: [10.0.0.6]", "endpoints[0].ip"),
        (", mac: \"01:00:00:00:00:01\"", "endpoints[0].mac"),
        (", labels: {a: 5}", "endpoints[0].labels.a"),
        (", labels: {a b: x}", "endpoints[0].labels.a b"),
        (", security_groups: [g, g]", "endpoints[0].security_groups[1]"),
    ] {
        assert_eq!(only(&doc(extra)).path, path);
    }
}

#[test]
fn a_reference_to_an_object_with_a_fault_is_not_reported_as_a_second_fault() {
    let text = "version: 1\nnodes: [{name: n1, address: 192.0.2.300}]\nsubnets: [{name: s, vpc: default, cidr: 10.0.0.0/24, node: n1}, {name: t, vpc: default, cidr: 10.0.1.0/24, node: nx}]\n";
    assert_eq!(codes(text), ["nodes[0].address: InvalidValue", "subnets[default/t].node: DanglingReference"]);
}

#[test]
fn input_is_bounded_in_size_and_depth() {
    let big = vec![b' '; MAX_BYTES + 1];
    assert_eq!(parse(&big, Format::Json).unwrap_err()[0].code, Reason::InputTooLarge);
    for format in [Format::Json, Format::Yaml] {
        let deep = "[".repeat(200_000);
        assert_eq!(parse(deep.as_bytes(), format).unwrap_err()[0].code, Reason::SyntaxError);
    }
    let mut bomb = String::from("version: 1\na: &a [x,x,x,x,x,x,x,x,x]\n");
    for (new, old) in ["b", "c", "d", "e", "f", "g", "h"].iter().zip(["a", "b", "c", "d", "e", "f", "g"]) {
        let nine = vec![format!("*{old}"); 9].join(",");
        bomb.push_str(&format!("{new}: &{new} [{nine}]\n"));
    }
    assert_eq!(only(&bomb).code, Reason::SyntaxError);
    assert_eq!(parse(&[0xff, 0xfe, b'a'], Format::Yaml).unwrap_err()[0].message, "the document is not UTF-8");
}

#[test]
fn aliases_repeat_small_things_and_merge_keys_are_no_fields() {
    let w = world(
        "version: 1\nvpcs: [{name: a}]\ncidr_groups:\n - {name: x, vpc: a, cidrs: &c [10.0.0.0/8]}\n - {name: y, vpc: a, cidrs: *c}\n",
    );
    assert!(w.cidr_groups.values().all(|g| g.entries.len() == 1));
    assert_eq!(codes("version: 1\nvpcs: [{<<: {name: a}, name: b}]"), ["vpcs[0].<<: UnknownField"]);
}

#[test]
fn load_balancers_are_read_strictly() {
    let lb = |rest: &str| format!("version: 1\nload_balancers:\n  - {{name: lb, vpc: default, {rest}}}\n");
    for (text, path, code) in [
        ("vip: 10.96.0.1, ports: [{port: 0}]", "load_balancers[0].ports[0].port", "OutOfRange"),
        (
            "vip: 10.96.0.1, ports: [{port: 80, protocol: icmp}]",
            "load_balancers[0].ports[0].protocol",
            "InvalidValue",
        ),
        ("ports: [{port: 80}]", "load_balancers[0].vip", "MissingField"),
        ("vip: 10.96.0.1", "load_balancers[0].ports", "MissingField"),
        (
            "vip: 10.96.0.1, ports: [{port: 80}], affinity_timeout: 60",
            "load_balancers[0].affinity_timeout",
            "ConflictingFields",
        ),
        (
            "vip: 10.96.0.1, ports: [{port: 80}], session_affinity: true, affinity_timeout: 65536",
            "load_balancers[0].affinity_timeout",
            "OutOfRange",
        ),
        (
            "vip: 10.96.0.1, ports: [{port: 80}], health_check: {enabled: true}",
            "load_balancers[0].health_check",
            "NotSupportedYet",
        ),
        (
            "vip: 10.96.0.1, ports: [{port: 80, backend: []}]",
            "load_balancers[0].ports[0].backend",
            "UnknownField",
        ),
    ] {
        let all = codes(&lb(text));
        assert!(all.contains(&format!("{path}: {code}")), "{text}: {all:?}");
    }
}
