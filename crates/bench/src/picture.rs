//! Pictures of a bench as SVG documents that stand alone and serve light and dark.
//!
//! Pure: out of rows alone. Every mark carries its figures as a title, which browsers show under the pointer.

use crate::group::{Group, Spread, beside_ours, groups};
use crate::row::{Results, Row};
use crate::table::figures;
use godwit_testkit::report::svg::{escape, figure, ticks};
use std::fmt::Write as _;

/// The bars' part.
const BARS: f64 = 460.0;
/// A character of a label at its widest; documents do not know their fonts.
const LABEL_CHARACTER: f64 = 6.9;
const RIGHT: f64 = 110.0;
const ROW: f64 = 20.0;
const TOP: f64 = 34.0;

const STYLE: &str = "<style>\
    text{font:12px system-ui,sans-serif;fill:#222}.head{font-weight:600;font-size:14px}.grid{stroke:#ddd}\
    .godwit{fill:#1668a8}.qemu{fill:#c05a1c}.limit{fill:#7a7a7a}.whisker{stroke:#222;stroke-width:1.2}.faint{fill:#777}\
    @media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#444}.godwit{fill:#4aa3e8}.qemu{fill:#e8894a}\
    .limit{fill:#999}.whisker{stroke:#ddd}.faint{fill:#999}}</style>";

/// One bar.
struct Bar {
    label: String,
    class: &'static str,
    spread: Option<Spread>,
    /// What stands there instead, or beside it.
    note: String,
}

type Number = fn(&Row) -> Option<f64>;

/// File names and documents, one for every scenario and number that the rows have.
pub fn files(results: &Results) -> Vec<(String, String)> {
    let groups = beside_ours(&groups(&results.rows));
    let numbers: [(&str, &str, Number); 5] = [
        ("throughput", "GB/s", |row| row.throughput_gb_per_s),
        (
            "duration",
            "s from the command to the guest running",
            |row| row.total_s,
        ),
        ("switchover", "ms from STOP to RESUME", |row| {
            row.switchover_ms
        }),
        ("cpu", "core-seconds per GB, both hosts", |row| {
            Some(row.cpu_source_s_per_gb? + row.cpu_destination_s_per_gb?)
        }),
        (
            "guest",
            "guest's speed during the move over before",
            |row| row.guest_speed_during,
        ),
    ];
    let mut files = Vec::new();
    for scenario in crate::plan::SCENARIOS {
        for (name, unit, number) in numbers {
            let of_scenario = groups
                .iter()
                .filter(|group| group.head().scenario == scenario);
            let bars: Vec<Bar> = of_scenario.filter_map(|group| bar(group, number)).collect();
            if bars.iter().any(|bar| bar.spread.is_some()) {
                let title = format!("{scenario}: {unit}");
                files.push((format!("memory-{scenario}-{name}.svg"), draw(&title, &bars)));
            }
        }
    }
    files
}

fn bar(group: &Group, number: Number) -> Option<Bar> {
    let row = group.head();
    let spread = group.spread(number);
    let moves = row.total_s.is_some() || !row.completed();
    let told = !row.completed() && moves;
    if spread.is_none() && !told {
        return None;
    }
    let class = match row.system.as_str() {
        "godwit" => "godwit",
        name if name.starts_with("qemu") => "qemu",
        _ => "limit",
    };
    let mut label = format!("{}: {}", row.cell, group.name());
    if row.encryption == "tls" {
        label.push_str(", TLS");
    }
    if class == "godwit" {
        let how = if row.encryption == "none" {
            "plain"
        } else {
            "encrypted"
        };
        label = format!("{}: godwit, {how}", row.cell);
    }
    if row.destination == "prepared" {
        label.push_str(", prepared");
    }
    Some(Bar {
        label,
        class,
        spread,
        note: if told {
            short(&group.outcome())
        } else {
            String::new()
        },
    })
}

fn short(outcome: &str) -> String {
    outcome.chars().take(60).collect()
}

