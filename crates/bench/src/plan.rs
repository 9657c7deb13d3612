//! What can be measured: scenarios, guests, networks, systems, and the choice among the cells of the table
//! ([`crate::cells`]).
//!
//! Pure. Refuses: names of scenarios and cells that there are not, and a choice that leaves nothing.

use crate::cells as table;
use crate::row::Row;

/// All scenarios, in the order in which they run.
pub const SCENARIOS: [&str; 7] = ["idle", "zero", "redis", "hot", "link", "ipv6", "distance"];
/// Runs where a ratio is claimed.
pub const RUNS_CLAIMED: u32 = 5;
/// Runs elsewhere.
pub const RUNS_OTHER: u32 = 2;
/// Operations a second of the Redis cells: what an emulated guest serves of every mix, with room to spare.
pub const REDIS_OPS_PER_S: f64 = 150.0;
/// A peer is cut off at so many times our time.
pub const CUT_OFF_FACTOR: f64 = 10.0;

/// What runs in the guest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Guest {
    /// Nothing; its memory is as the firmware left it.
    Fresh,
    /// Nothing; its memory is full of random data.
    Idle,
    /// Steps a byte of every page of its first part over and over; the rest is random data.
    Counter {
        /// Size of that part.
        mib: u32,
        /// Pages' worth it steps; none: as fast as it can; 0: not at all.
        mib_per_s: Option<f64>,
        /// Whether a second vCPU reads the same pages for ever.
        reader: bool,
    },
    /// Linux with Redis under a client's load.
    Redis {
        /// Size of the data.
        data_mib: u32,
        /// Share of operations that write.
        set_percent: u32,
        /// Operations a second; none: half of what the guest can serve.
        ops_per_s: Option<f64>,
    },
}

/// The network between the hosts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Network {
    /// Rate; none: not shaped.
    pub gbps: Option<f64>,
    /// Round trip.
    pub rtt_ms: f64,
    /// Loss in each direction.
    pub loss_pct: f64,
    /// IPv6 instead of IPv4.
    pub six: bool,
    /// Network cards of a host; each has a link like this of its own.
    pub cards: u8,
    /// All cards lie in one subnet, rather than in one each.
    pub one_subnet: bool,
}

/// A network that nothing shapes.
pub const UNSHAPED: Network = Network {
    gbps: None,
    rtt_ms: 0.0,
    loss_pct: 0.0,
    six: false,
    cards: 1,
    one_subnet: false,
};

impl Network {
    /// A link of a rate.
    pub fn rate(gbps: f64) -> Self {
        Self {
            gbps: Some(gbps),
            ..UNSHAPED
        }
    }

    /// Whether the link emulator is needed.
    pub fn shaped(&self) -> bool {
        self.gbps.is_some() || self.rtt_ms > 0.0 || self.loss_pct > 0.0 || self.cards > 1
    }
}

/// Where a QEMU keeps its guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// A shared file on a tmpfs, as Godwit has it.
    File,
    /// Anonymous memory.
    Anonymous,
}

/// Which QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// The system's.
    Seven,
    /// The one fetched into a directory of its own.
    Ten,
}

/// A system under measurement, with its settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum System {
    /// The product.
    Godwit {
        /// Pages sealed.
        encrypted: bool,
        /// `--prepare`.
        prepared: bool,
    },
    /// QEMU's own migration.
    Qemu {
        /// Which.
        version: Version,
        /// Channels of multifd; none: without it.
        channels: Option<u32>,
        /// Over TLS.
        tls: bool,
        /// Where memory lies, on both sides.
        backend: Backend,
        /// `prealloc=on` at the destination.
        prepared: bool,
        /// Its own way to slow a guest that writes faster than the link.
        converge: bool,
    },
    /// What the network gives.
    Iperf {
        /// Streams.
        streams: u32,
    },
    /// How fast pages of a file like the destination's come, with all cores.
    FirstTouch {
        /// In huge pages.
        huge: bool,
    },
    /// How fast the library seals and opens.
    Cipher {
        /// Opening instead of sealing.
        open: bool,
    },
}

