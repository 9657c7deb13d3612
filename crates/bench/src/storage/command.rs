//! `godwit-bench storage` runs the plan and writes rows, page, tables and pictures; `godwit-bench paper` writes the page beside the paper.
//!
//! Owns nothing. Refuses to run without root, which namespaces and volumes need.

use super::plan::{self, Cell, Choice, Set};
use super::row::Results;
use super::run::Bench;
use super::{paper, picture, server, table};
use crate::machine;
use crate::stage::{begin, programs};
use anyhow::{Context as _, Result, anyhow};
use clap::Args;
use std::path::{Path, PathBuf};

/// The file of the rows.
pub const RESULTS: &str = "storage.json";

#[derive(Args)]
pub struct Storage {
    /// Only this scenario (--plan lists them); may be given several times
    #[arg(long)]
    scenario: Vec<String>,
    /// A small cell each of oio, slow-destination, steady and local
    #[arg(long)]
    quick: bool,
    /// What docs/storage-paper.md needs most, each of our methods in turn: under 30 minutes
    #[arg(long, conflicts_with = "quick")]
    paper: bool,
    /// So many runs of everything
    #[arg(long)]
    runs: Option<u32>,
    /// Only cells whose name begins so (--plan lists them); may be given several times
    #[arg(long, value_name = "NAME")]
    cell: Vec<String>,
    /// Only systems with this in "system method"; may be given several times
    #[arg(long, value_name = "TEXT")]
    system: Vec<String>,
    /// Keep the rows of the storage.json that is there, and add these
    #[arg(long)]
    add: bool,
    /// Where results go; bench below the target directory when left out
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print what would run and about how long it takes, and run nothing
    #[arg(long)]
    plan: bool,
}

pub fn run(arguments: &Storage) -> Result<()> {
    let choice = Choice {
        scenarios: arguments.scenario.clone(),
        set: match (arguments.quick, arguments.paper) {
            (true, _) => Set::Quick,
            (_, true) => Set::Paper,
            _ => Set::Whole,
        },
        runs: arguments.runs,
        cells: arguments.cell.clone(),
        systems: arguments.system.clone(),
        without_ten: !server::ten()?.exists(),
    };
    let cells = plan::cells(&choice).map_err(anyhow::Error::msg)?;
    if arguments.plan {
        print_plan(&cells);
        return Ok(());
    }
    let out = begin(arguments.out.as_deref())?;
    let bin = programs()?;
    let mut results = match arguments.add && out.join(RESULTS).exists() {
        true => Results::read(&out.join(RESULTS))?,
        false => Results::default(),
    };
    results.machine = machine::describe_for_disks(&bin);
    if choice.without_ten {
        println!("without QEMU 10.0, which scripts/fetch-qemu10.sh fetches");
    }
    let results = Bench::new(bin, out.clone(), results)?.run(&cells)?;
    report(&results, &out)
}

fn print_plan(cells: &[Cell]) {
    for cell in cells {
        println!(
            "{:<16} {:<22} {:>5} MiB  {} runs of {} systems  about {:>4.0} s",
            cell.scenario,
            cell.name,
            cell.disk_mib,
            cell.runs,
            cell.systems.len(),
            cell.cell_s()
        );
    }
    let minutes = plan::estimate_s(cells) / 60.0;
    println!("all of it: about {minutes:.0} minutes");
}

/// Writes page and tables.
pub fn report(results: &Results, out: &Path) -> Result<()> {
    let markdown = table::markdown(results);
    std::fs::write(out.join("storage.html"), table::html(results))?;
    std::fs::write(out.join("storage.md"), &markdown)?;
    println!(
        "\n{markdown}\nresults: {0}/storage.json, {0}/storage.html, {0}/storage.md",
        out.display()
    );
    Ok(())
}

/// Writes what was measured into the page beside the paper, and its pictures.
pub fn write_page(results: &Results, page: &Path, pictures: &Path) -> Result<()> {
    let at = pictures.file_name().and_then(|name| name.to_str());
    let before =
        std::fs::read_to_string(page).with_context(|| format!("cannot read {}", page.display()))?;
    let (text, files) = paper::page(&before, results, at.unwrap_or("pictures"))
        .map_err(|why| anyhow!("{}: {why}", page.display()))?;
    std::fs::create_dir_all(pictures)?;
    for (name, svg) in files {
        let path = pictures.join(name);
        std::fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))?;
        println!("{}", path.display());
    }
    std::fs::write(page, text).with_context(|| format!("cannot write {}", page.display()))?;
    println!("{}", page.display());
    Ok(())
}

/// The pictures' names and documents.
pub fn pictures(results: &Results) -> Vec<(String, String)> {
    picture::files(results)
}
