//! Rows of one system in one cell, of any bench: their medians with the spread. Of moves of memory, too, what they are called,
//! and which may be held against each other.
//!
//! Pure. Refuses nothing; numbers that were not measured are none.

use crate::plan::scenarios;
use crate::row::{CUT_OFF, Measured, Row};
use std::collections::HashMap;

/// A number of a row, where it was measured.
pub(crate) type Number = fn(&Row) -> Option<f64>;

pub(crate) fn is_encrypted(row: &Row) -> bool {
    row.encryption != "none"
}

pub(crate) fn is_ours(row: &Row) -> bool {
    row.system == "godwit"
}

pub(crate) fn is_qemu(row: &Row) -> bool {
    row.system.starts_with("qemu")
}

pub(crate) const RATE: Number = |row| row.throughput_gb_per_s;
pub(crate) const TOTAL: Number = |row| row.total_s;
pub(crate) const STOP: Number = |row| row.switchover_ms;
pub(crate) const COST_SOURCE: Number = |row| row.cpu_source_s_per_gb;
pub(crate) const COST_DESTINATION: Number = |row| row.cpu_destination_s_per_gb;

/// The middle of some numbers; the mean of the two middle ones where there are two.
pub fn median(numbers: &[f64]) -> Option<f64> {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        length if length % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// Median, smallest and largest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
    pub runs: usize,
}

impl Spread {
    /// Of some numbers; none of none.
    pub fn of(numbers: &[f64]) -> Option<Self> {
        Some(Self {
            median: median(numbers)?,
            least: numbers.iter().copied().fold(f64::INFINITY, f64::min),
            most: numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            runs: numbers.len(),
        })
    }
}

/// All runs of one system with one setting in one cell.
#[derive(Debug, Clone)]
pub struct Group<'a, R = Row> {
    /// The rows, at least one.
    pub rows: Vec<&'a R>,
}

impl<'a, R: Measured> Group<'a, R> {
    /// The row that stands for what all have in common.
    pub fn head(&self) -> &'a R {
        self.rows[0]
    }

    /// A number of the completed rows.
    pub fn spread(&self, number: impl Fn(&R) -> Option<f64>) -> Option<Spread> {
        let done = self.rows.iter().filter(|row| row.completed());
        Spread::of(&done.filter_map(|row| number(row)).collect::<Vec<_>>())
    }

    pub fn median(&self, number: impl Fn(&R) -> Option<f64>) -> Option<f64> {
        self.spread(number).map(|spread| spread.median)
    }

    /// In a word: how the rows ended.
    pub fn outcome(&self) -> String {
        let done = self.rows.iter().filter(|row| row.completed()).count();
        let other = self.rows.iter().find(|row| !row.completed());
        match other {
            None => "completed".into(),
            Some(row) if done == 0 => row.outcome().to_owned(),
            Some(row) => format!(
                "{done} of {} completed, else {}",
                self.rows.len(),
                row.outcome()
            ),
        }
    }
}

impl Group<'_> {
    /// Whether it was ended for taking too long.
    pub fn cut_off(&self) -> bool {
        self.rows.iter().any(|row| row.outcome == CUT_OFF)
    }

    /// Whether every completed run's memory was equal.
    pub fn equal(&self) -> Option<bool> {
        let compared: Vec<bool> = self.rows.iter().filter_map(|row| row.ram_equal).collect();
        (!compared.is_empty()).then(|| compared.iter().all(|equal| *equal))
    }

    /// What it is called in tables.
    pub fn name(&self) -> String {
        let row = self.head();
        format!("{} {}", row.system, row.config)
    }

    /// The same, with what it does to the bytes and where they go.
    pub fn full_name(&self) -> String {
        let row = self.head();
        let secrecy = if is_encrypted(row) {
            &row.encryption
        } else {
            "plain"
        };
        format!("{} {secrecy} {}", self.name(), row.destination)
    }
}

/// Rows that belong together, in the order of their first ones.
pub fn in_order<R: Measured>(rows: &[R]) -> Vec<Group<'_, R>> {
    let mut groups: Vec<Group<R>> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|group| group.head().is_like(row)) {
            Some(group) => group.rows.push(row),
            None => groups.push(Group { rows: vec![row] }),
        }
    }
    groups
}

/// Rows that belong together: by scenario, within one in the order of their first ones.
pub fn groups(rows: &[Row]) -> Vec<Group<'_>> {
    let mut groups = in_order(rows);
    groups.sort_by_key(|group| {
        let scenario = &group.head().scenario;
        scenarios().iter().position(|name| name == scenario)
    });
    groups
}

/// Which rows met memory that came far slower than the best of their call's: where a hypervisor takes back what is free, the
/// next touch of it costs many times as much, whoever's move it is.
pub struct SlowMemory(HashMap<u64, f64>);

impl SlowMemory {
    /// Slower than this part of the best is slow; shared cores make less of a difference.
    const PART: f64 = 0.25;

    pub fn among<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Self {
        let mut best = HashMap::new();
        for row in rows {
            if let Some(speed) = row.first_touch_gb_per_s {
                let most: &mut f64 = best.entry(row.call_unix_s).or_default();
                *most = most.max(speed);
            }
        }
        Self(best)
    }

    pub fn has(&self, row: &Row) -> bool {
        let best = self.0.get(&row.call_unix_s).copied().unwrap_or(0.0);
        row.first_touch_gb_per_s
            .is_some_and(|speed| speed < best * Self::PART)
    }
}

/// What ratios and pictures are made of: no row on slow memory, ours or a peer's, and no peer's that was not measured beside
/// one of ours that is left.
pub fn comparable<'a>(groups: &[Group<'a>]) -> Vec<Group<'a>> {
    let slow = SlowMemory::among(groups.iter().flat_map(|group| group.rows.iter().copied()));
    let fast = groups.iter().map(|group| Group {
        rows: (group.rows.iter().copied())
            .filter(|row| !slow.has(row))
            .collect(),
    });
    let fast: Vec<Group> = fast.filter(|group| !group.rows.is_empty()).collect();
    beside_ours(&fast)
}

/// The same groups with nothing in them that was not measured beside us: a peer's row stays where the call of the bench
/// that made it has a row of ours in the same place. From one hour to the next a shared machine differs by more than the
/// systems do.
pub fn beside_ours<'a>(groups: &[Group<'a>]) -> Vec<Group<'a>> {
    let rows = groups.iter().flat_map(|group| &group.rows);
    let ours: Vec<&Row> = rows.filter(|row| is_ours(row)).copied().collect();
    let beside = |row: &Row| {
        let mut ours = ours.iter();
        ours.any(|our| place(our) == place(row) && our.call_unix_s == row.call_unix_s)
    };
    let kept = groups.iter().map(|group| Group {
        rows: (group.rows.iter().copied())
            .filter(|row| is_ours(row) || beside(row))
            .collect(),
    });
    kept.filter(|group| !group.rows.is_empty()).collect()
}

/// Where rows are judged together.
pub(crate) fn place(row: &Row) -> (&str, &str) {
    (&row.scenario, &row.cell)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_the_middle_and_of_nothing_nothing() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }
}
