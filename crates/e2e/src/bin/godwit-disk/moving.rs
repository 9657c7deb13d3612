//! Moves a served disk to a second image on the same host.
//!
//! Owns the second image until the disk has it. Refuses a place that is taken. Pauses and limits are those of `vmproc`.

use anyhow::{Context as _, Result, ensure};
use godwit_blockio::filters::{Course, DirtyTracking, Mirroring};
use godwit_blockio::{
    Access, Approach, Bound, Filter, Image, NOT_KEPT_UP, SecondImage, switch_over,
};
use godwit_tracking::Options;
use godwit_vhost::Disk;
use serde_json::json;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::{BLOCK_BYTES, LOCK_WAIT, say};

const LOOK_EVERY: Duration = Duration::from_millis(20);
const REST_WAIT: Duration = Duration::from_secs(3);
const STAND_WAIT: Duration = Duration::from_millis(500);

/// How it is copied.
#[derive(Debug, Clone, Copy)]
pub enum By {
    Mirror,
    DirtyTracking(Options),
}

pub struct Mirror<'a> {
    disk: &'a Disk,
    by: By,
    pub second: SecondImage,
    bytes: u64,
}

/// Whatever becomes of the move, nobody waits for the second image any longer.
impl Drop for Mirror<'_> {
    fn drop(&mut self) {
        self.second.course().give_up();
    }
}

/// Moves it, and says on the way how far it is.
pub fn move_disk((disk, by): (&Disk, By), from: &Path, to: &Path, record: &Path) -> Result<()> {
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
    let second = SecondImage::of(&image, None, &course)?;
    let outlet = second.outlet()?;
    let filter: Box<dyn Filter> = match by {
        By::Mirror => Box::new(Mirroring::new(bytes, outlet, &course)),
        By::DirtyTracking(options) => Box::new(DirtyTracking::new(bytes, outlet, &course, options)),
    };
    disk.put_lowest(filter, REST_WAIT)?;
    course.begin(None);
    let mirror = Mirror {
        disk,
        by,
        second,
        bytes,
    };
    let mut told = 0;
    let is_worth = match by {
        By::Mirror => mirror.wait_until_equal(),
        By::DirtyTracking(_) => mirror.wait_until_few_are_left(&mut told),
    };
    if let (Err(error), By::DirtyTracking(_)) = (&is_worth, by) {
        // It need not come to an end, and its guest works on.
        let why = format!("{error:#}");
        drop(mirror);
        disk.take_lowest(REST_WAIT)?;
        std::fs::remove_file(&beside)?;
        say(&json!({"event": "gave-up", "why": why}));
        return Ok(());
    }
    is_worth?;
    std::fs::rename(&beside, to)?;
    sync_directory_of(to)?;
    mirror.second.sync()?;
    say(&json!({"event": "equal"}));
    let mut image = Some(image);
    let switched = switch_over(
        &mirror.second,
        || match mirror.by {
            By::Mirror => mirror.wait_until_equal(),
            By::DirtyTracking(_) => mirror.wait_until_closed(&mut told),
        },
        |bound| {
            // A disk that is closed waits already.
            if matches!(by, By::Mirror) {
                say(&json!({"event": "switching"}));
            }
            mirror.switch(bound, &mut image, (to, record))
        },
    );
    let course = mirror.second.course();
    let took = switched?.context(NOT_KEPT_UP)?.max(course.closed_for());
    let switch_ms = took.as_secs_f64() * 1e3;
    mirror.tell_iterations(&mut told);
    say(&json!({"event": "moved", "switch_ms": switch_ms}));
    Ok(())
}

pub fn make_second(path: &Path, bytes: u64) -> Result<Image> {
    let file = File::create_new(path);
    let file = file.with_context(|| format!("cannot make {}", path.display()))?;
    file.set_len(bytes)?;
    file.sync_all()?;
    sync_directory_of(path)?;
    let mut image = Image::open(path, Access::ReadWrite, BLOCK_BYTES)?;
    image.lock("disk", LOCK_WAIT)?;
    Ok(image)
}

pub fn sync_directory_of(path: &Path) -> Result<()> {
    if let Some(parent) = path.parent() {
        File::open(parent)?.sync_all()?;
    }
    Ok(())
}

impl Mirror<'_> {
    fn wait_until_equal(&self) -> Result<()> {
        let mut approach = Approach::of(&self.second, self.bytes);
        loop {
            // The estimate is rounded up to whole seconds for a person.
            let progress = approach.look(Instant::now());
            let progress = progress.map_err(anyhow::Error::msg)?;
            say(
                &json!({"event": "progress", "total": self.bytes, "left": progress.left, "eta_s": progress.eta_s}),
            );
            if progress.is_close {
                return Ok(());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Goes on with the second image if both are equal now; else nothing has changed.
    fn switch(
        &self,
        mut bound: Bound<'_>,
        image: &mut Option<Image>,
        (to, record): (&Path, &Path),
    ) -> Result<Option<Duration>> {
        if bound.sync_within(STAND_WAIT, || ())?.is_none() || !bound.is_equal() {
            return Ok(None);
        }
        bound.stay();
        godwit_store::save_json(record, &json!({"disk": to}))?;
        bound.come_close();
        let began = Instant::now();
        let standing = self.disk.stand_still(STAND_WAIT)?;
        ensure!(bound.is_equal(), "the second image has not kept up");
        let image = image.take().context("its second image is gone")?;
        standing.switch(image)?;
        drop(standing);
        Ok(Some(began.elapsed()))
    }
}
