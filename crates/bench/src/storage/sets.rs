//! The sets of cells: all of them, a small one of each kind, and those that the page beside the paper needs.
//!
//! Pure. Refuses nothing.

use super::plan::{
    BASE, Cell, CopyMode, DOUBLE, DOUBLE_SKEWED, EVEN, Kind, LARGE, MAIL, NORMAL, NORMAL_SKEWED,
    OLTP, SMALL, Set, System, Way,
};

const MIRROR: System = System::Godwit(Way::Mirror);
const TRACKING: System = System::Godwit(Way::TRACKING);
const INCREMENTAL: System = System::Godwit(Way::INCREMENTAL);
const PLAIN: System = System::Godwit(Way::PLAIN);
const SNAPSHOT: System = System::Godwit(Way::Snapshot);
const BACKGROUND: System = System::Daemon(CopyMode::Background);
const FINE: System = System::Daemon(CopyMode::FineBackground);
const BLOCKING: System = System::Daemon(CopyMode::WriteBlocking);

/// The cells of a set, in the order in which they run.
pub fn of(set: Set) -> Vec<Cell> {
    match set {
        Set::Whole => whole(),
        Set::Quick => quick(),
        Set::Paper => paper(),
    }
}

fn moving(scenario: &'static str, name: String, outstanding: u32) -> Cell {
    Cell {
        scenario,
        name,
        outstanding,
        disk_mib: 512,
        kind: OLTP,
        volumes: Some((BASE, BASE)),
        systems: vec![MIRROR, BACKGROUND, BLOCKING],
        runs: 5,
    }
}

fn serving(scenario: &'static str, name: String, outstanding: u32, kind: Kind) -> Cell {
    Cell {
        kind,
        volumes: (scenario == "steady").then_some((BASE, BASE)),
        systems: vec![MIRROR, BACKGROUND],
        ..moving(scenario, name, outstanding)
    }
}

fn whole() -> Vec<Cell> {
    let mut cells = Vec::new();
    let offline = [System::DataMover, System::Convert];
    for outstanding in [2, 4, 8, 16, 32] {
        let mut cell = moving("oio", format!("oio={outstanding}"), outstanding);
        if outstanding == 2 {
            cell.systems.extend(offline);
        }
        if outstanding >= 8 {
            cell.systems.push(FINE);
        }
        cell.systems.extend([INCREMENTAL, PLAIN, SNAPSHOT]);
        if outstanding == 16 {
            cell.systems.push(System::Qemu(CopyMode::Background));
            cell.systems.push(System::Qemu(CopyMode::WriteBlocking));
            cell.systems.push(System::Ten(CopyMode::Background));
            cell.systems.push(System::Ten(CopyMode::WriteBlocking));
        }
        cells.push(cell);
    }
    for disk_mib in [256, 1024, 2048] {
        let cell = moving("size", format!("disk={disk_mib} MiB"), 8);
        cells.push(Cell {
            disk_mib,
            runs: 2,
            ..cell
        });
    }
    for latency in [0.2, 5.0] {
        let model = BASE.slower(latency, 1.0);
        cells.push(Cell {
            volumes: Some((model, model)),
            runs: 3,
            ..moving("volumes", format!("latency={} ms", model.latency_ms), 8)
        });
    }
    for rate in [1.0, 10.0] {
        cells.push(to_slow(rate, &[MIRROR, BACKGROUND, BLOCKING]));
    }
    cells.extend(of_the_methods());
    for outstanding in [2, 32] {
        let name = format!("oio={outstanding}");
        cells.push(serving("steady", name, outstanding, OLTP));
    }
    let local = [
        ("4k depth=1", 1, SMALL),
        ("4k depth=32", 32, SMALL),
        ("128k sequential", 4, LARGE),
    ];
    for (scenario, systems) in [
        ("local", [MIRROR, BACKGROUND]),
        ("guest", [MIRROR, System::VirtioBlk]),
    ] {
        cells.extend(local.map(|(name, outstanding, kind)| Cell {
            systems: systems.into(),
            ..serving(scenario, name.into(), outstanding, kind)
        }));
    }
    cells
}

/// Our methods beside one another, as the paper compares its three.
fn of_the_methods() -> Vec<Cell> {
    let four = [MIRROR, INCREMENTAL, PLAIN, SNAPSHOT];
    let five = [MIRROR, TRACKING, INCREMENTAL, PLAIN, SNAPSHOT];
    let mut cells = iterations(&[TRACKING, INCREMENTAL, PLAIN, SNAPSHOT]);
    cells.extend([
        of_methods("latency", "2,500 a second", NORMAL, &four),
        of_methods("latency", "2,500 a second, skewed", NORMAL_SKEWED, &five),
        of_methods("double", "5,000 a second", DOUBLE, &four),
        of_methods("double", "5,000 a second, skewed", DOUBLE_SKEWED, &five),
    ]);
    for outstanding in [2, 16] {
        cells.push(Cell {
            runs: 1,
            ..few(
                "timeline",
                &format!("oio={outstanding}"),
                outstanding,
                &four,
            )
        });
    }
    for disk_mib in [256, 1024, 2048] {
        cells.push(sized(disk_mib, &four, 2));
    }
    cells.push(Cell {
        runs: 1,
        ..to_slow(10.0, &[PLAIN])
    });
    cells
}

