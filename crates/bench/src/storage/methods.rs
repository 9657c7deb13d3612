//! Our methods beside one another, as the paper that describes them compares its own: passes, and what a write took in which part of a move.
//!
//! Pure: out of rows alone ("The Design and Evolution of Live Storage Migration in VMware ESX", figure 3 and table 2). Refuses nothing: what was not
//! measured is left out.

use super::picture::{Line, Scale, chart};
use super::promises::Group;
use super::row::Row;
use crate::group::{Spread, in_order};
use crate::picture::{Bar, draw};
use crate::table::figures;
use godwit_testkit::page::html::Table;
use serde_json::Value;

/// Passes that are shown of one system.
const PASSES: usize = 12;

/// What each pass of an iterative method copied: the first one goes over the whole disk.
pub fn passes(rows: &[Row]) -> Option<Table> {
    let mut table = Table::new([
        "cell",
        "system",
        "pass",
        "MB copied",
        "s",
        "MB written meanwhile",
        "MB put off",
    ]);
    let mut is_any = false;
    for group in in_order(rows) {
        let row = group.head();
        for pass in 0..PASSES {
            let of = |what: &'static str| {
                told(&group, move |row| {
                    number_of(row, pass, what).map(|bytes| bytes / 1e6)
                })
            };
            if number_spread(&group, pass).is_none() {
                break;
            }
            is_any = true;
            table.row([
                format!("{} {}", row.scenario, row.cell),
                row.method.clone(),
                (pass + 1).to_string(),
                of("copied_bytes"),
                told(&group, |row| number_of(row, pass, "seconds")),
                of("dirty_bytes"),
                of("deferred_bytes"),
            ]);
        }
    }
    is_any.then_some(table)
}

/// How long a write took: nothing moved, in the first pass, and after it, with how many times as long that is.
pub fn write_times(rows: &[Row]) -> Option<Table> {
    let mut table = Table::new([
        "cell",
        "system",
        "nothing moves, ms",
        "first pass, ms",
        "times",
        "passes after it, ms",
        "times",
        "whole move, ms",
        "variance",
        "IOPS before",
        "first pass",
        "passes after it",
        "whole move",
    ]);
    let mut is_any = false;
    for group in in_order(rows) {
        let row = group.head();
        let is_compared = matches!(&*row.scenario, "latency" | "double" | "iterations");
        if !is_compared || spread(&group, |row| row.detail("before_write_mean_ms")).is_none() {
            continue;
        }
        is_any = true;
        let of = |name: &'static str| told(&group, move |row| row.detail(name));
        let times = |name: &'static str| {
            told(&group, move |row| {
                Some(row.detail(name)? / row.detail("before_write_mean_ms")?)
            })
        };
        table.row([
            format!("{} {}", row.scenario, row.cell),
            row.method.clone(),
            of("before_write_mean_ms"),
            of("first_pass_write_mean_ms"),
            times("first_pass_write_mean_ms"),
            of("iterating_write_mean_ms"),
            times("iterating_write_mean_ms"),
            told(&group, |row| row.write_latency_ms),
            told(&group, |row| row.write_latency_variance),
            told(&group, |row| row.iops_before),
            of("first_pass_iops"),
            of("iterating_iops"),
            told(&group, |row| row.iops_during),
        ]);
    }
    is_any.then_some(table)
}

/// How often blocks were written, by rank, as the paper's figure 2 has it.
pub fn ranks(rows: &[Row], scenario: &str) -> Option<(String, String)> {
    let mut lines: Vec<Line> = Vec::new();
    let of_scenario = rows.iter().filter(|row| row.scenario == scenario);
    for row in of_scenario {
        let ranks = row.details.get("write_ranks").and_then(Value::as_array);
        // Each run has the same distribution: the first of a cell is shown.
        if lines.iter().any(|line| line.name == row.cell) {
            continue;
        }
        let points = ranks.into_iter().flatten().filter_map(|pair| {
            let (rank, times) = (pair.get(0)?.as_f64()?, pair.get(1)?.as_f64()?);
            (times >= 1.0).then(|| (rank.log10(), times.log10()))
        });
        let points: Vec<(f64, f64)> = points.collect();
        if !points.is_empty() {
            let class = if lines.is_empty() {
                "godwit-line"
            } else {
                "qemu-line"
            };
            let (name, marks) = (row.cell.clone(), Vec::new());
            lines.push(Line {
                name,
                class,
                points,
                marks,
            });
        }
    }
    let title = format!("{scenario}: how often a block of 64 KiB was written, by its rank");
    (!lines.is_empty()).then(|| {
        (
            format!("storage-{scenario}-ranks.svg"),
            chart(&title, "rank of the block", &lines, Scale::Logarithmic),
        )
    })
}

