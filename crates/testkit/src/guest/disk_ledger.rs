//! What the disk of a guest must hold that boots from it and writes it ([`super::boot_disk`]), whatever died meanwhile.
//!
//! A guest writes one round after the other, and begins the next one once the last was answered. So whatever a disk has of a
//! life's rounds must be all up to some round, and that is at least the last one of which its memory said that it was answered.
//! Owns these numbers, and what each place had when the disk was last looked at. Refuses nothing: what is not as it should be is
//! told.

use super::asm::AsmError;
use super::boot_disk::{LAST_LIFE, LIFE, REST, Spread, content};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

const SECTOR: usize = 512;
/// So many things that are wrong are told.
const TOLD: usize = 5;

/// What a disk holds.
#[derive(Debug, Clone)]
pub struct Ledger {
    spread: Spread,
    bytes: u64,
    /// The part of the guest's program that is in [`REST`].
    rest: Option<Vec<u8>>,
    /// By place, as it was found last; none is what was there at first.
    rounds: Vec<Option<u32>>,
    /// By life: the last round that was answered, since the disk was looked at.
    answered: BTreeMap<u32, u32>,
    /// The last round of which anything is known.
    last: u32,
}

impl Ledger {
    /// Of a disk of so many bytes that holds what [`Ledger::image`] is.
    pub fn new(bytes: u64, spread: Spread) -> Result<Self, AsmError> {
        Ok(Self {
            rest: spread.rest()?,
            rounds: vec![None; spread.places as usize],
            answered: BTreeMap::new(),
            last: 0,
            spread,
            bytes,
        })
    }

    /// The last round that was answered, as far as is known: grows from life to life.
    pub fn last(&self) -> u32 {
        self.last
    }

    /// What the disk holds at first.
    pub fn image(&self) -> Result<Vec<u8>, AsmError> {
        let sectors = (self.bytes / SECTOR as u64) as usize;
        let rest = (1..sectors).flat_map(|number| self.at_first(number));
        Ok(self.spread.sector()?.into_iter().chain(rest).collect())
    }

    /// The guest's memory says that every round of its life up to this one was answered.
    pub fn note(&mut self, round: u32) {
        let answered = self.answered.entry(round / LIFE).or_default();
        *answered = round.max(*answered);
        self.last = round.max(self.last);
    }

    /// What is wrong with an image; nothing where it has all that it must have. It counts as found from then on. At most `beyond` rounds
    /// may be there that nobody knows of; one always may.
    pub fn check(&mut self, image: &File, beyond: u32) -> io::Result<Vec<String>> {
        let bytes = image.metadata()?.len();
        if bytes != self.bytes {
            let wanted = self.bytes;
            return Ok(vec![format!("it has {bytes} bytes, and not {wanted}")]);
        }
        let mut found = vec![0; self.bytes as usize];
        image.read_exact_at(&mut found, 0)?;
        let mut sectors = found.chunks(SECTOR);
        let life = sectors.next().map_or(0, |boot| word(boot, LAST_LIFE)) / LIFE;
        let held: Vec<u32> = (0..self.spread.places)
            .map(|place| word(&found, self.spread.offset(place) as usize))
            .collect();
        self.replay(life, &held);
        let mut wrong = Vec::new();
        let known = self.last / LIFE;
        if life < known {
            wrong.push(format!("the last life is {life}, and {known} has begun"));
        }
        for (number, sector) in (1..).zip(sectors) {
            if sector != self.expected(number) {
                wrong.push(self.told(number, sector));
            }
        }
        let newest = self.rounds.iter().flatten().max().copied().unwrap_or(0);
        if newest > self.last.saturating_add(beyond) && newest / LIFE == self.last / LIFE {
            let last = self.last;
            wrong.push(format!("round {newest} is there, and {last} was the last"));
        }
        self.last = self.last.max(newest);
        self.answered.clear();
        let more = wrong.len().saturating_sub(TOLD);
        wrong.truncate(TOLD);
        if more > 0 {
            wrong.push(format!("and {more} more"));
        }
        Ok(wrong)
    }

    /// Carries out all rounds that were answered or are there, life after life. Of an earlier life it may be that later rounds
    /// were answered than are known: those would be there, or in places that a later life has written.
    fn replay(&mut self, life: u32, held: &[u32]) {
        for (place, round) in (0..).zip(held) {
            let is_one = (1..=life).contains(&(round / LIFE)) && self.spread.place(*round) == place;
            if is_one && self.rounds.iter().flatten().all(|known| known < round) {
                let last = self.answered.entry(round / LIFE).or_default();
                *last = (*last).max(*round);
            }
        }
        let before = self.rounds.iter().flatten().max().copied().unwrap_or(0);
        for (life, last) in self.answered.clone() {
            let first = (life * LIFE + 1).max(before + 1);
            for round in first..=last {
                let place = self.spread.place(round) as usize;
                self.rounds[place] = Some(round);
            }
        }
    }

