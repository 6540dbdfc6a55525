//! The page and the examples say what the reader does.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;

use flowloom_model::{Format, SHAPES, Support, parse, validate};

const PAGE: &str = include_str!("../../../docs/desired-state.md");

/// Every table row of every section: section -> (field, support) in order.
fn sections() -> BTreeMap<&'static str, Vec<(&'static str, &'static str)>> {
    let mut out: BTreeMap<&str, Vec<(&str, &str)>> = BTreeMap::new();
    let mut section = "";
    for line in PAGE.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            section = heading.trim_matches('`');
        }
        let mut cells = line.split('|').map(str::trim).skip(1);
        if let (Some(field), Some(support)) = (cells.next(), cells.next())
            && let Some(name) = field.strip_prefix('`').and_then(|f| f.strip_suffix('`'))
        {
            out.entry(section).or_default().push((name, support));
        }
    }
    out
}

#[test]
fn the_page_lists_exactly_the_fields_that_are_read() {
    let page = sections();
    assert_eq!(page.len(), SHAPES.len(), "{:?}", page.keys());
    for shape in SHAPES {
        let want: Vec<(&str, &str)> = shape
            .fields
            .iter()
            .map(|f| {
                let word = match f.support {
                    Support::Required => "required",
                    Support::Optional => "optional",
                    Support::Later => "later",
                };
                (f.name, word)
            })
            .collect();
        assert_eq!(page.get(shape.at), Some(&want), "section {}", shape.at);
    }
}

#[test]
fn the_pages_example_is_right() {
    let start = PAGE.find("```yaml").unwrap() + "```yaml".len();
    let end = start + PAGE[start..].find("```").unwrap();
    let parsed = parse(&PAGE.as_bytes()[start..end], Format::Yaml).unwrap();
    assert_eq!(validate(&parsed.world), []);
    assert_eq!(parsed.world.endpoints.len(), 1);
}

#[test]
fn every_example_file_is_what_its_name_says() {
    let mut seen = 0;
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples")).unwrap() {
        let path = entry.unwrap().path();
        let kind = path.extension().unwrap().to_str().unwrap().to_owned();
        if kind != "yaml" && kind != "json" || path.to_str().unwrap().ends_with(".lock.yaml") {
            continue;
        }
        let result = parse(&std::fs::read(&path).unwrap(), Format::of_path(&path));
        let wrong = path.file_stem().unwrap() == "faults";
        assert_eq!(result.is_err(), wrong, "{}: {result:#?}", path.display());
        if let Ok(p) = result {
            assert_eq!(validate(&p.world), [], "{}", path.display());
        }
        seen += 1;
    }
    assert!(seen >= 3, "{seen}");
}
