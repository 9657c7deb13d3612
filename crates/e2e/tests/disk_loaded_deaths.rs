//! A disk with many requests under way whose power fails, or whose process is killed, while it moves to another volume: the image
//! that the record names has every write that an acknowledged flush covers.
//!
//! [`godwit_e2e::deaths`] says how many, and which moments.

#[path = "../../vhost/tests/common/chance.rs"]
mod chance;

use anyhow::{Context as _, Result, ensure};
use chance::Chance;
use godwit_e2e::deaths::{self, Deaths};
use godwit_testkit::disk_load::log::Log;
use godwit_testkit::disk_load::{Load, Order, Place, Running};
use godwit_testkit::lab::Machine;
use godwit_testkit::lab::namespace::Plan;
use godwit_testkit::testvol::{self, Settings, Volume};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Where the record is, and where images are.
const VOLUMES: [&str; 3] = ["/var/lib/record", "/var/lib/first", "/var/lib/second"];
const DISK: u64 = 16 << 20;
/// A block reaches its storage whole or not at all.
const BLOCK: usize = 4096;
const LONG: Duration = Duration::from_secs(60);
/// A move takes about so long, and what comes after its copying.
const MOVE_MS: u64 = 700;
const END_MS: u64 = 60;

/// A process that serves the disk; killed with the value.
struct Served {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Site {
    machine: Machine,
    place: Place,
    /// As the machine sees it.
    image: PathBuf,
    images: u64,
    log: Log,
}

impl Site {
    fn new() -> Result<Option<Self>> {
        if let Some(why) = testvol::unavailable() {
            println!("skipped: {why}");
            return Ok(None);
        }
        let mut machine = Machine::start(&Plan {
            name: "diskdeaths",
            visible: &[],
            shared: &[],
            outlive_maker: false,
        })?;
        let [record, images @ ..] = VOLUMES;
        machine.mount_volume(Path::new(record))?;
        for at in images {
            machine.mount_direct_volume(Path::new(at))?;
        }
        let place = Place {
            socket: machine.path_from_outside("/run/disk"),
            memory: machine.path_from_outside("/dev/shm/memory"),
        };
        let site = Self {
            image: Path::new(images[0]).join("0.raw"),
            images: 0,
            log: Log::new(DISK, BLOCK).for_power_cuts(),
            machine,
            place,
        };
        let image = site.machine.path_from_outside(&site.image);
        let file = File::create_new(&image)?;
        site.log.fill(&file)?;
        file.sync_all()?;
        File::open(image.parent().context("a directory")?)?.sync_all()?;
        Ok(Some(site))
    }

    fn volumes(&self) -> Result<Vec<&Volume>> {
        let volumes = VOLUMES.iter().map(|at| self.machine.volume(at));
        Ok(volumes.collect::<std::io::Result<_>>()?)
    }

    fn set_pace(&self, is_slow: bool) -> Result<()> {
        for volume in &self.volumes()?[1..] {
            volume.change(|settings| {
                *settings = match is_slow {
                    true => Settings {
                        latency: Duration::from_micros(300),
                        bytes_per_second: Some(60 << 20),
                        shares: true,
                        ..Settings::default()
                    },
                    false => Settings::default(),
                }
            });
        }
        Ok(())
    }

    fn serve(&self) -> Result<Served> {
        self.place.make_memory()?;
        let _ = std::fs::remove_file(&self.place.socket); // of the one before
        let mut command = self.machine.command(env!("CARGO_BIN_EXE_godwit-disk"));
        command.arg(format!("--image={}", self.image.display()));
        command.args(["--socket=/run/disk", "--memory=/dev/shm/memory"]);
        command.arg("--record=/var/lib/record/disk");
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child?;
        let input = child.stdin.take().context("no standard input")?;
        let output = child.stdout.take().context("no standard output")?;
        let (said, lines) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            lines
                .take_while(|line| said.send(line.clone()).is_ok())
                .count()
        });
        Ok(Served {
            child,
            input,
            lines,
        })
    }

    /// A file on the other volume that is not there yet.
    fn next(&mut self) -> PathBuf {
        self.images += 1;
        let at = match self.image.starts_with(VOLUMES[1]) {
            true => VOLUMES[2],
            false => VOLUMES[1],
        };
        Path::new(at).join(format!("{}.raw", self.images))
    }

    /// Ends the process, and with a power cut what storage has not made durable.
    fn die(&self, mut served: Served, with_power: bool, chance: &mut Chance) -> Result<()> {
        let mut volumes = self.volumes()?;
        if with_power {
            deaths::power_off(&mut volumes, |limit| chance.below(limit));
        }
        let until = Instant::now() + LONG;
        served.child.kill()?;
        while served.child.try_wait()?.is_none() {
            ensure!(Instant::now() < until, "it does not die");
            volumes.iter().for_each(|volume| volume.refuse_held());
            std::thread::yield_now();
        }
        volumes.iter().for_each(|volume| volume.power_on());
        Ok(())
    }

    /// The image that the record names has all that it must have; every other file is a former image, or one that the record
    /// names as not whole.
    fn judge(&mut self, former: &Path) -> Result<()> {
        self.set_pace(false)?;
        let record = self.machine.path_from_outside("/var/lib/record/disk");
        let record: serde_json::Value = match std::fs::read(&record) {
            Ok(text) => serde_json::from_slice(&text)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => serde_json::Value::Null,
            Err(error) => return Err(error.into()),
        };
        if let Some(disk) = record["disk"].as_str() {
            self.image = disk.into();
        }
        let image = self.machine.path_from_outside(&self.image);
        let findings = self.log.check_after_cut(&File::open(&image)?)?;
        ensure!(findings.is_equal(), "{record}: {findings:?}");
        let half_made = Path::new(record["copying"].as_str().unwrap_or_default());
        let known = [former, half_made, &half_made.with_extension("moving")];
        let known = known.map(|path| self.machine.path_from_outside(path));
        for at in &VOLUMES[1..] {
            for file in std::fs::read_dir(self.machine.path_from_outside(at))? {
                let path = file?.path();
                if path == image {
                    continue;
                }
                ensure!(known.contains(&path), "{record} does not name {path:?}");
                std::fs::remove_file(path)?;
            }
            File::open(self.machine.path_from_outside(at))?.sync_all()?;
        }
        self.set_pace(true)
    }
}

