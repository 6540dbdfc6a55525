//! `bench services`: what Services cost a node, against direct connections and kube-proxy in nftables mode. The API server is one in memory;
//! agent, kube-proxy, kernel and connections are real.

mod cgroup;
mod changes;
mod connect;
mod maps;
mod objects;
mod ours;
mod proxy;
mod side;

use std::time::Instant;

use anyhow::{Context, Result};

use self::cgroup::Group;
use self::ours::Ours;
use self::proxy::Proxy;
use self::side::Side;
use crate::measure::{Goal, against};
use crate::node::Effort;
use crate::outside::{self, Outside};
use crate::parts::chosen;
use crate::report::Measure;
use crate::traffic::{Turns, take_turns};

const PEER: &str = "kube-proxy, nftables mode";
const DIRECT: &str = "the same backends, directly";

/// One part of the benchmark.
type Part = fn(Effort, &Group) -> Result<Vec<Measure>>;

const PARTS: [(&str, Part); 4] = [
    ("maps", |effort, _| maps::maps(effort)),
    ("services-1", |effort, group| known(effort, group, 1)),
    ("services-1000", |effort, group| known(effort, group, 1_000)),
    ("services-10000", |effort, group| known(effort, group, 10_000)),
];

/// Everything, or the parts that are named.
///
/// # Errors
/// When there is no such part, something cannot be set up or a Service does not answer.
pub fn bench(effort: Effort, only: &[String]) -> Result<Vec<Measure>> {
    let group = Group::new()?;
    let mut measures = Vec::new();
    for (name, part) in chosen(&PARTS, only)? {
        let begin = Instant::now();
        let new = part(effort, &group).with_context(|| name.to_owned())?;
        eprintln!("{name}: {:.0} s", begin.elapsed().as_secs_f32());
        for m in &new {
            eprintln!("  {}: {:.3} {} ratio {:?} {:?}", m.measure, m.ours, m.unit, m.ratio, m.peer);
        }
        measures.extend(new);
    }
    Ok(measures)
}

/// Rows of a number of Services, against kube-proxy or the reason why it is not there.
struct Table {
    label: String,
    left_out: Option<String>,
    rows: Vec<Measure>,
}

impl Table {
    /// A row against kube-proxy.
    fn row(&mut self, measure: &str, unit: &str, ours: &[f64], theirs: &[f64], goal: Option<Goal>) {
        let row = against(&self.label, measure, unit, ours, PEER, theirs, goal);
        self.rows.push(Measure { left_out: self.left_out.clone(), ..row });
    }
}

/// Everything that is measured with `services` Services of two endpoints each.
fn known(effort: Effort, group: &Group, services: usize) -> Result<Vec<Measure>> {
    let left_out = proxy::missing();
    if let Some(reason) = &left_out {
        eprintln!("{PEER}: left out: {reason}");
    }
    let mut table = Table { label: label(services), left_out, rows: Vec::new() };
    let mut ours = Ours::start(services, group)?;
    let mut proxy = if table.left_out.is_none() { Some(Proxy::start(services).context(PEER)?) } else { None };
    if services > 1 {
        starts(&mut table, effort, &mut ours, proxy.as_mut())?;
        changes(&mut table, effort, &ours.side, proxy.as_ref().map(|p| &p.side))?;
        let memory = ours.memory()?;
        let theirs = proxy.as_ref().map(Proxy::memory).transpose()?;
        let goal = (services == 10_000).then_some(Goal::AtMost(0.3));
        table.row("memory, resident when settled", "MiB", &[memory], theirs.as_slice(), goal);
    }
    // Flat means as with one Service: a node that knows one runs beside.
    let one = if services > 1 { Some(Ours::start(1, group)?) } else { None };
    connects(&mut table, effort, &ours.side, one.as_ref().map(|o| &o.side), proxy.as_ref().map(|p| &p.side))?;
    Ok(table.rows)
}

fn label(services: usize) -> String {
    format!("services: {services} known")
}

/// From the start of the process, nothing being programmed and all objects being there, until the last of the Services that can answer does.
fn starts(table: &mut Table, effort: Effort, ours: &mut Ours, mut proxy: Option<&mut Proxy>) -> Result<()> {
    let (mut us, mut them) = (Vec::new(), Vec::new());
    let (beside, mut theirs) = (Outside::named(), Vec::new());
    for _ in 0..effort.rounds.div_ceil(4) {
        us.push(ours.restart_cold()?);
        if let Some(proxy) = proxy.as_mut() {
            them.push(proxy.restart_cold()?);
        }
        if let Some(peer) = &beside {
            let [cold] = peer.times(&format!("services-{}", ours.side.services))?;
            theirs.push(cold);
        }
    }
    let what = "process start with the objects present, until the last answer";
    let goal = Some(Goal::AtMost(0.5));
    table.row(what, "ms", &us, &them, goal);
    if beside.is_some() {
        let label = format!("{}, beside a peer", table.label);
        table.rows.push(against(&label, what, "ms", &us, outside::NAME, &theirs, goal));
    }
    Ok(())
}

/// One Service comes on top of the others and goes again.
fn changes(table: &mut Table, effort: Effort, ours: &Side, proxy: Option<&Side>) -> Result<()> {
    let (mut us, mut them) = (changes::Times::default(), changes::Times::default());
    for _ in 0..effort.changes.div_ceil(15) {
        changes::one(ours, &mut us)?;
        if let Some(proxy) = proxy {
            changes::one(proxy, &mut them)?;
        }
    }
    table.row("one Service added, until it answers", "ms", &us.comes, &them.comes, None);
    table.row("one Service removed, until it answers no more", "ms", &us.goes, &them.goes, None);
    Ok(())
}

/// Connections to a ClusterIP: against the same backend asked directly, against ourselves with one Service, against kube-proxy.
fn connects(
    table: &mut Table,
    effort: Effort,
    ours: &Side,
    one: Option<&Side>,
    proxy: Option<&Side>,
) -> Result<()> {
    let mut contenders = vec![("flowloom", ours, vec![ours.vip()]), (DIRECT, ours, ours.direct())];
    contenders.extend(one.map(|side| ("1 Service known", side, vec![side.vip()])));
    contenders.extend(proxy.map(|side| (PEER, side, vec![side.vip()])));
    let Turns { rates, costs } = take_turns(contenders.len(), effort.rounds, |i| {
        let (name, side, to) = &contenders[i];
        connect::run(side, to, effort.run).with_context(|| format!("{to:?}, {name}"))
    })?;
    const RATE: &str = "TCP connect-request-close to a ClusterIP, rate";
    const COST: &str = "TCP connect-request-close to a ClusterIP, CPU per operation";
    for (i, (name, ..)) in contenders.iter().enumerate().skip(1).filter(|(_, c)| c.0 != PEER) {
        let goal = Some(Goal::AtLeast(0.95));
        table.rows.push(against(&table.label, RATE, "1/s", &rates[0], name, &rates[i], goal));
        table.rows.push(against(&table.label, COST, "ns", &costs[0], name, &costs[i], None));
    }
    let empty = (Vec::new(), Vec::new());
    let theirs = match proxy.and(rates.last().zip(costs.last())) {
        Some((rates, costs)) => (rates, costs),
        None => (&empty.0, &empty.1),
    };
    table.row(RATE, "1/s", &rates[0], theirs.0, Some(Goal::AtLeast(1.0)));
    table.row(COST, "ns", &costs[0], theirs.1, None);
    Ok(())
}
