//! Breaks the whole product at random for a time and looks at it from outside. See `godwit_e2e::soak`.
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use clap::Parser;
use godwit_e2e::soak::plan::{FAULTS, choose};
use godwit_e2e::soak::{self, Options};
use godwit_testkit::interrupt;
use std::process::ExitCode;
use std::time::Duration;

#[derive(Parser)]
#[command(
    about = "Breaks hosts, controller and VMs at random and checks from outside that no VM runs twice or is lost; needs root",
    version
)]
struct Arguments {
    /// For how long
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: u64,
    /// At most so many rounds
    #[arg(long)]
    rounds: Option<u32>,
    /// What the rounds come from; a random one when left out
    #[arg(long)]
    seed: Option<u64>,
    /// Number of the first round, to see one round of a seed again
    #[arg(long, default_value_t = 1)]
    first: u32,
    /// Number of VMs
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=6))]
    vms: u8,
    /// Only these faults, by name or group, with commas between
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Not these faults, by name or group; 'all' leaves moves alone
    #[arg(long, value_delimiter = ',')]
    without: Vec<String>,
    /// Count a VM that a person's false word ran twice as a violation, to see that the soak finds one
    #[arg(long, hide = true)]
    unforgiving: bool,
    /// Print the table of faults and end
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("godwit-soak: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<u64> {
    if arguments.list {
        println!("{:<18}{:<12}weight", "fault", "group");
        FAULTS
            .iter()
            .for_each(|one| println!("{:<18}{:<12}{:>6}", one.name, one.group, one.weight));
        return Ok(0);
    }
    let faults = choose(&arguments.only, &arguments.without).map_err(anyhow::Error::msg)?;
    ensure!(
        rustix::process::geteuid().is_root(),
        "network namespaces and virtual machines need root: run it as root"
    );
    interrupt::catch();
    let seed = arguments.seed.map_or_else(random, Ok)?;
    println!(
        "seed {seed}, {} minutes, {} VMs on 3 hosts",
        arguments.minutes, arguments.vms
    );
    let report = soak::run(&Options {
        time: Duration::from_secs(arguments.minutes * 60),
        rounds: arguments.rounds,
        seed,
        first: arguments.first,
        vms: arguments.vms.into(),
        faults,
        forgives: !arguments.unforgiving,
    })?;
    println!("{}", report.text());
    Ok(report.violations())
}

fn random() -> Result<u64> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes).map_err(|error| anyhow::anyhow!("{error}"))?;
    Ok(u32::from_le_bytes(bytes).into())
}
