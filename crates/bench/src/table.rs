//! The results as Markdown: our moves beside the best peer's, every judgement with its ratio and target, every cell, the
//! losing ones too, and the machine.
//!
//! Pure text out of the results.

use crate::group::{
    Group, STOP, Spread, TOTAL, beside_ours, groups, is_encrypted, is_ours, is_qemu, place,
};
use crate::judge::{Line, Target, lines};
use crate::row::{Results, Row};
use serde_json::Value;
use std::fmt::Write as _;

const HEAD: &str = "# Moves of memory, measured\n\n\
    Godwit and QEMU's own migration in the same run, taking turns, on the same guests, between the same two test hosts on one\n\
    machine, so on the same cores; `docs/bench.md` says what the numbers are. Medians; in brackets the lowest and the highest\n\
    run; `(1 run)` where there is only one. A ratio is ours over the peer's: in s, ms and core-s/GB less is better, in GB/s more.\n\
    A pause of 50 ms is asked of every system. Guests with a Linux or a counter in them run under emulation. CPU is that of the\n\
    hosts' processes, without vCPUs, controller, command line and link emulator; what huge pages that are put back after the\n\
    guest has arrived may cost is in no figure. Where hosts have four cards QEMU uses one: it takes one address.\n";

/// The whole document.
pub fn markdown(results: &Results) -> String {
    let groups = groups(&results.rows);
    let compared = beside_ours(&groups);
    let mut text = String::from(HEAD);
    text.push_str(&disturbance(&results.rows));
    text.push_str(&moves(&compared));
    text.push_str(&comparisons(&lines(&results.rows)));
    text.push_str(&parts(&groups));
    text.push_str(&everything(&groups, &compared));
    text.push_str(&machine(&results.machine));
    text
}

/// What the hypervisor took while it was measured, where that is known.
fn disturbance(rows: &[Row]) -> String {
    let shares: Vec<f64> = rows
        .iter()
        .filter_map(|row| row.detail("stolen_share"))
        .collect();
    let Some(Spread { median, most, .. }) = Spread::of(&shares) else {
        return String::new();
    };
    let again: f64 = rows
        .iter()
        .filter_map(|row| row.detail("disturbed_before"))
        .sum();
    format!(
        "\nIn {} of {} rows it is known what the hypervisor below took of all cores' time: {:.1} % in the median, {:.1} % at most. \
         {again} runs were made again since it took more than a tenth.\n",
        shares.len(),
        rows.len(),
        median * 100.0,
        most * 100.0
    )
}

