//! What the VM's thread does for snapshots of the VM's disks.
//!
//! Part of [`Vm`]; the work itself is in [`crate::disks`]. Refuses: a VM that this host does not hold, one that moves or whose disks do, disks that QEMU itself
//! serves, to go back to a snapshot while a guest has the disks, and to list them by ever more threads where storage does not answer.

use crate::ask::AskSnapshots;
use crate::disk_orders::{DiskOrder, Work};
use crate::disks::{AtRest, Disks};
use crate::guest::Guest;
use crate::vm::Vm;
use godwit_migrate::admission::agreed_protocol;
use godwit_types::host_api::VmAnswer;
use godwit_types::migration::MigrationSpec;
use godwit_types::snapshots::{Quiesce, Snapshots, TakeSnapshot};
use godwit_types::version::MIGRATION_WITH_SNAPSHOTS;
use godwit_types::vm::VmSpec;
use godwit_types::{ApiError, ErrorCode, Generation, SnapshotName};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// So many threads list at once.
const LISTS_MAX: usize = 4;

/// Threads that list: each has one of it for as long as it lives.
#[derive(Debug, Default)]
pub(crate) struct Lists(Arc<()>);

impl Lists {
    fn begin(&self) -> Option<Arc<()>> {
        (Arc::strong_count(&self.0) <= LISTS_MAX).then(|| Arc::clone(&self.0))
    }
}

/// A guest's disks, or those of a VM that has none.
enum Which {
    Served(Disks, Option<Arc<Guest>>),
    AtRest(Box<AtRest>),
}

impl Vm {
    /// Begins to change snapshots as it is asked; the answer comes when that is done.
    pub(crate) fn snapshots(&mut self, ask: AskSnapshots, reply: SyncSender<VmAnswer>) {
        let work = self.work_on_snapshots(ask);
        self.begin_disk_order(DiskOrder::Snapshots, work, reply);
    }

    /// Tells which there are: nobody waits for it, and it waits for nobody.
    pub(crate) fn list_snapshots(&mut self, reply: SyncSender<VmAnswer>) {
        let answers = reply.clone();
        let listed = self.may_list().and_then(|turn| {
            let which = self.which_disks()?;
            let list = move || {
                let listed = which.list().map(VmAnswer::Snapshots);
                // Whoever has the answer may ask again at once.
                drop(turn);
                let _ = reply.send(listed.unwrap_or_else(VmAnswer::Error));
            };
            let thread = std::thread::Builder::new().name("snapshots".into());
            thread.spawn(list).map_err(crate::hypervisor::internal)
        });
        if let Err(error) = listed {
            // The caller may have gone.
            drop(answers.send(VmAnswer::Error(error)));
        }
    }

    fn may_list(&self) -> Result<Arc<()>, ApiError> {
        self.lists.begin().ok_or_else(|| {
            let (vm, host) = (&self.config.vm, &self.config.host);
            let message = format!(
                "the snapshots of VM '{vm}' are being listed for {LISTS_MAX} others, and the storage of its disks does not answer: see that it does, and try again"
            );
            ApiError::new(ErrorCode::WrongState, message).on_host(host)
        })
    }

    fn work_on_snapshots(&mut self, ask: AskSnapshots) -> Result<Work, ApiError> {
        self.refuse_while_closing()?;
        self.refuse_while_moving()?;
        self.refuse_while_disks_move()?;
        let generation = self.must_hold()?;
        let settled = match &self.hyper {
            None => self.settle_images(generation),
            Some(_) => Ok(()),
        };
        settled.map_err(|message| ApiError::new(ErrorCode::WrongState, message))?;
        let which = self.which_disks()?;
        Ok(match ask {
            AskSnapshots::Take(wish) => {
                wish.check()
                    .map_err(|error| error.on_host(&self.config.host))?;
                Box::new(move || which.take(&wish).map(VmAnswer::Done))
            }
            AskSnapshots::Revert(name) => {
                let at_rest = self.must_be_at_rest(which, &name)?;
                Box::new(move || at_rest.revert_snapshot(&name).map(VmAnswer::Done))
            }
            AskSnapshots::Delete(name) => Box::new(move || which.delete(&name).map(VmAnswer::Done)),
        })
    }

    /// Why its disks do not go to another host, if they do not.
    pub(crate) fn keeps_for_snapshots(&self) -> Option<String> {
        let disks = self.hyper.as_ref().map(|hyper| &hyper.disks)?;
        let vm = &self.config.vm;
        if let Some((disk, why)) = disks.shared_and_linked() {
            return Some(format!("disk '{disk}' of VM '{vm}' is not moved: {why}"));
        }
        let disk = disks.shared_with_snapshots()?;
        Some(format!(
            "disk '{disk}' of VM '{vm}' is on shared storage and has snapshots, or images of deleted ones or redo logs of a failed move that are not merged yet, and those do not change hands yet: delete its snapshots first, if it has any ('godwit vm snapshot list {vm}' tells when all is merged, and why it is not)"
        ))
    }

