//! What a soak tells: a line for each round, the table at the end, and a directory for each violation.
//!
//! Owns the counts. Writes below `target/soak`; refuses nothing.

use crate::soak::checks::{Shown, Trace, Violation};
use crate::soak::faults::Account;
use crate::soak::plan::Round;
use anyhow::Result;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How a round ended for the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// No guest noticed anything.
    Unharmed,
    /// A guest was booted anew, for a reason that the round gives.
    BootedAnew,
    /// A person had to start or resume a guest.
    Helped,
    /// A guest stayed down and was shown so, where that is expected.
    Down,
    /// Something must not be.
    Violated,
}

const OUTCOMES: [(Outcome, &str); 5] = [
    (Outcome::Unharmed, "unharmed"),
    (Outcome::BootedAnew, "booted anew"),
    (Outcome::Helped, "helped"),
    (Outcome::Down, "down"),
    (Outcome::Violated, "violated"),
];

/// What was recorded of a round.
#[derive(Debug)]
pub struct Record {
    pub round: Round,
    pub account: Account,
    pub traces: Vec<Trace>,
    pub shown: Vec<Shown>,
    /// What must not be.
    pub violations: Vec<Violation>,
    pub outcome: Outcome,
    /// How long it took.
    pub took: Duration,
}

/// The counts of a soak.
#[derive(Debug, Default)]
pub struct Report {
    rounds: u32,
    violations: u64,
    disks_checked: usize,
    snapshots: u64,
    refused: u64,
    kinds: BTreeMap<String, u64>,
    faults: BTreeMap<&'static str, BTreeMap<Outcome, u64>>,
    in_full: BTreeMap<&'static str, u64>,
}

impl Report {
    pub fn add(&mut self, record: &Record) {
        self.rounds += 1;
        self.violations += record.violations.len() as u64;
        self.disks_checked += record.account.disks_checked;
        self.snapshots += u64::from(record.account.snapshots);
        self.refused += u64::from(record.account.refused);
        for violation in &record.violations {
            *self.kinds.entry(violation.kind.to_string()).or_default() += 1;
        }
        let mut names: Vec<&'static str> = record
            .round
            .steps
            .iter()
            .map(|step| step.fault.name)
            .collect();
        if names.is_empty() {
            names.push("nothing");
        }
        for name in &record.account.in_full {
            *self.in_full.entry(name).or_default() += 1;
        }
        for name in names {
            *self
                .faults
                .entry(name)
                .or_default()
                .entry(record.outcome)
                .or_default() += 1;
        }
    }

    pub fn violations(&self) -> u64 {
        self.violations
    }

    /// The table and the last line.
    pub fn text(&self) -> String {
        let mut text = format!("\n{:<18}{:>8}{:>9}", "fault", "rounds", "in full");
        for (_, name) in OUTCOMES {
            let _ = write!(text, "{name:>13}");
        }
        for (fault, outcomes) in &self.faults {
            let rounds = outcomes.values().sum::<u64>();
            let in_full = self.in_full.get(fault).copied().unwrap_or(0);
            let _ = write!(text, "\n{fault:<18}{rounds:>8}{in_full:>9}");
            for (outcome, _) in OUTCOMES {
                let _ = write!(text, "{:>13}", outcomes.get(&outcome).copied().unwrap_or(0));
            }
        }
        let (rounds, disks) = (self.rounds, self.disks_checked);
        let _ = write!(text, "\n\nrounds: {rounds}\ndisks checked: {disks}");
        let (snapshots, refused) = (self.snapshots, self.refused);
        let _ = write!(
            text,
            "\nsnapshots taken: {snapshots}\ncommands refused: {refused}"
        );
        for (kind, count) in &self.kinds {
            let _ = write!(text, "\n{kind}: {count}");
        }
        let _ = write!(text, "\nviolations: {}", self.violations);
        text
    }
}

