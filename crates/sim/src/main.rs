//! `godwit-sim`: runs seeds, replays one, or shows that planted faults are caught.
//!
//! Exit code 0 if every seed kept every invariant, 1 if one did not (with the command that replays it), 2 for
//! a wrong command line.
#![forbid(unsafe_code)]

use godwit_sim::site::{SiteCoverage, SiteOptions, run_site_seed};
use godwit_sim::{Coverage, Fault, Options, run_seed};
use std::process::ExitCode;

const USAGE: &str = "usage: godwit-sim [--site [--keep-going]] [--seeds N] [--from SEED] [--seed SEED [--trace]] [--plant NAME] [--plants] [--pairs] [--table]";

/// So many seeds of whole sites reach every case of disks.
const ENOUGH: u64 = 10_000;

#[derive(Debug, Default)]
struct Arguments {
    from: u64,
    seeds: u64,
    options: Options,
    site: bool,
    keeps_going: bool,
    site_options: SiteOptions,
    list_plants: bool,
    list_pairs: bool,
    table: bool,
}

fn main() -> ExitCode {
    match parse(std::env::args().skip(1)) {
        Ok(arguments) if arguments.list_plants => list_plants(arguments.site),
        Ok(arguments) if arguments.table && !arguments.site => print_table(),
        Ok(arguments) if arguments.site => run_site(&arguments),
        Ok(arguments) => run(&arguments),
        Err(what) => {
            eprintln!("godwit-sim: {what}\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut arguments = Arguments {
        seeds: 1000,
        ..Arguments::default()
    };
    while let Some(word) = words.next() {
        match word.as_str() {
            "--seeds" => arguments.seeds = number(&word, words.next())?,
            "--from" => arguments.from = number(&word, words.next())?,
            "--seed" => {
                arguments.from = number(&word, words.next())?;
                arguments.seeds = 1;
            }
            "--site" => arguments.site = true,
            "--keep-going" => arguments.keeps_going = true,
            "--trace" => {
                arguments.options.trace = true;
                arguments.site_options.trace = true;
            }
            "--plant" => plant(&mut arguments, words.next())?,
            "--plants" => arguments.list_plants = true,
            "--pairs" => arguments.list_pairs = true,
            "--table" => arguments.table = true,
            other => return Err(format!("unknown argument '{other}'")),
        }
    }
    Ok(arguments)
}

fn number(option: &str, word: Option<String>) -> Result<u64, String> {
    let word = word.ok_or_else(|| format!("{option} needs a number"))?;
    word.parse()
        .map_err(|_| format!("{option} needs a number, not '{word}'"))
}

/// Plants a fault of the cores, one of the site's rules, or one of what hosts do with disks.
#[cfg(feature = "planted-faults")]
fn plant(arguments: &mut Arguments, word: Option<String>) -> Result<(), String> {
    let name = word.ok_or("--plant needs a name")?;
    let core = godwit_ownership::plant::Plant::from_name(&name);
    let site = godwit_site::plant::Plant::from_name(&name);
    let disk = godwit_sim::site::DiskPlant::from_name(&name);
    if core.is_none() && site.is_none() && disk.is_none() {
        return Err(format!("no planted fault is called '{name}': see --plants"));
    }
    arguments.options.plant = core;
    arguments.site_options.plant = godwit_sim::site::SitePlant { site, core, disk };
    Ok(())
}

#[cfg(not(feature = "planted-faults"))]
fn plant(_arguments: &mut Arguments, _word: Option<String>) -> Result<(), String> {
    Err("this build has no planted faults: build with --features planted-faults".to_owned())
}

#[cfg(feature = "planted-faults")]
fn list_plants(site: bool) -> ExitCode {
    if site {
        for plant in godwit_site::plant::Plant::by_simulator() {
            println!("{}", plant.name());
        }
        for plant in godwit_sim::site::DiskPlant::ALL {
            println!("{}", plant.name());
        }
        return ExitCode::SUCCESS;
    }
    for plant in godwit_ownership::plant::Plant::by_simulator() {
        println!("{}", plant.name());
    }
    ExitCode::SUCCESS
}

#[cfg(not(feature = "planted-faults"))]
fn list_plants(_site: bool) -> ExitCode {
    eprintln!("godwit-sim: this build has no planted faults: build with --features planted-faults");
    ExitCode::from(2)
}

/// Every state of the core with every event.
fn print_table() -> ExitCode {
    println!("{:<15} {:<20} {:<15} outcome", "state", "event", "next");
    for cell in godwit_ownership::transition_table() {
        let (state, event, next) = (cell.state.name(), cell.event.name(), cell.next.name());
        println!("{state:<15} {event:<20} {next:<15} {}", cell.outcome);
    }
    ExitCode::SUCCESS
}

fn run(arguments: &Arguments) -> ExitCode {
    let mut coverage = Coverage::default();
    let mut hash = 0u64;
    for seed in arguments.from..arguments.from.saturating_add(arguments.seeds) {
        let outcome = run_seed(seed, arguments.options);
        for line in &outcome.trace {
            println!("{line}");
        }
        if let Some(what) = outcome.violation {
            println!("seed {seed}: {what}\nreplay: godwit-sim --seed {seed} --trace");
            return ExitCode::FAILURE;
        }
        coverage.add(&outcome.coverage);
        hash = hash.rotate_left(5) ^ outcome.fingerprint;
    }
    print_coverage(&coverage, arguments.list_pairs);
    println!(
        "{} seeds, no invariant broken, hash {hash:016x}",
        arguments.seeds
    );
    ExitCode::SUCCESS
}

fn run_site(arguments: &Arguments) -> ExitCode {
    let mut coverage = SiteCoverage::default();
    let (mut hash, mut broken) = (0u64, 0);
    for seed in arguments.from..arguments.from.saturating_add(arguments.seeds) {
        let outcome = run_site_seed(seed, arguments.site_options);
        for line in &outcome.trace {
            println!("{line}");
        }
        if let Some(what) = outcome.violation {
            println!("seed {seed}: {what}\nreplay: godwit-sim --site --seed {seed} --trace");
            if !arguments.keeps_going {
                return ExitCode::FAILURE;
            }
            broken += 1;
        }
        coverage.add(&outcome.coverage);
        hash = hash.rotate_left(5) ^ outcome.fingerprint;
    }
    for line in coverage.lines() {
        println!("{line}");
    }
    if arguments.table {
        for line in coverage.table() {
            println!("{line}");
        }
    }
    if broken > 0 {
        println!("{broken} of {} seeds broke an invariant", arguments.seeds);
        return ExitCode::FAILURE;
    }
    let missing = coverage.missing();
    if arguments.seeds >= ENOUGH && !missing.is_empty() {
        for case in missing {
            println!("never reached: {}", case.name());
        }
        return ExitCode::FAILURE;
    }
    println!(
        "{} seeds of whole sites, no invariant broken, hash {hash:016x}",
        arguments.seeds
    );
    ExitCode::SUCCESS
}

fn print_coverage(coverage: &Coverage, list_pairs: bool) {
    for fault in Fault::ALL {
        let times = coverage.faults.get(fault).copied().unwrap_or(0);
        println!("{times:>10}  {}", fault.name());
    }
    let [begun, completed, refused, failed] = coverage.migrations;
    println!(
        "{begun:>10}  migrations begun: {completed} completed, {refused} taken back after a refusal, {failed} failed or cancelled"
    );
    println!("{:>10}  times in doubt", coverage.doubts);
    println!("{:>10}  steps", coverage.steps);
    println!(
        "{:>10}  pairs of state and event reached, {} not",
        coverage.pairs.len(),
        coverage.missing().len()
    );
    if list_pairs {
        for ((state, event), times) in &coverage.pairs {
            println!("{times:>10}  {} + {event}", state.name());
        }
        for (state, event) in coverage.missing() {
            println!("{:>10}  {} + {event}", 0, state.name());
        }
    }
}
