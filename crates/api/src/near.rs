//! The nearest of known names, for people who slipped.

/// The nearest of the known names, when it is near enough to be a slip, or begins as the wrong one does.
#[must_use]
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let allowed = 1 + name.len() / 3;
    known
        .into_iter()
        .filter_map(|k| {
            let begins = !name.is_empty() && (k.starts_with(name) || name.starts_with(k));
            // The distance is never less than the difference in length: most of thousands of names need no table.
            let close = k.len().abs_diff(name.len()) <= allowed;
            (begins || close).then(|| (distance(name, k), k)).filter(|(d, _)| begins || *d <= allowed)
        })
        .min()
        .map(|(_, k)| k)
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let cost = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = cost.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_or_a_beginning_is_near_and_nonsense_is_not() {
        let known = ["shop/front-7f9c-x2x4b", "shop/db-0", "prod/db-0"];
        assert_eq!(nearest("shop/db-1", known), Some("shop/db-0"));
        assert_eq!(nearest("shpo/db-0", known), Some("shop/db-0"));
        assert_eq!(nearest("shop/front", known), Some("shop/front-7f9c-x2x4b"));
        assert_eq!(nearest("monitoring/agent", known), None);
        assert_eq!(nearest("", known), None);
    }
}
