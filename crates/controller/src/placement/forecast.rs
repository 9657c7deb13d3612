//! What a migration will be: asks the hosts to measure, has what they said remembered for a while, and predicts.
//!
//! Owns nothing; the measurements are App's. The speed of a link is what earlier migrations between the two
//! hosts achieved; where there were none, a short burst of the same records; where that fails, what the drivers of the
//! migration interfaces say. Every prediction says which. Refuses: to guess a speed.

use crate::app::App;
use crate::measured::{KEPT, Link};
use crate::preflight::{End, Preflight};
use crate::secret;
use godwit_migrate::pause::PauseHistory;
use godwit_migrate::predict::{self, Asked, Inputs};
use godwit_migrate::streams::{Room, first_streams};
use godwit_rpc::AgentClient;
use godwit_types::forecast::{DirtyRate, LinkProbeListen, LinkProbeSend, Prediction};
use godwit_types::load::HostLoad;
use godwit_types::migration::not_reached;
use godwit_types::migration::{
    CannotKeep, Cipher, DiskToMove, LimitedBy, MAX_DOWNTIME_MS_DEFAULT, MigrateRequest,
    MigrationReport,
};
use godwit_types::{ApiError, ErrorCode, HostName, PAGE_BYTES, VmName, bytes_per_s};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// Passes over fewer pages say more about their round trips than about the link.
const PAGES_MEASURABLE: u64 = 4096;
/// Newest migrations that tell a link's speed.
const HISTORY: usize = 5;
/// Share of the drivers' speed that page data gets at most.
const NIC_SHARE: f64 = 0.9;
const MIB: u64 = 1 << 20;

/// How much time a prediction may take.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Measuring the guest, ms.
    pub guest_ms: u64,
    /// Measuring the link, ms.
    pub link_ms: u64,
    /// A measurement may be as old as this.
    pub age: Duration,
}

/// For a dry run: as good as it gets.
pub const THOROUGH: Effort = Effort {
    guest_ms: 1_000,
    link_ms: 600,
    age: Duration::ZERO,
};
/// Before a migration with targets, and in a drain.
pub const QUICK: Effort = Effort {
    guest_ms: 400,
    link_ms: 300,
    age: Duration::from_secs(60),
};

/// What is to be expected.
#[derive(Debug, Clone, PartialEq)]
pub struct Foreseen {
    pub prediction: Prediction,
    /// Targets that do not fit them.
    pub cannot_keep: Vec<CannotKeep>,
}

/// Measures what is not known and predicts; an error says why that is not possible.
pub async fn foresee(
    app: &App,
    found: &Preflight,
    request: &MigrateRequest,
    effort: Effort,
) -> Result<Foreseen, ApiError> {
    let (source, destination) = (&found.source, &found.destination);
    let name = &found.vm.spec.name;
    let rate = rate(app, &source.agent, name, effort);
    let link = link(app, source, destination, found.cipher, effort);
    let (rate, link) = tokio::join!(rate, link);
    // What stands in the way first.
    let link = link?;
    let pause = pause(app, name, &source.host, &destination.host).await?;
    Ok(predict(&rate?, &link, pause, (request, &found.disks)))
}

/// What is remembered of an earlier prediction's measurements, without asking anybody.
pub async fn remembered(
    app: &App,
    found: &Preflight,
    request: &MigrateRequest,
) -> Option<Foreseen> {
    let measured = &app.measured;
    let hosts = (found.source.host.clone(), found.destination.host.clone());
    let rate = measured.rates.young(&found.vm.spec.name, KEPT)?;
    let link = measured.links.young(&hosts, KEPT)?;
    let pause = pause(app, &found.vm.spec.name, &hosts.0, &hosts.1).await;
    // What was remembered may be told without it.
    let pause = pause.unwrap_or_else(|error| {
        tracing::warn!(%error, "earlier reports cannot be read");
        None
    });
    Some(predict(&rate, &link, pause, (request, &found.disks)))
}

/// What pauses cost before: this VM's between the two hosts, either way; else those of others on the same way.
pub async fn pause(
    app: &App,
    vm: &VmName,
    source: &HostName,
    destination: &HostName,
) -> Result<Option<PauseHistory>, ApiError> {
    let there = app.store.reports_between(source, destination).await?;
    let back = app.store.reports_between(destination, source).await?;
    Ok(learnt(vm, there, back))
}

fn learnt(
    vm: &VmName,
    there: Vec<MigrationReport>,
    back: Vec<MigrationReport>,
) -> Option<PauseHistory> {
    let mut own: Vec<&MigrationReport> = there
        .iter()
        .chain(&back)
        .filter(|report| report.vm == *vm)
        .collect();
    own.sort_by_key(|report| std::cmp::Reverse(report.began_unix_s));
    PauseHistory::of(own).or_else(|| PauseHistory::of(&there))
}