/// A load that asks for so much a second. No more of it than that is under way but where the disk is slower.
fn of_methods(scenario: &'static str, name: &str, kind: Kind, systems: &[System]) -> Cell {
    Cell {
        kind,
        systems: systems.to_vec(),
        runs: 3,
        ..moving(scenario, name.into(), 32)
    }
}

fn iterations(iterative: &[System]) -> Vec<Cell> {
    vec![
        of_methods("iterations", "with locality", MAIL, iterative),
        of_methods("iterations", "without locality", EVEN, iterative),
    ]
}

/// A load that keeps so many requests under way.
fn few(scenario: &'static str, name: &str, outstanding: u32, systems: &[System]) -> Cell {
    Cell {
        systems: systems.to_vec(),
        runs: 3,
        ..moving(scenario, name.into(), outstanding)
    }
}

/// With so little under way that every method comes to an end.
fn sized(disk_mib: u64, systems: &[System], runs: u32) -> Cell {
    Cell {
        disk_mib,
        runs,
        ..few("size", &format!("disk={disk_mib} MiB oio=2"), 2, systems)
    }
}

/// To a volume with ten times the latency, and with a part of the rate.
fn to_slow(rate: f64, systems: &[System]) -> Cell {
    let (name, disk_mib) = match rate > 1.0 {
        true => ("latency and rate x10", 128),
        false => ("latency x10", 512),
    };
    Cell {
        disk_mib,
        volumes: Some((BASE, BASE.slower(10.0, rate))),
        ..few("slow-destination", name, 16, systems)
    }
}

/// What the page beside the paper needs, the cells that say most first: some 29 minutes. A method that is refused is refused
/// each time, so that it has one run where another has three; and so has snapshotting where the paper has little of it.
fn paper() -> Vec<Cell> {
    let both = [MIRROR, INCREMENTAL];
    let once = |cell: Cell| Cell { runs: 1, ..cell };
    let twice = |cell: Cell| Cell { runs: 2, ..cell };
    let mut cells = iterations(&[TRACKING, INCREMENTAL, PLAIN]);
    cells.extend(iterations(&[SNAPSHOT]).into_iter().map(once));
    let all_at_two = [
        MIRROR,
        INCREMENTAL,
        PLAIN,
        SNAPSHOT,
        System::DataMover,
        System::Convert,
    ];
    cells.extend([
        of_methods(
            "latency",
            "2,500 a second",
            NORMAL,
            &[MIRROR, INCREMENTAL, PLAIN, SNAPSHOT],
        ),
        of_methods("double", "5,000 a second", DOUBLE, &both),
        once(of_methods("double", "5,000 a second", DOUBLE, &[PLAIN])),
        twice(of_methods("double", "5,000 a second", DOUBLE, &[SNAPSHOT])),
        few("oio", "oio=2", 2, &all_at_two),
        few("oio", "oio=32", 32, &both),
        once(few("oio", "oio=32", 32, &[PLAIN])),
        twice(few("oio", "oio=32", 32, &[SNAPSHOT])),
        few("oio", "oio=8", 8, &[MIRROR]),
        once(few("oio", "oio=8", 8, &[SNAPSHOT])),
        once(few(
            "timeline",
            "oio=2",
            2,
            &[MIRROR, INCREMENTAL, PLAIN, SNAPSHOT],
        )),
        twice(to_slow(10.0, &[MIRROR])),
        once(to_slow(10.0, &[PLAIN])),
        sized(256, &both, 2),
        sized(2048, &both, 2),
        sized(256, &[SNAPSHOT], 1),
        sized(2048, &[SNAPSHOT], 1),
    ]);
    cells
}

/// Of each kind a small one.
fn quick() -> Vec<Cell> {
    let wanted = [
        "oio=2",
        "oio=32",
        "latency and rate x10",
        "with locality",
        "4k depth=1",
        "4k depth=32",
    ];
    let mut cells = whole();
    cells.retain(|cell| {
        let is_long = cell.has_guest() || cell.scenario == "timeline";
        wanted.contains(&cell.name.as_str()) && !is_long
    });
    for cell in &mut cells {
        if matches!(cell.scenario, "oio" | "slow-destination") {
            // Those of the laboratory have a cell of their own.
            cell.systems.retain(|system| {
                !matches!(system, System::Godwit(Way::Tracking { .. } | Way::Snapshot))
            });
        }
        (cell.runs, cell.disk_mib) = match cell.scenario {
            "slow-destination" => (1, 64),
            "iterations" => (1, 256),
            _ => (2, 256),
        };
    }
    cells.retain(|cell| !cell.systems.is_empty());
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_of_one_cell_meet_the_same_volumes_and_the_same_load() {
        for set in [Set::Whole, Set::Quick, Set::Paper] {
            let cells = of(set);
            for (index, cell) in cells.iter().enumerate() {
                for other in &cells[index + 1..] {
                    if (cell.scenario, &cell.name) != (other.scenario, &other.name) {
                        continue;
                    }
                    let like =
                        |cell: &Cell| (cell.outstanding, cell.disk_mib, cell.kind, cell.volumes);
                    assert_eq!(like(cell), like(other), "{} {}", cell.scenario, cell.name);
                    let is_new = |system| !cell.systems.contains(system);
                    assert!(other.systems.iter().all(is_new), "{}", cell.name);
                }
            }
        }
    }
}