impl System {
    /// The row's `system`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Godwit { .. } => "godwit",
            Self::Qemu { version, .. } => match version {
                Version::Seven => "qemu-7.2",
                Version::Ten => "qemu-10.0",
            },
            Self::Iperf { .. } => "iperf3",
            Self::FirstTouch { .. } => "first-touch",
            Self::Cipher { .. } => "aes-256-gcm",
        }
    }

    /// The row's `config`.
    pub fn config(&self) -> String {
        match self {
            Self::Godwit { .. } => "default".into(),
            Self::Qemu {
                channels,
                backend,
                converge,
                ..
            } => {
                let way = channels.map_or("plain".into(), |count| format!("multifd-{count}"));
                let ram = match backend {
                    Backend::File => "file",
                    Backend::Anonymous => "anonymous",
                };
                let slowed = if *converge { ",auto-converge" } else { "" };
                format!("{way},ram={ram}{slowed}")
            }
            Self::Iperf { streams } => format!("streams={streams}"),
            Self::FirstTouch { huge: true } => "huge=within_size".into(),
            Self::FirstTouch { huge: false } => "4 KiB pages".into(),
            Self::Cipher { open: false } => "seal".into(),
            Self::Cipher { open: true } => "open".into(),
        }
    }

    /// Whether its destination is prepared.
    pub fn prepared(&self) -> bool {
        matches!(
            self,
            Self::Godwit { prepared: true, .. } | Self::Qemu { prepared: true, .. }
        )
    }

    /// Whether it encrypts.
    pub fn encrypted(&self) -> bool {
        matches!(
            self,
            Self::Godwit {
                encrypted: true,
                ..
            } | Self::Qemu { tls: true, .. }
        )
    }

    /// The row's `encryption`.
    pub fn encryption(&self) -> &'static str {
        match self {
            Self::Godwit {
                encrypted: true, ..
            }
            | Self::Cipher { .. } => "aes-256-gcm",
            Self::Qemu { tls: true, .. } => "tls",
            _ => "none",
        }
    }

    /// Whether it moves a guest, rather than showing a limit.
    pub fn moves(&self) -> bool {
        matches!(self, Self::Godwit { .. } | Self::Qemu { .. })
    }

    /// What a filter is looked for in: name, config, encryption and destination.
    pub fn described(&self) -> String {
        let destination = if self.prepared() { "prepared" } else { "cold" };
        let (name, config) = (self.name(), self.config());
        format!("{name} {config} {} {destination}", self.encryption())
    }
}

/// What happens in a run of a cell.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Course {
    /// A guest is moved.
    Move,
    /// A guest is moved, and its report is asked for the estimate at a tenth of the way.
    Estimated,
    /// So many guests are moved at the same time; a row each.
    AtOnce(u32),
    /// The link is cut for so many seconds in the middle of the first pass.
    Cut(f64),
    /// The move is cancelled in the middle, and the guest looked at afterwards.
    Cancelled,
}

/// One place of the table.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// One of [`SCENARIOS`].
    pub scenario: &'static str,
    /// What is special about it.
    pub name: String,
    /// What runs in the guest.
    pub guest: Guest,
    /// Guest memory.
    pub ram_mib: u32,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// The network.
    pub network: Network,
    /// What happens.
    pub course: Course,
    /// Whether a ratio is claimed from it.
    pub claimed: bool,
    /// Times each system runs.
    pub runs: u32,
    /// The systems, ours first, since peers are cut off by its time.
    pub systems: Vec<System>,
}

impl Cell {
    /// A row of this cell with nothing measured yet.
    pub fn row(&self, system: &System, run: u32) -> Row {
        let network = &self.network;
        Row {
            scenario: self.scenario.into(),
            cell: self.name.clone(),
            system: system.name().into(),
            config: system.config(),
            destination: if system.prepared() {
                "prepared"
            } else {
                "cold"
            }
            .into(),
            encryption: system.encryption().into(),
            streams: match system {
                System::Qemu { channels, .. } => channels.unwrap_or(1),
                System::Iperf { streams } => *streams,
                _ => 0,
            },
            ram_gib: f64::from(self.ram_mib) / 1024.0,
            vcpus: self.vcpus,
            link_gbps: network.gbps,
            rtt_ms: network.rtt_ms,
            loss_pct: network.loss_pct,
            run,
            ..Row::default()
        }
    }

