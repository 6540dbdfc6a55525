//! Resource definitions, from the types.

use flowloom_k8s::slices::WorkloadSlice;
use kube::CustomResourceExt as _;

pub(crate) fn definitions() -> anyhow::Result<String> {
    let definition = serde_json::to_value(WorkloadSlice::crd())?;
    Ok(serde_saphyr::to_string(&definition)?)
}
