//! Paths and queries of the API.

/// What a path means.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) group: String,
    pub(super) version: String,
    pub(super) namespace: String,
    pub(super) plural: String,
    pub(super) name: String,
    pub(super) subresource: String,
}

impl Target {
    pub(super) fn parse(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let (group, version, rest) = match parts.as_slice() {
            ["api", version, rest @ ..] => ("", *version, rest),
            ["apis", group, version, rest @ ..] => (*group, *version, rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, plural, more @ ..] if *plural != "status" => {
                (*namespace, [&[*plural], more].concat())
            }
            other => ("", other.to_vec()),
        };
        let (plural, name, subresource) = match rest.as_slice() {
            [plural] => (*plural, "", ""),
            [plural, name] => (*plural, *name, ""),
            [plural, name, subresource] => (*plural, *name, *subresource),
            _ => return None,
        };
        Some(Self {
            group: group.into(),
            version: version.into(),
            namespace: namespace.into(),
            plural: plural.into(),
            name: name.into(),
            subresource: subresource.into(),
        })
    }

    /// Key of the collection, without namespace.
    pub(super) fn collection(&self) -> String {
        format!("{}/{}/{}", self.group, self.version, self.plural)
    }

    /// As RBAC writes it.
    pub(super) fn resource(&self) -> String {
        if self.subresource.is_empty() {
            self.plural.clone()
        } else {
            format!("{}/{}", self.plural, self.subresource)
        }
    }
}

/// Keys and values, decoded.
pub(super) fn query(text: &str) -> Vec<(String, String)> {
    let pairs = text.split('&').filter(|p| !p.is_empty());
    pairs.map(|p| p.split_once('=').unwrap_or((p, ""))).map(|(k, v)| (decode(k), decode(v))).collect()
}

fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let hex = (bytes[at] == b'%').then(|| text.get(at + 1..at + 3)).flatten();
        match hex.and_then(|h| u8::from_str_radix(h, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(if bytes[at] == b'+' { b' ' } else { bytes[at] });
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_as_the_api_writes_them() {
        let t = Target::parse("/apis/coordination.k8s.io/v1/namespaces/flowloom/leases/x").unwrap();
        assert_eq!(
            (t.group.as_str(), t.namespace.as_str(), t.name.as_str()),
            ("coordination.k8s.io", "flowloom", "x")
        );
        let t = Target::parse("/api/v1/namespaces/shop").unwrap();
        assert_eq!((t.plural.as_str(), t.name.as_str()), ("namespaces", "shop"));
        assert_eq!(Target::parse("/api/v1/nodes/n1/status").unwrap().resource(), "nodes/status");
        assert!(Target::parse("/version").is_none());
        assert_eq!(query("a=b%3Dc&d"), [("a".into(), "b=c".into()), ("d".into(), String::new())]);
    }
}
