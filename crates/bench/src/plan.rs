//! What is measured: cells, the systems in each, how often. A base cell, then one axis at a time.
//!
//! Pure: a table of values, and an estimate of the time it takes. Refuses: names of scenarios that there are not.

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

    /// Seconds for a GB that a quiet machine of two cores needs, for the plan's estimate only.
    fn seconds_per_gb(&self) -> f64 {
        match self {
            Self::Godwit { prepared, .. } => {
                if *prepared {
                    1.0
                } else {
                    0.8
                }
            }
            Self::Qemu { tls: true, .. } => 5.0,
            Self::Qemu { prepared: true, .. } => 1.2,
            Self::Qemu { .. } => 2.5,
            _ => 0.5,
        }
    }
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
    /// Whether a ratio is claimed from it.
    pub claimed: bool,
    /// Times each system runs.
    pub runs: u32,
    /// The systems, in the order in which they take turns; ours first, since peers are cut off by its time.
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

    /// Seconds that all runs of this cell may take, by rules of thumb; a quiet machine needs less.
    pub fn estimate_s(&self) -> f64 {
        let gb = f64::from(self.ram_mib) * 1.048_576e-3;
        let rate_s = self.network.gbps.map_or(0.0, |gbps| gb * 8.0 / gbps);
        let filled = match self.guest {
            Guest::Fresh => 0.1,
            _ => 1.0,
        };
        let around_s = match self.guest {
            Guest::Redis { .. } => 35.0,
            Guest::Counter { .. } => 12.0,
            _ => 2.0 + gb * 1.5,
        };
        let one = |system: &System| match system {
            system if !system.moves() => 3.0,
            System::Qemu { .. } if matches!(self.guest, Guest::Counter { .. }) => {
                around_s + 3.0 * rate_s.max(gb * 2.0)
            }
            system => around_s + rate_s.max(gb * filled * system.seconds_per_gb()),
        };
        self.systems.iter().map(one).sum::<f64>() * f64::from(self.runs)
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
}

