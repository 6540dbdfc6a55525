//! One Service comes on top of the others and goes again.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::connect::{until_all_answer, until_silent};
use super::objects;
use super::side::{PATIENCE, Side};

/// Milliseconds.
#[derive(Default)]
pub(super) struct Times {
    pub(super) comes: Vec<f64>,
    pub(super) goes: Vec<f64>,
}

/// From the API server's word until a connection says so.
pub(super) fn one(side: &Side, times: &mut Times) -> Result<()> {
    let at = side.services;
    let vip = objects::vip(at);
    quiet(side);
    times.comes.push(side.inside(|| {
        // Gone for certain: an answer of the last round's would end the wait at once.
        until_silent(vip, PATIENCE)?;
        let begin = Instant::now();
        objects::add(&side.server, at);
        until_all_answer(&[vip], PATIENCE)?;
        Ok(millis(begin.elapsed()))
    })?);
    quiet(side);
    times.goes.push(side.inside(|| {
        let begin = Instant::now();
        objects::remove(&side.server, at);
        Ok(millis(until_silent(vip, PATIENCE)?.saturating_duration_since(begin)))
    })?);
    Ok(())
}

fn millis(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

#[expect(clippy::disallowed_methods, reason = "what is measured begins after a time without changes")]
fn quiet(side: &Side) {
    std::thread::sleep(side.quiet);
}
