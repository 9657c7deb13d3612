//! Measures for how long a guest could not be reached. See `--help`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use godwit_testkit::load::ping::{PingConfig, run};
use godwit_testkit::load::stop_on_signal;

/// Pings a guest every millisecond and reports the longest time without an answer, as JSON.
///
/// Ends at the time limit or on SIGINT/SIGTERM, in both cases with the report. Needs root.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The guest's IPv4 or IPv6 address
    address: IpAddr,
    /// Microseconds between requests
    #[arg(long, default_value_t = 1000)]
    interval_us: u64,
    /// Seconds to run
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// List every gap of at least this many milliseconds
    #[arg(long, default_value_t = 20)]
    list_gaps_ms: u64,
    /// Where to write the report; standard output if not given
    #[arg(long, short)]
    output: Option<PathBuf>,
}

fn main() -> ExitCode {
    match ping(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("godwit-ping: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn ping(arguments: &Arguments) -> Result<()> {
    let config = PingConfig {
        address: arguments.address,
        interval: Duration::from_micros(arguments.interval_us),
        duration: Duration::from_secs(arguments.seconds),
        list_gaps_from: Duration::from_millis(arguments.list_gaps_ms),
    };
    let report = run(&config, stop_on_signal())
        .with_context(|| format!("cannot ping {}", config.address))?;
    let text = serde_json::to_string_pretty(&report)?;
    match &arguments.output {
        Some(path) => {
            std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
        }
        None => {
            println!("{text}");
            Ok(())
        }
    }
}
