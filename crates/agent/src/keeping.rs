//! What the agent does to a VM's durable files itself: makes it known, forgets it, gives up a damaged record.
//!
//! Part of [`Agent`]. No VM process is started meanwhile. Refuses: to write behind the back of a VM process whose VM has
//! a guest.

use crate::agent::{ACT, Agent, NEED, READ, Reply, TOOLS, blocking, done, unexpected};
use crate::supervisor::{HoldOff, Supervised};
use godwit_qemu::layered::forget_maps;
use godwit_types::control_api::Done;
use godwit_types::host_api::{PutVm, VmAnswer, VmRequest};
use godwit_types::site::{Claim, SiteAnswer};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, Generation, HostName, VmName};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What was decided for a VM does not hold for what it is now.
pub(crate) fn changed(vm: &VmName, host: &HostName) -> ApiError {
    let message =
        format!("VM '{vm}' on host '{host}' has changed since it was looked at: ask again");
    ApiError::new(ErrorCode::WrongState, message).on_host(host)
}

impl Agent {
    /// Makes a VM known, or updates a stopped one.
    pub(crate) async fn put_vm(self: &Arc<Self>, request: PutVm) -> Reply<Done> {
        request
            .spec
            .check()
            .map_err(|error| ApiError::new(ErrorCode::InvalidVm, error.to_string()))?;
        let name = request.spec.name.clone();
        let vm = self.supervised(&name);
        let (agent, of) = (self.clone(), name.clone());
        // Of a record that cannot be read its VM process may be the last that knows what it said.
        blocking(move || agent.records.read(&of).map(drop)).await?;
        let held = self.release(&vm).await?;
        let agent = self.clone();
        blocking(move || {
            agent.refuse_reserved_files(&request.spec)?;
            agent.must_not_live(&request.spec.name)?;
            agent.reports.settle_last(&request.spec.name);
            agent.records.put(&request)?;
            match request.expect {
                Some(_) => agent.site.granted(&request.spec.name, request.generation),
                None => Ok(()),
            }
        })
        .await?;
        drop(held);
        Ok(done(format!(
            "VM '{name}' is known to host '{}'",
            self.host()
        )))
    }

    /// Forgets a stopped VM. One whose QEMU died is powered off first.
    pub(crate) async fn delete_vm(self: &Arc<Self>, name: &VmName) -> Reply<Done> {
        let vm = self.known(name)?;
        let seen = self.held(name).await?;
        self.delete_seen(&vm, seen).await
    }

    /// Forgets a VM that another host holds by a newer word, if it is still held here as it was when that was heard.
    pub(crate) async fn give_up(self: &Arc<Self>, name: &VmName, judged: Generation) -> Reply<()> {
        let vm = self.known(name)?;
        if self.held(name).await? != Some(judged) {
            return Err(changed(name, self.host()));
        }
        self.delete_seen(&vm, Some(judged)).await.map(drop)
    }

    /// Under which generation this host holds the VM by its record.
    async fn held(self: &Arc<Self>, name: &VmName) -> Reply<Option<Generation>> {
        let (agent, name) = (Arc::clone(self), name.clone());
        blocking(move || Ok(agent.records.read(&name)?.may_run())).await
    }

    /// Forgets a VM that was seen to be held under this generation, or not at all: what came since stays.
    async fn delete_seen(
        self: &Arc<Self>,
        vm: &Arc<Supervised>,
        seen: Option<Generation>,
    ) -> Reply<Done> {
        let name = &vm.config().vm;
        self.power_off_the_dead(vm, seen).await?;
        let held = self.release(vm).await?;
        let (agent, vm_name) = (Arc::clone(self), name.clone());
        let run = vm.run_dir().to_owned();
        blocking(move || {
            agent.must_not_live(&vm_name)?;
            let deleted = agent.records.delete(&vm_name, seen);
            // What its processes left of what its guest wrote last is memory, by which nobody goes on.
            deleted.inspect(|()| forget_maps(&run, &BTreeSet::new()))
        })
        .await?;
        self.supervisor.forget(name);
        drop(held);
        self.no_boot_wanted(name);
        self.removed.begin_anew(name);
        Ok(done(format!(
            "VM '{name}' is deleted from host '{}'",
            self.host()
        )))
    }

    /// A VM that should run and has no guest is off from now on.
    async fn power_off_the_dead(
        self: &Arc<Self>,
        vm: &Supervised,
        seen: Option<Generation>,
    ) -> Reply<()> {
        let name = &vm.config().vm;
        if !self.records.needs_process(name) && self.living(name).await?.is_none() {
            return Ok(());
        }
        vm.need(NEED).await?;
        let crashed = self.state_of(vm).await? == VmState::Crashed;
        if let Some(generation) = seen.filter(|_| crashed) {
            // Between the look and this its QEMU may have been started anew, which the VM process alone can tell.
            vm.ask(&VmRequest::PowerOffDead { generation }, ACT).await?;
        }
        Ok(())
    }

    /// How the VM is, as its process says. One that has no description to show is off if its record says so, or that it is not here: its process
    /// is about to end then, and keeps nobody from starting it.
    async fn state_of(&self, vm: &Supervised) -> Reply<VmState> {
        let name = &vm.config().vm;
        match vm.ask(&VmRequest::Status, READ).await {
            Ok(VmAnswer::Status(status)) => Ok(status.vm.state),
            Ok(_) => Err(unexpected(name)),
            Err(error)
                if error.code == ErrorCode::UnknownVm
                    && (self.records.is_off(name) || self.records.is_absent(name)) =>
            {
                Ok(VmState::Stopped)
            }
            Err(error) => Err(error),
        }
    }

