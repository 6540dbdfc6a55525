//! Policy routing rules that choose a table.

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use nix::errno::Errno;

use crate::PROTOCOL;
use crate::error::{Action, Result};
use crate::handle::Handle;
use crate::route::{RouteTable, family};
use crate::socket::Request;
use crate::types::LinkName;

/// Which family's packets a rule sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RuleFamily {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// One of flowloom's rules: what it matches, and the table it chooses.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rule {
    /// Family.
    pub family: RuleFamily,
    /// Lower is asked first.
    pub priority: u32,
    /// Source.
    pub from: Option<IpNet>,
    /// Destination.
    pub to: Option<IpNet>,
    /// Firewall mark and mask.
    pub mark: Option<(u32, u32)>,
    /// Link the packet came in on (`lo` = the host's own packets).
    pub input: Option<LinkName>,
    /// Table.
    pub table: RouteTable,
}

impl Rule {
    fn message(&self) -> RuleMessage {
        let mut m = RuleMessage::default();
        m.header.family = family(self.family == RuleFamily::V4);
        m.header.action = RuleAction::ToTable;
        m.header.table = u8::try_from(self.table.0).unwrap_or(0);
        let a = &mut m.attributes;
        a.push(RuleAttribute::Priority(self.priority));
        a.push(RuleAttribute::Table(self.table.0));
        a.push(RuleAttribute::Protocol(PROTOCOL.into()));
        if let Some(net) = self.from {
            m.header.src_len = net.prefix_len();
            a.push(RuleAttribute::Source(net.network()));
        }
        if let Some(net) = self.to {
            m.header.dst_len = net.prefix_len();
            a.push(RuleAttribute::Destination(net.network()));
        }
        if let Some((mark, mask)) = self.mark {
            a.push(RuleAttribute::FwMark(mark));
            a.push(RuleAttribute::FwMask(mask));
        }
        a.extend(self.input.as_ref().map(|n| RuleAttribute::Iifname(n.to_string())));
        m
    }

    /// `None` for what is not flowloom's or what this type cannot express.
    fn from_message(m: &RuleMessage, family: RuleFamily) -> Option<Self> {
        let mut rule = Self {
            family,
            priority: 0,
            from: None,
            to: None,
            mark: None,
            input: None,
            table: RouteTable(u32::from(m.header.table)),
        };
        let (mut ours, mut mark, mut mask) = (false, None, u32::MAX);
        for a in &m.attributes {
            match a {
                RuleAttribute::Priority(n) => rule.priority = *n,
                RuleAttribute::Table(n) => rule.table = RouteTable(*n),
                RuleAttribute::Source(ip) => rule.from = IpNet::new(*ip, m.header.src_len).ok(),
                RuleAttribute::Destination(ip) => rule.to = IpNet::new(*ip, m.header.dst_len).ok(),
                RuleAttribute::FwMark(n) => mark = Some(*n),
                RuleAttribute::FwMask(n) => mask = *n,
                RuleAttribute::Iifname(n) => rule.input = LinkName::new(n.as_str()).ok(),
                RuleAttribute::Protocol(p) => ours = u8::from(*p) == PROTOCOL,
                _ => {}
            }
        }
        rule.mark = mark.map(|m| (m, mask));
        (ours && m.header.action == RuleAction::ToTable).then_some(rule)
    }

    fn object(&self) -> String {
        format!("rule {} to table {}", self.priority, self.table.0)
    }
}

impl Handle {
    /// Makes the rule unless it is there.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn ensure_rule(&mut self, rule: &Rule) -> Result<bool> {
        if self.our_rules()?.contains(rule) {
            return Ok(false);
        }
        let request = Request {
            message: RouteNetlinkMessage::NewRule(rule.message()),
            flags: NLM_F_CREATE | NLM_F_EXCL,
            action: Action::Create,
            object: rule.object(),
            already: &[],
        };
        Ok(self.request(request)?.wrote)
    }

    /// Removes flowloom's rule; `Ok(false)` when it was gone.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn delete_rule(&mut self, rule: &Rule) -> Result<bool> {
        let request = Request {
            message: RouteNetlinkMessage::DelRule(rule.message()),
            flags: 0,
            action: Action::Delete,
            object: rule.object(),
            already: &[Errno::ENOENT, Errno::ESRCH],
        };
        Ok(self.request(request)?.wrote)
    }

    /// flowloom's rules, both families.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub fn our_rules(&mut self) -> Result<Vec<Rule>> {
        let mut rules = Vec::new();
        for f in [RuleFamily::V4, RuleFamily::V6] {
            let mut m = RuleMessage::default();
            m.header.family = family(f == RuleFamily::V4);
            let list = self.dump(&RouteNetlinkMessage::GetRule(m), "rules")?;
            rules.extend(list.iter().filter_map(|m| match m {
                RouteNetlinkMessage::NewRule(m) => Rule::from_message(m, f),
                _ => None,
            }));
        }
        Ok(rules)
    }
}
