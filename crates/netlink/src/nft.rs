//! flowloom's one nftables table: masquerade of the default VPC's traffic that leaves the node.
//!
//! The wanted table is rendered by a pure function, compared with what `nft` lists, and replaced as a whole in one
//! transaction only when they differ. An `nft` call costs 10-20 ms: for start and changes of subnets, never per
//! endpoint.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use ipnet::IpNet;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::netns::Netns;
use crate::types::LinkName;

const FAMILY: &str = "inet";
/// `srcnat`.
const PRIORITY: i32 = 100;

/// What is masqueraded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Masquerade {
    /// Sources: the default VPC's subnets.
    pub sources: Vec<IpNet>,
    /// Destinations that keep the source: the VPC's subnets, other nodes, what the configuration excludes.
    pub except: Vec<IpNet>,
    /// Only packets that leave on these links; empty = any but loopback.
    pub uplinks: Vec<LinkName>,
}

impl Masquerade {
    /// The table, as `nft -j list table` shows it apart from handles.
    #[must_use]
    pub fn render(&self, table: &str) -> Vec<Value> {
        let mut objects = vec![json!({"table": {"family": FAMILY, "name": table}})];
        let sets = [("except4", true, &self.except), ("except6", false, &self.except)]
            .into_iter()
            .chain([("sources4", true, &self.sources), ("sources6", false, &self.sources)]);
        for (name, v4, nets) in sets {
            let kind = if v4 { "ipv4_addr" } else { "ipv6_addr" };
            let mut set = json!({
                "family": FAMILY, "table": table, "name": name, "type": kind, "flags": ["interval"],
            });
            let elements = elements(nets, v4);
            if !elements.is_empty() {
                set["elem"] = elements.into();
            }
            objects.push(json!({ "set": set }));
        }
        objects.push(json!({"chain": {
            "family": FAMILY, "table": table, "name": "postrouting",
            "type": "nat", "hook": "postrouting", "prio": PRIORITY, "policy": "accept",
        }}));
        for (protocol, sources, except) in [("ip", "@sources4", "@except4"), ("ip6", "@sources6", "@except6")]
        {
            let address = |field, op, right| {
                json!({"match": {
                    "op": op, "left": {"payload": {"protocol": protocol, "field": field}}, "right": right,
                }})
            };
            objects.push(json!({"rule": {
                "family": FAMILY, "table": table, "chain": "postrouting",
                "expr": [
                    address("saddr", "==", sources), address("daddr", "!=", except),
                    self.output(), {"masquerade": null},
                ],
            }}));
        }
        objects
    }

    fn output(&self) -> Value {
        let (op, right) = match self.uplinks.as_slice() {
            [] => ("!=", json!("lo")),
            [one] => ("==", json!(one.as_str())),
            many => {
                let mut names: Vec<&str> = many.iter().map(LinkName::as_str).collect();
                names.sort_unstable();
                names.dedup();
                ("==", json!({ "set": names }))
            }
        };
        json!({"match": {"op": op, "left": {"meta": {"key": "oifname"}}, "right": right}})
    }
}

/// The networks of one family, merged, sorted, and in the form in which `nft` lists them.
fn elements(nets: &[IpNet], v4: bool) -> Vec<Value> {
    let nets: Vec<IpNet> = nets.iter().filter(|n| n.addr().is_ipv4() == v4).map(IpNet::trunc).collect();
    let mut merged = IpNet::aggregate(&nets);
    merged.sort();
    merged
        .into_iter()
        .map(|n| {
            let addr = n.addr().to_string();
            if n.prefix_len() == n.max_prefix_len() {
                json!(addr)
            } else {
                json!({"prefix": {"addr": addr, "len": n.prefix_len()}})
            }
        })
        .collect()
}

/// Runs `nft` for one table.
#[derive(Debug)]
pub struct Nft {
    table: String,
    program: PathBuf,
    netns: Option<Netns>,
}

impl Nft {
    /// The default table name.
    pub const TABLE: &str = "flowloom";

    /// For a table of the `inet` family, in the caller's namespace.
    ///
    /// # Errors
    /// When it is no name that `nft` could list again: a letter or `_`, then letters, digits, `_`, at most 63.
    pub fn new(table: &str) -> Result<Self> {
        let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        if table.is_empty()
            || table.len() > 63
            || !table.bytes().all(word)
            || table.as_bytes()[0].is_ascii_digit()
        {
            let reason =
                format!("{table:?} is no table name: a letter or '_', then letters, digits, '_', at most 63");
            return Err(Error::Nft { what: "setup", reason });
        }
        Ok(Self { table: table.into(), program: "nft".into(), netns: None })
    }

    /// In another namespace.
    #[must_use]
    pub fn in_netns(mut self, netns: Netns) -> Self {
        self.netns = Some(netns);
        self
    }

    /// Another program than the `nft` that is found in `PATH`.
    #[must_use]
    pub fn program(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = program.into();
        self
    }

    /// Makes the table as wanted; whether anything was written.
    ///
    /// # Errors
    /// [`Error::Nft`] with nft's own words; the table is then as before.
    pub fn ensure(&self, wanted: &Masquerade) -> Result<bool> {
        if self.is_current(wanted)? {
            return Ok(false);
        }
        let table = json!({"table": {"family": FAMILY, "name": self.table}});
        // Adding before deleting makes the deletion legal whether or not the table exists; all is one transaction.
        let mut commands = vec![json!({ "add": table }), json!({ "delete": table })];
        commands.extend(wanted.render(&self.table).into_iter().map(|o| json!({ "add": o })));
        self.run("transaction", &["-j", "-f", "-"], Some(&json!({ "nftables": commands })))?;
        Ok(true)
    }

