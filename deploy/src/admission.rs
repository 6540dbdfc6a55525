//! What roles cannot say: an agent may write to the object of its own node only.

use flowloom_k8s::access::{AGENT, NAMESPACE};

/// Name of the policy and of its binding.
const NAME: &str = "flowloom-agent-own-node";
/// Which node a token was made for, as the API server tells admission (Kubernetes 1.32).
const CLAIM: &str = "authentication.kubernetes.io/node-name";

pub(crate) fn own_node() -> String {
    let agent = AGENT.name;
    format!(
        "apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {NAME}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
      - apiGroups: [\"\"]
        apiVersions: [v1]
        operations: [UPDATE]
        resources: [nodes, nodes/status]
  matchConditions:
    - name: agents
      expression: request.userInfo.username == \"system:serviceaccount:{NAMESPACE}:{agent}\"
    # Older API servers name no node in the tokens of Pods; there roles are all there is.
    - name: tokens-of-a-node
      expression: has(request.userInfo.extra) && \"{CLAIM}\" in request.userInfo.extra
  validations:
    - expression: object.metadata.name == request.userInfo.extra[\"{CLAIM}\"][0]
      message: an agent writes to the object of its own node only
      reason: Forbidden
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {NAME}
spec:
  policyName: {NAME}
  validationActions: [Deny]
"
    )
}
