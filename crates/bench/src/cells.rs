//! The table of cells: a base cell in each scenario, then one axis at a time, and cells for single promises.
//!
//! Pure values. What shows nothing has few runs: every way of the peers that is never the best stands once in a cell
//! beside the base.

use crate::plan::{
    Backend, Cell, Course, Guest, Network, REDIS_OPS_PER_S, System, UNSHAPED, Version,
};

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

/// The version that a guest that writes is moved by: under emulation the older one loses writes (fixed in QEMU 9.0), so
/// that it seems to have less to do, and what arrives is not the guest.
const SOUND: Version = Version::Ten;

/// The newer version as it is without settings.
const TEN: System = qemu(Version::Ten, None, false, Backend::File, false);

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
fn strongest() -> Vec<System> {
    let (seven, ten) = (Version::Seven, Version::Ten);
    vec![
        qemu(seven, Some(2), false, Backend::File, false),
        qemu(seven, Some(2), true, Backend::Anonymous, false),
        qemu(ten, Some(2), false, Backend::File, false),
        qemu(ten, Some(2), false, Backend::File, true),
        qemu(ten, Some(2), true, Backend::Anonymous, false),
    ]
}

/// Plain and encrypted into cold memory, for links where the network is the limit.
fn on_a_link(version: Version) -> Vec<System> {
    vec![
        ours(false, false),
        ours(true, false),
        qemu(version, None, false, Backend::File, false),
        qemu(version, Some(2), true, Backend::File, false),
    ]
}

fn cell(scenario: &'static str, name: &str, guest: Guest, ram_mib: u32) -> Cell {
    Cell {
        scenario,
        name: name.into(),
        guest,
        ram_mib,
        vcpus: 1,
        network: UNSHAPED,
        course: Course::Move,
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

/// A small cell each of what most depends on.
pub fn quick() -> Vec<Cell> {
    let seven = Version::Seven;
    let mut base = OURS.to_vec();
    base.extend([
        qemu(seven, None, false, Backend::File, false),
        qemu(seven, Some(2), false, Backend::Anonymous, false),
        qemu(seven, Some(2), false, Backend::Anonymous, true),
        qemu(seven, Some(2), true, Backend::Anonymous, true),
        qemu(Version::Ten, Some(2), false, Backend::File, false),
        qemu(Version::Ten, Some(2), false, Backend::File, true),
        qemu(Version::Ten, Some(2), true, Backend::Anonymous, false),
        qemu(Version::Ten, Some(2), true, Backend::Anonymous, true),
        System::Iperf { streams: 2 },
        System::FirstTouch { huge: true },
        System::Cipher { open: false },
    ]);
    let plain = qemu(seven, None, false, Backend::File, false);
    let tls = qemu(SOUND, Some(2), true, Backend::File, false);
    let pair = [ours(true, false), tls];
    let redis = Guest::Redis {
        data_mib: 200,
        set_percent: 50,
        ops_per_s: Some(REDIS_OPS_PER_S),
    };
    let half = Guest::Counter {
        mib: 256,
        mib_per_s: Some(mib_per_s(1.0, 0.5)),
        reader: false,
    };
    let steady = Guest::Counter {
        mib: 64,
        mib_per_s: Some(8.0),
        reader: false,
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

/// All of it, what most is claimed from first: a bench that is ended early has that.
pub fn whole() -> Vec<Cell> {
    let (base, axes, search) = idle();
    let mut cells = vec![base];
    cells.extend(hot());
    cells.extend(link());
    cells.extend(distance());
    cells.push(zero());
    cells.extend(ipv6());
    cells.extend(redis());
    cells.extend(axes);
    cells.push(search);
    cells
}

fn zero() -> Cell {
    with(cell("zero", "base", Guest::Fresh, 2048), |cell| {
        cell.systems = OURS[..2].to_vec();
        let version = Version::Seven;
        cell.systems.extend([
            qemu(version, None, false, Backend::File, false),
            qemu(version, None, false, Backend::Anonymous, false),
            qemu(version, Some(2), true, Backend::File, false),
            TEN,
        ]);
    })
}

/// Ways that are never a peer's best: TLS on one channel, and the older version's.
fn is_slow(system: &System) -> bool {
    let qualities = (system.encrypted(), *system);
    matches!(
        qualities,
        (
            true,
            System::Qemu {
                version: Version::Seven,
                ..
            } | System::Qemu { channels: None, .. }
        )
    )
}

/// The base, one axis at a time, and what stands beside the base.
fn idle() -> (Cell, Vec<Cell>, Cell) {
    let mut base = with(cell("idle", "base", Guest::Idle, 2048), |cell| {
        cell.claimed = true;
    });
    base.systems.extend(OURS);
    // With other numbers of channels QEMU 10 is fastest into anonymous memory.
    for (count, tls) in [(1, false), (4, false), (4, true)] {
        let one = |prepared| qemu(Version::Ten, Some(count), tls, Backend::Anonymous, prepared);
        base.systems.extend([one(false), one(true)]);
    }
    // A cell of its own, with fewer runs: other numbers of channels, and ways that are slow.
    let mut search = with(cell("idle", "channels", Guest::Idle, 2048), |_| ());
    search.systems.extend(OURS);
    for version in [Version::Seven, Version::Ten] {
        let ways = every_way(version, &[None, Some(2)]);
        let (slow, quick): (Vec<_>, Vec<_>) = ways.into_iter().partition(is_slow);
        base.systems.extend(quick);
        search.systems.extend(slow);
        for count in [Some(1), Some(4)] {
            for tls in [false, true] {
                let one = |prepared| qemu(version, count, tls, Backend::Anonymous, prepared);
                let elsewhere = |way: &System| !base.systems.contains(way);
                let both = [one(false), one(true)].into_iter();
                search.systems.extend(both.filter(elsewhere));
            }
        }
    }
    base.systems.extend(LIMITS);
    let mut cells = Vec::new();
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
            // The newer version alone where a run is long.
            let peers = strongest();
            let chosen = match (ram_mib, vcpus) {
                (..=2048, 1) => &peers[..],
                (_, 1) => &peers[2..],
                _ => &peers[2..3],
            };
            cell.systems.extend(chosen);
        }));
    }
    (base, cells, search)
}

