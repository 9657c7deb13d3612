//! `godwit-bench deltas`: runs the cells, writes rows and the table.
//!
//! Owns nothing. Refuses to run without root, as every bench.

use super::plan;
use super::row::Results;
use super::run::Bench;
use super::table;
use crate::machine;
use crate::stage::{begin, programs};
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;

/// The file of the rows.
pub const RESULTS: &str = "deltas.json";
const RUNS: u32 = 3;

#[derive(Args)]
pub struct Deltas {
    /// So many runs of everything
    #[arg(long, default_value_t = RUNS)]
    runs: u32,
    /// Only cells whose name begins so (--plan lists them); may be given several times
    #[arg(long, value_name = "NAME")]
    cell: Vec<String>,
    /// Only systems with this in their name; may be given several times
    #[arg(long, value_name = "TEXT")]
    system: Vec<String>,
    /// Where results go; bench below the target directory when left out
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print what would run, and run nothing
    #[arg(long)]
    plan: bool,
}

pub fn run(arguments: &Deltas) -> Result<()> {
    let chosen = plan::chosen(&arguments.cell, &arguments.system);
    let (cells, systems) = chosen.map_err(anyhow::Error::msg)?;
    if arguments.plan {
        for cell in &cells {
            let names: Vec<_> = systems.iter().map(|system| system.name()).collect();
            println!("{:<20} {}", cell.name(), names.join(", "));
        }
        return Ok(());
    }
    let out = begin(arguments.out.as_deref())?;
    let bin = programs()?;
    let results = Results {
        machine: machine::describe_for_disks(&bin),
        rows: Vec::new(),
    };
    let results = Bench::new(bin, out.clone(), results).run(&cells, &systems, arguments.runs)?;
    let markdown = table::markdown(&results);
    std::fs::write(out.join("deltas.md"), &markdown)?;
    println!(
        "\n{markdown}\nresults: {0}/deltas.json, {0}/deltas.md",
        out.display()
    );
    Ok(())
}
