//! The results of a bench of disks for people: every promise, every cell with the losing ones, and the machine.
//!
//! Pure: out of the results alone. Text of others is escaped on the page.

use super::promises::{Group, lines};
use super::row::Results;
use super::{methods, picture};
use crate::group::in_order;
use crate::table::{figures, machine_card, machine_list};
use godwit_testkit::page::html::{Page, Table};

const TITLE: &str = "Moves of disks, measured";

const ABOUT: &str = "Godwit and QEMU's own block mirror in the same run, taking turns, on the same volumes and under the same load on the \
    disk's vhost-user socket, without a guest but for `guest`. `docs/bench.md` says what the numbers are. Medians; in brackets the lowest and the highest run.";

const BOUND: &str = "**Bound** is what both sides' bytes take at the volumes' rate, the load's own bytes among them: so a system that lets \
    the load do more during the move has a higher one. The paper's mirror took 5.8 % (2 outstanding IOs) and 15.7 % (32) longer than an \
    offline copy, whose volumes the load did not use.";

pub fn markdown(results: &Results) -> String {
    let mut text = format!("# {TITLE}\n\n{ABOUT}\n\n{BOUND}\n");
    for (title, table) in tables(results) {
        text += &format!("\n## {title}\n\n{}\n", table.markdown().trim_end());
    }
    text + &machine_list(&results.machine)
}

/// The whole document as a page.
pub fn html(results: &Results) -> String {
    let mut page = Page::new(&format!("Godwit: {}", TITLE.to_lowercase()));
    page.heading(1, TITLE);
    page.paragraph("soft", ABOUT);
    page.paragraph("soft", BOUND);
    for (title, table) in tables(results) {
        page.heading(2, &title);
        page.card("", &table.html("wide"));
    }
    page.heading(2, "Pictures");
    for (_, svg) in picture::files(results) {
        page.card("", &svg);
    }
    machine_card(&mut page, &results.machine);
    page.end()
}

fn tables(results: &Results) -> Vec<(String, Table)> {
    let groups = in_order(&results.rows);
    let moves = groups.iter().filter(|group| is_move(group));
    let serves = groups.iter().filter(|group| !is_move(group));
    let mut tables = vec![
        ("What is promised".into(), promises(results)),
        ("Every move".into(), of_moves(moves)),
    ];
    let of_methods = [
        (
            "The passes of iterative methods",
            methods::passes(&results.rows),
        ),
        ("What a write took", methods::write_times(&results.rows)),
    ];
    let of_methods = of_methods.into_iter();
    tables.extend(of_methods.filter_map(|(title, table)| Some((title.into(), table?))));
    tables.push(("A disk that is not moved".into(), of_serving(serves)));
    tables
}

fn is_move(group: &Group) -> bool {
    group.head().method != "serve"
}

fn promises(results: &Results) -> Table {
    let mut table = Table::new(["where", "what", "reached", "target", "kept"]);
    for line in lines(&results.rows) {
        let kept = if line.is_kept { "yes" } else { "NO" };
        table.row([
            line.place.as_str(),
            line.what,
            &line.reached,
            &line.target,
            kept,
        ]);
    }
    table
}

fn told(group: &Group, number: impl Fn(&super::row::Row) -> Option<f64>) -> String {
    group.spread(number).map_or("-".into(), figures)
}

fn of_moves<'a>(groups: impl Iterator<Item = &'a Group<'a>>) -> Table {
    let mut table = Table::new([
        "cell",
        "system",
        "s",
        "over the bound, %",
        "IOPS before",
        "IOPS during",
        "write, ms",
        "variance",
        "stall at the change, ms",
        "longest request, ms",
        "estimate wrong by, %",
        "GB to the destination",
        "writes lost",
        "equal",
        "outcome",
    ]);
    for group in groups {
        let row = group.head();
        let lost: u64 = group
            .rows
            .iter()
            .filter_map(|row| row.acked_writes_lost)
            .sum();
        let equal = group.is_equal();
        table.row([
            format!("{} {}", row.scenario, row.cell),
            row.name(),
            told(group, |row| row.total_s),
            told(group, super::row::Row::over_bound_pct),
            told(group, |row| row.iops_before),
            told(group, |row| row.iops_during),
            told(group, |row| row.write_latency_ms),
            told(group, |row| row.write_latency_variance),
            told(group, |row| row.switch_stall_ms),
            told(group, |row| row.longest_hold_ms),
            told(group, |row| row.eta_error_pct),
            told(group, |row| Some(row.bytes_copied? as f64 / 1e9)),
            equal.map_or("-".into(), |_| lost.to_string()),
            equal.map_or("-".into(), |equal| {
                if equal { "yes" } else { "NO" }.to_owned()
            }),
            group.outcome(),
        ]);
    }
    table
}

fn of_serving<'a>(groups: impl Iterator<Item = &'a Group<'a>>) -> Table {
    let mut table = Table::new([
        "cell",
        "system",
        "IOPS",
        "read, ms",
        "write, ms",
        "read p99, ms",
        "write p99, ms",
        "us CPU per IO",
        "outcome",
    ]);
    for group in groups {
        let row = group.head();
        table.row([
            format!("{} {}", row.scenario, row.cell),
            row.name(),
            told(group, |row| row.iops_before),
            told(group, |row| row.detail("read_mean_ms")),
            told(group, |row| row.write_latency_ms),
            told(group, |row| row.detail("read_p99_ms")),
            told(group, |row| row.detail("write_p99_ms")),
            told(group, |row| row.cpu_us_per_io),
            group.outcome(),
        ]);
    }
    table
}
