//! Whether what was recorded of a round is allowed.
//!
//! Pure: judges records of [`crate::soak::watch`] and the reasons that the round gave; knows nothing of the product.
//! Times are nanoseconds since the watch began.

use crate::soak::meter::LONGEST_NS;
use std::collections::BTreeSet;
use std::fmt;

/// A guest that runs has used CPU time this lately, however little of a CPU it has.
const LATELY_NS: u64 = LONGEST_NS + 1_000_000_000;
/// What a thread's CPU time may be behind, or be booked too late, at each reading.
const BOOKING_NS: u64 = 12_000_000;
/// How long after a reason a guest may end by it: a killed process is seen to be gone a little later.
pub const FOLLOWS_NS: u64 = 3_000_000_000;
/// How old a list's knowledge may be where the site is well.
pub const LIST_AGE_NS: u64 = 6_000_000_000;

/// A span of time in which a QEMU's vCPUs used CPU time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    pub from: u64,
    pub to: u64,
    /// CPU time used between the two, of all its vCPUs.
    pub ran_ns: u64,
}

/// One QEMU as it was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    pub vm: String,
    pub host: String,
    /// Its process id outside of the lab.
    pub pid: i32,
    /// It was started to receive a guest, not to boot one.
    pub incoming: bool,
    /// When its process was first seen.
    pub began: u64,
    /// When it was seen to have ended.
    pub gone: Option<u64>,
    /// vCPUs that the sampler watches.
    pub vcpus: usize,
    /// When its vCPUs ran.
    pub windows: Vec<Window>,
    /// The counter guest's passes, as its memory said.
    pub passes: Vec<(u64, u32)>,
}

impl Trace {
    fn first_ran(&self) -> Option<u64> {
        self.windows.first().map(|window| window.to)
    }

    fn last_ran(&self) -> Option<u64> {
        self.windows.last().map(|window| window.to)
    }

    /// Whether its guest runs at this time, as far as is known by then.
    pub fn runs(&self, now: u64) -> bool {
        self.last_ran() > Some(now.saturating_sub(LATELY_NS))
    }

    fn name(&self) -> String {
        format!("QEMU {} on {}", self.pid, self.host)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A VM ran in two QEMUs at the same time.
    Doubled,
    /// A guest or pages of it were lost for no reason that the round gives.
    Lost,
    /// A disk does not have what its guest was told it has.
    Writes,
    /// The site did not say what a person must know.
    Unsaid,
    /// A VM certainly ran twice, by a person's false word, and this check did not see it.
    Blind,
    /// A list said of a VM that runs that it is stopped.
    WrongList,
    /// Not exactly one host holds a VM that runs.
    Holders,
    /// A QEMU, memory, a tap or an image was left where no VM runs.
    LeftOver,
    /// What a person was told to be done was undone.
    Undone,
    /// The site did not come to rest by itself.
    Stuck,
    /// A move of a healthy VM on a healed site did not complete.
    MoveFailed,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Doubled => "running twice",
            Self::Lost => "lost",
            Self::Writes => "writes",
            Self::Unsaid => "unsaid",
            Self::Blind => "blind",
            Self::WrongList => "wrong list",
            Self::Holders => "holders",
            Self::LeftOver => "left over",
            Self::Undone => "undone",
            Self::Stuck => "stuck",
            Self::MoveFailed => "move failed",
        })
    }
}

/// Something that must not be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub kind: Kind,
    /// The VM, or the host where no VM is concerned.
    pub of: String,
    pub what: String,
}

impl Violation {
    /// A violation of that kind.
    pub fn new(kind: Kind, of: &str, what: impl Into<String>) -> Self {
        Self {
            kind,
            of: of.to_owned(),
            what: what.into(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.kind, self.of, self.what)
    }
}

/// Whose end a reason explains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whose {
    /// A VM, wherever it ran.
    Vm(String),
    /// Every VM that ran on a host.
    Host(String),
    /// What ran in one QEMU.
    Qemu(i32),
}

/// A reason of the round's for a guest to begin anew.
///
/// It explains what ended while it was done, or soon after: neither what had ended before, nor what ended much later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Excuse {
    /// When it began to be done.
    pub at: u64,
    /// When it was done; none while that is not known, as of a command that nobody answered.
    pub until: Option<u64>,
    pub whose: Whose,
    pub why: &'static str,
}

impl Excuse {
    /// Whether something at that time can come from it.
    fn spans(&self, time: u64) -> bool {
        let over = |until| time > until + FOLLOWS_NS;
        self.at <= time && !self.until.is_some_and(over)
    }

    /// Whether it is why a QEMU ended, or, where that one lives on, why another one began at that time.
    fn explains(&self, trace: &Trace, began: u64) -> bool {
        self.covers(trace) && self.spans(trace.gone.unwrap_or(began))
    }