    /// The systems in the order in which they run in a repetition, from 1: to and fro, since what ran just before leaves its
    /// memory behind. Ours come first in the first one.
    pub fn turn(&self, repetition: u32) -> Vec<&System> {
        let mut systems: Vec<&System> = self.systems.iter().collect();
        if repetition.is_multiple_of(2) {
            systems.reverse();
        }
        systems
    }

    /// Rows of one run of one system.
    pub fn rows_a_run(&self) -> u32 {
        match self.course {
            Course::AtOnce(moves) => moves,
            _ => 1,
        }
    }
}

/// What to choose from the table.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    /// Only these scenarios; all when empty.
    pub scenarios: Vec<String>,
    /// Small cells.
    pub quick: bool,
    /// So many runs everywhere.
    pub runs: Option<u32>,
    /// Only cells of these names, or whose names begin so where none has the name; all when empty.
    pub cells: Vec<String>,
    /// Only systems whose description ([`System::described`]) has one of these in it; all when empty.
    pub systems: Vec<String>,
}

/// The cells of a choice.
pub fn cells(choice: &Choice) -> Result<Vec<Cell>, String> {
    let unknown = |name: &&String| !SCENARIOS.contains(&name.as_str());
    if let Some(name) = choice.scenarios.iter().find(unknown) {
        let known = SCENARIOS.join(", ");
        return Err(format!("there is no scenario '{name}'; there are: {known}"));
    }
    let mut cells = if choice.quick {
        table::quick()
    } else {
        table::whole()
    };
    cells.retain(|cell| {
        choice.scenarios.is_empty() || choice.scenarios.iter().any(|name| name == cell.scenario)
    });
    narrow(&mut cells, choice)?;
    for cell in &mut cells {
        let usual = if cell.claimed {
            RUNS_CLAIMED
        } else {
            RUNS_OTHER
        };
        let usual = if choice.quick {
            RUNS_OTHER.min(usual)
        } else {
            usual
        };
        let usual = if cell.runs > 0 { cell.runs } else { usual };
        cell.runs = choice.runs.unwrap_or(usual);
    }
    Ok(cells)
}

