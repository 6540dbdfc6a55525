//! `cargo xtask deploy`'s worker: writes the manifests or compares them with what is there.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use clap::Parser;

#[derive(Parser, Debug)]
#[command(about)]
struct Arguments {
    /// Directory of the manifests.
    directory: PathBuf,
    /// Compare only; fails when a file differs, is missing or is nobody's.
    #[arg(long)]
    check: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let manifests = flowloom_deploy::manifests()?;
    let mut faults = Vec::new();
    for entry in std::fs::read_dir(&arguments.directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".yaml") && manifests.iter().all(|(n, _)| *n != name) {
            if arguments.check {
                faults.push(format!("{name} is written by nothing"));
            } else {
                std::fs::remove_file(&path).with_context(|| name.clone())?;
            }
        }
    }
    for (name, text) in &manifests {
        let path = arguments.directory.join(name);
        if !arguments.check {
            std::fs::write(&path, text).with_context(|| (*name).to_owned())?;
        } else if std::fs::read_to_string(&path).ok().as_deref() != Some(text) {
            faults.push(format!("{name} differs from the code: run `cargo xtask deploy`"));
        }
    }
    if faults.is_empty() { Ok(()) } else { bail!("{}", faults.join("\n")) }
}
