//! What the VM's thread does for disks that move on this host while the guest runs.
//!
//! Part of [`Vm`]; the work itself is in [`crate::disks`]. Refuses: a VM without a guest, one that moves to another host, and to
//! move one whose disks are on their way.

use crate::disks::past_moves;
use crate::hypervisor::Hyper;
use crate::input::Input;
use crate::requests::Reply;
use crate::vm::Vm;
use godwit_types::disk_move::{DiskMoves, DiskPlace};
use godwit_types::host_api::VmAnswer;
use godwit_types::{ApiError, ErrorCode};

impl Vm {
    pub(crate) fn move_disks(&mut self, places: Vec<DiskPlace>) -> Reply {
        let hyper = self.may_move_disks()?;
        let inputs = self.inputs.clone();
        let changed = move || {
            // A process that ends leaves it to its successor.
            let _ = inputs.send(Input::DiskMoved);
        };
        let begun = hyper.disks.move_in_place(places, changed)?;
        Ok(VmAnswer::DiskMoves(begun))
    }

    /// Refuses what [`Self::move_disks`] would refuse, and begins nothing.
    pub(crate) fn plan_disk_moves(&self, places: &[DiskPlace]) -> Reply {
        let planned = self.may_move_disks()?.disks.plan_in_place(places)?;
        Ok(VmAnswer::DiskMoves(planned))
    }

    fn may_move_disks(&self) -> Result<&Hyper, ApiError> {
        self.refuse_while_closing()?;
        self.refuse_while_moving()?;
        self.refuse_during_disk_order()?;
        if self.core.record().may_run().is_none() {
            let mut error = self.not_running();
            error
                .message
                .push_str(": a disk moves while its guest runs");
            return Err(error);
        }
        // It has to say where the disks are before their former images may go.
        self.host_vm()?;
        self.hyper.as_ref().ok_or_else(|| self.not_running())
    }

    pub(crate) fn disk_moves(&self) -> DiskMoves {
        match &self.hyper {
            Some(hyper) => hyper.disks.moves(),
            None => DiskMoves {
                past: past_moves(&self.paths),
                ..DiskMoves::default()
            },
        }
    }

    pub(crate) fn cancel_disk_moves(&mut self) -> Reply {
        match &self.hyper {
            Some(hyper) if hyper.disks.are_moving() => {
                hyper.disks.cancel_moves();
                self.done("keeps the disks where they are that are not moved yet")
            }
            _ => {
                let message = format!("VM '{}' moves no disks on this host", self.config.vm);
                Err(ApiError::new(ErrorCode::WrongState, message).on_host(&self.config.host))
            }
        }
    }

    /// One that begins would begin with disks that are about to be others.
    pub(crate) fn refuse_while_disks_move(&self) -> Result<(), ApiError> {
        self.refuse_during_disk_order()?;
        let disks = self.hyper.as_ref().map(|hyper| &hyper.disks);
        if !disks.is_some_and(|disks| disks.are_moving() || disks.are_elsewhere()) {
            return Ok(());
        }
        let vm = &self.config.vm;
        let message = format!(
            "disks of VM '{vm}' are being moved on host '{}': wait for that, or call it off with 'godwit vm move-disk {vm} --cancel'",
            self.config.host
        );
        Err(ApiError::new(ErrorCode::AlreadyMigrating, message).on_host(&self.config.host))
    }
}
