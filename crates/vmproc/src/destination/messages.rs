//! What the destination does at each word of the source.
//!
//! Works on the driver's state. Refuses: what the order of the protocol does not allow, and more memory than the guest has.

use super::driver::{ConnectionSet, DestinationDriver, Halt, LIFE_EVERY, Stage, halt_of};
use crate::faults::planted;
use crate::input::News;
use godwit_migrate::protocol::{Extent, ToDestination, ToSource};
use godwit_types::migration::{MigrationReport, Phase};
use std::sync::Arc;

impl DestinationDriver {
    pub(super) fn message(
        &mut self,
        set: &mut ConnectionSet,
        message: ToDestination,
    ) -> Result<(), Halt> {
        match message {
            ToDestination::Begin {
                set: number,
                streams,
                changes,
                ..
            } => self.begin(set, number, (streams, changes)),
            ToDestination::Extents { extents } => self.extents(set, &extents),
            ToDestination::ExtentsEnd => {
                // A preparation has looked by itself.
                if !self.prepare {
                    set.no_room = self.memory.room_for(set.missing_pages).err();
                }
                Ok(())
            }
            ToDestination::Barrier { iteration, sent } => self.barrier(set, iteration, sent),
            ToDestination::Stopped => self.stopped(set),
            ToDestination::Addresses { cards } => {
                // Once is enough: each is written to a file.
                if !std::mem::replace(&mut set.addresses_known, true) {
                    self.tell(News::Addresses(cards));
                }
                Ok(())
            }
            ToDestination::Mirrored { disks } => {
                set.mirrored = disks;
                Ok(())
            }
            ToDestination::Layers { disk, images } => self.layers(
                set,
                (disk, Some(images.as_str())),
                &ToSource::LayersBegun { disk },
            ),
            ToDestination::LayersSent { disk } => {
                self.layers(set, (disk, None), &ToSource::LayersReady { disk })
            }
            ToDestination::Variables { at, bytes, last } => {
                let control = Arc::clone(&set.control);
                control.alive_while(LIFE_EVERY, || self.take_variables(at, &bytes, last))
            }
            ToDestination::DeviceStateWhole => self.state_whole(set),
            ToDestination::DeviceStateEnd { attempt, .. } => self.load(set, attempt),
            ToDestination::Console { kept } => {
                // Of an attempt that can still be called off, another one would come.
                if set.stage == Stage::Loaded {
                    self.tell(News::Console(kept));
                }
                Ok(())
            }
            ToDestination::Warm { .. } => Ok(()),
            // So says a source of the version before, beside its abort.
            ToDestination::Cancel { reason, .. } => Err(Halt::Failed(format!(
                "the source ended the migration: {reason}"
            ))),
            ToDestination::Peer { message } => {
                self.tell(News::Peer(message));
                Ok(())
            }
            ToDestination::Ping { nonce } => {
                let pong = ToSource::Pong { nonce };
                set.control.send(&pong).map_err(halt_of)
            }
        }
    }

    fn extents(&self, set: &mut ConnectionSet, extents: &[Extent]) -> Result<(), Halt> {
        for (first, count) in extents {
            set.announced_pages = set.announced_pages.saturating_add(*count);
            if set.announced_pages > self.pages {
                let reason = "the source announced more memory than the guest has";
                return Err(Halt::Failed(reason.into()));
            }
            set.missing_pages += self.memory.ram.without_memory(*first..first + count);
        }
        Ok(())
    }

    fn stopped(&self, set: &mut ConnectionSet) -> Result<(), Halt> {
        if set.stage != Stage::Precopy {
            return Err(Halt::Failed("the source stopped its guest twice".into()));
        }
        set.stage = Stage::Stopped;
        let update = |report: &mut MigrationReport| report.phase = Phase::Switchover;
        self.report.update(update);
        Ok(())
    }

    /// Storage may take long for it.
    fn layers(
        &self,
        set: &ConnectionSet,
        (disk, images): (u8, Option<&str>),
        answer: &ToSource,
    ) -> Result<(), Halt> {
        let control = Arc::clone(&set.control);
        let taken = control.alive_while(LIFE_EVERY, || (self.take_layers)(disk, images));
        taken.map_err(Halt::Failed)?;
        control.send(answer).map_err(halt_of)
    }

    fn take_variables(&mut self, at: u64, bytes: &[u8], last: bool) -> Result<(), Halt> {
        let taken = match &mut self.variables {
            Some(variables) => variables.take(at, bytes, last),
            None => Err("the source sent UEFI variables of a VM without UEFI".to_owned()),
        };
        taken.map_err(Halt::Failed)
    }

    fn begin(
        &mut self,
        set: &mut ConnectionSet,
        number: u16,
        (streams, changes): (u32, u32),
    ) -> Result<(), Halt> {
        if number != set.number || !set.channels.begin(streams, changes) {
            return Err(Halt::Failed(
                "the source began a set of connections twice".into(),
            ));
        }
        if self.prepare {
            // Only now, so that the source's total contains it.
            self.memory.prepare(self.cores);
        }
        let begun = ToSource::Begun { set: number };
        set.control.send(&begun).map_err(halt_of)
    }

    fn barrier(
        &mut self,
        set: &mut ConnectionSet,
        iteration: u32,
        sent: Vec<u64>,
    ) -> Result<(), Halt> {
        if planted("barrier-not-awaited") {
            return self.barrier_done(set, iteration);
        }
        let is_last = set.stage == Stage::Stopped;
        set.channels.raise_barrier(iteration, sent, is_last);
        Ok(())
    }

    pub(super) fn barrier_done(
        &mut self,
        set: &mut ConnectionSet,
        iteration: u32,
    ) -> Result<(), Halt> {
        let shares = set.channels.take_shares();
        if set.stage == Stage::Stopped {
            set.stage = Stage::LastApplied;
            if !planted("receivers-outlive-load") {
                set.channels.end_receiving();
            }
        }
        let done = ToSource::BarrierDone {
            iteration,
            memory_wait: shares.memory_wait,
            busy: shares.busy,
        };
        set.control.send(&done).map_err(halt_of)
    }
}
