//! The API server's record of what flowloom's programs ask it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

const PREFIX: &str = "system:serviceaccount:flowloom:";
const ACCOUNTS: [&str; 2] = ["flowloom-agent", "flowloom-controller"];

/// Who asked what, without what was said; of nobody else.
pub(crate) fn policy() -> Value {
    let users: Vec<String> = ACCOUNTS.iter().map(|account| format!("{PREFIX}{account}")).collect();
    json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata", "users": users}, {"level": "None"}],
    })
}

/// Requests of each account by verb and resource ("watch pods"), and how many.
pub type Requests = BTreeMap<String, BTreeMap<String, usize>>;

/// A watch is recorded when it begins and when it ends: it is one request.
pub(crate) fn count(log: &str) -> Result<Requests> {
    let mut seen = BTreeSet::new();
    let mut requests = Requests::new();
    // Whoever writes may not have finished the last line.
    let whole = log.rfind('\n').map_or("", |end| &log[..end]);
    for line in whole.lines() {
        let event: Value = serde_json::from_str(line).with_context(|| format!("not an event: {line}"))?;
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        ensure!(event["responseStatus"]["code"] != 403, "refused: {line}");
        let user = text(&event["user"]["username"]);
        let Some(account) = user.strip_prefix(PREFIX) else { continue };
        if seen.insert(text(&event["auditID"])) {
            let what = match &event["objectRef"] {
                Value::Null => text(&event["requestURI"]),
                of => [&of["resource"], &of["subresource"]]
                    .iter()
                    .filter_map(|v| v.as_str())
                    .collect::<Vec<_>>()
                    .join("/"),
            };
            let kind = format!("{} {what}", text(&event["verb"]));
            *requests.entry(account.to_owned()).or_default().entry(kind).or_default() += 1;
        }
    }
    Ok(requests)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(account: &str, id: &str, stage: &str, code: u16) -> String {
        let user = json!({"username": format!("{PREFIX}{account}")});
        json!({"auditID": id, "stage": stage, "user": user, "verb": "patch", "responseStatus": {"code": code},
               "objectRef": {"resource": "nodes", "subresource": "status"}})
        .to_string()
            + "\n"
    }

    #[test]
    fn a_watch_is_one_request_and_a_half_written_line_none() {
        let agent = |id, stage| line("flowloom-agent", id, stage, 200);
        let mut log =
            agent("a", "ResponseStarted") + &agent("b", "ResponseComplete") + &agent("a", "ResponseComplete");
        log += &line("flowloom-controller", "c", "ResponseComplete", 409);
        log += &agent("d", "ResponseComplete")[..20];
        let kind = |n: usize| BTreeMap::from([("patch nodes/status".to_owned(), n)]);
        let expected = BTreeMap::from([
            ("flowloom-agent".to_owned(), kind(2)),
            ("flowloom-controller".to_owned(), kind(1)),
        ]);
        assert_eq!(count(&log).unwrap(), expected);
        assert_eq!(count("").unwrap(), BTreeMap::new());
    }

    #[test]
    fn what_was_refused_is_an_error() {
        let e = count(&line("flowloom-agent", "a", "ResponseComplete", 403)).unwrap_err();
        assert!(e.to_string().contains("refused"), "{e}");
    }
}
