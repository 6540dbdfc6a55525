//! CNI ADD: reserve, write down, make, guard, enforce, answer; what fails undoes exactly what it did. Requests that wait at
//! the same time are handled together.
//!
//! What is written down is in its file before anything is made, so an agent that dies finds it again, and on the disk before the
//! answer. In between the disk works beside the kernel: a power cut takes device, namespace and maps together with the file.

use std::collections::BTreeSet;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Instant;

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_compiler::EndpointPlan;
use flowloom_model::EndpointKey;

use crate::cni::{Stages, check_request, error};
use crate::core::{Core, NUMBERS};
use crate::duties;
use crate::record::Record;
use crate::store::Unsynced;
use crate::writes;

/// What came of a request.
pub(crate) type Added = Result<v1::CniAddResult, ApiError>;

/// A new attachment on its way.
struct Arriving {
    /// Place of its request.
    at: usize,
    record: Record,
    stages: Stages,
}

/// The disk's part of a batch of requests.
struct Disk {
    /// Version of the numbers that it writes, when they changed.
    numbers: Option<u64>,
    /// They are in their file.
    placed: Receiver<Result<(), String>>,
    /// The intents are on the disk, in the order of the requests.
    synced: Receiver<Vec<Result<(), String>>>,
}

const NO_DISK: &str = "the thread that writes to the disk has ended";

impl Disk {
    /// Takes back the answers of those that are not on the disk.
    fn wait(&self, fresh: &mut [Arriving], results: &mut [Added]) {
        let synced = self.synced.recv().unwrap_or_else(|_| vec![Err(NO_DISK.to_owned()); results.len()]);
        for ((arriving, result), synced) in fresh.iter_mut().zip(results).zip(synced) {
            if let Err(e) = synced {
                *result = Err(error(ErrorCode::Realise, e));
            }
            arriving.stages.done("disk");
        }
    }
}

/// Several wait for the disk together. What is none is not waited for.
fn sync_all(files: Vec<Option<Unsynced>>) -> Vec<Result<(), String>> {
    let sync = |file: Option<Unsynced>| file.map_or(Ok(()), Unsynced::sync).map_err(|e| e.to_string());
    if files.len() < 2 {
        return files.into_iter().map(sync).collect();
    }
    thread::scope(|s| {
        let waiting: Vec<_> = files.into_iter().map(|file| s.spawn(|| sync(file))).collect();
        let ended = |_| Err("the writer of a record panicked".to_owned());
        waiting.into_iter().map(|w| w.join().unwrap_or_else(ended)).collect()
    })
}

impl Core {
    /// Answers each request once its policy is in force; after an error nothing of that ADD is left.
    pub(crate) fn cni_add_all(&mut self, requests: &[v1::CniAddRequest]) -> Vec<Added> {
        let mut answers: Vec<Option<Added>> = requests.iter().map(|_| None).collect();
        let (mut fresh, mut known): (Vec<Arriving>, Vec<usize>) = (Vec::new(), Vec::new());
        let (start, writes_before) = (Instant::now(), writes::total());
        if self.require_document().is_ok() {
            self.replay_of(requests.iter().map(|r| &r.attachment));
        }
        for (at, request) in requests.iter().enumerate() {
            let mut stages = Stages::new();
            if let Err(e) = self.require_document().and_then(|()| check_request(request)) {
                answers[at] = Some(Err(e));
            } else if self.attached_as(&request.attachment).is_some() {
                known.push(at);
            } else {
                match self.reserve(request) {
                    Ok(record) => {
                        stages.done("reserve");
                        fresh.push(Arriving { at, record, stages });
                    }
                    Err(e) => answers[at] = Some(Err(e)),
                }
            }
        }
        if !fresh.is_empty() {
            self.last.errors.clear();
            let results = self.attach_all(&mut fresh);
            for (arriving, result) in fresh.iter().zip(results) {
                let attachment = &requests[arriving.at].attachment;
                self.time("ADD", attachment, result.is_ok(), &arriving.stages);
                answers[arriving.at] = Some(result);
            }
            self.finish(start, writes_before);
        }
        // After the new ones: a repeated request may be about one of them.
        for at in known {
            answers[at] = Some(self.add_known(&requests[at]));
        }
        let unanswered = || Err(error(ErrorCode::Internal, "the request was not looked at"));
        let answers: Vec<Added> = answers.into_iter().map(|a| a.unwrap_or_else(unanswered)).collect();
        for (request, answer) in requests.iter().zip(&answers) {
            if let Err(e) = answer {
                tracing::warn!(attachment = %request.attachment, error = %e, "CNI ADD refused");
                self.pod_event(&request.args, e);
            }
        }
        answers
    }

