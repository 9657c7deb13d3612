//! What the VM's thread has a thread of its own do with the VM's disks, since storage may hang.
//!
//! Part of [`Vm`]: at most one at a time; until it is done no guest starts and nothing begins to move. Refuses: a second one.

use crate::hypervisor::internal;
use crate::input::Input;
use crate::vm::Vm;
use godwit_types::host_api::VmAnswer;
use godwit_types::{ApiError, ErrorCode, Generation};
use std::sync::mpsc::SyncSender;

/// Ends with what whoever asked is to hear.
pub(crate) type Work = Box<dyn FnOnce() -> Result<VmAnswer, ApiError> + Send>;

/// What a thread is at, for whoever is refused meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskOrder {
    Resize,
    Snapshots,
    Clone,
    /// Of images that are frozen.
    CloneOfSnapshot,
}

impl DiskOrder {
    fn as_words(self) -> &'static str {
        match self {
            Self::Resize => "a disk of VM '{vm}' is being made larger",
            Self::Snapshots => "snapshots of VM '{vm}' are being seen to",
            Self::Clone | Self::CloneOfSnapshot => {
                "a clone of VM '{vm}' is being made, which 'godwit vm clone {vm} --cancel' calls off,"
            }
        }
    }
}

impl Vm {
    /// Has that done on a thread; the answer comes from there.
    pub(crate) fn begin_disk_order(
        &mut self,
        order: DiskOrder,
        work: Result<Work, ApiError>,
        reply: SyncSender<VmAnswer>,
    ) {
        let answers = reply.clone();
        let inputs = self.inputs.clone();
        let begun = work.and_then(|work| {
            let work = move || {
                let done = work();
                // Whoever has the answer may ask for the next thing at once.
                let _ = inputs.send(Input::DiskOrderEnded);
                let _ = reply.send(done.unwrap_or_else(VmAnswer::Error));
            };
            let thread = std::thread::Builder::new().name("disk-order".into());
            thread.spawn(work).map_err(internal)
        });
        match begun {
            Ok(_) => self.disk_order = Some(order),
            // The caller may have gone.
            Err(error) => drop(answers.send(VmAnswer::Error(error))),
        }
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

    /// One that starts would begin with a disk that is about to be another, or is copied as it is.
    pub(crate) fn refuse_start_during_disk_order(&self) -> Result<(), ApiError> {
        match self.disk_order {
            Some(DiskOrder::CloneOfSnapshot) => Ok(()),
            _ => self.refuse_during_disk_order(),
        }
    }

    /// The same of one that moves, whose disks change otherwise, or whose process is to end.
    pub(crate) fn refuse_during_disk_order(&self) -> Result<(), ApiError> {
        let Some(order) = self.disk_order else {
            return Ok(());
        };
        let host = &self.config.host;
        let what = order.as_words().replace("{vm}", self.config.vm.as_str());
        let message = format!("{what} on host '{host}': wait for that");
        Err(ApiError::new(ErrorCode::WrongState, message).on_host(host))
    }
}
