//! What the kernel tests share: the object loaded with maps of its own, and a node made of namespaces around it.

pub mod lab;
pub mod programs;
pub mod services;
pub mod stats;
pub mod twin;
