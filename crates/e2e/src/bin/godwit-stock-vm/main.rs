//! Two whole Debians in emulated machines, each with a kernel and a KVM of its own: the package, and a Linux guest under KVM
//! that moves between them. See `--help`.
//!
//! Owns the machines and their directory, and the list of what was shown. Modules: the machines and what is asked of them, what
//! they find on their second disk, the rows of the list, what follows when a machine breaks. Refuses nothing quietly: what could not be shown is in the list,
//! with why, also when the time is over.

mod payload;
mod rows;
mod site;
mod stage;

use anyhow::Result;
use clap::Parser;
use rows::{ROWS, Row};
use stage::Stage;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Boots Debian 12 and Debian 13 in emulated machines and shows that a KVM guest moves between their kernels.
///
/// Needs the images of scripts/debian-images.sh machines and the package of scripts/deb.sh. Prints a list: what was shown and
/// what was not. No time from here says anything about real hardware.
#[derive(Parser)]
struct Arguments {
    /// The package
    #[arg(long)]
    package: PathBuf,
    /// Image directory of the first machine, then of the second
    #[arg(long, num_args = 1.., required = true)]
    image: Vec<PathBuf>,
    /// The emulator of the machines
    #[arg(long, default_value = "qemu-system-x86_64")]
    qemu: PathBuf,
    /// A thread of the emulator for each vCPU of a machine
    #[arg(long)]
    threads: bool,
    /// Memory of each machine, MiB
    #[arg(long, default_value_t = 2560)]
    memory_mib: u32,
    /// CPU model in the VM's description; the README's unless given
    #[arg(long)]
    cpu: Option<String>,
    /// Nothing is asked of the machines after so many seconds; what is missing then is told
    #[arg(long, default_value_t = 1740)]
    limit_s: u64,
    /// Show these rows only, by name
    #[arg(long, num_args = 1.., value_name = "ROW")]
    only: Vec<String>,
    /// Leave the machines on
    #[arg(long)]
    keep: bool,
    /// Go on with the machines that were left on
    #[arg(long, conflicts_with = "keep")]
    attach: bool,
    /// List the rows and end
    #[arg(long)]
    list: bool,
}

/// What has become of a row.
enum Shown {
    Yes(String),
    No(String),
    /// Nobody tried, for this reason.
    Untried(&'static str),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.list {
        for row in &ROWS {
            println!("{:<14} {}", row.name, row.what);
        }
        return ExitCode::SUCCESS;
    }
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("godwit-stock-vm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    let began = Instant::now();
    let ends = began + Duration::from_secs(arguments.limit_s);
    for name in &arguments.only {
        anyhow::ensure!(
            ROWS.iter().any(|row| row.name == name),
            "no row is named '{name}', see --list"
        );
    }
    let mut stage = Stage::new(arguments, ends);
    let list: Vec<(&Row, Shown)> = ROWS
        .iter()
        .map(|row| {
            let shown = stage.try_row(row);
            let at = began.elapsed().as_secs();
            println!("[{at:>4} s] {}", line(row, &shown));
            (row, shown)
        })
        .collect();
    println!(
        "\nWhat was shown, under KVM on an emulated CPU (no time from here says anything of real hardware):"
    );
    for (row, shown) in &list {
        println!("{}", line(row, shown));
    }
    let count = |is: fn(&Shown) -> bool| list.iter().filter(|(_, shown)| is(shown)).count();
    let (yes, no) = (
        count(|shown| matches!(shown, Shown::Yes(_))),
        count(|shown| matches!(shown, Shown::No(_))),
    );
    for broken in &stage.broken {
        println!(
            "emulator   {broken}; both machines were switched on anew, and the row was tried again"
        );
    }
    println!(
        "{yes} of {} shown, {no} not shown, {} not tried; {} s",
        list.len(),
        list.len() - yes - no,
        began.elapsed().as_secs()
    );
    Ok(yes == list.len())
}

fn line(row: &Row, shown: &Shown) -> String {
    match shown {
        Shown::Yes(note) if note.is_empty() => format!("shown      {}", row.what),
        Shown::Yes(note) => format!("shown      {} ({note})", row.what),
        Shown::No(why) => format!("NOT SHOWN  {}: {why}", row.what),
        Shown::Untried(why) => format!("not tried  {}: {why}", row.what),
    }
}
