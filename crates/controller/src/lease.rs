//! Leadership by a Lease: who leads, until when, and what to do about it. The decision is pure; [`run`] talks to the API server.
//!
//! | | |
//! |---|---|
//! | clocks | A standby counts from the moment *it* saw the lease change; the times written in it are for people. Clocks may differ. |
//! | leader | may write until `renewal began + deadline`, which ends before `renewal began + duration`, when others may take over |
//! | fencing | the lease is read again before each batch of writes, and each write names the version it replaces |

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::PostParams;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

/// Times of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Others take over a lease that has not changed for so long.
    pub duration: Duration,
    /// A leader whose renewals fail for so long stops writing.
    pub deadline: Duration,
    /// Between renewals, and between looks of a standby.
    pub retry: Duration,
}

impl Times {
    /// The longest that a write may take: it began before the deadline and ends before the lease does.
    #[must_use]
    pub fn write_limit(&self) -> Duration {
        self.duration.saturating_sub(self.deadline)
    }
}

/// Whether this process leads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// Somebody else does, or nobody.
    #[default]
    Standby,
    /// It does.
    Leader {
        /// How often leadership changed before.
        term: i64,
        /// No write may begin after this.
        until: Instant,
    },
}

impl Standing {
    /// Term and end of a leadership that is not over.
    #[must_use]
    pub fn leads_at(self, now: Instant) -> Option<(i64, Instant)> {
        match self {
            Self::Leader { term, until } if now < until => Some((term, until)),
            _ => None,
        }
    }
}

/// What to do about a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Act {
    Create,
    Take { transitions: i32 },
    Renew,
    Wait,
}

/// What one candidate knows of the lease.
#[derive(Debug)]
struct Election {
    me: String,
    duration: Duration,
    /// Version and when it was first seen.
    seen: Option<(String, Instant)>,
}

impl Election {
    fn decide(&mut self, lease: Option<&Lease>, now: Instant) -> Act {
        let Some(lease) = lease else { return Act::Create };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.unwrap_or_default();
        if holder == self.me {
            return Act::Renew;
        }
        let take = Act::Take { transitions: spec.lease_transitions.unwrap_or(0).saturating_add(1) };
        if holder.is_empty() {
            return take;
        }
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        let since = match &self.seen {
            Some((seen, since)) if *seen == version => *since,
            _ => {
                self.seen = Some((version, now));
                now
            }
        };
        // Its holder's promise counts, not this process's configuration.
        let promised =
            spec.lease_duration_seconds.and_then(|s| u64::try_from(s).ok()).map(Duration::from_secs);
        if now.duration_since(since) >= promised.unwrap_or(self.duration) { take } else { Act::Wait }
    }
}

/// What others see of the election.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Who holds the lease; empty: nobody.
    pub holder: String,
    /// Why the last look failed; empty when it did not.
    pub error: String,
}

/// Where the lease is and who asks.
#[derive(Clone)]
pub struct Candidate {
    /// Leases of its namespace.
    pub leases: Api<Lease>,
    /// Its name.
    pub name: String,
    /// Unique for each process.
    pub me: String,
    /// Times.
    pub times: Times,
}

impl std::fmt::Debug for Candidate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Candidate").field("name", &self.name).field("me", &self.me).finish_non_exhaustive()
    }
}

impl Candidate {
    /// Whether the lease, read now, is this process's: to be asked before each batch of writes.
    ///
    /// # Errors
    /// Who holds it, or why that is not known.
    pub async fn holds(&self) -> Result<(), String> {
        match timeout(self.times.write_limit(), self.leases.get_opt(&self.name)).await {
            Err(_) => Err("the lease could not be read in time".into()),
            Ok(Err(e)) => Err(format!("the lease could not be read: {e}")),
            Ok(Ok(None)) => Err("the lease is gone".into()),
            Ok(Ok(Some(lease))) => {
                let holder = lease.spec.and_then(|s| s.holder_identity).unwrap_or_default();
                if holder == self.me { Ok(()) } else { Err(format!("{holder:?} leads now")) }
            }
        }
    }

    fn renewed(&self, old: Option<Lease>, act: &Act) -> Lease {
        let now = MicroTime(Timestamp::now());
        let mut lease = old.unwrap_or_default();
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        if *act != Act::Renew {
            spec.acquire_time = Some(now.clone());
        }
        if let Act::Take { transitions } = act {
            spec.lease_transitions = Some(*transitions);
        }
        spec.lease_transitions.get_or_insert(0);
        spec.holder_identity = Some(self.me.clone());
        spec.lease_duration_seconds = Some(i32::try_from(self.times.duration.as_secs()).unwrap_or(i32::MAX));
        spec.renew_time = Some(now);
        lease
    }