/// The cells of a choice.
pub fn cells(choice: &Choice) -> Result<Vec<Cell>, String> {
    let unknown = |name: &&String| !SCENARIOS.contains(&name.as_str());
    if let Some(name) = choice.scenarios.iter().find(unknown) {
        let known = SCENARIOS.join(", ");
        return Err(format!("there is no scenario '{name}'; there are: {known}"));
    }
    let mut cells = if choice.quick { quick() } else { whole() };
    cells.retain(|cell| {
        choice.scenarios.is_empty() || choice.scenarios.iter().any(|name| name == cell.scenario)
    });
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

/// Seconds for all of them.
pub fn estimate_s(cells: &[Cell]) -> f64 {
    cells.iter().map(Cell::estimate_s).sum()
}

const OURS: [System; 4] = [
    ours(false, false),
    ours(true, false),
    ours(false, true),
    ours(true, true),
];

const fn ours(encrypted: bool, prepared: bool) -> System {
    System::Godwit {
        encrypted,
        prepared,
    }
}

const fn qemu(
    version: Version,
    channels: Option<u32>,
    tls: bool,
    backend: Backend,
    prepared: bool,
) -> System {
    System::Qemu {
        version,
        channels,
        tls,
        backend,
        prepared,
        converge: false,
    }
}

const LIMITS: [System; 7] = [
    System::Iperf { streams: 1 },
    System::Iperf { streams: 2 },
    System::Iperf { streams: 4 },
    System::FirstTouch { huge: true },
    System::FirstTouch { huge: false },
    System::Cipher { open: false },
    System::Cipher { open: true },
];

/// Every way of one QEMU: plain, multifd, TLS and both, each backend and destination.
fn every_way(version: Version, channels: &[Option<u32>]) -> Vec<System> {
    let mut systems = Vec::new();
    for prepared in [false, true] {
        for backend in [Backend::File, Backend::Anonymous] {
            for tls in [false, true] {
                let one = |&channels| qemu(version, channels, tls, backend, prepared);
                systems.extend(channels.iter().map(one));
            }
        }
    }
    systems
}

/// QEMU's strongest ways, for cells away from the base.
fn strongest(version: Version) -> Vec<System> {
    vec![
        qemu(version, Some(2), false, Backend::File, false),
        qemu(version, Some(2), true, Backend::File, false),
        qemu(version, Some(2), false, Backend::Anonymous, true),
        qemu(version, Some(2), true, Backend::Anonymous, true),
    ]
}

/// Plain and encrypted into cold memory, for links where the network is the limit.
fn on_a_link(encrypted_only: bool) -> Vec<System> {
    let all = [
        ours(false, false),
        ours(true, false),
        qemu(Version::Seven, None, false, Backend::File, false),
        qemu(Version::Seven, Some(2), true, Backend::File, false),
    ];
    let mut systems = all.to_vec();
    systems.retain(|system| system.encrypted() || !encrypted_only);
    systems
}

fn cell(scenario: &'static str, name: &str, guest: Guest, ram_mib: u32) -> Cell {
    Cell {
        scenario,
        name: name.into(),
        guest,
        ram_mib,
        vcpus: 1,
        network: UNSHAPED,
        claimed: false,
        runs: 0,
        systems: Vec::new(),
    }
}

/// A small cell for a counter guest by itself.
pub fn counter_cell(guest: Guest) -> Cell {
    cell("hot", "alone", guest, 128)
}

fn with(mut cell: Cell, change: impl FnOnce(&mut Cell)) -> Cell {
    change(&mut cell);
    cell
}

/// The bytes a second of a link that `share` of it is, MiB.
fn mib_per_s(gbps: f64, share: f64) -> f64 {
    gbps * 1e9 / 8.0 * share / 1_048_576.0
}

fn quick() -> Vec<Cell> {
    let seven = Version::Seven;
    let mut base = OURS.to_vec();
    base.extend([
        qemu(seven, None, false, Backend::File, false),
        qemu(seven, Some(2), false, Backend::Anonymous, false),
        qemu(seven, Some(2), false, Backend::Anonymous, true),
        qemu(seven, Some(2), true, Backend::Anonymous, true),
        qemu(Version::Ten, Some(2), false, Backend::Anonymous, true),
        System::Iperf { streams: 2 },
        System::FirstTouch { huge: true },
        System::Cipher { open: false },
    ]);
    let plain = qemu(seven, None, false, Backend::File, false);
    let tls = qemu(seven, Some(2), true, Backend::File, false);
    let pair = [ours(true, false), tls];
    let redis = Guest::Redis {
        data_mib: 200,
        set_percent: 50,
        ops_per_s: Some(REDIS_OPS_PER_S),
    };
    let half = Guest::Counter {
        mib: 256,
        mib_per_s: Some(mib_per_s(1.0, 0.5)),
    };
    let steady = Guest::Counter {
        mib: 64,
        mib_per_s: Some(8.0),
    };
    let once = |cell: Cell| with(cell, |cell| cell.runs = 1);
    vec![
        with(cell("idle", "base", Guest::Idle, 512), |cell| {
            cell.systems = base;
            cell.claimed = true;
        }),
        with(cell("zero", "base", Guest::Fresh, 1024), |cell| {
            cell.systems = vec![ours(false, false), ours(true, false), plain];
        }),
        once(with(cell("redis", "set=50", redis, 512), |cell| {
            cell.systems = pair.to_vec();
        })),
        once(with(cell("hot", "rate=0.5", half, 512), |cell| {
            cell.network = Network::rate(1.0);
            cell.systems = pair.to_vec();
        })),
        once(with(cell("distance", "rtt=50", steady, 512), |cell| {
            cell.network = Network {
                rtt_ms: 50.0,
                ..Network::rate(1.0)
            };
            cell.systems = pair.to_vec();
        })),
    ]
}

fn whole() -> Vec<Cell> {
    let mut cells = idle();
    cells.push(with(cell("zero", "base", Guest::Fresh, 2048), |cell| {
        cell.systems = OURS[..2].to_vec();
        let version = Version::Seven;
        cell.systems.extend([
            qemu(version, None, false, Backend::File, false),
            qemu(version, None, false, Backend::Anonymous, false),
            qemu(version, Some(2), true, Backend::File, false),
            qemu(Version::Ten, None, false, Backend::File, false),
        ]);
    }));
    cells.extend(redis());
    cells.extend(hot());
    cells.extend(link());
    cells.extend(ipv6());
    cells.extend(distance());
    cells
}

fn idle() -> Vec<Cell> {
    let mut base = with(cell("idle", "base", Guest::Idle, 2048), |cell| {
        cell.claimed = true;
    });
    base.systems.extend(OURS);
    let channels = [None, Some(1), Some(2), Some(4)];
    base.systems
        .extend(every_way(Version::Seven, &channels[..1]));
    base.systems
        .extend(every_way(Version::Seven, &channels[2..3]));
    base.systems.extend(every_way(Version::Ten, &channels[..1]));
    base.systems
        .extend(every_way(Version::Ten, &channels[2..3]));
    base.systems.extend(LIMITS);
    // Which number of channels is best is looked for with fewer runs.
    let mut search = with(cell("idle", "channels", Guest::Idle, 2048), |_| ());
    for version in [Version::Seven, Version::Ten] {
        for count in [Some(1), Some(4)] {
            for tls in [false, true] {
                let one = |prepared| qemu(version, count, tls, Backend::Anonymous, prepared);
                search.systems.extend([one(false), one(true)]);
            }
        }
    }
    search.systems.insert(0, ours(true, false));
    search.systems.insert(0, ours(false, false));
    let mut cells = vec![base, search];
    for (name, ram_mib, vcpus) in [
        ("ram=1", 1024, 1),
        ("ram=4", 4096, 1),
        ("ram=8", 8192, 1),
        ("vcpus=2", 2048, 2),
        ("vcpus=4", 2048, 4),
        ("ram=8,vcpus=4", 8192, 4),
    ] {
        cells.push(with(cell("idle", name, Guest::Idle, ram_mib), |cell| {
            cell.vcpus = vcpus;
            cell.systems = OURS.to_vec();
            cell.systems.extend(strongest(Version::Seven));
        }));
    }
    cells
}

fn redis() -> Vec<Cell> {
    let one = |set_percent: u32| {
        let guest = Guest::Redis {
            data_mib: 600,
            set_percent,
            ops_per_s: Some(REDIS_OPS_PER_S),
        };
        let name = format!("set={set_percent}");
        with(cell("redis", &name, guest, 1024), |cell| {
            cell.systems = vec![
                ours(false, false),
                ours(true, false),
                qemu(Version::Seven, None, false, Backend::File, false),
                qemu(Version::Seven, Some(2), true, Backend::File, false),
            ];
        })
    };
    [0, 25, 50, 75, 100].map(one).to_vec()
}

fn hot() -> Vec<Cell> {
    let one = |share: f64| {
        let guest = Guest::Counter {
            mib: 768,
            mib_per_s: Some(mib_per_s(1.0, share)),
        };
        with(cell("hot", &format!("rate={share}"), guest, 1024), |cell| {
            cell.network = Network::rate(1.0);
            cell.systems = on_a_link(false);
            cell.systems.push(System::Qemu {
                version: Version::Seven,
                channels: None,
                tls: false,
                backend: Backend::File,
                prepared: false,
                converge: true,
            });
        })
    };
    [0.0, 0.5, 1.0, 2.0].map(one).to_vec()
}

fn link() -> Vec<Cell> {
    let one = |gbps: Option<f64>| {
        let name = gbps.map_or("unshaped".into(), |gbps| format!("gbps={gbps}"));
        let network = gbps.map_or(UNSHAPED, Network::rate);
        with(cell("link", &name, Guest::Idle, 1024), |cell| {
            cell.network = network;
            cell.systems = on_a_link(false);
            cell.systems.push(System::Iperf { streams: 2 });
        })
    };
    // QEMU takes one address, so it uses one of the cards.
    let four = |one_subnet: bool| {
        let subnets = if one_subnet { 1 } else { 4 };
        let name = format!("gbps=0.5,cards=4,subnets={subnets}");
        with(cell("link", &name, Guest::Idle, 1024), |cell| {
            cell.network = Network {
                cards: 4,
                one_subnet,
                ..Network::rate(0.5)
            };
            cell.systems = on_a_link(false);
        })
    };
    let rates = [Some(1.0), Some(5.0), Some(10.0), None].map(one);
    rates.into_iter().chain([four(false), four(true)]).collect()
}

fn ipv6() -> Vec<Cell> {
    let one = |network: Network| {
        let rate = network
            .gbps
            .map_or("unshaped".into(), |gbps| format!("gbps={gbps}"));
        let family = if network.six { "ipv6" } else { "ipv4" };
        let name = format!("{rate},{family}");
        with(cell("ipv6", &name, Guest::Idle, 1024), |cell| {
            cell.network = network;
            cell.systems = OURS[..2].to_vec();
        })
    };
    let both = |network: Network| {
        [
            network,
            Network {
                six: true,
                ..network
            },
        ]
    };
    [UNSHAPED, Network::rate(1.0)]
        .into_iter()
        .flat_map(both)
        .map(one)
        .collect()
}

fn distance() -> Vec<Cell> {
    let one = |(rtt_ms, loss_pct): (f64, f64)| {
        let guest = Guest::Counter {
            mib: 64,
            mib_per_s: Some(8.0),
        };
        let name = format!("rtt={rtt_ms},loss={loss_pct}");
        with(cell("distance", &name, guest, 1024), |cell| {
            cell.network = Network {
                rtt_ms,
                loss_pct,
                ..Network::rate(1.0)
            };
            cell.systems = on_a_link(true);
        })
    };
    let round_trips = [0.5, 5.0, 50.0, 100.0, 150.0].map(|rtt| (rtt, 0.0));
    let losses = [
        (0.5, 0.01),
        (0.5, 0.1),
        (50.0, 0.01),
        (50.0, 0.1),
        (150.0, 0.01),
        (150.0, 0.1),
    ];
    round_trips.into_iter().chain(losses).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn claimed_cells_run_five_times_and_others_twice_unless_told() {
        for cell in all() {
            assert_eq!(cell.runs, if cell.claimed { 5 } else { 2 });
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
    fn an_unknown_scenario_is_refused_with_those_there_are() {
        let choice = Choice {
            scenarios: vec!["idel".into()],
            ..Choice::default()
        };
        assert!(cells(&choice).unwrap_err().contains("idle"));
    }
}
