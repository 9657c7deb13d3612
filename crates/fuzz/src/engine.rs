//! The loop: take an input from the corpus, damage it, run it, keep it if it led somewhere new, stop if it broke
//! something.
//!
//! Owns the corpus of a run and, in the work directory, `NAME.current` (the input being run: what is left there tells
//! which one ended the whole process, by a stack overflow or an abort, which cannot be caught) and `NAME-HASH.bin` for
//! each finding. Refuses: inputs that panic, that take longer than [`SLOW`], targets that reserve more than
//! [`GROWTH_MAX_MIB`].

use crate::mutate::mutate;
use crate::outcome::Outcome;
use crate::rng::Rng;
use crate::targets::Target;
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{catch_unwind, set_hook, take_hook};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, Instant};

/// Longest time for one input. Far above what any takes on a busy machine: it finds what never ends.
pub const SLOW: Duration = Duration::from_secs(5);
/// Most address space that one target may add, MiB: far above corpus and allocator, far below a length that is
/// believed.
pub const GROWTH_MAX_MIB: u64 = 512;
/// Stack of the thread that runs targets: what threads of the product have.
pub const STACK_BYTES: usize = 2 << 20;
/// Most inputs that are kept because they led somewhere new.
const CORPUS_MAX: usize = 4096;
/// Most executions spent on making a finding smaller.
const MINIMISE_MAX: usize = 4000;

/// When a run ends.
#[derive(Debug, Clone, Copy)]
pub enum Limit {
    /// After this many executions.
    Runs(u64),
    Time(Duration),
}

#[derive(Debug, Clone)]
pub struct Options {
    pub seed: u64,
    pub limit: Limit,
    /// Where findings go; exists.
    pub directory: PathBuf,
}

/// An input that breaks a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The input, made smaller where that was possible.
    pub input: Vec<u8>,
    pub what: String,
    /// Where it is kept.
    pub file: Option<PathBuf>,
}

/// What a run came to.
#[derive(Debug, Clone)]
pub struct Report {
    /// Inputs run, without the search for a smaller one.
    pub executions: u64,
    /// How long it took.
    pub time: Duration,
    pub outcomes: usize,
    /// The first finding, which ends a run.
    pub finding: Option<Finding>,
}

/// Runs one target. Call it on a thread with [`STACK_BYTES`] of stack.
pub fn run(target: &Target, options: &Options) -> std::io::Result<Report> {
    let mut run = Run::new(target, options)?;
    let peak_mib = peak_mib();
    let found = run.all();
    let mut report = Report {
        executions: run.executions,
        time: run.began.elapsed(),
        outcomes: run.outcomes.len(),
        finding: found.map(|(input, what)| minimise(target, input, what)),
    };
    let grown_mib = self::peak_mib().saturating_sub(peak_mib);
    if grown_mib > GROWTH_MAX_MIB && report.finding.is_none() {
        report.finding = Some(Finding {
            input: Vec::new(),
            what: format!(
                "reserved {grown_mib} MiB during the run: a length is believed somewhere"
            ),
            file: None,
        });
    }
    if let Some(finding) = &mut report.finding {
        finding.file = Some(keep(target, finding, &options.directory)?);
    }
    std::fs::remove_file(current_path(target, &options.directory))?;
    Ok(report)
}

/// Runs one input; an error says what it breaks.
pub fn try_input(target: &Target, input: &[u8]) -> Result<Outcome, String> {
    install_hook();
    let began = Instant::now();
    QUIET.set(true);
    let result = catch_unwind(|| (target.run)(input));
    QUIET.set(false);
    let Ok(outcome) = result else {
        let what = PANIC.with_borrow_mut(Option::take);
        return Err(what.unwrap_or_else(|| "panicked".into()));
    };
    if began.elapsed() > SLOW {
        return Err(format!("took {} ms", began.elapsed().as_millis()));
    }
    Ok(outcome)
}

/// Where the input being run is written.
pub fn current_path(target: &Target, directory: &Path) -> PathBuf {
    directory.join(format!("{}.current", target.name))
}

struct Run<'a> {
    target: &'a Target,
    limit: Limit,
    rng: Rng,
    corpus: Vec<Vec<u8>>,
    outcomes: HashSet<Outcome>,
    executions: u64,
    began: Instant,
    current: File,
}

impl<'a> Run<'a> {
    fn new(target: &'a Target, options: &Options) -> std::io::Result<Self> {
        Ok(Self {
            target,
            limit: options.limit,
            // A target's inputs do not depend on which others there are.
            rng: Rng::new(options.seed ^ crate::outcome::of(target.name)),
            corpus: Vec::new(),
            outcomes: HashSet::new(),
            executions: 0,
            began: Instant::now(),
            current: File::create(current_path(target, &options.directory))?,
        })
    }

