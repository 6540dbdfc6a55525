//! Tables, pairs and colours.

use std::fmt::Display;

use comfy_table::{Cell as ComfyCell, Color, ContentArrangement, Table as Comfy};
use flowloom_api::v1::{EndpointState, Verdict};

use super::View;

/// What a text means, for its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Good,
    Warn,
    Bad,
    Dim,
}

/// One field of a table.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    pub(crate) fn new(text: impl Display, tone: Tone) -> Self {
        Self { text: text.to_string(), tone }
    }
}

impl<T: Display> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::new(text, Tone::Plain)
    }
}

/// A table that grows by rows; `-o wide` shows all columns, otherwise only the first `narrow` ones.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<&'static str>,
    rows: Vec<Vec<Cell>>,
    view: View,
}

impl Table {
    /// `wide` are the columns that only `-o wide` shows; they come last.
    pub(crate) fn new(view: View, columns: &[&'static str], wide: &[&'static str]) -> Self {
        let mut columns = columns.to_vec();
        if view.wide {
            columns.extend(wide);
        }
        Self { columns, rows: Vec::new(), view }
    }

    /// Adds a row that has every column, the wide ones too; what is not shown is cut.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().take(self.columns.len()).collect());
    }

    /// The text: aligned columns, no lines, `-` for what is empty.
    pub(crate) fn render(self) -> String {
        let mut table = Comfy::new();
        table.load_style(comfy_table::presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        if self.view.colour {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        table.set_header(self.columns.iter().map(ComfyCell::new));
        for row in self.rows {
            table.add_row(row.into_iter().map(|c| {
                let cell = ComfyCell::new(printable(if c.text.is_empty() { "-" } else { &c.text }));
                match colour(c.tone) {
                    Some(colour) => cell.fg(colour),
                    None => cell,
                }
            }));
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        table.lines().map(|l| format!("{}\n", l.trim_end())).collect()
    }
}

/// Names and values below each other.
#[derive(Debug)]
pub(crate) struct Pairs {
    pairs: Vec<(&'static str, Cell)>,
    view: View,
}

impl Pairs {
    pub(crate) fn new(view: View) -> Self {
        Self { pairs: Vec::new(), view }
    }

    pub(crate) fn add(&mut self, name: &'static str, value: impl Into<Cell>) {
        self.pairs.push((name, value.into()));
    }

    /// Adds the pair when there is a value.
    pub(crate) fn add_some(&mut self, name: &'static str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.add(name, value.to_string());
        }
    }

    pub(crate) fn render(self) -> String {
        let width = self.pairs.iter().map(|(n, _)| n.len()).max().unwrap_or(0) + 1;
        self.pairs
            .iter()
            .map(|(name, cell)| {
                let text = if cell.text.is_empty() { "-".to_owned() } else { printable(&cell.text) };
                format!("{:width$} {}\n", format!("{name}:"), paint(&text, cell.tone, self.view))
            })
            .collect()
    }
}

/// Colours a text when colours are wanted.
pub(crate) fn paint(text: &str, tone: Tone, view: View) -> String {
    let code = match tone {
        Tone::Good => "32",
        Tone::Warn => "33",
        Tone::Bad => "31",
        Tone::Dim => "90",
        Tone::Plain => return text.to_owned(),
    };
    if view.colour { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
}

fn colour(tone: Tone) -> Option<Color> {
    match tone {
        Tone::Plain => None,
        Tone::Good => Some(Color::DarkGreen),
        Tone::Warn => Some(Color::DarkYellow),
        Tone::Bad => Some(Color::DarkRed),
        Tone::Dim => Some(Color::DarkGrey),
    }
}

/// Labels and messages come from elsewhere: what would move a terminal's cursor is shown as a replacement character.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A verdict's colour.
pub(crate) fn verdict_tone(v: Verdict) -> Tone {
    match v {
        Verdict::Allow => Tone::Good,
        Verdict::Drop | Verdict::Reject => Tone::Bad,
    }
}

/// A verdict as a field.
pub(crate) fn verdict(v: Verdict) -> Cell {
    Cell::new(v.name(), verdict_tone(v))
}

/// A state as a field.
pub(crate) fn state(s: EndpointState) -> Cell {
    let tone = match s {
        EndpointState::Ready => Tone::Good,
        EndpointState::Waiting | EndpointState::Creating | EndpointState::Deleting => Tone::Warn,
        EndpointState::Failed => Tone::Bad,
    };
    Cell::new(s.name(), tone)
}

/// Joined with commas.
pub(crate) fn list<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|i| i.to_string()).collect::<Vec<_>>().join(",")
}

/// `k=v,k=v`.
pub(crate) fn labels(labels: &std::collections::BTreeMap<String, String>) -> String {
    list(labels.iter().map(|(k, v)| format!("{k}={v}")))
}

/// `#7`, or `-` for none.
pub(crate) fn number(n: u32) -> String {
    if n == 0 { String::new() } else { n.to_string() }
}

/// `1 fault`, `3 faults`.
pub(crate) fn count(n: impl Into<u64>, one: &str) -> String {
    let n = n.into();
    let plural = match one.strip_suffix('y') {
        _ if n == 1 => one.to_owned(),
        Some(stem) => format!("{stem}ies"),
        None => format!("{one}s"),
    };
    format!("{n} {plural}")
}

/// `1.2 MiB`: three figures are enough for people, `-o json` has the bytes.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    format!("{value:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: View = View { wide: false, colour: false };

    #[test]
    fn columns_align_and_wide_ones_are_cut() {
        let mut t = Table::new(PLAIN, &["NAME", "STATE"], &["MORE"]);
        t.row([Cell::from("a"), Cell::new("ready", Tone::Good), "x".into()]);
        t.row([Cell::from("longer"), "".into(), "y".into()]);
        assert_eq!(t.render(), "NAME    STATE\na       ready\nlonger  -\n");
        let mut t = Table::new(View { wide: true, colour: false }, &["NAME"], &["MORE"]);
        t.row([Cell::from("a"), "x".into()]);
        assert_eq!(t.render(), "NAME  MORE\na     x\n");
    }

    #[test]
    fn colours_only_where_they_are_wanted_and_no_foreign_escapes() {
        let cells = || [Cell::new("drop\u{1b}[2J", Tone::Bad)];
        let mut t = Table::new(PLAIN, &["V"], &[]);
        t.row(cells());
        assert_eq!(t.render(), "V\ndrop\u{fffd}[2J\n");
        let mut t = Table::new(View { wide: false, colour: true }, &["V"], &[]);
        t.row(cells());
        let text = t.render();
        assert!(text.contains("\u{1b}[") && !text.contains("\u{1b}[2J"), "{text:?}");
    }

    #[test]
    fn counts() {
        assert_eq!([0_u64, 1, 2].map(|n| count(n, "fault")), ["0 faults", "1 fault", "2 faults"]);
        assert_eq!([1_u64, 2].map(|n| count(n, "entry")), ["1 entry", "2 entries"]);
    }

    #[test]
    fn sizes() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
    }
}
