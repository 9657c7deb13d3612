//! A VM process that becomes another program while its guest works with its disk, and dies on the way.

mod booted;

use anyhow::{Context as _, Result, ensure};
use booted::{LONG, LOOK_EVERY, Site, versions};
use godwit_testkit::guest::boot_disk;
use godwit_types::host_api::VmRequest;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const RENEWALS: usize = 10;
/// What the log says of a disk that went on.
const WENT_ON: &str = "the disk goes on over QEMU's connection";
/// What it says where QEMU has to connect again.
const NOT_HANDED: [&str; 4] = [
    "QEMU has to connect to this disk again",
    "QEMU has disconnected",
    "the connection to QEMU was ended",
    "what the program before handed over is not taken",
];

fn lines(site: &Site, words: &str) -> Result<usize> {
    let log = std::fs::read_to_string(site.pair.a.log())?;
    Ok(log.lines().filter(|line| line.contains(words)).count())
}

fn wait_for_lines(site: &Site, words: &str, count: usize) -> Result<()> {
    let deadline = Instant::now() + LONG;
    while lines(site, words)? < count {
        ensure!(
            Instant::now() < deadline,
            "the log does not say '{words}' {count} times"
        );
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// Looks how long the guest stood still at most, until it is asked.
struct Watch {
    ends: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Result<Duration>>,
}

impl Watch {
    fn of(site: &Site) -> Result<Self> {
        let ram = File::open(site.pair.a.ram_file()?)?;
        let ends = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&ends);
        let thread = std::thread::spawn(move || {
            let (mut longest, mut since) = (Duration::ZERO, Instant::now());
            let mut round = boot_disk::progress(&ram)?.round;
            while !ended.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_micros(200));
                let now = boot_disk::progress(&ram)?.round;
                longest = longest.max(since.elapsed());
                if now != round {
                    (round, since) = (now, Instant::now());
                }
            }
            Ok(longest)
        });
        Ok(Self { ends, thread })
    }

    fn longest(self) -> Result<Duration> {
        self.ends.store(true, Ordering::SeqCst);
        self.thread.join().ok().context("the watch ended")?
    }
}

#[test]
fn a_vm_process_is_renewed_ten_times_and_qemu_stays_connected_to_its_disk() -> Result<()> {
    for (version, usr) in versions()? {
        let site = Site::booted_by(usr.as_deref())?;
        let (host, mut stalls) = (&site.pair.a, Vec::new());
        let (pid, starts) = (host.process_id(), host.starts());
        let idle = Watch::of(&site)?;
        site.goes_on(200)?;
        let usual = idle.longest()?;
        for renewal in 1..=RENEWALS {
            site.goes_on(20)?;
            let watch = Watch::of(&site)?;
            host.renew()?;
            wait_for_lines(&site, WENT_ON, renewal)?;
            site.goes_on(20)?;
            stalls.push(watch.longest()?);
        }
        site.ask(&VmRequest::Pause)?;
        let round = site.image_has_all()?;
        ensure!(
            (host.process_id(), host.starts()) == (pid, starts),
            "another process"
        );
        ensure!(lines(&site, WENT_ON)? == RENEWALS, "it went on more often");
        for words in NOT_HANDED {
            ensure!(lines(&site, words)? == 0, "the log says: {words}");
        }
        let longest = stalls.iter().max().context("no renewal")?;
        println!(
            "  QEMU {version}: {round} rounds, usually at most {usual:?} without one; renewals: {stalls:?}, longest {longest:?}"
        );
    }
    Ok(())
}

#[test]
fn a_vm_process_that_dies_while_it_is_renewed_loses_no_write_of_its_guest() -> Result<()> {
    for (version, usr) in versions()? {
        let site = Site::booted_by(usr.as_deref())?;
        let host = &site.pair.a;
        for point in ["renewal.handed", "renewal.begun", "renewal.taken"] {
            host.arm(point, "kill");
            let starts = host.starts();
            host.signal_kill()?;
            // The one that is armed has the guest's disk.
            until(|| host.starts() == starts + 1 && host.vm().is_ok())?;
            site.goes_on(20)?;
            host.renew()?;
            host.wait_fault(LONG)?;
            until(|| host.starts() == starts + 2 && host.vm().is_ok())?;
            site.goes_on(20)?;
            site.ask(&VmRequest::Pause)?;
            let round = site.image_has_all()?;
            site.ask(&VmRequest::Resume)?;
            println!("  QEMU {version}: killed at {point}, {round} rounds");
        }
    }
    Ok(())
}

fn until(is_so: impl Fn() -> bool) -> Result<()> {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        ensure!(Instant::now() < deadline, "it does not come to that");
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

#[test]
fn a_vm_process_that_cannot_become_another_program_goes_on_as_it_was() -> Result<()> {
    let site = Site::booted()?;
    let host = &site.pair.a;
    for program in ["/nowhere/godwit", "/etc/passwd"] {
        let before = lines(&site, "this process is not renewed")?;
        host.become_program(Path::new(program))?;
        wait_for_lines(&site, "this process is not renewed", before + 1)?;
        site.goes_on(20)?;
    }
    ensure!(host.starts() == 1 && lines(&site, WENT_ON)? == 0);
    // A program that knows of no such letter ends at once.
    host.become_program(Path::new("/bin/false"))?;
    until(|| host.starts() == 2 && host.vm().is_ok())?;
    site.goes_on(20)?;
    site.ask(&VmRequest::Pause)?;
    site.image_has_all().map(drop)
}
