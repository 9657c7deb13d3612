//! Whatever dies while a disk moves, no write is lost that its guest was answered.
//!
//! Power cuts and kills of VM processes at random moments ([`godwit_e2e::deaths`]) of moves between two volumes of a host and
//! between two hosts.

mod mortal;

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::Host;
use godwit_e2e::deaths::Deaths;
use godwit_types::disk_move::Method;
use mortal::{Between, Chance, LONG, Mortal, Power, apart, is_unknown};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A move takes about so long.
const MOVE_MS: u64 = 900;
/// What comes after the last byte was copied takes so long.
const END_MS: u64 = 120;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Death {
    Power,
    Process,
}

fn deaths(between: Between, death: Death, count: u64) -> Result<()> {
    deaths_by((between, Method::default()), death, count)
}

fn deaths_by((between, method): (Between, Method), death: Death, count: u64) -> Result<()> {
    let planned = Deaths::planned(count)?;
    let Deaths { seed, count } = planned;
    apart(|mounts| {
        let mut mortal = Mortal::new(between, mounts)?;
        mortal.method = method;
        let mut at = mortal.judge()?;
        let mut moved = 0;
        for round in 0..count {
            let mut chance = Chance(planned.of(round));
            let told = || format!("GODWIT_SEED={seed}, death {round} of {between:?} by {death:?}");
            let within_ms = Deaths::within_ms(round, MOVE_MS);
            die_once(&mut mortal, &at, (death, within_ms), &mut chance).with_context(told)?;
            let now = mortal.judge().with_context(told)?;
            moved += u64::from(now.1 != at.1 || now.0.owner.name != at.0.owner.name);
            at = now;
        }
        println!("  {moved} of {count} were moved all the same");
        ensure!(moved < count, "each move was over before anything died");
        Ok(())
    })
}

/// Begins a move, waits for a moment of it, and lets something die.
fn die_once(
    mortal: &mut Mortal,
    (at, path): &(godwit_e2e::verdict::Settled, std::path::PathBuf),
    (death, within_ms): (Death, Option<u64>),
    chance: &mut Chance,
) -> Result<()> {
    let began = Instant::now();
    let is_near = mortal.begin_move(at, path)?;
    if let Some(within_ms) = within_ms {
        std::thread::sleep(Duration::from_millis(chance.below(within_ms)));
    } else {
        while !is_near() {
            ensure!(began.elapsed() < LONG, "it copies for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(chance.below(END_MS)));
    }
    drop(is_near);
    let power = [Power::OfA, Power::OfB, Power::OfBoth][chance.below(3) as usize];
    let is_of_b = at.owner.storage.is_some() && chance.below(2) == 0;
    match death {
        Death::Power if at.owner.storage.is_none() => mortal.cut(Power::OfA, Some(chance)),
        Death::Power => mortal.cut(power, Some(chance)),
        Death::Process => {
            let victim = match is_of_b {
                true => &mortal.pair.b,
                false => &mortal.pair.a,
            };
            let starts = victim.starts();
            victim.signal_kill()?;
            while victim.starts() == starts {
                ensure!(began.elapsed() < LONG, "it has no successor");
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        }
    }
}

#[test]
fn a_power_cut_in_a_move_between_volumes_loses_no_acknowledged_write() -> Result<()> {
    deaths(Between::Volumes, Death::Power, 10)
}

#[test]
fn a_power_cut_in_a_move_between_hosts_loses_no_acknowledged_write() -> Result<()> {
    deaths(Between::Hosts, Death::Power, 8)
}

#[test]
fn a_power_cut_in_a_move_by_dirty_tracking_loses_no_acknowledged_write() -> Result<()> {
    let by = (Between::Volumes, Method::DirtyTracking);
    deaths_by(by, Death::Power, 10)
}

#[test]
fn a_kill_in_a_move_by_dirty_tracking_loses_no_acknowledged_write() -> Result<()> {
    let by = (Between::Volumes, Method::DirtyTracking);
    deaths_by(by, Death::Process, 10)
}

#[test]
fn a_kill_in_a_move_between_volumes_loses_no_acknowledged_write() -> Result<()> {
    deaths(Between::Volumes, Death::Process, 10)
}

#[test]
fn a_kill_in_a_move_between_hosts_loses_no_acknowledged_write() -> Result<()> {
    deaths(Between::Hosts, Death::Process, 8)
}

/// The host's VM process is one that comes no further than this point.
fn stops_at(host: &Host, point: &'static str) -> Result<()> {
    let starts = host.starts();
    host.arm(point, "hold");
    host.signal_kill()?;
    let until = Instant::now() + LONG;
    while host.starts() == starts || host.vm().is_err_and(|error| !is_unknown(&error)) {
        ensure!(Instant::now() < until, "it has no successor");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// It has said that it is ready, and nothing that the guest does there has made anything durable.
#[test]
fn a_destination_whose_power_fails_before_its_guest_runs_has_the_whole_disk() -> Result<()> {
    apart(|mounts| {
        let mut mortal = Mortal::new(Between::Hosts, mounts)?;
        let (at, path) = mortal.judge()?;
        stops_at(&mortal.pair.b, "journal.holds.after")?;
        mortal.crawl();
        drop(mortal.begin_move(&at, &path)?);
        mortal.pair.b.wait_fault(LONG)?;
        mortal.cut(Power::OfB, None)?;
        let (now, _) = mortal.judge()?;
        ensure!(now.owner.name == mortal.pair.b.name, "it is not there");
        Ok(())
    })
}

/// The disk changes hands, and power fails after the gift: that of the source before the permit is on its way, and that of both hosts
/// and their storage before the guest runs at the destination.
#[test]
fn a_power_cut_after_the_gift_of_a_shared_disk_loses_no_acknowledged_write() -> Result<()> {
    for (point, power) in [
        ("journal.gave.after", Power::OfA),
        ("journal.holds.after", Power::OfBoth),
    ] {
        apart(|mounts| {
            let mut mortal = Mortal::new(Between::HostsThatShare, mounts)?;
            let (at, path) = mortal.judge()?;
            let victim = match power {
                Power::OfA => Arc::clone(&mortal.pair.a),
                _ => Arc::clone(&mortal.pair.b),
            };
            stops_at(&victim, point)?;
            mortal.guest_goes_on()?;
            drop(mortal.begin_move(&at, &path)?);
            victim.wait_fault(LONG)?;
            mortal.cut(power, None)?;
            let (now, there) = mortal.judge()?;
            ensure!(there == path && now.owner.name == mortal.pair.b.name);
            Ok(())
        })
        .context(point)?;
    }
    Ok(())
}
