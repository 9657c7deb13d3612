//! What a guest knows of its writes, and so what may be on its disk.
//!
//! Each write is known by its number, which is also what it writes. A sector has what the last write put there that was
//! acknowledged, or one that was under way together with that, or one that failed or was never answered since. Owned by the
//! [`World`](super::World). Refuses answers that come twice, early, or with another outcome than the source had.

use super::{WriteId, overlap};
use std::collections::BTreeMap;
use std::ops::Range;

/// A write that is not answered.
#[derive(Debug, Clone)]
struct Open {
    range: Range<u64>,
    since: u64,
    begun: bool,
    mirrored: bool,
    /// How it has ended at the source,
    source: Option<bool>,
    /// and whether it has at the destination.
    destination: bool,
}

/// A write that may be on a sector, and when it was answered, or nobody was there any more to answer it.
#[derive(Debug, Clone, Copy)]
struct MayBe {
    write: WriteId,
    ended: Option<u64>,
}

pub struct Guest {
    open: BTreeMap<WriteId, Open>,
    last: WriteId,
    now: u64,
    /// By sector of the disk: what its last acknowledged write put there, or one that failed or was never answered.
    may_be: Vec<Vec<MayBe>>,
}

impl Guest {
    /// Of a disk that holds this, below the numbers of all writes.
    pub fn of(disk: &[u64]) -> Self {
        let ended = Some(0);
        let first = disk.iter().map(|&write| vec![MayBe { write, ended }]);
        Self {
            open: BTreeMap::new(),
            last: 1000,
            now: 0,
            may_be: first.collect(),
        }
    }

    /// How many writes are not answered.
    pub fn waits(&self) -> usize {
        self.open.len()
    }

    pub fn writes(&mut self, range: Range<u64>) -> WriteId {
        self.last += 1;
        self.now += 1;
        let open = Open {
            range,
            since: self.now,
            begun: false,
            mirrored: false,
            source: None,
            destination: false,
        };
        self.open.insert(self.last, open);
        self.last
    }

    /// It goes to the source, and to the destination if it is mirrored.
    pub fn begins(&mut self, id: WriteId, mirrored: bool) -> Range<u64> {
        let open = self.open.get_mut(&id).unwrap();
        assert!(!open.begun, "write {id} begins twice");
        (open.begun, open.mirrored) = (true, mirrored);
        let range = open.range.clone();
        for sector in range.clone() {
            let may_be = MayBe {
                write: id,
                ended: None,
            };
            self.may_be[sector as usize].push(may_be);
        }
        range
    }

    pub fn is_mirrored(&self, id: WriteId) -> bool {
        self.open.get(&id).is_some_and(|open| open.mirrored)
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
        for sector in open.range {
            let may_be = &mut self.may_be[sector as usize];
            if done {
                may_be.retain(|older| older.ended.is_none_or(|ended| ended > open.since));
            }
            let this = may_be.iter_mut().find(|may_be| may_be.write == id);
            this.unwrap().ended = Some(self.now);
        }
        Ok(())
    }

    /// A power cut. Returns how many writes nobody answers any more.
    pub fn is_told_nothing(&mut self) -> u64 {
        self.now += 1;
        for may_be in self.may_be.iter_mut().flatten() {
            may_be.ended.get_or_insert(self.now);
        }
        let count = self.open.len();
        self.open.clear();
        count as u64
    }

    /// Whether the source has what it may have.
    pub fn check(&self, source: &[u64]) -> Result<(), String> {
        for (sector, (found, may_be)) in source.iter().zip(&self.may_be).enumerate() {
            if !may_be.iter().any(|may_be| may_be.write == *found) {
                return Err(format!(
                    "sector {sector} has {found}, and may have {may_be:?}"
                ));
            }
        }
        Ok(())
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
