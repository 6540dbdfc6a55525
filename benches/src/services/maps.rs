//! Map programming alone: what a plan says is written into empty maps.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use flowloom_compiler::{
    BackendPlan, FrontendKey, FrontendPlan, ListId, NodePlan, Op, Scope, ServiceId, VpcId,
};
use flowloom_datapath::{Config, Datapath};
use flowloom_testkit::Bpffs;

use super::objects;
use crate::measure::{Goal, alone};
use crate::node::Effort;
use crate::report::Measure;

const VPC: VpcId = VpcId(100);

pub(super) fn maps(effort: Effort) -> Result<Vec<Measure>> {
    let fs = Bpffs::mount()?;
    let mut datapath = Datapath::open(Config {
        pin_root: fs.path().join("fl"),
        conntrack_entries: 8192,
        conntrack_new_entries: 8192,
        ..Config::default()
    })?;
    let mut measures = Vec::new();
    for services in [1_000, 10_000] {
        let plan = plan(services);
        let mut samples = Vec::new();
        for _ in 0..effort.rounds {
            let begin = Instant::now();
            let report = datapath.apply(&plan);
            samples.push(begin.elapsed().as_secs_f64() * 1e3);
            ensure!(report.is_clean(), "not everything was written: {:?}", report.failures);
            let there = datapath.view().services()?.services.len();
            ensure!(there == services, "{there} frontends of {services}");
            let removal = datapath.remaining(&NodePlan::default())?;
            ensure!(datapath.apply(&removal).is_clean(), "the maps were not emptied");
        }
        let what = format!("{services} services of two backends each, plan to maps");
        measures.push(alone("services: map programming", &what, &samples, "ms", Some(Goal::AtMost(200.0))));
    }
    Ok(measures)
}

fn plan(services: usize) -> Vec<Op> {
    let (mut lists, mut frontends) = (Vec::new(), Vec::new());
    for (at, number) in (0..services).zip(1..) {
        let backends: Arc<[BackendPlan]> = objects::far(at)
            .into_iter()
            .map(|ip| BackendPlan { ip: ip.into(), port: objects::TARGET, local: false })
            .collect();
        let (count, list) = (backends.len() as u32, ListId(number));
        lists.push((list, backends));
        let SocketAddr::V4(vip) = objects::vip(at) else { continue };
        let key = FrontendKey {
            vpc: VPC,
            ip: IpAddr::V4(*vip.ip()),
            protocol: 6,
            port: vip.port(),
            scope: Scope::Inside,
        };
        let frontend = FrontendPlan { service: ServiceId(number), list, count, affinity: 0, flags: 0 };
        frontends.push((key, frontend));
    }
    vec![Op::PutLists(lists), Op::PutFrontends(frontends)]
}
