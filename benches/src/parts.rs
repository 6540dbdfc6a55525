//! Parts of a benchmark by name.

use anyhow::{Result, bail};

/// Those that are named, or all when none is; in their own order.
///
/// # Errors
/// For a name that none has, with those there are.
pub fn chosen<T: Copy>(parts: &[(&'static str, T)], only: &[String]) -> Result<Vec<(&'static str, T)>> {
    let names: Vec<&str> = parts.iter().map(|(name, _)| *name).collect();
    if let Some(unknown) = only.iter().find(|o| !names.contains(&o.as_str())) {
        bail!("no part {unknown:?}; there are: {}", names.join(", "));
    }
    Ok(parts.iter().copied().filter(|(name, _)| only.is_empty() || only.iter().any(|o| o == name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_chosen_by_name_and_a_name_that_is_none_lists_them() {
        let parts = [("a", 1), ("b", 2)];
        assert_eq!(chosen(&parts, &[]).unwrap(), parts);
        assert_eq!(chosen(&parts, &["b".to_owned()]).unwrap(), [("b", 2)]);
        let error = chosen(&parts, &["c".to_owned()]).unwrap_err().to_string();
        assert_eq!(error, "no part \"c\"; there are: a, b");
    }
}