/// Leaves the cells and systems that were asked for by name.
fn narrow(cells: &mut Vec<Cell>, choice: &Choice) -> Result<(), String> {
    let mut wanted = Vec::new();
    for name in &choice.cells {
        let exact = cells.iter().any(|cell| cell.name == *name);
        let fits = |cell: &&Cell| cell.name == *name || !exact && cell.name.starts_with(name);
        let found = cells.iter().filter(fits);
        let before = wanted.len();
        wanted.extend(found.map(|cell| (cell.scenario, cell.name.clone())));
        if wanted.len() == before {
            let known: Vec<_> = cells.iter().map(|cell| cell.name.as_str()).collect();
            let known = known.join(" ");
            return Err(format!(
                "no cell has or begins with the name '{name}'; there are: {known}"
            ));
        }
    }
    cells.retain(|cell| wanted.is_empty() || wanted.contains(&(cell.scenario, cell.name.clone())));
    for cell in &mut *cells {
        cell.systems.retain(|system| {
            let about = system.described();
            choice.systems.is_empty() || choice.systems.iter().any(|text| about.contains(text))
        });
    }
    cells.retain(|cell| !cell.systems.is_empty());
    if cells.is_empty() {
        return Err("no system of these cells has that in its description".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::estimate_s;

    fn all() -> Vec<Cell> {
        cells(&Choice::default()).unwrap()
    }

    #[test]
    fn every_scenario_has_cells_in_the_whole_set() {
        for name in SCENARIOS {
            assert!(all().iter().any(|cell| cell.scenario == name), "{name}");
        }
    }

    #[test]
    fn the_quick_set_has_one_cell_each_with_a_peer_and_fits_eight_minutes() {
        let choice = Choice {
            quick: true,
            ..Choice::default()
        };
        let cells = cells(&choice).unwrap();
        let names: Vec<_> = cells.iter().map(|cell| cell.scenario).collect();
        assert_eq!(names, ["idle", "zero", "redis", "hot", "distance"]);
        for cell in &cells {
            let peer = |system: &System| matches!(system, System::Qemu { .. });
            assert!(cell.systems.iter().any(peer), "{}", cell.scenario);
        }
        assert!(estimate_s(&cells) < 480.0, "{} s", estimate_s(&cells));
    }

    #[test]
    fn the_whole_set_fits_three_hours() {
        assert!(estimate_s(&all()) < 10_800.0, "{} s", estimate_s(&all()));
    }

    #[test]
    fn our_system_comes_first_in_every_cell_since_peers_are_cut_off_by_it() {
        for cell in all() {
            assert_eq!(
                cell.systems[0].name(),
                "godwit",
                "{} {}",
                cell.scenario,
                cell.name
            );
        }
    }

    #[test]
    fn turns_go_to_and_fro_and_every_system_has_one() {
        let cell = &all()[0];
        let (first, second) = (cell.turn(1), cell.turn(2));
        assert_eq!(first, cell.systems.iter().collect::<Vec<_>>());
        assert_eq!(second.last(), first.first());
        assert_eq!(second.iter().rev().copied().collect::<Vec<_>>(), first);
        assert_eq!(cell.turn(3), first);
    }

    #[test]
    fn claimed_cells_run_five_times_and_others_at_most_twice_unless_told() {
        for cell in all() {
            let usual = if cell.claimed { 5..=5 } else { 1..=2 };
            assert!(
                usual.contains(&cell.runs),
                "{} {}",
                cell.scenario,
                cell.name
            );
        }
        let choice = Choice {
            runs: Some(3),
            ..Choice::default()
        };
        assert!(cells(&choice).unwrap().iter().all(|cell| cell.runs == 3));
    }

    #[test]
    fn no_system_stands_twice_in_a_cell() {
        for cell in all() {
            for (index, system) in cell.systems.iter().enumerate() {
                let rest = &cell.systems[index + 1..];
                assert!(
                    !rest.contains(system),
                    "{} {}: {system:?}",
                    cell.scenario,
                    cell.name
                );
            }
        }
    }

    #[test]
    fn a_cell_is_chosen_by_its_name_and_by_its_beginning_where_none_has_it() {
        let chosen = |name: &str| {
            let choice = Choice {
                cells: vec![name.into()],
                ..Choice::default()
            };
            let cells = cells(&choice)?;
            Ok::<_, String>(cells.into_iter().map(|cell| cell.name).collect::<Vec<_>>())
        };
        assert_eq!(chosen("ram=8").unwrap(), ["ram=8"]);
        assert_eq!(
            chosen("ram=8,rtt").unwrap(),
            ["ram=8,rtt=0.5", "ram=8,rtt=150"]
        );
        assert!(chosen("nothing").unwrap_err().contains("cut=30"));
    }

    #[test]
    fn systems_are_chosen_by_a_part_of_what_they_are() {
        let choice = |text: &str| Choice {
            scenarios: vec!["idle".into()],
            systems: vec![text.into()],
            ..Choice::default()
        };
        let ours = cells(&choice("godwit")).unwrap();
        assert!(ours.iter().all(|cell| cell.systems.len() <= 4));
        let tls = cells(&choice("qemu-10.0 multifd-2,ram=anonymous tls prepared")).unwrap();
        assert_eq!((tls.len(), tls[0].systems.len()), (1, 1));
        assert!(cells(&choice("no such thing")).is_err());
    }

    #[test]
    fn an_unknown_scenario_is_refused_with_those_there_are() {
        let choice = Choice {
            scenarios: vec!["idel".into()],
            ..Choice::default()
        };
        assert!(cells(&choice).unwrap_err().contains("idle"));
    }
}