fn redis() -> Vec<Cell> {
    let one = |set_percent: u32| {
        let guest = Guest::Redis {
            data_mib: 400,
            set_percent,
            ops_per_s: Some(REDIS_OPS_PER_S),
        };
        let name = format!("set={set_percent}");
        with(cell("redis", &name, guest, 1024), |cell| {
            cell.systems = vec![ours(false, false), ours(true, false), TEN];
            // The middle of the axis and its busy end against the peer's encryption too.
            if matches!(set_percent, 50 | 100) {
                let tls = qemu(SOUND, Some(2), true, Backend::File, false);
                cell.systems.push(tls);
            }
            if set_percent < 100 {
                cell.runs = 1;
            }
        })
    };
    [0, 25, 50, 75, 100].map(one).to_vec()
}

fn hot() -> Vec<Cell> {
    let one = |(share, reader): (f64, bool)| {
        let guest = Guest::Counter {
            mib: 384,
            mib_per_s: Some(mib_per_s(1.0, share)),
            reader,
        };
        let beside = if reader { ",reader" } else { "" };
        let name = format!("rate={share}{beside}");
        with(cell("hot", &name, guest, 512), |cell| {
            cell.vcpus = 1 + u32::from(reader);
            cell.network = Network::rate(1.0);
            cell.systems = on_a_link(SOUND);
            if share >= 1.0 {
                // It ends with TLS as little as without.
                cell.systems.pop();
            }
            cell.systems.push(System::Qemu {
                version: SOUND,
                channels: None,
                tls: false,
                backend: Backend::File,
                prepared: false,
                converge: true,
            });
            // The older one once, to show what it loses.
            if share == 0.5 {
                let seven = qemu(Version::Seven, None, false, Backend::File, false);
                cell.systems.push(seven);
            }
        })
    };
    let free = Guest::Counter {
        mib: 384,
        mib_per_s: None,
        reader: false,
    };
    let cancelled = with(cell("hot", "cancelled", free, 512), |cell| {
        cell.network = Network::rate(1.0);
        cell.course = Course::Cancelled;
        cell.runs = 1;
        cell.systems = vec![ours(true, false)];
    });
    // Where no link hides what the first touch of memory costs.
    let busy = Guest::Counter {
        mib: 384,
        mib_per_s: Some(300.0),
        reader: false,
    };
    let unshaped = with(cell("hot", "unshaped", busy, 512), |cell| {
        cell.systems = OURS[..2].to_vec();
    });
    let alone = [0.0, 0.5, 1.0, 2.0].map(|share| (share, false));
    let mut cells = alone.map(one).to_vec();
    // A second vCPU that only reads; peers slow all of a guest alike.
    cells.push(one((2.0, true)));
    cells.extend([unshaped, cancelled]);
    cells
}

