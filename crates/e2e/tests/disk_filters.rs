//! What filters that do nothing cost: the CPU of a disk's threads per request, on an image in RAM, with and without them.
//!
//! Both disks of a pair are worked with at the same time, since a machine that others use, too, is never twice the same. That
//! both do what they are asked is the test, not the figure: `GODWIT_FILTER_PAIRS=7` takes so many pairs, of five seconds each, for
//! `docs/performance.md`.

use anyhow::{Context as _, Result, ensure};
use godwit_blockio::filters::{Limits, Statistics, Throttle};
use godwit_blockio::{Access, Filter, Image};
use godwit_guestmem::RamFile;
use godwit_testkit::disk_load::log::Log;
use godwit_testkit::disk_load::{Load, MEMORY_BYTES, Order, Place, Running};
use godwit_vhost::block::Geometry;
use godwit_vhost::{Disk, Settings};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const DISK: u64 = 64 << 20;
const IO: usize = 4096;
const OUTSTANDING: usize = 32;

/// Those of the product that stand between a guest and its image and have nothing to do.
fn idle() -> Vec<Box<dyn Filter>> {
    vec![
        Box::new(Statistics::default()),
        Box::new(Throttle::new(Limits::default())),
    ]
}

/// A disk with a load on it.
struct Served {
    running: Running,
    thread: String,
    _disk: Disk,
}

/// The threads of this process that serve a disk, by their numbers.
fn disk_threads() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for task in std::fs::read_dir("/proc/self/task")? {
        let task = task?;
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if name.trim_end() == "disk" {
            found.insert(task.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(found)
}

impl Served {
    fn begin(directory: &Path, name: &str, filters: Vec<Box<dyn Filter>>) -> Result<Self> {
        let at = |what: &str| directory.join(format!("{name}.{what}"));
        let path = at("raw");
        let file = File::create(&path)?;
        file.set_len(DISK)?;
        let log = Log::new(DISK, IO);
        log.fill(&file)?;
        let place = Place {
            socket: at("socket"),
            memory: at("memory"),
        };
        place.make_memory()?;
        let mut image = Image::open(&path, Access::ReadWrite, 512)?;
        image.lock("disk", Duration::from_secs(10))?;
        let geometry = Geometry {
            bytes: image.bytes(),
            block: 512,
            queues: 1,
            read_only: false,
            erases: true,
            serial: String::new(),
        };
        let before = disk_threads()?;
        let disk = Disk::start(Settings {
            name: "disk".to_owned(),
            socket: place.socket.clone(),
            owner: None,
            image,
            geometry,
            filters,
            ram: Arc::new(RamFile::open(&place.memory, MEMORY_BYTES)?),
            has_image: true,
            waits_for_room: true,
            handed: None,
        })?;
        let thread = disk_threads()?.difference(&before).next().cloned();
        let load = Load {
            flush_permille: 0,
            outstanding: OUTSTANDING,
            write_percent: 30,
            order: Order::Random,
            seed: 12,
        };
        Ok(Self {
            running: Running::begin(load, log, &place)?,
            thread: thread.context("no thread serves the disk")?,
            _disk: disk,
        })
    }

    /// Processor time of its thread and of the kernel's workers for it, in microseconds, and its requests.
    fn now(&self) -> Result<(f64, u64)> {
        let (mut nanoseconds, worker) = (0, format!("iou-wrk-{}", self.thread));
        for task in std::fs::read_dir("/proc/self/task")? {
            let task = task?;
            let told = |file: &str| std::fs::read_to_string(task.path().join(file));
            let is_its_own = task.file_name().to_string_lossy() == self.thread.as_str();
            let name = told("comm").unwrap_or_default();
            if is_its_own || name.trim_end() == worker {
                let told = told("schedstat").unwrap_or_default();
                let ran = told.split(' ').next().unwrap_or_default();
                nanoseconds += ran.parse::<u64>().unwrap_or_default();
            }
        }
        Ok((nanoseconds as f64 / 1e3, self.running.count()))
    }

    fn end(self) -> Result<()> {
        let ended = self.running.end()?;
        ensure!(
            ended.failed == 0 && ended.wrong_reads == 0,
            "the load found an error"
        );
        Ok(())
    }
}

/// What a request costs, in microseconds: without filters, and with idle ones.
fn pair(directory: &Path, lasts: Duration) -> Result<[f64; 2]> {
    let disks = [
        Served::begin(directory, "without", Vec::new())?,
        Served::begin(directory, "with", idle())?,
    ];
    let now = || -> Result<Vec<_>> { disks.iter().map(Served::now).collect() };
    let before = now()?;
    std::thread::sleep(lasts);
    let after = now()?;
    let mut costs = [0.0; 2];
    for ((cost, before), after) in costs.iter_mut().zip(before).zip(after) {
        ensure!(after.1 > before.1, "nothing was asked");
        *cost = (after.0 - before.0) / (after.1 - before.1) as f64;
    }
    disks.into_iter().try_for_each(Served::end)?;
    Ok(costs)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

#[test]
fn disks_with_and_without_idle_filters_do_what_they_are_asked_and_the_cost_is_told() -> Result<()> {
    let told = std::env::var("GODWIT_FILTER_PAIRS").ok();
    let told = told.map(|told| told.parse::<usize>()).transpose()?;
    let lasts = Duration::from_millis(if told.is_some() { 5000 } else { 300 });
    let directory = tempfile::tempdir_in("/dev/shm")?;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for number in 1..=told.unwrap_or(1) {
        let [less, more] = pair(directory.path(), lasts)?;
        println!(
            "  pair {number}: {less:.3} us per request without, {more:.3} us with: {:+.2} %",
            (more / less - 1.0) * 100.0
        );
        without.push(less);
        with.push(more);
    }
    let parts = without.iter().zip(&with);
    let parts: Vec<f64> = parts
        .map(|(less, more)| (more / less - 1.0) * 100.0)
        .collect();
    let (least, most) = parts
        .iter()
        .fold((f64::MAX, f64::MIN), |(least, most), part| {
            (least.min(*part), most.max(*part))
        });
    println!(
        "  median {:.3} us without, {:.3} us with; of the pairs {:+.2} %, from {least:+.2} to {most:+.2} %",
        median(without),
        median(with),
        median(parts),
    );
    Ok(())
}
