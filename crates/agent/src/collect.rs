//! CNI GC: frees what no valid attachment owns. An ADD that goes on, or that was answered after the runtime made its list, is not in
//! the list and stays; so do other networks, and what the document wires.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use flowloom_api::v1::{self, ApiError, CniAttachment, ErrorCode, MAX_VALID_ATTACHMENTS, Moment};

use crate::cni::{Stages, error};
use crate::core::{Core, Handle};
use crate::detach::Leaving;
use crate::record::{CniRecord, Record};
use crate::writes;

/// How long an ADD of an earlier life of the agent may have gone on: the plugin asks no longer.
const LONGEST_ADD: Duration = Duration::from_secs(60);

/// Answers `POST /v1/cni/gc`. Goes on to its end when the client does not wait for it.
///
/// # Errors
/// When nothing can be removed yet, or the list is too long; what one attachment refuses is in the answer.
pub(crate) async fn collect(core: &Handle, request: v1::CniGcRequest) -> Result<v1::CniCollected, ApiError> {
    let core = core.clone();
    let whole = async move {
        let (leaving, spared) = core.ask(move |core| core.begin_gc(&request)).await??;
        let removed = tokio::task::spawn_blocking(move || leaving.remove_devices());
        let (leaving, results) =
            removed.await.map_err(|e| error(ErrorCode::Internal, format!("removing devices: {e}")))?;
        core.ask(move |core| core.finish_gc(leaving, results, spared)).await
    };
    tokio::spawn(whole).await.map_err(|e| error(ErrorCode::Internal, e.to_string()))?
}

impl Core {
    fn begin_gc(&mut self, request: &v1::CniGcRequest) -> Result<(Leaving, Vec<String>), ApiError> {
        self.require_document()?;
        if request.valid.len() > MAX_VALID_ATTACHMENTS {
            let message = format!("valid: more than {MAX_VALID_ATTACHMENTS} attachments; a node has fewer");
            return Err(error(ErrorCode::InvalidRequest, message));
        }
        if request.network.is_empty() {
            return Err(error(ErrorCode::InvalidRequest, "network: is empty"));
        }
        let stages = Stages::new();
        let valid: BTreeSet<&CniAttachment> = request.valid.iter().collect();
        let (mut stale, mut spared): (Vec<Record>, Vec<String>) = (Vec::new(), Vec::new());
        for record in self.records.values() {
            let Some(cni) = &record.cni else { continue };
            let concerns = cni.network.name == request.network && !valid.contains(&cni.attachment);
            // A DEL is at it already.
            if !concerns || self.leaving.contains(&record.key) {
                continue;
            }
            if self.is_newer(cni, &request.started) {
                spared.push(record.key.to_string());
            } else {
                stale.push(record.clone());
            }
        }
        if !stale.is_empty() || !spared.is_empty() {
            tracing::info!(network = request.network, stale = stale.len(), spared = spared.len(), "CNI GC");
        }
        let leaving = self.begin_leaving(stale, stages, "GC", format!("network {}", request.network));
        Ok((leaving, spared))
    }

    fn finish_gc(
        &mut self,
        mut leaving: Leaving,
        results: Vec<Result<(), String>>,
        spared: Vec<String>,
    ) -> v1::CniCollected {
        if leaving.is_empty() {
            return v1::CniCollected { spared, ..v1::CniCollected::default() };
        }
        let (start, writes_before) = (Instant::now(), writes::total());
        self.last.errors.clear();
        let removed = self.finish_leaving(&mut leaving, results);
        let errors = self.last.errors.clone();
        self.finish(start, writes_before);
        v1::CniCollected { removed, spared, errors }
    }

    /// Whether the runtime's list, made before `started`, may not know the attachment yet.
    fn is_newer(&self, cni: &CniRecord, started: &Moment) -> bool {
        if let Some(newer) = self.desk.is_newer(&cni.attachment, started) {
            return newer;
        }
        // Of an earlier life of the agent. A plugin that was called in this one comes after every answer of that one.
        if started.is_after(&self.born) == Some(true) {
            return false;
        }
        let Some(added) = &cni.added else { return false };
        let long = u64::try_from(LONGEST_ADD.as_nanos()).unwrap_or(u64::MAX);
        let latest = Moment { boot: added.boot.clone(), ns: added.ns.saturating_add(long) };
        started.is_after(&latest) == Some(false)
    }

    /// All of a GC at once.
    #[cfg(test)]
    pub(crate) fn cni_gc(&mut self, request: &v1::CniGcRequest) -> Result<v1::CniCollected, ApiError> {
        let (leaving, spared) = self.begin_gc(request)?;
        let (leaving, results) = leaving.remove_devices();
        Ok(self.finish_gc(leaving, results, spared))
    }
}