fn link() -> Vec<Cell> {
    let one = |gbps: Option<f64>| {
        let name = gbps.map_or("unshaped".into(), |gbps| format!("gbps={gbps}"));
        let network = gbps.map_or(UNSHAPED, Network::rate);
        with(cell("link", &name, Guest::Idle, 1024), |cell| {
            cell.network = network;
            cell.systems = on_a_link(Version::Seven);
            if matches!(gbps, None | Some(1.0)) {
                cell.systems.push(TEN);
            }
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
            cell.systems = on_a_link(Version::Seven);
            cell.systems.pop();
        })
    };
    let mut cells = vec![one(None)];
    cells.extend([Some(1.0), Some(5.0), Some(10.0)].map(one));
    cells.extend(promises_of_a_link());
    cells.extend([four(false), four(true)]);
    cells
}

/// The same guest moved with and without a cut, and four guests at once.
fn promises_of_a_link() -> [Cell; 3] {
    let one = |name, ram_mib, course, systems: &[System]| {
        with(cell("link", name, Guest::Idle, ram_mib), |cell| {
            cell.network = Network::rate(1.0);
            cell.course = course;
            cell.systems = systems.to_vec();
        })
    };
    let plain = qemu(Version::Seven, None, false, Backend::File, false);
    let encrypted = ours(true, false);
    let once = |cell| with(cell, |cell| cell.runs = 1);
    [
        one("gbps=1,ram=2", 2048, Course::Estimated, &[encrypted]),
        once(one("cut=30", 2048, Course::Cut(30.0), &[encrypted, plain])),
        one("moves=4", 512, Course::AtOnce(4), &[encrypted]),
    ]
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
            reader: false,
        };
        let name = format!("rtt={rtt_ms},loss={loss_pct}");
        with(cell("distance", &name, guest, 1024), |cell| {
            cell.network = Network {
                rtt_ms,
                loss_pct,
                ..Network::rate(1.0)
            };
            cell.systems = vec![
                ours(true, false),
                qemu(SOUND, Some(2), true, Backend::File, false),
            ];
            let promised = loss_pct == 0.1 || loss_pct == 0.0 && matches!(rtt_ms, 0.5 | 150.0);
            if !promised {
                cell.runs = 1;
            }
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
    let mut cells: Vec<Cell> = round_trips.into_iter().chain(losses).map(one).collect();
    // Long enough that the first seconds of a connection do not count.
    cells.extend([0.5, 150.0].map(|rtt_ms| {
        let name = format!("ram=8,rtt={rtt_ms}");
        with(cell("distance", &name, Guest::Idle, 8192), |cell| {
            cell.network = Network {
                rtt_ms,
                ..Network::rate(1.0)
            };
            cell.runs = 1;
            cell.systems = vec![ours(true, false)];
        })
    }));
    cells
}
