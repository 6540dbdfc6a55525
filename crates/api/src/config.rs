//! What configuration files of the daemons have in common: an unknown key is refused with the nearest known one.

/// Shortens a YAML parser's message to its first line and adds the nearest known key when an unknown one was met.
#[must_use]
pub fn with_suggestion(message: &str) -> String {
    // The parser's picture of the place follows; line and column say enough.
    let message = message.lines().next().unwrap_or_default();
    let message = message.strip_prefix("error: ").unwrap_or(message);
    let Some((_, rest)) = message.split_once("unknown field") else { return message.to_owned() };
    let (unknown, expected) = rest.split_once(", expected").unwrap_or((rest, ""));
    let unknown = unknown.trim().trim_matches('`');
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let known: Vec<String> = expected
        .split(|c| !word(c))
        .filter(|w| !w.is_empty() && !matches!(*w, "one" | "of" | "or"))
        .map(str::to_owned)
        .collect();
    match crate::nearest(unknown, known.iter().map(String::as_str)) {
        Some(near) => format!("{message}; did you mean `{near}`?"),
        None => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_answered_with_the_nearest_key_and_nonsense_is_not() {
        let said = |unknown| {
            with_suggestion(&format!(
                "error: unknown field `{unknown}`, expected one of `socket`, `log`\n | picture"
            ))
        };
        assert_eq!(
            said("sokcet"),
            "unknown field `sokcet`, expected one of `socket`, `log`; did you mean `socket`?"
        );
        assert!(!said("completely_else").contains("did you mean"));
    }
}
