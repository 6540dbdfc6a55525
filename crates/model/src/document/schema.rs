//! The fields of every kind, in one table: what the reader accepts and what `docs/desired-state.md` lists.

/// When a field is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Support {
    /// Must be there.
    Required,
    /// May be there.
    Optional,
    /// Specified, refused until its work comes.
    Later,
}

/// One field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Field {
    /// Its key.
    pub name: &'static str,
    /// Whether it is read.
    pub support: Support,
}

/// One mapping of the document.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Where it occurs, as the documentation writes it: `endpoints[]`, `security_groups[].rules[]`.
    pub at: &'static str,
    /// Its fields.
    pub fields: &'static [Field],
}

const fn required(name: &'static str) -> Field {
    Field { name, support: Support::Required }
}
const fn optional(name: &'static str) -> Field {
    Field { name, support: Support::Optional }
}
const fn later(name: &'static str) -> Field {
    Field { name, support: Support::Later }
}

pub(crate) const DOCUMENT: Shape = Shape {
    at: "document",
    fields: &[
        required("version"),
        optional("nodes"),
        optional("vpcs"),
        optional("subnets"),
        optional("endpoints"),
        optional("security_groups"),
        optional("cidr_groups"),
        optional("load_balancers"),
        later("provider_networks"),
        later("route_tables"),
        later("policy_routes"),
        later("gateways"),
        later("nat_rules"),
        later("dns_records"),
        later("identity_groups"),
        later("policy_rollouts"),
    ],
};

pub(crate) const NODE: Shape = Shape {
    at: "nodes[]",
    fields: &[required("name"), optional("address"), optional("addresses"), optional("zone")],
};

pub(crate) const VPC: Shape =
    Shape { at: "vpcs[]", fields: &[required("name"), optional("vni"), optional("default_policy")] };

pub(crate) const SUBNET: Shape = Shape {
    at: "subnets[]",
    fields: &[
        required("name"),
        required("vpc"),
        optional("cidr"),
        optional("cidrs"),
        optional("gateway"),
        optional("gateways"),
        optional("exclude_cidrs"),
        optional("node"),
        optional("cni_ranges"),
        optional("mtu"),
        later("provider_network"),
        later("vlan"),
        later("dhcp"),
    ],
};

pub(crate) const CNI_RANGE: Shape =
    Shape { at: "subnets[].cni_ranges[]", fields: &[required("node"), required("cidr")] };

pub(crate) const ENDPOINT: Shape = Shape {
    at: "endpoints[]",
    fields: &[
        optional("name"),
        optional("id"),
        required("vpc"),
        required("subnet"),
        required("node"),
        optional("ip"),
        optional("ips"),
        optional("mac"),
        optional("security_groups"),
        optional("labels"),
        optional("named_ports"),
        optional("netns"),
        optional("interface"),
        optional("device"),
        optional("cni"),
        optional("allow_localhost"),
    ],
};

pub(crate) const NAMED_PORT: Shape = Shape {
    at: "endpoints[].named_ports[]",
    fields: &[required("name"), required("protocol"), required("port")],
};

pub(crate) const SECURITY_GROUP: Shape = Shape {
    at: "security_groups[]",
    fields: &[
        required("name"),
        required("vpc"),
        optional("tier"),
        optional("default_deny_ingress"),
        optional("default_deny_egress"),
        optional("rules"),
        optional("description"),
    ],
};

pub(crate) const RULE: Shape = Shape {
    at: "security_groups[].rules[]",
    fields: &[
        required("id"),
        required("priority"),
        required("direction"),
        required("action"),
        optional("protocol"),
        optional("remote_cidr"),
        optional("except_cidrs"),
        optional("remote_cidr_group"),
        optional("remote_group"),
        optional("remote_endpoint_selector"),
        optional("remote_endpoint_expressions"),
        optional("remote_entities"),
        optional("ports"),
        optional("named_ports"),
        optional("icmp_type"),
        optional("icmp_code"),
        optional("stateful"),
        optional("log"),
        optional("description"),
        later("remote_service"),
        later("remote_fqdns"),
    ],
};

pub(crate) const PORT_RANGE: Shape =
    Shape { at: "security_groups[].rules[].ports[]", fields: &[required("from"), required("to")] };

pub(crate) const EXPRESSION: Shape = Shape {
    at: "security_groups[].rules[].remote_endpoint_expressions[]",
    fields: &[required("key"), required("operator"), optional("values")],
};

pub(crate) const CIDR_GROUP: Shape = Shape {
    at: "cidr_groups[]",
    fields: &[
        required("name"),
        required("vpc"),
        optional("cidrs"),
        optional("entries"),
        optional("description"),
    ],
};

pub(crate) const CIDR_ENTRY: Shape =
    Shape { at: "cidr_groups[].entries[]", fields: &[required("cidr"), optional("except_cidrs")] };

pub(crate) const LOAD_BALANCER: Shape = Shape {
    at: "load_balancers[]",
    fields: &[
        required("name"),
        required("vpc"),
        optional("vip"),
        optional("vips"),
        required("ports"),
        optional("session_affinity"),
        optional("affinity_timeout"),
        later("subnets"),
        later("selection_fields"),
        later("health_check"),
    ],
};

pub(crate) const LOAD_BALANCER_PORT: Shape = Shape {
    at: "load_balancers[].ports[]",
    fields: &[optional("name"), required("port"), optional("protocol"), optional("backends")],
};

pub(crate) const LOAD_BALANCER_BACKEND: Shape = Shape {
    at: "load_balancers[].ports[].backends[]",
    fields: &[required("ip"), required("port"), optional("healthy")],
};

/// Every mapping of the document.
pub const SHAPES: &[Shape] = &[
    DOCUMENT,
    NODE,
    VPC,
    SUBNET,
    CNI_RANGE,
    ENDPOINT,
    NAMED_PORT,
    SECURITY_GROUP,
    RULE,
    PORT_RANGE,
    EXPRESSION,
    CIDR_GROUP,
    CIDR_ENTRY,
    LOAD_BALANCER,
    LOAD_BALANCER_PORT,
    LOAD_BALANCER_BACKEND,
];
