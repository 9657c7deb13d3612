//! What the rows say: ratios to the best peer, and whether a target is reached.
//!
//! Pure. Refuses to judge what was not measured: such a line says so.

use crate::group::{
    COST_DESTINATION, COST_SOURCE, Group, Number, RATE, STOP, Spread, TOTAL, beside_ours, groups,
    is_encrypted, is_ours, is_prepared, is_qemu, place,
};
use crate::promises;
use crate::row::Row;

/// Our figure against the best peer's, in one cell.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// Scenario and cell.
    pub cell: String,
    /// What is compared.
    pub what: String,
    /// Ours, with its spread.
    pub ours: Option<Spread>,
    /// The peer's, with its name.
    pub peer: Option<(Spread, String)>,
    /// Said in place of a peer's figure: that no peer came to its end.
    pub note: String,
    /// How the ratio is to be read, and what it has to be.
    pub target: Target,
}

/// What a line has to reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// Ours over the peer's is at least this.
    AtLeast(f64),
    /// Ours over the peer's is at most this.
    AtMost(f64),
    /// Ours is at most so many units more than the peer's.
    MoreByAtMost(f64),
    /// Ours is at most this, whatever the peer's is.
    Below(f64),
    /// Ours is at least this, whatever the peer's is.
    Above(f64),
    /// Shown only.
    None,
}

impl Line {
    /// Ours over the peer's.
    pub fn ratio(&self) -> Option<f64> {
        let peer = self.peer.as_ref()?.0.median;
        (peer > 0.0).then_some(self.ours?.median / peer)
    }

    /// Whether the target is reached; none where it cannot be told.
    pub fn reached(&self) -> Option<bool> {
        let ours = self.ours?.median;
        if self.peer.is_none() && !self.note.is_empty() && self.target != Target::None {
            return Some(true);
        }
        match self.target {
            Target::AtLeast(least) => Some(self.ratio()? >= least),
            Target::AtMost(most) => Some(self.ratio()? <= most),
            Target::MoreByAtMost(more) => Some(ours <= self.peer.as_ref()?.0.median + more),
            Target::Below(most) => Some(ours <= most),
            Target::Above(least) => Some(ours >= least),
            Target::None => None,
        }
    }
}

/// Which groups a line draws on.
pub(crate) struct Pick<'a> {
    pub groups: &'a [Group<'a>],
    pub scenario: &'a str,
    pub cell: &'a str,
}

impl Pick<'_> {
    pub fn ours(&self, encrypted: bool, prepared: bool, number: Number) -> Option<Spread> {
        let fits = |row: &Row| {
            is_ours(row) && is_encrypted(row) == encrypted && is_prepared(row) == prepared
        };
        let mut all = self.matching(fits);
        all.next()?.spread(number)
    }

    /// The peer with the best median.
    pub fn best(
        &self,
        more: bool,
        number: Number,
        fits: impl Fn(&Row) -> bool,
    ) -> Option<(Spread, String)> {
        let spreads = self
            .matching(fits)
            // Who lost a write on the way has not moved the guest.
            .filter(|group| group.equal() != Some(false))
            .filter_map(|group| Some((group.spread(number)?, group.full_name())));
        let sign = if more { 1.0 } else { -1.0 };
        spreads.max_by(|one, two| (sign * one.0.median).total_cmp(&(sign * two.0.median)))
    }

    /// That peers were here and none came to its end; else nothing.
    fn none_ended(&self, fits: impl Fn(&Row) -> bool) -> String {
        let mut peers = self.matching(fits).peekable();
        let some = peers.peek().is_some();
        if some && peers.all(|group| group.cut_off() && group.median(TOTAL).is_none()) {
            return "none: every peer was cut off at ten times our time".into();
        }
        String::new()
    }

    fn matching(&self, fits: impl Fn(&Row) -> bool) -> impl Iterator<Item = &Group<'_>> {
        self.groups.iter().filter(move |group| {
            let row = group.head();
            place(row) == (self.scenario, self.cell) && fits(row)
        })
    }
}

/// Every comparison that the rows allow, cell by cell.
pub fn lines(rows: &[Row]) -> Vec<Line> {
    let groups = beside_ours(&groups(rows));
    let mut cells: Vec<(&str, &str)> = Vec::new();
    for group in &groups {
        let row = group.head();
        let cell = place(row);
        if !cells.contains(&cell) {
            cells.push(cell);
        }
    }
    let mut lines = Vec::new();
    for (scenario, cell) in cells {
        let pick = Pick {
            groups: &groups,
            scenario,
            cell,
        };
        if scenario == "idle" {
            lines.extend(throughput(&pick));
            lines.extend(cost(&pick));
        }
        lines.extend(general(&pick));
        lines.extend(promises::of_cell(&pick));
    }
    lines.extend(across(&groups));
    lines.extend(promises::of_all(&groups));
    lines.retain(|line| {
        let alone = matches!(line.target, Target::Below(_) | Target::Above(_));
        line.ours.is_some() && (line.peer.is_some() || alone || !line.note.is_empty())
    });
    lines
}

