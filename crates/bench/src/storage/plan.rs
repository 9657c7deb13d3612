//! What is measured: cells with their volumes, loads and systems.
//!
//! Pure. Refuses names that no cell has.

use super::model::Model;
use super::row::Row;
use super::sets;
use godwit_testkit::disk_load::Order;

/// What the volumes of most cells are like.
pub const BASE: Model = Model {
    latency_ms: 1.0,
    mb_per_s: 100.0,
};
/// Time in which nothing but the load runs, before a move or as all that there is.
pub const BEFORE_S: f64 = 1.5;
/// `steady` and `local` are measured for so long.
pub const STEADY_S: f64 = 3.0;
/// What a guest's own load takes, whole seconds,
pub const GUEST_S: u64 = 4;
/// and its boot under emulation.
const GUEST_BOOT_S: f64 = 8.0;
/// What a run takes beside what it measures: filling, starting, settling, comparing.
const AROUND_S: f64 = 3.0;
/// A copy without a load takes so many times what the volumes allow.
const OFFLINE: f64 = 1.25;
/// All passes of dirty block tracking, in first ones, where they come to an end,
const PASSES: f64 = 1.5;
/// and where it is found that they do not.
const PASSES_IN_VAIN: f64 = 3.2;
/// The copy and all consolidations of redo logs, where their guest is slowed until they come to an end.
const PASSES_SLOWED: f64 = 2.5;

/// A kind of load: 30 % writes everywhere.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kind {
    pub name: &'static str,
    pub io_bytes: usize,
    pub write_percent: u8,
    pub order: Order,
    /// Requests a second; none: as many as the disk answers.
    pub per_second: Option<u32>,
}

pub const OLTP: Kind = Kind {
    name: "8 KiB random, 30 % writes",
    io_bytes: 8192,
    write_percent: 30,
    order: Order::Random,
    per_second: None,
};
/// As the paper's mail server: at a rate, whatever the disk can, and with locality.
pub const MAIL: Kind = Kind {
    name: "8 KiB skewed, 30 % writes, 2,000 a second",
    order: Order::Skewed,
    per_second: Some(2000),
    ..OLTP
};
/// The same without locality.
pub const EVEN: Kind = Kind {
    name: "8 KiB random, 30 % writes, 2,000 a second",
    order: Order::Random,
    ..MAIL
};
/// Of which blocks become dirty at some six tenths of the speed at which they can be copied beside it,
pub const NORMAL: Kind = Kind {
    name: "8 KiB random, 30 % writes, 2,500 a second",
    per_second: Some(2500),
    ..EVEN
};
/// and faster than that: twice as much, with which the paper's iterative methods failed.
pub const DOUBLE: Kind = Kind {
    name: "8 KiB random, 30 % writes, 5,000 a second",
    per_second: Some(5000),
    ..EVEN
};
/// The same two rates, of a load that comes back to what it wrote.
pub const NORMAL_SKEWED: Kind = Kind {
    name: "8 KiB skewed, 30 % writes, 2,500 a second",
    order: Order::Skewed,
    ..NORMAL
};
pub const DOUBLE_SKEWED: Kind = Kind {
    name: "8 KiB skewed, 30 % writes, 5,000 a second",
    order: Order::Skewed,
    ..DOUBLE
};
pub const SMALL: Kind = Kind {
    name: "4 KiB random, 30 % writes",
    io_bytes: 4096,
    ..OLTP
};
pub const LARGE: Kind = Kind {
    name: "128 KiB sequential, 30 % writes",
    io_bytes: 128 << 10,
    order: Order::Sequential,
    ..OLTP
};

/// How Godwit moves a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Mirror,
    /// Dirty block tracking, with or without what was added to it later.
    Tracking {
        incremental: bool,
        avoids_hot_blocks: bool,
    },
    /// What is written meanwhile goes to redo logs, which are consolidated one after the other.
    Snapshot,
}

impl Way {
    /// The first form of dirty block tracking,
    pub const PLAIN: Self = Self::Tracking {
        incremental: false,
        avoids_hot_blocks: false,
    };
    /// the second,
    pub const INCREMENTAL: Self = Self::Tracking {
        incremental: true,
        avoids_hot_blocks: false,
    };
    /// and with all that there is.
    pub const TRACKING: Self = Self::Tracking {
        incremental: true,
        avoids_hot_blocks: true,
    };