    /// One request alone.
    #[cfg(test)]
    pub(crate) fn cni_add(&mut self, request: &v1::CniAddRequest) -> Added {
        self.cni_add_all(std::slice::from_ref(request)).remove(0)
    }

    fn add_known(&mut self, request: &v1::CniAddRequest) -> Added {
        let attachment = &request.attachment;
        match self.attached_as(attachment).cloned() {
            Some(record) if self.leaving.contains(&record.key) => {
                Err(error(ErrorCode::Busy, format!("{attachment} is being removed; try again")))
            }
            Some(record) => self.add_again(&record, request),
            None => Err(error(ErrorCode::Busy, format!("{attachment} was refused a moment ago; try again"))),
        }
    }

    /// Everything after the reservation. What fails is undone before this returns.
    fn attach_all(&mut self, fresh: &mut [Arriving]) -> Vec<Added> {
        let (intents, files) = self.place_intents(fresh);
        let keys: BTreeSet<EndpointKey> = fresh.iter().map(|a| a.record.key.clone()).collect();
        self.wanted = self.compile();
        for arriving in &mut *fresh {
            arriving.stages.done("compile");
        }
        let disk = self.to_disk(files);
        let mut guarded = self.guard_all(fresh, intents);
        self.place_numbers(&disk, fresh, &mut guarded);
        for key in &keys {
            self.wiring_errors.remove(key);
        }
        let effective = self.effective_plan();
        let clean = self.put_in_force(effective);
        if !clean && fresh.len() > 1 {
            // One of them does not fit. Which one shows when they come one after the other.
            for arriving in &*fresh {
                self.forget_attachment(&arriving.record.key);
            }
            return fresh.iter_mut().map(|a| self.attach_alone(a)).collect();
        }
        if !clean {
            self.pass_for(fresh, &mut guarded);
        }
        let mut results: Vec<Added> =
            fresh.iter_mut().zip(guarded).map(|(arriving, plan)| self.complete(arriving, plan?)).collect();
        disk.wait(fresh, &mut results);
        for (arriving, result) in fresh.iter().zip(&results) {
            if result.is_err() {
                self.forget_attachment(&arriving.record.key);
            }
        }
        results
    }

    /// A member of a batch that failed as a whole: from the start, by itself.
    fn attach_alone(&mut self, arriving: &mut Arriving) -> Added {
        let Some(cni) = arriving.record.cni.clone() else {
            return Err(error(ErrorCode::Internal, "no attachment"));
        };
        let request = v1::CniAddRequest {
            attachment: cni.attachment,
            netns: cni.netns,
            network: cni.network,
            args: cni.args,
            runtime: cni.runtime,
        };
        let record = self.reserve(&request)?;
        let mut one = [Arriving { at: arriving.at, record, stages: Stages::new() }];
        self.attach_all(&mut one).remove(0)
    }

    /// Intents in their files, before anything is made.
    fn place_intents(&self, fresh: &mut [Arriving]) -> (Vec<Result<(), String>>, Vec<Option<Unsynced>>) {
        let place = |arriving: &mut Arriving| {
            let record = &arriving.record;
            let placed = self.store.place_endpoint(&record.file(), record).map_err(|e| e.to_string());
            arriving.stages.done("intent");
            match placed {
                Ok(file) => (Ok(()), Some(file)),
                Err(e) => (Err(e), None),
            }
        };
        fresh.iter_mut().map(place).unzip()
    }

