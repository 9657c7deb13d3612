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
use serde_json::Value;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 270.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 40.0;

/// File names and documents: one for every scenario and number that the rows have, and the courses of a scenario's cells.
pub fn files(results: &Results) -> Vec<(String, String)> {
    let mut groups = in_order(&results.rows);
    groups.sort_by_key(|group| numbers_in(&group.head().cell));
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
        files.extend(methods::ranks(&results.rows, scenario));
        let mut cells: Vec<&Row> = Vec::new();
        for group in of_scenario() {
            if !cells.iter().any(|row| row.is_at(group.head())) {
                cells.push(group.head());
            }
        }
        for cell in cells {
            let rows = results.rows.iter().filter(|row| row.is_at(cell));
            files.extend(course(scenario, cell, rows, &IOPS));
            if scenario == "timeline" {
                let rows = results.rows.iter().filter(|row| row.is_at(cell));
                files.extend(course(scenario, cell, rows, &WRITE_MS));
            }
        }
    }
    files
}

/// "Migration time times penalty" of the paper: what was not done, in seconds of the load as it was before.
pub(super) fn lost_s(row: &Row) -> Option<f64> {
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
        false => in_short(&group.outcome()),
    };
    Bar {
        label: format!("{}: {}", row.cell, row.name()),
        class: class(row),
        spread,
        note,
    }
}

/// What cells of a scenario are ordered by, whichever was measured first.
fn numbers_in(cell: &str) -> Vec<u64> {
    let digits = cell.split(|one: char| !one.is_ascii_digit());
    digits.filter_map(|number| number.parse().ok()).collect()
}

/// The first clause of how runs ended, which is as much as there is room for.
fn in_short(outcome: &str) -> String {
    let reason = outcome.strip_prefix("gave up: ");
    match reason.and_then(|reason| reason.split([':', ';']).next()) {
        Some(reason) => format!("gave up: {reason}"),
        None => outcome.chars().take(60).collect(),
    }
}

/// A number of the load by tenths of a second.
struct Course {
    detail: &'static str,
    word: &'static str,
    title: &'static str,
}

const IOPS: Course = Course {
    detail: "iops_by_tenths",
    word: "course",
    title: "IOPS by tenths of a second",
};
const WRITE_MS: Course = Course {
    detail: "write_ms_by_tenths",
    word: "write-course",
    title: "ms, mean time of a write, by tenths of a second",
};

/// A number over time in a cell, the last run of each system that moved the disk or gave up. Marks at the axis: where its passes ended.
fn course<'a>(
    scenario: &str,
    cell: &Row,
    rows: impl Iterator<Item = &'a Row>,
    shown: &Course,
) -> Option<(String, String)> {
    let mut last: Vec<&Row> = Vec::new();
    for row in rows.filter(|row| row.completed() || gave_up(row)) {
        last.retain(|other| !other.is_like(row));
        last.push(row);
    }
    let lines = last.into_iter().filter_map(|row| {
        let points = tenths(row, shown.detail)?;
        let points = points
            .into_iter()
            .zip(0_u32..)
            .filter_map(|(value, tenth)| Some((f64::from(tenth) / 10.0 + 0.05, value?)));
        let began_s = row.detail("course_begins_s").unwrap_or(0.0);
        let ends = ends_of_passes(row).map(|end| end - began_s);
        let said = if gave_up(row) { " (gave up)" } else { "" };
        Some(Line {
            name: format!("{}{said}", row.name()),
            class: line_class(row),
            points: points.collect(),
            marks: ends.collect(),
        })
    });
    let lines: Vec<Line> = lines.collect();
    if lines.iter().all(|line| line.points.is_empty()) {
        return None;
    }
    let title = format!("{scenario} {}: {}", cell.cell, shown.title);
    let file = format!(
        "storage-{scenario}-{}-{}.svg",
        shown.word,
        cell.cell.replace([' ', '='], "-").replace(',', "")
    );
    let axis = "s; the move begins at 1.5";
    Some((file, chart(&title, axis, &lines, Scale::Linear)))
}

fn gave_up(row: &Row) -> bool {
    row.outcome.starts_with("gave up")
}

/// In seconds after the move was asked for.
fn ends_of_passes(row: &Row) -> impl Iterator<Item = f64> {
    let passes = row.details.get("iterations").and_then(Value::as_array);
    let ends = passes.into_iter().flatten();
    ends.filter_map(|pass| pass.get("ended_s")?.as_f64())
}

fn line_class(row: &Row) -> &'static str {
    match (row.system.as_str(), row.method.as_str()) {
        ("godwit", "dirty-tracking plain") => "plain-line",
        ("godwit", "dirty-tracking incremental") => "incremental-line",
        ("godwit", "dirty-tracking") => "tracking-line",
        ("godwit", "snapshot") => "snapshot-line",
        ("godwit", _) => "godwit-line",
        _ => "qemu-line",
    }
}

/// A line of a picture.
pub(super) struct Line {
    pub name: String,
    pub class: &'static str,
    pub points: Vec<(f64, f64)>,
    /// Where something happened, at the axis.
    pub marks: Vec<f64>,
}

/// How numbers lie on the axes.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Scale {
    Linear,
    /// By their decimal logarithms; points have these.
    Logarithmic,
}

