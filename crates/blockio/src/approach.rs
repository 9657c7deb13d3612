//! How two images of a disk become equal: how much is left, for how long, and when it is of no use to wait.
//!
//! Owns nothing but what it has seen. Pure but for the state of a second image, which it looks at: the caller says what time it is. Refuses to
//! wait for a copy that gets no nearer.

use std::time::{Duration, Instant};

use crate::estimate::{Estimate, Seen};
use crate::filters::Bottleneck;
use crate::{Bound, SecondImage};

/// Images that get no nearer to being equal for so long are given up.
pub const NO_NEARER: Duration = Duration::from_secs(120);
/// A guest that writes all the while has as much under way as the second image takes: after so long it is tried all the same.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where no less is left for so long.
pub const NOT_KEPT_UP: &str =
    "the new image does not keep up with what the guest writes: try again when it writes less";

/// So long it is waited each time until both are equal and nothing that is copied is under way.
const BIND_WAIT: Duration = Duration::from_millis(500);
/// How often it is tried in vain before a move is given up.
const ATTEMPTS: u32 = 20;
/// Pause between the first two attempts; each is twice as long as the one before,
const PAUSE: Duration = Duration::from_millis(20);
/// and none is longer.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Goes on with a second image: `until_close` waits until little is under way, `switch` changes the disk's image while the second one is bound.
/// Returns what that gave; nothing where that did not come.
pub fn switch_over<T, E>(
    second: &SecondImage,
    mut until_close: impl FnMut() -> Result<(), E>,
    mut switch: impl FnMut(Bound<'_>) -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    let mut pause = PAUSE;
    for _ in 0..ATTEMPTS {
        until_close()?;
        if let Some(bound) = Bound::within(second, BIND_WAIT)
            && let Some(switched) = switch(bound)?
        {
            return Ok(Some(switched));
        }
        // A disk that was closed for it works on meanwhile.
        second.course().open();
        std::thread::sleep(pause);
        pause = (2 * pause).min(PAUSE_MAX);
    }
    Ok(None)
}

/// Whether ever less is left.
#[derive(Debug, Default)]
pub struct Nearer(Option<(u64, Instant)>);

impl Nearer {
    /// So much is left now. Returns whether it is of use to wait.
    pub fn observe(&mut self, now: Instant, left: u64) -> bool {
        match self.0 {
            Some((least, since)) if left >= least => {
                now.saturating_duration_since(since) <= NO_NEARER
            }
            _ => {
                self.0 = Some((left, now));
                true
            }
        }
    }
}

/// How far a copying is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Bytes.
    pub left: u64,
    /// How long the rest will take at the present speed.
    pub eta_s: Option<f64>,
    /// Whether so little is under way, or both have been equal for so long, that it is worth binding the second image.
    pub is_close: bool,
}

/// How a second image becomes equal to a disk of which so many bytes are copied.
#[derive(Debug)]
pub struct Approach<'a> {
    second: &'a SecondImage,
    total: u64,
    nearer: Nearer,
    estimate: Estimate,
    equal_since: Option<Instant>,
}

impl<'a> Approach<'a> {
    pub fn of(second: &'a SecondImage, total: u64) -> Self {
        Self {
            second,
            total,
            nearer: Nearer::default(),
            estimate: Estimate::default(),
            equal_since: None,
        }
    }

    /// How far it is, or why it is to be given up.
    pub fn look(&mut self, now: Instant) -> Result<Progress, String> {
        let (second, course) = (self.second, self.second.course());
        if let Some(why) = course.failure() {
            return Err(why);
        }
        let left = (course.left_bytes() + second.under_way_bytes()).min(self.total);
        if !self.nearer.observe(now, left) {
            return Err(NOT_KEPT_UP.to_owned());
        }
        self.equal_since = course
            .is_synchronised()
            .then(|| self.equal_since.unwrap_or(now));
        let seen = Seen {
            left,
            guest: course.guest_writes(),
            destination_limits: course.wait_times().bottleneck() == Some(Bottleneck::Writes),
        };
        let is_close =
            |since| second.is_close() || now.saturating_duration_since(since) >= PATIENCE;
        Ok(Progress {
            left,
            eta_s: self.estimate.seconds(now, seen),
            is_close: self.equal_since.is_some_and(is_close),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filters::Course;
    use crate::{Access, Image};

    #[test]
    fn a_copy_that_has_failed_is_given_up_and_one_that_is_not_equal_is_not_close() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let image = Image::open(file.path(), Access::ReadWrite, 512).unwrap();
        let course = Course::default();
        let second = SecondImage::of(&image, None, &course).unwrap();
        let mut approach = Approach::of(&second, 1 << 20);
        let began = Instant::now();
        assert!(!approach.look(began).unwrap().is_close);
        assert!(!approach.look(began + 2 * PATIENCE).unwrap().is_close);
        let bound = Bound::within(&second, Duration::from_millis(5));
        assert!(bound.is_none() && !course.is_bound(), "it is not equal");
        course.fail("the storage is gone".to_owned());
        assert_eq!(approach.look(began), Err("the storage is gone".to_owned()));
    }

    #[test]
    fn a_second_image_that_is_never_equal_is_never_bound() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let image = Image::open(file.path(), Access::ReadWrite, 512).unwrap();
        let second = SecondImage::of(&image, None, &Course::default()).unwrap();
        let mut waits = 0;
        let switched: Result<Option<()>, &str> = switch_over(
            &second,
            || {
                waits += 1;
                if waits > 3 {
                    Err("it is called off")
                } else {
                    Ok(())
                }
            },
            |_| panic!("it is bound"),
        );
        assert_eq!((switched, waits), (Err("it is called off"), 4));
    }

    #[test]
    fn what_gets_nearer_is_waited_for_and_what_does_not_for_two_minutes() {
        let (mut nearer, began) = (Nearer::default(), Instant::now());
        let mut at = |s, left| nearer.observe(began + Duration::from_secs(s), left);
        assert!(at(0, 100) && at(100, 100) && at(110, 99));
        // More is left again, and then as much as there was at the least.
        assert!(at(120, 500) && at(220, 99) && at(230, 99));
        assert!(!at(231, 99));
        assert!(at(232, 98));
    }
}