    pub fn name(self) -> &'static str {
        match self {
            Self::Mirror => "mirror",
            Self::Snapshot => "snapshot",
            Self::Tracking {
                incremental: false, ..
            } => "dirty-tracking plain",
            Self::Tracking {
                avoids_hot_blocks: false,
                ..
            } => "dirty-tracking incremental",
            Self::Tracking { .. } => "dirty-tracking",
        }
    }

    /// What it is told with when it begins,
    pub fn options(self) -> &'static [&'static str] {
        match self {
            Self::Tracking {
                incremental: false, ..
            } => &["--no-incremental", "--no-hot-blocks"],
            Self::Tracking {
                avoids_hot_blocks: false,
                ..
            } => &["--no-hot-blocks"],
            Self::Snapshot => &["--may-slow"],
            _ => &[],
        }
    }

    /// and the word before the place.
    pub fn word(self) -> &'static str {
        match self {
            Self::Mirror => "move",
            Self::Tracking { .. } => "move-by-dirty-tracking",
            Self::Snapshot => "move-by-snapshot",
        }
    }
}

/// Who serves the disk, and how it moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum System {
    Godwit(Way),
    /// The program `qemu-storage-daemon`, without a machine.
    Daemon(CopyMode),
    /// `qemu-system-x86_64` without a machine and without a guest.
    Qemu(CopyMode),
    /// The same of QEMU 10.0.
    Ten(CopyMode),
    /// `qemu-system-x86_64` with a guest, and its own device in place of a socket.
    VirtioBlk,
    /// Our copying, without a load.
    DataMover,
    /// `qemu-img convert -m 16 -W -n -t none -T none`.
    Convert,
}

/// Of QEMU's `blockdev-mirror`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyMode {
    /// As it is set by default: 64 KiB are copied again for a write of 8.
    Background,
    /// What is copied again is as small as what the load writes.
    FineBackground,
    WriteBlocking,
}

impl CopyMode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Background => "background",
            Self::FineBackground => "background 8 KiB",
            Self::WriteBlocking => "write-blocking",
        }
    }

    /// The word for QEMU.
    pub fn word(self) -> &'static str {
        match self {
            Self::Background | Self::FineBackground => "background",
            Self::WriteBlocking => "write-blocking",
        }
    }

    /// Bytes for which QEMU remembers whether they are equal; 0: as it likes.
    pub fn granularity(self) -> u32 {
        match self {
            Self::FineBackground => 8192,
            Self::Background | Self::WriteBlocking => 0,
        }
    }
}

impl System {
    /// As rows have it: system and method.
    pub fn names(self, moves: bool) -> (&'static str, &'static str) {
        match self {
            Self::Godwit(_) if !moves => ("godwit", "serve"),
            Self::Daemon(_) if !moves => ("qsd", "serve"),
            Self::Qemu(_) if !moves => ("qemu-mirror", "serve"),
            Self::Ten(_) if !moves => ("qemu-mirror", "10.0 serve"),
            Self::VirtioBlk => ("qemu-virtio-blk", "serve"),
            Self::Godwit(way) => ("godwit", way.name()),
            Self::Daemon(mode) => ("qsd", mode.name()),
            Self::Qemu(mode) => ("qemu-mirror", mode.name()),
            Self::Ten(CopyMode::Background | CopyMode::FineBackground) => {
                ("qemu-mirror", "10.0 background")
            }
            Self::Ten(CopyMode::WriteBlocking) => ("qemu-mirror", "10.0 write-blocking"),
            Self::DataMover => ("offline", "data-mover"),
            Self::Convert => ("offline", "qemu-img convert"),
        }
    }

    /// Whether it works with a load on its disk.
    pub fn is_live(self) -> bool {
        !matches!(self, Self::DataMover | Self::Convert)
    }
}

