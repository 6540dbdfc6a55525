//! How answers look: one module per kind of answer, text only. JSON and YAML are the API's own shapes.

pub(crate) mod cni;
pub(crate) mod conntrack;
pub(crate) mod document;
pub(crate) mod drops;
pub(crate) mod endpoint;
pub(crate) mod event;
pub(crate) mod history;
pub(crate) mod identity;
pub(crate) mod ipam;
pub(crate) mod kubernetes;
pub(crate) mod policy;
pub(crate) mod service;
pub(crate) mod status;
pub(crate) mod table;
pub(crate) mod time;
pub(crate) mod trace;

/// `-o`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Table,
    /// The same with more columns.
    Wide,
    /// The API's own shape.
    Json,
    /// The same as YAML.
    Yaml,
}

/// `--color`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Colour {
    /// On a terminal, unless `NO_COLOR` is set.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// How a text is wanted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    pub(crate) wide: bool,
    pub(crate) colour: bool,
}
