//! The manifests of `deploy/`, written from the code that they must agree with: rights from [`flowloom_k8s::access`], resource definitions
//! from the types of [`flowloom_k8s`], configuration that the programs' own parsers accept. `cargo xtask deploy` writes them; `cargo xtask
//! check deploy` fails when the files differ.
#![forbid(unsafe_code)]

mod admission;
mod crds;
mod rbac;
#[cfg(test)]
mod tests;
mod workloads;

use anyhow::Result;

const HEAD: &str = "# Written by `cargo xtask deploy`; change deploy/src instead.\n";

/// File name in `deploy/` and contents, in the order they are applied (`kubectl apply -f deploy/` sorts by name).
///
/// # Errors
/// When a resource definition cannot be written as YAML.
pub fn manifests() -> Result<Vec<(&'static str, String)>> {
    let files = [
        ("00-namespace.yaml", rbac::namespace()),
        ("10-rbac.yaml", rbac::accounts_and_roles()),
        ("15-admission.yaml", admission::own_node()),
        ("20-crds.yaml", crds::definitions()?),
        ("30-config.yaml", workloads::configuration()),
        ("40-agent.yaml", workloads::agent()),
        ("50-controller.yaml", workloads::controller()),
    ];
    Ok(files.into_iter().map(|(name, text)| (name, format!("{HEAD}{text}"))).collect())
}
