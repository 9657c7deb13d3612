//! Moves a served disk to a second image on the same host.
//!
//! Owns the second image until the disk has it. Refuses a place that is taken. Pauses and limits are those of `vmproc`.

use anyhow::{Context as _, Result, bail, ensure};
use godwit_blockio::filters::{Course, Mirroring};
use godwit_blockio::{Access, Estimate, Image, SecondImage};
use godwit_vhost::{Disk, Error};
use serde_json::json;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::{BLOCK_BYTES, LOCK_WAIT, say};

const LOOK_EVERY: Duration = Duration::from_millis(20);
const REST_WAIT: Duration = Duration::from_secs(3);
const STAND_WAIT: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(5);
const ATTEMPTS: usize = 20;
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Where no less is left for so long, a move is given up.
const NO_NEARER: Duration = Duration::from_secs(120);

struct Mirror<'a> {
    disk: &'a Disk,
    second: SecondImage,
    course: Course,
    bytes: u64,
}

/// Whatever becomes of the move, nobody waits for the second image any longer.
impl Drop for Mirror<'_> {
    fn drop(&mut self) {
        self.course.give_up();
    }
}

/// Moves it, and says on the way how far it is.
pub fn move_disk(disk: &Disk, from: &Path, to: &Path, record: &Path) -> Result<()> {
    ensure!(
        to.symlink_metadata().is_err(),
        "{} is there already",
        to.display()
    );
    godwit_store::save_json(record, &json!({"disk": from, "copying": to}))?;
    let bytes = disk.measure()?;
    let beside = to.with_extension("moving");
    let image = make_second(&beside, bytes)?;
    let course = Course::default();
    let second = SecondImage::of(&image, &course)?;
    let filter = Mirroring::new(bytes, second.outlet()?, &course);
    disk.put_lowest(Box::new(filter), REST_WAIT)?;
    course.begin(None);
    let mirror = Mirror {
        disk,
        second,
        course,
        bytes,
    };
    mirror.wait_until_equal()?;
    std::fs::rename(&beside, to)?;
    sync_directory_of(to)?;
    mirror.second.sync()?;
    say(&json!({"event": "equal"}));
    let (mut image, mut pause) = (Some(image), LOOK_EVERY);
    for attempt in 1..=ATTEMPTS {
        mirror.wait_until_equal()?;
        say(&json!({"event": "switching"}));
        if let Some(took) = mirror.switch(&mut image, to, record)? {
            let switch_ms = took.as_secs_f64() * 1e3;
            say(&json!({"event": "moved", "switch_ms": switch_ms, "attempts": attempt}));
            return Ok(());
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(PAUSE_MAX);
    }
    bail!("the new image does not keep up with what is written");
}

fn make_second(path: &Path, bytes: u64) -> Result<Image> {
    let file = File::create_new(path);
    let file = file.with_context(|| format!("cannot make {}", path.display()))?;
    file.set_len(bytes)?;
    file.sync_all()?;
    sync_directory_of(path)?;
    let mut image = Image::open(path, Access::ReadWrite, BLOCK_BYTES)?;
    image.lock("disk", LOCK_WAIT)?;
    Ok(image)
}

fn sync_directory_of(path: &Path) -> Result<()> {
    if let Some(parent) = path.parent() {
        File::open(parent)?.sync_all()?;
    }
    Ok(())
}

impl Mirror<'_> {
    fn wait_until_equal(&self) -> Result<()> {
        let mut equal_since = None;
        let (mut least, mut nearer) = (u64::MAX, Instant::now());
        let mut estimate = Estimate::default();
        loop {
            if let Some(why) = self.course.failure() {
                bail!(why);
            }
            let left = self.course.left_bytes() + self.second.under_way_bytes();
            let left = left.min(self.bytes);
            if left < least {
                (least, nearer) = (left, Instant::now());
            }
            ensure!(
                nearer.elapsed() <= NO_NEARER,
                "the new image does not keep up with what is written"
            );
            // What a person is shown, which is rounded up to whole seconds there.
            let eta_s = estimate.seconds(Instant::now(), left);
            say(&json!({"event": "progress", "total": self.bytes, "left": left, "eta_s": eta_s}));
            if self.course.is_synchronised() {
                let since = *equal_since.get_or_insert_with(Instant::now);
                if self.second.is_close() || since.elapsed() >= PATIENCE {
                    return Ok(());
                }
            } else {
                equal_since = None;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Goes on with the second image if both are equal now; else nothing has changed.
    fn switch(
        &self,
        image: &mut Option<Image>,
        to: &Path,
        record: &Path,
    ) -> Result<Option<Duration>> {
        let began = Instant::now();
        let standing = match self.disk.stand_still(STAND_WAIT) {
            Err(Error::Busy { .. }) => return Ok(None),
            standing => standing?,
        };
        let is_equal = self.second.is_equal(began + STAND_WAIT);
        if !is_equal || self.second.sync_within(STAND_WAIT, || ())?.is_none() {
            return Ok(None);
        }
        ensure!(
            self.course.is_synchronised(),
            "{} is not to be the disk any more",
            to.display()
        );
        let image = image.take().context("its second image is gone")?;
        godwit_store::save_json(record, &json!({"disk": to}))?;
        standing.switch(image)?;
        drop(standing);
        Ok(Some(began.elapsed()))
    }
}
