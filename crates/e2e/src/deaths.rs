//! Deaths at random moments: how many, which moments, and power that fails in several volumes.
//!
//! `GODWIT_DEATHS` says another number than what `make test` has time for. `GODWIT_SEED` says which moments: what dies, when, and
//! what storage keeps of the unsynced comes from it, while how processes take their turns is different each time. Owns nothing.

use anyhow::{Context as _, Result};
use godwit_testkit::testvol::{Survives, Volume};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest time between the ends of two volumes of a host that loses its power.
const PAUSE_MS: u64 = 40;

/// What the environment asks for.
#[derive(Debug, Clone, Copy)]
pub struct Deaths {
    pub seed: u64,
    pub count: u64,
}

impl Deaths {
    /// So many, unless the environment says otherwise. Tells the seed.
    pub fn planned(count: u64) -> Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let seed = number("GODWIT_SEED", u64::from(now.subsec_micros()))?;
        println!("  GODWIT_SEED={seed}");
        let count = number("GODWIT_DEATHS", count)?;
        Ok(Self { seed, count })
    }

    /// What the chance of one death begins with.
    pub fn of(&self, death: u64) -> u64 {
        self.seed.wrapping_mul(1_000_003).wrapping_add(death)
    }
}

fn number(name: &str, default: u64) -> Result<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}={text}")),
        Err(_) => Ok(default),
    }
}

/// Takes the power of volumes, at one moment or of one after the other. `below` gives a number below another by chance.
pub fn power_off(volumes: &mut [&Volume], mut below: impl FnMut(u64) -> u64) {
    volumes.rotate_left(below(volumes.len() as u64) as usize);
    let pause_ms = [0, 0, PAUSE_MS][below(3) as usize];
    for volume in volumes {
        volume.power_off(match below(3) {
            0 => Survives::Nothing,
            _ => Survives::Some(below(1 << 32)),
        });
        std::thread::sleep(Duration::from_millis(below(pause_ms + 1)));
    }
}
