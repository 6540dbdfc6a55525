//! The page lists what the plugin really knows.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use flowloom_cni::config::{NetworkConfig, RawConfig};
use flowloom_cni::error::code;

fn page() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cni.md")).unwrap()
}

#[test]
fn every_error_code_is_on_the_page() {
    let listed: Vec<u32> =
        page().lines().filter_map(|l| l.strip_prefix("| ")?.split(' ').next()?.parse().ok()).collect();
    let known = [
        code::INCOMPATIBLE_VERSION,
        code::UNSUPPORTED_FIELD,
        code::UNKNOWN_CONTAINER,
        code::INVALID_ENVIRONMENT,
        code::IO,
        code::DECODE,
        code::INVALID_CONFIG,
        code::TRY_LATER,
        code::NOT_AVAILABLE,
        code::NOT_AVAILABLE_LIMITED,
        code::REFUSED,
        code::CONFLICT,
        code::CHECK_FAILED,
        code::NO_ADDRESS,
    ];
    assert_eq!(listed, known);
}

#[test]
fn the_configuration_on_the_page_is_accepted() {
    let page = page();
    let json = page.split("```json").nth(1).unwrap().split("```").next().unwrap();
    let mut list: serde_json::Value = serde_json::from_str(json).unwrap();
    let mut plugin = list["plugins"][0].take();
    plugin["cniVersion"] = list["cniVersion"].take();
    plugin["name"] = list["name"].take();
    let config = NetworkConfig::check(&RawConfig::decode(plugin.to_string().as_bytes()).unwrap()).unwrap();
    assert_eq!(config.security_groups, ["frontend"]);
}
