//! The rows as Markdown: every comparison with its ratio and target, then every cell, the losing ones too.
//!
//! Pure text out of rows.

use crate::judge::{Group, Line, Spread, Target, groups, lines};
use crate::row::Row;
use std::fmt::Write as _;

/// The whole document.
pub fn markdown(rows: &[Row]) -> String {
    let mut text = comparisons(&lines(rows));
    text.push_str(&everything(&groups(rows)));
    text
}

fn comparisons(lines: &[Line]) -> String {
    let mut text = String::from(
        "## Against the best peer\n\nMedians, in brackets the smallest and the largest run.\n\n\
         | cell | what | Godwit | peer | ratio | target | |\n|---|---|---|---|---|---|---|\n",
    );
    for line in lines {
        let peer = line.peer.as_ref().map_or("-".to_owned(), |(spread, name)| {
            format!("{} {name}", figures(*spread))
        });
        let _ = writeln!(
            text,
            "| {} | {} | {} | {peer} | {} | {} | {} |",
            line.cell,
            line.what,
            line.ours.map_or("-".into(), figures),
            line.ratio()
                .map_or("-".into(), |ratio| format!("{ratio:.2}")),
            target(line.target),
            verdict(line)
        );
    }
    text
}

/// `kept`, `missed` or nothing to say.
pub fn verdict(line: &Line) -> &'static str {
    match line.kept() {
        Some(true) => "kept",
        Some(false) => "**missed**",
        None => "",
    }
}

/// A target in words.
pub fn target(target: Target) -> String {
    match target {
        Target::AtLeast(ratio) => format!("ratio at least {ratio}"),
        Target::AtMost(ratio) => format!("ratio at most {ratio}"),
        Target::MoreByAtMost(more) => format!("at most {more} more"),
        Target::Below(most) => format!("at most {most}"),
        Target::None => "-".into(),
    }
}

/// A median with its spread.
pub fn figures(spread: Spread) -> String {
    let digits = if spread.median < 10.0 { 2 } else { 1 };
    let Spread {
        median,
        least,
        most,
    } = spread;
    if least == most {
        return format!("{median:.digits$}");
    }
    format!("{median:.digits$} ({least:.digits$}..{most:.digits$})")
}

fn everything(groups: &[Group]) -> String {
    let mut text = String::from("\n## Every cell\n");
    let mut scenario = String::new();
    for group in groups {
        let row = group.head();
        if row.scenario != scenario {
            scenario.clone_from(&row.scenario);
            let _ = write!(
                text,
                "\n### {scenario}\n\n| cell | system | destination | encryption | runs | s from the command | of these prepared | \
                 switchover ms | GB/s | core-s/GB source | core-s/GB destination | guest speed | memory MiB | RAM equal | outcome |\n\
                 |---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
            );
        }
        let _ = writeln!(text, "{}", one(group));
    }
    text
}

fn one(group: &Group) -> String {
    let row = group.head();
    let shown = |number: fn(&Row) -> Option<f64>| group.spread(number).map_or("-".into(), figures);
    let equal = match group.equal() {
        Some(true) => "yes",
        Some(false) => "**no**",
        None => "-",
    };
    format!(
        "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {equal} | {} |",
        row.cell,
        group.name(),
        row.destination,
        row.encryption,
        group.rows.len(),
        shown(|row| row.total_s),
        shown(|row| (row.prepare_s > 0.0).then_some(row.prepare_s)),
        shown(|row| row.switchover_ms),
        shown(|row| row.throughput_gb_per_s),
        shown(|row| row.cpu_source_s_per_gb),
        shown(|row| row.cpu_destination_s_per_gb),
        shown(|row| row.guest_speed_during),
        shown(|row| row.peak_rss_mib),
        group.outcome().replace('|', "/")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_losing_cells_and_those_left_out_are_in_the_table() {
        let row = |system: &str, rate: Option<f64>, outcome: &str| Row {
            scenario: "idle".into(),
            cell: "base".into(),
            system: system.into(),
            encryption: "none".into(),
            destination: "cold".into(),
            throughput_gb_per_s: rate,
            outcome: outcome.into(),
            ..Row::default()
        };
        let rows = [
            row("godwit", Some(1.0), "completed"),
            row("qemu-7.2", Some(4.0), "completed"),
            row("qemu-10.0", None, "skipped: not here"),
        ];
        let text = markdown(&rows);
        assert!(text.contains("**missed**"), "{text}");
        assert!(text.contains("skipped: not here"), "{text}");
    }
}
