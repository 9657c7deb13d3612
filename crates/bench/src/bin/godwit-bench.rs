//! The bench's command line. See `--help`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use godwit_bench::bench::Bench;
use godwit_bench::deltas::command as deltas;
use godwit_bench::plan::{self, Cell, Choice};
use godwit_bench::row::{Measured as _, Results, Row};
use godwit_bench::stage::{begin, programs};
use godwit_bench::storage::command as storage;
use godwit_bench::{estimate, machine, picture, table};
use godwit_testkit::guest::linux::target_dir;
use godwit_testkit::interrupt;

/// Measures Godwit and QEMU's own migration in the same run, on the same guests, between two test hosts on this machine.
#[derive(Parser)]
#[command(name = "godwit-bench", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Moves of memory: run the plan, write memory.json, memory.html and memory.md
    Memory(Memory),
    /// Moves of disks: run the plan, write storage.json, storage.html and storage.md
    Storage(storage::Storage),
    /// Disks over one common image: write deltas.json and deltas.md
    Deltas(deltas::Deltas),
    /// Make the HTML page and the table of a memory.json or storage.json anew
    Report {
        /// What a bench wrote
        results: PathBuf,
        /// Where they go; beside the file when left out
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// Write the pictures of a memory.json or storage.json as SVG files
    Picture {
        /// What a bench wrote
        results: PathBuf,
        /// Directory for them
        #[arg(long)]
        out: PathBuf,
    },
    /// Write what a storage.json has beside the figures of the paper on live storage migration into a page, between its two marks
    Paper {
        /// What a bench of disks wrote
        results: PathBuf,
        /// What is written anew between its marks
        #[arg(long, default_value = "docs/storage-paper.md")]
        page: PathBuf,
        /// Directory for its pictures, beside the page
        #[arg(long, default_value = "docs/pictures")]
        pictures: PathBuf,
    },
}

#[derive(Args)]
struct Memory {
    /// Only this scenario (--plan lists them); may be given several times
    #[arg(long)]
    scenario: Vec<String>,
    /// One small cell each of idle, zero, redis, hot and distance
    #[arg(long)]
    quick: bool,
    /// So many runs of everything
    #[arg(long)]
    runs: Option<u32>,
    /// Only cells of this name, or beginning so where none has it (--plan lists them); may be given several times
    #[arg(long, value_name = "NAME")]
    cell: Vec<String>,
    /// Only systems with this in "system config encryption destination"; may be given several times
    #[arg(long, value_name = "TEXT")]
    system: Vec<String>,
    /// Go on with the memory.json that is there: its rows stay, and runs that it has are not done again
    #[arg(long)]
    add: bool,
    /// With --add: do the chosen runs again, in place of what is there of them
    #[arg(long, requires = "add")]
    again: bool,
    /// Where results go; bench below the target directory when left out
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print what would run and about how long it takes, and run nothing
    #[arg(long)]
    plan: bool,
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) if interrupt::caught() => {
            eprintln!("bench: interrupted; what was measured is kept, what was started is ended");
            ExitCode::from(130)
        }
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<()> {
    match arguments.command {
        Command::Memory(memory) => bench(&memory),
        Command::Storage(arguments) => storage::run(&arguments),
        Command::Deltas(arguments) => deltas::run(&arguments),
        Command::Report { results, out } => {
            let beside = results.parent().unwrap_or(Path::new(".")).to_owned();
            let out = out.unwrap_or(beside);
            match is_of_disks(&results) {
                true => storage::report(&Results::read(&results)?, &out),
                false => report(&Results::read(&results)?, &out),
            }
        }
        Command::Picture { results, out } => {
            std::fs::create_dir_all(&out)?;
            let files = match is_of_disks(&results) {
                true => storage::pictures(&Results::read(&results)?),
                false => picture::files(&Results::read(&results)?),
            };
            for (name, svg) in files {
                let path = out.join(name);
                std::fs::write(&path, svg)
                    .with_context(|| format!("cannot write {}", path.display()))?;
                println!("{}", path.display());
            }
            Ok(())
        }
        Command::Paper {
            results,
            page,
            pictures,
        } => storage::write_page(&Results::read(&results)?, &page, &pictures),
    }
}

fn is_of_disks(results: &Path) -> bool {
    let name = results.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with("storage"))
}

fn bench(arguments: &Memory) -> Result<()> {
    let choice = Choice {
        scenarios: arguments.scenario.clone(),
        quick: arguments.quick,
        runs: arguments.runs,
        cells: arguments.cell.clone(),
        systems: arguments.system.clone(),
    };
    let cells = plan::cells(&choice).map_err(anyhow::Error::msg)?;
    if arguments.plan {
        print_plan(&cells);
        return Ok(());
    }
    let out = begin(arguments.out.as_deref())?;
    let (target, bin) = (target_dir()?, programs()?);
    let ten = target.join("peers/qemu-10.0/qemu-system-x86_64");
    let mut about = machine::describe(&bin, ten.exists().then_some(ten.as_path()));
    println!("touching all free memory once");
    about["warm_up"] = machine::warm_up()?;
    let rows = if arguments.add {
        earlier(&out.join("memory.json"), &cells, arguments.again)?
    } else {
        Vec::new()
    };
    let results = Results {
        machine: about,
        rows,
    };
    let results = Bench::new(&bin, &out, &target, results)?.run(&cells)?;
    report(&results, &out)
}

/// The rows of an earlier bench, without those that are to be made again.
fn earlier(path: &Path, cells: &[Cell], again: bool) -> Result<Vec<Row>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let mut rows = Results::<Row>::read(path)?.rows;
    let chosen = |row: &Row| {
        cells.iter().any(|cell| {
            let mut systems = cell.systems.iter();
            systems.any(|system| cell.row(system, 0).is_like(row))
        })
    };
    rows.retain(|row| !again || !chosen(row));
    Ok(rows)
}

fn print_plan(cells: &[Cell]) {
    for cell in cells {
        println!(
            "{:<9} {:<26} {:>5} MiB {} vCPU  {} runs of {:>2} systems  about {:>5.0} s",
            cell.scenario,
            cell.name,
            cell.ram_mib,
            cell.vcpus,
            cell.runs,
            cell.systems.len(),
            estimate::cell_s(cell)
        );
    }
    println!(
        "all of it: about {:.0} minutes",
        estimate::estimate_s(cells) / 60.0
    );
}

fn report(results: &Results, out: &Path) -> Result<()> {
    let markdown = table::markdown(results);
    std::fs::write(out.join("memory.html"), table::html(results))?;
    std::fs::write(out.join("memory.md"), &markdown)?;
    println!(
        "\n{markdown}\nresults: {0}/memory.json, {0}/memory.html, {0}/memory.md",
        out.display()
    );
    Ok(())
}
