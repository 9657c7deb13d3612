//! What the rows say: ratios to the best peer, and whether a target is reached.
//!
//! Pure. Refuses to judge what was not measured: such a line says so.

use crate::group::{Group, Spread, comparable, groups, place};
use crate::promises::{self, Chosen, Figure, Promise, Run};
use crate::row::Row;
use serde::Deserialize;

/// Our figure against the best peer's, in one cell.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    pub cell: String,
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
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
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
    #[default]
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

/// Groups of one place.
struct Pick<'a> {
    groups: &'a [Group<'a>],
    scenario: &'a str,
    cell: &'a str,
}

impl Pick<'_> {
    fn line(&self, promise: &Promise) -> Line {
        let figure = &promise.figure;
        let ours = self.matching(&promise.ours).next();
        let ours = ours.and_then(|group| group.spread(|row| figure.of(row)));
        let judged = |all: Spread| match promise.run {
            Run::Median => all.median,
            Run::Least => all.least,
            Run::Most => all.most,
        };
        let peer = promise.peer.as_ref();
        Line {
            cell: format!("{} {}", self.scenario, self.cell),
            what: promise.what.clone(),
            ours: ours.map(|all| Spread {
                median: judged(all),
                ..all
            }),
            peer: peer.and_then(|chosen| self.best(chosen, figure)),
            note: peer.map_or(String::new(), |chosen| self.none_ended(chosen)),
            target: promise.target,
        }
    }

    /// The peer with the best median.
    fn best(&self, chosen: &Chosen, figure: &Figure) -> Option<(Spread, String)> {
        let elsewhere = chosen
            .cell
            .as_ref()
            .map_or(String::new(), |cell| format!(", {cell}"));
        let spreads = self
            .matching(chosen)
            // Who lost a write on the way has not moved the guest.
            .filter(|group| group.equal() != Some(false))
            .filter_map(|group| {
                let spread = group.spread(|row| figure.of(row))?;
                Some((spread, group.full_name() + &elsewhere))
            });
        let sign = if *figure == Figure::Rate { 1.0 } else { -1.0 };
        spreads.max_by(|one, two| (sign * one.0.median).total_cmp(&(sign * two.0.median)))
    }

    /// That peers were here and none came to its end; else nothing.
    fn none_ended(&self, chosen: &Chosen) -> String {
        let mut peers = self.matching(chosen).peekable();
        let some = peers.peek().is_some() && chosen.system.starts_with("qemu");
        if some && peers.all(|group| group.cut_off() && group.median(|row| row.total_s).is_none()) {
            return "none: every peer was cut off at ten times our time".into();
        }
        String::new()
    }

    fn matching<'b>(&'b self, chosen: &'b Chosen) -> impl Iterator<Item = &'b Group<'b>> {
        let cell = chosen.cell.as_deref().unwrap_or(self.cell);
        self.groups.iter().filter(move |group| {
            place(group.head()) == (self.scenario, cell) && chosen.fits(group.head())
        })
    }
}

/// Every comparison that the rows allow, cell by cell.
pub fn lines(rows: &[Row]) -> Vec<Line> {
    let all = groups(rows);
    let groups = comparable(&all);
    let mut cells: Vec<(&str, &str)> = Vec::new();
    for group in &groups {
        let cell = place(group.head());
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
        let due = promises::all()
            .iter()
            .filter(|promise| promise.is_at(scenario, cell));
        lines.extend(due.map(|promise| pick.line(promise)));
    }
    lines.extend(promises::of_all(&all, &groups));
    lines.retain(|line| {
        let alone = matches!(line.target, Target::Below(_) | Target::Above(_));
        line.ours.is_some() && (line.peer.is_some() || alone || !line.note.is_empty())
    });
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::RATE;
    use crate::row::CUT_OFF;

    fn row(system: &str, encryption: &str, destination: &str, rate: f64) -> Row {
        Row {
            throughput_gb_per_s: Some(rate),
            total_s: Some(1.0 / rate),
            switchover_ms: Some(5.0),
            ..Row::sample(system, encryption, destination)
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
    fn a_row_on_memory_that_the_hypervisor_took_back_is_in_no_ratio_ours_or_a_peers() {
        let touched = |speed: f64, mut row: Row| {
            row.first_touch_gb_per_s = Some(speed);
            row.ram_equal = Some(true);
            row
        };
        let mut rows = vec![
            touched(10.0, row("godwit", "none", "cold", 2.0)),
            touched(0.3, row("godwit", "none", "cold", 0.2)),
            touched(9.0, row("qemu-10.0", "none", "cold", 1.0)),
            touched(0.4, row("qemu-10.0", "none", "cold", 0.1)),
            touched(4.0, row("qemu-10.0", "none", "cold", 1.0)),
        ];
        let all = lines(&rows);
        let cold = find(&all, "GB/s, plain, cold");
        let (ours, peer) = (cold.ours.unwrap(), cold.peer.as_ref().unwrap().0);
        assert_eq!((ours.median, ours.runs), (2.0, 1));
        assert_eq!((peer.least, peer.runs), (1.0, 2));
        // They were moves all the same: none may be lost or unequal unseen.
        assert_eq!(
            find(&all, "part of our runs that came").ours.unwrap().runs,
            2
        );
        // In another call the whole machine was slow, and nothing of it is left out.
        for row in &mut rows {
            row.call_unix_s = u64::from(row.first_touch_gb_per_s < Some(1.0));
        }
        assert_eq!(
            find(&lines(&rows), "GB/s, plain, cold").ours.unwrap().runs,
            2
        );
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
