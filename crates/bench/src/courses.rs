//! What happens beside a move that is measured: a link that is cut and heals, a report that is asked for its estimate.
//!
//! Owns the cut: a link is healed when the value goes, however the run ended. Refuses: nothing; a report that cannot be
//! had is asked for again.

use crate::bench::{Run, unix_now};
use crate::plan::Course;
use crate::stage::Stage;
use anyhow::Result;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Between questions for an estimate, which cost CPU that the migration could use.
const ASK_EVERY: Duration = Duration::from_millis(400);
/// Part of the way after which an estimate counts.
const A_TENTH: f64 = 0.1;
/// Where in the first pass a link is cut.
const CUT_AT: f64 = 0.4;

pub struct Beside<'a> {
    stage: &'a Stage,
    began: f64,
    cut: Option<Cut>,
    ask_at: Option<Instant>,
    estimate: Option<Estimate>,
}

struct Cut {
    begin: Instant,
    end: Instant,
    is_cut: bool,
    healed: bool,
}

#[derive(Debug, Clone, Copy)]
struct Estimate {
    at_s: f64,
    part_done: f64,
    eta_s: f64,
}

impl<'a> Beside<'a> {
    /// For a move that begins now.
    pub fn begin(stage: &'a Stage, run: &Run) -> Self {
        let now = Instant::now();
        let cut = match run.cell.course {
            Course::Cut(cut_s) => {
                let bits = f64::from(run.cell.ram_mib) * 1_048_576.0 * 8.0;
                let pass_s = bits / 1e9 / run.cell.network.gbps.unwrap_or(10.0);
                let begin = now + Duration::from_secs_f64(pass_s * CUT_AT);
                Some(Cut {
                    begin,
                    end: begin + Duration::from_secs_f64(cut_s),
                    is_cut: false,
                    healed: false,
                })
            }
            _ => None,
        };
        Self {
            stage,
            began: unix_now(),
            cut,
            ask_at: (run.cell.course == Course::Estimated).then_some(now),
            estimate: None,
        }
    }

    /// Does what is due. The migration can be asked for only where the product moves.
    pub fn look(&mut self, migration: Option<&str>) -> Result<()> {
        let now = Instant::now();
        if let Some(cut) = &mut self.cut {
            if !cut.is_cut && !cut.healed && now >= cut.begin {
                self.stage.cut()?;
                cut.is_cut = true;
            }
            if cut.is_cut && now >= cut.end {
                self.stage.heal()?;
                (cut.is_cut, cut.healed) = (false, true);
            }
        }
        let (Some(at), Some(id)) = (self.ask_at, migration) else {
            return Ok(());
        };
        if now >= at {
            let asked_s = unix_now() - self.began;
            let report = self.stage.json("controller", &["migration", "show", id])?;
            self.estimate = estimate_in(&report, asked_s);
            self.ask_at = self.estimate.is_none().then_some(now + ASK_EVERY);
        }
        Ok(())
    }

    /// What there was, for the details of a move that took so long.
    pub fn told(&self, total_s: f64, details: &mut Value) {
        if let Some(cut) = &self.cut {
            details["cut_healed_before_the_end"] = json!(cut.healed);
            details["cut_s"] = json!((cut.end - cut.begin).as_secs_f64());
        }
        if let Some(estimate) = self.estimate {
            let foretold_s = estimate.at_s + estimate.eta_s;
            details["eta_at_tenth"] = json!({
                "asked_after_s": estimate.at_s, "part_done": estimate.part_done, "eta_s": estimate.eta_s,
            });
            details["eta_at_tenth_error"] = json!((foretold_s / total_s - 1.0).abs());
        }
    }
}

impl Drop for Beside<'_> {
    fn drop(&mut self) {
        if self.cut.as_ref().is_some_and(|cut| cut.is_cut) {
            // A link that cannot be healed is made anew with its stage.
            let _ = self.stage.heal();
        }
    }
}

/// The estimate of a report that is far enough; none before.
fn estimate_in(report: &Value, at_s: f64) -> Option<Estimate> {
    let all = report["ram_mib"].as_f64()? * 1_048_576.0;
    let part_done = 1.0 - report["remaining_bytes"].as_f64()? / all;
    let eta_s = report["eta_s"].as_f64()?;
    let counts = report["phase"] == "precopy" && part_done >= A_TENTH;
    counts.then_some(Estimate {
        at_s,
        part_done,
        eta_s,
    })
}

/// How evenly something was shared: 1 when all had the same, one over their number when one had all.
pub fn jain_index(shares: &[f64]) -> Option<f64> {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    (squares > 0.0).then(|| sum * sum / (shares.len() as f64 * squares))
}

/// The speed of the first pass over the median of later ones that moved enough to tell; none where there are not three
/// passes or no such one.
pub fn first_pass_ratio(report: &Value) -> Option<f64> {
    const ENOUGH_BYTES: f64 = 50e6;
    let passes = report["iterations"].as_array()?;
    if passes.len() < 3 {
        return None;
    }
    let speed = |pass: &Value| {
        let (bytes, seconds) = (pass["bytes"].as_f64()?, pass["seconds"].as_f64()?);
        (bytes >= ENOUGH_BYTES && seconds > 0.0).then_some(bytes / seconds)
    };
    let first = speed(passes.first()?)?;
    let later: Vec<f64> = passes[1..].iter().filter_map(speed).collect();
    Some(first / crate::group::median(&later)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jain_tells_even_shares_from_one_that_has_all() {
        assert_eq!(jain_index(&[2.0, 2.0, 2.0, 2.0]), Some(1.0));
        assert_eq!(jain_index(&[8.0, 0.0, 0.0, 0.0]), Some(0.25));
        assert_eq!(jain_index(&[]), None);
    }

    #[test]
    fn an_estimate_counts_from_a_tenth_of_the_way_on() {
        let report = |left: u64, eta: Value| json!({"phase": "precopy", "ram_mib": 100, "remaining_bytes": left << 20, "eta_s": eta});
        assert!(estimate_in(&report(95, json!(9.0)), 1.0).is_none());
        assert!(estimate_in(&report(80, Value::Null), 1.0).is_none());
        let found = estimate_in(&report(80, json!(8.0)), 2.0).unwrap();
        assert!((found.part_done - 0.2).abs() < 1e-9);
        assert_eq!((found.at_s, found.eta_s), (2.0, 8.0));
    }

    #[test]
    fn the_first_pass_is_held_against_later_ones_that_moved_enough() {
        let pass =
            |megabytes: f64, seconds: f64| json!({"bytes": megabytes * 1e6, "seconds": seconds});
        let of = |passes: &[Value]| first_pass_ratio(&json!({"iterations": passes}));
        let passes = [pass(800.0, 8.0), pass(400.0, 3.2), pass(1.0, 1.0)];
        assert_eq!(of(&passes), Some(0.8));
        assert_eq!(of(&passes[..2]), None);
        assert_eq!(
            of(&[pass(800.0, 8.0), pass(1.0, 1.0), pass(0.0, 1.0)]),
            None
        );
    }
}
