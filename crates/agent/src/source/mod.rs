//! Where intent comes from. A source only translates; it decides nothing.

mod file;

pub(crate) use file::{DocumentFile, Kept, Loaded, watch};
