//! A guest that is stopped and let go on twenty times a second while it works with its disk, as the fault tolerance does it.
//!
//! For ten seconds with each QEMU; `GODWIT_STOP_CONT_S` says for how long instead, as 600 for the whole proof.

mod booted;

use anyhow::{Context as _, Result, ensure};
use booted::{Site, versions};
use godwit_types::host_api::VmRequest;
use std::path::Path;
use std::time::{Duration, Instant};

const SECONDS: u64 = 10;
/// From one stop to the next.
const EACH: Duration = Duration::from_millis(50);
/// How often the image is compared, in stops.
const COMPARED: usize = 20;

fn seconds() -> Result<u64> {
    let told = std::env::var("GODWIT_STOP_CONT_S").ok();
    let told = told.map(|told| told.parse()).transpose();
    Ok(told
        .context("GODWIT_STOP_CONT_S is no number of seconds")?
        .unwrap_or(SECONDS))
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
    let lasts = Duration::from_secs(seconds()?);
    let site = Site::booted_by(usr)?;
    let (began, first) = (Instant::now(), site.progress()?.round);
    let (mut stops, mut conts) = (Times::default(), Times::default());
    let starts = site.pair.a.starts();
    while began.elapsed() < lasts {
        let turn = Instant::now();
        site.ask(&VmRequest::Pause)?;
        stops.0.push(turn.elapsed());
        if stops.0.len().is_multiple_of(COMPARED) {
            site.image_has_all()?;
        }
        let resumed = Instant::now();
        site.ask(&VmRequest::Resume)?;
        conts.0.push(resumed.elapsed());
        // A pace, which a busy machine does not keep; each round of the guest's is checked by itself.
        std::thread::sleep(EACH.saturating_sub(turn.elapsed()));
    }
    let took = began.elapsed();
    site.goes_on(20)?;
    site.ask(&VmRequest::Pause)?;
    let round = site.image_has_all()?;
    ensure!(
        site.pair.a.starts() == starts,
        "the VM process ended on the way"
    );
    let count = stops.0.len();
    println!(
        "  QEMU {version}: {count} stops in {took:.0?} ({:.1} a second), {} rounds of the guest; stop {}, cont {}",
        count as f64 / took.as_secs_f64(),
        round - first,
        stops.told(),
        conts.told(),
    );
    Ok(())
}
