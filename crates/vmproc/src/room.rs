//! A guest whose disk is full for long, or whose storage fails where its disk is told to wait for that: it is paused, and goes on by itself.
//!
//! Part of [`Vm`]. A guest whose requests are not answered gives its disk up sooner or later, while one that stands still knows of no
//! time. What waits is left where the next start of the disk finds it (`vhost`). That the guest stands still for this, and not since
//! a person paused it, is in its durable record: a successor goes on waiting, and a host that lost its power boots the guest. Which
//! disk it is, is noted beside QEMU's identity, for people. A person's pause counts more, and ends that.
//! Refuses: to move a guest whose disk is full to another host; a migration in which one becomes full ends, and the guest stays.

use crate::disks::FullDisk;
use crate::faults::{patience, planted};
use crate::input::Input;
use crate::vm::Vm;
use godwit_migrate::why::Why;
use godwit_ownership::{Event, Power, Status};
use godwit_store::{load_json, remove_document, save_json};
use godwit_types::{ApiError, ErrorCode};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a disk may be full before its guest is paused: Windows gives a disk up after 60 s.
const PATIENCE: Duration = Duration::from_secs(30);
/// The same of a guest that has just gone on by itself.
const PATIENCE_AGAIN: Duration = Duration::from_secs(2);
/// How long a guest has just gone on.
const JUST_NOW: Duration = Duration::from_secs(30);
/// How long it is not tried again to pause one that could not be.
const NOT_AGAIN: Duration = Duration::from_secs(30);
/// How often the disks are asked.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Which disk a guest stands still for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WaitsForRoom {
    /// Of which QEMU of this VM.
    launch: u64,
    disk: String,
    path: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    fails: bool,
}

impl WaitsForRoom {
    fn full(&self) -> FullDisk {
        FullDisk {
            disk: self.disk.clone(),
            path: self.path.clone(),
            fails: self.fails,
        }
    }
}

/// What is done about a disk that has been full for long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Remedy {
    Pause,
    Stay,
}

/// A wait for room that is under way. Whoever watches for it ends with it.
#[derive(Debug)]
struct Wait {
    number: u64,
    _is_on: Arc<()>,
}

/// What the VM's thread knows of it.
#[derive(Debug, Default)]
pub(crate) struct Room {
    wait: Option<Wait>,
    /// How many there were: what is found for an earlier one says nothing of a later.
    waits: u64,
    /// Whether the guest was let go on after one, and it is not known yet that it runs.
    goes_on: bool,
    /// Which disk it is for, where that is known.
    full: Option<WaitsForRoom>,
    looked: Option<Instant>,
    went_on: Option<Instant>,
    not_paused: Option<Instant>,
}

impl Vm {
    /// Pauses a guest whose disk has been full for long, and looks after one that is.
    pub(crate) fn look_for_room(&mut self) {
        match (self.waits_for_room(), &self.room.wait) {
            (true, None) => self.begin_to_wait(),
            (false, Some(_)) => self.wait_no_more(),
            _ => {}
        }
        if self.remedy().is_none() || self.unsure.is_some() {
            return;
        }
        let within = |limit, at: Option<Instant>| at.is_some_and(|at| at.elapsed() < limit);
        if within(LOOK_EVERY, self.room.looked) || within(NOT_AGAIN, self.room.not_paused) {
            return;
        }
        self.room.looked = Some(Instant::now());
        let full = self.hyper.as_ref().and_then(|hyper| hyper.disks.full());
        let most = match within(JUST_NOW, self.room.went_on) {
            true => PATIENCE_AGAIN,
            false => patience(PATIENCE),
        };
        if let Some((full, _)) = full.filter(|(_, waits)| *waits >= most) {
            self.is_full_for_long(full);
        }
    }

    pub(crate) fn is_full_for_long(&mut self, full: FullDisk) {
        match self.remedy() {
            Some(Remedy::Pause) => self.pause_for_room(full),
            Some(Remedy::Stay) => self.stay_for_room(&full),
            None => {}
        }
    }

    /// What is done for a guest that runs.
    fn remedy(&self) -> Option<Remedy> {
        match (&self.status, &self.migration) {
            (Status::Running { .. }, None) => Some(Remedy::Pause),
            (Status::Migrating { .. }, Some(_)) => Some(Remedy::Stay),
            _ => None,
        }
    }

    /// Ends its migration, which could not end well, so that it can be paused.
    fn stay_for_room(&mut self, full: &FullDisk) {
        let why = full.keeps_its_guest(&self.config);
        self.feed_because(Event::Cancel, Some(Why::failure(&why)));
    }

    /// Whether the guest stands still until its disk has room: as its record says, which a person's pause changes.
    fn waits_for_room(&self) -> bool {
        let is_paused = matches!(self.status, Status::Paused);
        is_paused && self.core.record().power() == Some(Power::WaitsForRoom)
    }