    /// Ends the VM process of a VM that has no guest, so that its record may be written here; none is started before the
    /// guard is dropped.
    async fn release(self: &Arc<Self>, vm: &Arc<Supervised>) -> Reply<HoldOff> {
        // One that lives and was not found yet is found first: none is started once that is held off.
        let found = self.living(&vm.config().vm).await?;
        let held = vm.hold_off();
        if found.is_none() {
            return Ok(held);
        }
        let state = self.state_of(vm).await?;
        if !state.is_off() {
            let name = &vm.config().vm;
            let message = format!(
                "VM '{name}' is {state} on host '{}': stop it first",
                self.host()
            );
            return Err(ApiError::new(ErrorCode::WrongState, message));
        }
        let detach = VmRequest::Detach {
            unless_moving: false,
        };
        match vm.ask(&detach, ACT).await {
            // It does something with the VM's disks.
            Err(refused) if refused.code == ErrorCode::WrongState => return Err(refused),
            // It may end before its answer is out; what counts is that it ends.
            _ => {}
        }
        if vm.ended(TOOLS).await {
            return Ok(held);
        }
        Err(ApiError::new(
            ErrorCode::Locked,
            format!("the VM process of '{}' does not end", vm.config().vm),
        ))
    }

    /// A VM process without a guest that was started by an agent with another configuration would start another QEMU than
    /// host.toml names: it ends, and the next one is told what holds now.
    pub(crate) async fn renew_idle(self: &Arc<Self>, vm: &Arc<Supervised>) -> Reply<()> {
        if !vm.is_live() || !vm.was_told_otherwise() {
            return Ok(());
        }
        match self.release(vm).await {
            Ok(held) => drop(held),
            // It has a guest, or is receiving one: that goes on as it was begun.
            Err(error) if error.code == ErrorCode::WrongState => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Once the record is put aside, this host says that it neither gave nor took the VM, and a host in the middle of a
    /// handover with it acts on that: it would end what it was given, or let run on what it gave.
    async fn nobody_waits_for_word_of(self: &Arc<Self>, name: &VmName) -> Reply<()> {
        let (_, mut answers) = self.ask_about(name, Generation::default());
        while let Some(answer) = answers.join_next().await {
            let Ok((
                Some(SiteAnswer {
                    from: Some(other),
                    records,
                    ..
                }),
                _,
            )) = answer
            else {
                continue;
            };
            let mut claims = records.iter().filter(|record| record.vm == *name);
            if let Some(has) = claims.find_map(|record| self.waits_with(&record.claim)) {
                let me = self.host();
                let message = format!(
                    "host {other} {has}. A person ends that handover first: stop the agent of host {me}, say 'godwit host fenced {me}' where the controller is, and run the 'godwit vm resolve' that 'godwit vm show {name}' prints there; then start the agent and put the record aside"
                );
                return Err(ApiError::new(ErrorCode::InDoubt, message));
            }
        }
        Ok(())
    }

    /// What a host with this claim has, if the end of its handover is this host's to tell.
    fn waits_with(&self, claim: &Claim) -> Option<&'static str> {
        match claim {
            Claim::Promised { from, .. } if from == self.host() => Some(
                "was given the VM by this host and has the guest's memory, perhaps the only one that is left: it is discarded when the handover ends without this host's record, and the VM then starts anew",
            ),
            Claim::Gave { to, .. } if to == self.host() => Some(
                "gave the VM to this host and still has its guest as it was then, which would run on by this host's word that it took nothing",
            ),
            _ => None,
        }
    }

    /// Gives up a VM's damaged record. A QEMU of it would be orphaned, so there must be none.
    pub(crate) async fn forget_record(self: &Arc<Self>, name: &VmName) -> Reply<Done> {
        if !self.records.knows(name) {
            let message = format!("host '{}' has no record of VM '{name}'", self.host());
            return Err(ApiError::new(ErrorCode::UnknownVm, message).on_host(self.host()));
        }
        let vm = self.supervised(name);
        let held = vm.hold_off();
        self.nobody_waits_for_word_of(name).await?;
        let (agent, name) = (self.clone(), name.clone());
        let kept = blocking(move || {
            if agent.may_live(&name)? {
                let message = format!(
                    "VM '{name}' may have a QEMU or a VM process on host '{}', which could not be stopped once its record is put aside: end those processes first (QEMU's number is in {}/qemu.json, and its command line names {}/{name}.NUMBER)",
                    agent.host(),
                    vm.run_dir().display(),
                    agent.config.ram_dir().display()
                );
                return Err(ApiError::new(ErrorCode::WrongState, message));
            }
            let row = agent.site.with(|site| site.table().vms.get(&name).cloned());
            let known = row.as_ref().map(|row| row.held).unwrap_or_default();
            // Whoever gave it the VM asks whether it took it: a no would let an older guest run on.
            let held = row.filter(|row| row.holder.as_ref() == Some(agent.host()));
            let held = held.map(|row| row.held).unwrap_or_default();
            agent.records.forget_record(&name, known, held)
        });
        let kept = kept.await?;
        drop(held);
        Ok(done(format!(
            "the damaged record is kept as {}; host '{}' holds nothing of this VM and takes nothing that is old",
            kept.display(),
            self.host()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::snapshots::states_map_name;

    #[test]
    fn a_vm_that_is_deleted_leaves_no_map_of_states() {
        let run = tempfile::tempdir().unwrap();
        let at = |name: &str| run.path().join(name);
        let map = states_map_name(7);
        for name in [&*map, "disks.json"] {
            std::fs::write(at(name), "").unwrap();
        }
        forget_maps(run.path(), &BTreeSet::new());
        assert!(!at(&map).exists() && at("disks.json").exists());
        forget_maps(&at("nowhere"), &BTreeSet::new());
    }
}
