//! The table of such a bench, in Markdown: medians of the runs of each system in each cell.
//!
//! Pure. Refuses nothing: what has no number has a dash.

use super::row::{Results, Row};
use crate::group::median;
use std::fmt::Write as _;

const HEAD: &str = "| cell | system | runs | IOPS | write median ms | p99 ms | CPU us/IO | write amplification | space amplification | empty KiB |\n|---|---|---|---|---|---|---|---|---|---|\n";

pub fn markdown(results: &Results) -> String {
    let mut text = HEAD.to_owned();
    let mut told: Vec<(&str, &str)> = Vec::new();
    for row in &results.rows {
        let key = (row.cell.as_str(), row.system.as_str());
        if !told.contains(&key) {
            told.push(key);
            text.push_str(&line(results, key));
        }
    }
    for row in results.rows.iter().filter(|row| !is_done(row)) {
        let _ = writeln!(
            text,
            "\n{} {} {}: {}",
            row.cell, row.system, row.run, row.outcome
        );
    }
    text
}

fn is_done(row: &Row) -> bool {
    row.outcome == "completed"
}

fn line(results: &Results, (cell, system): (&str, &str)) -> String {
    let rows = results.rows.iter();
    let rows: Vec<&Row> = rows
        .filter(|row| is_done(row) && row.cell == cell && row.system == system)
        .collect();
    let number = |of: fn(&Row) -> Option<f64>, digits: usize| {
        let numbers: Vec<f64> = rows.iter().filter_map(|row| of(row)).collect();
        median(&numbers).map_or("-".to_owned(), |number| format!("{number:.digits$}"))
    };
    let columns = [
        number(|row| row.iops, 0),
        number(|row| row.write_median_ms, 2),
        number(|row| row.write_p99_ms, 2),
        number(|row| row.cpu_us_per_io, 1),
        number(|row| row.write_amplification, 2),
        number(|row| row.space_amplification, 2),
        number(|row| Some(row.empty_bytes? as f64 / 1024.0), 0),
    ];
    format!(
        "| {cell} | {system} | {} | {} |\n",
        rows.len(),
        columns.join(" | ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_has_a_line_of_its_medians_and_what_failed_is_told() {
        let row = |run, iops, outcome: &str| Row {
            cell: "1-random-4k".to_owned(),
            system: "godwit 4k".to_owned(),
            run,
            outcome: outcome.to_owned(),
            iops,
            empty_bytes: Some(2048),
            ..Row::default()
        };
        let results = Results {
            machine: serde_json::Value::Null,
            rows: vec![
                row(1, Some(10.0), "completed"),
                row(2, Some(30.0), "completed"),
                row(3, Some(20.0), "completed"),
                row(4, None, "failed: no qemu-img"),
            ],
        };
        let text = markdown(&results);
        let line = "| 1-random-4k | godwit 4k | 3 | 20 | - | - | - | - | - | 2 |\n";
        assert!(text.contains(line), "{text}");
        assert!(text.ends_with("1-random-4k godwit 4k 4: failed: no qemu-img\n"));
    }
}
