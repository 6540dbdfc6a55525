//! The process around [`flowloom_cli`].
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use flowloom_cli::{Cli, Streams};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // Help and version are no errors; they go to stdout. A closed pipe is nobody's loss here.
            let _ = e.print();
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2));
        }
    };
    let mut streams = Streams::process(cli.colour());
    flowloom_cli::run(cli, &mut streams).into()
}
