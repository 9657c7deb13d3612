//! Snapshots of disks that are served: all of them stand still together for a moment, and go on with new tops.
//!
//! Owns nothing. Refuses: a disk that is served anew meanwhile, a guest that may not run here any more, and to hold a guest while storage does not make durable
//! what it was told. What is written down counts: a disk that
//! cannot go on with it ends, and is served anew.

use super::claim::Taking;
use super::quiescing::Quiesced;
use super::served::Served;
use super::snapshots::{All, Changed, written};
use super::{Disks, LOCK_WAIT, REST_WAIT, STAND_WAIT};
use crate::adoption::lock;
use crate::faults::reached;
use godwit_blockio::delta::{Delta, Words};
use godwit_delta::States;
use godwit_qemu::freezing::Freezer;
use godwit_qemu::user::User;
use godwit_types::snapshots::{Quiesce, Snapshots, TakeSnapshot};
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, SnapshotName};
use godwit_vhost::{Disk, Standing};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What came of freezing tops.
pub(super) struct Frozen {
    /// How long the guest's requests waited.
    pub stood: Duration,
    /// The states of the new tops.
    pub tops: Vec<States<Words>>,
}

impl Disks {
    pub(crate) fn list_snapshots(&self) -> Result<Snapshots, ApiError> {
        let served = &self.0;
        Ok(Snapshots {
            why_unmerged: served.tidies.why(),
            ..served.all().list()?
        })
    }

    /// Takes one while the guest runs, or stands still: for it all disks stand still together for a moment. `freezer` has its file systems do so before.
    pub(crate) fn take_snapshot(
        &self,
        wish: &TakeSnapshot,
        freezer: Option<Arc<Freezer>>,
    ) -> Result<String, ApiError> {
        let served = &self.0;
        let _one = lock(&served.descriptions);
        let all = served.all();
        let forgot = all.forget_halves()?;
        let snapshot = all.snapshot(wish);
        let changed = all.prepare(
            |images, fresh| images.take(snapshot.clone(), fresh),
            |_| None,
        )?;
        reached("snapshot.made");
        let asked = Quiesced::of(wish.quiesce, freezer);
        let asked = asked.map_err(|why| {
            all.unmake(&changed);
            all.not_so(&why)
        })?;
        let stood = served.freeze(&all, &changed)?.stood;
        let quiesced = asked.end();
        if wish.quiesce == Quiesce::Always
            && let Err(why) = &quiesced
        {
            all.forget(&wish.name)?;
            served.tidying_is_due();
            return Err(all.not_so(why));
        }
        let noted = all.note_taken(&wish.name, quiesced.is_ok());
        if noted.is_err() {
            served.tidies.set_settled(false);
        }
        if forgot || noted.is_err() {
            served.tidying_is_due();
        }
        let quiesced = quiesced.and(noted.map_err(|why| {
            format!("that its file systems stood still could not be written down: {why}")
        }));
        Ok(all.taken(wish, Some(stood), quiesced))
    }

    pub(crate) fn delete_snapshot(&self, name: &SnapshotName) -> Result<String, ApiError> {
        let served = &self.0;
        let deleted = {
            let _one = lock(&served.descriptions);
            let all = served.all();
            let said = all.forget(name)?;
            all.forget_halves()?;
            said
        };
        served.tidying_is_due();
        Ok(deleted)
    }
}

