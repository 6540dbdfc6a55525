//! Programs on their way through the kernel's verifier: on threads of their own, those first that are needed first.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use aya::Ebpf;
use aya::programs::Program;

use crate::datapath::locked;
use crate::error::{Context as _, Error, Result};
use crate::links::Hook;
use crate::object::{failed, keep};
use crate::sockets::SocketHook;
use crate::sys;

/// Threads that load programs: the verifier takes a third of a second for each of the large ones, and no lock.
const VERIFIERS: usize = 4;

/// Every program of a node, in the order in which a start needs them: sockets, endpoints, then what connects the node with others. Of
/// those, the larger go first, so that no thread begins a large one when the others are done.
pub(crate) fn needed() -> Vec<&'static str> {
    let devices = [
        Hook::FromEndpoint,
        Hook::ToEndpoint,
        Hook::FromOverlay,
        Hook::FromUplink,
        Hook::ToOverlay,
        Hook::ToUplink,
    ];
    SocketHook::ALL.map(SocketHook::name).into_iter().chain(devices.map(Hook::name)).collect()
}

/// How far a load is; shared with whoever waits for a program.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    done: BTreeMap<&'static str, OwnedFd>,
    /// What the kernel is at.
    begun: BTreeSet<&'static str>,
    /// What was being done, and why it failed: nothing new is begun.
    failed: Option<(String, String)>,
    /// Nobody waits any more.
    stop: bool,
    /// No thread is at work any more.
    ended: bool,
}

impl State {
    fn check(&self) -> Result<()> {
        match self.failed.clone() {
            Some((doing, detail)) => Err(Error::Load { doing, detail }),
            None => Ok(()),
        }
    }
}