    fn covers(&self, trace: &Trace) -> bool {
        match &self.whose {
            Whose::Vm(vm) => *vm == trace.vm,
            Whose::Host(host) => *host == trace.host,
            Whose::Qemu(pid) => *pid == trace.pid,
        }
    }
}

/// A promise that a VM was off: a command that ends a guest was answered with exit code 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    pub vm: String,
    /// When the command was given.
    pub asked: u64,
    /// When it was answered.
    pub answered: u64,
}

/// A line of a list of VMs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// When the list was asked for.
    pub asked: u64,
    pub answered: u64,
    pub vm: String,
    /// Its state, as the list says.
    pub state: String,
}

/// VMs that ran in two QEMUs.
///
/// A handover within one window is no doubling, so one of two proofs is asked for. Either one QEMU ran, then certainly
/// the other, then certainly the first again; or the two used more CPU time than passed, with one vCPU each.
pub fn doublings(traces: &[Trace]) -> Vec<Violation> {
    let mut found = Vec::new();
    for (index, one) in traces.iter().enumerate() {
        for other in traces.iter().skip(index + 1) {
            if one.vm != other.vm {
                continue;
            }
            let proof = between(one, other)
                .or_else(|| between(other, one))
                .or_else(|| together(one, other));
            if let Some(at) = proof {
                let what = format!(
                    "{} and {} both ran at {:.3} s",
                    one.name(),
                    other.name(),
                    at as f64 / 1e9
                );
                found.push(Violation::new(Kind::Doubled, &one.vm, what));
            }
        }
    }
    found
}

/// The same, but those that a person's false word explains. Of `doubled` it is known that they ran twice: not to see that
/// is a violation, too.
pub fn unexplained(
    found: Vec<Violation>,
    false_words: &BTreeSet<String>,
    doubled: &BTreeSet<String>,
) -> Vec<Violation> {
    let seen: BTreeSet<String> = found.iter().map(|one| one.of.clone()).collect();
    let mut left = found;
    left.retain(|one| !false_words.contains(&one.of));
    let unseen = doubled.iter().filter(|vm| !seen.contains(*vm));
    left.extend(unseen.map(|vm| {
        let what = "it ran on two hosts by a person's false word, and that was not seen";
        Violation::new(Kind::Blind, vm, what)
    }));
    left
}

/// When `inner` ran after `outer` and before `outer` ran again.
fn between(outer: &Trace, inner: &Trace) -> Option<u64> {
    let first = outer.windows.first()?;
    let last = outer.windows.last()?;
    let inside = |window: &&Window| window.from >= first.to && window.to <= last.from;
    inner.windows.iter().find(inside).map(|window| window.to)
}

/// When both ran more than one after the other could.
fn together(one: &Trace, other: &Trace) -> Option<u64> {
    if one.vcpus != 1 || other.vcpus != 1 {
        return None;
    }
    let overfull = |a: &Window, b: &Window| {
        let span = a.to.max(b.to) - a.from.min(b.from);
        a.ran_ns + b.ran_ns > span + 2 * BOOKING_NS
    };
    let twin = |a: &Window| other.windows.iter().any(|b| overfull(a, b));
    one.windows.iter().find(|a| twin(a)).map(|a| a.to)
}

/// Guests that began anew, or went back, for no reason that the round gives. `since` is the round's begin.
pub fn losses(traces: &[Trace], excuses: &[Excuse], since: u64) -> Vec<Violation> {
    let mut found = Vec::new();
    for trace in traces {
        if let Some(what) = booted_unasked(trace, traces, excuses, since) {
            found.push(Violation::new(Kind::Lost, &trace.vm, what));
        }
        if let Some(what) = went_back(trace, excuses, since) {
            found.push(Violation::new(Kind::Lost, &trace.vm, what));
        }
        if let Some(what) = ended_unasked(trace, traces, excuses) {
            found.push(Violation::new(Kind::Lost, &trace.vm, what));
        }
    }
    found
}

/// Of the QEMUs that are gone, those that a round must still know of when the next one begins: what ran a VM last, where no
/// QEMU that lives has run it since. A guest that such a VM boots later began anew.
pub fn last_of_each(gone: &[Trace], alive: &[Trace]) -> Vec<Trace> {
    let is_last = |one: &&Trace| {
        let mut others = gone.iter().chain(alive);
        let later = |other: &Trace| {
            other.vm == one.vm && other.pid != one.pid && other.last_ran() > one.last_ran()
        };
        one.last_ran().is_some() && !others.any(later)
    };
    gone.iter().filter(is_last).cloned().collect()
}