/// How a guest writes.
pub async fn rate(
    app: &App,
    agent: &AgentClient,
    name: &VmName,
    effort: Effort,
) -> Result<DirtyRate, ApiError> {
    let rates = &app.measured.rates;
    if let Some(known) = rates.young(name, effort.age) {
        return Ok(known);
    }
    let rate = agent.measure(name, effort.guest_ms).await?;
    rates.keep(name.clone(), rate.clone());
    Ok(rate)
}

/// What a link carries.
pub async fn link(
    app: &App,
    source: &End,
    destination: &End,
    cipher: Cipher,
    effort: Effort,
) -> Result<Link, ApiError> {
    let hosts = (source.host.clone(), destination.host.clone());
    if let Some(known) = app.measured.links.young(&hosts, effort.age) {
        return Ok(known);
    }
    let asked = Instant::now();
    let turn = app.measured.turn(&hosts);
    let _turn = turn.lock().await;
    // What another has measured while this one waited is as good as new.
    let age = effort.age.max(asked.elapsed());
    if let Some(known) = app.measured.links.young(&hosts, age) {
        return Ok(known);
    }
    let reports = app.store.reports_between(&hosts.0, &hosts.1).await?;
    let burst = burst(source, destination, cipher, effort.link_ms).await;
    if let Err(error) = &burst
        && stands_in_the_way(error)
    {
        // Whatever was achieved before: nothing gets through now.
        return Err(error.clone());
    }
    let link = match (achieved(&reports, cipher), burst) {
        (Some((bytes_per_s, count)), burst) => {
            let (rtt_s, round_trip) = match burst {
                Ok(Link { rtt_s, .. }) => (rtt_s, format!("round trip {:.1} ms", 1000.0 * rtt_s)),
                Err(error) => {
                    let why = error.message;
                    let said = format!(
                        "and a round trip of 1 ms assumed, since a burst did not get through ({why})"
                    );
                    (0.001, said)
                }
            };
            let times = match count {
                1 => "the last migration".to_owned(),
                _ => format!("the last {count} migrations"),
            };
            Link {
                bytes_per_s,
                rtt_s,
                basis: format!(
                    "what {times} from host {} to host {} achieved, {round_trip}",
                    hosts.0, hosts.1
                ),
            }
        }
        (None, Ok(measured)) => measured,
        (None, Err(error)) => by_interfaces(source, destination).await.ok_or(error)?,
    };
    app.measured.links.keep(hosts, link.clone());
    Ok(link)
}

/// Page bytes per second of the newest completed migrations of the same encryption: their median, and how many.
fn achieved(reports: &[MigrationReport], cipher: Cipher) -> Option<(f64, usize)> {
    let speed = |report: &MigrationReport| {
        let passes = report.iterations.iter().filter(|pass| {
            pass.pages_sent >= PAGES_MEASURABLE && pass.limited_by != LimitedBy::Cap
        });
        let (pages, seconds) = passes.fold((0, 0.0), |(pages, seconds), pass| {
            let pages = u64::saturating_add(pages, pass.pages_sent);
            (pages, seconds + pass.seconds)
        });
        let usable = seconds > 0.0 && f64::is_finite(seconds);
        usable.then(|| pages as f64 * PAGE_BYTES as f64 / seconds)
    };
    let same = reports.iter().filter(|report| report.encryption == cipher);
    let mut speeds: Vec<f64> = same.filter_map(speed).take(HISTORY).collect();
    speeds.sort_by(f64::total_cmp);
    let median = speeds.get(speeds.len() / 2)?;
    Some((*median, speeds.len()))
}

