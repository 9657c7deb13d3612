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

    /// From the beginning of a move that takes so long a death comes within this time; nothing: near its end, where most steps are, every other
    /// time. The first one comes while little is copied.
    pub fn within_ms(death: u64, move_ms: u64) -> Option<u64> {
        match death {
            0 => Some(move_ms / 10),
            _ => death.is_multiple_of(2).then_some(move_ms),
        }
    }

    /// What the chance of one death begins with. Mixed as splitmix64 does, since a linear generator that begins with the next number goes on
    /// in step: all deaths would be at nearly the same moments.
    pub fn of(&self, death: u64) -> u64 {
        let mut mixed = self.seed.wrapping_mul(1_000_003).wrapping_add(death);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deaths_of_one_seed_are_not_in_step() {
        let seed = 345_173;
        let deaths = Deaths { seed, count: 100 };
        // As a linear generator makes a moment of it.
        let moment = |death| deaths.of(death).wrapping_mul(6_364_136_223_846_793_005) >> 60;
        let mut moments = [0; 16];
        (0..deaths.count).for_each(|death| moments[moment(death) as usize] += 1);
        assert!(
            moments.iter().all(|deaths| (1..20).contains(deaths)),
            "{moments:?}"
        );
    }
}