pub(crate) fn line(
    pick: &Pick,
    what: &str,
    ours: Option<Spread>,
    peer: Option<(Spread, String)>,
    target: Target,
) -> Line {
    Line {
        cell: format!("{} {}", pick.scenario, pick.cell),
        what: what.to_owned(),
        ours,
        peer,
        note: String::new(),
        target,
    }
}

fn throughput(pick: &Pick) -> Vec<Line> {
    let plain = |prepared: bool| {
        move |row: &Row| is_qemu(row) && !is_encrypted(row) && is_prepared(row) == prepared
    };
    let tls = |row: &Row| is_qemu(row) && is_encrypted(row);
    let network = |row: &Row| row.system == "iperf3";
    vec![
        line(
            pick,
            "GB/s, plain, cold, against the best cold plain",
            pick.ours(false, false, RATE),
            pick.best(true, RATE, plain(false)),
            Target::AtLeast(3.0),
        ),
        line(
            pick,
            "s from the command, plain, cold, against the best prepared plain",
            pick.ours(false, false, TOTAL),
            pick.best(false, TOTAL, plain(true)),
            Target::AtMost(1.0),
        ),
        line(
            pick,
            "GB/s, plain, prepared, against the best plain of either kind",
            pick.ours(false, true, RATE),
            pick.best(true, RATE, |row| is_qemu(row) && !is_encrypted(row)),
            Target::AtLeast(1.0),
        ),
        line(
            pick,
            "GB/s, plain, prepared, against the network",
            pick.ours(false, true, RATE),
            pick.best(true, RATE, network),
            Target::AtLeast(0.85),
        ),
        line(
            pick,
            "GB/s, encrypted, cold, against the best TLS of either kind",
            pick.ours(true, false, RATE),
            pick.best(true, RATE, tls),
            Target::AtLeast(5.0),
        ),
        line(
            pick,
            "GB/s, encrypted, prepared, against the best TLS of either kind",
            pick.ours(true, true, RATE),
            pick.best(true, RATE, tls),
            Target::AtLeast(5.0),
        ),
    ]
}

fn cost(pick: &Pick) -> Vec<Line> {
    let mut lines = Vec::new();
    for (side, number, paper) in [
        ("source", COST_SOURCE, 1.6),
        ("destination", COST_DESTINATION, 1.2),
    ] {
        for (prepared, target) in [(false, Target::AtMost(1.0)), (true, Target::AtMost(1.4))] {
            let kind = if prepared { "prepared" } else { "cold" };
            let plain =
                |row: &Row| is_qemu(row) && !is_encrypted(row) && is_prepared(row) == prepared;
            let ours = pick.ours(true, prepared, number);
            let what = format!("core-s/GB, {side}, encrypted, {kind}, against the cheapest plain");
            lines.push(line(
                pick,
                &what,
                ours,
                pick.best(false, number, plain),
                target,
            ));
            let what = format!("core-s/GB, {side}, encrypted, {kind}, against the paper's");
            lines.push(line(pick, &what, ours, None, Target::Below(paper)));
            let without = pick
                .ours(false, prepared, number)
                .map(|spread| (spread, "godwit, plain".to_owned()));
            let what = format!("core-s/GB, {side}, {kind}: what encryption adds");
            lines.push(line(pick, &what, ours, without, Target::MoreByAtMost(0.2)));
        }
    }
    lines
}

/// Our own cells against each other: scenario, cell, the cell it is held against, target of the duration and of the
/// switchover.
const ACROSS: [(&str, &str, &str, Target, Target); 9] = [
    (
        "idle",
        "ram=8,vcpus=4",
        "ram=1",
        Target::None,
        Target::MoreByAtMost(10.0),
    ),
    ("ipv6", "unshaped,ipv6", "unshaped,ipv4", SIX, Target::None),
    ("ipv6", "gbps=1,ipv6", "gbps=1,ipv4", SIX, Target::None),
    (
        "link",
        "cut=30",
        "gbps=1,ram=2",
        Target::MoreByAtMost(35.0),
        Target::None,
    ),
    far("rtt=5,loss=0", 5.0),
    far("rtt=50,loss=0", 50.0),
    far("rtt=100,loss=0", 100.0),
    far("rtt=150,loss=0", 150.0),
    (
        "distance",
        "ram=8,rtt=150",
        "ram=8,rtt=0.5",
        Target::AtMost(1.05),
        Target::MoreByAtMost(300.0),
    ),
];