impl Served {
    pub(super) fn all(&self) -> All<'_> {
        let what = self.what();
        All {
            config: &self.config,
            paths: &self.paths,
            owner: User {
                uid: what.uid,
                gid: what.gid,
            },
            specs: written(&what.disks),
            images: what
                .with_images()
                .map(|(spec, image)| (spec.name.clone(), image))
                .collect(),
        }
    }

    /// Freezes the tops of these disks at one moment.
    pub(super) fn freeze(&self, all: &All<'_>, changed: &[Changed]) -> Result<Frozen, ApiError> {
        let what = self.what();
        let undone = |error: ApiError| {
            all.unmake(changed);
            error
        };
        let (mut tops, mut alone) = (Vec::new(), Vec::new());
        for (spec, one) in all.specs.iter().zip(changed) {
            let index = what.disks.iter().position(|disk| disk.name == spec.name);
            // One that ends while what is written changes must not be served as it was.
            let is_alone = index.and_then(|index| self.serve_alone(index));
            let is_alone = is_alone.ok_or("it is being served anew just now: try again");
            alone.push(is_alone.map_err(|why| undone(all.refused(spec, why)))?);
            let top = all
                .place(spec)
                .open_top(&one.now, &one.fresh.name, LOCK_WAIT, true);
            let top = top.map_err(|why| undone(all.refused(spec, &why)))?;
            let disk = self.disk(index.unwrap_or(usize::MAX));
            let disk = disk.map_err(|why| undone(all.refused(spec, why)))?;
            self.note_layered(spec, &disk, true).map_err(undone)?;
            tops.push((spec, disk, top));
        }
        // Beside the guest, so that little is left to be made durable while it waits.
        for (spec, disk, _) in &tops {
            let settled = disk.settle(REST_WAIT);
            settled.map_err(|error| undone(all.refused(spec, &error.to_string())))?;
        }
        let disks: Vec<Arc<Disk>> = tops.iter().map(|(_, disk, _)| Arc::clone(disk)).collect();
        let began = Instant::now();
        let standing = stand_still(&disks).map_err(|why| undone(all.not_so(&why)))?;
        if self.held().is_none() {
            return Err(undone(all.not_so("its guest may not run here any more")));
        }
        for ((spec, disk, _), standing) in tops.iter().zip(&standing) {
            let settled = standing
                .settle(STAND_WAIT)
                .map_err(|error| error.to_string());
            let settled = settled.and_then(|()| self.must_be_the_disk(spec, disk));
            settled.map_err(|why| undone(all.refused(spec, &why)))?;
        }
        if let Err((error, unsure)) = all.commit(changed) {
            if unsure.is_empty() {
                all.unmake(changed);
            }
            for (place, standing) in standing.into_iter().enumerate() {
                match unsure.contains(&place) {
                    // Whoever serves it anew reads what counts.
                    true => standing.end(),
                    false => drop(standing),
                }
            }
            return Err(error);
        }
        reached("snapshot.committed");
        let states = tops.iter().map(|(_, _, top)| top.states().clone());
        let states = states.collect();
        for ((spec, _, top), standing) in tops.into_iter().zip(standing) {
            put_over(spec, standing, top);
        }
        Ok(Frozen {
            stood: began.elapsed(),
            tops: states,
        })
    }
}

impl Served {
    /// Builds that know of no snapshots are to refuse the image before anything lies over it, and to have it once nothing does.
    pub(super) fn note_layered(
        &self,
        spec: &DiskSpec,
        disk: &Disk,
        is_layered: bool,
    ) -> Result<(), ApiError> {
        match is_layered {
            true => lock(&self.layered).insert(spec.name.clone()),
            false => lock(&self.layered).remove(&spec.name),
        };
        let Some(generation) = self.held() else {
            return Ok(());
        };
        let image = disk
            .lend_image()
            .map_err(|error| self.refused(spec, &error))?;
        let known = self.claim(spec, image.as_fd(), generation, Taking::Again)?;
        known.into_iter().for_each(|known| self.keep_later(known));
        Ok(())
    }

    /// Another thread may have begun to serve it meanwhile, with another connection.
    pub(super) fn must_be_the_disk(&self, spec: &DiskSpec, disk: &Arc<Disk>) -> Result<(), String> {
        let index = self
            .what()
            .disks
            .iter()
            .position(|disk| disk.name == spec.name);
        let now = self.disk(index.unwrap_or(usize::MAX))?;
        let status = disk.status().map_err(|error| error.to_string())?;
        match Arc::ptr_eq(&now, disk) && status.has_image {
            true => Ok(()),
            false => Err("it was served anew meanwhile: try again".to_owned()),
        }
    }
}

/// All of them, at one moment.
fn stand_still(disks: &[Arc<Disk>]) -> Result<Vec<Standing<'_>>, String> {
    let until = Instant::now() + STAND_WAIT;
    let mut standing = Vec::new();
    for disk in disks {
        let left = until.saturating_duration_since(Instant::now());
        let stands = disk.stand_still(left);
        standing.push(stands.map_err(|error| error.to_string())?);
    }
    Ok(standing)
}

/// What is written down counts: a disk that does not go on with it is served anew.
fn put_over(spec: &DiskSpec, standing: Standing<'_>, top: Delta) {
    let put = standing.change_layers(|mut had| {
        let frozen = had.last_mut().map_or(Ok(()), Delta::freeze);
        frozen.map_err(|error| error.to_string())?;
        had.push(top);
        Ok(had)
    });
    end_unless(put, spec, standing);
}

/// A disk whose layers were to change and did not is served anew, with what is written down.
pub(super) fn end_unless(
    changed: Result<(), godwit_vhost::Error>,
    spec: &DiskSpec,
    standing: Standing<'_>,
) {
    if let Err(error) = changed {
        let disk = &spec.name;
        tracing::error!(disk, %error, "a disk whose images have changed is served anew");
        standing.end();
    }
}
