//! A real Kubernetes cluster on one machine, for tests and measurements: etcd, API server, controller manager and
//! scheduler in one namespace; nodes that are each a set of namespaces with a real containerd, runc and kubelet; an
//! outside host. No registry, no virtual machines, nothing left behind. `docs/lab.md` has the facts.

#![forbid(unsafe_code)]

mod addresses;
mod audit;
mod cgroups;
pub mod conformance;
mod files;
mod flowloom;
mod images;
pub mod init;
mod junit;
mod lab;
pub mod member;
pub mod name_server;
mod network;
mod node;
mod oci;
mod options;
mod paths;
mod pki;
mod programs;
mod reference;
mod report;
mod services;
pub mod suites;
mod supervisor;
pub mod upstream;
pub mod wait;

pub use addresses::{
    API_SERVICE, DNS_SERVICE, POD_CIDRS, SERVICE_CIDRS, WORLD, control_plane, node, outside,
};
pub use audit::Requests;
pub use images::{BUSYBOX, PAUSE, build as build_images};
pub use junit::Outcome;
pub use lab::{Lab, names};
pub use node::Node;
pub use options::{Cni, Families, Options, Proxy, Routes};
pub use paths::{own_bin_dir, programs};
pub use programs::{build as build_programs, check as check_programs};
pub use report::Record;
pub use services::kube_proxy_config;
pub use supervisor::State;
