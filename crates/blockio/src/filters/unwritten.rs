//! Copies what nobody writes to, piece by piece, to where its disk goes: what [`Still`](super::still::Still) and [`Sending`](super::sending::Sending) have in
//! common.
//!
//! A piece is read once the other side has room for it and the cap allows it, and what the other side loses is copied again. Owns nothing. Refuses: a file
//! that cannot be read, and to go on where the course has failed.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::copying::give_copy;
use super::course::{Course, lock};
use super::outlet::Outlet;
use crate::{Buffer, Error};

/// How often it is looked whether there is room again.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A file, or the pieces of one, that nobody writes to, on its way to the other side.
pub(super) trait Unwritten {
    /// Where the copying stands, the file, and what takes the copy.
    fn course_path_outlet(&mut self) -> (&Course, &Path, &mut (dyn Outlet + 'static));

    /// Whether it keeps to the cap.
    fn is_capped(&self) -> bool;

    /// Has what the other side lost copied again.
    fn copy_again(&mut self, lost: Vec<Range<u64>>);

    /// Whether there is something to be given still, which [`Self::give_next`] gives.
    fn has_next(&mut self) -> bool;

    /// Gives a piece of it; nothing where there is none.
    fn give_next(&mut self) -> Result<(), Error>;
}

/// Copies until nothing is left and nothing is under way any more, of which `under_way` tells. `goes_on` is asked again and again. Returns whether it
/// came to its end.
pub(super) fn copy_all<U: Unwritten>(
    copied: &mut U,
    under_way: impl Fn() -> u64,
    mut goes_on: impl FnMut(&U) -> bool,
) -> Result<bool, Error> {
    loop {
        if !goes_on(copied) {
            return Ok(false);
        }
        let (course, path, _) = copied.course_path_outlet();
        if let Some(reason) = course.failure() {
            let path = path.to_owned();
            return Err(Error::Unusable { path, reason });
        }
        let lost = course.take_lost();
        if !lost.is_empty() {
            copied.copy_again(lost);
        }
        if !copied.has_next() {
            // In this order: what does not come is told of as lost before it counts as done.
            if under_way() == 0 && !copied.course_path_outlet().0.has_lost() {
                return Ok(true);
            }
        } else if may_give(copied) {
            copied.give_next()?;
            continue;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Whether one more piece may be read; counts for what it is waited until it is looked again.
fn may_give(copied: &mut impl Unwritten) -> bool {
    let is_capped = copied.is_capped();
    let (course, _, outlet) = copied.course_path_outlet();
    let is_held = is_capped && course.0.pace.region_limit(Instant::now()) == Some(0);
    let takes = !outlet.is_silent() && outlet.region_limit() > 0;
    let mut waited = lock(&course.0.wait_times);
    match (is_held, takes) {
        (true, _) => waited.cap += LOOK_EVERY,
        (false, false) => waited.writes += LOOK_EVERY,
        (false, true) => {}
    }
    !is_held && takes
}

/// Reads this piece, which begins there in the file, and gives it to the other side to have it at `start`. What cannot be read, the course hears of.
pub(super) fn copy_piece(
    (file, path): (&File, &Path),
    (at, piece): (u64, Range<u64>),
    (course, outlet): (&Course, &mut (dyn Outlet + 'static)),
    start: u64,
) -> Result<(), Error> {
    let began = Instant::now();
    let mut buffer = Buffer::zeroed((piece.end - piece.start) as usize);
    if let Err(source) = file.read_exact_at(buffer.bytes_mut(), at) {
        course.fail_to_read(format!("its bytes {piece:?} cannot be read: {source}"));
        return Err(Error::Image {
            action: "read",
            path: path.to_owned(),
            source,
        });
    }
    let now = Instant::now();
    lock(&course.0.wait_times).reads += now.saturating_duration_since(began);
    give_copy((course, outlet), start, &Arc::new(buffer), now);
    Ok(())
}
