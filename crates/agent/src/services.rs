//! Services as the API shows them.

use flowloom_api::v1::{self, ApiError};
use flowloom_compiler::{Scope, ServiceKey, explain_service};
use flowloom_model::{BackendState, DEFAULT_VPC, Service, ServicePort, joined};

use crate::core::{Core, now_ms};
use crate::sides::answer_word;
use crate::views::not_found;

impl Core {
    /// Every service, or those of a VPC.
    pub(crate) fn service_list(&mut self, vpc: Option<&str>) -> v1::ServiceList {
        let conditions = self.service_conditions();
        let services = self.world.services.values().filter(|s| vpc.is_none_or(|v| s.vpc.as_str() == v));
        v1::ServiceList { services: services.map(|s| self.service_info(s, &conditions)).collect() }
    }

    /// One service: `vpc` and name, or a Kubernetes namespace and name.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn service(&mut self, vpc: &str, name: &str) -> Result<v1::ServiceInfo, ApiError> {
        let key = self.service_key(vpc, name)?;
        let conditions = self.service_conditions();
        let service = self.world.services.get(&key).ok_or_else(|| missing(vpc, name))?;
        Ok(self.service_info(service, &conditions))
    }

    /// Which backends a service has on this node, and why.
    ///
    /// # Errors
    /// When there is no such service.
    pub(crate) fn service_explanation(
        &mut self,
        vpc: &str,
        name: &str,
    ) -> Result<v1::ServiceExplanation, ApiError> {
        let key = self.service_key(vpc, name)?;
        let service = self.service(key.0.as_str(), key.1.as_str())?;
        let explained = explain_service(&self.world, &self.config.node, &self.wanted, &key)
            .ok_or_else(|| missing(vpc, name))?;
        let frontend = |f: flowloom_compiler::FrontendExplanation| v1::FrontendInfo {
            kind: f.kind.word().to_owned(),
            scope: match f.scope {
                Scope::Inside => "inside",
                Scope::Outside => "outside",
            }
            .to_owned(),
            ip: f.ip,
            protocol: crate::names::protocol(f.protocol),
            port: f.port,
            service_port: f.service_port,
            taken_by: f.taken_by.map(|name| name.to_string()),
            local_policy: f.local_policy,
            source_ranges: f.source_ranges.iter().map(ToString::to_string).collect(),
            answer: answer_word(f.answer).to_owned(),
            backends: f
                .backends
                .into_iter()
                .map(|b| v1::BackendInfo {
                    ip: b.ip,
                    port: b.port,
                    node: b.node.map(|node| node.to_string()),
                    local: b.local,
                    endpoint: self
                        .world
                        .endpoints
                        .values()
                        .find(|e| e.vpc == key.0 && e.ips.contains(&b.ip))
                        .map(|e| e.name.to_string()),
                    zones: b.zones,
                    nodes: b.nodes.iter().map(ToString::to_string).collect(),
                    used: b.used.is_used(),
                    reason: b.used.word().to_owned(),
                    why: b.used.reason().to_owned(),
                })
                .collect(),
        };
        Ok(v1::ServiceExplanation {
            service,
            node: self.config.node.to_string(),
            zone: explained.zone,
            here: explained.here,
            frontends: explained.frontends.into_iter().map(frontend).collect(),
        })
    }

    /// `vpc/name`; where there is no such service, `namespace/name` of the default VPC.
    pub(crate) fn service_key(&self, vpc: &str, name: &str) -> Result<ServiceKey, ApiError> {
        let key = |vpc: &str, name: &str| Some((vpc.parse().ok()?, name.parse().ok()?));
        let known = |key: &ServiceKey| self.world.services.contains_key(key);
        key(vpc, name)
            .filter(known)
            .or_else(|| key(DEFAULT_VPC, &joined(&[vpc, name])).filter(known))
            .ok_or_else(|| {
                let mut e = missing(vpc, name);
                e.message.push_str(&self.near_service(vpc, name));
                e
            })
    }

    fn service_conditions(&mut self) -> Vec<v1::ObjectConditions> {
        let generation = self.document.as_ref().map_or(0, |d| d.generation);
        let complaints = self.complaints();
        let mut conditions = self.conditions.update(complaints, generation, now_ms());
        conditions.retain(|o| matches!(o.kind.as_str(), "service" | "load_balancer"));
        conditions
    }

    fn service_info(&self, s: &Service, conditions: &[v1::ObjectConditions]) -> v1::ServiceInfo {
        let full = format!("{}/{}", s.vpc, s.name);
        let part = self.wanted.services.parts().get(&(s.vpc.clone(), s.name.clone()));
        let port = |p: &ServicePort| v1::ServicePortInfo {
            name: p.name.as_ref().map(ToString::to_string),
            protocol: p.protocol.word().to_owned(),
            port: p.port,
            node_port: p.node_port,
            host_addresses: p.host_addresses.iter().copied().collect(),
            backends: u32::try_from(p.backends.len()).unwrap_or(u32::MAX),
            ready: u32::try_from(p.backends.values().filter(|b| b.state == BackendState::Ready).count())
                .unwrap_or(u32::MAX),
            number: part
                .and_then(|part| {
                    let same = |r: &&flowloom_compiler::ServiceRef| {
                        r.port == p.port && crate::names::protocol(r.protocol) == p.protocol.word()
                    };
                    part.names.iter().find(|(_, r)| same(r)).map(|(id, _)| id.0)
                })
                .unwrap_or(0),
        };
        v1::ServiceInfo {
            vpc: v1::Named::new(s.vpc.as_str(), self.vpc_id(s.vpc.as_str()).map_or(0, |id| id.0)),
            name: s.name.to_string(),
            cluster_ips: s.cluster_ips.iter().copied().collect(),
            external_ips: s.external_ips.iter().copied().collect(),
            load_balancer_ips: s.load_balancer_ips.iter().copied().collect(),
            affinity_seconds: s.affinity,
            internal_local: s.internal_local,
            external_local: s.external_local,
            source_ranges: s.source_ranges.iter().map(ToString::to_string).collect(),
            health_check_port: s.health_check_port,
            ports: s.ports.iter().map(port).collect(),
            conditions: conditions
                .iter()
                .filter(|o| o.name == full)
                .flat_map(|o| o.conditions.iter().cloned())
                .collect(),
        }
    }
}

fn missing(vpc: &str, name: &str) -> ApiError {
    not_found(format!("service {vpc}/{name}"))
}
