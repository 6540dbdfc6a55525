//! World to plan.

use flowloom_model::{NodeName, World};

use crate::{Condition, NodePlan, Numbers};

/// What came out of a world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compilation {
    /// What the node must hold.
    pub plan: NodePlan,
    /// What is not in force, and why.
    pub conditions: Vec<Condition>,
}

/// Choices that the node's configuration makes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompileOptions {
    /// Reach other nodes' endpoints of the default VPC by the underlay's routes instead of the tunnel.
    pub direct_routes: bool,
}

/// What compilations remember of each other. Dropping it costs time only.
#[derive(Debug, Default)]
pub struct CompilerCache {}

/// Compiles with default options and nothing remembered.
#[must_use]
pub fn compile(world: &World, local: &NodeName, numbers: &mut Numbers) -> Compilation {
    compile_with(world, local, CompileOptions::default(), numbers, &mut CompilerCache::default())
}

/// Compiles a world for one node. Never fails: objects that cannot be in force get a condition and are left out.
#[must_use]
pub fn compile_with(
    world: &World,
    local: &NodeName,
    options: CompileOptions,
    numbers: &mut Numbers,
    cache: &mut CompilerCache,
) -> Compilation {
    let _ = (world, local, options, numbers, cache);
    Compilation::default()
}