const SIX: Target = Target::AtMost(1.05);

/// A long way costs the switchover two round trips at most. Its duration counts where memory is large.
const fn far(
    cell: &'static str,
    rtt_ms: f64,
) -> (&'static str, &'static str, &'static str, Target, Target) {
    let more = Target::MoreByAtMost(2.0 * rtt_ms);
    ("distance", cell, "rtt=0.5,loss=0", Target::None, more)
}

fn across(groups: &[Group]) -> Vec<Line> {
    let mut lines = Vec::new();
    for (scenario, cell, other, duration, switchover) in ACROSS {
        let at = |cell| Pick {
            groups,
            scenario,
            cell,
        };
        for (unit, number, target) in [
            ("s from the command", TOTAL, duration),
            ("ms switchover", STOP, switchover),
        ] {
            if target != Target::None {
                let peer = at(other)
                    .ours(true, false, number)
                    .map(|spread| (spread, format!("godwit, {other}")));
                let what = format!("{unit}, encrypted, against {other}");
                lines.push(line(
                    &at(cell),
                    &what,
                    at(cell).ours(true, false, number),
                    peer,
                    target,
                ));
            }
        }
    }
    lines
}

fn general(pick: &Pick) -> Vec<Line> {
    let mut lines = Vec::new();
    for encrypted in [false, true] {
        let kind = if encrypted { "encrypted" } else { "plain" };
        if pick.scenario != "idle" {
            let alike = move |row: &Row| is_qemu(row) && is_encrypted(row) == encrypted;
            let what = format!("s from the command, {kind}");
            let ours = pick.ours(encrypted, false, TOTAL);
            let peer = pick.best(false, TOTAL, alike);
            let mut found = line(pick, &what, ours, peer, Target::None);
            found.note = pick.none_ended(alike);
            lines.push(found);
        }
        lines.extend(switchover(pick, encrypted, kind));
    }
    if pick.scenario == "link" && pick.cell.starts_with("gbps") {
        for (what, number) in [("s from the command", TOTAL), ("ms switchover", STOP)] {
            let plain = pick
                .ours(false, false, number)
                .map(|spread| (spread, "godwit, plain".to_owned()));
            let what = format!("{what}: encrypted against plain");
            lines.push(line(
                pick,
                &what,
                pick.ours(true, false, number),
                plain,
                Target::AtMost(1.03),
            ));
        }
    }
    lines
}

