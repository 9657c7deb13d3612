//! Single promises that are held against a figure of their own: what the report must say, what a cell was made for, and
//! what has to be so in every cell.
//!
//! Pure. Refuses to judge what was not measured: such a line is left out.

use crate::group::{
    COST_DESTINATION, COST_SOURCE, Group, Number, RATE, Spread, TOTAL, is_encrypted, is_ours,
    is_qemu,
};
use crate::judge::{Line, Pick, Target, line};
use crate::row::Row;

/// What is asked of a guest that writes: seven tenths of what it could.
const WRITE_SHARE: f64 = 0.7;
/// And of one that reads, of its speed before.
const READ_SHARE: f64 = 0.9;
/// Noise of two speeds measured a minute apart.
const AS_FAST: f64 = 0.95;
/// GB/s of guest memory that 90 % of a link of 1 Gb/s is.
const MOST_OF_A_GIGABIT: f64 = 0.1125;
/// And half of it.
const HALF_A_GIGABIT: f64 = 0.0625;

const JAIN: Number = |row| row.detail("jain_index");
const ESTIMATE: Number = |row| row.detail("eta_at_tenth_error");
const AFTER: Number = |row| row.detail("guest_speed_after");
const WRITES: Number = |row| row.detail("write_share");
const READS: Number = |row| row.detail("read_share");
const FIRST_PASS: Number = |row| row.detail("first_pass_ratio");
const ALIVE: Number = |row| {
    let alive = row.details.get("guest_alive")?.as_bool()?;
    Some(if alive { 1.0 } else { 0.0 })
};

/// Promises of one cell.
pub(crate) fn of_cell(pick: &Pick) -> Vec<Line> {
    let mut found = Vec::new();
    let mut promise = |what: &str, number: Number, target: Target| {
        for (encrypted, kind) in [(false, "plain"), (true, "encrypted")] {
            let what = format!("{what}, {kind}");
            found.push(line(
                pick,
                &what,
                pick.ours(encrypted, false, number),
                None,
                target,
            ));
        }
    };
    match (pick.scenario, pick.cell) {
        ("hot", "cancelled") => {
            promise(
                "guest's speed a minute after a cancelled move, over before",
                AFTER,
                Target::Above(AS_FAST),
            );
        }
        ("hot", cell) => {
            promise(
                "speed of the first pass over later ones",
                FIRST_PASS,
                Target::Above(0.9),
            );
            if cell != "rate=0" && cell != "unshaped" {
                promise(
                    "what the guest writes until the switchover, over the lesser of its own rate and the link's",
                    WRITES,
                    Target::Above(WRITE_SHARE),
                );
            }
            promise(
                "what a vCPU that only reads reads until the switchover, over its speed before",
                READS,
                Target::Above(READ_SHARE),
            );
        }
        ("link", "gbps=1,ram=2") => {
            promise(
                "estimate at a tenth of the way: part that it is off",
                ESTIMATE,
                Target::Below(0.1),
            );
        }
        ("link", "moves=4") => {
            promise(
                "Jain index of four moves at once",
                JAIN,
                Target::Above(0.95),
            );
        }
        ("idle", "ram=4") => {
            promise(
                "MiB of the VM process beside a guest of 4 GiB",
                vm_process_mib,
                Target::Below(64.0),
            );
        }
        ("distance", cell) if cell.starts_with("ram=8") => {
            promise(
                "GB/s, of a link of 1 Gb/s",
                RATE,
                Target::Above(MOST_OF_A_GIGABIT),
            );
        }
        ("distance", cell) if cell.ends_with("loss=0.1") => {
            promise(
                "GB/s, of a link of 1 Gb/s that loses packets",
                RATE,
                Target::Above(HALF_A_GIGABIT),
            );
        }
        _ => {}
    }
    if pick.cell == "moves=4" {
        // One that is not alive is one too many.
        let worst = pick.ours(true, false, ALIVE);
        let worst = worst.map(|all| Spread {
            median: all.least,
            ..all
        });
        let what = "all guests alive after four moves at once, encrypted";
        found.push(line(pick, what, worst, None, Target::Above(1.0)));
    }
    if pick.scenario == "link" && pick.cell.starts_with("cut") {
        let ours = pick.ours(true, false, TOTAL);
        let peer = pick.best(false, TOTAL, is_qemu);
        found.push(line(
            pick,
            "s from the command, encrypted, against a plain peer",
            ours,
            peer,
            Target::None,
        ));
    }
    found
}

