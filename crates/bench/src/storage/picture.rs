//! Pictures of a bench of disks: bars of medians, and how the load fared while a disk was moved.
//!
//! Pure: out of rows alone.

use super::methods;
use super::promises::{Group, Number};
use super::row::{Results, Row};
use crate::group::in_order;
use crate::picture::{Bar, STYLE, draw};
use crate::row::Measured as _;
use godwit_testkit::page::figure;
use godwit_testkit::page::svg::{Svg, ticks};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 170.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 40.0;

/// File names and documents: one for every scenario and number that the rows have, and the courses of a scenario's cells.
pub fn files(results: &Results) -> Vec<(String, String)> {
    let groups = in_order(&results.rows);
    let numbers: [(&str, &str, Number); 6] = [
        ("duration", "s from the command to the new image", |row| {
            row.total_s
        }),
        ("iops", "IOPS, during the move where there is one", |row| {
            row.iops_during.or(row.iops_before)
        }),
        (
            "stall",
            "ms without an answer around the change of images",
            |row| row.switch_stall_ms,
        ),
        ("write", "ms, mean time of a write", |row| {
            row.write_latency_ms
        }),
        ("penalty", "s of the load lost by the move", lost_s),
        ("cpu", "us of CPU per request, nothing moved", |row| {
            row.cpu_us_per_io
        }),
    ];
    let mut files = Vec::new();
    let mut scenarios: Vec<&str> = Vec::new();
    for row in &results.rows {
        if !scenarios.contains(&row.scenario.as_str()) {
            scenarios.push(&row.scenario);
        }
    }
    for scenario in scenarios {
        let of_scenario = || {
            groups
                .iter()
                .filter(move |group| group.head().scenario == scenario)
        };
        for (name, unit, number) in numbers {
            let bars: Vec<Bar> = of_scenario().map(|group| bar(group, number)).collect();
            if bars.iter().any(|bar| bar.spread.is_some()) {
                let title = format!("{scenario}: {unit}");
                let file = format!("storage-{scenario}-{name}.svg");
                files.push((file, draw(&title, &bars)));
            }
        }
        files.extend(methods::picture(&results.rows, scenario));
        let mut cells: Vec<&Row> = Vec::new();
        for group in of_scenario() {
            if !cells.iter().any(|row| row.is_at(group.head())) {
                cells.push(group.head());
            }
        }
        for cell in cells {
            let rows = results.rows.iter().filter(|row| row.is_at(cell));
            files.extend(course(scenario, cell, rows));
        }
    }
    files
}

/// "Migration time times penalty" of the paper: what was not done, in seconds of the load as it was before.
fn lost_s(row: &Row) -> Option<f64> {
    let part = 1.0 - row.iops_during? / row.iops_before?;
    Some(row.total_s? * part)
}

fn class(row: &Row) -> &'static str {
    match row.system.as_str() {
        "godwit" => "godwit",
        "offline" => "limit",
        _ => "qemu",
    }
}

fn bar(group: &Group, number: Number) -> Bar {
    let row = group.head();
    let spread = group.spread(number);
    let note = match row.completed() {
        true => String::new(),
        false => group.outcome().chars().take(60).collect(),
    };
    Bar {
        label: format!("{}: {}", row.cell, row.name()),
        class: class(row),
        spread,
        note,
    }
}

/// Requests a second over time in a cell, the last completed run of each system.
fn course<'a>(
    scenario: &str,
    cell: &Row,
    rows: impl Iterator<Item = &'a Row>,
) -> Option<(String, String)> {
    let mut last: Vec<&Row> = Vec::new();
    for row in rows.filter(|row| row.completed() && tenths(row).is_some()) {
        last.retain(|other| !other.is_like(row));
        last.push(row);
    }
    let courses: Vec<(&Row, Vec<f64>)> = last
        .into_iter()
        .filter_map(|row| Some((row, tenths(row)?)))
        .collect();
    let all = || courses.iter().flat_map(|(_, course)| course);
    let (most, longest) = (
        all().copied().fold(0.0, f64::max),
        courses.iter().map(|(_, course)| course.len()).max()?,
    );
    let title = format!("{scenario} {}: IOPS by tenths of a second", cell.cell);
    let mut svg = Svg::document(WIDTH, HEIGHT, &title, STYLE);
    svg.text("head", (8.0, 18.0), &title);
    let x = |tenth: f64| LEFT + (WIDTH - LEFT - RIGHT) * tenth / longest.max(1) as f64;
    let y = |iops: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * iops / most.max(1.0);
    for mark in ticks(most) {
        svg.rule("grid", (LEFT, y(mark)), (WIDTH - RIGHT, y(mark)));
        svg.text("faint end", (LEFT - 6.0, y(mark) + 4.0), &figure(mark));
    }
    for mark in ticks(longest as f64 / 10.0) {
        let at = x(mark * 10.0);
        svg.text("faint mid", (at, HEIGHT - BOTTOM + 16.0), &figure(mark));
    }
    svg.text(
        "faint mid",
        ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 8.0),
        "s; the move begins at 1.5",
    );
    for (index, (row, course)) in courses.iter().enumerate() {
        let points = course.iter().enumerate().map(|(tenth, iops)| {
            let word = if tenth == 0 { 'M' } else { 'L' };
            format!("{word}{:.1} {:.1}", x(tenth as f64 + 0.5), y(*iops))
        });
        let dash = if index > 1 { " dashed" } else { "" };
        let path: String = points.collect();
        svg.path(&format!("course {}-line{dash}", class(row)), &path);
        let at = TOP + 8.0 + 18.0 * index as f64;
        let path = format!(
            "M{} {at}L{} {at}",
            WIDTH - RIGHT + 10.0,
            WIDTH - RIGHT + 34.0
        );
        svg.path(&format!("course {}-line{dash}", class(row)), &path);
        svg.text("", (WIDTH - RIGHT + 40.0, at + 4.0), &row.name());
    }
    let file = format!(
        "storage-{scenario}-course-{}.svg",
        cell.cell.replace([' ', '='], "-")
    );
    Some((file, svg.end()))
}

fn tenths(row: &Row) -> Option<Vec<f64>> {
    let course = row.details.get("iops_by_tenths")?.as_array()?;
    course.iter().map(serde_json::Value::as_f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn every_system_is_in_the_pictures_and_what_was_cut_off_is_told() {
        let row = |system: &str, outcome: &str| Row {
            scenario: "oio".into(),
            cell: "oio=2".into(),
            system: system.into(),
            method: "mirror".into(),
            total_s: (outcome == "completed").then_some(2.0),
            iops_before: Some(100.0),
            iops_during: Some(50.0),
            outcome: outcome.into(),
            details: json!({"iops_by_tenths": [100.0, 50.0]}),
            ..Row::default()
        };
        let results = Results {
            machine: Value::Null,
            rows: vec![row("godwit", "completed"), row("qsd", "cut-off")],
        };
        let files = files(&results);
        let named = |name: &str| files.iter().find(|file| file.0 == name).unwrap();
        let (_, svg) = named("storage-oio-duration.svg");
        assert!(svg.contains("class=\"godwit\"") && svg.contains("cut-off"));
        let (_, svg) = named("storage-oio-course-oio-2.svg");
        assert!(svg.contains("godwit mirror") && !svg.contains("qsd"));
        assert_eq!(lost_s(&results.rows[0]), Some(1.0));
    }
}