/// What the passes after the first one copied, as the paper's figure 3 has it.
pub fn picture(rows: &[Row], scenario: &str) -> Option<(String, String)> {
    let of_scenario: Vec<Row> = rows
        .iter()
        .filter(|row| row.scenario == scenario)
        .cloned()
        .collect();
    let mut bars = Vec::new();
    for group in in_order(&of_scenario) {
        let row = group.head();
        for pass in 1..PASSES {
            let Some(spread) = number_spread(&group, pass) else {
                break;
            };
            bars.push(Bar {
                label: format!("{}: {}, pass {}", row.cell, row.method, pass + 1),
                class: "godwit",
                spread: Some(spread),
                note: String::new(),
            });
        }
    }
    let title = format!("{scenario}: MB copied by the passes after the first one");
    (!bars.is_empty()).then(|| {
        (
            format!("storage-{scenario}-passes.svg"),
            draw(&title, &bars),
        )
    })
}

fn number_spread(group: &Group, pass: usize) -> Option<Spread> {
    spread(group, |row| {
        number_of(row, pass, "copied_bytes").map(|bytes| bytes / 1e6)
    })
}

fn number_of(row: &Row, pass: usize, what: &str) -> Option<f64> {
    let passes = row.details.get("iterations").and_then(Value::as_array)?;
    passes.get(pass)?.get(what)?.as_f64()
}

/// Passes of a move that was given up count, too.
fn spread(group: &Group, number: impl Fn(&Row) -> Option<f64>) -> Option<Spread> {
    let numbers = group.rows.iter().filter_map(|row| number(row));
    Spread::of(&numbers.collect::<Vec<_>>())
}

fn told(group: &Group, number: impl Fn(&Row) -> Option<f64>) -> String {
    spread(group, number).map_or("-".into(), figures)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(method: &str, passes: &Value) -> Row {
        Row {
            scenario: "iterations".into(),
            cell: "with locality".into(),
            system: "godwit".into(),
            method: method.into(),
            write_latency_ms: Some(3.0),
            outcome: "completed".into(),
            details: json!({
                "iterations": passes, "before_write_mean_ms": 2.0, "first_pass_write_mean_ms": 3.0,
                "iterating_write_mean_ms": 8.0,
            }),
            ..Row::default()
        }
    }

    #[test]
    fn each_pass_is_told_and_what_it_cost_the_writes() {
        let pass = |copied: u64| json!({"copied_bytes": copied, "seconds": 1.5, "dirty_bytes": 2_000_000, "deferred_bytes": 0});
        let rows = [row(
            "dirty-tracking",
            &json!([pass(10_000_000), pass(4_000_000)]),
        )];
        let text = passes(&rows).unwrap().markdown();
        assert!(text.contains("| 2 | 4.00 | 1.50 |"), "{text}");
        let text = write_times(&rows).unwrap().markdown();
        assert!(text.contains("| 1.50 | 8.00 | 4.00 |"), "{text}");
        let (name, svg) = picture(&rows, "iterations").unwrap();
        assert_eq!(name, "storage-iterations-passes.svg");
        assert!(svg.contains("pass 2") && !svg.contains("pass 1<"), "{svg}");
        assert!(ranks(&rows, "iterations").is_none());
        let none = [row("mirror", &Value::Null)];
        assert!(passes(&none).is_none() && picture(&none, "iterations").is_none());
    }

    #[test]
    fn how_often_blocks_were_written_is_a_line_for_each_cell() {
        let row = |cell: &str| Row {
            scenario: "iterations".into(),
            cell: cell.into(),
            details: json!({"write_ranks": [[1, 1000], [2, 100], [4, 0]]}),
            ..Row::default()
        };
        let rows = [row("with locality"), row("with locality"), row("without")];
        let (name, svg) = ranks(&rows, "iterations").unwrap();
        assert_eq!(name, "storage-iterations-ranks.svg");
        // Two points a line, and its name's stroke: what was never written has no logarithm.
        assert_eq!(svg.matches("<path").count(), 4, "{svg}");
        assert!(
            svg.contains(">1,000<") && svg.contains(">without<"),
            "{svg}"
        );
    }
}
