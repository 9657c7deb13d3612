//! A guest whose disk is full for long: it is paused, and goes on by itself once there is room.
//!
//! Part of [`Vm`]. A guest whose requests are not answered gives its disk up sooner or later, while one that stands still knows of no
//! time. What waits is left where the next start of the disk finds it (`vhost`). That the guest stands still for this, and not since
//! a person paused it, is noted beside QEMU's identity, for a successor. A person's pause counts more, and ends that.
//! Refuses: to move a guest whose disk is full to another host.

use crate::disks::FullDisk;
use crate::faults::patience;
use crate::input::Input;
use crate::vm::Vm;
use godwit_ownership::{Event, Status};
use godwit_store::{load_json, remove_document, save_json};
use godwit_types::{ApiError, ErrorCode};
use serde::{Deserialize, Serialize};
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

/// Why a guest stands still.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WaitsForRoom {
    /// Of which QEMU of this VM.
    launch: u64,
    disk: String,
    path: String,
}

/// What the VM's thread knows of it.
#[derive(Debug, Default)]
pub(crate) struct Room {
    waits: Option<WaitsForRoom>,
    looked: Option<Instant>,
    went_on: Option<Instant>,
    not_paused: Option<Instant>,
}

impl Vm {
    /// Pauses a guest whose disk has been full for long.
    pub(crate) fn look_for_room(&mut self) {
        let is_paused = matches!(self.status, Status::Paused);
        if self.room.waits.is_some() && !is_paused {
            self.wait_for_no_room();
        }
        let runs = matches!(self.status, Status::Running { .. });
        if !runs || self.migration.is_some() || self.unsure.is_some() {
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
        if let Some(full) = full.filter(|full| full.waits >= most) {
            self.pause_for_room(full);
        }
    }

    fn pause_for_room(&mut self, full: FullDisk) {
        let Some(launch) = self.hyper.as_ref().map(|hyper| hyper.identity.launch) else {
            return;
        };
        let FullDisk { disk, path, .. } = full;
        tracing::warn!(disk, path, "the guest is paused until its disk has room");
        let waits = WaitsForRoom { launch, disk, path };
        // First: one that is paused must go on again.
        let noted = save_json(&self.paths.waits_for_room(), &waits);
        if let Err(error) = &noted {
            tracing::warn!(%error, "the guest is not paused, since the note that it waits for room cannot be written");
        } else {
            self.feed(Event::PauseRequested);
        }
        if matches!(self.status, Status::Paused) {
            self.begin_to_wait(waits);
        } else {
            self.room.not_paused = Some(Instant::now());
            self.wait_for_no_room();
        }
    }

    fn begin_to_wait(&mut self, waits: WaitsForRoom) {
        let (inputs, launch) = (self.inputs.clone(), waits.launch);
        self.room.waits = Some(waits);
        let found = move || {
            let _ = inputs.send(Input::DiskMayHaveRoom { launch });
        };
        let watched = self
            .hyper
            .as_ref()
            .map(|hyper| hyper.disks.watch_room(found));
        if let Some(Err(error)) = watched {
            tracing::error!(%error, "the guest does not go on by itself when there is room: resume it then");
        }
    }

    /// What a predecessor's guest stands still for.
    pub(crate) fn find_waiting_for_room(&mut self) {
        let launch = self.hyper.as_ref().map(|hyper| hyper.identity.launch);
        let found = load_json::<WaitsForRoom>(&self.paths.waits_for_room());
        let found = found.unwrap_or_else(|error| {
            tracing::warn!(%error, "whether the guest waits for room on its disk cannot be read");
            None
        });
        let waits = found.filter(|waits| Some(waits.launch) == launch);
        match waits.filter(|_| matches!(self.status, Status::Paused)) {
            Some(waits) => self.begin_to_wait(waits),
            None => self.wait_for_no_room(),
        }
    }

    /// It is worth trying whether its disk has room.
    pub(crate) fn may_have_room(&mut self, launch: u64) {
        let waits = self.room.waits.clone();
        let Some(waits) = waits.filter(|waits| waits.launch == launch) else {
            return;
        };
        if !matches!(self.status, Status::Paused) {
            return;
        }
        tracing::info!("the guest's disk may have room: the guest goes on");
        self.room.went_on = Some(Instant::now());
        self.feed(Event::ResumeRequested);
        if matches!(self.status, Status::Paused) {
            // Its record may be on the same full file system. The note is there until the guest runs.
            self.begin_to_wait(waits);
        }
    }

    /// Whatever the guest stands still for from now on, it is not that.
    pub(crate) fn wait_for_no_room(&mut self) {
        self.room.waits = None;
        if let Err(error) = remove_document(&self.paths.waits_for_room()) {
            tracing::warn!(%error, "a note that the guest waits for room is left");
        }
    }

    /// Why a guest stands still that nobody paused.
    pub(crate) fn waits_for_room_note(&self) -> Option<String> {
        let WaitsForRoom { disk, path, .. } = self.room.waits.as_ref()?;
        let vm = &self.config.vm;
        Some(format!(
            "disk-full: the guest is paused, since {path} of disk '{disk}' has no room left: make room there, or move the disk with 'godwit vm move-disk {vm}', and it goes on by itself"
        ))
    }

    /// What waits for room would stay here.
    pub(crate) fn refuse_while_full(&self) -> Result<(), ApiError> {
        let full = self.hyper.as_ref().and_then(|hyper| hyper.disks.full());
        let waits = self.room.waits.as_ref();
        let waits = waits.map(|waits| (waits.disk.clone(), waits.path.clone()));
        let Some((disk, path)) = full.map(|full| (full.disk, full.path)).or(waits) else {
            return Ok(());
        };
        let (vm, host) = (&self.config.vm, &self.config.host);
        let message = format!(
            "VM '{vm}' is not migrated while its disk '{disk}' is full: make room for {path} on host '{host}', or move the disk there with 'godwit vm move-disk {vm}'"
        );
        Err(ApiError::new(ErrorCode::WrongState, message).on_host(host))
    }
}