    fn pause_for_room(&mut self, full: FullDisk) {
        let Some(launch) = self.hyper.as_ref().map(|hyper| hyper.identity.launch) else {
            return;
        };
        let FullDisk { disk, path, fails } = full;
        let what = match fails {
            true => "the guest is paused until its disk's storage does not fail",
            false => "the guest is paused until its disk has room",
        };
        tracing::warn!(disk, path, "{what}");
        let full = WaitsForRoom {
            launch,
            disk,
            path,
            fails,
        };
        if let Err(error) = save_json(&self.paths.waits_for_room(), &full) {
            tracing::warn!(%error, "a successor of this process will not know which disk the guest waits for");
        }
        self.room.full = Some(full);
        self.feed(match planted("room-wait-not-on-record") {
            true => Event::PauseRequested,
            false => Event::OutOfRoom,
        });
        if self.waits_for_room() {
            self.begin_to_wait();
        } else {
            self.room.not_paused = Some(Instant::now());
            self.wait_no_more();
        }
    }

    /// Has it watched whether there is room. Tried again with the next look where that cannot be begun.
    fn begin_to_wait(&mut self) {
        let Some(hyper) = &self.hyper else {
            return;
        };
        let launch = hyper.identity.launch;
        if self.room.full.is_none() {
            let noted = load_json::<WaitsForRoom>(&self.paths.waits_for_room());
            let noted = noted.unwrap_or_else(|error| {
                tracing::warn!(%error, "which disk the guest waits for cannot be read");
                None
            });
            self.room.full = noted.filter(|noted| noted.launch == launch);
        }
        self.room.waits += 1;
        let (number, is_on) = (self.room.waits, Arc::new(()));
        let inputs = self.inputs.clone();
        let found = move || {
            let _ = inputs.send(Input::DiskMayHaveRoom { wait: number });
        };
        let fails = self.room.full.as_ref().is_some_and(|full| full.fails);
        match hyper
            .disks
            .watch_room((Arc::downgrade(&is_on), fails), found)
        {
            Ok(()) => {
                self.room.wait = Some(Wait {
                    number,
                    _is_on: is_on,
                });
            }
            Err(error) => {
                tracing::error!(%error, "it is not watched yet whether the guest's disk has room");
            }
        }
    }

    /// It is worth trying whether its disk has room.
    pub(crate) fn may_have_room(&mut self, wait: u64) {
        let is_meant = self
            .room
            .wait
            .as_ref()
            .is_some_and(|now| now.number == wait);
        if !is_meant || !self.waits_for_room() {
            return;
        }
        tracing::info!("the guest goes on, since its disk may have room");
        self.room.went_on = Some(Instant::now());
        self.room.wait = None;
        self.room.goes_on = true;
        self.feed(Event::ResumeRequested);
        self.room.goes_on = self.unsure.is_some();
        // One that cannot go on waits again: its record may be on the same full file system, or its hypervisor refuses.
        if !self.waits_for_room() {
            self.wait_no_more();
        }
    }

    /// What fails from now on has another reason.
    pub(crate) fn has_gone_on(&mut self) {
        self.room.goes_on = false;
    }

    /// A guest cannot be let run: it stands still for a person, or waits again.
    pub(crate) fn halts(&mut self, why: String) -> Event {
        if std::mem::take(&mut self.room.goes_on) {
            return Event::StillOutOfRoom;
        }
        self.halted = Some(why);
        Event::GuestHalted
    }

    /// Whatever the guest stands still for from now on, it is not that.
    pub(crate) fn wait_no_more(&mut self) {
        (self.room.wait, self.room.full) = (None, None);
        if let Err(error) = remove_document(&self.paths.waits_for_room()) {
            tracing::warn!(%error, "a note of which disk the guest waits for is left");
        }
    }

    /// Why a guest stands still that nobody paused.
    pub(crate) fn waits_for_room_note(&self) -> Option<String> {
        if !self.waits_for_room() {
            return None;
        }
        let vm = &self.config.vm;
        Some(match &self.room.full {
            Some(WaitsForRoom {
                disk,
                path,
                fails: true,
                ..
            }) => format!(
                "disk-error: the guest is paused, since the storage of {path} of disk '{disk}' fails: it is tried again each minute, and 'godwit vm resume {vm}' tries it at once"
            ),
            Some(WaitsForRoom { disk, path, .. }) => format!(
                "disk-full: the guest is paused, since {path} of disk '{disk}' has no room left: make room there, or move the disk, unless it has snapshots, with 'godwit vm move-disk {vm} --to DATASTORE', and it goes on by itself"
            ),
            None => format!(
                "disk-full: the guest is paused until its disks have room, or do what it asked again: make some, or move those without snapshots with 'godwit vm move-disk {vm} --to DATASTORE', and it goes on by itself"
            ),
        })
    }

    /// What waits for room would stay here.
    pub(crate) fn refuse_while_full(&self) -> Result<(), ApiError> {
        let refused = |message| {
            let error = ApiError::new(ErrorCode::WrongState, message);
            Err(error.on_host(&self.config.host))
        };
        if let Some(note) = self.waits_for_room_note() {
            return match &self.room.full {
                Some(noted) => refused(noted.full().keeps_its_guest(&self.config)),
                None => refused(note),
            };
        }
        let room = self
            .hyper
            .as_ref()
            .map(|hyper| hyper.disks.must_have_room());
        room.unwrap_or(Ok(())).or_else(refused)
    }
}

#[cfg(test)]
#[path = "room_tests.rs"]
mod tests;
