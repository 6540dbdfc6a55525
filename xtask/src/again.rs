//! Tests that failed, run once more alone. Only where CI asks for it, and never in silence: one busy moment of a shared
//! machine shall not hide what the rest of a run says, and a test that flaked is named in the summary, as a bug.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::run;

/// More failures than these are no flakes.
const AT_MOST: usize = 2;

/// The tests of one program that failed.
#[derive(Debug, PartialEq, Eq)]
struct Failed {
    /// The words for cargo that choose the program.
    target: Vec<String>,
    names: Vec<String>,
}

/// Runs `cargo test` with `args`, made by `command`; the names of tests that only passed when they ran again.
///
/// # Errors
/// When a test fails: at once by default, twice with `CI=true`.
pub(crate) fn test(command: impl Fn(&[&str]) -> Command, args: &[&str]) -> Result<Vec<String>> {
    let mut first = command(args);
    if std::env::var_os("CI").is_none_or(|v| v != "true") {
        return run::succeed(&mut first).map(|()| Vec::new());
    }
    let (success, output) = shown(&mut first)?;
    if success {
        return Ok(Vec::new());
    }
    let failed = failures(&output);
    let names: Vec<String> = failed.iter().flat_map(|f| f.names.clone()).collect();
    if names.is_empty() || names.len() > AT_MOST || failed.iter().any(|f| f.names.is_empty()) {
        bail!("{first:?} failed");
    }
    println!("== once more, alone: {}", names.join(", "));
    for f in &failed {
        let target = f.target.iter().map(String::as_str);
        let names = f.names.iter().map(String::as_str);
        let args: Vec<&str> = target.chain(["--", "--exact", "--test-threads", "1"]).chain(names).collect();
        run::succeed(&mut command(&args))?;
    }
    Ok(names)
}

/// Runs it, passes on what it prints as it comes, and returns that; its two outputs share a pipe, so the order stays.
/// It ends with the command: a process that is left behind with the outputs open is not waited for.
pub(crate) fn shown(command: &mut Command) -> Result<(bool, String)> {
    let (mut reader, writer) = std::io::pipe()?;
    command.stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    // The command holds the writing ends: as long as they are open, reading would not end.
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let (ended, ends) = std::io::pipe()?;
    let waiter = std::thread::spawn(move || {
        let status = child.wait();
        drop(ends);
        status
    });
    let (mut all, mut buffer) = (Vec::new(), [0; 8192]);
    let mut show = |bytes: &[u8]| {
        all.extend_from_slice(bytes);
        std::io::stdout().write_all(bytes).and_then(|()| std::io::stdout().flush())
    };
    loop {
        let mut both = [&reader, &ended].map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLIN));
        match poll(&mut both, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            other => other?,
        };
        if both[1].any().unwrap_or(false) {
            break;
        }
        match reader.read(&mut buffer)? {
            0 => break,
            n => show(&buffer[..n])?,
        }
    }
    // What it said last is in the pipe, and no more than a pipe holds: others may go on writing.
    let room = fcntl(&reader, FcntlArg::F_GETPIPE_SZ)?;
    fcntl(&reader, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    let mut rest = reader.take(u64::try_from(room)?);
    loop {
        match rest.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => show(&buffer[..n])?,
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(e) => return Err(e.into()),
        }
    }
    let status = waiter.join().map_err(|_| anyhow!("waiting for {command:?} failed"))??;
    Ok((status.success(), String::from_utf8_lossy(&all).into_owned()))
}

/// What cargo and the test programs said of failures. A program that ended without its list has no names.
fn failures(output: &str) -> Vec<Failed> {
    let (mut found, mut names, mut listing) = (Vec::new(), Vec::new(), false);
    for line in output.lines() {
        if line == "failures:" {
            names.clear();
            listing = true;
        } else if let Some(name) = line.strip_prefix("    ").filter(|n| listing && !n.contains(' ')) {
            names.push(name.to_owned());
        } else if line.starts_with("test result:") {
            listing = false;
        } else if let Some(words) = line.split("to rerun pass `").nth(1).and_then(|t| t.split('`').next()) {
            let target = words.split(' ').map(str::to_owned).collect();
            found.push(Failed { target, names: std::mem::take(&mut names) });
        } else if line.starts_with("running ") {
            names.clear();
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn failures_are_read_with_their_programs() {
        let output = "
running 2 tests
..
test result: ok. 2 passed; 0 failed; 0 ignored

running 3 tests
.. 2/3
at_once --- FAILED

failures:

---- at_once stdout ----
    not_a_name of a test

thread 'at_once' panicked at tests/a.rs:92:5:

failures:
    at_once
    inner::later

test result: FAILED. 1 passed; 2 failed

error: test failed, to rerun pass `-p tests-netns --test a`

running 1 test
error: test failed, to rerun pass `-p tests-netns --test b`

Caused by:
  process didn't exit successfully: `b` (signal: 6, SIGABRT)
error: 2 targets failed:
    `-p tests-netns --test a`
    `-p tests-netns --test b`
";
        assert_eq!(
            failures(output),
            [
                Failed { target: words("-p tests-netns --test a"), names: words("at_once inner::later") },
                Failed { target: words("-p tests-netns --test b"), names: vec![] },
            ]
        );
    }

    #[test]
    fn what_a_command_prints_is_returned_and_its_end_told() -> Result<()> {
        let (success, output) = shown(&mut run::command("ls", &["/nowhere/at/all"]))?;
        assert!(!success && output.contains("/nowhere/at/all"), "{output}");
        let (success, output) = shown(&mut run::command("echo", &["said"]))?;
        assert!(success && output == "said\n", "{output}");
        Ok(())
    }

    #[test]
    fn a_process_that_is_left_behind_with_the_output_open_is_not_waited_for() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let pid = dir.path().join("pid");
        // It keeps both outputs, and writes on for as long as it lives.
        let script = "(while :; do echo left; done) & echo $! > $0; seq 9999; echo last words >&2; exit 3";
        let (success, output) = shown(&mut run::command("sh", &["-c", script, &pid.display().to_string()]))?;
        let left = Pid::from_raw(std::fs::read_to_string(&pid)?.trim().parse()?);
        let alive = kill(left, None);
        kill(left, Signal::SIGKILL)?;
        alive.context("the test left no process behind")?;
        assert!(!success);
        let said: Vec<&str> = output.lines().filter(|line| !line.contains("left")).collect();
        assert!(said.contains(&"9999") && said.contains(&"last words"), "{said:?}");
        Ok(())
    }
}
