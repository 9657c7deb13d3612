//! Which of several changes of the same bytes is the newest one, where they come in any order.
//!
//! Each change has a number, and the later number wins. Who owns the state: the value; it remembers what came until it is told
//! that everything before a number has come. Refuses nothing.

use std::collections::BTreeMap;
use std::ops::Range;

/// What came, by range.
#[derive(Debug, Default)]
pub struct Newest {
    /// By start, apart from each other: the end, and the number of the newest change.
    came: BTreeMap<u64, (u64, u64)>,
}

impl Newest {
    /// Takes a change in and says where it is the newest one: there it is to be carried out.
    pub fn admit(&mut self, number: u64, range: Range<u64>) -> Vec<Range<u64>> {
        let mut wins = Vec::new();
        let mut at = range.start;
        for (older, theirs) in self.touching(&range) {
            if theirs <= number {
                continue;
            }
            if at < older.start {
                wins.push(at..older.start);
            }
            at = at.max(older.end);
        }
        if at < range.end {
            wins.push(at..range.end);
        }
        for won in &wins {
            self.cut(won);
            self.came.insert(won.start, (won.end, number));
        }
        wins
    }

    /// Everything before this number has come.
    pub fn forget(&mut self, before: u64) {
        self.came.retain(|_, (_, number)| *number >= before);
    }

    /// How many ranges it remembers.
    pub fn len(&self) -> usize {
        self.came.len()
    }

    /// Whether it remembers none.
    pub fn is_empty(&self) -> bool {
        self.came.is_empty()
    }

    fn touching(&self, range: &Range<u64>) -> Vec<(Range<u64>, u64)> {
        let before = self.came.range(..range.start).next_back();
        let inside = self.came.range(range.start..range.end);
        let all = before.into_iter().chain(inside);
        let all = all.map(|(start, (end, number))| (*start..*end, *number));
        all.filter(|(old, _)| old.end > range.start).collect()
    }

    /// Takes a range out of all that came before.
    fn cut(&mut self, range: &Range<u64>) {
        for (old, number) in self.touching(range) {
            self.came.remove(&old.start);
            if old.start < range.start {
                self.came.insert(old.start, (range.start, number));
            }
            if old.end > range.end {
                self.came.insert(range.end, (old.end, number));
            }
        }
    }
}
