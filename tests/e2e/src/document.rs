//! Desired-state documents as values, so that tests can take a rule away and put it back.

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// A document under construction.
#[derive(Clone, Debug, PartialEq)]
pub struct Document(pub Value);

impl Document {
    /// Nodes `n1`, `n2` ... of a laboratory and nothing else.
    #[must_use]
    pub fn of_nodes(addresses: &[Vec<String>]) -> Self {
        let nodes: Vec<Value> = addresses
            .iter()
            .enumerate()
            .map(|(i, a)| json!({"name": format!("n{}", i + 1), "addresses": a}))
            .collect();
        Self(json!({"version": 1, "nodes": nodes}))
    }

    /// Adds objects of a kind.
    #[must_use]
    pub fn with(mut self, kind: &str, objects: Value) -> Self {
        self.add(kind, objects);
        self
    }

    /// Adds objects of a kind (an array or one object).
    pub fn add(&mut self, kind: &str, objects: Value) {
        let list = &mut self.0[kind];
        if list.is_null() {
            *list = json!([]);
        }
        if let Some(list) = list.as_array_mut() {
            match objects {
                Value::Array(many) => list.extend(many),
                one => list.push(one),
            }
        }
    }

    /// Two tenants, `red` and `blue`, with a subnet and the endpoints `a` (host 10) and `b` (host 20) each: same names, same addresses.
    #[must_use]
    pub fn with_two_tenants(
        self,
        subnet: impl Fn(&str) -> Value,
        endpoint: impl Fn(&str, &str, u8) -> Value,
    ) -> Self {
        let mut document = self;
        for vpc in ["red", "blue"] {
            document.add("vpcs", json!({"name": vpc}));
            document.add("subnets", subnet(vpc));
            document.add("endpoints", json!([endpoint(vpc, "a", 10), endpoint(vpc, "b", 20)]));
        }
        document
    }

    fn object(&mut self, kind: &str, vpc: &str, name: &str) -> Result<&mut Value> {
        self.0[kind]
            .as_array_mut()
            .and_then(|list| list.iter_mut().find(|o| o["vpc"] == vpc && o["name"] == name))
            .with_context(|| format!("no {kind} {vpc}/{name} in the document"))
    }

    /// A group's rules.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn rules(&mut self, vpc: &str, group: &str) -> Result<&mut Vec<Value>> {
        self.object("security_groups", vpc, group)?["rules"].as_array_mut().context("a group without rules")
    }

    /// Takes the rule `vpc/group/rule` away and returns it.
    ///
    /// # Errors
    /// When there is no such rule.
    pub fn take_rule(&mut self, rule: &str) -> Result<Value> {
        let parts: Vec<&str> = rule.split('/').collect();
        let [vpc, group, id] = parts[..] else { anyhow::bail!("{rule} is not vpc/group/rule") };
        let rules = self.rules(vpc, group)?;
        let at = rules.iter().position(|r| r["id"] == id).with_context(|| format!("no rule {rule}"))?;
        Ok(rules.remove(at))
    }

    /// An endpoint.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn endpoint(&mut self, vpc: &str, name: &str) -> Result<&mut Value> {
        self.object("endpoints", vpc, name)
    }

    /// Removes an object.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn remove(&mut self, kind: &str, vpc: &str, name: &str) -> Result<Value> {
        let list = self.0[kind].as_array_mut().with_context(|| format!("no {kind}"))?;
        let at = list.iter().position(|o| o["vpc"] == vpc && o["name"] == name).context("no such object")?;
        Ok(list.remove(at))
    }

    /// As JSON.
    #[must_use]
    pub fn text(&self) -> String {
        format!("{:#}\n", self.0)
    }
}
