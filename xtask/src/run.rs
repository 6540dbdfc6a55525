//! Running other programs: argument vectors, never a shell.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_path_buf()
}

/// A command that runs in the repository's root.
pub(crate) fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(root());
    command
}

/// Runs it with inherited output; an error names the whole command.
pub(crate) fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    if status.success() { Ok(()) } else { bail!("{command:?} ended with {status}") }
}

/// Runs it and returns what it printed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let out = command.output().with_context(|| format!("cannot start {command:?}"))?;
    if !out.status.success() {
        bail!("{command:?} ended with {}: {}", out.status, String::from_utf8_lossy(&out.stderr));
    }
    Ok(String::from_utf8(out.stdout)?)
}

/// The cargo that runs this.
pub(crate) fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}

/// Every file git tracks (and untracked ones it does not ignore) below the root, relative.
pub(crate) fn files() -> Result<Vec<String>> {
    let out = output(&mut command("git", &["ls-files", "--cached", "--others", "--exclude-standard"]))?;
    Ok(out.lines().filter(|f| root().join(f).is_file()).map(str::to_owned).collect())
}
