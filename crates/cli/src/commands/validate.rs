//! `flowloom validate`.

use std::path::{Path, PathBuf};

use clap::Args;
use flowloom_model::{Fault, Format, Parsed, parse, validate};

use crate::context::Context;
use crate::exit::{Exit, Failure};
use crate::output::document::{Counts, FileReport, files};

/// Check documents; every fault is shown at once.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  flowloom validate network.yaml
  flowloom validate site-a.yaml site-b.json -o json")]
pub(crate) struct ValidateArgs {
    /// Documents: JSON when the name ends in .json, YAML otherwise.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

pub(crate) fn run(context: &mut Context<'_>, args: &ValidateArgs) -> Result<Exit, Failure> {
    let mut reports = Vec::new();
    for file in &args.files {
        let bytes = read(file)?;
        let (faults, objects) = match check(file, &bytes) {
            Ok(parsed) => (Vec::new(), Some(Counts::of(&parsed.world))),
            Err(faults) => (faults, None),
        };
        reports.push(FileReport { file: file.display().to_string(), ok: faults.is_empty(), faults, objects });
    }
    context.show(&reports, |r, view| files(r, view))?;
    Ok(if reports.iter().all(|r| r.ok) { Exit::Ok } else { Exit::Error })
}

/// Reads a file, naming it when that fails.
pub(crate) fn read(file: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(file).map_err(|e| Failure::error(format!("{}: {e}", file.display())))
}

/// Parses and validates: all faults, or a document without any.
pub(crate) fn check(file: &Path, bytes: &[u8]) -> Result<Parsed, Vec<Fault>> {
    let parsed = parse(bytes, Format::of_path(file))?;
    let mut faults = validate(&parsed.world);
    parsed.locate(&mut faults);
    if faults.is_empty() { Ok(parsed) } else { Err(faults) }
}
