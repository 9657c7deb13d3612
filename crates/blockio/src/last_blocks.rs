//! How a second image becomes equal to a disk whose writes are tracked: when its guest may be held for the last blocks, for how long, and when it
//! is of no use to go on.
//!
//! Owns what it has seen. The caller says what time it is, and waits between looks. Refuses: to hold a guest for longer than its limit, in all
//! attempts together, as far as can be told beforehand.

use std::time::{Duration, Instant};

use godwit_tracking::{DOWNTIME_MAX_S, Decision, LAST_COPY_MAX_S, last_copy_limit_s};

use crate::{NO_NEARER, Nearer, SecondImage};

/// A disk on its way to its second image by dirty block tracking.
#[derive(Debug)]
pub struct LastBlocks<'a> {
    second: &'a SecondImage,
    nearer: Nearer,
    closed_at: Option<Instant>,
    /// For so long it may be closed from then on.
    limit: Duration,
}

/// How far a disk is that is closed, or all of a VM that goes to another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// Both images are the same.
    Equal,
    NotYet,
    /// It took too long, and the guest works on.
    Opened,
}

impl Closed {
    /// Of disks whose guest has been held for so long, and may be for `limit`.
    pub fn after(held: Duration, limit: Duration, are_equal: bool) -> Self {
        match are_equal {
            true => Self::Equal,
            false if held < limit => Self::NotYet,
            false => Self::Opened,
        }
    }
}

impl<'a> LastBlocks<'a> {
    pub fn of(second: &'a SecondImage) -> Self {
        Self {
            second,
            nearer: Nearer::default(),
            closed_at: None,
            limit: Duration::ZERO,
        }
    }

    fn must_not_have_failed(&self) -> Result<(), String> {
        self.second.course().failure().map_or(Ok(()), Err)
    }

    fn must_be_of_use(&self) -> Result<(), String> {
        self.must_not_have_failed()?;
        match self.second.course().decision() {
            Some(Decision::Abort(why)) => Err(why.to_string()),
            _ => Ok(()),
        }
    }

    /// Whether so few are left that the guest may be held for them; or why it is to be given up.
    pub fn are_few(&mut self, now: Instant) -> Result<bool, String> {
        self.must_be_of_use()?;
        let course = self.second.course();
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

    /// Holds the guest's requests from now on. Returns whether it does: not where they are few no more, and the guest has not waited yet;
    /// or why it is to be given up.
    pub fn close(&mut self, now: Instant) -> Result<bool, String> {
        self.must_be_of_use()?;
        let course = self.second.course();
        let held = course.closed_for();
        let held_s = held.as_secs_f64();
        if held_s + course.would_wait_s() > DOWNTIME_MAX_S {
            if held.is_zero() {
                return Ok(false);
            }
            return Err(format!(
                "its guest has waited for {held_s:.1} s in vain, and may for {DOWNTIME_MAX_S} s: the mirror, which is the default method, moves such a disk"
            ));
        }
        course.close();
        self.closed_at = Some(now);
        self.limit = Duration::from_secs_f64(last_copy_limit_s(held_s));
        Ok(true)
    }

    /// Whether nothing is left of a disk that is closed.
    pub fn look_closed(&self, now: Instant) -> Result<Closed, String> {
        self.must_not_have_failed()?;
        let course = self.second.course();
        // In this order: what could not be cloned is told of as lost before it counts as done.
        let are_equal = self.second.under_way_bytes() == 0 && course.is_synchronised();
        let held = now.saturating_duration_since(self.closed_at.unwrap_or(now));
        let closed = Closed::after(held, self.limit, are_equal);
        if closed == Closed::Opened {
            course.open();
        }
        Ok(closed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filters::{Course, DirtyTracking};
    use crate::{Access, Image};
    use godwit_tracking::{Options, Why};

    #[test]
    fn disks_that_are_equal_at_last_count_as_equal_however_late() {
        let limit = Duration::from_secs(1);
        let soon = limit - Duration::from_millis(1);
        assert_eq!(Closed::after(soon, limit, false), Closed::NotYet);
        assert_eq!(Closed::after(limit, limit, false), Closed::Opened);
        assert_eq!(Closed::after(limit, limit, true), Closed::Equal);
    }

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
        assert_eq!(last.close(began), Ok(true));
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

    #[test]
    fn a_guest_that_has_waited_waits_for_as_much_less_in_the_next_attempt() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let image = Image::open(file.path(), Access::ReadWrite, 512).unwrap();
        let second = SecondImage::of(&image, None, &Course::default()).unwrap();
        let before = Duration::from_millis(2200);
        second.course().has_been_closed_for(before);
        let (mut last, now) = (LastBlocks::of(&second), Instant::now());
        assert_eq!(last.close(now), Ok(true));
        let (soon, late) = (Duration::from_secs(2), Duration::from_millis(2800));
        assert_eq!(last.look_closed(now + soon), Ok(Closed::NotYet));
        assert_eq!(last.look_closed(now + late), Ok(Closed::Opened));
    }

    #[test]
    fn a_burst_just_before_the_disk_is_closed_gives_nothing_up_before_its_guest_has_waited() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let image = Image::open(file.path(), Access::ReadWrite, 512).unwrap();
        let second = SecondImage::of(&image, None, &Course::default()).unwrap();
        let course = second.course();
        let (mut last, now) = (LastBlocks::of(&second), Instant::now());
        course.expect(Decision::Finish, 60.0);
        assert_eq!(last.close(now), Ok(false), "it is tried again later");
        assert!(course.closed_for().is_zero());
        course.expect(Decision::Abort(Why::NoNearer { wait_s: 60.0 }), 60.0);
        let why = last.close(now).unwrap_err();
        assert!(why.contains("as fast as its blocks are copied"), "{why}");
        // What it has waited for once was in vain.
        course.expect(Decision::Finish, 0.0);
        assert_eq!(last.close(now), Ok(true));
        course.open();
        course.expect(Decision::Finish, 60.0);
        let why = last.close(now).unwrap_err();
        assert!(why.contains("in vain"), "{why}");
    }
}
