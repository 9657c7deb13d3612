//! Waits of a disk that is moved by dirty block tracking, and what is told of its iterations.
//!
//! Owns nothing. Pauses are those of `vmproc`. Refuses what [`LastBlocks`] refuses.

use anyhow::{Error, Result};
use godwit_blockio::{Closed, LastBlocks};
use serde_json::json;
use std::time::{Duration, Instant};

use crate::moving::Mirror;
use crate::say;

const LOOK_EVERY: Duration = Duration::from_millis(20);
const CLOSED_LOOK_EVERY: Duration = Duration::from_millis(1);

impl Mirror<'_> {
    /// Waits until so few blocks are marked that the guest may be held for them. `told`: so many iterations were told of.
    pub fn wait_until_few_are_left(&self, told: &mut usize) -> Result<()> {
        let mut last = LastBlocks::of(&self.second);
        loop {
            let are_few = last.are_few(Instant::now());
            self.tell_iterations(told);
            if are_few.map_err(Error::msg)? {
                return Ok(());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Holds the guest's requests until nothing is left to be copied.
    pub fn wait_until_closed(&self, told: &mut usize) -> Result<()> {
        loop {
            self.wait_until_few_are_left(told)?;
            self.second.sync()?;
            let mut last = LastBlocks::of(&self.second);
            if !last.close(Instant::now()).map_err(Error::msg)? {
                continue;
            }
            say(&json!({"event": "switching"}));
            let closed = loop {
                match last.look_closed(Instant::now()).map_err(Error::msg)? {
                    Closed::NotYet => std::thread::sleep(CLOSED_LOOK_EVERY),
                    closed => break closed,
                }
            };
            if closed == Closed::Equal {
                return Ok(());
            }
        }
    }

    /// Tells of those that have ended since.
    pub fn tell_iterations(&self, told: &mut usize) {
        let iterations = self.second.course().iterations();
        for ended in iterations.iter().skip(*told) {
            say(&json!({
                "event": "iteration", "number": ended.number, "copied_bytes": ended.copied, "seconds": ended.seconds,
                "dirty_bytes": ended.dirty, "hot_bytes": ended.hot, "deferred_bytes": ended.deferred,
            }));
        }
        *told = iterations.len();
    }
}