/// Every move of ours beside the best peer of the same kind.
fn moves(groups: &[Group]) -> String {
    let mut text = String::from(
        "\n## Every scenario\n\n\
         The best peer is that of the same cell with the same encryption, into memory of the same kind where there is one.\n\n\
         | scenario | cell | Godwit | s from the command | best peer | ratio | ms switchover | best peer | ratio |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    let moved = |group: &&Group| is_ours(group.head()) && group.median(TOTAL).is_some();
    for group in groups.iter().filter(moved) {
        let row = group.head();
        let kind = if is_encrypted(row) {
            "encrypted"
        } else {
            "plain"
        };
        let prepared = if row.destination == "prepared" {
            ", prepared"
        } else {
            ""
        };
        let _ = write!(
            text,
            "| {} | {} | {kind}{prepared} |",
            row.scenario, row.cell
        );
        for number in [TOTAL, STOP] {
            let ours = group.spread(number);
            let peer = best_peer(groups, row, number);
            let ratio = ours
                .zip(peer.as_ref())
                .map(|(ours, (peer, _))| ours.median / peer.median);
            let _ = write!(
                text,
                " {} | {} | {} |",
                ours.map_or("-".into(), counted),
                peer.map_or_else(
                    || no_peer(groups, row),
                    |(spread, name)| format!("{} {name}", counted(spread))
                ),
                ratio.map_or("-".into(), |ratio| format!("{ratio:.2}"))
            );
        }
        text.push('\n');
    }
    text
}

fn best_peer(
    groups: &[Group],
    ours: &Row,
    number: fn(&Row) -> Option<f64>,
) -> Option<(Spread, String)> {
    let alike = |row: &Row| {
        let same_secrecy = is_encrypted(row) == is_encrypted(ours);
        is_qemu(row) && same_secrecy && place(row) == place(ours)
    };
    let least = |same_memory: bool| {
        let fits = groups.iter().filter(|group| {
            let row = group.head();
            alike(row) && (!same_memory || row.destination == ours.destination)
        });
        let found = fits.filter_map(|group| Some((group.spread(number)?, group.full_name())));
        found.min_by(|one, two| one.0.median.total_cmp(&two.0.median))
    };
    least(true).or_else(|| least(false))
}

/// Why there is no peer's figure.
fn no_peer(groups: &[Group], ours: &Row) -> String {
    let here = |group: &&Group| {
        let row = group.head();
        is_qemu(row) && row.scenario == ours.scenario && row.cell == ours.cell
    };
    let cut = groups.iter().filter(here).any(Group::cut_off);
    if cut { "cut off at 10 x ours" } else { "-" }.to_owned()
}

/// What the switchovers of the base cell are made of.
fn parts(groups: &[Group]) -> String {
    const NAMES: [&str; 7] = [
        "stop_ms",
        "last_pages_ms",
        "device_save_ms",
        "transfer_ms",
        "device_load_ms",
        "permit_ms",
        "resume_ms",
    ];
    let named = |row: &Row, name: &str| row.details["report"]["switchover_parts_ms"][name].as_f64();
    let shown = |group: &&Group| {
        let row = group.head();
        let chosen = matches!(
            (row.scenario.as_str(), row.cell.as_str()),
            ("idle", "base") | ("redis", "set=50" | "set=100")
        );
        is_ours(row) && chosen
    };
    let mut lines = String::new();
    let present: Vec<&str> = NAMES
        .into_iter()
        .filter(|name| {
            groups
                .iter()
                .any(|group| group.rows.iter().any(|row| named(row, name).is_some()))
        })
        .collect();
    for group in groups.iter().filter(shown) {
        let row = group.head();
        let _ = write!(
            lines,
            "| {} {} | {} {} |",
            row.scenario, row.cell, row.encryption, row.destination
        );
        for name in &present {
            let spread = group.spread(|row| named(row, name));
            let _ = write!(lines, " {} |", spread.map_or("-".into(), figures));
        }
        lines.push('\n');
    }
    if lines.is_empty() || present.is_empty() {
        return String::new();
    }
    let titles: Vec<String> = present
        .iter()
        .map(|name| name.trim_end_matches("_ms").replace('_', " "))
        .collect();
    format!(
        "\n## Parts of the switchover, ms\n\nBy the product's own report.\n\n| cell | kind | {} |\n|---|---|{}\n{lines}",
        titles.join(" | "),
        "---|".repeat(present.len())
    )
}

fn machine(about: &Value) -> String {
    let mut text = String::from("\n## The machine\n\n");
    for (name, value) in about.as_object().into_iter().flatten() {
        let said = match value {
            Value::String(said) => said.clone(),
            Value::Object(_) => value.to_string(),
            other => other.to_string(),
        };
        let _ = writeln!(text, "- {}: {said}", name.replace('_', " "));
    }
    text
}

fn comparisons(lines: &[Line]) -> String {
    let mut text = String::from(
        "\n## Against the targets\n\n\
         | cell | what | Godwit | peer | ratio | target | |\n|---|---|---|---|---|---|---|\n",
    );
    for line in lines {
        let peer = peer(line);
        let _ = writeln!(
            text,
            "| {} | {} | {} | {peer} | {} | {} | {} |",
            line.cell,
            line.what,
            line.ours.map_or("-".into(), counted),
            line.ratio()
                .map_or("-".into(), |ratio| format!("{ratio:.2}")),
            target(line.target),
            verdict(line)
        );
    }
    text
}

/// The peer's figure and name, or why there is none.
pub fn peer(line: &Line) -> String {
    match &line.peer {
        Some((spread, name)) => format!("{} {name}", counted(*spread)),
        None if line.note.is_empty() => "-".into(),
        None => line.note.clone(),
    }
}

/// `reached`, `missed` or nothing to say.
pub fn verdict(line: &Line) -> &'static str {
    match line.reached() {
        Some(true) => "reached",
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
        Target::Above(least) => format!("at least {least}"),
        Target::None => "-".into(),
    }
}

/// A median with its spread, and whether it is of a single run.
fn counted(spread: Spread) -> String {
    let single = if spread.runs == 1 { " (1 run)" } else { "" };
    figures(spread) + single
}

/// A median with its spread.
pub fn figures(spread: Spread) -> String {
    let digits = match spread.median {
        median if median < 1.0 => 3,
        median if median < 10.0 => 2,
        _ => 1,
    };
    let Spread {
        median,
        least,
        most,
        ..
    } = spread;
    if least == most {
        return format!("{median:.digits$}");
    }
    format!("{median:.digits$} ({least:.digits$}..{most:.digits$})")
}