/// Promises that hold everywhere: the worst cell is shown.
pub(crate) fn of_all(groups: &[Group]) -> Vec<Line> {
    let everywhere = Pick {
        groups,
        scenario: "every",
        cell: "cell",
    };
    let ours = || groups.iter().filter(|group| is_ours(group.head()));
    let mut found = Vec::new();
    for (side, number, paper) in [
        ("source", COST_SOURCE, 1.6),
        ("destination", COST_DESTINATION, 1.2),
    ] {
        for (emulated, link) in [(false, "no link emulated"), (true, "over an emulated link")] {
            let chosen = ours().filter(|group| {
                let row = group.head();
                is_encrypted(row) && row.link_gbps.is_some() == emulated
            });
            let costs = chosen.filter_map(|group| {
                let spread = group.spread(|row| Some(number(row)? / volume(row)))?;
                Some((spread, place(group.head())))
            });
            let dearest = costs.max_by(|one, two| one.0.median.total_cmp(&two.0.median));
            let Some((worst, place)) = dearest else {
                continue;
            };
            let what = format!(
                "core-s/GB sent, {side}, encrypted, {link}, against the paper's; the dearest: {place}"
            );
            let target = Target::Below(paper);
            found.push(line(&everywhere, &what, Some(worst), None, target));
        }
    }
    for group in ours() {
        let none_ended = group.rows.iter().all(|row| !row.completed());
        let tried = |row: &&Row| !row.outcome.starts_with("skipped");
        if none_ended && group.rows.iter().any(tried) {
            let row = group.head();
            let what = format!("runs that ended: {} {}", place(row), row.encryption);
            let none = Spread::of(&vec![0.0; group.rows.len()]);
            found.push(line(&everywhere, &what, none, None, Target::Above(1.0)));
        }
    }
    let rows: Vec<&Row> = ours()
        .flat_map(|group| group.rows.iter().copied())
        .collect();
    let ran = rows
        .iter()
        .filter(|row| !row.outcome.starts_with("skipped"));
    let ended: Vec<bool> = ran.map(|row| row.completed()).collect();
    let equal: Vec<bool> = rows.iter().filter_map(|row| row.ram_equal).collect();
    for (what, all) in [
        ("part of our runs that came to their end", ended),
        ("part of our runs whose memory was equal", equal),
    ] {
        let ours = part(&all);
        found.push(line(&everywhere, what, ours, None, Target::Above(1.0)));
    }
    found
}

/// A guest that writes has more sent than it has memory; costs are then for what was sent.
fn volume(row: &Row) -> f64 {
    let sent = row.details["report"]["bytes_on_wire"]
        .as_f64()
        .unwrap_or(0.0);
    (sent / (row.ram_gib * 1_073_741_824.0)).max(1.0)
}

fn place(row: &Row) -> String {
    format!("{} {} {}", row.scenario, row.cell, row.destination)
}

fn part(all: &[bool]) -> Option<Spread> {
    let true_ones = all.iter().filter(|one| **one).count();
    let part = Spread::of(&[true_ones as f64 / all.len() as f64])?;
    (!all.is_empty()).then_some(Spread {
        runs: all.len(),
        ..part
    })
}

