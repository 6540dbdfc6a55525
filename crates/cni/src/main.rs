//! The process around [`flowloom_cni`].
#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;

use flowloom_cni::environment::ProcessEnvironment;
use flowloom_cni::install::{self, Options, USAGE};
use flowloom_cni::version::Version;
use flowloom_cni::{KernelSandbox, Limits};

fn main() -> ExitCode {
    let mut args = std::env::args();
    let program = args.next().unwrap_or_default();
    match args.next().as_deref() {
        // Runtimes pass no arguments.
        None if std::env::var_os("CNI_COMMAND").is_some() => serve(&program),
        None | Some("--help" | "-h" | "help") => say(USAGE),
        Some("--version" | "-V") => say(&format!(
            "flowloom-cni {}, CNI {}\n",
            env!("CARGO_PKG_VERSION"),
            Version::ALL.map(Version::as_str).join(", ")
        )),
        Some("install") => by_hand(args, |options| {
            let program = std::env::current_exe().map_err(|e| e.to_string())?;
            install::install(&program, options).map_err(|e| e.to_string())
        }),
        Some("uninstall") => by_hand(args, |options| install::uninstall(options).map_err(|e| e.to_string())),
        Some(other) => complain(&format!("{other:?} is not a command; see flowloom-cni --help"), 2),
    }
}

fn serve(program: &str) -> ExitCode {
    // A Pod waits. Without it the same comes later on a busy machine.
    let _ = flowloom_netlink::small_slices();
    let outcome = flowloom_cni::run(
        program,
        &ProcessEnvironment,
        &mut std::io::stdin().lock(),
        &KernelSandbox,
        &Limits::default(),
    );
    if !outcome.note.is_empty() {
        // Nowhere to report that stderr is closed.
        let _ = writeln!(std::io::stderr(), "flowloom-cni: {}", outcome.note);
    }
    let mut out = std::io::stdout().lock();
    // A runtime that closed the pipe learns from the exit code.
    match out.write_all(outcome.stdout.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::from(outcome.exit_code),
        Err(_) => ExitCode::FAILURE,
    }
}

fn by_hand(
    args: impl Iterator<Item = String>,
    run: impl FnOnce(&Options) -> Result<Vec<String>, String>,
) -> ExitCode {
    let args: Vec<String> = args.collect();
    if args.iter().any(|a| a == "--help" || a == "-h") {
        return say(USAGE);
    }
    match Options::parse(args) {
        Err(e) => complain(&e, 2),
        Ok(options) => match run(&options) {
            Ok(lines) => say(&lines.iter().map(|l| format!("{l}\n")).collect::<String>()),
            Err(e) => complain(&e, 1),
        },
    }
}

fn say(text: &str) -> ExitCode {
    let written = std::io::stdout().lock().write_all(text.as_bytes());
    if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn complain(text: &str, code: u8) -> ExitCode {
    // Nowhere to report that stderr is closed.
    let _ = writeln!(std::io::stderr(), "flowloom-cni: {text}");
    ExitCode::from(code)
}
