//! `godwit-fuzz`: runs the table of targets, prints what each came to, exits 1 on a finding.
//!
//! Owns nothing but its arguments. Refuses: unknown targets. The last line is `N passed, M failed`, in targets.
#![forbid(unsafe_code)]

use clap::Parser;
use godwit_fuzz::engine::{self, Finding, Limit, Options, Report};
use godwit_fuzz::targets::{self, Target};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Targets of which each gets all executions that are asked for, since they are fast: what a guest, or whoever has broken out of one, says to a
/// disk, and what files of strangers say that a disk is made of. The others share as many.
const WHOLE: [&str; 7] = [
    "disk-message",
    "disk-request",
    "delta-head",
    "delta-table",
    "delta-text",
    "qcow2-head",
    "qcow2-chain",
];

/// Feeds damaged input to every decoder of Godwit. The same arguments give the same inputs.
#[derive(Debug, Parser)]
struct Arguments {
    /// Executions of each target of disks and deltas; the others share as many
    #[arg(long, default_value_t = 1_000_000)]
    runs: u64,
    /// Seconds per target, instead of a number of executions
    #[arg(long, conflicts_with = "runs")]
    seconds: Option<u64>,
    /// Only this target
    #[arg(long)]
    target: Option<String>,
    /// What all choices follow from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run one input, a file or hexadecimal text, instead
    #[arg(long, value_name = "FILE|HEX")]
    replay: Option<String>,
    /// Also look for the bug that was planted: not finding it is a failure
    #[arg(long)]
    canary: bool,
    /// List the targets
    #[arg(long)]
    list: bool,
    /// Where findings are kept
    #[arg(long, default_value = "target/fuzz")]
    directory: PathBuf,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let work = std::thread::Builder::new().stack_size(engine::STACK_BYTES);
    let done = work.spawn(move || run(&arguments));
    match done.map(std::thread::JoinHandle::join) {
        Ok(Ok(Ok(true))) => ExitCode::SUCCESS,
        Ok(Ok(Ok(false))) => ExitCode::FAILURE,
        Ok(Ok(Err(problem))) => {
            eprintln!("godwit-fuzz: {problem}");
            ExitCode::from(2)
        }
        Ok(Err(_)) | Err(_) => ExitCode::from(2),
    }
}

fn run(arguments: &Arguments) -> Result<bool, String> {
    let chosen = choose(arguments.target.as_deref())?;
    if arguments.list {
        for target in &chosen {
            println!("{:<16} {}", target.name, target.about);
        }
        return Ok(true);
    }
    if let Some(input) = &arguments.replay {
        return replay(&chosen, input);
    }
    let directory = &arguments.directory;
    std::fs::create_dir_all(directory)
        .map_err(|error| format!("cannot make {}: {error}", directory.display()))?;
    fuzz(arguments, &chosen)
}

fn choose(name: Option<&str>) -> Result<Vec<Target>, String> {
    let Some(name) = name else {
        return Ok(targets::all());
    };
    let mut all = targets::all();
    all.push(targets::CANARY);
    all.retain(|target| target.name == name);
    if all.is_empty() {
        return Err(format!("there is no target '{name}': see --list"));
    }
    Ok(all)
}

fn fuzz(arguments: &Arguments, chosen: &[Target]) -> Result<bool, String> {
    let (mut passed, mut failed, mut executions) = (0, 0, 0);
    let limit = arguments.seconds.map(Duration::from_secs);
    let options = |target: &Target| Options {
        seed: arguments.seed,
        limit: limit.map_or_else(
            || Limit::Runs(runs_of(target, arguments.runs, chosen)),
            Limit::Time,
        ),
        directory: arguments.directory.clone(),
    };
    for target in chosen {
        let report = run_one(target, &options(target))?;
        executions += report.executions;
        match &report.finding {
            None => passed += 1,
            Some(finding) => {
                failed += 1;
                show(target, finding);
            }
        }
    }
    if arguments.canary {
        let report = run_one(&targets::CANARY, &options(&targets::CANARY))?;
        let found = report.finding.is_some();
        println!(
            "canary: the planted bug was {}",
            if found { "found" } else { "NOT found" }
        );
        if found { passed += 1 } else { failed += 1 }
    }
    println!("{executions} executions, seed {}", arguments.seed);
    println!("{passed} passed, {failed} failed");
    Ok(failed == 0)
}

