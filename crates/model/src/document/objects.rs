//! Readers of nodes, VPCs, subnets, endpoints and CIDR groups.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::reader::{Fields, Path, Reader};
use super::schema;
use super::tree::{Node as Value, Tree};
use crate::ranges::Family;
use crate::subnet::first_usable;
use crate::{
    AllowLocalhost, Attachment, CidrEntry, CidrGroup, CniRange, DefaultPolicy, Endpoint, EndpointName, Fault,
    Labels, Mac, NamedPort, Node, Protocol, Reason, Subnet, Vni, Vpc, VpcName,
};

/// Longest label key, bytes: a DNS name, a slash and a name.
const LABEL_KEY: usize = 317;
/// Longest label value, bytes.
pub(crate) const LABEL_VALUE: usize = 253;

impl Reader {
    /// A field, when it is there. The absence of a required one is a fault already.
    pub(crate) fn at<T>(
        &mut self,
        path: &Path<'_>,
        fields: &Fields<'_>,
        name: &str,
        read: impl FnOnce(&mut Self, &Path<'_>, &Tree) -> Option<T>,
    ) -> Option<T> {
        let tree = fields.find(name)?;
        read(self, &path.field(name), tree)
    }

    pub(crate) fn labels(&mut self, path: &Path<'_>, tree: &Tree) -> Option<Labels> {
        let Value::Map(map) = &tree.node else {
            self.fault(Reason::WrongType, path, tree, "must be a mapping of strings to strings");
            return None;
        };
        let mut labels = Labels::new();
        for (key, value) in map {
            let at = path.field(key);
            if key.is_empty()
                || key.len() > LABEL_KEY
                || key.chars().any(|c| c.is_whitespace() || c.is_control())
            {
                let message = format!("a label key is 1..={LABEL_KEY} bytes without white space");
                self.fault(Reason::InvalidValue, &at, value, message);
            }
            let Some(text) = self.label_value(&at, value) else { continue };
            if labels.insert(key.clone(), text.to_owned()).is_some() {
                self.fault(Reason::DuplicateField, &at, value, "is here twice; keep one");
            }
        }
        Some(labels)
    }

    pub(crate) fn label_value<'t>(&mut self, path: &Path<'_>, tree: &'t Tree) -> Option<&'t str> {
        let text = self.text(path, tree)?;
        if text.len() > LABEL_VALUE || text.chars().any(char::is_control) {
            let message = format!("a label value is at most {LABEL_VALUE} bytes without control characters");
            self.fault(Reason::InvalidValue, path, tree, message);
            return None;
        }
        Some(text)
    }

    /// A list of distinct values.
    pub(crate) fn distinct<T: Ord + Clone>(
        &mut self,
        path: &Path<'_>,
        tree: &Tree,
        mut read: impl FnMut(&mut Self, &Path<'_>, &Tree) -> Option<T>,
    ) -> BTreeSet<T> {
        let mut seen = BTreeSet::new();
        self.each(path, Some(tree), |r, p, t| {
            let v = read(r, p, t)?;
            if !seen.insert(v) {
                r.fault(Reason::DuplicateField, p, t, "is in the list twice; keep one");
            }
            Some(())
        });
        seen
    }
}

pub(super) fn node(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<Node> {
    let f = r.fields(path, tree, &schema::NODE)?;
    let name = r.at(path, &f, "name", Reader::name)?;
    let addresses = r.one_or_many(path, &f, ["address", "addresses"], Reader::ip);
    if !f.has("address") && !f.has("addresses") {
        r.missing(path, &f, "address").message =
            "address or addresses is required: the node's underlay address".into();
    }
    let zone = r.at(path, &f, "zone", |r, p, t| r.short_text(p, t, LABEL_VALUE).map(str::to_owned));
    Some(Node { name, addresses, zone })
}

pub(super) fn vpc(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<Vpc> {
    let f = r.fields(path, tree, &schema::VPC)?;
    let name = r.at(path, &f, "name", Reader::name)?;
    let vni = r.at(path, &f, "vni", |r, p, t| r.number(p, t, 1..=Vni::MAX)).and_then(Vni::new);
    let words = [("allow", DefaultPolicy::Allow), ("deny", DefaultPolicy::Deny)];
    let default_policy =
        r.at(path, &f, "default_policy", |r, p, t| r.choice(p, t, &words)).unwrap_or_default();
    Some(Vpc { name, vni, default_policy })
}

pub(super) fn subnet(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<Subnet> {
    let f = r.fields(path, tree, &schema::SUBNET)?;
    let name = r.at(path, &f, "name", Reader::name);
    let vpc = vpc_of(r, path, &f);
    let cidrs = r.one_or_many(path, &f, ["cidr", "cidrs"], Reader::cidr);
    if !f.has("cidr") && !f.has("cidrs") {
        r.missing(path, &f, "cidr").message = "cidr or cidrs is required".into();
    }
    let mut gateways = r.one_or_many(path, &f, ["gateway", "gateways"], Reader::ip);
    let exclude = r
        .at(path, &f, "exclude_cidrs", |r, p, t| Some(r.each(p, Some(t), Reader::range)))
        .unwrap_or_default();
    let node = r.at(path, &f, "node", Reader::name);
    let cni_ranges =
        r.at(path, &f, "cni_ranges", |r, p, t| Some(r.each(p, Some(t), cni_range))).unwrap_or_default();
    let mtu = r.at(path, &f, "mtu", |r, p, t| r.number(p, t, 576..=u16::MAX));
    for net in &cidrs {
        if !gateways.iter().any(|g| Family::of(*g) == Family::of_net(net)) {
            gateways.extend(first_usable(net, &exclude));
        }
    }
    Some(Subnet { vpc: vpc?, name: name?, cidrs, gateways, exclude, node, cni_ranges, mtu })
}

fn cni_range(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<CniRange> {
    let f = r.fields(path, tree, &schema::CNI_RANGE)?;
    let node = r.at(path, &f, "node", Reader::name);
    let cidr = r.at(path, &f, "cidr", Reader::cidr);
    Some(CniRange { node: node?, cidr: cidr? })
}

pub(super) fn endpoint(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<Endpoint> {
    let f = r.fields(path, tree, &schema::ENDPOINT)?;
    let name = endpoint_name(r, path, &f);
    let vpc = vpc_of(r, path, &f);
    let subnet = r.at(path, &f, "subnet", Reader::name);
    let node = r.at(path, &f, "node", Reader::name);
    let ips = r.one_or_many(path, &f, ["ip", "ips"], Reader::ip);
    let mac = r.at(path, &f, "mac", mac);
    let security_groups =
        r.at(path, &f, "security_groups", |r, p, t| Some(r.distinct(p, t, Reader::name))).unwrap_or_default();
    let labels = r.at(path, &f, "labels", Reader::labels).unwrap_or_default();
    let named_ports =
        r.at(path, &f, "named_ports", |r, p, t| Some(r.each(p, Some(t), named_port))).unwrap_or_default();
    let attachment = attachment(r, path, &f);
    let words = [("always", AllowLocalhost::Always), ("policy", AllowLocalhost::Policy)];
    let allow_localhost =
        r.at(path, &f, "allow_localhost", |r, p, t| r.choice(p, t, &words)).unwrap_or_default();
    let endpoint = Endpoint {
        vpc: vpc?,
        name: name?,
        subnet: subnet?,
        ips,
        mac,
        node: node?,
        security_groups,
        labels,
        named_ports,
        attachment,
        allow_localhost,
    };
    Some(r.sharing(endpoint))
}

/// `vpc` of an object that lives in one.
pub(super) fn vpc_of(r: &mut Reader, path: &Path<'_>, f: &Fields<'_>) -> Option<VpcName> {
    r.at(path, f, "vpc", Reader::name)
}

/// `name`, or the field's older word `id`; both when they agree.
fn endpoint_name(r: &mut Reader, path: &Path<'_>, f: &Fields<'_>) -> Option<EndpointName> {
    let name: Option<EndpointName> = r.at(path, f, "name", Reader::name);
    let id: Option<EndpointName> = r.at(path, f, "id", Reader::name);
    match (f.find("name"), f.find("id")) {
        (None, None) => {
            r.missing(path, f, "name");
            None
        }
        (Some(t), Some(_)) if name.is_some() && id.is_some() && name != id => {
            r.fault(
                Reason::ConflictingFields,
                &path.field("name"),
                t,
                "name and id are the same thing and differ; keep one",
            );
            None
        }
        _ => name.or(id),
    }
}

fn mac(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<Mac> {
    let text = r.text(path, tree)?;
    match text.parse::<Mac>() {
        Ok(m) => Some(m),
        Err(_) => {
            let colons = text.replace(['-', '.'], ":").parse::<Mac>().ok().map(|m| m.to_string());
            let message = "is not a unicast MAC address: six pairs of hex digits with colons";
            r.fault(Reason::InvalidValue, path, tree, message).suggestion = colons;
            None
        }
    }
}

fn named_port(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<NamedPort> {
    let f = r.fields(path, tree, &schema::NAMED_PORT)?;
    let name = r.at(path, &f, "name", Reader::name);
    let words = [("tcp", Protocol::Tcp), ("udp", Protocol::Udp), ("sctp", Protocol::Sctp)];
    let protocol = r.at(path, &f, "protocol", |r, p, t| r.choice(p, t, &words));
    let port = r.at(path, &f, "port", |r, p, t| r.number(p, t, 1..=u16::MAX));
    Some(NamedPort { name: name?, protocol: protocol?, port: port? })
}

fn attachment(r: &mut Reader, path: &Path<'_>, f: &Fields<'_>) -> Attachment {
    let netns = r.at(path, f, "netns", |r, p, t| {
        let text = r.short_text(p, t, 4095)?;
        let parts_ok = !text.split('/').any(|c| c == "..");
        if text.starts_with('/') && parts_ok {
            return Some(PathBuf::from(text));
        }
        let near = (!text.contains('/')).then(|| format!("/run/netns/{text}"));
        r.fault(Reason::InvalidValue, p, t, "must be the absolute path of a namespace file").suggestion =
            near;
        None
    });
    let interface = r.at(path, f, "interface", device_name);
    let device = r.at(path, f, "device", device_name);
    let cni = r.at(path, f, "cni", Reader::boolean).unwrap_or(false);
    let mut conflict = |field: &str, message: &str| {
        if let Some(t) = f.find(field) {
            r.fault(Reason::ConflictingFields, &path.field(field), t, message);
        }
    };
    if f.has("netns") && f.has("device") {
        conflict("device", "netns and device exclude each other");
    }
    if cni && (f.has("netns") || f.has("device")) {
        conflict("cni", "an endpoint that a CNI request wires names neither netns nor device");
    }
    if f.has("interface") && !f.has("netns") {
        conflict("interface", "interface needs netns: it is the name inside that namespace");
    }
    match (netns, device, cni) {
        (Some(path), ..) => {
            Attachment::Netns { path, interface: interface.unwrap_or_else(|| "eth0".to_owned()) }
        }
        (_, Some(name), _) => Attachment::Device { name },
        (_, _, true) => Attachment::Cni,
        _ => Attachment::Managed,
    }
}

/// What the kernel takes as a device name (`dev_valid_name`).
fn device_name(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<String> {
    let text = r.text(path, tree)?;
    let ok = !text.is_empty()
        && text.len() <= 15
        && text != "."
        && text != ".."
        && !text.chars().any(|c| c == '/' || c == ':' || c.is_whitespace() || c.is_control());
    if ok {
        return Some(text.to_owned());
    }
    r.fault(
        Reason::InvalidValue,
        path,
        tree,
        "is not a device name: 1..15 bytes without '/', ':' and white space",
    );
    None
}

pub(super) fn cidr_group(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<CidrGroup> {
    let f = r.fields(path, tree, &schema::CIDR_GROUP)?;
    let name = r.at(path, &f, "name", Reader::name);
    let vpc = vpc_of(r, path, &f);
    r.at(path, &f, "description", |r, p, t| r.text(p, t).map(|_| ()));
    let plain = r.at(path, &f, "cidrs", |r, p, t| Some(r.each(p, Some(t), Reader::cidr))).unwrap_or_default();
    let mut entries: Vec<CidrEntry> =
        plain.into_iter().map(|cidr| CidrEntry { cidr, except: Vec::new() }).collect();
    entries.extend(
        r.at(path, &f, "entries", |r, p, t| Some(r.each(p, Some(t), cidr_entry))).unwrap_or_default(),
    );
    if !f.has("cidrs") && !f.has("entries") {
        let mut fault = Fault::new(
            Reason::MissingField,
            path.field("cidrs").to_string(),
            "",
            "cidrs or entries is required",
        );
        fault.line = f.line();
        r.push(fault);
    }
    Some(CidrGroup { vpc: vpc?, name: name?, entries })
}

fn cidr_entry(r: &mut Reader, path: &Path<'_>, tree: &Tree) -> Option<CidrEntry> {
    let f = r.fields(path, tree, &schema::CIDR_ENTRY)?;
    let cidr = r.at(path, &f, "cidr", Reader::cidr);
    let except =
        r.at(path, &f, "except_cidrs", |r, p, t| Some(r.each(p, Some(t), Reader::cidr))).unwrap_or_default();
    Some(CidrEntry { cidr: cidr?, except })
}
