//! What is promised of our moves of disks, held against what was measured.
//!
//! Pure. Refuses to judge what was not measured: such a line is left out.

use super::row::Row;
use crate::group::in_order;

/// A number of a row, where it was measured.
pub type Number = fn(&Row) -> Option<f64>;

/// All runs of one system in one cell.
pub type Group<'a> = crate::group::Group<'a, Row>;

impl Group<'_> {
    /// Whether it is what a user of ours gets who chooses nothing.
    pub fn is_ours(&self) -> bool {
        let row = self.head();
        row.system == "godwit" && matches!(&*row.method, "mirror" | "serve")
    }

    /// Whether it is a method of ours that is there for the comparison.
    pub fn is_of_the_laboratory(&self) -> bool {
        self.head().system == "godwit" && !self.is_ours()
    }

    /// Whether every run that was compared had what its log says.
    pub fn is_equal(&self) -> Option<bool> {
        let compared: Vec<bool> = self.rows.iter().filter_map(|row| row.disks_equal).collect();
        (!compared.is_empty()).then(|| compared.iter().all(|equal| *equal))
    }
}

/// A promise and what became of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    pub place: String,
    pub what: &'static str,
    pub reached: String,
    pub target: String,
    pub is_kept: bool,
}

const MEDIAN_SYNC_TIMES: f64 = 3.0;
/// The paper's limit for its iterative methods.
const LABORATORY_STALL_MS: f64 = 5000.0;

/// Every promise of which something was measured.
pub fn lines(rows: &[Row]) -> Vec<Line> {
    let groups = in_order(rows);
    let mut lines = Vec::new();
    for ours in groups.iter().filter(|group| group.is_ours()) {
        let row = ours.head();
        let place = format!("{} {}", row.scenario, row.cell);
        let peers = groups.iter().filter(|group| {
            let peer = group.head();
            peer.is_at(row) && peer.system.starts_with('q')
        });
        let mut all = own(ours);
        for (ours, peer) in peers.filter_map(|peer| of_the_same_calls(ours, peer)) {
            all.extend(match row.method == "serve" {
                true => steady(&ours, &peer),
                false => beside(&ours, &peer),
            });
        }
        for line in &mut all {
            line.place.clone_from(&place);
        }
        lines.extend(all);
    }
    let laboratory = groups.iter().filter(|group| group.is_of_the_laboratory());
    lines.extend(laboratory.flat_map(of_the_laboratory));
    lines
}

/// A method that need not come to an end may not lose anything, nor hold its guest for long.
fn of_the_laboratory(group: &Group) -> Vec<Line> {
    let row = group.head();
    let stall = group.median(|row| row.switch_stall_ms).map(|stall| {
        line(
            "stall at the change of images",
            format!("{stall:.0} ms ({})", row.method),
            format!("< {LABORATORY_STALL_MS:.0} ms"),
            stall < LABORATORY_STALL_MS,
        )
    });
    let mut lines: Vec<Line> = acknowledged(group).into_iter().chain(stall).collect();
    for line in &mut lines {
        line.place = format!("{} {}", row.scenario, row.cell);
    }
    lines
}

fn acknowledged(group: &Group) -> Option<Line> {
    let equal = group.is_equal()?;
    let lost = group.rows.iter().filter_map(|row| row.acked_writes_lost);
    let lost: u64 = lost.sum();
    let reached = format!("{lost} lost, {}", if equal { "equal" } else { "not equal" });
    Some(line(
        "acknowledged writes at the destination",
        reached,
        "none lost, equal".into(),
        equal && lost == 0,
    ))
}

/// Runs that took turns: from one hour to the next a shared machine differs by more than systems do.
fn of_the_same_calls<'a>(ours: &Group<'a>, peer: &Group<'a>) -> Option<(Group<'a>, Group<'a>)> {
    let of_calls = |one: &Group<'a>, other: &Group<'a>| {
        let is_there = |row: &&&Row| {
            let mut others = other.rows.iter();
            others.any(|other| other.call_unix_s == row.call_unix_s)
        };
        let rows: Vec<&Row> = one.rows.iter().filter(is_there).copied().collect();
        (!rows.is_empty()).then_some(Group { rows })
    };
    Some((of_calls(ours, peer)?, of_calls(peer, ours)?))
}

fn line(what: &'static str, reached: String, target: String, is_kept: bool) -> Line {
    let place = String::new();
    Line {
        place,
        what,
        reached,
        target,
        is_kept,
    }
}

fn own(ours: &Group) -> Vec<Line> {
    let (row, mut lines) = (ours.head(), Vec::new());
    if row.method == "serve" {
        return lines;
    }
    let ended = ours.outcome();
    let is_kept = ended == "completed";
    lines.push(line("it ends", ended, "always".into(), is_kept));
    lines.extend(acknowledged(ours));
    let most = match row.cell.as_str() {
        "oio=2" => Some(5.0),
        "oio=32" => Some(8.0),
        _ => None,
    };
    if let (Some(most), Some(over)) = (most, ours.median(Row::over_bound_pct)) {
        lines.push(line(
            "over the bound",
            format!("{over:.1} %"),
            format!("<= {most} %"),
            over <= most,
        ));
    }
    if let Some(stall) = ours.median(|row| row.switch_stall_ms) {
        let sync = row.details["volumes"][1]["latency_ms"]
            .as_f64()
            .unwrap_or(0.0);
        let most = (MEDIAN_SYNC_TIMES * sync).max(20.0);
        lines.push(line(
            "stall at the change of images",
            format!("{stall:.1} ms"),
            format!("< {most:.0} ms"),
            stall < most,
        ));
    }
    if let Some(error) = ours.median(|row| row.eta_error_pct.map(f64::abs)) {
        lines.push(line(
            "estimate at a tenth of the way, wrong by",
            format!("{error:.1} %"),
            "<= 10 %".into(),
            error <= 10.0,
        ));
    }
    if row.scenario == "slow-destination" {
        let ratio = |row: &Row| Some(row.iops_during? / row.detail("equation_1_iops")?);
        lines.extend(ours.median(ratio).map(|ratio| {
            line(
                "IOPS over those of equation 1",
                format!("{ratio:.2}"),
                ">= 0.85".into(),
                ratio >= 0.85,
            )
        }));
    }
    lines
}

