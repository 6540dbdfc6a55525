//! A laboratory of whole binaries: nodes are namespaces, each with an agent of its own, and everything is asked and changed the way a user does it.

mod binaries;
mod document;
mod lab;
pub mod pods;
mod runtime;
mod workload;

pub use binaries::binary;
pub use document::Document;
pub use lab::{Agent, Lab, LabBuilder};
pub use runtime::{Runtime, netns_path};
pub use workload::{Reached, Workload};
