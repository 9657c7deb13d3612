//! Commits in the PostgreSQL of a Debian guest in which pgbench runs, and reports what a client saw. See `--help`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use godwit_testkit::load::commits::{CommitsConfig, run};
use godwit_testkit::load::pace::show;
use godwit_testkit::load::{exit_code, report_of, stop_on_signal};

/// Makes pgbench's tables in the guest and starts pgbench there, finds the most commits of one row that the guest then
/// acknowledges, and sends them at a fixed rate over connections that stay open.
///
/// Prints 'filled SECONDS', 'most OPS', 'running OPS' and then one line a second. Ends at the time limit or on
/// SIGINT/SIGTERM: looks for every acknowledged row, compares pgbench's sums, runs pg_amcheck and pg_dump, and reports. Exit
/// code 1 if a row is missing or anything is damaged.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The guest, such as 10.77.0.10
    guest: IpAddr,
    /// MiB of pgbench's tables, about
    #[arg(long, default_value_t = 75)]
    data_mib: u32,
    /// Connections that stay open
    #[arg(long, default_value_t = 4)]
    connections: u32,
    /// Seconds spent on finding the most the guest can serve
    #[arg(long, default_value_t = 5)]
    probe_seconds: u64,
    /// Fixed rate as a share of the most the guest can serve
    #[arg(long, default_value_t = 0.25)]
    fraction: f64,
    /// Seconds at the fixed rate
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Seconds that a command in the guest may take
    #[arg(long, default_value_t = 300)]
    patience_seconds: u64,
    /// Where to write the report, the 'workload' object of the demo's report
    #[arg(long, short)]
    output: Option<PathBuf>,
}

fn main() -> ExitCode {
    exit_code("godwit-commits", load(&Arguments::parse()))
}

fn load(arguments: &Arguments) -> Result<bool> {
    let config = CommitsConfig {
        guest: arguments.guest,
        data_mib: arguments.data_mib,
        connections: arguments.connections,
        probe: Duration::from_secs(arguments.probe_seconds),
        fraction: arguments.fraction,
        duration: Duration::from_secs(arguments.seconds),
        patience: Duration::from_secs(arguments.patience_seconds),
    };
    let workload = run(&config, stop_on_signal(), show)?;
    report_of(&workload, arguments.output.as_deref())?;
    println!(
        "{} rows acknowledged, {} lost, {} checks failed, {} connections lost",
        workload.keys, workload.lost_writes, workload.errors, workload.connections_lost
    );
    Ok(workload.is_sound())
}
