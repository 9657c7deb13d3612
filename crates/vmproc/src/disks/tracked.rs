//! A disk that moves on its host by dirty block tracking, the laboratory's method beside the mirror: when its guest is held for the last blocks.
//!
//! What the guest writes is marked and copied again, as often as that is of use (`godwit_tracking`). Then the disk is closed: its guest's
//! requests stay in its ring until all that is marked is copied and the disk goes on with its second image, which is done as with a mirror
//! ([`super::switching`]). Until then the first image alone is the disk, so that whatever goes wrong opens it again and nothing is lost.
//!
//! Part of a move ([`super::in_place`]). Owns nothing. Refuses: to hold a guest for longer than its limit, in all attempts together, as far as
//! that is known beforehand: the record is written while the disk is closed, and storage that takes long for that adds to it.

use super::aside::within;
use super::going_along::{SourceDisks, Way};
use super::in_place::LOOK_EVERY;
use super::served::Served;
use super::switching::{Going, Mirror, Stopped};
use crate::faults::reached;
use godwit_blockio::filters::{Course, DirtyTracking, Mirroring, Outlet};
use godwit_blockio::{Closed, Filter, LastBlocks};
use godwit_tracking::{Iteration, Options};
use godwit_types::disk_move::{DiskIteration, DiskIterations, Method, Optimisation, SentLogs};
use std::time::{Duration, Instant};

/// How often it is looked whether a disk that is closed has nothing left to be copied.
const CLOSED_LOOK_EVERY: Duration = Duration::from_millis(1);

/// What copies a disk of so many bytes.
pub(super) fn filter_for(
    (method, without): (Method, &[Optimisation]),
    bytes: u64,
    outlet: Box<dyn Outlet>,
    course: &Course,
) -> Box<dyn Filter> {
    match method {
        // A disk that moves by redo logs needs nothing of the kind.
        Method::Mirror | Method::Snapshot => Box::new(Mirroring::new(bytes, outlet, course)),
        Method::DirtyTracking => {
            let options = Options {
                incremental: !without.contains(&Optimisation::Incremental),
                hot_blocks: !without.contains(&Optimisation::HotBlocks),
            };
            Box::new(DirtyTracking::new(bytes, outlet, course, options))
        }
    }
}

impl Served {
    /// Waits until so few blocks are marked that the guest may be held for them.
    pub(super) fn wait_until_few_are_left(
        &self,
        going: &Going<'_>,
        mirror: &Mirror,
    ) -> Result<(), Stopped> {
        let mut last = LastBlocks::of(&mirror.second);
        loop {
            self.must_go_on(going, mirror)?;
            let are_few = last.are_few(Instant::now());
            // What the last iteration came to is told also where it is given up for that.
            self.note_progress(going, mirror);
            if are_few? {
                return Ok(());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Holds the guest's requests, and waits until nothing is left to be copied. Where that takes too long the guest works on, and it is
    /// tried again.
    pub(super) fn wait_until_closed(
        &self,
        going: &Going<'_>,
        mirror: &Mirror,
    ) -> Result<(), Stopped> {
        loop {
            self.wait_until_few_are_left(going, mirror)?;
            self.sync_before_closing(going, mirror)?;
            let mut last = LastBlocks::of(&mirror.second);
            if !last.close(Instant::now())? {
                continue;
            }
            reached("disk-move.closing");
            let closed = loop {
                self.must_go_on(going, mirror)?;
                match last.look_closed(Instant::now())? {
                    Closed::NotYet => std::thread::sleep(CLOSED_LOOK_EVERY),
                    closed => break closed,
                }
            };
            if closed == Closed::Equal {
                reached("disk-move.closed");
                return Ok(());
            }
            let disk = &going.spec.name;
            tracing::warn!(
                disk,
                "its last blocks were not copied in time: its guest works on, and it is tried again"
            );
        }
    }

    /// What was copied until now is not to be made durable while the guest waits. Whoever calls the move off is heard meanwhile.
    fn sync_before_closing(&self, going: &Going<'_>, mirror: &Mirror) -> Result<(), Stopped> {
        let second = mirror.second.clone();
        let may_go_on = || self.must_go_on(going, mirror);
        match within(("disk-sync", None), may_go_on, move || second.sync())? {
            Some(synced) => Ok(synced?),
            None => Err("its new image could not be made durable".into()),
        }
    }

    fn note_progress(&self, going: &Going<'_>, mirror: &Mirror) {
        let course = mirror.second.course();
        let left = course.left_bytes() + mirror.second.under_way_bytes();
        let (seconds, copied) = (mirror.began.elapsed().as_secs_f64(), course.copied_bytes());
        let eta_s = (copied > 0).then(|| left as f64 * seconds / copied as f64);
        self.note_left(going, mirror, left.min(mirror.total), eta_s);
        self.note_iterations(going, mirror);
    }

    /// What has come of them so far; nothing of a disk that is mirrored.
    pub(super) fn note_iterations(&self, going: &Going<'_>, mirror: &Mirror) {
        let iterations = mirror.second.course().iterations();
        let iterations = iterations.into_iter().map(told).collect();
        self.note(&going.place.disk, |disk| disk.iterations = iterations);
    }
}

impl SourceDisks {
    /// What has come of the iterations of each so far, and what redo logs took, where they go by these; nothing of disks that are mirrored.
    pub(crate) fn came_to(&self) -> (Vec<DiskIterations>, Option<SentLogs>) {
        let of = |(disk, course): (&str, &Course)| DiskIterations {
            disk: disk.to_owned(),
            iterations: course.iterations().into_iter().map(told).collect(),
        };
        match &self.way {
            Way::Mirrored => (Vec::new(), None),
            Way::Tracked => (self.courses().map(of).collect(), None),
            Way::ByLogs(logs) => {
                let (iterations, sent) = logs.came_to();
                (iterations, Some(sent))
            }
        }
    }
}

fn told(ended: Iteration) -> DiskIteration {
    DiskIteration {
        number: ended.number,
        copied_bytes: ended.copied,
        seconds: ended.seconds,
        dirty_bytes: ended.dirty,
        hot_bytes: ended.hot,
        deferred_bytes: ended.deferred,
    }
}
