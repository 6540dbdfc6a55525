//! CNI ADD: reserve, write down, make, guard, enforce, answer; what fails undoes exactly what it did. Requests that wait at
//! the same time are handled together: they wait for the disk once.

use std::collections::BTreeSet;
use std::thread;
use std::time::Instant;

use flowloom_api::v1::{self, ApiError, ErrorCode};
use flowloom_compiler::EndpointPlan;
use flowloom_model::EndpointKey;

use crate::cni::{Stages, check_request, error};
use crate::core::{Core, NUMBERS};
use crate::duties;
use crate::record::Record;
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
        let intents = self.write_intents(fresh);
        let keys: BTreeSet<EndpointKey> = fresh.iter().map(|a| a.record.key.clone()).collect();
        self.wanted = self.compile();
        for arriving in &mut *fresh {
            arriving.stages.done("compile");
        }
        let mut guarded = self.guard_all(fresh, intents);
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
        let results: Vec<Added> =
            fresh.iter_mut().zip(guarded).map(|(arriving, plan)| self.complete(arriving, plan?)).collect();
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

    /// Durable before anything is made. Several wait for the disk together.
    fn write_intents(&self, fresh: &mut [Arriving]) -> Vec<Result<(), String>> {
        let store = &self.store;
        let write = |record: &Record| store.write_endpoint(&record.file(), record).map_err(|e| e.to_string());
        let results = match &*fresh {
            [one] => vec![write(&one.record)],
            many => thread::scope(|s| {
                let writers: Vec<_> = many.iter().map(|a| s.spawn(|| write(&a.record))).collect();
                let ended = || Err("the writer of a record panicked".to_owned());
                writers.into_iter().map(|w| w.join().unwrap_or_else(|_| ended())).collect()
            }),
        };
        for arriving in fresh {
            arriving.stages.done("intent");
        }
        results
    }

    /// Devices with programs on them, while the numbers are written: nothing of the plan is in force before both are done.
    fn guard_all(
        &mut self,
        fresh: &mut [Arriving],
        intents: Vec<Result<(), String>>,
    ) -> Vec<Result<EndpointPlan, ApiError>> {
        let numbers = (self.numbers.version() != self.stored_numbers).then(|| self.numbers.clone());
        let store = self.store.clone();
        let (mut guarded, stored) = thread::scope(|s| {
            let writer =
                numbers.as_ref().map(|n| s.spawn(|| store.write_next(NUMBERS, n).map_err(|e| e.to_string())));
            let guarded: Vec<_> = fresh
                .iter_mut()
                .zip(intents)
                .map(|(arriving, intent)| self.guard_one(arriving, intent))
                .collect();
            let ended = || Err("the writer of the numbers panicked".to_owned());
            (guarded, writer.map_or(Ok(()), |w| w.join().unwrap_or_else(|_| ended())))
        });
        match (stored, numbers) {
            (Ok(()), Some(numbers)) => self.stored_numbers = numbers.version(),
            (Ok(()), None) => {}
            (Err(e), _) => {
                self.note_error(format!("numbers: {e}"));
                for result in &mut guarded {
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
        guarded
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
        self.wiring.wire(&spec).map_err(|e| refused(e.to_string()))?;
        arriving.stages.done("device");
        self.guard(&plan, spec).map_err(refused)?;
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
