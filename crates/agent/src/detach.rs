//! CNI DEL. The policy goes first, then the device, then address and record. The kernel takes its time over a device, so
//! several DELs wait for it side by side, outside the core's thread.

use std::time::Instant;

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_model::EndpointKey;

use crate::cni::{Stages, error};
use crate::core::{Core, Handle};
use crate::record::Record;
use crate::wiring::{Via, Wire, WiringError};
use crate::writes;

/// Removes a device from any thread.
pub(crate) type Remover = Box<dyn Fn(&Wire) -> Result<(), WiringError> + Send>;

/// Attachments that are out of force and whose devices are still there.
pub(crate) struct Leaving {
    records: Vec<Record>,
    remove: Remover,
    stages: Stages,
    /// For the timings: verb and object.
    command: &'static str,
    label: String,
}

/// Answers `POST /v1/cni/del`. Goes on to its end when the client does not wait for it.
///
/// # Errors
/// When the kernel refuses to let go of a device that exists.
pub(crate) async fn delete(core: &Handle, request: v1::CniDelRequest) -> Result<v1::CniDeleted, ApiError> {
    let core = core.clone();
    let whole = async move {
        let leaving = core.ask(move |core| core.begin_del(&request)).await??;
        let removed = tokio::task::spawn_blocking(move || leaving.remove_devices());
        let (leaving, results) =
            removed.await.map_err(|e| error(ErrorCode::Internal, format!("removing a device: {e}")))?;
        core.ask(move |core| core.finish_del(leaving, results)).await?
    };
    tokio::spawn(whole).await.map_err(|e| error(ErrorCode::Internal, e.to_string()))?
}

impl Leaving {
    /// Nothing was there.
    pub(crate) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Their records in at most `n` parts of about the same size.
    pub(crate) fn shares(&self, n: usize) -> impl Iterator<Item = &[Record]> {
        self.records.chunks(self.records.len().div_ceil(n).max(1))
    }

    /// Waits for the kernel.
    pub(crate) fn remove_devices(mut self) -> (Self, Vec<Result<(), String>>) {
        let results =
            self.records.iter().map(|r| (self.remove)(&r.wire).map_err(|e| e.to_string())).collect();
        self.stages.done("device");
        (self, results)
    }
}

impl Core {
    /// Takes the endpoints of a DEL out of force: from here on nothing of them passes.
    fn begin_del(&mut self, request: &v1::CniDelRequest) -> Result<Leaving, ApiError> {
        // Before the first document nothing is deleted: the runtime asks again.
        self.require_document()?;
        let stages = Stages::new();
        let records: Vec<Record> = self
            .attachments_of(request)
            .into_iter()
            .filter_map(|key| self.records.get(&key).cloned())
            .collect();
        Ok(self.begin_leaving(records, stages, "DEL", request.attachment.to_string()))
    }

    /// Takes attachments out of force.
    pub(crate) fn begin_leaving(
        &mut self,
        records: Vec<Record>,
        mut stages: Stages,
        command: &'static str,
        label: String,
    ) -> Leaving {
        self.leaving.extend(records.iter().map(|r| r.key.clone()));
        self.out_of_force(&records);
        stages.done("policy");
        Leaving { records, remove: self.wiring.remover(), stages, command, label }
    }

    /// Gives back what attachments had whose devices are gone. Returns their names; the errors of the others are noted, and they
    /// stay out of force until somebody asks again.
    pub(crate) fn finish_leaving(
        &mut self,
        leaving: &mut Leaving,
        results: Vec<Result<(), String>>,
    ) -> Vec<String> {
        let mut removed = Vec::new();
        for (record, result) in leaving.records.iter().zip(results) {
            match result {
                Ok(()) => {
                    self.detached(record);
                    if self.give_back(record) {
                        self.leaving.remove(&record.key);
                        removed.push(record.key.to_string());
                    }
                }
                Err(e) => self.note_error(format!("endpoint {}: {e}", record.key)),
            }
        }
        leaving.stages.done("record");
        self.time(leaving.command, &leaving.label, removed.len() == leaving.records.len(), &leaving.stages);
        removed
    }