/// A move beside a peer's, by those runs of both that ended: how many did is said.
fn beside(ours: &Group, peer: &Group) -> Vec<Line> {
    let mut lines = Vec::new();
    let name = match peer.outcome().as_str() {
        "completed" => peer.head().name(),
        outcome => format!("{}: {outcome}", peer.head().name()),
    };
    let total = ours
        .median(|row| row.total_s)
        .zip(peer.median(|row| row.total_s));
    lines.extend(total.map(|(we, they)| {
        let reached = format!("{:.2} ({name})", we / they);
        line(
            "duration over the peer's",
            reached,
            "<= 1.05".into(),
            we <= 1.05 * they,
        )
    }));
    let iops = ours
        .median(|row| row.iops_during)
        .zip(peer.median(|row| row.iops_during));
    lines.extend(iops.map(|(we, they)| {
        let reached = format!("{:.2} ({name})", we / they);
        line(
            "IOPS during the move over the peer's",
            reached,
            ">= 0.95".into(),
            we >= 0.95 * they,
        )
    }));
    lines
}

fn steady(ours: &Group, peer: &Group) -> Vec<Line> {
    let numbers: [(&'static str, Number, bool); 3] = [
        ("IOPS over the peer's", |row| row.iops_before, true),
        (
            "mean time of a write over the peer's",
            |row| row.write_latency_ms,
            false,
        ),
        (
            "mean time of a read over the peer's",
            |row| row.detail("read_mean_ms"),
            false,
        ),
    ];
    let mut lines = Vec::new();
    for (what, number, more_is_better) in numbers {
        let Some((we, they)) = ours.median(number).zip(peer.median(number)) else {
            continue;
        };
        let ratio = we / they;
        let reached = format!("{ratio:.2} ({})", peer.head().name());
        lines.push(match more_is_better {
            true => line(what, reached, ">= 1".into(), ratio >= 1.0),
            false => line(what, reached, "<= 1".into(), ratio <= 1.0),
        });
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(system: &str, total_s: f64, iops: f64) -> Row {
        Row {
            scenario: "oio".into(),
            cell: "oio=32".into(),
            system: system.into(),
            method: "mirror".into(),
            total_s: Some(total_s),
            bound_s: Some(10.0),
            iops_during: Some(iops),
            switch_stall_ms: Some(25.0),
            disks_equal: Some(true),
            acked_writes_lost: Some(0),
            outcome: "completed".into(),
            details: json!({"volumes": [{"latency_ms": 1.0}, {"latency_ms": 10.0}]}),
            ..Row::default()
        }
    }

    fn kept(rows: &[Row], what: &str) -> Option<bool> {
        let lines = lines(rows);
        let found = lines.iter().find(|line| line.what == what)?;
        Some(found.is_kept)
    }

    #[test]
    fn a_move_is_held_against_its_bound_and_its_peers() {
        let rows = [row("godwit", 10.7, 95.0), row("qsd", 10.0, 100.0)];
        assert_eq!(kept(&rows, "over the bound"), Some(true));
        assert_eq!(kept(&rows, "duration over the peer's"), Some(false));
        let iops = "IOPS during the move over the peer's";
        assert_eq!(kept(&rows, iops), Some(true));
        // Three syncs of a slow destination are more than 20 ms.
        assert_eq!(kept(&rows, "stall at the change of images"), Some(true));
        let slow = [row("godwit", 10.9, 94.0), row("qsd", 10.9, 100.0)];
        assert_eq!(kept(&slow, "over the bound"), Some(false));
        assert_eq!(kept(&slow, iops), Some(false));
        assert_eq!(kept(&slow[..1], iops), None);
        // Rows of another call of the bench are held against nothing.
        let mut other = slow.clone();
        other[1].call_unix_s = 7;
        assert_eq!(kept(&other, iops), None);
    }

    #[test]
    fn a_method_of_the_laboratory_may_give_up_and_may_neither_lose_nor_hold() {
        let of = |stall_ms, outcome: &str| Row {
            method: "dirty-tracking".into(),
            outcome: outcome.into(),
            switch_stall_ms: Some(stall_ms),
            ..row("godwit", 10.0, 1.0)
        };
        let stall = "stall at the change of images";
        assert_eq!(kept(&[of(4900.0, "completed")], stall), Some(true));
        assert_eq!(kept(&[of(5100.0, "completed")], stall), Some(false));
        assert_eq!(
            kept(&[of(1.0, "gave up: too much is written")], "it ends"),
            None
        );
        let lost = Row {
            acked_writes_lost: Some(1),
            ..of(1.0, "completed")
        };
        let what = "acknowledged writes at the destination";
        assert_eq!(kept(&[lost], what), Some(false));
    }

    #[test]
    fn a_lost_write_and_a_move_without_an_end_are_broken_promises() {
        let mut rows = [row("godwit", 10.0, 1.0), row("godwit", 10.0, 1.0)];
        rows[1].acked_writes_lost = Some(1);
        rows[1].disks_equal = Some(false);
        let what = "acknowledged writes at the destination";
        assert_eq!(kept(&rows, what), Some(false));
        rows[0].outcome = "cut-off".into();
        assert_eq!(kept(&rows, "it ends"), Some(false));
    }
}
