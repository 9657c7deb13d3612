//! How long a plan takes, by rules of thumb from runs on a quiet machine of two cores.
//!
//! Pure. Refuses nothing; a busy machine needs more.

use crate::plan::{CUT_OFF_FACTOR, Cell, Course, Guest};
use crate::system::{System, Version, Way};

/// Bringing up hosts for a cell, where they cannot be used again.
const STAGE_S: f64 = 2.0;
/// Booting Linux, filling Redis, load before and after, reading all of it back.
const AROUND_REDIS_S: f64 = 33.0;
/// What a link carries of its rate is not all guest memory.
const LINK_OVERHEAD: f64 = 1.08;

pub fn estimate_s(cells: &[Cell]) -> f64 {
    cells.iter().map(cell_s).sum()
}

/// Seconds that all runs of a cell take.
pub fn cell_s(cell: &Cell) -> f64 {
    let of_system = |system: &System| {
        // What was cut off once is not run again.
        let runs = if never_ends(cell, system) {
            1
        } else {
            cell.runs
        };
        run_s(cell, system) * f64::from(runs)
    };
    STAGE_S + cell.systems.iter().map(of_system).sum::<f64>()
}

fn run_s(cell: &Cell, system: &System) -> f64 {
    match system {
        System::Iperf { .. } => return 3.3,
        System::FirstTouch { .. } | System::Cipher { .. } => return 1.2,
        System::Godwit { .. } | System::Qemu(_) => {}
    }
    around_s(cell) + move_s(cell, system)
}

/// What is done for a run beside the move: the guest boots, is filled, watched and compared.
fn around_s(cell: &Cell) -> f64 {
    let gib = f64::from(cell.ram_mib) / 1024.0;
    let one = match cell.guest {
        Guest::Fresh => 0.6 + 0.4 * gib,
        Guest::Idle => 0.5 + 0.85 * gib,
        Guest::Counter { .. } => 5.5 + 0.85 * gib,
        Guest::Redis { .. } => AROUND_REDIS_S,
    };
    one * f64::from(cell.rows_a_run())
}

fn move_s(cell: &Cell, system: &System) -> f64 {
    let gb = f64::from(cell.ram_mib) * 1.048_576e-3 * f64::from(cell.rows_a_run());
    let gbps = cell.network.gbps.unwrap_or(f64::INFINITY) * f64::from(cell.network.cards);
    let link_s = gb * 8.0 * LINK_OVERHEAD / gbps;
    let filled = match cell.guest {
        Guest::Fresh => 0.1,
        _ => 1.0,
    };
    let once_s = 0.1 + link_s.max(gb * filled * seconds_per_gb(system));
    let ours_s = once_s * (1.0 + share(cell).min(2.0));
    match cell.course {
        Course::Cancelled => 80.0,
        Course::Cut(cut_s) => once_s + cut_s * if ours(system) { 1.0 } else { 2.0 },
        _ if never_ends(cell, system) => ours_s * CUT_OFF_FACTOR,
        _ => ours_s,
    }
}

/// What the guest writes, over what the link carries.
fn share(cell: &Cell) -> f64 {
    match (cell.guest, cell.network.gbps) {
        (Guest::Counter { mib_per_s, .. }, Some(gbps)) => {
            mib_per_s.map_or(2.0, |rate| rate * 8.0 * 1.048_576e-3 / gbps)
        }
        _ => 0.0,
    }
}

/// A peer whose guest writes as fast as the link carries.
fn never_ends(cell: &Cell, system: &System) -> bool {
    !ours(system) && share(cell) > 0.9
}

fn ours(system: &System) -> bool {
    matches!(system, System::Godwit { .. })
}

fn seconds_per_gb(system: &System) -> f64 {
    match system {
        System::Godwit { .. } => 0.55,
        System::Qemu(Way {
            version: Version::Ten,
            tls: true,
            channels: Some(_),
            ..
        }) => 1.45,
        System::Qemu(Way { tls: true, .. }) => 2.4,
        _ => 0.55,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Choice, cells};

    fn named(name: &str) -> Cell {
        let choice = Choice {
            scenarios: vec!["idle".into()],
            cells: vec![name.into()],
            runs: Some(1),
            ..Choice::default()
        };
        cells(&choice).unwrap().remove(0)
    }

    #[test]
    fn the_estimate_of_cells_that_were_timed_is_near_what_they_took() {
        // A run on a quiet machine with two cores, by the times in its reports.
        let ram = named("ram=4");
        let ours = run_s(&ram, &ram.systems[0]);
        assert!((4.5..7.5).contains(&ours), "{ours}");
        let base = named("base");
        let all = cell_s(&base);
        assert!((90.0..190.0).contains(&all), "{all}");
    }

    #[test]
    fn a_peer_that_never_ends_is_counted_once_and_to_its_cut_off() {
        let mut cell = named("base");
        cell.guest = Guest::Counter {
            mib: 1024,
            mib_per_s: None,
            reader: false,
        };
        cell.network = crate::plan::Network {
            gbps: Some(1.0),
            ..Default::default()
        };
        cell.systems.retain(|system| !ours(system));
        cell.systems.truncate(1);
        let once = cell_s(&cell);
        cell.runs = 5;
        assert_eq!(cell_s(&cell), once);
        assert!(once > 10.0 * 17.0, "{once}");
    }
}
