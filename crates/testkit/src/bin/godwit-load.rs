//! Loads a Redis in a guest and reports what a client saw, second by second. See `--help`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use godwit_testkit::load::pace::show;
use godwit_testkit::load::run::{LoadConfig, run};
use godwit_testkit::load::series::Workload;
use godwit_testkit::load::{exit_code, report_of, stop_on_signal};

/// Fills a Redis with random values, finds the most it can serve, then sends GETs and SETs at a fixed rate over
/// connections that stay open, checking every byte of every answer.
///
/// Prints 'filled SECONDS', 'most OPS', 'running OPS' and then one line a second. Ends at the time limit or on
/// SIGINT/SIGTERM, in both cases with the report. Exit code 1 if an answer was damaged or a write was lost.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The Redis server, such as 10.77.0.10:6379 or [fd77::10]:6379
    address: SocketAddr,
    /// MiB of values
    #[arg(long, default_value_t = 600)]
    data_mib: u64,
    /// Bytes in a value; the default stays just inside one of the allocator's size classes
    #[arg(long, default_value_t = 64 * 1024 - 64)]
    value_bytes: usize,
    /// Connections that stay open
    #[arg(long, default_value_t = 16)]
    connections: usize,
    /// Seconds spent on finding the most the guest can serve
    #[arg(long, default_value_t = 5)]
    probe_seconds: u64,
    /// Fixed rate in operations a second, instead of --fraction
    #[arg(long)]
    rate: Option<f64>,
    /// Fixed rate as a share of the most the guest can serve
    #[arg(long, default_value_t = 0.5)]
    fraction: f64,
    /// Seconds at the fixed rate
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Share of operations that write
    #[arg(long, default_value_t = 0.5)]
    write_share: f64,
    /// Reads every key once at the end
    #[arg(long)]
    verify_all: bool,
    /// Where to write the report, the 'workload' object of the demo's report
    #[arg(long, short)]
    output: Option<PathBuf>,
}

fn main() -> ExitCode {
    exit_code("godwit-load", load(&Arguments::parse()))
}

fn load(arguments: &Arguments) -> Result<bool> {
    let config = LoadConfig {
        address: arguments.address,
        data_mib: arguments.data_mib,
        value_bytes: arguments.value_bytes,
        connections: arguments.connections,
        probe: Duration::from_secs(arguments.probe_seconds),
        rate_ops_per_s: arguments.rate,
        fraction: arguments.fraction,
        duration: Duration::from_secs(arguments.seconds),
        write_share: arguments.write_share,
        verify_all: arguments.verify_all,
    };
    let workload = run(&config, stop_on_signal(), show)?;
    report_of(&workload, arguments.output.as_deref())?;
    println!("{}", summary(&workload));
    Ok(workload.is_sound())
}

fn summary(workload: &Workload) -> String {
    format!(
        "{} reads checked, {} damaged, {} writes lost, {} errors, {} connections lost",
        workload.verified_reads,
        workload.damaged_reads,
        workload.lost_writes,
        workload.errors,
        workload.connections_lost
    )
}