/// How many of so many executions this target gets, beside those that were chosen.
fn runs_of(target: &Target, runs: u64, chosen: &[Target]) -> u64 {
    let shares = |target: &&Target| !WHOLE.contains(&target.name);
    if !shares(&target) {
        return runs;
    }
    let sharing = chosen.iter().filter(shares).count();
    runs.div_ceil(sharing.max(1) as u64)
}

fn run_one(target: &Target, options: &Options) -> Result<Report, String> {
    note_earlier_death(target, &options.directory);
    let report = engine::run(target, options).map_err(|error| {
        format!(
            "cannot keep inputs in {}: {error}",
            options.directory.display()
        )
    })?;
    let seconds = report.time.as_secs_f64();
    println!(
        "{:<16} {:>9} executions {:>7.1} s {:>9.0}/s {:>6} outcomes",
        target.name,
        report.executions,
        seconds,
        report.executions as f64 / seconds.max(1e-9),
        report.outcomes
    );
    Ok(report)
}

/// What cannot be caught (a stack overflow, an abort) leaves its input behind.
fn note_earlier_death(target: &Target, directory: &Path) {
    let (path, kept) = (
        engine::current_path(target, directory),
        directory.join(format!("{}-died.bin", target.name)),
    );
    let Some(input) = std::fs::read(&path)
        .ok()
        .and_then(|bytes| read_current(&bytes))
    else {
        return;
    };
    if std::fs::write(&kept, input).is_ok() {
        eprintln!(
            "{}: an earlier run was ended during the input now in {}: replay it",
            target.name,
            kept.display()
        );
    }
}

fn read_current(bytes: &[u8]) -> Option<Vec<u8>> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    rest.get(..length).map(<[u8]>::to_vec)
}

fn show(target: &Target, finding: &Finding) {
    let hex = engine::hex(&finding.input);
    println!("{}: FOUND: {}", target.name, finding.what);
    println!("  {} bytes: {hex}", finding.input.len());
    if let Some(file) = &finding.file {
        let (name, file) = (target.name, file.display());
        println!("  kept; again with: godwit-fuzz --target {name} --replay {file}");
    }
}

fn replay(chosen: &[Target], input: &str) -> Result<bool, String> {
    let bytes = match std::fs::read(input) {
        Ok(bytes) => bytes,
        Err(error) => engine::from_hex(input)
            .ok_or_else(|| format!("'{input}' is neither a file ({error}) nor hexadecimal text"))?,
    };
    let (mut passed, mut failed) = (0, 0);
    for target in chosen {
        match engine::try_input(target, &bytes) {
            Ok(outcome) => {
                passed += 1;
                println!("{}: nothing found, outcome {outcome:016x}", target.name);
            }
            Err(what) => {
                failed += 1;
                println!("{}: FOUND: {what}", target.name);
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    Ok(failed == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_disk_target_gets_all_executions_and_the_others_share_as_many() {
        let all = targets::all();
        let (whole, sharing): (Vec<_>, Vec<_>) =
            all.iter().partition(|target| WHOLE.contains(&target.name));
        assert_eq!(whole.len(), WHOLE.len());
        let runs = 1000 * sharing.len() as u64;
        assert!(whole.iter().all(|one| runs_of(one, runs, &all) == runs));
        let shares = sharing.iter().map(|one| runs_of(one, runs, &all));
        assert_eq!(shares.sum::<u64>(), runs);
        assert_eq!(runs_of(&all[0], runs, &all[..1]), runs, "alone");
    }
}
