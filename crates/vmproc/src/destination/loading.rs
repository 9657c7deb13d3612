//! Device state at the destination: kept until all of it has come, then loaded by QEMU.
//!
//! Works on the driver's state. QEMU loads once, so that whatever ends a connection set before leaves the next one a QEMU
//! that still waits; the source says when all has been sent, and again when its own QEMU calls the save a success. Refuses:
//! device state before the last pages, and an end without any.

use super::driver::{ConnectionSet, DestinationDriver, Halt, LIFE_EVERY, Stage, halt_of};
use super::last_words::UNREAD_MAX;
use crate::faults::{planted, reached};
use crate::input::News;
use godwit_migrate::protocol::{ToSource, decode_to_destination};
use godwit_ownership::Event;
use godwit_qemu::device_state::DeviceStateError;
use godwit_transport::{Incoming, TransportError};
use godwit_wire::BELOW;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most bytes of device state that are kept until it is whole; a longer one is loaded as it comes.
const DEVICE_STATE_KEPT_MAX: usize = 8 << 20;
/// What a second device state would find.
const NO_QEMU: &str = "no hypervisor waits for device state";
/// QEMU's time to load its devices.
const LOAD_WAIT: Duration = Duration::from_secs(20);

impl DestinationDriver {
    pub(super) fn device_state(
        &mut self,
        set: &mut ConnectionSet,
        piece: &[u8],
    ) -> Result<(), Halt> {
        match set.stage {
            Stage::LastApplied => set.stage = Stage::StateComes,
            Stage::StateComes | Stage::Loading => {}
            _ => {
                return Err(Halt::Failed(
                    "the source sent device state before its last pages".into(),
                ));
            }
        }
        if set.device_state.len() + piece.len() <= DEVICE_STATE_KEPT_MAX {
            set.device_state.extend_from_slice(piece);
            reached("destination.state-comes");
            return Ok(());
        }
        let control = Arc::clone(&set.control);
        control.alive_while(LIFE_EVERY, || {
            self.pass_on(set)?;
            set.device_state.extend_from_slice(piece);
            self.pass_on(set)
        })
    }

    /// Gives QEMU the device state that was kept: from here on there is no other attempt.
    fn pass_on(&mut self, set: &mut ConnectionSet) -> Result<(), Halt> {
        self.check_memory()?;
        if let Some(variables) = &self.variables {
            variables.must_be_whole().map_err(Halt::Failed)?;
        }
        set.stage = Stage::Loading;
        reached("destination.loading");
        let qemu = self.qemu.as_mut();
        let qemu = qemu.ok_or(Halt::Failed(NO_QEMU.into()))?;
        let deadline = Instant::now() + LOAD_WAIT;
        let written = qemu.stream.write(&set.device_state, deadline);
        set.device_state.clear();
        match written {
            Ok(()) => Ok(()),
            // It has hung up: its own reason is better than ours.
            Err(DeviceStateError::Io(_)) => self.finish(deadline),
            Err(error) => Err(Halt::failed(error)),
        }
    }

    /// What was received must still be there: the file is QEMU's user's, and QEMU has run since it was made.
    fn check_memory(&self) -> Result<(), Halt> {
        self.memory.ram.check_length().map_err(Halt::failed)
    }

    /// Ends the stream and waits until QEMU has loaded it.
    fn finish(&mut self, deadline: Instant) -> Result<(), Halt> {
        let qemu = self.qemu.take().ok_or(Halt::Failed(NO_QEMU.into()))?;
        let loaded = qemu.machine.finish_incoming(qemu.stream, deadline);
        loaded.map(drop).map_err(Halt::failed)
    }

    /// What the guest was told is durable must be durable here before this host says that it is ready.
    fn keep_disks(
        &self,
        set: &ConnectionSet,
        attempt: godwit_types::Generation,
    ) -> Result<(), Halt> {
        // What lies below tops was whole before these came.
        let places = self.disks.iter().take(usize::from(BELOW)).enumerate();
        let wanted = places.filter_map(|(place, disk)| {
            let bytes = disk.get()?.bytes();
            u8::try_from(place).ok().map(|place| (place, bytes))
        });
        if !wanted.eq(set.mirrored.iter().copied()) {
            return Err(Halt::Failed(
                "the source has mirrored other disks than come here: its VM was described anew meanwhile".into(),
            ));
        }
        if !planted("ready-before-flush") {
            set.channels.sync_disks().map_err(Halt::Failed)?;
        }
        reached("destination.disks-durable");
        (self.keep_disks)(attempt).map_err(Halt::failed)
    }

    /// Looks whether the source has called the switchover off behind what was read of the control channel: a destination
    /// that was kept from its work finds both at once.
    fn look_behind(&mut self, set: &mut ConnectionSet) -> Result<(), Halt> {
        let mut unread = UNREAD_MAX;
        while unread > 0 && !set.held.is_full() {
            unread -= 1;
            match set.receiver.recv(Instant::now()) {
                Ok(Incoming::Message(bytes)) => {
                    let message = decode_to_destination(&bytes, self.pages);
                    let message = message.map_err(Halt::failed)?;
                    if !message.is_urgent() {
                        set.held.put(Incoming::Message(bytes));
                        continue;
                    }
                    let called_off = message.is_withdrawal();
                    self.message(set, message)?;
                    if called_off {
                        return Err(Halt::Lost("the source called the switchover off".into()));
                    }
                }
                Ok(Incoming::End) => {
                    return Err(Halt::Lost("the source closed the control channel".into()));
                }
                Ok(piece) => set.held.put(piece),
                Err(TransportError::Silent { .. }) => return Ok(()),
                Err(error) => return Err(halt_of(error)),
            }
        }
        Ok(())
    }

    /// All of the device state is here. From its load on there is no other attempt.
    pub(super) fn state_whole(&mut self, set: &mut ConnectionSet) -> Result<(), Halt> {
        // Nothing to load, and nothing that may make this look again and again.
        if set.device_state.is_empty() {
            return Ok(());
        }
        if set.stage == Stage::StateComes {
            reached("destination.state-whole");
            self.look_behind(set)?;
        }
        let control = Arc::clone(&set.control);
        control.alive_while(LIFE_EVERY, || self.pass_on(set))
    }

    pub(super) fn load(
        &mut self,
        set: &mut ConnectionSet,
        attempt: godwit_types::Generation,
    ) -> Result<(), Halt> {
        self.state_whole(set)?;
        if set.stage != Stage::Loading {
            return Err(Halt::Failed(
                "the source ended a device state that it did not send".into(),
            ));
        }
        let began = Instant::now();
        let control = Arc::clone(&set.control);
        control.alive_while(LIFE_EVERY, || {
            self.finish(began + LOAD_WAIT)?;
            self.keep_disks(set, attempt)
        })?;
        set.stage = Stage::Loaded;
        let load_ms = began.elapsed().as_secs_f64() * 1e3;
        self.report
            .update(|report| report.switchover_parts_ms.device_load_ms = load_ms);
        reached("destination.loaded");
        // Only a figure: whether the link still lives is seen when it is read.
        let _ = set.control.send(&ToSource::Loaded { load_ms });
        self.tell(News::Core(Event::Loaded { attempt }));
        Ok(())
    }
}