/// What is measured in one place.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    pub scenario: &'static str,
    pub name: String,
    pub outstanding: u32,
    pub disk_mib: u64,
    pub kind: Kind,
    /// Absent where the machine's own file system is the volume.
    pub volumes: Option<(Model, Model)>,
    pub systems: Vec<System>,
    pub runs: u32,
}

impl Cell {
    /// Whether the disk is moved, or only worked with.
    pub fn moves(&self) -> bool {
        !matches!(self.scenario, "steady" | "local" | "guest")
    }

    /// Whether an emulated guest makes the load.
    pub fn has_guest(&self) -> bool {
        self.scenario == "guest"
    }

    pub fn disk_bytes(&self) -> u64 {
        self.disk_mib << 20
    }

    /// A row of a run that has measured nothing yet.
    pub fn row(&self, system: System, run: u32) -> Row {
        let (name, method) = system.names(self.moves());
        Row {
            scenario: self.scenario.into(),
            cell: self.name.clone(),
            system: name.into(),
            method: method.into(),
            outstanding_ios: if system.is_live() {
                self.outstanding
            } else {
                0
            },
            disk_gib: self.disk_mib as f64 / 1024.0,
            load: if system.is_live() {
                self.kind.name.into()
            } else {
                "none".into()
            },
            run,
            ..Row::default()
        }
    }

    /// Seconds that a run of one of its systems takes, roughly; of the slowest.
    pub fn run_s(&self) -> f64 {
        let each = self.systems.iter().map(|system| self.run_of_s(*system));
        each.fold(0.0, f64::max)
    }

    fn run_of_s(&self, system: System) -> f64 {
        if self.has_guest() {
            return GUEST_BOOT_S + GUEST_S as f64 + AROUND_S;
        }
        let Some((source, destination)) = self.volumes.filter(|_| self.moves()) else {
            return STEADY_S + AROUND_S / 2.0;
        };
        let slowest = source.mb_per_s.min(destination.mb_per_s);
        let copying_s = self.disk_bytes() as f64 / 1e6 / slowest;
        if !system.is_live() {
            return AROUND_S + copying_s * OFFLINE;
        }
        let moving_s = copying_s * self.busy(slowest);
        let passes = match system {
            System::Godwit(Way::Tracking { .. }) if self.is_too_much() => PASSES_IN_VAIN,
            System::Godwit(Way::Snapshot) if self.is_too_much() => PASSES_SLOWED,
            System::Godwit(Way::Tracking { .. } | Way::Snapshot) => PASSES,
            _ => 1.0,
        };
        BEFORE_S + AROUND_S + moving_s * passes
    }

    /// How many times as long a copy takes beside the load as without one. A load that asks for so much a second leaves the rest; one that asks for as
    /// much as there is takes up to two thirds.
    fn busy(&self, mb_per_s: f64) -> f64 {
        match self.kind.per_second {
            Some(rate) => {
                let takes = f64::from(rate) * self.kind.io_bytes as f64 / 1e6;
                1.0 / (1.0 - takes / mb_per_s).max(0.3)
            }
            None => 1.0 + (f64::from(self.outstanding) / 16.0).min(2.0),
        }
    }

    /// Whether blocks of 64 KiB become dirty faster than they can be copied, on base volumes.
    fn is_too_much(&self) -> bool {
        match self.kind.per_second {
            Some(rate) => rate > 4000,
            None => self.outstanding > 4,
        }
    }

    pub fn cell_s(&self) -> f64 {
        let each = self.systems.iter().map(|system| self.run_of_s(*system));
        each.sum::<f64>() * f64::from(self.runs)
    }
}

/// Cells that belong together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Set {
    #[default]
    Whole,
    /// Of each kind a small one.
    Quick,
    /// What the page beside the paper needs most.
    Paper,
}

/// What somebody wants of all that.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    pub scenarios: Vec<String>,
    pub set: Set,
    pub runs: Option<u32>,
    pub cells: Vec<String>,
    pub systems: Vec<String>,
    /// Whether there is no QEMU 10.0.
    pub without_ten: bool,
}

