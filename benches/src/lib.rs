//! Benchmarks against peers in the same run. Rates drift on shared machines; ratios of interleaved runs and CPU time per operation do not.

pub mod cni;
pub mod k8s;
pub mod measure;
pub mod node;
pub mod outside;
pub mod parts;
pub mod peers;
pub mod pods;
pub mod programs;
pub mod report;
pub mod services;
pub mod stats;
pub mod traffic;
