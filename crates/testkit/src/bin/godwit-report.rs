//! Puts the demo's report together and makes a page of it. See `--help`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use godwit_testkit::report::{Guest, Made, Migration, Report, WallWindow, compose, html};
use serde::de::DeserializeOwned;

#[derive(Parser)]
#[command(
    about = "The demo's report: JSON from its parts, and one self-contained page",
    version
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Puts report.json together
    Compose(Box<ComposeArguments>),
    /// Makes a page of report.json
    Html {
        /// The report
        report: PathBuf,
        /// Where to write the page
        #[arg(long, short)]
        output: PathBuf,
    },
}

#[derive(clap::Args)]
struct ComposeArguments {
    /// What ran the guest: kvm or tcg
    #[arg(long)]
    accelerator: String,
    /// The guest's memory
    #[arg(long)]
    ram_mib: u64,
    /// The guest's processors
    #[arg(long, default_value_t = 1)]
    vcpus: u32,
    /// Report of godwit-load
    #[arg(long)]
    workload: PathBuf,
    /// Report of godwit-ping over the whole run
    #[arg(long)]
    ping: Option<PathBuf>,
    /// A migration as 'godwit migration show ID --json' gives it; repeat in order
    #[arg(long = "migration", required = true)]
    migrations: Vec<PathBuf>,
    /// When that migration ran: FROM-TO in milliseconds since 1970; repeat in the same order
    #[arg(long = "window", required = true, value_parser = window)]
    windows: Vec<WallWindow>,
    /// How far the guest's clock fell behind in that migration, for all or none of them, in the same order
    #[arg(long = "clock-lag-ms", allow_negative_numbers = true)]
    clock_lags_ms: Vec<f64>,
    /// Godwit's version
    #[arg(long, default_value = env!("CARGO_PKG_VERSION"))]
    godwit: String,
    /// QEMU's version
    #[arg(long, default_value = "")]
    qemu: String,
    /// The command that made the run
    #[arg(long, default_value = "")]
    made_by: String,
    /// Fresh memory that a thread touched per second, GB/s
    #[arg(long)]
    first_touch: Option<f64>,
    /// Every value that the load wrote to guest memory was read back and found equal
    #[arg(long)]
    ram_verified: bool,
    /// Where to write report.json
    #[arg(long, short)]
    output: PathBuf,
}

fn window(text: &str) -> Result<WallWindow, String> {
    let both = text
        .split_once('-')
        .and_then(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)));
    match both {
        Some((from_unix_ms, to_unix_ms)) if from_unix_ms <= to_unix_ms => Ok(WallWindow {
            from_unix_ms,
            to_unix_ms,
        }),
        _ => Err(
            "give FROM-TO in milliseconds since 1970, such as 1700000000000-1700000009500".into(),
        ),
    }
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Compose(arguments) => compose_report(&arguments),
        Command::Html { report, output } => {
            read(&report).and_then(|report| write(&output, html::page(&report)))
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("godwit-report: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn compose_report(arguments: &ComposeArguments) -> Result<()> {
    ensure!(
        arguments.migrations.len() == arguments.windows.len(),
        "give one --window for each --migration"
    );
    let guest = Guest {
        accelerator: arguments.accelerator.clone(),
        ram_mib: arguments.ram_mib,
        vcpus: arguments.vcpus,
        dirty_mib_per_s: 0.0,
    };
    let mut migrations = arguments
        .migrations
        .iter()
        .map(|path| read(path))
        .collect::<Result<Vec<Migration>>>()?;
    let lags = &arguments.clock_lags_ms;
    ensure!(
        lags.is_empty() || lags.len() == migrations.len(),
        "give one --clock-lag-ms for each --migration, or none"
    );
    for (migration, lag) in migrations.iter_mut().zip(lags) {
        migration.guest_clock_lag_ms = Some(*lag);
    }
    let (workload, ram_verified) = (read(&arguments.workload)?, arguments.ram_verified);
    let ping = arguments.ping.as_deref().map(read).transpose()?;
    let report = Report {
        schema: 1,
        guest,
        migrations,
        workload,
        ram_verified,
        made: Made {
            godwit: arguments.godwit.clone(),
            qemu: arguments.qemu.clone(),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_owned(),
            command: arguments.made_by.clone(),
            first_touch_gb_per_s: arguments.first_touch,
        },
    };
    let report = compose(report, &arguments.windows, ping.as_ref());
    write(
        &arguments.output,
        serde_json::to_string_pretty(&report)? + "\n",
    )
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text)
        .with_context(|| format!("{} is not what it should be", path.display()))
}

fn write(path: &Path, text: String) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