/// Against the peer's shortest of either encryption, which is the harder way to read it.
fn switchover(pick: &Pick, encrypted: bool, kind: &str) -> Vec<Line> {
    let ours = pick.ours(encrypted, false, STOP);
    let idle = pick.scenario == "idle";
    let fits = |row: &Row| is_qemu(row) && (!idle || row.system == "qemu-10.0");
    let at_rest = pick.cell == "rate=0";
    let target = match pick.scenario {
        "idle" | "zero" => Target::MoreByAtMost(10.0),
        "hot" if at_rest => Target::MoreByAtMost(10.0),
        "hot" | "redis" => Target::AtMost(0.2),
        _ => Target::None,
    };
    let what = format!("ms switchover, {kind}");
    let mut against = line(pick, &what, ours, pick.best(false, STOP, fits), target);
    against.note = pick.none_ended(fits);
    let most = match (pick.scenario, pick.cell) {
        ("idle", _) => Some((15.0, "idle")),
        ("hot", cell) if cell.starts_with("rate=2") => Some((300.0, "twice the link, the longest")),
        ("redis", "set=100") => Some((100.0, "the busiest mix")),
        _ => None,
    };
    let alone = most.map(|(most, name)| {
        let what = format!("ms switchover, {kind}, {name}");
        // Twice the link: every run.
        let judged = match pick.cell {
            cell if cell.starts_with("rate=2") => ours.map(|ours| Spread {
                median: ours.most,
                ..ours
            }),
            _ => ours,
        };
        line(pick, &what, judged, None, Target::Below(most))
    });
    std::iter::once(against).chain(alone).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::CUT_OFF;

    fn row(system: &str, encryption: &str, destination: &str, rate: f64) -> Row {
        Row {
            scenario: "idle".into(),
            cell: "base".into(),
            system: system.into(),
            encryption: encryption.into(),
            destination: destination.into(),
            throughput_gb_per_s: Some(rate),
            total_s: Some(1.0 / rate),
            switchover_ms: Some(5.0),
            outcome: "completed".into(),
            ..Row::default()
        }
    }

    fn find<'a>(lines: &'a [Line], what: &str) -> &'a Line {
        lines
            .iter()
            .find(|line| line.what.starts_with(what))
            .unwrap()
    }

    #[test]
    fn our_median_is_held_against_the_best_peer_of_the_same_kind() {
        let rows = [
            row("godwit", "none", "cold", 1.0),
            row("godwit", "none", "cold", 3.0),
            row("godwit", "none", "cold", 2.0),
            row("qemu-7.2", "none", "cold", 0.2),
            row("qemu-10.0", "none", "cold", 0.5),
            row("qemu-10.0", "none", "prepared", 9.0),
            row("qemu-10.0", "tls", "cold", 8.0),
        ];
        let lines = lines(&rows);
        let cold = find(&lines, "GB/s, plain, cold");
        assert_eq!(cold.ours.unwrap().median, 2.0);
        assert!(cold.peer.as_ref().unwrap().1.starts_with("qemu-10.0"));
        assert_eq!((cold.ratio(), cold.reached()), (Some(4.0), Some(true)));
        let command = find(&lines, "s from the command, plain, cold");
        assert_eq!(command.reached(), Some(false));
    }

    #[test]
    fn a_peer_that_lost_a_write_is_no_peer() {
        let mut lossy = row("qemu-7.2", "none", "cold", 0.9);
        lossy.ram_equal = Some(false);
        let mut sound = row("qemu-10.0", "none", "cold", 0.5);
        sound.ram_equal = Some(true);
        let rows = [row("godwit", "none", "cold", 1.0), lossy, sound];
        let lines = lines(&rows);
        let peer = find(&lines, "GB/s, plain, cold").peer.as_ref().unwrap();
        assert!(peer.1.starts_with("qemu-10.0"), "{}", peer.1);
    }

    #[test]
    fn a_peer_measured_in_another_call_than_ours_is_in_no_ratio() {
        let of_call = |call_unix_s, mut row: Row| {
            row.call_unix_s = call_unix_s;
            row
        };
        let mut elsewhere = of_call(1, row("qemu-10.0", "none", "cold", 99.0));
        elsewhere.cell = "ram=1".into();
        let mut rows = vec![
            of_call(1, row("godwit", "none", "cold", 2.0)),
            of_call(1, row("qemu-7.2", "none", "cold", 1.0)),
            of_call(2, row("qemu-7.2", "none", "cold", 5.0)),
            of_call(2, row("qemu-10.0", "none", "cold", 9.0)),
            elsewhere,
        ];
        let peer = |rows: &[Row]| {
            let lines = lines(rows);
            find(&lines, "GB/s, plain, cold").peer.clone().unwrap()
        };
        let (spread, name) = peer(&rows);
        assert_eq!((spread.median, spread.runs), (1.0, 1), "{name}");
        // Ours beside it in the second call too: then all count.
        rows.push(of_call(2, row("godwit", "none", "cold", 4.0)));
        let (spread, name) = peer(&rows);
        assert!(name.starts_with("qemu-10.0"), "{name}");
        assert_eq!(spread.median, 9.0);
    }

    #[test]
    fn a_run_that_did_not_complete_is_in_no_median_and_is_told() {
        let mut cut = row("qemu-7.2", "none", "cold", 9.0);
        cut.outcome = CUT_OFF.into();
        let rows = [
            row("godwit", "none", "cold", 1.0),
            cut,
            row("qemu-7.2", "none", "cold", 0.5),
        ];
        let groups = groups(&rows);
        assert_eq!(groups.len(), 2);
        assert!(groups[1].cut_off());
        assert_eq!(groups[1].median(RATE), Some(0.5));
        assert!(groups[1].outcome().contains("1 of 2"));
    }

    #[test]
    fn where_every_peer_was_cut_off_the_line_stands_and_is_reached() {
        let hot = |mut row: Row, outcome: &str| {
            (row.scenario, row.cell) = ("hot".into(), "rate=2".into());
            row.outcome = outcome.into();
            row
        };
        let mut cut = hot(row("qemu-7.2", "none", "cold", 1.0), CUT_OFF);
        (cut.total_s, cut.switchover_ms) = (None, None);
        let rows = [hot(row("godwit", "none", "cold", 1.0), "completed"), cut];
        let lines = lines(&rows);
        let stop = find(&lines, "ms switchover, plain");
        assert_eq!((stop.reached(), stop.ratio()), (Some(true), None));
        assert!(stop.note.contains("cut off"), "{}", stop.note);
        let alone = find(&lines, "ms switchover, plain, twice");
        assert_eq!(alone.reached(), Some(true));
    }

    #[test]
    fn what_was_not_measured_is_no_line() {
        assert!(lines(&[row("qemu-7.2", "none", "cold", 1.0)]).is_empty());
    }
}
