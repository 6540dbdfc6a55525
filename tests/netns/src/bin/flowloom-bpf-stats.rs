//! `cargo xtask bpf --stats`: what each program costs, and whether it keeps its budget.

use flowloom_tests_netns::stats;

fn main() -> anyhow::Result<()> {
    let costs = stats::measure()?;
    print!("{}", stats::table(&costs));
    stats::check(&costs)
}
