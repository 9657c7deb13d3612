//! What a guest knows of its requests, and so what may be on its disk.
//!
//! Each write is known by its number, which is also what it writes; zeroes and discards write 0. A sector has what the last change put there
//! that was acknowledged, or one that was under way together with that, or one that failed or was never answered since. After a power
//! cut it may have what was there when the last acknowledged flush was asked for, and everything since.
//!
//! Owned by the [`World`](super::World). Refuses nothing.

use std::collections::BTreeMap;
use std::ops::Range;

/// A change that may be what is on a sector.
#[derive(Debug, Clone, Copy)]
struct MayBe {
    id: u64,
    value: u64,
    since: u64,
    /// When it was answered, or nobody was there any more to answer it.
    ended: Option<u64>,
    done: bool,
    durable: bool,
    /// Whether it had ended when something else was read: it is not read any more but after a power cut.
    gone: bool,
}

#[derive(Debug, Clone)]
struct Open {
    sectors: Vec<u64>,
    durable: bool,
}

#[derive(Debug, Clone, Default)]
pub struct Guest {
    now: u64,
    sectors: BTreeMap<u64, Vec<MayBe>>,
    open: BTreeMap<u64, Open>,
    flushes: BTreeMap<u64, u64>,
}

impl Guest {
    /// A sector that nobody has written yet.
    pub fn finds(&mut self, sector: u64, value: u64) {
        let first = MayBe {
            id: 0,
            value,
            since: 0,
            ended: Some(0),
            done: true,
            durable: true,
            gone: false,
        };
        self.sectors.insert(sector, vec![first]);
    }

    pub fn waits(&self) -> usize {
        self.open.len() + self.flushes.len()
    }

    /// It asks for a change of these; of those that it does not know it does not care.
    pub fn changes(&mut self, id: u64, value: u64, range: Range<u64>, durable: bool) {
        self.now += 1;
        let may_be = MayBe {
            id,
            value,
            since: self.now,
            ended: None,
            done: false,
            durable: false,
            gone: false,
        };
        let known = range.filter(|sector| self.sectors.contains_key(sector));
        let sectors: Vec<u64> = known.collect();
        for sector in &sectors {
            self.sectors.get_mut(sector).unwrap().push(may_be);
        }
        self.open.insert(id, Open { sectors, durable });
    }

    pub fn flushes(&mut self, id: u64) {
        self.now += 1;
        self.flushes.insert(id, self.now);
    }

    pub fn is_told(&mut self, id: u64, done: bool) -> Result<(), String> {
        self.now += 1;
        if let Some(asked) = self.flushes.remove(&id) {
            for all in self.sectors.values_mut().filter(|_| done) {
                for one in all.iter_mut() {
                    one.durable |= one.done && one.ended.is_some_and(|ended| ended <= asked);
                }
                tidy(all);
            }
            return Ok(());
        }
        let Some(open) = self.open.remove(&id) else {
            return Err(format!("request {id} is answered twice"));
        };
        for sector in open.sectors {
            let all = self.sectors.get_mut(&sector).unwrap();
            for one in all.iter_mut().filter(|one| one.id == id) {
                (one.ended, one.done) = (Some(self.now), done);
                one.durable = done && open.durable;
            }
            tidy(all);
        }
        Ok(())
    }

    /// Nobody answers any more what is open.
    pub fn is_told_nothing(&mut self) -> u64 {
        self.now += 1;
        let count = self.waits() as u64;
        for all in self.sectors.values_mut() {
            for one in all.iter_mut().filter(|one| one.ended.is_none()) {
                one.ended = Some(self.now);
            }
        }
        self.open.clear();
        self.flushes.clear();
        count
    }

    /// Whether each sector has what may be there; after a power cut, or without.
    pub fn check(&mut self, after_cut: bool, read: impl Fn(u64) -> u64) -> Result<(), String> {
        for (sector, all) in &mut self.sectors {
            let value = read(*sector);
            let counts = |one: &&MayBe| one.done && (one.durable || !after_cut);
            let since = all
                .iter()
                .filter(counts)
                .map(|one| one.since)
                .max()
                .unwrap();
            let is_later = |one: &&MayBe| one.ended.is_none_or(|ended| ended >= since);
            let mut may_be = all
                .iter()
                .filter(is_later)
                .filter(|one| after_cut || !one.gone);
            if !may_be.any(|one| one.value == value) {
                return Err(format!(
                    "after a cut: {after_cut}: sector {sector} has {value}, and may have {all:?}"
                ));
            }
            for one in all.iter_mut().filter(|one| one.ended.is_some()) {
                one.gone |= one.value != value;
            }
        }
        Ok(())
    }

    /// After a power cut everything is as it is read, and durable.
    pub fn begins_anew(&mut self, read: impl Fn(u64) -> u64) {
        let sectors: Vec<u64> = self.sectors.keys().copied().collect();
        for sector in sectors {
            self.finds(sector, read(sector));
        }
    }
}

/// Forgets what cannot be there any more, whatever happens.
fn tidy(all: &mut Vec<MayBe>) {
    let durable = all.iter().filter(|one| one.durable);
    let since = durable.map(|one| one.since).max().unwrap_or(0);
    all.retain(|one| one.ended.is_none_or(|ended| ended >= since));
}
