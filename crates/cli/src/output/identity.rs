//! Identities.

use flowloom_api::v1::IdentityList;

use super::View;
use super::table::{Cell, Table, labels, list};

/// Endpoints shown per identity unless `-o wide`.
const FEW: usize = 3;

pub(crate) fn many(identities: &IdentityList, view: View) -> String {
    let mut t = Table::new(view, &["IDENTITY", "VPC", "KIND", "LABELS", "GROUPS", "ENDPOINTS"], &["CIDRS"]);
    for i in &identities.identities {
        let kind = match &i.reserved {
            Some(kind) => kind.as_str(),
            None if i.endpoint => "endpoint",
            None => "cidr",
        };
        let shown = if view.wide { i.endpoints.len() } else { FEW };
        let mut endpoints = list(i.endpoints.iter().take(shown));
        if i.endpoints.len() > shown {
            endpoints.push_str(&format!(" and {} more", i.endpoints.len() - shown));
        }
        t.row([
            i.identity.into(),
            Cell::from(&i.vpc),
            kind.into(),
            labels(&i.labels).into(),
            list(&i.security_groups).into(),
            endpoints.into(),
            list(&i.cidrs).into(),
        ]);
    }
    t.render()
}