    /// Runs until the limit or the first finding.
    fn all(&mut self) -> Option<(Vec<u8>, String)> {
        for seed in (self.target.seeds)() {
            if let Err(what) = self.one(&seed) {
                return Some((seed, what));
            }
            self.corpus.push(seed);
        }
        while !self.is_over() {
            let input = self.next_input();
            match self.one(&input) {
                Ok(true) => self.add(input),
                Ok(false) => {}
                Err(what) => return Some((input, what)),
            }
        }
        None
    }

    fn is_over(&self) -> bool {
        match self.limit {
            Limit::Runs(runs) => self.executions >= runs,
            Limit::Time(time) => self.executions.is_multiple_of(64) && self.began.elapsed() >= time,
        }
    }

    /// Half of the time from the newest inputs: they stand at the edge of what is known.
    fn next_input(&mut self) -> Vec<u8> {
        let newest = self.corpus.len().saturating_sub(24);
        let from = if self.rng.below(2) == 0 { newest } else { 0 };
        let input = self.rng.pick(self.corpus.get(from..).unwrap_or_default());
        let other = self.rng.clone().pick(&self.corpus).cloned();
        let input = input.cloned().unwrap_or_default();
        mutate(&mut self.rng, &input, &other.unwrap_or_default())
    }

    /// Whether the outcome is new.
    fn one(&mut self, input: &[u8]) -> Result<bool, String> {
        self.executions += 1;
        let length = (input.len() as u64).to_le_bytes();
        let written = self.current.write_all_at(&[&length, input].concat(), 0);
        written.map_err(|error| format!("could not write the input to a file: {error}"))?;
        Ok(self.outcomes.insert(try_input(self.target, input)?))
    }

    fn add(&mut self, input: Vec<u8>) {
        if self.corpus.len() < CORPUS_MAX {
            self.corpus.push(input);
        } else {
            let at = self.rng.below(CORPUS_MAX);
            self.corpus.splice(at..at.saturating_add(1), [input]);
        }
    }
}

/// Leaves out parts as long as the same place breaks.
fn minimise(target: &Target, mut input: Vec<u8>, what: String) -> Finding {
    let place = place_of(&what).to_owned();
    let (mut tries, mut size) = (0, input.len().div_ceil(2));
    let began = Instant::now();
    while size > 0 && tries < MINIMISE_MAX && began.elapsed() < SLOW {
        let mut at = 0;
        while at < input.len() && tries < MINIMISE_MAX {
            let mut shorter = input.clone();
            shorter.drain(at..at.saturating_add(size).min(input.len()));
            tries += 1;
            match try_input(target, &shorter) {
                Err(other) if place_of(&other) == place => input = shorter,
                _ => at = at.saturating_add(size),
            }
        }
        // Not by halves: what can go is often a whole field of any length.
        size -= size.div_ceil(4);
    }
    let what = try_input(target, &input).err().unwrap_or(what);
    Finding {
        input,
        what,
        file: None,
    }
}

/// Source file, line and column of a panic; the text before the first space else.
fn place_of(what: &str) -> &str {
    what.split(' ').next().unwrap_or_default()
}

fn keep(target: &Target, finding: &Finding, directory: &Path) -> std::io::Result<PathBuf> {
    let hash = crate::outcome::of(hex(&finding.input));
    let path = directory.join(format!("{}-{hash:016x}.bin", target.name));
    std::fs::write(&path, &finding.input)?;
    Ok(path)
}

/// Bytes as hexadecimal text.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes from hexadecimal text; `None` if it is none.
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    let pairs = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| {
        let pair = std::str::from_utf8(pair).ok().filter(|p| p.len() == 2)?;
        u8::from_str_radix(pair, 16).ok()
    };
    pairs.map(byte).collect()
}

/// Most address space that this process ever had, MiB; 0 where it is not told.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:"));
    let number = line.and_then(|rest| rest.split_whitespace().next());
    number.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) >> 10
}

thread_local! {
    /// Whether this thread runs a target: its panics are results.
    static QUIET: Cell<bool> = const { Cell::new(false) };
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

fn install_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |info| {
            if !QUIET.get() {
                return before(info);
            }
            let place = info.location().map(ToString::to_string);
            let text = info.payload_as_str().unwrap_or("panicked");
            let what = format!("{} {text}", place.unwrap_or_default());
            PANIC.with_borrow_mut(|last| *last = Some(what));
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_goes_both_ways() {
        assert_eq!(from_hex(&hex(&[0, 9, 255])), Some(vec![0, 9, 255]));
        for bad in ["0", "0g", "\u{e4}"] {
            assert_eq!(from_hex(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_panic_is_a_result_with_its_place() {
        fn breaks(_: &[u8]) -> Outcome {
            panic!("broken on purpose");
        }
        let target = Target {
            name: "breaks",
            about: "",
            run: breaks,
            seeds: Vec::new,
        };
        let what = try_input(&target, b"").expect_err("a panic");
        assert!(
            what.contains("engine.rs:") && what.ends_with("broken on purpose"),
            "{what}"
        );
    }
}