    /// Whether the table is exactly as wanted.
    ///
    /// # Errors
    /// When `nft` cannot be run or its output not be parsed.
    pub fn is_current(&self, wanted: &Masquerade) -> Result<bool> {
        Ok(match self.list()? {
            None => false,
            Some(there) => normal(there) == normal(wanted.render(&self.table)),
        })
    }

    /// Removes the table; `Ok(false)` when there was none.
    ///
    /// # Errors
    /// When `nft` fails.
    pub fn remove(&self) -> Result<bool> {
        if self.list()?.is_none() {
            return Ok(false);
        }
        let command = json!({"nftables": [{"delete": {"table": {"family": FAMILY, "name": self.table}}}]});
        self.run("transaction", &["-j", "-f", "-"], Some(&command))?;
        Ok(true)
    }

    /// The table's objects, `None` when there is no such table.
    fn list(&self) -> Result<Option<Vec<Value>>> {
        let what = "list";
        let tables = self.run(what, &["-j", "list", "tables", FAMILY], None)?;
        let exists = parse(what, &tables)?.iter().any(|o| o["table"]["name"] == self.table.as_str());
        if !exists {
            return Ok(None);
        }
        let listing = self.run(what, &["-j", "list", "table", FAMILY, &self.table], None)?;
        parse(what, &listing).map(Some)
    }

    fn run(&self, what: &'static str, args: &[&str], input: Option<&Value>) -> Result<Vec<u8>> {
        let go = || self.spawn(args, input);
        let output = match &self.netns {
            None => go(),
            // A child starts in the namespace of the thread that starts it.
            Some(ns) => ns.run_in(go)?,
        };
        let output = output.map_err(|e| Error::Nft {
            what,
            reason: format!(
                "{} cannot be run: {e}; install nftables or turn masquerade off",
                self.program.display()
            ),
        })?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let text = String::from_utf8_lossy(&output.stderr).trim().chars().take(2000).collect();
        Err(Error::Nft { what, reason: text })
    }

    fn spawn(&self, args: &[&str], input: Option<&Value>) -> std::io::Result<Output> {
        let mut child = Command::new(&self.program)
            .args(args)
            .env("LC_ALL", "C")
            .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        if let (Some(value), Some(mut stdin)) = (input, child.stdin.take()) {
            // A broken pipe means that nft gave up early; its error output says why.
            match stdin.write_all(value.to_string().as_bytes()) {
                Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(e);
                }
                _ => {}
            }
        }
        child.wait_with_output()
    }
}

fn parse(what: &'static str, bytes: &[u8]) -> Result<Vec<Value>> {
    let fail = |reason: String| Error::Nft { what, reason };
    let mut value: Value =
        serde_json::from_slice(bytes).map_err(|e| fail(format!("unreadable output: {e}")))?;
    match value["nftables"].take() {
        Value::Array(list) => Ok(list),
        _ => Err(fail("output without \"nftables\"".into())),
    }
}

/// Without what only the kernel knows (handles, the tool's version), sets sorted; the order of rules stays.
fn normal(objects: Vec<Value>) -> Vec<Value> {
    let mut list: Vec<Value> = objects.into_iter().filter(|o| o.get("metainfo").is_none()).collect();
    for object in &mut list {
        if let Some(fields) = object.as_object_mut().and_then(|o| o.values_mut().next()?.as_object_mut()) {
            fields.remove("handle");
            if let Some(Value::Array(elements)) = fields.get_mut("elem") {
                elements.sort_by_key(Value::to_string);
            }
            if let Some(expr) = fields.get_mut("expr").and_then(Value::as_array_mut) {
                for set in expr.iter_mut().filter_map(|e| e.pointer_mut("/match/right/set")?.as_array_mut()) {
                    set.sort_by_key(Value::to_string);
                }
            }
        }
    }
    // A stable sort by kind and name: rules have no name and keep their order.
    list.sort_by_key(|o| {
        let (kind, body) =
            o.as_object().and_then(|m| m.iter().next()).map_or(("", &Value::Null), |(k, v)| (k, v));
        (kind.to_owned(), body["name"].as_str().unwrap_or_default().to_owned())
    });
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(list: &[&str]) -> Vec<IpNet> {
        list.iter().map(|n| n.parse().unwrap()).collect()
    }

    #[test]
    fn overlapping_networks_are_merged_since_an_interval_set_refuses_overlap() {
        let e = elements(&nets(&["10.0.0.0/8", "10.1.0.0/16", "192.0.2.1/32", "fd00::/64"]), true);
        assert_eq!(e, vec![json!({"prefix": {"addr": "10.0.0.0", "len": 8}}), json!("192.0.2.1")]);
    }

    #[test]
    fn handles_and_order_of_elements_are_no_difference_but_order_of_rules_is() {
        let m = Masquerade { sources: nets(&["10.0.0.0/8", "192.0.2.0/24"]), ..Masquerade::default() };
        let wanted = m.render("t");
        let mut listed = wanted.clone();
        listed.insert(0, json!({"metainfo": {"version": "1"}}));
        listed[1]["table"]["handle"] = 4.into();
        let set = listed.iter_mut().find(|o| o["set"]["name"] == "sources4").unwrap();
        set["set"]["elem"].as_array_mut().unwrap().reverse();
        assert_eq!(normal(listed.clone()), normal(wanted.clone()));
        let n = listed.len();
        listed.swap(n - 1, n - 2);
        assert_ne!(normal(listed), normal(wanted));
    }
}