    /// Gives back what the endpoints of a DEL had.
    fn finish_del(
        &mut self,
        mut leaving: Leaving,
        results: Vec<Result<(), String>>,
    ) -> Result<v1::CniDeleted, ApiError> {
        if leaving.records.is_empty() {
            return Ok(v1::CniDeleted { removed: Vec::new() });
        }
        let (start, writes_before) = (Instant::now(), writes::total());
        self.last.errors.clear();
        let removed = self.finish_leaving(&mut leaving, results);
        let whole = removed.len() == leaving.records.len();
        let errors = self.last.errors.join("; ");
        self.finish(start, writes_before);
        if whole { Ok(v1::CniDeleted { removed }) } else { Err(error(ErrorCode::Realise, errors)) }
    }

    /// All of a DEL at once.
    #[cfg(test)]
    pub(crate) fn cni_del(&mut self, request: &v1::CniDelRequest) -> Result<v1::CniDeleted, ApiError> {
        let (leaving, results) = self.begin_del(request)?.remove_devices();
        self.finish_del(leaving, results)
    }

    /// Removes an attachment with everything that belongs to it. Errors are noted; the record stays until its device is gone.
    pub(crate) fn forget_attachment(&mut self, key: &EndpointKey) -> bool {
        let Some(record) = self.records.get(key).cloned() else { return true };
        self.out_of_force(std::slice::from_ref(&record));
        if let Err(e) = self.unwire(&record) {
            self.note_error(format!("endpoint {key}: {e}"));
            return false;
        }
        self.give_back(&record)
    }

    fn out_of_force(&mut self, records: &[Record]) {
        for record in records {
            let key = &record.key;
            if record.cni.as_ref().is_some_and(|c| c.endpoint.is_some()) {
                match self.document.as_ref().and_then(|d| d.world.endpoints.get(key)) {
                    // A name that the document took meanwhile stays the document's.
                    Some(theirs) => drop(self.world.endpoints.insert(key.clone(), theirs.clone())),
                    None => drop(self.world.endpoints.remove(key)),
                }
            }
            self.attached.remove(key);
        }
        if self.applied_generation > 0 && !records.is_empty() {
            // Numbers that retire may be written later: after a crash they retire again. Only new ones must be on the disk first.
            self.wanted = self.compile();
            let effective = self.effective_plan();
            self.put_in_force(effective);
        }
    }

    /// Address, routes and record, after the device is gone.
    fn give_back(&mut self, record: &Record) -> bool {
        let key = &record.key;
        if let Some(known) = &mut self.routes {
            // The kernel removed them together with the device.
            known.retain(|r| !matches!(&r.via, Via::Device { name, .. } if name == record.wire.device()));
        }
        if let Err(e) = self.store.remove_endpoint(&record.file()) {
            self.note_error(format!("endpoint {key}: {e}"));
            return false;
        }
        if let Some(cni) = &record.cni
            && let Some(own) = &cni.endpoint
        {
            self.ipam.release_in(&key.vpc, &own.subnet, &cni.attachment, Self::now());
        }
        self.host_ports_follow(record);
        if let Some(cni) = &record.cni {
            self.desk.forget(&cni.attachment);
        }
        self.records.remove(key);
        true
    }

    /// The attachments a DEL names: by container and interface; else, for a container that no record knows, by the pod that the arguments
    /// name, when that is one life of it only (a UID, or no other attachment with the name).
    pub(crate) fn attachments_of(&self, request: &v1::CniDelRequest) -> Vec<EndpointKey> {
        if let Some(record) = self.attached_as(&request.attachment) {
            return vec![record.key.clone()];
        }
        let arg = |name: &str| request.args.get(name).filter(|v| !v.is_empty());
        let (Some(uid), Some(name)) = (arg("K8S_POD_UID"), arg("K8S_POD_NAME")) else { return Vec::new() };
        self.records
            .values()
            .filter(|r| {
                r.cni.as_ref().is_some_and(|c| {
                    c.args.get("K8S_POD_UID") == Some(uid)
                        && c.args.get("K8S_POD_NAME") == Some(name)
                        && c.attachment.ifname == request.attachment.ifname
                        && c.netns.as_str() == request.netns.as_deref().unwrap_or(&c.netns)
                })
            })
            .map(|r| r.key.clone())
            .collect()
    }
}