async fn burst(
    source: &End,
    destination: &End,
    cipher: Cipher,
    millis: u64,
) -> Result<Link, ApiError> {
    let listen = LinkProbeListen {
        id: secret::migration_id()?,
        secret: secret::migration_secret()?,
        cipher,
    };
    let ready = destination.agent.link_listen(&listen).await?;
    let known = &destination.info.migration_addresses;
    let destination_addresses = own_addresses(ready.addresses, known);
    if destination_addresses.is_empty() {
        let message = format!(
            "host {} listens for a burst at none of its migration addresses: see 'godwit host check {0}'",
            destination.host
        );
        return Err(ApiError::new(ErrorCode::Incompatible, message).on_host(&destination.host));
    }
    let room = Room {
        cores: source.info.cpus.min(destination.info.cpus),
        routes: 1,
    };
    let send = LinkProbeSend {
        listen,
        destination_addresses,
        source_addresses: source.info.migration_addresses.clone(),
        // How far it is is not known yet: as many as a near link begins with.
        streams: first_streams(room, 0.0, false),
        millis,
    };
    let measured = source.agent.link_send(&send).await;
    let measured = measured.map_err(|error| no_way(source, destination, error.into()))?;
    let figures = [measured.bytes_per_s, measured.rtt_ms, measured.seconds];
    if !figures
        .iter()
        .all(|figure| figure.is_finite() && *figure >= 0.0)
    {
        let message = format!(
            "host {} answers no figures for the link to host {}: see its agent's log",
            source.host, destination.host
        );
        return Err(ApiError::new(ErrorCode::Internal, message).on_host(&source.host));
    }
    Ok(Link {
        bytes_per_s: measured.bytes_per_s,
        rtt_s: measured.rtt_ms / 1000.0,
        basis: format!(
            "a burst of {:.1} s over {} channels from host {} to host {}, round trip {:.1} ms",
            measured.seconds, measured.streams, source.host, destination.host, measured.rtt_ms
        ),
    })
}

/// Whether an error of [`foresee`] or [`link`] says that the hosts do not reach each other, rather than that something could not
/// be measured.
pub fn stands_in_the_way(error: &ApiError) -> bool {
    error.code == ErrorCode::Preflight
}

/// Names both hosts where the source says that no way leads to the destination.
fn no_way(source: &End, destination: &End, error: ApiError) -> ApiError {
    if !stands_in_the_way(&error) {
        return error;
    }
    let message = not_reached(&source.host, &destination.host, error.message);
    let error = ApiError::new(error.code, message).bounded();
    error.on_host(&source.host)
}

/// Of the addresses that a host answers those that are its own, so that nobody is sent to a third machine.
pub(crate) fn own_addresses(mut answered: Vec<SocketAddr>, own: &[IpAddr]) -> Vec<SocketAddr> {
    let is_own = |address: &SocketAddr| {
        let mut own = own.iter().map(IpAddr::to_canonical);
        own.any(|own| own == address.ip().to_canonical())
    };
    answered.retain(is_own);
    answered.truncate(own.len());
    answered
}

/// The slower end's interfaces, as their drivers say.
async fn by_interfaces(source: &End, destination: &End) -> Option<Link> {
    let (a, b) = tokio::join!(source.agent.load(), destination.agent.load());
    let mbit = driver_mbit_per_s(&a.ok()?)?.min(driver_mbit_per_s(&b.ok()?)?);
    Some(Link {
        bytes_per_s: NIC_SHARE * bytes_per_s(mbit),
        rtt_s: 0.001,
        basis: format!(
            "only the interfaces' speed of {mbit} Mb/s and an assumed round trip of 1 ms, since a burst did not get through"
        ),
    })
}

fn driver_mbit_per_s(load: &HostLoad) -> Option<u64> {
    let mut speeds = load.interfaces.iter().map(|link| link.speed_mbit_per_s);
    let sum = speeds.try_fold(0, |sum: u64, speed| Some(sum.saturating_add(speed?)));
    sum.filter(|speed| *speed > 0)
}

