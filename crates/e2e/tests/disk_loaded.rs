//! A disk that moves to a second image under a load on its socket: no acknowledged write is lost, though the storage loses all
//! that was not made durable.

use anyhow::{Context as _, Result, ensure};
use godwit_testkit::disk_load::log::Log;
use godwit_testkit::disk_load::{Load, Order, Place, Running};
use godwit_testkit::lab::Machine;
use godwit_testkit::lab::namespace::Plan;
use godwit_testkit::testvol::{self, Settings, Survives};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

const SOURCE: &str = "/var/lib/source";
const DESTINATION: &str = "/var/lib/destination";
const DISK: u64 = 32 << 20;
const BLOCK: usize = 8192;

/// Ends what it serves.
struct Served(Child);

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn machine(destination: impl FnOnce(&mut Settings)) -> Result<Machine> {
    let mut machine = Machine::start(&Plan {
        name: "storage",
        visible: &[],
        shared: &[],
        outlive_maker: false,
    })?;
    for at in [SOURCE, DESTINATION] {
        let volume = machine.mount_direct_volume(Path::new(at))?;
        // Each region's copy takes so long that writes meet it.
        volume.change(|settings| {
            settings.latency = Duration::from_micros(500);
            settings.bytes_per_second = Some(100 << 20);
        });
    }
    machine.volume(DESTINATION)?.change(destination);
    Ok(machine)
}

#[test]
fn a_disk_moves_under_load_and_every_acknowledged_write_is_on_the_new_volume() -> Result<()> {
    moves_under_load(|_| {})
}

#[test]
fn a_disk_moves_to_storage_that_its_guest_outruns() -> Result<()> {
    moves_under_load(|settings| {
        settings.latency = Duration::from_millis(10);
        settings.bytes_per_second = Some(10 << 20);
        settings.shares = true;
    })
}

fn moves_under_load(destination: impl FnOnce(&mut Settings)) -> Result<()> {
    if let Some(why) = testvol::unavailable() {
        println!("skipped: {why}");
        return Ok(());
    }
    let machine = machine(destination)?;
    let log = Log::new(DISK, BLOCK);
    let from = machine.path_from_outside(SOURCE).join("disk.raw");
    log.fill(&File::create_new(&from)?)?;
    File::open(machine.path_from_outside(SOURCE))?.sync_all()?;
    let place = Place {
        socket: machine.path_from_outside("/run/disk"),
        memory: machine.path_from_outside("/dev/shm/memory"),
    };
    place.make_memory()?;
    let mut command = machine.command(env!("CARGO_BIN_EXE_godwit-disk"));
    let image = format!("--image={SOURCE}/disk.raw");
    command.args([image.as_str(), "--socket=/run/disk"]);
    command.args(["--memory=/dev/shm/memory", "--record=/run/record"]);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut served = Served(child?);
    let mut input = served.0.stdin.take().context("no standard input")?;
    let output = served.0.stdout.take().context("no standard output")?;
    let mut lines = BufReader::new(output).lines();
    let load = Load {
        outstanding: 16,
        write_percent: 50,
        flush_permille: 0,
        order: Order::Random,
        per_second: None,
        seed: 7,
    };
    let running = Running::begin(load, log, &place)?;
    while running.count() < 100 {
        ensure!(!running.has_ended(), "{:?}", running.end());
        std::thread::yield_now();
    }
    writeln!(input, "move {DESTINATION}/disk.raw")?;
    let ended = lines.find(|line| {
        let is = |what| line.as_ref().is_ok_and(|line| line.contains(what));
        is("\"moved\"") || is("\"failed\"")
    });
    let ended = ended.context("it ended before the move did")??;
    ensure!(ended.contains("\"moved\""), "{ended}");
    let (count, writes) = (running.count(), machine.volume(SOURCE)?.counts().writes);
    while running.count() < count + 1000 {
        ensure!(!running.has_ended(), "{:?}", running.end());
        std::thread::yield_now();
    }
    let load = running.end()?;
    drop((input, served));
    assert_eq!((load.failed, load.wrong_reads), (0, 0));
    assert_eq!(machine.volume(SOURCE)?.counts().writes, writes);
    assert!(load.log.writes() > 500, "{}", load.log.writes());
    assert_eq!(load.log.flushed(), load.log.writes());
    machine.volume(DESTINATION)?.cut(Survives::Nothing);
    let to = machine.path_from_outside(DESTINATION).join("disk.raw");
    let findings = load.log.check(&File::open(to)?)?;
    assert!(findings.is_equal(), "{findings:?}");
    // The source has not what was written after the switch: the check can tell.
    let findings = load.log.check(&File::open(from)?)?;
    assert!(findings.lost > 100, "{findings:?}");
    Ok(())
}
