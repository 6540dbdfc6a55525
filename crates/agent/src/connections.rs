//! Tracked connections with names. The tables are read outside the core's thread; only names come from it.

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_bpf_abi::CtDecision;
use flowloom_compiler::EndpointId;
use flowloom_datapath::conntrack::Side;
use flowloom_datapath::{ConntrackRow, CtFilter, View};

use crate::core::{Core, Handle};
use crate::names;
use crate::views::{kernel, not_found};

/// Connections answered when the client names no limit.
const LIMIT: usize = 10_000;
/// Most connections answered.
const MOST: usize = 1_000_000;

fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorCode::InvalidRequest, message)
}

/// Answers `GET /v1/conntrack`.
///
/// # Errors
/// A filter that names what does not exist; what the kernel refuses.
pub(crate) async fn list(core: &Handle, filter: v1::ConntrackFilter) -> Result<v1::ConntrackList, ApiError> {
    let limit = filter.limit.map_or(LIMIT, |l| (l as usize).min(MOST));
    let (view, resolved) = resolve(core, filter).await?;
    let mut rows = blocking(move || view.conntrack(&resolved, limit + 1)).await?;
    let truncated = rows.len() > limit;
    rows.truncate(limit);
    let connections = core.ask(move |core| rows.iter().map(|r| core.connection(r)).collect()).await?;
    Ok(v1::ConntrackList { connections, truncated })
}

/// Answers `DELETE /v1/conntrack`.
///
/// # Errors
/// As [`list`].
pub(crate) async fn flush(
    core: &Handle,
    filter: v1::ConntrackFilter,
) -> Result<v1::ConntrackFlushed, ApiError> {
    let (view, resolved) = resolve(core, filter).await?;
    let removed = blocking(move || view.flush(&resolved)).await?;
    Ok(v1::ConntrackFlushed { removed })
}

async fn blocking<T: Send + 'static>(
    f: impl FnOnce() -> flowloom_datapath::Result<T> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(f).await.map_err(kernel)?.map_err(kernel)
}

async fn resolve(core: &Handle, filter: v1::ConntrackFilter) -> Result<(View, CtFilter), ApiError> {
    core.ask(move |core| Ok((core.kernel_view()?.clone(), core.ct_filter(&filter)?))).await?
}

impl Core {
    fn ct_filter(&self, filter: &v1::ConntrackFilter) -> Result<CtFilter, ApiError> {
        let of_vpc = |name: &str| self.vpc_id(name).map(Some);
        let (vpc, endpoint) = match (&filter.vpc, &filter.endpoint) {
            (vpc, None) => (vpc.as_deref().map_or(Ok(None), of_vpc)?, None),
            (None, Some(_)) => return Err(invalid("endpoint needs vpc: its name is unique there only")),
            (Some(vpc), Some(name)) => {
                let key = self.endpoint_meant(vpc, name)?;
                let id = self.wanted.endpoints.get(&key).map(|e| e.id);
                let id = id.ok_or_else(|| not_found(format!("endpoint {key}")))?;
                (of_vpc(key.vpc.as_str())?, Some(id))
            }
        };
        let protocol = filter
            .protocol
            .as_deref()
            .map(|p| {
                names::protocol_number(p, true).ok_or_else(|| invalid(format!("protocol {p:?} is unknown")))
            })
            .transpose()?;
        Ok(CtFilter { vpc, ip: filter.address, port: filter.port, protocol, endpoint })
    }

    fn connection(&self, row: &ConntrackRow) -> v1::Connection {
        let endpoint = |side: &Side| side.endpoint.map(|id: EndpointId| self.endpoint_named(id));
        let judgement = |d: &CtDecision| {
            Some(v1::CtJudgement {
                verdict: names::verdict(d.verdict)?,
                rule: self.rule_named(d.rule),
                revision: d.revision,
                generation: d.generation,
            })
        };
        v1::Connection {
            vpc: self.vpc_named(row.vpc.0),
            protocol: names::protocol(row.protocol),
            src: row.origin.ip,
            src_port: row.origin.port,
            dst: row.responder.ip,
            dst_port: row.responder.port,
            src_endpoint: endpoint(&row.origin),
            dst_endpoint: endpoint(&row.responder),
            state: names::ct_state(row.state).to_owned(),
            established: row.established,
            flags: names::ct_flags(row.flags),
            age_s: row.age.into(),
            idle_s: row.idle.into(),
            expires_s: row.expires_in.into(),
            packets: [row.origin.packets, row.responder.packets],
            bytes: [row.origin.bytes, row.responder.bytes],
            egress: row.egress.as_ref().and_then(judgement),
            ingress: row.ingress.as_ref().and_then(judgement),
        }
    }
}