/// The cells that somebody wants, in the order in which they run.
pub fn cells(choice: &Choice) -> Result<Vec<Cell>, String> {
    let mut cells = sets::of(choice.set);
    for name in &choice.scenarios {
        if !cells.iter().any(|cell| cell.scenario == name) {
            return Err(format!("there is no scenario '{name}'"));
        }
    }
    for name in &choice.cells {
        if !cells.iter().any(|cell| cell.name.starts_with(name)) {
            return Err(format!("there is no cell '{name}'"));
        }
    }
    let any = |wanted: &[String], has: &dyn Fn(&str) -> bool| {
        wanted.is_empty() || wanted.iter().any(|one| has(one))
    };
    cells.retain(|cell| {
        any(&choice.scenarios, &|name| cell.scenario == name)
            && any(&choice.cells, &|name| cell.name.starts_with(name))
    });
    for cell in &mut cells {
        let moves = cell.moves();
        cell.systems.retain(|system| {
            if choice.without_ten && matches!(system, System::Ten(_)) {
                return false;
            }
            let (name, method) = system.names(moves);
            any(&choice.systems, &|text| {
                format!("{name} {method}").contains(text)
            })
        });
        cell.runs = choice.runs.unwrap_or(cell.runs);
    }
    cells.retain(|cell| !cell.systems.is_empty());
    match cells.is_empty() {
        true => Err("nothing is left to measure".into()),
        false => Ok(cells),
    }
}

/// Seconds that it all takes, roughly.
pub fn estimate_s(cells: &[Cell]) -> f64 {
    cells.iter().map(Cell::cell_s).sum()
}

/// The systems of a cell in the order in which they run in a repetition: every second one begins at the other end.
pub fn turns(cell: &Cell, run: u32) -> Vec<System> {
    let mut systems = cell.systems.clone();
    if run.is_multiple_of(2) {
        systems.reverse();
    }
    systems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quick_set_takes_less_than_eight_minutes() {
        let choice = Choice {
            set: Set::Quick,
            ..Choice::default()
        };
        let cells = cells(&choice).unwrap();
        let seconds = estimate_s(&cells);
        // What is cut off takes longer.
        assert!(seconds < 400.0, "{seconds}");
        for scenario in ["oio", "slow-destination", "iterations", "steady", "local"] {
            assert!(cells.iter().any(|cell| cell.scenario == scenario));
        }
    }

    #[test]
    fn the_papers_set_takes_less_than_thirty_minutes_and_has_each_method() {
        let choice = Choice {
            set: Set::Paper,
            ..Choice::default()
        };
        let cells = cells(&choice).unwrap();
        let seconds = estimate_s(&cells);
        assert!(seconds < 1800.0, "{seconds}");
        for scenario in ["oio", "iterations", "latency", "double", "timeline"] {
            let of_scenario = || cells.iter().filter(move |cell| cell.scenario == scenario);
            for way in [Way::PLAIN, Way::INCREMENTAL, Way::Snapshot] {
                let mut systems = of_scenario().flat_map(|cell| &cell.systems);
                assert!(
                    systems.any(|system| *system == System::Godwit(way)),
                    "{scenario} {}",
                    way.name()
                );
            }
        }
    }

    #[test]
    fn systems_take_turns() {
        let choice = Choice {
            cells: vec!["oio=2".into()],
            systems: vec!["qsd".into(), "godwit mirror".into()],
            scenarios: vec!["oio".into()],
            ..Choice::default()
        };
        let cell = cells(&choice).unwrap().remove(0);
        let there = turns(&cell, 1);
        let mut back = turns(&cell, 2);
        back.reverse();
        assert_eq!((there.len(), &there), (3, &back));
    }

    #[test]
    fn a_choice_is_what_it_says_and_unknown_names_are_refused() {
        let choice = |scenario: &str, cell: &str, system: &str| Choice {
            scenarios: vec![scenario.into()],
            cells: vec![cell.into()],
            systems: vec![system.into()],
            ..Choice::default()
        };
        let chosen = cells(&choice("oio", "oio=16", "write-blocking")).unwrap();
        assert_eq!((chosen.len(), chosen[0].systems.len()), (1, 3));
        assert!(cells(&choice("oi", "oio=16", "")).is_err());
        assert!(cells(&choice("oio", "oio=17", "")).is_err());
        assert!(cells(&choice("oio", "oio=16", "xen")).is_err());
    }
}