pub fn line(record: &Record) -> String {
    let outcome = OUTCOMES.iter().find(|(one, _)| *one == record.outcome);
    let outcome = outcome.map_or("", |(_, name)| name);
    let mut line = format!(
        "round {:>3}  {:>5.1} s  {outcome:<12} {}",
        record.round.number,
        record.took.as_secs_f64(),
        record.round
    );
    for violation in &record.violations {
        let _ = write!(line, "\n    VIOLATION {violation}");
    }
    line
}

/// Appends what was done in a round, good or bad, to `rounds.log`.
pub fn note(directory: &Path, record: &Record) -> Result<()> {
    std::fs::create_dir_all(directory)?;
    let path = directory.join("rounds.log");
    let mut log = File::options().create(true).append(true).open(path)?;
    writeln!(log, "{}", line(record))?;
    for one in &record.account.log {
        writeln!(log, "    {one}")?;
    }
    Ok(())
}

/// Writes all that is known of a round with violations; `logs` are the site's.
pub fn keep(directory: &Path, record: &Record, logs: &Path) -> Result<PathBuf> {
    let to = directory.join(format!("round-{}", record.round.number));
    if to.exists() {
        std::fs::remove_dir_all(&to)?;
    }
    std::fs::create_dir_all(&to)?;
    let mut text = format!("{}\n\n{:#?}\n\n", line(record), record.round);
    for one in &record.account.log {
        let _ = writeln!(text, "{one}");
    }
    std::fs::write(to.join("round.txt"), text)?;
    std::fs::write(to.join("seen.txt"), seen(record))?;
    for entry in std::fs::read_dir(logs)?.flatten() {
        let name = entry.file_name();
        if Path::new(&name).extension().is_some_and(|end| end == "log") {
            std::fs::copy(entry.path(), to.join(name))?;
        }
    }
    Ok(to)
}

fn seen(record: &Record) -> String {
    let seconds = |at: u64| at as f64 / 1e9;
    let mut text = String::new();
    for trace in &record.traces {
        let ends =
            [trace.windows.first(), trace.windows.last()].map(|one| one.map(|one| seconds(one.to)));
        let _ = writeln!(
            text,
            "{} QEMU {} on {}{}: began {:.3}, ran {ends:?} in {} windows, gone {:?}, passes {:?} to {:?}",
            trace.vm,
            trace.pid,
            trace.host,
            if trace.incoming { " (incoming)" } else { "" },
            seconds(trace.began),
            trace.windows.len(),
            trace.gone.map(seconds),
            trace.passes.first(),
            trace.passes.last()
        );
    }
    for line in &record.shown {
        let _ = writeln!(
            text,
            "list at {:.3}: {} {}",
            seconds(line.answered),
            line.vm,
            line.state
        );
    }
    for trace in &record.traces {
        let _ = writeln!(text, "windows of QEMU {}: {:?}", trace.pid, trace.windows);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soak::checks::Kind;
    use crate::soak::plan::choose;

    #[test]
    fn the_table_counts_by_fault_and_outcome_and_what_was_done_in_full_and_ends_with_the_violations()
     {
        let faults = choose(&["kill-qemu".into()], &[]).unwrap();
        let mut report = Report::default();
        for (number, outcome) in [(1, Outcome::BootedAnew), (2, Outcome::Violated)] {
            let violated = outcome == Outcome::Violated;
            report.add(&Record {
                round: Round::plan(1, number, &faults, 3),
                account: Account {
                    in_full: (number == 1).then_some("kill-qemu").into_iter().collect(),
                    ..Account::default()
                },
                traces: Vec::new(),
                shown: Vec::new(),
                violations: violated
                    .then(|| Violation::new(Kind::Doubled, "vm", "two"))
                    .into_iter()
                    .collect(),
                outcome,
                took: Duration::ZERO,
            });
        }
        let text = report.text();
        let row = text
            .lines()
            .find(|line| line.starts_with("kill-qemu"))
            .unwrap();
        let cells: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(cells, ["kill-qemu", "2", "1", "0", "1", "0", "0", "1"]);
        assert!(text.contains("\nrunning twice: 1\n"), "{text}");
        assert!(text.ends_with("\nviolations: 1"), "{text}");
    }
}
