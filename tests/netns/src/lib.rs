//! What the kernel tests share: the object loaded with maps of its own.

pub mod programs;
