//! Where intent comes from. A source only translates; it decides nothing.

mod cluster;
mod file;
mod kubernetes;

pub(crate) use cluster::start;
pub(crate) use file::{DocumentFile, Kept, Loaded, Read, watch};
pub(crate) use kubernetes::{KubernetesWorld, await_pod};
