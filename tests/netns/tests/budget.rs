//! No program comes near what the verifier takes.

use flowloom_tests_netns::stats;

#[test]
fn every_program_keeps_within_half_of_the_verifiers_limit() {
    let costs = stats::measure().expect("measure");
    println!("{}", stats::table(&costs));
    stats::check(&costs).expect("budget");
    let main = costs.iter().find(|c| c.name == "from_endpoint").expect("from_endpoint");
    assert!(
        main.instructions > 1000 && main.verified > 1000 && main.states > 100 && main.stack > 64,
        "not measured: {main:?}"
    );
}
