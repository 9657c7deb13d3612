//! What the VM's thread does for a disk that is made larger.
//!
//! Part of [`Vm`]; the work itself is in [`crate::disks`], on a thread of its own, since storage may hang (what an earlier move of a VM that is
//! off left is settled before, as at a start). Until it is done no guest starts and nothing begins to move. Refuses: a VM that this host does not hold, one that moves or whose disks do, and disks
//! that QEMU itself has open.

use crate::disks::AtRest;
use crate::hypervisor::internal;
use crate::input::Input;
use crate::vm::Vm;
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::host_api::VmAnswer;
use godwit_types::{ApiError, ErrorCode, Generation};
use std::sync::mpsc::SyncSender;

/// Ends with what a person is to hear.
type Work = Box<dyn FnOnce() -> Result<String, ApiError> + Send>;

impl Vm {
    /// Begins to make a disk larger; the answer comes when that is done.
    pub(crate) fn resize_disk(&mut self, wish: ResizeDisk, reply: SyncSender<VmAnswer>) {
        let answers = reply.clone();
        let inputs = self.inputs.clone();
        let begun = self.work_on(wish).and_then(|work| {
            let work = move || {
                let done = work();
                // Whoever has the answer may ask for the next thing at once.
                let _ = inputs.send(Input::DiskResized);
                let _ = reply.send(done.map_or_else(VmAnswer::Error, VmAnswer::Done));
            };
            let thread = std::thread::Builder::new().name("disk-resize".into());
            thread.spawn(work).map_err(internal)
        });
        match begun {
            Ok(_) => self.resizes = true,
            // The caller may have gone.
            Err(error) => drop(answers.send(VmAnswer::Error(error))),
        }
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
            return Ok(Box::new(move || disks.resize(&wish)));
        }
        self.settle_images(generation).map_err(refused)?;
        let spec = self.host_vm()?.spec;
        let at_rest = AtRest {
            config: self.config.clone(),
            paths: self.paths.clone(),
            spec,
            generation,
        };
        Ok(Box::new(move || at_rest.resize(&wish)))
    }

    /// The generation under which this host holds the VM, whether or not that is on.
    pub(crate) fn must_hold(&self) -> Result<Generation, ApiError> {
        let record = self.core.record();
        record.power().and(record.may_run()).ok_or_else(|| {
            let (vm, host) = (&self.config.vm, &self.config.host);
            let message = format!("VM '{vm}' is not held by host '{host}' now");
            ApiError::new(ErrorCode::WrongState, message).on_host(host)
        })
    }

    /// One that starts or moves would begin with a disk that is about to be another.
    pub(crate) fn refuse_while_resizing(&self) -> Result<(), ApiError> {
        if !self.resizes {
            return Ok(());
        }
        let (vm, host) = (&self.config.vm, &self.config.host);
        let message =
            format!("a disk of VM '{vm}' is being made larger on host '{host}': wait for that");
        Err(ApiError::new(ErrorCode::WrongState, message).on_host(host))
    }
}
