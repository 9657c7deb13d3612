//! What a guest knows of its requests, and so what may be on its disk.
//!
//! Each write is known by its number, which is also what it writes; zeroes and discards write 0. A sector has what the last write put
//! there that was acknowledged, or one that was under way together with that, or one that failed or was never answered since. What it
//! has once was read, nothing older is read there any more. After a power cut it may have what was there when the last acknowledged flush
//! was asked for, or anything later. Owned by the [`World`](super::World). Refuses answers that come twice, early, or with another outcome
//! than the source had.

use super::{Kind, WriteId, overlap};
use std::collections::BTreeMap;
use std::ops::Range;

/// A change that is not answered.
#[derive(Debug, Clone)]
pub struct Open {
    pub kind: Kind,
    pub range: Range<u64>,
    pub durable: bool,
    since: u64,
    begun: bool,
    mirrored: bool,
    /// How it has ended at the source,
    source: Option<bool>,
    /// and whether it has at the destination.
    destination: bool,
}

impl Open {
    /// What it puts on the disk.
    pub fn value(&self, id: WriteId) -> u64 {
        match self.kind {
            Kind::Write => id,
            _ => 0,
        }
    }
}

/// A write that may be on a sector, and when it was answered, or nobody was there any more to answer it.
#[derive(Debug, Clone, Copy)]
struct MayBe {
    write: WriteId,
    value: u64,
    since: u64,
    ended: Option<u64>,
    done: bool,
}

impl MayBe {
    /// Whether it had not ended before this.
    fn is_after(&self, since: u64) -> bool {
        self.ended.is_none_or(|ended| ended > since)
    }
}

/// What may be on a disk, by sector.
#[derive(Debug, Clone)]
struct Known(Vec<Vec<MayBe>>);

impl Known {
    fn of(disk: &[u64]) -> Self {
        let first = disk.iter().map(|&value| {
            vec![MayBe {
                write: value,
                value,
                since: 0,
                ended: Some(0),
                done: true,
            }]
        });
        Self(first.collect())
    }

    fn begins(&mut self, may_be: MayBe, range: &Range<u64>) {
        for sector in range.clone() {
            self.0[sector as usize].push(may_be);
        }
    }

    /// A write has ended; what it replaces is gone.
    fn ends(&mut self, (id, since, replaces): (WriteId, u64, bool), now: u64, range: &Range<u64>) {
        for sector in range.clone() {
            let all = &mut self.0[sector as usize];
            if replaces {
                all.retain(|older| older.is_after(since));
            }
            // It may have been found to be gone already.
            for this in all.iter_mut().filter(|may_be| may_be.write == id) {
                (this.ended, this.done) = (Some(now), replaces || this.done);
            }
        }
    }

    fn check(&self, found: &[u64], first: u64, what: &str) -> Result<(), String> {
        for (sector, found) in (first..).zip(found) {
            let all = &self.0[sector as usize];
            if !all.iter().any(|may_be| may_be.value == *found) {
                return Err(format!(
                    "{what}: sector {sector} has {found}, and may have {all:?}"
                ));
            }
        }
        Ok(())
    }
}

pub struct Guest {
    open: BTreeMap<WriteId, Open>,
    /// Flushes that are not answered, and when they were asked for.
    flushes: BTreeMap<WriteId, u64>,
    reads: u64,
    last: WriteId,
    now: u64,
    /// By what was answered,
    answered: Known,
    /// by what was read, too,
    seen: Known,
    /// and after a power cut.
    survives: Known,
}

impl Guest {
    /// Of a disk that holds this, below the numbers of all writes.
    pub fn of(disk: &[u64]) -> Self {
        Self {
            open: BTreeMap::new(),
            flushes: BTreeMap::new(),
            reads: 0,
            last: 1000,
            now: 0,
            answered: Known::of(disk),
            seen: Known::of(disk),
            survives: Known::of(disk),
        }
    }

    /// It grows with all that it asks for and is told of.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// How many requests are not answered.
    pub fn waits(&self) -> usize {
        self.open.len() + self.flushes.len() + self.reads as usize
    }

    pub fn changes(&mut self, kind: Kind, range: Range<u64>, durable: bool) -> WriteId {
        self.last += 1;
        self.now += 1;
        let open = Open {
            kind,
            range,
            durable,
            since: self.now,
            begun: false,
            mirrored: false,
            source: None,
            destination: false,
        };
        self.open.insert(self.last, open);
        self.last
    }

    pub fn reads(&mut self) {
        self.reads += 1;
    }

    pub fn flushes(&mut self) -> WriteId {
        self.last += 1;
        self.now += 1;
        self.flushes.insert(self.last, self.now);
        self.last
    }

