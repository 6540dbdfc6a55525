//! What every command has at hand.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;

use flowloom_api::Client;
use serde::Serialize;

use crate::exit::Failure;
use crate::output::{Colour, Format, View};

/// Where a command writes, and whether colours are wanted there.
pub struct Streams {
    /// Answers.
    pub out: Box<dyn Write>,
    /// Everything else.
    pub err: Box<dyn Write>,
    /// Colours on `out`.
    pub colour: bool,
}

impl std::fmt::Debug for Streams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Streams").field("colour", &self.colour).finish_non_exhaustive()
    }
}

impl Streams {
    /// The process's own; `auto` means a terminal that has colours and a user who did not refuse them (no-color.org).
    #[must_use]
    pub fn process(colour: Colour) -> Self {
        let plain = |name: &str, value: Option<&str>| {
            std::env::var_os(name).is_some_and(|v| value.map_or(!v.is_empty(), |wanted| v == wanted))
        };
        let colour = match colour {
            Colour::Always => true,
            Colour::Never => false,
            Colour::Auto => {
                io::stdout().is_terminal() && !plain("NO_COLOR", None) && !plain("TERM", Some("dumb"))
            }
        };
        Self { out: Box::new(io::stdout().lock()), err: Box::new(io::stderr()), colour }
    }
}

/// What every command has at hand.
#[derive(Debug)]
pub struct Context<'a> {
    /// Streams.
    pub streams: &'a mut Streams,
    /// `-o`.
    pub format: Format,
    /// `--socket`.
    pub socket: PathBuf,
}

impl Context<'_> {
    /// A client of the agent.
    pub(crate) fn client(&self) -> Client {
        Client::new(&self.socket)
    }

    /// Shows an answer: as data, or as the text that `text` makes of it.
    pub(crate) fn show<T: Serialize>(
        &mut self,
        value: &T,
        text: impl FnOnce(&T, View) -> String,
    ) -> Result<(), Failure> {
        let view = View { wide: self.format == Format::Wide, colour: self.streams.colour };
        let mut shown = match self.format {
            Format::Table | Format::Wide => text(value, view),
            Format::Json => serde_json::to_string_pretty(value).map_err(|e| Failure::error(e.to_string()))?,
            Format::Yaml => serde_saphyr::to_string(value).map_err(|e| Failure::error(e.to_string()))?,
        };
        if !shown.is_empty() && !shown.ends_with('\n') {
            shown.push('\n');
        }
        self.streams.out.write_all(shown.as_bytes())?;
        self.streams.out.flush()?;
        Ok(())
    }

    /// A remark beside the answer.
    pub(crate) fn note(&mut self, text: &str) {
        // Nowhere to report that stderr is closed.
        let _ = writeln!(self.streams.err, "{text}");
    }
}