    /// One look and, when it is this process's turn, one write. The term when it leads.
    async fn step(&self, election: &mut Election, seen: &mut Seen) -> Result<Option<i64>, kube::Error> {
        let lease = self.leases.get_opt(&self.name).await?;
        let holder = |l: &Lease| l.spec.as_ref().and_then(|s| s.holder_identity.clone()).unwrap_or_default();
        seen.holder = lease.as_ref().map(holder).unwrap_or_default();
        let act = election.decide(lease.as_ref(), Instant::now());
        let parameters = PostParams::default();
        let written = match act {
            Act::Wait => return Ok(None),
            Act::Create => {
                let mut fresh = self.renewed(None, &act);
                fresh.metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
                self.leases.create(&parameters, &fresh).await
            }
            // The version that was read goes with it: of two that take, one gets a conflict.
            _ => self.leases.replace(&self.name, &parameters, &self.renewed(lease, &act)).await,
        };
        match written {
            Ok(lease) => {
                seen.holder = self.me.clone();
                Ok(Some(i64::from(lease.spec.and_then(|s| s.lease_transitions).unwrap_or(0))))
            }
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Gives the lease back, so that a standby need not wait.
    async fn release(&self) -> Result<(), kube::Error> {
        let Some(mut lease) = self.leases.get_opt(&self.name).await? else { return Ok(()) };
        let Some(spec) = lease.spec.as_mut().filter(|s| s.holder_identity.as_deref() == Some(&self.me))
        else {
            return Ok(());
        };
        spec.holder_identity = None;
        spec.renew_time = Some(MicroTime(Timestamp::now()));
        self.leases.replace(&self.name, &PostParams::default(), &lease).await?;
        Ok(())
    }
}

/// Takes part in the election until `stop` turns true, then gives the lease back.
pub async fn run(
    candidate: Candidate,
    standing: watch::Sender<Standing>,
    seen: watch::Sender<Seen>,
    mut stop: watch::Receiver<bool>,
) {
    let times = candidate.times;
    let mut election = Election { me: candidate.me.clone(), duration: times.duration, seen: None };
    let mut last: Option<Instant> = None;
    loop {
        let began = Instant::now();
        let mut saw = seen.borrow().clone();
        saw.error.clear();
        // A request that hangs is given up in time to try once more.
        let patience = times.write_limit();
        let step = timeout(patience, candidate.step(&mut election, &mut saw)).await;
        let now = match step {
            Ok(Ok(Some(term))) => {
                last = Some(began);
                Standing::Leader { term, until: began + times.deadline }
            }
            Ok(Ok(None)) => {
                last = None;
                Standing::Standby
            }
            failed => {
                saw.error = match failed {
                    Ok(Err(e)) => e.to_string(),
                    _ => format!("no answer within {patience:?}"),
                };
                tracing::warn!(
                    lease = candidate.name,
                    error = saw.error,
                    "the lease cannot be read or renewed"
                );
                // Until the deadline a leader goes on trying.
                match last {
                    Some(at) if Instant::now() < at + times.deadline => *standing.borrow(),
                    _ => Standing::Standby,
                }
            }
        };
        let led = matches!(*standing.borrow(), Standing::Leader { .. });
        match (led, now) {
            (false, Standing::Leader { term, .. }) => tracing::info!(me = candidate.me, term, "leads"),
            (true, Standing::Standby) => {
                tracing::warn!(me = candidate.me, holder = saw.holder, "leads no more")
            }
            _ => {}
        }
        standing.send_replace(now);
        seen.send_replace(saw);
        let pause = times.retry.saturating_sub(began.elapsed());
        tokio::select! {
            () = sleep(pause.max(Duration::from_millis(10))) => {}
            _ = stop.wait_for(|s| *s) => break,
        }
    }
    let led = matches!(*standing.borrow(), Standing::Leader { .. });
    standing.send_replace(Standing::Standby);
    if led {
        match timeout(times.write_limit(), candidate.release()).await {
            Ok(Ok(())) => tracing::info!("gave the lease back"),
            Ok(Err(e)) => tracing::warn!(error = %e, "the lease could not be given back"),
            Err(_) => tracing::warn!("the lease could not be given back in time"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(holder: &str, version: &str, seconds: i32) -> Lease {
        Lease {
            metadata: ObjectMeta { resource_version: Some(version.into()), ..ObjectMeta::default() },
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.into()),
                lease_duration_seconds: Some(seconds),
                lease_transitions: Some(4),
                // A clock far off, either way, means nothing.
                renew_time: Some(MicroTime(Timestamp::UNIX_EPOCH)),
                ..LeaseSpec::default()
            }),
        }
    }

    fn election() -> Election {
        Election { me: "me".into(), duration: Duration::from_secs(15), seen: None }
    }

    #[test]
    fn a_standby_waits_for_as_long_as_the_holder_promised_by_its_own_clock() {
        let mut e = election();
        let t = Instant::now();
        let s = Duration::from_secs;
        assert_eq!(e.decide(Some(&lease("other", "1", 20)), t), Act::Wait);
        assert_eq!(e.decide(Some(&lease("other", "1", 20)), t + s(19)), Act::Wait);
        assert_eq!(e.decide(Some(&lease("other", "2", 20)), t + s(19)), Act::Wait, "a renewal begins anew");
        assert_eq!(e.decide(Some(&lease("other", "2", 20)), t + s(38)), Act::Wait);
        assert_eq!(e.decide(Some(&lease("other", "2", 20)), t + s(39)), Act::Take { transitions: 5 });
    }

    #[test]
    fn a_lease_given_back_is_taken_at_once_and_ones_own_is_renewed() {
        let mut e = election();
        let t = Instant::now();
        assert_eq!(e.decide(Some(&lease("", "1", 15)), t), Act::Take { transitions: 5 });
        assert_eq!(e.decide(Some(&lease("me", "2", 15)), t), Act::Renew);
        assert_eq!(e.decide(None, t), Act::Create);
    }
}