/// The larger VM process of both hosts.
fn vm_process_mib(row: &Row) -> Option<f64> {
    let hosts = row.details.get("rss_mib_by_process")?.as_array()?;
    let processes = hosts.iter().filter_map(|host| host.as_array()).flatten();
    let ours = processes.filter(|pair| pair[0] == "godwit vm-process");
    ours.filter_map(|pair| pair[1].as_f64()).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::lines;
    use serde_json::json;

    fn row(scenario: &str, cell: &str, details: serde_json::Value) -> Row {
        Row {
            scenario: scenario.into(),
            cell: cell.into(),
            system: "godwit".into(),
            encryption: "aes-256-gcm".into(),
            destination: "cold".into(),
            ram_gib: 1.0,
            ram_equal: Some(true),
            outcome: "completed".into(),
            details,
            ..Row::default()
        }
    }

    fn reached(rows: &[Row], what: &str) -> Option<bool> {
        let lines = lines(rows);
        let mut found = lines.iter().filter(|line| line.what.contains(what));
        let line = found.next()?;
        assert!(found.next().is_none(), "two lines: {what}");
        line.reached()
    }

    #[test]
    fn each_promise_is_judged_from_its_cell() {
        let moves = json!({"jain_index": 0.99, "guest_alive": true});
        let processes = json!([
            [["godwit vm-process", 13.0], ["qemu", 90.0]],
            [["godwit vm-process", 70.0]]
        ]);
        let mut far = row("distance", "ram=8,rtt=150", json!({}));
        far.throughput_gb_per_s = Some(0.114);
        let rows = [
            row("link", "moves=4", moves),
            row("link", "gbps=1,ram=2", json!({"eta_at_tenth_error": 0.2})),
            row("hot", "cancelled", json!({"guest_speed_after": 0.99})),
            row(
                "hot",
                "rate=2",
                json!({"write_share": 0.6, "first_pass_ratio": 0.95}),
            ),
            row("hot", "rate=2,reader", json!({"read_share": 0.93})),
            row("idle", "ram=4", json!({"rss_mib_by_process": processes})),
            far,
        ];
        assert_eq!(reached(&rows, "Jain"), Some(true));
        assert_eq!(reached(&rows, "all guests alive"), Some(true));
        assert_eq!(reached(&rows, "estimate at a tenth"), Some(false));
        assert_eq!(reached(&rows, "after a cancelled"), Some(true));
        assert_eq!(reached(&rows, "what the guest writes"), Some(false));
        assert_eq!(reached(&rows, "first pass"), Some(true));
        assert_eq!(reached(&rows, "only reads"), Some(true));
        assert_eq!(reached(&rows, "MiB of the VM process"), Some(false));
        assert_eq!(reached(&rows, "of a link of 1 Gb/s"), Some(true));
        assert_eq!(reached(&rows, "nothing of the kind"), None);
    }

    #[test]
    fn one_run_that_did_not_end_or_was_not_equal_is_told() {
        let good = row("idle", "base", json!({}));
        assert_eq!(
            reached(std::slice::from_ref(&good), "came to their end"),
            Some(true)
        );
        let mut bad = good.clone();
        bad.outcome = "failed: no".into();
        bad.ram_equal = Some(false);
        assert_eq!(
            reached(&[good.clone(), bad.clone()], "came to their end"),
            Some(false)
        );
        assert_eq!(reached(&[good, bad], "memory was equal"), Some(false));
    }

    #[test]
    fn the_cost_of_a_guest_that_writes_is_for_what_was_sent() {
        let sent = 2.0 * 1_073_741_824.0;
        let mut hot = row("hot", "rate=2", json!({"report": {"bytes_on_wire": sent}}));
        hot.cpu_source_s_per_gb = Some(2.0);
        let lines = lines(&[hot]);
        let worst = lines
            .iter()
            .find(|line| line.what.contains("hot rate=2 cold"));
        assert_eq!(worst.unwrap().ours.unwrap().median, 1.0);
    }
}