/// QEMUs that ran on although a person was told that their VM is off.
pub fn not_ended(traces: &[Trace], ended: &[Ended]) -> Vec<Violation> {
    let ran_on = |promise: &Ended| {
        let since = promise.answered + FOLLOWS_NS;
        let mut traces = traces.iter();
        let one = traces.find(|one| {
            let was_there = one.vm == promise.vm && one.first_ran() < Some(promise.asked);
            was_there && one.windows.iter().any(|window| window.from > since)
        })?;
        let what = format!(
            "a person was told at {:.3} s that it is off, and {} ran on",
            promise.answered as f64 / 1e9,
            one.name()
        );
        Some(Violation::new(Kind::Undone, &promise.vm, what))
    };
    ended.iter().filter_map(ran_on).collect()
}

/// QEMUs that booted a guest in the round.
pub fn boots(traces: &[Trace], since: u64) -> usize {
    let booted = |trace: &&Trace| is_boot(trace, since);
    traces.iter().filter(booted).count()
}

fn is_boot(trace: &Trace, since: u64) -> bool {
    !trace.incoming && trace.began > since && trace.first_ran().is_some()
}

fn booted_unasked(
    trace: &Trace,
    traces: &[Trace],
    excuses: &[Excuse],
    since: u64,
) -> Option<String> {
    if !is_boot(trace, since) {
        return None;
    }
    let ran = trace.first_ran()?;
    let before =
        |one: &&Trace| one.vm == trace.vm && one.pid != trace.pid && one.first_ran() < Some(ran);
    // A VM that did not run before has nothing to lose.
    let last = traces
        .iter()
        .filter(before)
        .filter(|one| one.first_ran().is_some());
    let last = last.max_by_key(|one| one.last_ran())?;
    let explains = |excuse: &Excuse| excuse.at <= ran && excuse.explains(last, ran);
    if excuses.iter().any(explains) {
        return None;
    }
    let end = match last.gone {
        Some(gone) => format!(
            "which ended at {:.3} s for no reason of ours",
            gone as f64 / 1e9
        ),
        None => "which still lives".to_owned(),
    };
    Some(format!(
        "{} booted it at {:.3} s, after {}, {end}",
        trace.name(),
        ran as f64 / 1e9,
        last.name()
    ))
}

/// What ran a VM last has ended, nothing runs it now, and the round gives no reason.
fn ended_unasked(trace: &Trace, traces: &[Trace], excuses: &[Excuse]) -> Option<String> {
    let gone = trace.gone?;
    let ran = trace.last_ran()?;
    let goes_on = |one: &Trace| {
        one.vm == trace.vm
            && one.pid != trace.pid
            && (one.gone.is_none() || one.last_ran() > Some(ran))
    };
    let explained = excuses.iter().any(|excuse| excuse.explains(trace, gone));
    if explained || traces.iter().any(goes_on) {
        return None;
    }
    Some(format!(
        "{} ended at {:.3} s for no reason of ours, and nothing runs it since",
        trace.name(),
        gone as f64 / 1e9
    ))
}

/// Within one QEMU a guest's passes only grow.
fn went_back(trace: &Trace, excuses: &[Excuse], since: u64) -> Option<String> {
    let excused = |at: u64| {
        let of_vm = |excuse: &Excuse| matches!(excuse.whose, Whose::Vm(_)) && excuse.covers(trace);
        excuses
            .iter()
            .any(|excuse| of_vm(excuse) && excuse.spans(at))
    };
    // What a destination's memory holds before its guest runs is being copied.
    let ran = trace.first_ran()?.max(since);
    let known: Vec<_> = trace.passes.iter().filter(|(at, _)| *at >= ran).collect();
    let back = known.iter().zip(known.iter().skip(1));
    let mut back = back.filter(|((_, first), (at, then))| then < first && !excused(*at));
    back.next().map(|((_, first), (at, then))| {
        format!(
            "{}: passes went from {first} to {then} at {:.3} s",
            trace.name(),
            *at as f64 / 1e9
        )
    })
}

/// Lists that said `stopped` of a VM that ran long before they were asked for and still ran when they came.
pub fn wrong_lists(shown: &[Shown], traces: &[Trace]) -> Vec<Violation> {
    let runs = |line: &Shown| {
        traces.iter().find(|trace| {
            let long = line.asked.saturating_sub(LIST_AGE_NS);
            let before = trace.first_ran().is_some_and(|ran| ran < long);
            trace.vm == line.vm && before && trace.last_ran() > Some(line.answered)
        })
    };
    let stopped = shown.iter().filter(|line| line.state == "stopped");
    let mut found: Vec<Violation> = stopped
        .filter_map(|line| {
            let trace = runs(line)?;
            let what = format!(
                "shown as stopped at {:.3} s while {} ran it",
                line.answered as f64 / 1e9,
                trace.name()
            );
            Some(Violation::new(Kind::WrongList, &line.vm, what))
        })
        .collect();
    // One for each VM says it all.
    found.dedup_by(|one, other| one.of == other.of);
    found
}

#[cfg(test)]
mod tests;
