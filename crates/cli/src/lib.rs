//! The `flowloom` command: arguments (`commands`), what they ask of documents and the agent, and how answers are shown (`output`).
//!
//! `docs/cli.md` is checked against [`Cli`] by a test. Exit codes are in [`Exit`].
#![forbid(unsafe_code)]

mod commands;
mod context;
mod exit;
mod files;
mod output;
mod peers;
mod values;

pub use commands::{Cli, run};
pub use context::{Context, Streams};
pub use exit::{Exit, Failure};
pub use output::{Colour, Format};