/// Puts a guest and a link together.
pub fn predict(
    rate: &DirtyRate,
    link: &Link,
    pause: Option<PauseHistory>,
    (request, disks): (&MigrateRequest, &[DiskToMove]),
) -> Foreseen {
    let cap = request
        .max_bandwidth_mbit_per_s
        .map_or(f64::INFINITY, bytes_per_s);
    let speed = link.bytes_per_s.min(cap);
    // Disks go first, and memory once they are copied.
    let used = disks.iter().map(|disk| disk.used_bytes);
    let disk_bytes = used.fold(0, u64::saturating_add);
    let disks_s = disk_bytes as f64 / speed.max(1.0);
    let inputs = Inputs {
        ram_bytes: rate.ram_mib.saturating_mul(MIB),
        data_bytes: rate.data_mib.saturating_mul(MIB),
        ages: rate.ages.clone(),
        bytes_per_s: speed,
        rtt_s: link.rtt_s,
        before_s: disks_s,
        pause,
    };
    let asked = Asked {
        max_downtime_ms: request.max_downtime_ms.unwrap_or(MAX_DOWNTIME_MS_DEFAULT),
        deadline_s: request.deadline_s,
        max_guest_slowdown_percent: request.max_guest_slowdown_percent,
    };
    let mut basis = format!(
        "writes measured for {:.1} s, {} of {} MiB have content; {}",
        rate.ages.last().map_or(0.0, |age| age.seconds),
        rate.data_mib,
        rate.ram_mib,
        link.basis
    );
    if let Some(pause) = pause {
        basis.push_str(&format!(", {}", pause.basis()));
    }
    if cap < link.bytes_per_s {
        basis.push_str(", capped as asked");
    }
    if disk_bytes > 0 {
        let mib = disk_bytes / MIB;
        let pace = match cap < link.bytes_per_s {
            true => "under the same cap",
            false => "as fast as the link",
        };
        basis.push_str(&format!(", {mib} MiB of disks {pace}"));
    }
    let forecast = predict::predict(&inputs, &asked);
    Foreseen {
        cannot_keep: predict::cannot_keep(&inputs, &asked),
        prediction: forecast.map_or_else(Prediction::default, |forecast| Prediction {
            total_s: disks_s + forecast.total_s,
            downtime_ms: 1000.0 * forecast.downtime_s,
            guest_speed_percent: (100.0 * forecast.speed).round() as u32,
            throughput_gb_per_s: inputs.bytes_per_s / 1e9,
            dirty_mib_per_s: forecast.dirty_bytes_per_s / MIB as f64,
            data_mib: rate.data_mib,
            basis,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::forecast::{DirtyAge, PromiseKind};
    use godwit_types::load::InterfaceLoad;
    use godwit_types::migration::{
        AgentAddress, IterationReport, MigrationSecret, MigrationSpec, Side,
    };
    use godwit_types::{Generation, MigrationId};

    fn report(cipher: Cipher, gb_per_s: f64, limited_by: LimitedBy) -> MigrationReport {
        let host = |name: &str| AgentAddress {
            host: HostName::new(name).unwrap(),
            address: "192.0.2.1:1".parse().unwrap(),
        };
        let spec = MigrationSpec {
            id: MigrationId::new("m").unwrap(),
            vm: VmName::new("web").unwrap(),
            generation: Generation(1),
            source: host("a"),
            destination: host("b"),
            secret: MigrationSecret {
                key: vec![],
                nonce: vec![],
            },
            cipher,
            max_downtime_ms: 50,
            deadline_s: None,
            max_bandwidth_mbit_per_s: None,
            max_guest_slowdown_percent: None,
            prepare_memory: false,
            control_protocol: None,
            prediction: None,
            disks: Vec::new(),
            method: godwit_types::disk_move::Method::default(),
            without: Vec::new(),
            images: Vec::new(),
            source_addresses: vec![],
            destination_addresses: vec![],
        };
        let mut report = MigrationReport::begun(&spec, Side::Source, 64, 1);
        let pages_sent = 100_000;
        let pass = |pages_sent, limited_by| IterationReport {
            pages_sent,
            zero_pages: 0,
            bytes: 0,
            seconds: pages_sent as f64 * PAGE_BYTES as f64 / gb_per_s / 1e9,
            limited_by,
        };
        report.iterations = vec![pass(pages_sent, limited_by), pass(10, LimitedBy::Link)];
        report
    }

    #[test]
    fn a_links_speed_is_the_median_of_what_was_achieved_with_the_same_encryption() {
        let sealed = Cipher::Aes256Gcm;
        let link = LimitedBy::Link;
        let reports = [
            report(sealed, 0.2, link),
            report(Cipher::None, 9.0, link),
            report(sealed, 0.1, link),
            report(sealed, 0.3, link),
            report(sealed, 0.001, LimitedBy::Cap),
        ];
        let (speed, count) = achieved(&reports, sealed).unwrap();
        assert!((speed / 1e9 - 0.2).abs() < 1e-6, "{speed}");
        assert_eq!(count, 3);
        assert_eq!(achieved(&[], sealed), None);
    }

    #[test]
    fn a_pause_is_learnt_from_the_vms_own_moves_either_way_first() {
        let moved = |vm: &str, switchover_ms: f64, began_unix_s| {
            let mut moved = report(Cipher::None, 1.0, LimitedBy::Link);
            moved.vm = VmName::new(vm).unwrap();
            moved.outcome = Some(godwit_types::migration::Outcome::Completed);
            (moved.switchover_ms, moved.began_unix_s) = (switchover_ms, began_unix_s);
            moved
        };
        let fixed_ms = |vm: &str, there, back| {
            let vm = VmName::new(vm).unwrap();
            learnt(&vm, there, back).map(|pause| (pause.moves, pause.fixed_ms))
        };
        let there = || vec![moved("sq", 100.0, 3), moved("mc", 10.0, 2)];
        let back = || vec![moved("sq", 120.0, 4), moved("mc", 20.0, 1)];
        assert_eq!(fixed_ms("sq", there(), back()), Some((2, 120.0)));
        // A VM that never moved between them: as others did on this way.
        assert_eq!(fixed_ms("new", there(), back()), Some((2, 100.0)));
        assert_eq!(fixed_ms("new", vec![], back()), None);
    }

    #[test]
    fn figures_that_no_host_can_mean_overflow_nothing() {
        let link = LimitedBy::Link;
        let mut huge = report(Cipher::None, 1.0, link);
        huge.iterations[1].pages_sent = u64::MAX;
        let (speed, _) = achieved(&[huge.clone()], Cipher::None).unwrap();
        assert!(speed.is_finite() && speed > 0.0);
        huge.iterations[0].seconds = f64::INFINITY;
        assert_eq!(achieved(&[huge], Cipher::None), None);
        let interface = |speed_mbit_per_s| InterfaceLoad {
            name: "eth0".into(),
            addresses: Vec::new(),
            received_bytes_per_s: 0.0,
            sent_bytes_per_s: 0.0,
            speed_mbit_per_s,
        };
        let mut load = HostLoad {
            host: HostName::new("a").unwrap(),
            seconds: 1.0,
            cpus: 1,
            cpu_percent: 0.0,
            memory_total_mib: 1,
            memory_free_mib: 1,
            interfaces: vec![interface(Some(u64::MAX)), interface(Some(2))],
            migrations: Vec::new(),
        };
        assert_eq!(driver_mbit_per_s(&load), Some(u64::MAX));
        load.interfaces.push(interface(None));
        assert_eq!(driver_mbit_per_s(&load), None);
    }

    #[test]
    fn a_burst_goes_to_no_address_that_is_not_the_destinations() {
        let own: Vec<IpAddr> = ["192.0.2.1", "2001:db8::1"]
            .map(|own| own.parse().unwrap())
            .into();
        let answered = [
            "198.51.100.7:1",
            "192.0.2.1:2",
            "[::ffff:192.0.2.1]:3",
            "[2001:db8::2]:4",
            "[2001:db8::1]:5",
        ];
        let answered = answered.map(|address| address.parse().unwrap()).to_vec();
        let kept: Vec<u16> = own_addresses(answered, &own)
            .iter()
            .map(SocketAddr::port)
            .collect();
        assert_eq!(kept, [2, 3]);
        assert_eq!(
            own_addresses(vec!["192.0.2.9:1".parse().unwrap()], &own),
            []
        );
    }

    #[test]
    fn the_cap_that_was_asked_for_bounds_the_prediction() {
        let rate = DirtyRate {
            ram_mib: 2048,
            data_mib: 1000,
            ages: vec![DirtyAge {
                seconds: 1.0,
                mib: 1.0,
            }],
        };
        let link = Link {
            bytes_per_s: 1e9,
            rtt_s: 0.001,
            basis: "a burst".into(),
        };
        let mut request = MigrateRequest {
            deadline_s: Some(5),
            dry_run: true,
            ..MigrateRequest::plain(HostName::new("b").unwrap())
        };
        let free = predict(&rate, &link, None, (&request, &[]));
        assert!((1.0..2.5).contains(&free.prediction.total_s), "{free:?}");
        assert_eq!(free.cannot_keep, []);
        assert!(free.prediction.basis.contains("1000 of 2048 MiB"));
        let disk = DiskToMove {
            layered: false,
            linked: None,
            name: "root".into(),
            bytes: 80_000_000_000,
            used_bytes: 4_000_000_000,
        };
        let disks = predict(&rate, &link, None, (&request, std::slice::from_ref(&disk)));
        assert!((5.0..6.5).contains(&disks.prediction.total_s), "{disks:?}");
        assert!(disks.prediction.basis.contains("3814 MiB of disks"));
        let late = &disks.cannot_keep[0].message;
        assert!(
            late.contains("about 6 s") && late.contains("its deadline of 5 s"),
            "the disks' time is part of it: {late}"
        );
        request.max_bandwidth_mbit_per_s = Some(800);
        let capped = predict(&rate, &link, None, (&request, &[]));
        assert!(
            (10.0..12.5).contains(&capped.prediction.total_s),
            "{capped:?}"
        );
        let promises: Vec<_> = capped.cannot_keep.iter().map(|p| p.promise).collect();
        assert_eq!(promises, [PromiseKind::Deadline]);
        assert!(capped.prediction.basis.ends_with("capped as asked"));
        let disks = predict(&rate, &link, None, (&request, &[disk]));
        let basis = disks.prediction.basis;
        assert!(basis.ends_with("disks under the same cap"), "{basis}");
    }
}
