//! What the VM's thread does for a VM that is made as a copy of this one.
//!
//! Part of [`Vm`]; the work itself is in [`crate::disks`], on a thread of its own. As long as it goes on, and what is copied waits for who asked for it, this
//! VM neither starts nor moves, and none of its disks changes; but its guest may start where a snapshot is copied, whose images are frozen. Refuses: a
//! second clone meanwhile, and to copy disks with which a guest works.

use crate::disk_orders::{DiskOrder, Work};
use crate::disks::CloneJob;
use crate::files::Paths;
use crate::hypervisor::internal;
use crate::requests::Reply;
use crate::vm::Vm;
use godwit_types::clones::{CloneDisks, Cloning};
use godwit_types::host_api::{VmAnswer, VmProcessConfig};
use godwit_types::{ApiError, ErrorCode};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

impl Vm {
    /// Goes on with what is under way, begins what is not, and tells once how it ended.
    pub(crate) fn clone_disks(&mut self, wish: CloneDisks) -> Reply {
        if let Some(job) = self.cloning.clone() {
            if job.is_for(&wish) {
                if let Some(told) = job.ask().inspect_err(|_| self.cloning = None)? {
                    return Ok(VmAnswer::Cloning(Box::new(told)));
                }
            } else if job.is_under_way() {
                let (vm, other) = (&self.config.vm, job.clone_name());
                return Err(self.not_cloned(&format!(
                    "VM '{vm}' is just being cloned as '{other}': wait for that, or call it off with 'godwit vm clone {vm} --cancel'"
                )));
            }
        }
        let job = self.begin_clone(wish)?;
        Ok(VmAnswer::Cloning(Box::new(job.shown())))
    }

    /// How far it is.
    pub(crate) fn shown_cloning(&self) -> Cloning {
        let job = self.cloning.as_ref();
        job.map(|job| job.shown()).unwrap_or_default()
    }

    pub(crate) fn cancel_clone(&mut self) -> Reply {
        let job = self.cloning.as_ref();
        match job.filter(|job| job.is_under_way()) {
            Some(job) => {
                job.stop();
                self.done("is not cloned")
            }
            None => {
                let vm = &self.config.vm;
                Err(self.not_cloned(&format!("VM '{vm}' is not being cloned")))
            }
        }
    }

    fn begin_clone(&mut self, wish: CloneDisks) -> Result<Arc<CloneJob>, ApiError> {
        self.refuse_while_closing()?;
        self.refuse_while_moving()?;
        self.refuse_while_disks_move()?;
        let generation = self.must_hold()?;
        if self.hyper.is_none() {
            let settled = self.settle_images(generation);
            settled.map_err(|why| self.not_cloned(&why))?;
        }
        let is_frozen = wish.snapshot.is_some();
        let job = Arc::new(CloneJob::new(wish));
        let work: Work = match &self.hyper {
            Some(_) if !is_frozen => {
                let vm = &self.config.vm;
                return Err(self.not_cloned(&format!(
                    "VM '{vm}' is on, and its guest writes to its disks: stop it first with 'godwit vm stop {vm} --wait', or take a snapshot with 'godwit vm snapshot create {vm} NAME' and clone that with --snapshot NAME"
                )));
            }
            Some(hyper) => {
                let (disks, job) = (hyper.disks.clone(), Arc::clone(&job));
                let (config, paths) = (self.config.clone(), self.paths.clone());
                Box::new(move || {
                    let copied = disks.sources_of(job.wish()).and_then(|sources| {
                        // They may end meanwhile.
                        drop(disks);
                        // A guest that runs has its variables.
                        job.copy((&config, &paths), None, &sources)
                    });
                    Ok(ended(&job, (&config, &paths), copied))
                })
            }
            None => {
                let at_rest = self.at_rest(self.host_vm()?.spec, generation);
                let job = Arc::clone(&job);
                Box::new(move || {
                    let copied = at_rest.clone_disks(&job);
                    Ok(ended(&job, (&at_rest.config, &at_rest.paths), copied))
                })
            }
        };
        let order = match is_frozen {
            true => DiskOrder::CloneOfSnapshot,
            false => DiskOrder::Clone,
        };
        // Who asked hears how far it is, and asks again.
        let (reply, _) = sync_channel(1);
        self.begin_disk_order(order, Ok(work), reply);
        if self.disk_order.is_none() {
            return Err(internal("the kernel gives no thread to copy disks"));
        }
        self.cloning = Some(Arc::clone(&job));
        Ok(job)
    }

    fn not_cloned(&self, why: &str) -> ApiError {
        ApiError::new(ErrorCode::WrongState, why).on_host(&self.config.host)
    }
}

/// Until what was copied is taken, or removed.
fn ended(
    job: &CloneJob,
    context: (&VmProcessConfig, &Paths),
    copied: Result<(), ApiError>,
) -> VmAnswer {
    job.end(context, copied);
    VmAnswer::Done(String::new())
}