impl Scale {
    /// Where an axis has its marks, and what they say.
    fn ticks(self, largest: f64) -> Vec<(f64, String)> {
        match self {
            Self::Linear => {
                let marks = ticks(largest).into_iter();
                marks.map(|mark| (mark, figure(mark))).collect()
            }
            Self::Logarithmic => {
                let powers = (0..=9_u32).map(f64::from);
                let there = powers.take_while(|power| *power < largest + 1.0);
                there
                    .map(|power| (power, figure(10.0_f64.powf(power))))
                    .collect()
            }
        }
    }
}

/// Lines in one picture, from 0 on both axes.
pub(super) fn chart(title: &str, axis: &str, lines: &[Line], scale: Scale) -> String {
    let largest = |of: fn(&(f64, f64)) -> f64| {
        let points = lines.iter().flat_map(|line| &line.points);
        points.map(of).fold(0.0, f64::max)
    };
    let (across, up) = (
        scale.ticks(largest(|point| point.0)),
        scale.ticks(largest(|point| point.1)),
    );
    let end = |marks: &[(f64, String)]| marks.last().map_or(1.0, |(mark, _)| mark.max(1e-9));
    let (right, top) = (end(&across), end(&up));
    let mut svg = Svg::document(WIDTH, HEIGHT, title, STYLE);
    svg.text("head", (8.0, 18.0), title);
    let x = |value: f64| LEFT + (WIDTH - LEFT - RIGHT) * value / right;
    let y = |value: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top;
    for (mark, said) in &up {
        svg.rule("grid", (LEFT, y(*mark)), (WIDTH - RIGHT, y(*mark)));
        svg.text("faint end", (LEFT - 6.0, y(*mark) + 4.0), said);
    }
    for (mark, said) in &across {
        svg.text("faint mid", (x(*mark), HEIGHT - BOTTOM + 16.0), said);
    }
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    svg.text("faint mid", (middle, HEIGHT - 8.0), axis);
    for (index, line) in lines.iter().enumerate() {
        let points = line.points.iter().zip(0..).map(|((at, value), number)| {
            let word = if number == 0 { 'M' } else { 'L' };
            format!("{word}{:.1} {:.1}", x(*at), y(*value))
        });
        let mut before = lines.iter().take(index);
        let is_again = before.any(|other| other.class == line.class);
        let dash = if is_again { " dashed" } else { "" };
        let class = format!("course {}{dash}", line.class);
        let path: String = points.collect();
        svg.path(&class, &path);
        for mark in &line.marks {
            let foot = HEIGHT - BOTTOM;
            svg.rule(&class, (x(*mark), foot - 8.0), (x(*mark), foot));
        }
        let at = TOP + 8.0 + 18.0 * index as f64;
        let path = format!(
            "M{} {at}L{} {at}",
            WIDTH - RIGHT + 10.0,
            WIDTH - RIGHT + 34.0
        );
        svg.path(&class, &path);
        svg.text("", (WIDTH - RIGHT + 40.0, at + 4.0), &line.name);
    }
    svg.end()
}

fn tenths(row: &Row, detail: &str) -> Option<Vec<Option<f64>>> {
    let course = row.details.get(detail)?.as_array()?;
    Some(course.iter().map(Value::as_f64).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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

    #[test]
    fn cells_stand_in_the_order_of_their_numbers_and_a_reason_ends_with_its_clause() {
        let row = |cell: &str| Row {
            scenario: "oio".into(),
            cell: cell.into(),
            system: "godwit".into(),
            total_s: Some(2.0),
            outcome: "completed".into(),
            ..Row::default()
        };
        let results = Results {
            machine: Value::Null,
            rows: vec![row("oio=2"), row("oio=32"), row("oio=8")],
        };
        let files = files(&results);
        let svg = &files
            .iter()
            .find(|file| file.0 == "storage-oio-duration.svg")
            .unwrap()
            .1;
        assert!(svg.find("oio=8").unwrap() < svg.find("oio=32").unwrap());
        let outcome =
            "gave up: the guest writes as fast as its blocks are copied: 5 s would not do";
        assert_eq!(
            in_short(outcome),
            "gave up: the guest writes as fast as its blocks are copied"
        );
        assert_eq!(in_short("cut-off"), "cut-off");
    }

    #[test]
    fn a_course_has_each_method_in_a_colour_of_its_own_and_those_that_gave_up() {
        let row = |method: &str, outcome: &str| Row {
            scenario: "timeline".into(),
            cell: "2,500 a second".into(),
            system: "godwit".into(),
            method: method.into(),
            outcome: outcome.into(),
            details: json!({
                "iops_by_tenths": [100.0, 50.0, 75.0], "write_ms_by_tenths": [1.0, null, 2.0],
                "course_begins_s": -0.1, "iterations": [{"ended_s": 0.1}],
            }),
            ..Row::default()
        };
        let results = Results {
            machine: Value::Null,
            rows: vec![
                row("mirror", "completed"),
                row("dirty-tracking plain", "gave up: too much"),
                row("dirty-tracking incremental", "failed: no"),
            ],
        };
        let files = files(&results);
        let named = |name: &str| files.iter().find(|file| file.0 == name).unwrap();
        let (_, svg) = named("storage-timeline-course-2500-a-second.svg");
        assert!(svg.contains("course godwit-line") && svg.contains("course plain-line"));
        assert!(svg.contains("dirty-tracking plain (gave up)") && !svg.contains("incremental<"));
        let (_, svg) = named("storage-timeline-write-course-2500-a-second.svg");
        // The tenth in which nothing was answered has no point.
        assert_eq!(svg.matches('L').count(), 4, "{svg}");
    }
}