fn draw(title: &str, bars: &[Bar]) -> String {
    let largest = bars
        .iter()
        .filter_map(|bar| bar.spread)
        .map(|spread| spread.most)
        .fold(0.0, f64::max);
    let marks = ticks(largest);
    let end = marks.last().copied().unwrap_or(1.0).max(largest).max(1e-9);
    let longest = bars.iter().map(|bar| bar.label.len()).max().unwrap_or(0);
    let labels = LABEL_CHARACTER * longest as f64 + 16.0;
    let x = |value: f64| labels + BARS * value / end;
    let (width, height) = (labels + BARS + RIGHT, TOP + ROW * bars.len() as f64 + 26.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height}\" width=\"{width:.0}\" role=\"img\">\
         <title>{0}</title>{STYLE}<text class=\"head\" x=\"8\" y=\"18\">{0}</text>",
        escape(title)
    );
    for mark in &marks {
        let (at, bottom) = (x(*mark), height - 22.0);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>\
             <text class=\"faint\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            height - 8.0,
            figure(*mark)
        );
    }
    for (index, bar) in bars.iter().enumerate() {
        one(&mut svg, bar, TOP + ROW * index as f64, &x);
    }
    svg.push_str("</svg>");
    svg
}

fn one(svg: &mut String, bar: &Bar, top: f64, x: &impl Fn(f64) -> f64) {
    let middle = top + ROW / 2.0;
    let _ = write!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
        x(0.0) - 6.0,
        middle + 4.0,
        escape(&bar.label)
    );
    let mut text_at = x(0.0) + 4.0;
    let mut said = bar.note.clone();
    if let Some(spread) = bar.spread {
        let (from, to) = (x(0.0), x(spread.median));
        let _ = write!(
            svg,
            "<g><title>{}: {}</title><rect class=\"{}\" x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{}\"/>",
            escape(&bar.label),
            figures(spread),
            bar.class,
            top + 3.0,
            (to - from).max(0.5),
            ROW - 6.0
        );
        if spread.most > spread.least {
            let (least, most) = (x(spread.least), x(spread.most));
            let _ = write!(
                svg,
                "<line class=\"whisker\" x1=\"{least:.1}\" x2=\"{most:.1}\" y1=\"{middle:.1}\" y2=\"{middle:.1}\"/>"
            );
        }
        svg.push_str("</g>");
        text_at = x(spread.most) + 5.0;
        said = format!("{} {said}", figure(spread.median))
            .trim()
            .to_owned();
    }
    let _ = write!(
        svg,
        "<text x=\"{text_at:.1}\" y=\"{}\">{}</text>",
        middle + 4.0,
        escape(&said)
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn a_picture_shows_every_group_and_says_what_was_cut_off() {
        let row = |system: &str, rate: Option<f64>, outcome: &str| Row {
            scenario: "idle".into(),
            cell: "base".into(),
            system: system.into(),
            encryption: "none".into(),
            throughput_gb_per_s: rate,
            total_s: rate,
            outcome: outcome.into(),
            ..Row::default()
        };
        let results = Results {
            machine: Value::Null,
            rows: vec![
                row("godwit", Some(2.0), "completed"),
                row("qemu-7.2", None, "cut-off"),
            ],
        };
        let files = files(&results);
        let (name, svg) = &files[0];
        assert_eq!(name, "memory-idle-throughput.svg");
        assert!(
            svg.contains("class=\"godwit\"") && svg.contains("cut-off"),
            "{svg}"
        );
        assert!(svg.is_ascii());
    }

    #[test]
    fn the_longest_label_begins_inside_the_picture() {
        let bar = Bar {
            label: "x".repeat(80),
            class: "qemu",
            spread: None,
            note: String::new(),
        };
        let svg = draw("long", &[bar]);
        let label_end = svg.split("<text x=\"").nth(1).unwrap();
        let end: f64 = label_end.split('"').next().unwrap().parse().unwrap();
        assert!(end >= 80.0 * LABEL_CHARACTER, "{end}");
    }
}
