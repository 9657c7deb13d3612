//! A guest that is stopped and let go on twenty times a second while it works with its disk, as the fault tolerance does it.
//!
//! For ten seconds with each QEMU; `GODWIT_STOP_CONT_S` says for how long instead, as 600 for the whole proof. That guest has one request
//! outstanding; a Linux with 32 is stopped for three seconds, where nothing is said.

mod booted;

use anyhow::{Context as _, Result, ensure};
use booted::{LOADED, Site, under_way, versions};
use godwit_testkit::testvol;
use godwit_types::host_api::VmRequest;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

const SECONDS: u32 = 10;
/// From one stop to the next.
const EACH: Duration = Duration::from_millis(50);
/// How often the image is compared, in stops.
const COMPARED: usize = 20;
/// So long is Linux stopped all the time.
const LINUX_SECONDS: u32 = 3;
/// Its requests under way.
const LOAD: u32 = 32;

/// How long it is to last, where somebody said it.
fn seconds() -> Result<Option<u32>> {
    let told = std::env::var("GODWIT_STOP_CONT_S").ok();
    let told = told.map(|told| told.parse()).transpose();
    told.context("GODWIT_STOP_CONT_S is no number of seconds")
}

#[derive(Default)]
struct Times(Vec<Duration>);

impl Times {
    fn told(&mut self) -> String {
        self.0.sort_unstable();
        let at = |percent: usize| {
            let index = self.0.len().saturating_sub(1) * percent / 100;
            self.0
                .get(index)
                .map_or(0.0, |time| time.as_secs_f64() * 1e3)
        };
        let [median, most, longest] = [50, 95, 100].map(at);
        format!("{median:.1}/{most:.1}/{longest:.1} ms (median/95 %/longest)")
    }
}

#[derive(Default)]
struct Stops {
    stops: Times,
    conts: Times,
}

impl Stops {
    fn count(&self) -> usize {
        self.stops.0.len()
    }

    /// Stops the guest and lets it go on; a while later the next turn begins.
    fn turn(&mut self, site: &Site, stands: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        let turn = Instant::now();
        site.ask(&VmRequest::Pause)?;
        self.stops.0.push(turn.elapsed());
        stands(self)?;
        let resumed = Instant::now();
        site.ask(&VmRequest::Resume)?;
        self.conts.0.push(resumed.elapsed());
        // A pace, which a busy machine does not keep; what the guest finds wrong is checked by itself.
        std::thread::sleep(EACH.saturating_sub(turn.elapsed()));
        Ok(())
    }

    fn told(&mut self, took: Duration) -> String {
        let count = self.count();
        format!(
            "{count} stops in {took:.0?} ({:.1} a second), stop {}, cont {}",
            count as f64 / took.as_secs_f64(),
            self.stops.told(),
            self.conts.told(),
        )
    }
}

#[test]
fn a_guest_that_is_stopped_twenty_times_a_second_loses_no_request() -> Result<()> {
    stopped_all_the_time("7.2", None)
}

#[test]
fn a_guest_of_qemu_10_that_is_stopped_twenty_times_a_second_loses_no_request() -> Result<()> {
    match versions()?.into_iter().nth(1) {
        Some((version, usr)) => stopped_all_the_time(version, usr.as_deref()),
        None => Ok(()),
    }
}

fn stopped_all_the_time(version: &str, usr: Option<&Path>) -> Result<()> {
    let lasts = Duration::from_secs(seconds()?.unwrap_or(SECONDS).into());
    let site = Site::booted_by(usr)?;
    let (began, first) = (Instant::now(), site.progress()?.round);
    let mut stops = Stops::default();
    let starts = site.pair.a.starts();
    while began.elapsed() < lasts {
        stops.turn(&site, |stops| match stops.count() % COMPARED {
            0 => site.image_has_all().map(drop),
            _ => Ok(()),
        })?;
    }
    let told = stops.told(began.elapsed());
    site.goes_on(20)?;
    site.ask(&VmRequest::Pause)?;
    let rounds = site.image_has_all()? - first;
    ensure!(
        site.pair.a.starts() == starts,
        "the VM process ended on the way"
    );
    println!("  QEMU {version}: {told}, {rounds} rounds of the guest");
    Ok(())
}

#[test]
fn linux_that_is_stopped_twenty_times_a_second_loses_no_request_of_thirty_two() -> Result<()> {
    for (version, usr) in versions()? {
        let work = |mounts: &OwnedFd| linux_is_stopped(version, usr.as_deref(), mounts);
        testvol::apart(work)?.unwrap_or(Ok(()))?;
    }
    Ok(())
}

fn linux_is_stopped(version: &str, usr: Option<&Path>, mounts: &OwnedFd) -> Result<()> {
    let seconds = seconds()?.unwrap_or(LINUX_SECONDS);
    let lasts = Duration::from_secs(seconds.into());
    // Of its own time, which stands still with it.
    let site = Site::with_linux(usr, mounts, (LOAD, seconds.saturating_add(1)))?;
    site.linux_writes(10)?;
    let qemu = site.pair.a.vm()?.qemu_pid.context("no QEMU")?;
    let (starts, began) = (site.pair.a.starts(), Instant::now());
    let (mut stops, mut met) = (Stops::default(), Vec::new());
    // On a busy machine its load may be over before.
    while began.elapsed() < lasts && !site.console()?.contains(LOADED) {
        met.push(under_way(qemu)?);
        stops.turn(&site, |_| Ok(()))?;
    }
    let told = stops.told(began.elapsed());
    site.linux_ends()?;
    ensure!(
        site.pair.a.starts() == starts,
        "the VM process ended on the way"
    );
    println!("  QEMU {version}: {told}, met {met:?} requests");
    let several = met.iter().filter(|met| **met > 1).count();
    ensure!(several >= 5, "{met:?}");
    Ok(())
}