impl Progress {
    fn wait_for<T>(&self, mut look: impl FnMut(&State) -> Option<Result<T>>) -> Result<T> {
        let mut state = locked(&self.state);
        loop {
            if let Some(found) = look(&state) {
                return found;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The program, once it is verified.
    ///
    /// # Errors
    /// Why it will never be: this one was refused, or another one before it was begun.
    fn program(&self, name: &str) -> Result<OwnedFd> {
        self.wait_for(|state| {
            if let Some(fd) = state.done.get(name) {
                let copy = fd.as_fd().try_clone_to_owned();
                return Some(copy.map_err(|e| failed(format!("keeping {name}"), &e)));
            }
            if state.begun.contains(name) && !state.ended {
                return None;
            }
            let lost = || Error::Missing { kind: "program", name: name.to_owned() };
            match state.check() {
                Err(e) => Some(Err(e)),
                Ok(()) => state.ended.then(|| Err(lost())),
            }
        })
    }

    /// Waits for the end, whatever it is.
    ///
    /// # Errors
    /// What was refused.
    pub(crate) fn end(&self) -> Result<()> {
        self.wait_for(|state| state.ended.then(|| state.check()))
    }

    fn change(&self, f: impl FnOnce(&mut State)) {
        f(&mut locked(&self.state));
        self.changed.notify_all();
    }

    /// Takes the next one, if there is to be one.
    fn next<T>(&self, left: &Mutex<Vec<(&'static str, T)>>) -> Option<(&'static str, T)> {
        let mut left = locked(left);
        let mut state = locked(&self.state);
        let next = left.pop().filter(|_| !state.stop && state.failed.is_none())?;
        state.begun.insert(next.0);
        Some(next)
    }

    /// Verifies one after the other, with others who do.
    fn work(&self, left: &Mutex<Vec<(&'static str, &mut Program)>>) {
        while let Some((name, program)) = self.next(left) {
            let verified = verify(name, program);
            self.change(|state| {
                state.begun.remove(name);
                let failure = match verified {
                    Ok(fd) => return drop(state.done.insert(name, fd)),
                    Err(Error::Load { doing, detail }) => (doing, detail),
                    Err(e) => (format!("verifying {name}"), e.to_string()),
                };
                state.failed.get_or_insert(failure);
            });
        }
    }
}

fn verify(name: &str, program: &mut Program) -> Result<OwnedFd> {
    match program {
        Program::SchedClassifier(program) => {
            program.load().map_err(|e| failed(format!("verifying {name}"), &e))?;
            keep(name, program.fd())
        }
        Program::CgroupSockAddr(program) => {
            program.load().map_err(|e| failed(format!("verifying {name}"), &e))?;
            keep(name, program.fd())
        }
        _ => Err(Error::Missing { kind: "program", name: name.to_owned() }),
    }
}

/// Says that nothing comes any more, also where the thread panics.
struct Ending(Arc<Progress>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.change(|state| state.ended = true);
    }
}

/// A load that goes on by itself. Dropped, it begins no other program and waits for those that the kernel is at.
#[derive(Debug)]
pub(crate) struct Loading {
    progress: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
}

impl Loading {
    /// Verifies these programs of a load whose maps are there, in this order.
    ///
    /// # Errors
    /// When no thread is to be had.
    pub(crate) fn start(mut ebpf: Ebpf, names: Vec<&'static str>) -> Result<Self> {
        let progress = Arc::new(Progress::default());
        let ending = Ending(Arc::clone(&progress));
        let work = move || {
            let progress = &ending.0;
            let mut all: BTreeMap<&str, &mut Program> = ebpf.programs_mut().collect();
            // The last is taken first.
            let left = names.into_iter().rev().filter_map(|name| Some((name, all.remove(name)?)));
            let left = Mutex::new(left.collect());
            let threads = thread::available_parallelism().map_or(1, NonZero::get).min(VERIFIERS);
            thread::scope(|scope| {
                for _ in 1..threads {
                    let work = || progress.work(&left);
                    // One does it as well, only later.
                    let _ = thread::Builder::new().name("verifier".into()).spawn_scoped(scope, work);
                }
                progress.work(&left);
            });
        };
        let thread = thread::Builder::new().name("verifier".into()).spawn(work);
        let thread = thread.map_err(|e| failed("starting a thread for it", &e))?;
        Ok(Self { progress, thread: Some(thread) })
    }

    pub(crate) fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.progress.change(|state| state.stop = true);
        if let Some(thread) = self.thread.take() {
            // A panic was told to those who waited.
            let _ = thread.join();
        }
    }
}

/// Hears of the end of a load, from any thread.
#[derive(Clone, Debug)]
pub struct Verified(Option<Arc<Progress>>);

impl Verified {
    pub(crate) fn of(loading: Option<&Loading>) -> Self {
        Self(loading.map(|l| Arc::clone(&l.progress)))
    }

    /// Waits until the kernel has looked at every program.
    ///
    /// # Errors
    /// The program that it refused, and why.
    pub fn wait(&self) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |progress| progress.end())
    }
}

/// A program and its id, once somebody needed it.
type Slot = OnceLock<(OwnedFd, u32)>;

/// Programs by hook, with their kernel ids. One that is not verified yet is waited for by whoever asks for it.
#[derive(Debug)]
pub(crate) struct Programs<H> {
    known: BTreeMap<H, (&'static str, Slot)>,
    coming: Option<Arc<Progress>>,
}

impl<H: Ord + Copy> Programs<H> {
    /// Programs that are there.
    pub(crate) fn there(fds: impl IntoIterator<Item = (H, &'static str, OwnedFd)>) -> Result<Self> {
        let mut known = BTreeMap::new();
        for (hook, name, fd) in fds {
            known.insert(hook, (name, OnceLock::from(identified(name, fd)?)));
        }
        Ok(Self { known, coming: None })
    }

    /// Programs of a load.
    pub(crate) fn coming(hooks: impl IntoIterator<Item = (H, &'static str)>, of: &Loading) -> Self {
        let known = hooks.into_iter().map(|(hook, name)| (hook, (name, OnceLock::new())));
        Self { known: known.collect(), coming: Some(Arc::clone(of.progress())) }
    }

    /// The program of a hook and its id.
    ///
    /// # Errors
    /// When there is none, or it was refused.
    pub(crate) fn of(&self, hook: H, name: &str) -> Result<(BorrowedFd<'_>, u32)> {
        let missing = || Error::Missing { kind: "program", name: name.to_owned() };
        let (name, slot) = self.known.get(&hook).ok_or_else(missing)?;
        if slot.get().is_none() {
            let fd = self.coming.as_ref().ok_or_else(missing)?.program(name)?;
            // Whoever was faster has the same program.
            let _ = slot.set(identified(name, fd)?);
        }
        slot.get().map(|(fd, id)| (fd.as_fd(), *id)).ok_or_else(missing)
    }
}

fn identified(name: &str, fd: OwnedFd) -> Result<(OwnedFd, u32)> {
    let id = sys::prog_facts(fd.as_fd()).kernel(format!("reading program {name}"))?.id;
    Ok((fd, id))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn fd() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn every_program_is_needed_once_and_those_of_sockets_and_endpoints_first() {
        let all = needed();
        let mut distinct = all.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!((all.len(), distinct.len()), (14, 14));
        let at = |name: &str| all.iter().position(|n| *n == name).unwrap();
        assert!(at("sendmsg6") < at("from_endpoint") && at("to_endpoint") < at("from_overlay"));
    }

    #[test]
    fn who_waits_for_a_program_waits_for_that_one_only() {
        let progress = Arc::new(Progress::default());
        let waiting = Arc::clone(&progress);
        let waiter = thread::spawn(move || waiting.program("from_endpoint").map(drop));
        progress.change(|state| drop(state.done.insert("from_endpoint", fd())));
        waiter.join().unwrap().unwrap();
        assert!(!locked(&progress.state).ended);
    }

    #[test]
    fn a_refusal_is_told_to_everybody_who_waits_and_leaves_what_is_there() {
        let progress = Arc::new(Progress::default());
        progress.change(|state| drop(state.done.insert("from_endpoint", fd())));
        let (waiting, ending) = (Arc::clone(&progress), Ending(Arc::clone(&progress)));
        let waiter = thread::spawn(move || waiting.program("from_overlay").map(drop));
        progress.change(|state| state.failed = Some(("verifying from_uplink".into(), "R5 !read_ok".into())));
        let told = waiter.join().unwrap().unwrap_err().to_string();
        assert!(told.contains("verifying from_uplink: R5 !read_ok"), "{told}");
        assert!(progress.program("from_endpoint").is_ok());
        assert!(progress.next(&Mutex::new(vec![("to_uplink", ())])).is_none(), "another one was begun");
        drop(ending);
        assert_eq!(progress.end().unwrap_err().to_string(), told);
    }

    #[test]
    fn what_the_kernel_is_at_is_waited_for_whatever_it_says_of_others() {
        let progress = Arc::new(Progress::default());
        assert!(progress.next(&Mutex::new(vec![("to_endpoint", ())])).is_some());
        progress.change(|state| state.failed = Some(("verifying from_overlay".into(), String::new())));
        let waiting = Arc::clone(&progress);
        let waiter = thread::spawn(move || waiting.program("to_endpoint").map(drop));
        progress.change(|state| {
            state.begun.remove("to_endpoint");
            state.done.insert("to_endpoint", fd());
        });
        waiter.join().unwrap().unwrap();
        assert!(progress.program("to_uplink").is_err());
    }

    #[test]
    fn an_end_without_the_program_is_no_hang() {
        let progress = Arc::new(Progress::default());
        drop(Ending(Arc::clone(&progress)));
        assert!(matches!(progress.program("to_uplink"), Err(Error::Missing { .. })));
        progress.end().unwrap();
    }
}