    /// Refuses to leave with linked disks or snapshots on shared storage, and with any for a host that does not know what they are.
    pub(crate) fn refuse_with_snapshots(&self, spec: &MigrationSpec) -> Result<(), ApiError> {
        if let Some(why) = self.keeps_for_snapshots() {
            return Err(ApiError::new(ErrorCode::NotMigratable, why).on_host(&self.config.host));
        }
        if agreed_protocol(spec)? >= MIGRATION_WITH_SNAPSHOTS {
            return Ok(());
        }
        let to = &spec.destination.host;
        let disks = self.hyper.as_ref().map(|hyper| &hyper.disks);
        let Some(disk) = disks.and_then(|disks| disks.with_snapshots(&spec.disks)) else {
            return Ok(());
        };
        let vm = &self.config.vm;
        let message = format!(
            "disk '{disk}' of VM '{vm}' has snapshots, or images of deleted ones that are not merged yet, and Godwit on host '{to}' is of a version that takes none along: install a newer one there, or delete its snapshots first ('godwit vm snapshot list {vm}')"
        );
        Err(ApiError::new(ErrorCode::Incompatible, message).on_host(&self.config.host))
    }

    fn must_be_at_rest(&self, which: Which, name: &SnapshotName) -> Result<AtRest, ApiError> {
        match which {
            Which::AtRest(at_rest) => Ok(*at_rest),
            Which::Served(..) => {
                let (vm, host) = (&self.config.vm, &self.config.host);
                let message = format!(
                    "VM '{vm}' is on: its disks cannot become what they were at snapshot '{name}' under its guest; stop it first with 'godwit vm stop {vm} --wait'"
                );
                Err(ApiError::new(ErrorCode::WrongState, message).on_host(host))
            }
        }
    }

    fn which_disks(&mut self) -> Result<Which, ApiError> {
        let spec = self.host_vm()?.spec;
        if !spec.serves_disks() {
            let (vm, host) = (&self.config.vm, &self.config.host);
            let message = format!(
                "QEMU itself serves the disks of VM '{vm}', which is of hardware version 1: snapshots are taken of those that its VM process serves, from version 2 on"
            );
            return Err(ApiError::new(ErrorCode::WrongState, message).on_host(host));
        }
        if let Some(hyper) = &self.hyper {
            return Ok(Which::Served(hyper.disks.clone(), hyper.guest.clone()));
        }
        let generation = self.must_hold()?;
        Ok(Which::AtRest(Box::new(self.at_rest(spec, generation))))
    }

    /// The disks of a VM of this description, which has no guest and is held under this generation.
    pub(crate) fn at_rest(&self, spec: VmSpec, generation: Generation) -> AtRest {
        AtRest {
            config: self.config.clone(),
            paths: self.paths.clone(),
            spec,
            generation,
        }
    }
}

impl Which {
    fn list(&self) -> Result<Snapshots, ApiError> {
        match self {
            Self::Served(disks, _) => disks.list_snapshots(),
            Self::AtRest(disks) => disks.list_snapshots(),
        }
    }

    fn take(&self, wish: &TakeSnapshot) -> Result<String, ApiError> {
        match self {
            Self::Served(disks, guest) => {
                // Its QEMU may not answer: it is asked from here, where nobody waits.
                let freezer = guest.as_ref().filter(|_| wish.quiesce != Quiesce::Never);
                disks.take_snapshot(wish, freezer.and_then(|guest| guest.freezer()))
            }
            Self::AtRest(disks) => disks.take_snapshot(wish),
        }
    }

    fn delete(&self, name: &SnapshotName) -> Result<String, ApiError> {
        match self {
            Self::Served(disks, _) => disks.delete_snapshot(name),
            Self::AtRest(disks) => disks.delete_snapshot(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{LONG, Site, holds, open};
    use godwit_ownership::Power;
    use std::sync::mpsc::sync_channel;

    fn refused(vm: &mut Vm) -> ApiError {
        let (reply, answer) = sync_channel(1);
        vm.list_snapshots(reply);
        match answer.recv_timeout(LONG) {
            Ok(VmAnswer::Error(error)) => error,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn whoever_asks_for_a_list_is_answered_also_where_there_is_none_or_too_many_ask() {
        let site = Site::new();
        site.record(holds(Power::Off));
        let mut vm = open(&site);
        // QEMU serves its disks.
        let error = refused(&mut vm);
        assert!(error.message.contains("of hardware version 1"), "{error}");
        let turns: Vec<_> = (0..LISTS_MAX).map(|_| vm.may_list().unwrap()).collect();
        let error = refused(&mut vm);
        assert!(error.message.contains("does not answer"), "{error}");
        drop(turns);
        assert!(vm.may_list().is_ok());
    }
}
