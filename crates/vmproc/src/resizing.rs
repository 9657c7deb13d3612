//! What the VM's thread does for a disk that is made larger.
//!
//! Part of [`Vm`]; the work itself is in [`crate::disks`], on a thread of its own, since storage may hang (what an earlier move of a VM that is
//! off left is settled before, as at a start). Until it is done no guest starts and nothing begins to move. Refuses: a VM that this host does not hold, one that moves or whose disks do, and disks
//! that QEMU itself has open.

use crate::disk_orders::{DiskOrder, Work};
use crate::vm::Vm;
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::host_api::VmAnswer;
use godwit_types::{ApiError, ErrorCode};
use std::sync::mpsc::SyncSender;

impl Vm {
    /// Begins to make a disk larger; the answer comes when that is done.
    pub(crate) fn resize_disk(&mut self, wish: ResizeDisk, reply: SyncSender<VmAnswer>) {
        let work = self.work_on(wish);
        self.begin_disk_order(DiskOrder::Resize, work, reply);
    }

    fn work_on(&mut self, wish: ResizeDisk) -> Result<Work, ApiError> {
        self.refuse_while_closing()?;
        self.refuse_while_moving()?;
        self.refuse_while_disks_move()?;
        wish.check()
            .map_err(|error| error.on_host(&self.config.host))?;
        let generation = self.must_hold()?;
        let refused = |message: String| ApiError::new(ErrorCode::WrongState, message);
        let (vm, host) = (&self.config.vm, &self.config.host);
        if let Some(hyper) = &self.hyper {
            if self.spec.as_ref().is_some_and(|spec| !spec.serves_disks()) {
                return Err(refused(format!(
                    "QEMU itself has the disks of VM '{vm}' open, which is of hardware version 1: make them larger while it is off"
                ))
                .on_host(host));
            }
            let disks = hyper.disks.clone();
            return Ok(Box::new(move || disks.resize(&wish).map(VmAnswer::Done)));
        }
        self.settle_images(generation).map_err(refused)?;
        let spec = self.host_vm()?.spec;
        let at_rest = self.at_rest(spec, generation);
        Ok(Box::new(move || at_rest.resize(&wish).map(VmAnswer::Done)))
    }
}
