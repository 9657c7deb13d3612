//! Which block a load takes that works with some parts of a disk much more often than with others.
//!
//! As the writes of the mail server are spread in "The Design and Evolution of Live Storage Migration in VMware ESX" (figure 2 and
//! section 2.3.4): sorted by how often they are taken, parts of the disk follow a zipf distribution, and more of what is taken often lies
//! towards the end of the disk. Pure. Refuses nothing.

use super::run::Random;

/// Neighbouring blocks that are taken equally often.
const PART: u64 = 64;

/// One of so many blocks, by random numbers of 64 bits.
pub(super) fn block(blocks: u64, mut random: impl FnMut() -> u64) -> u64 {
    let parts = blocks.div_ceil(PART).max(1);
    // Of a zipf distribution with exponent 1 the logarithm of the rank is spread evenly.
    let rank = (parts as f64).powf(unit(random())) as u64;
    // Where the part of this rank lies: at the square root of an even spread, so that there are more towards the end.
    let place = (unit(Random::new(rank).next()).sqrt() * parts as f64) as u64;
    let within = random() % PART;
    (place.min(parts - 1) * PART + within).min(blocks.saturating_sub(1))
}

/// From 0 to below 1.
fn unit(random: u64) -> f64 {
    (random >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn few_parts_are_taken_often_and_more_of_them_lie_towards_the_end() {
        let (blocks, asked) = (64_000, 200_000);
        let mut random = Random::new(1);
        let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
        for _ in 0..asked {
            let block = block(blocks, || random.next());
            assert!(block < blocks);
            *counts.entry(block / PART).or_default() += 1;
        }
        let mut often: Vec<(u64, u64)> =
            counts.iter().map(|(part, count)| (*count, *part)).collect();
        often.sort_unstable_by(|one, other| other.cmp(one));
        let first: u64 = often
            .iter()
            .take(often.len() / 10)
            .map(|(count, _)| count)
            .sum();
        assert!(
            first > asked * 6 / 10,
            "a tenth of the parts gets {first} of {asked}"
        );
        let at_the_end = often
            .iter()
            .take(100)
            .filter(|(_, part)| *part >= 500)
            .count();
        assert!(
            at_the_end > 60,
            "{at_the_end} of the first 100 lie in the second half"
        );
    }

    #[test]
    fn a_disk_of_a_few_blocks_is_taken_as_a_whole() {
        let mut random = Random::new(7);
        for blocks in [1, 2, 63, 64, 65] {
            for _ in 0..1000 {
                assert!(block(blocks, || random.next()) < blocks);
            }
        }
    }
}
