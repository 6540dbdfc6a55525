//! What container runtimes ask for: which ADDs are going on, which were answered when, and how long each verb takes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use flowloom_api::v1::{CNI_BUCKETS_US, CniAttachment, CniVerb, ErrorCode, Moment};

/// Most answers remembered; a node has fewer attachments.
const ANSWERS: usize = 8192;

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verb {
    Add,
    Check,
    Del,
    Gc,
    Status,
    /// A DEL from the queue.
    Replay,
}

impl Verb {
    const ALL: [Self; 6] = [Self::Add, Self::Check, Self::Del, Self::Gc, Self::Status, Self::Replay];

    const fn name(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Check => "CHECK",
            Self::Del => "DEL",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Replay => "REPLAY",
        }
    }
}

#[derive(Debug, Default)]
struct Counts {
    errors: BTreeMap<&'static str, u64>,
    buckets: [u64; CNI_BUCKETS_US.len() + 1],
    sum_us: u64,
    max_us: u64,
}

#[derive(Debug, Default)]
struct Inner {
    verbs: BTreeMap<Verb, Counts>,
    adding: BTreeMap<CniAttachment, u32>,
    answered: BTreeMap<CniAttachment, Moment>,
}

/// Shared by the core and the API.
#[derive(Debug, Default)]
pub(crate) struct Desk(Mutex<Inner>);

/// An ADD from its arrival until its answer is handed out, or its client is gone.
#[derive(Debug)]
pub(crate) struct Adding {
    desk: Arc<Desk>,
    attachment: CniAttachment,
}

impl Drop for Adding {
    fn drop(&mut self) {
        let mut inner = self.desk.inner();
        if let Some(n) = inner.adding.get_mut(&self.attachment) {
            *n -= 1;
            if *n == 0 {
                inner.adding.remove(&self.attachment);
            }
        }
        // Without a clock it stays as if unanswered until its DEL: GC has nothing to compare with.
        let Ok(now) = flowloom_cni::clock::now() else { return };
        if inner.answered.len() >= ANSWERS {
            let oldest = inner.answered.iter().min_by_key(|(_, at)| at.ns).map(|(a, _)| a.clone());
            oldest.map(|a| inner.answered.remove(&a));
        }
        inner.answered.insert(self.attachment.clone(), now);
    }
}

impl Desk {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Every change under the lock leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An ADD has arrived.
    pub(crate) fn adding(self: &Arc<Self>, attachment: &CniAttachment) -> Adding {
        *self.inner().adding.entry(attachment.clone()).or_default() += 1;
        Adding { desk: self.clone(), attachment: attachment.clone() }
    }

    /// Whether an ADD of the attachment is going on, or was not answered before `moment`. `None`: nothing is known of it in this life of
    /// the agent.
    #[must_use]
    pub(crate) fn is_newer(&self, attachment: &CniAttachment, moment: &Moment) -> Option<bool> {
        let inner = self.inner();
        if inner.adding.contains_key(attachment) {
            return Some(true);
        }
        let answered = inner.answered.get(attachment)?;
        Some(moment.is_after(answered) != Some(true))
    }

    /// The attachment is gone.
    pub(crate) fn forget(&self, attachment: &CniAttachment) {
        self.inner().answered.remove(attachment);
    }

    /// A request was answered.
    pub(crate) fn count(&self, verb: Verb, start: Instant, error: Option<ErrorCode>) {
        let us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        let bucket = CNI_BUCKETS_US.iter().position(|bound| us <= *bound).unwrap_or(CNI_BUCKETS_US.len());
        let mut inner = self.inner();
        let counts = inner.verbs.entry(verb).or_default();
        counts.buckets[bucket] += 1;
        counts.sum_us = counts.sum_us.saturating_add(us);
        counts.max_us = counts.max_us.max(us);
        if let Some(code) = error {
            *counts.errors.entry(code.name()).or_default() += 1;
        }
    }

    /// ADDs going on, and every verb.
    #[must_use]
    pub(crate) fn report(&self) -> (u64, Vec<CniVerb>) {
        let inner = self.inner();
        let none = Counts::default();
        let verbs = Verb::ALL.map(|verb| {
            let counts = inner.verbs.get(&verb).unwrap_or(&none);
            CniVerb {
                verb: verb.name().to_owned(),
                count: counts.buckets.iter().sum(),
                errors: counts.errors.iter().map(|(code, n)| ((*code).to_owned(), *n)).collect(),
                buckets: counts.buckets.to_vec(),
                sum_us: counts.sum_us,
                max_us: counts.max_us,
            }
        });
        (inner.adding.values().map(|n| u64::from(*n)).sum(), verbs.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use flowloom_cni::clock::now;

    use super::*;

    fn attachment(id: &str) -> CniAttachment {
        CniAttachment { container_id: id.into(), ifname: "eth0".into() }
    }

    #[test]
    fn an_add_is_newer_than_any_list_until_it_is_answered_and_then_than_older_lists() {
        let desk = Arc::new(Desk::default());
        let (a, before) = (attachment("a"), now().unwrap());
        assert_eq!(desk.is_newer(&a, &before), None);
        let (first, second) = (desk.adding(&a), desk.adding(&a));
        drop(first);
        assert_eq!(desk.is_newer(&a, &now().unwrap()), Some(true), "the second goes on");
        assert_eq!(desk.report().0, 1);
        drop(second);
        assert_eq!(desk.is_newer(&a, &before), Some(true));
        assert_eq!(desk.is_newer(&a, &now().unwrap()), Some(false));
        assert_eq!(desk.is_newer(&attachment("b"), &before), None);
        let other_boot = Moment { boot: "other".into(), ns: u64::MAX };
        assert_eq!(desk.is_newer(&a, &other_boot), Some(true), "what cannot be compared is spared");
        desk.forget(&a);
        assert_eq!(desk.is_newer(&a, &before), None);
    }

    #[test]
    fn answers_are_bounded_and_the_oldest_goes() {
        let desk = Arc::new(Desk::default());
        for n in 0..=ANSWERS {
            drop(desk.adding(&attachment(&n.to_string())));
        }
        assert_eq!(desk.inner().answered.len(), ANSWERS);
        assert!(!desk.inner().answered.contains_key(&attachment("0")));
    }

    #[test]
    fn requests_are_counted_by_verb_duration_and_error() {
        let desk = Desk::default();
        desk.count(Verb::Add, Instant::now(), None);
        desk.count(Verb::Add, Instant::now(), Some(ErrorCode::AddressesExhausted));
        let long_ago = Instant::now().checked_sub(std::time::Duration::from_millis(30)).unwrap();
        desk.count(Verb::Del, long_ago, None);
        let (_, verbs) = desk.report();
        let names: Vec<_> = verbs.iter().map(|v| v.verb.as_str()).collect();
        assert_eq!(names, ["ADD", "CHECK", "DEL", "GC", "STATUS", "REPLAY"]);
        assert_eq!((verbs[0].count, verbs[0].errors["AddressesExhausted"]), (2, 1));
        assert_eq!(verbs[2].buckets.iter().position(|n| *n == 1), Some(6), "{:?}", verbs[2]);
        assert!(verbs[2].max_us >= 30_000 && verbs[2].sum_us == verbs[2].max_us);
    }
}
