//! `flowloom-datapath` against the kernel.

mod apply;
mod cold;
mod common;
mod open;
mod run;
mod services;
mod traffic;
