//! Pictures of a bench as SVG documents that stand alone and serve light and dark.
//!
//! Pure: out of rows alone. Every mark carries its figures as a title, which browsers show under the pointer.

use crate::group::{Group, Number, Spread, comparable, groups, is_encrypted};
use crate::plan::scenarios;
use crate::row::{Measured as _, Results};
use crate::table::figures;
use godwit_testkit::page::figure;
use godwit_testkit::page::svg::{Svg, ticks};

const BARS: f64 = 460.0;
/// A character of a label at its widest; documents do not know their fonts.
const LABEL_CHARACTER: f64 = 6.9;
const RIGHT: f64 = 110.0;
const ROW: f64 = 20.0;
const TOP: f64 = 34.0;

pub(crate) const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#222}.head{font-weight:600;font-size:14px}.grid{stroke:#ddd}\
    .godwit{fill:#1668a8}.qemu{fill:#c05a1c}.limit{fill:#7a7a7a}.whisker{stroke:#222;stroke-width:1.2}.faint{fill:#777}\
    .end{text-anchor:end}.mid{text-anchor:middle}.course{fill:none;stroke-width:1.6}.dashed{stroke-dasharray:5 3}\
    .godwit-line{stroke:#1668a8}.qemu-line{stroke:#c05a1c}.plain-line{stroke:#2b8a3e}.incremental-line{stroke:#8e44ad}\
    .tracking-line{stroke:#a8790b}.snapshot-line{stroke:#b02a4c}\
    @media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#444}.godwit{fill:#4aa3e8}.qemu{fill:#e8894a}\
    .limit{fill:#999}.whisker{stroke:#ddd}.faint{fill:#999}}";

pub(crate) struct Bar {
    pub label: String,
    pub class: &'static str,
    pub spread: Option<Spread>,
    /// What stands there instead, or beside it.
    pub note: String,
}

/// File names and documents, one for every scenario and number that the rows have.
pub fn files(results: &Results) -> Vec<(String, String)> {
    let groups = comparable(&groups(&results.rows));
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
    for scenario in scenarios() {
        for (name, unit, number) in numbers {
            let of_scenario = groups
                .iter()
                .filter(|group| group.head().scenario == *scenario);
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
    let mut label = match class {
        "godwit" if is_encrypted(row) => format!("{}: godwit, encrypted", row.cell),
        "godwit" => format!("{}: godwit, plain", row.cell),
        _ => format!("{}: {}", row.cell, group.name()),
    };
    for (told, word) in [(&row.encryption, "tls"), (&row.destination, "prepared")] {
        if told == word {
            label = format!("{label}, {}", if word == "tls" { "TLS" } else { word });
        }
    }
    let note = if told {
        group.outcome().chars().take(60).collect()
    } else {
        String::new()
    };
    Some(Bar {
        label,
        class,
        spread,
        note,
    })
}

pub(crate) fn draw(title: &str, bars: &[Bar]) -> String {
    let most = bars.iter().filter_map(|bar| Some(bar.spread?.most));
    let largest = most.fold(0.0, f64::max);
    let marks = ticks(largest);
    let end = marks.last().copied().unwrap_or(1.0).max(largest).max(1e-9);
    let longest = bars.iter().map(|bar| bar.label.len()).max().unwrap_or(0);
    let labels = LABEL_CHARACTER * longest as f64 + 16.0;
    let x = |value: f64| labels + BARS * value / end;
    let (width, height) = (labels + BARS + RIGHT, TOP + ROW * bars.len() as f64 + 26.0);
    let mut svg = Svg::document(width, height, title, STYLE);
    svg.text("head", (8.0, 18.0), title);
    for mark in marks {
        svg.rule("grid", (x(mark), TOP), (x(mark), height - 22.0));
        svg.text("faint mid", (x(mark), height - 8.0), &figure(mark));
    }
    for (index, bar) in bars.iter().enumerate() {
        one(&mut svg, bar, TOP + ROW * index as f64, &x);
    }
    svg.end()
}

fn one(svg: &mut Svg, bar: &Bar, top: f64, x: &impl Fn(f64) -> f64) {
    let (middle, from) = (top + ROW / 2.0, x(0.0));
    svg.text("end", (from - 6.0, middle + 4.0), &bar.label);
    let Some(spread) = bar.spread else {
        return svg.text("", (from + 4.0, middle + 4.0), &bar.note);
    };
    let (
        Spread {
            median,
            least,
            most,
            ..
        },
        title,
    ) = (spread, format!("{}: {}", bar.label, figures(spread)));
    let size = ((x(median) - from).max(0.5), ROW - 6.0);
    svg.rect(bar.class, (from, top + 3.0), size, &title);
    if most > least {
        svg.rule("whisker", (x(least), middle), (x(most), middle));
    }
    let said = format!("{} {}", figure(median), bar.note);
    svg.text("", (x(most) + 5.0, middle + 4.0), said.trim());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Row;
    use serde_json::Value;

    #[test]
    fn a_picture_shows_every_group_and_says_what_was_cut_off() {
        let row = |system: &str, rate: Option<f64>, outcome: &str| Row {
            throughput_gb_per_s: rate,
            total_s: rate,
            outcome: outcome.into(),
            ..Row::sample(system, "none", "")
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
        let label_end = svg.split("<text class=\"end\" x=\"").nth(1).unwrap();
        let end: f64 = label_end.split('"').next().unwrap().parse().unwrap();
        assert!(end >= 80.0 * LABEL_CHARACTER, "{end}");
    }
}