    /// Starts the disk's work: first the numbers, when they changed, into their file; then `files` onto the disk, then the
    /// numbers, which nobody waits for.
    fn to_disk(&self, files: Vec<Option<Unsynced>>) -> Disk {
        let version = self.numbers.version();
        let numbers = (version != self.stored_numbers).then(|| self.numbers.clone());
        let (store, disk_numbers) = (self.store.clone(), numbers.is_some().then_some(version));
        let ((placed, numbers_placed), (synced, intents_synced)) = (mpsc::channel(), mpsc::channel());
        let work = move || {
            let file = numbers.map(|n| store.place_next(NUMBERS, &n).map_err(|e| e.to_string())).transpose();
            // Whoever opens the directory next finds it unlocked.
            drop(store);
            let (told, file) = match file {
                Ok(file) => (Ok(()), file),
                Err(e) => (Err(e), None),
            };
            // A request that was undone waits for neither.
            let _ = placed.send(told);
            let _ = synced.send(sync_all(files));
            if let Some(Err(e)) = file.map(Unsynced::sync) {
                tracing::error!(error = %e, "the numbers would not survive a power cut, nor need to");
            }
        };
        // Without a thread both channels are closed, which says so.
        if let Err(e) = thread::Builder::new().name("disk".into()).spawn(work) {
            tracing::error!(error = %e, "no thread for the disk");
        }
        Disk { numbers: disk_numbers, placed: numbers_placed, synced: intents_synced }
    }

    /// Devices with programs on them: nothing of the plan is in force yet.
    fn guard_all(
        &mut self,
        fresh: &mut [Arriving],
        intents: Vec<Result<(), String>>,
    ) -> Vec<Result<EndpointPlan, ApiError>> {
        fresh.iter_mut().zip(intents).map(|(arriving, intent)| self.guard_one(arriving, intent)).collect()
    }

    /// Numbers are in their file before the plan that uses them is in force.
    fn place_numbers(
        &mut self,
        disk: &Disk,
        fresh: &mut [Arriving],
        guarded: &mut [Result<EndpointPlan, ApiError>],
    ) {
        match disk.placed.recv().unwrap_or_else(|_| Err(NO_DISK.to_owned())) {
            Ok(()) => self.stored_numbers = disk.numbers.unwrap_or(self.stored_numbers),
            Err(e) => {
                self.note_error(format!("numbers: {e}"));
                for result in guarded {
                    *result = Err(error(ErrorCode::Realise, format!("numbers: {e}")));
                }
                // Without a device in the plan nothing of it comes into force.
                for arriving in fresh.iter() {
                    self.attached.remove(&arriving.record.key);
                }
            }
        }
        for arriving in fresh {
            arriving.stages.done("numbers");
        }
    }

    fn guard_one(
        &mut self,
        arriving: &mut Arriving,
        intent: Result<(), String>,
    ) -> Result<EndpointPlan, ApiError> {
        let refused = |e: String| error(ErrorCode::Realise, e);
        let key = &arriving.record.key;
        intent.map_err(refused)?;
        let Some(plan) = self.wanted.endpoints.get(key).cloned() else {
            return Err(error(ErrorCode::Conflict, self.why_not(key)));
        };
        let spec = self.wire_spec(&plan, arriving.record.wire.clone());
        let netns = self.wiring.wire(&spec).map_err(|e| refused(e.to_string()))?;
        arriving.stages.done("device");
        self.guard(&plan, spec, netns).map_err(refused)?;
        arriving.stages.done("guard");
        Ok(plan)
    }

    /// Something of the plan was refused. Somebody else's failure is not this request's; whether its endpoint is in force is.
    fn pass_for(&mut self, fresh: &[Arriving], guarded: &mut [Result<EndpointPlan, ApiError>]) {
        let in_force = |core: &Self, result: &Result<EndpointPlan, ApiError>| {
            result.as_ref().map_or(true, |plan| core.is_in_force(plan))
        };
        if !guarded.iter().all(|result| in_force(self, result)) {
            self.pass();
        }
        for (arriving, result) in fresh.iter().zip(guarded) {
            if !in_force(self, result) {
                *result = Err(error(ErrorCode::CapacityExceeded, self.why_not(&arriving.record.key)));
            }
        }
    }

    fn complete(&mut self, arriving: &mut Arriving, plan: EndpointPlan) -> Added {
        arriving.stages.done("policy");
        let key = &arriving.record.key;
        if Self::is_default(key)
            && let Some(device) = self.attached.get(key)
        {
            let routes = duties::endpoint_routes(&plan, device);
            self.wiring.add_routes(&routes).map_err(|e| error(ErrorCode::Realise, e.to_string()))?;
            if let Some(known) = &mut self.routes {
                known.extend(routes);
            }
        }
        arriving.stages.done("routes");
        // The last thing before the answer: whoever reacts to new links has had the whole ADD for it.
        let key = arriving.record.key.clone();
        self.overtake(&key);
        Ok(self.result(&arriving.record, &plan))
    }
}