    fn expected(&self, sector: usize) -> Vec<u8> {
        let apart = self.spread.apart as usize;
        let is_place = (sector - 1).is_multiple_of(apart);
        let round = self.rounds.get((sector - 1) / apart).filter(|_| is_place);
        match round.copied().flatten() {
            Some(round) => content(round),
            None => self.at_first(sector),
        }
    }

    fn at_first(&self, number: usize) -> Vec<u8> {
        let rest = self.rest.as_ref().filter(|_| number == REST);
        rest.cloned().unwrap_or_else(|| unwritten(number).to_vec())
    }

    fn told(&self, number: usize, sector: &[u8]) -> String {
        let (first, last) = (word(sector, 0), word(sector, SECTOR - 4));
        let wanted = word(&self.expected(number), 0);
        format!("sector {number} begins with {first}, ends with {last}, and should have {wanted}")
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(<[u8]>::first_chunk);
    word.map_or(0, |word| u32::from_le_bytes(*word))
}

/// What a sector holds that nobody has written: no number of a round.
fn unwritten(number: usize) -> [u8; SECTOR] {
    let word = (number as u32).wrapping_mul(0x9e37_79b1) | 1 << 31;
    let mut sector = [0; SECTOR];
    for part in sector.chunks_exact_mut(4) {
        part.copy_from_slice(&word.to_le_bytes());
    }
    sector
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPREAD: Spread = Spread {
        places: 16,
        apart: 4,
        has_lives: true,
        counts_until_mib: Some(28),
    };

    fn made() -> (Ledger, File) {
        let ledger = Ledger::new(64 * SECTOR as u64, SPREAD).unwrap();
        let image = tempfile::tempfile().unwrap();
        image.write_all_at(&ledger.image().unwrap(), 0).unwrap();
        (ledger, image)
    }

    fn write(image: &File, round: u32) {
        let at = SPREAD.offset(SPREAD.place(round));
        image.write_all_at(&content(round), at).unwrap();
    }

    /// Rounds of a life from 1 on.
    fn live(image: &File, life: u32, rounds: u32) -> u32 {
        let life = life * LIFE;
        image.write_all_at(&life.to_le_bytes(), 0x1f8).unwrap();
        (1..=rounds).for_each(|round| write(image, life + round));
        life + rounds
    }

    fn wrong(ledger: &Ledger, image: &File) -> usize {
        ledger.clone().check(image, 1).unwrap().len()
    }

    #[test]
    fn an_image_with_every_answered_round_is_right_whether_the_next_is_there_or_not() {
        let (mut ledger, image) = made();
        assert_eq!(wrong(&ledger, &image), 0);
        ledger.note(live(&image, 1, 40));
        assert_eq!(wrong(&ledger, &image), 0);
        write(&image, LIFE + 41);
        assert!(ledger.check(&image, 1).unwrap().is_empty());
        assert_eq!(ledger.last(), LIFE + 41);
        write(&image, LIFE + 42);
        write(&image, LIFE + 43);
        assert_eq!(wrong(&ledger, &image), 1, "nobody was to write that much");
        assert!(ledger.check(&image, u32::MAX).unwrap().is_empty());
        // A second life and a third one, of which the second's end is not known.
        live(&image, 2, 9);
        ledger.note(2 * LIFE + 5);
        ledger.note(live(&image, 3, 3));
        assert!(ledger.check(&image, 1).unwrap().is_empty());
    }

    #[test]
    fn a_round_that_is_lost_torn_or_from_nowhere_is_found() {
        let (mut ledger, image) = made();
        ledger.note(live(&image, 1, 40));
        let others: [fn(&File); 5] = [
            |image| write(image, LIFE + 39 - 16),
            |image| image.write_all_at(&[9; 8], SPREAD.offset(3) + 8).unwrap(),
            |image| image.write_all_at(&[0; 512], 2 * 512).unwrap(),
            |image| write(image, LIFE + 43),
            |image| image.write_all_at(&[0; 4], 0x1f8).unwrap(),
        ];
        for other in others {
            let mut kept = vec![0; 64 * SECTOR];
            image.read_exact_at(&mut kept, 0).unwrap();
            other(&image);
            assert_ne!(wrong(&ledger, &image), 0);
            image.write_all_at(&kept, 0).unwrap();
        }
        assert_eq!(wrong(&ledger, &image), 0);
    }

    #[test]
    fn a_round_of_an_earlier_life_that_is_lost_is_found() {
        let (mut ledger, image) = made();
        ledger.note(live(&image, 1, 40));
        ledger.note(live(&image, 2, 3));
        assert_eq!(wrong(&ledger, &image), 0);
        write(&image, LIFE + 40 - 16);
        assert_ne!(wrong(&ledger, &image), 0);
    }
}