fn everything(groups: &[Group], compared: &[Group]) -> String {
    let mut text = String::from("\n## Every cell\n");
    let mut scenario = String::new();
    for group in groups {
        let row = group.head();
        if row.scenario != scenario {
            scenario.clone_from(&row.scenario);
            let _ = write!(
                text,
                "\n### {scenario}\n\n| cell | system | destination | encryption | runs | s from the command | of these prepared | \
                 switchover ms | GB/s | core-s/GB source | core-s/GB destination | guest speed | memory MiB | RAM equal | also | outcome |\n\
                 |---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
            );
        }
        let _ = writeln!(text, "{}", one(group, compared));
    }
    text
}

fn one(group: &Group, compared: &[Group]) -> String {
    let row = group.head();
    let runs = group.rows.len();
    let same = |other: &&Group| other.head().is_like(row);
    let beside = compared.iter().find(same).map_or(0, |same| same.rows.len());
    let runs = if beside == runs {
        runs.to_string()
    } else {
        format!("{runs}, {beside} of them beside ours")
    };
    let shown = |number: fn(&Row) -> Option<f64>| group.spread(number).map_or("-".into(), figures);
    let equal = match group.equal() {
        Some(true) => "yes",
        Some(false) => "**no**",
        None => "-",
    };
    format!(
        "| {} | {} | {} | {} | {runs} | {} | {} | {} | {} | {} | {} | {} | {} | {equal} | {} | {} |",
        row.cell,
        group.name(),
        row.destination,
        row.encryption,
        shown(|row| row.total_s),
        shown(|row| (row.prepare_s > 0.0).then_some(row.prepare_s)),
        shown(|row| row.switchover_ms),
        shown(|row| row.throughput_gb_per_s),
        shown(|row| row.cpu_source_s_per_gb),
        shown(|row| row.cpu_destination_s_per_gb),
        shown(|row| row.guest_speed_during),
        shown(|row| row.peak_rss_mib),
        also(group),
        group.outcome().replace('|', "/")
    )
}

/// What a cell was made for and no column shows.
pub fn also(group: &Group) -> String {
    let named = [
        ("jain_index", "Jain index"),
        ("eta_at_tenth_error", "estimate at a tenth off by"),
        ("guest_speed_after_10_s", "guest's speed 10 s after"),
        ("guest_speed_after", "60 s after"),
        ("write_share", "written of what could be"),
        ("read_share", "read of before"),
        ("first_pass_ratio", "first pass over later ones"),
    ];
    let mut found = Vec::new();
    for (name, title) in named {
        let spread = group.spread(|row| row.detail(name));
        found.extend(spread.map(|spread| format!("{title} {}", figures(spread))));
    }
    if found.is_empty() {
        return "-".into();
    }
    found.join("; ")
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
        let text = markdown(&Results {
            machine: serde_json::json!({"cores": 2}),
            rows: rows.to_vec(),
        });
        assert!(text.contains("- cores: 2"), "{text}");
        assert!(text.contains("**missed**"), "{text}");
        assert!(text.contains("skipped: not here"), "{text}");
        assert!(!text.contains("beside ours"), "{text}");
    }

    #[test]
    fn a_peer_of_another_call_is_shown_and_said_to_be_so() {
        let row = |system: &str, total_s: f64, call_unix_s: u64| Row {
            scenario: "idle".into(),
            cell: "base".into(),
            system: system.into(),
            encryption: "none".into(),
            destination: "cold".into(),
            total_s: Some(total_s),
            outcome: "completed".into(),
            call_unix_s,
            ..Row::default()
        };
        let text = markdown(&Results {
            rows: vec![
                row("godwit", 2.0, 1),
                row("qemu-7.2", 4.0, 1),
                row("qemu-7.2", 1.0, 2),
            ],
            ..Results::default()
        });
        assert!(text.contains("| 2, 1 of them beside ours |"), "{text}");
        assert!(!text.contains("hypervisor below took"), "{text}");
        assert!(text.contains("| 4.00 (1 run) qemu-7.2"), "{text}");
    }

    #[test]
    fn what_the_hypervisor_took_is_told() {
        let row = |stolen: f64, disturbed: u32| Row {
            details: serde_json::json!({"stolen_share": stolen, "disturbed_before": disturbed}),
            ..Row::default()
        };
        let text = disturbance(&[row(0.01, 0), row(0.02, 2), row(0.12, 1), Row::default()]);
        assert!(text.contains("In 3 of 4 rows"), "{text}");
        assert!(
            text.contains("2.0 % in the median, 12.0 % at most. 3 runs"),
            "{text}"
        );
    }
}
