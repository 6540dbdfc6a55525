//! `flowloom apply`.

use clap::Args;

use crate::context::Context;
use crate::exit::{Exit, Failure};

/// Apply.
#[derive(Debug, Args)]
pub(crate) struct ApplyArgs {}

pub(crate) fn run(_context: &mut Context<'_>, _args: &ApplyArgs) -> Result<Exit, Failure> {
    Err(Failure::error("apply needs the allocator"))
}