    /// A number for a flush that is not the guest's.
    pub fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// It goes to the source, and to the destination if it is mirrored.
    pub fn begins(&mut self, id: WriteId, mirrored: bool) -> Open {
        let open = self.open.get_mut(&id).unwrap();
        assert!(!open.begun, "write {id} begins twice");
        (open.begun, open.mirrored) = (true, mirrored);
        let may_be = MayBe {
            write: id,
            value: open.value(id),
            since: open.since,
            ended: None,
            done: false,
        };
        for known in [&mut self.answered, &mut self.seen, &mut self.survives] {
            known.begins(may_be, &open.range);
        }
        open.clone()
    }

    pub fn is_mirrored(&self, id: WriteId) -> bool {
        self.open.get(&id).is_some_and(|open| open.mirrored)
    }

    /// Whether it is to be durable when it is answered; once for each.
    pub fn is_durable(&self, id: WriteId) -> bool {
        self.open.get(&id).is_some_and(|open| open.durable)
    }

    pub fn has_ended_at_source(&mut self, id: WriteId, done: bool) {
        if let Some(open) = self.open.get_mut(&id) {
            open.source = Some(done);
        }
    }

    pub fn has_ended_at_destination(&mut self, id: WriteId) {
        if let Some(open) = self.open.get_mut(&id) {
            open.destination = true;
        }
    }

    /// It is answered; the mirror may have ended.
    pub fn is_told(&mut self, id: WriteId, done: bool, has_ended: bool) -> Result<(), String> {
        let Some(open) = self.open.remove(&id) else {
            return Err(format!("write {id} is answered twice"));
        };
        if open.source != Some(done) {
            let was = open.source;
            return Err(format!(
                "write {id} is told {done}, at the source it is {was:?}"
            ));
        }
        if open.mirrored && !open.destination && !has_ended {
            return Err(format!(
                "write {id} is answered before the destination has it"
            ));
        }
        self.now += 1;
        let (now, since, range) = (self.now, open.since, &open.range);
        self.answered.ends((id, since, done), now, range);
        self.seen.ends((id, since, done), now, range);
        self.survives
            .ends((id, since, done && open.durable), now, range);
        for sector in range.clone().filter(|_| done) {
            let all = self.survives.0[sector as usize].iter_mut();
            all.filter(|this| this.write == id)
                .for_each(|this| this.done = true);
        }
        Ok(())
    }

    /// A flush is answered: of what was answered before it was asked for nothing is lost any more.
    pub fn is_flushed(&mut self, id: WriteId, done: bool) -> Result<(), String> {
        let Some(asked) = self.flushes.remove(&id) else {
            return Err(format!("flush {id} is answered twice"));
        };
        for all in self.survives.0.iter_mut().filter(|_| done) {
            let had = all.iter().filter(|one| one.done && !one.is_after(asked));
            let since = had.map(|one| one.since).max().unwrap_or(0);
            all.retain(|older| older.is_after(since) || older.since == since);
        }
        Ok(())
    }

    /// A read of these bytes is answered; with nothing where it failed.
    pub fn has_read(&mut self, range: &Range<u64>, found: Option<&[u64]>) -> Result<(), String> {
        self.reads -= 1;
        let Some(found) = found else {
            return Ok(());
        };
        self.now += 1;
        self.seen.check(found, range.start, "read")?;
        for (sector, found) in range.clone().zip(found) {
            let all = &mut self.seen.0[sector as usize];
            // Zeroes may be of several writes.
            let these = all.iter().filter(|may_be| may_be.value == *found);
            let since = these.map(|may_be| may_be.since).min().unwrap_or(0);
            all.retain(|older| older.value == *found || older.is_after(since));
        }
        Ok(())
    }

    /// Nobody answers any more. Returns how many requests waited.
    pub fn is_told_nothing(&mut self) -> u64 {
        let count = self.waits() as u64;
        self.open.clear();
        self.flushes.clear();
        self.reads = 0;
        count
    }

    /// It begins anew, with what is on this disk and durable.
    pub fn finds(&mut self, disk: &[u64]) {
        let known = Known::of(disk);
        (self.answered, self.seen, self.survives) = (known.clone(), known.clone(), known);
    }

    /// Whether the disk has what may be read.
    pub fn check(&self, disk: &[u64]) -> Result<(), String> {
        self.seen.check(disk, 0, "source")
    }

    /// Whether a disk has all that was answered.
    pub fn check_answered(&self, disk: &[u64]) -> Result<(), String> {
        self.answered
            .check(disk, 0, "destination that is left alone")
    }

    /// Whether a disk that has lost its power has all that is to survive.
    pub fn check_survives(&self, disk: &[u64], what: &str) -> Result<(), String> {
        self.survives.check(disk, 0, what)
    }

    /// Once the mirror has ended a write waits for older ones that it overlaps and for nothing else.
    pub fn is_held_by_writes_alone(&self) -> Result<(), String> {
        let mut held = self.open.iter().filter(|(_, open)| !open.begun);
        let by_nothing = held.find(|(id, open)| {
            let mut older = self.open.range(..*id);
            !older.any(|(_, older)| overlap(&older.range, &open.range))
        });
        match by_nothing {
            Some((id, _)) => Err(format!("write {id} is held by a mirror that has ended")),
            None => Ok(()),
        }
    }
}