/// How a disk is moved.
const MIRROR: &str = "move";
const TRACKING: &str = "move-by-dirty-tracking";

fn die_often(by: &str, with_power: bool, count: u64) -> Result<()> {
    let planned = Deaths::planned(count)?;
    let Deaths { seed, count } = planned;
    let Some(mut site) = Site::new()? else {
        return Ok(());
    };
    let (mut moved, mut writes) = (0, 0);
    for round in 0..count {
        let mut chance = Chance(planned.of(round));
        let former = site.image.clone();
        let told = || format!("GODWIT_SEED={seed}, death {round}, of power: {with_power}");
        let within_ms = Deaths::within_ms(round, MOVE_MS);
        die_once(&mut site, by, (with_power, within_ms), &mut chance).with_context(told)?;
        site.judge(&former).with_context(told)?;
        moved += u64::from(site.image != former);
        writes = site.log.writes();
    }
    println!("  {moved} of {count} were moved all the same, {writes} writes");
    ensure!(moved < count, "each move was over before anything died");
    Ok(())
}

/// Serves the disk, loads it, begins a move, and lets it die at some moment of that.
fn die_once(
    site: &mut Site,
    by: &str,
    (with_power, within_ms): (bool, Option<u64>),
    chance: &mut Chance,
) -> Result<()> {
    site.set_pace(true)?;
    let mut served = site.serve()?;
    let load = Load {
        outstanding: 16,
        write_percent: 70,
        flush_permille: 20,
        order: Order::Random,
        per_second: None,
        seed: chance.below(1 << 32),
    };
    let running = Running::begin(load, site.log.clone(), &site.place)?;
    let until = Instant::now() + LONG;
    while running.count() < 50 {
        ensure!(!running.has_ended(), "{:?}", running.end());
        ensure!(Instant::now() < until, "nothing is answered");
        std::thread::yield_now();
    }
    writeln!(served.input, "{by} {}", site.next().display())?;
    if let Some(within_ms) = within_ms {
        std::thread::sleep(Duration::from_millis(chance.below(within_ms)));
    } else {
        let ends = |line: String| {
            ["\"equal\"", "\"failed\""]
                .iter()
                .any(|what| line.contains(what))
        };
        while !ends(served.lines.recv_timeout(LONG)?) {}
        // By dirty tracking the last blocks come after that, which are all of the disk beside such a load.
        let end_ms = if by == MIRROR { END_MS } else { MOVE_MS };
        std::thread::sleep(Duration::from_millis(chance.below(end_ms)));
    }
    site.die(served, with_power, chance)?;
    site.log = running.cut()?;
    if !with_power {
        // Storage has lost nothing.
        let covered = site.log.covered();
        site.log.flush(&covered);
    }
    Ok(())
}

#[test]
fn a_power_cut_in_the_move_of_a_busy_disk_loses_no_flushed_write() -> Result<()> {
    die_often(MIRROR, true, 12)
}

#[test]
fn a_kill_in_the_move_of_a_busy_disk_loses_no_flushed_write() -> Result<()> {
    die_often(MIRROR, false, 12)
}

#[test]
fn a_power_cut_in_a_move_by_dirty_tracking_loses_no_flushed_write() -> Result<()> {
    die_often(TRACKING, true, 12)
}

#[test]
fn a_kill_in_a_move_by_dirty_tracking_loses_no_flushed_write() -> Result<()> {
    die_often(TRACKING, false, 12)
}
