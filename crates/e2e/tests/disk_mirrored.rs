//! A disk that is busy while it is mirrored: the other image is the same after each switch, also if the power fails there.

mod disk_load;

use anyhow::{Context as _, Result, ensure};
use disk_load::{AT, BLOCK, BLOCKS, LONG, Load, Site, machine};
use godwit_blockio::filters::{Change, Course, Mirroring, Origin, Outlet};
use godwit_blockio::{Access, Arriving, Image};
use godwit_testkit::testvol::{Survives, Volume};
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

const SWITCHES: u64 = 20;
const CHANNELS: usize = 4;
/// Changes that may be under way.
const MOST: usize = 8;

type Given = (u64, Range<u64>, Change);

/// Four channels to an image, on which the later number wins.
#[derive(Clone)]
struct Link(Arc<Shared>);

struct Shared {
    to: Arriving,
    channels: Mutex<Vec<Sender<Given>>>,
    numbers: AtomicUsize,
    under_way: AtomicUsize,
    is_cut: AtomicBool,
    course: Course,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    fn to(to: Arriving, course: &Course) -> Self {
        let link = Self(Arc::new(Shared {
            to,
            channels: Mutex::default(),
            numbers: AtomicUsize::new(0),
            under_way: AtomicUsize::new(0),
            is_cut: AtomicBool::new(false),
            course: course.clone(),
        }));
        let channels = (0..CHANNELS).map(|_| {
            let (sender, given) = channel();
            let link = link.clone();
            std::thread::spawn(move || link.carry(&given));
            sender
        });
        let channels = channels.collect();
        *lock(&link.0.channels) = channels;
        link
    }

    /// Until nobody gives any more. What comes while the link is cut is lost.
    fn carry(&self, given: &Receiver<Given>) {
        for (number, range, change) in given {
            let len = (range.end - range.start) as usize;
            let content = match &change {
                Change::Written(buffer, at) => buffer.bytes().get(*at..*at + len),
                Change::Zeroed => None,
            };
            match self.0.is_cut.load(Ordering::SeqCst) {
                true => self.0.course.lose(range),
                false => self.0.to.apply(number, 0, &range, content).unwrap(),
            }
            self.0.under_way.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn is_idle(&self) -> bool {
        self.0.under_way.load(Ordering::SeqCst) == 0
    }

    fn close(&self) {
        lock(&self.0.channels).clear();
    }
}

impl Outlet for Link {
    fn is_silent(&mut self) -> bool {
        self.0.is_cut.load(Ordering::SeqCst)
    }

    fn takes(&mut self, origin: Origin) -> bool {
        let most = if origin == Origin::Copy {
            MOST / 2
        } else {
            MOST
        };
        !self.is_silent() && self.0.under_way.load(Ordering::SeqCst) < most
    }

    fn give(&mut self, _origin: Origin, range: Range<u64>, change: Change) {
        let number = self.0.numbers.fetch_add(1, Ordering::SeqCst);
        self.0.under_way.fetch_add(1, Ordering::SeqCst);
        let channels = lock(&self.0.channels);
        let given = (number as u64 + 1, range, change);
        if let Some(channel) = channels.get(number % CHANNELS) {
            channel.send(given).unwrap();
        }
    }
}

/// An image at the destination that holds nothing, durably.
fn empty(path: &Path) -> Result<Arriving> {
    let _ = std::fs::remove_file(path);
    let file = File::create(path)?;
    file.set_len((BLOCKS * BLOCK) as u64)?;
    file.sync_all()?;
    File::open(path.parent().context("a directory")?)?.sync_all()?;
    let mut image = Image::open(path, Access::ReadWrite, 512)?;
    image.lock("there", LONG)?;
    Ok(Arriving::of(&image)?)
}

#[test]
fn a_busy_disk_is_the_same_elsewhere_after_each_switch_and_power_cut() -> Result<()> {
    let Some(machine) = machine("diskmirror")? else {
        return Ok(());
    };
    let volume: &Volume = machine.volume(AT).context("mounted above")?;
    let there = machine.path_from_outside(AT).join("there.raw");
    let mut load = Load::over(Site::new((BLOCKS * BLOCK) as u64));
    let disk = load.site.disk(Vec::new());
    load.boot();
    let mut tries = 0;
    for switch in 0..SWITCHES {
        let course = Course::default();
        let link = Link::to(empty(&there)?, &course);
        let bytes = (BLOCKS * BLOCK) as u64;
        let filter = Mirroring::new(bytes, Box::new(link.clone()), &course);
        load.ask();
        disk.put_lowest(Box::new(filter), LONG)?;
        course.begin(std::iter::empty());
        let until = Instant::now() + LONG;
        loop {
            ensure!(Instant::now() < until, "it is never the same");
            for _ in 0..load.chance.below(200) {
                load.ask();
                load.look()?;
            }
            // The link is away for a moment, with what was on it.
            let is_cut = load.chance.below(3) == 0;
            link.0.is_cut.store(is_cut, Ordering::SeqCst);
            while is_cut && !link.is_idle() {
                std::thread::yield_now();
            }
            if is_cut || !course.is_synchronised() {
                continue;
            }
            tries += 1;
            load.ask();
            disk.hold(LONG)?;
            if course.is_synchronised() {
                break;
            }
            disk.release()?;
        }
        while !link.is_idle() {
            std::thread::yield_now();
        }
        link.0.to.sync()?;
        volume.power_off(match switch % 3 {
            0 => Survives::Nothing,
            _ => Survives::Some(switch),
        });
        volume.power_on();
        let (here, found) = (load.site.content(), std::fs::read(&there)?);
        let differs = here.chunks(BLOCK).zip(found.chunks(BLOCK));
        let differs = differs.enumerate().find(|(_, (here, there))| here != there);
        let block = differs.map(|(block, _)| block);
        ensure!(
            here.len() == found.len() && block.is_none(),
            "after switch {switch} block {block:?} differs"
        );
        course.give_up();
        link.close();
        disk.release()?;
    }
    println!(
        "  {} writes, {} flushes, {SWITCHES} switches of {tries} tries",
        load.number, load.flushes
    );
    Ok(())
}
