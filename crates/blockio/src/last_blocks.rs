//! How a second image becomes equal to a disk whose writes are tracked: when its guest may be held for the last blocks, for how long, and when it
//! is of no use to go on.
//!
//! Owns what it has seen. The caller says what time it is, and waits between looks. Refuses: to hold a guest for longer than its limit, in all
//! attempts together, as far as can be told beforehand.

use std::time::{Duration, Instant};

use godwit_tracking::{DOWNTIME_MAX_S, Decision, LAST_COPY_MAX_S};

use crate::{NO_NEARER, Nearer, SecondImage};

/// A disk on its way to its second image by dirty block tracking.
#[derive(Debug)]
pub struct LastBlocks<'a> {
    second: &'a SecondImage,
    nearer: Nearer,
    closed_at: Option<Instant>,
}

/// How far a disk is that is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// Both images are the same.
    Equal,
    NotYet,
    /// It took too long, and the guest works on.
    Opened,
}

impl<'a> LastBlocks<'a> {
    pub fn of(second: &'a SecondImage) -> Self {
        Self {
            second,
            nearer: Nearer::default(),
            closed_at: None,
        }
    }

    fn must_not_have_failed(&self) -> Result<(), String> {
        self.second.course().failure().map_or(Ok(()), Err)
    }

    /// Whether so few are left that the guest may be held for them; or why it is to be given up.
    pub fn are_few(&mut self, now: Instant) -> Result<bool, String> {
        self.must_not_have_failed()?;
        let course = self.second.course();
        if let Some(Decision::Abort(why)) = course.decision() {
            return Err(why.to_string());
        }
        let is_nearer = self.nearer.observe(now, u64::MAX - course.copied_bytes());
        if !is_nearer && course.left_bytes() > 0 {
            let silent = NO_NEARER.as_secs();
            return Err(format!(
                "nothing could be copied for {silent} s: see whether the new image's storage answers"
            ));
        }
        let may_finish = course.decision() == Some(Decision::Finish);
        Ok(may_finish && course.would_wait_s() <= LAST_COPY_MAX_S)
    }

    /// Holds the guest's requests from now on.
    pub fn close(&mut self, now: Instant) -> Result<(), String> {
        let course = self.second.course();
        let held_s = course.closed_for().as_secs_f64();
        if held_s + course.would_wait_s() > DOWNTIME_MAX_S {
            return Err(format!(
                "its guest has waited for {held_s:.1} s in vain, and may for {DOWNTIME_MAX_S} s: the mirror, which is the default method, moves such a disk"
            ));
        }
        course.close();
        self.closed_at = Some(now);
        Ok(())
    }

    /// Whether nothing is left of a disk that is closed.
    pub fn look_closed(&self, now: Instant) -> Result<Closed, String> {
        self.must_not_have_failed()?;
        let course = self.second.course();
        // In this order: what could not be cloned is told of as lost before it counts as done.
        if self.second.under_way_bytes() == 0 && course.is_synchronised() {
            return Ok(Closed::Equal);
        }
        let limit = Duration::from_secs_f64(LAST_COPY_MAX_S);
        let since = self.closed_at.unwrap_or(now);
        if now.saturating_duration_since(since) < limit {
            return Ok(Closed::NotYet);
        }
        course.open();
        Ok(Closed::Opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filters::{Course, DirtyTracking};
    use crate::{Access, Image};
    use godwit_tracking::Options;

    #[test]
    fn a_guest_is_held_until_the_limit_and_no_longer() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let image = Image::open(file.path(), Access::ReadWrite, 512).unwrap();
        let second = SecondImage::of(&image, None, &Course::default()).unwrap();
        let (course, began) = (second.course(), Instant::now());
        let mut last = LastBlocks::of(&second);
        assert_eq!(last.are_few(began), Ok(false), "nothing is known");
        // Nobody copies.
        last.close(began).unwrap();
        let limit = Duration::from_secs_f64(LAST_COPY_MAX_S);
        let soon = began + limit - Duration::from_millis(1);
        assert_eq!(last.look_closed(soon), Ok(Closed::NotYet));
        assert_eq!(last.look_closed(began + limit), Ok(Closed::Opened));
        assert_eq!(course.decision(), None, "it is decided anew");
        let silent = last.are_few(began + 2 * NO_NEARER);
        assert_eq!(silent, Ok(false), "nothing is left");
        let outlet = second.outlet().unwrap();
        let tracking = DirtyTracking::new(1 << 20, outlet, course, Options::default());
        let silent = last.are_few(began + 2 * NO_NEARER).unwrap_err();
        assert!(silent.contains("nothing could be copied"), "{silent}");
        drop(tracking);
        assert!(last.look_closed(began).is_err());
    }
}
