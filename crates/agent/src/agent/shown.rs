//! VMs as this host tells of them: by a VM process that answers, else by the record, with what a person can do.
//!
//! Owns nothing. Refuses: a VM without a description left out of a list.

use super::{Agent, READ, Reply, blocking};
use crate::evidence;
use crate::launch::{self};
use crate::life::{Life, phase_wants_process};
use godwit_ownership::HostRecord;
use godwit_types::host_api::{HostVm, VmAnswer, VmRequest};
use godwit_types::vm::{DiskSpec, VmSpec, VmState};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::sync::Arc;

impl Agent {
    /// All VMs, each asked at the same time.
    pub(crate) async fn vms(self: &Arc<Self>) -> Vec<HostVm> {
        let names = self.supervisor.names();
        let all = names.iter().filter_map(|name| self.supervisor.find(name));
        let (live, others): (Vec<_>, Vec<_>) = all.partition(|vm| vm.is_live());
        let mut asked = tokio::task::JoinSet::new();
        for vm in live {
            let agent = self.clone();
            asked.spawn(async move { agent.vm(&vm.config().vm).await });
        }
        let agent = self.clone();
        let read = blocking(move || {
            let read = others
                .iter()
                .map(|vm| agent.read_vm(&vm.config().vm, &vm.life()));
            Ok(read.flatten().collect::<Vec<_>>())
        });
        let mut vms = read.await.unwrap_or_default();
        vms.extend(asked.join_all().await.into_iter().flatten());
        vms.sort_by(|a, b| a.spec.name.cmp(&b.spec.name));
        vms
    }

    /// One VM, from its process or its record.
    pub(crate) async fn vm(self: &Arc<Self>, name: &VmName) -> Reply<HostVm> {
        let vm = self.known(name)?;
        if vm.is_live()
            && let Ok(VmAnswer::Status(status)) = vm.ask(&VmRequest::Status, READ).await
        {
            let mut vm = status.vm;
            if vm.holds() && vm.spec.disks.iter().any(DiskSpec::changes_hands) {
                let (agent, name) = (self.clone(), name.clone());
                vm.images = blocking(move || Ok(agent.records.images(&name))).await?;
            }
            self.boots.show(&mut vm, self.host(), &self.log_of(name));
            self.closing.show(&mut vm, self.host());
            return Ok(as_is_here(vm));
        }
        let (agent, name, life) = (self.clone(), name.clone(), vm.life());
        blocking(move || agent.read_vm(&name, &life)).await
    }

    /// Where the log of a VM's process is.
    fn log_of(&self, vm: &VmName) -> String {
        let log = self.run_dir(vm).join(launch::LOG_FILE);
        log.display().to_string()
    }

    fn read_vm(&self, name: &VmName, life: &Life) -> Reply<HostVm> {
        let record = self.records.read(name)?;
        let mut vm = match self.records.spec(name) {
            Ok(None) => self.undescribed(name, &record, life)?,
            Ok(Some(spec)) => self.records.host_vm(&record, spec, life),
            Err(error) => {
                let mut vm = self.records.host_vm(&record, unknown(name)?, life);
                vm.note = Some(error.message);
                vm
            }
        };
        if vm.spec.disks.iter().any(DiskSpec::changes_hands) {
            vm.images = self.records.images(name);
        }
        self.boots.show(&mut vm, self.host(), &self.log_of(name));
        self.closing.show(&mut vm, self.host());
        if self.is_denied_by(name, &record) {
            let run_dir = self.run_dir(name);
            vm.state = VmState::Unreachable;
            vm.qemu_pid = evidence::qemu_pid(&run_dir);
            vm.note = Some(denied_note(name, self.host(), vm.qemu_pid));
        }
        Ok(as_is_here(vm))
    }

    /// Whether the VM's QEMU may live although its record says that nothing of the VM is here: the state directory is an
    /// older copy.
    pub(crate) fn is_denied_by_its_record(&self, name: &VmName) -> Reply<bool> {
        Ok(self.is_denied_by(name, &self.records.read(name)?))
    }

    /// As [`Agent::is_denied_by_its_record`], by a record that was just read.
    fn is_denied_by(&self, name: &VmName, record: &HostRecord) -> bool {
        let is_here = record.may_hold() || phase_wants_process(&record.phase);
        !is_here && evidence::qemu_may_live(&self.run_dir(name))
    }

    /// A VM without a description, which this host may hold, or of which something may live.
    fn undescribed(&self, name: &VmName, record: &HostRecord, life: &Life) -> Reply<HostVm> {
        let may_hold = record.may_hold();
        if !may_hold && !self.may_live(name)? {
            return Err(self.unknown_vm(name));
        }
        let mut vm = self.records.host_vm(record, unknown(name)?, life);
        if may_hold && !evidence::qemu_may_live(&self.run_dir(name)) {
            let note = || missing_note(name, self.host());
            vm.note.get_or_insert_with(note);
            return Ok(vm);
        }
        vm.state = VmState::Unreachable;
        vm.note = Some(format!(
            "something of it lives in {}, and its description is gone: was the state directory put back?",
            self.run_dir(name).display()
        ));
        Ok(vm)
    }

    pub(super) fn unknown_vm(&self, name: &VmName) -> ApiError {
        let message = format!(
            "host '{}' has no VM '{name}': see 'godwit vm list'",
            self.host()
        );
        ApiError::new(ErrorCode::UnknownVm, message)
    }
}

/// Without the user data where this host may not hold the VM: whoever may ask here needs not be told of what left, or never came.
fn as_is_here(mut vm: HostVm) -> HostVm {
    if !vm.claim.may_hold()
        && let Some(told) = &mut vm.spec.cloud_init
    {
        told.user_data = None;
    }
    vm
}

/// What stands for the description of a VM that has none that can be read.
fn unknown(name: &VmName) -> Reply<VmSpec> {
    let text = format!("name = \"{name}\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/unknown\"\n");
    VmSpec::from_toml(&text).map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))
}

/// What a person does about a VM whose description was not written, or was lost.
fn missing_note(vm: &VmName, host: &HostName) -> String {
    format!(
        "host {host} has no description of it; the controller writes it anew with the next 'godwit vm start {vm}', once the VM is off"
    )
}

/// What a person does about a guest that lives although the record says that it is not here.
fn denied_note(vm: &VmName, host: &HostName, pid: Option<i32>) -> String {
    let pid = pid.map_or_else(String::new, |pid| format!(" (process {pid})"));
    format!(
        "a QEMU of it{pid} lives on host {host}, though the record there says that the VM is not on that host: its state directory is an older copy; nothing is started in its place; 'godwit vm stop {vm} --force --host {host}' ends that guest"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{TestHost, spec};
    use godwit_ownership::{Phase, Power};
    use godwit_types::vm::CloudInit;
    use godwit_types::{Generation, MigrationId};

    #[test]
    fn a_host_that_once_held_a_vm_shows_nobody_its_user_data() {
        let (host, mut described) = (TestHost::new(), spec("web"));
        described.cloud_init = Some(CloudInit {
            user_data: Some("#!secret".into()),
            ..CloudInit::default()
        });
        let generation = Generation(1);
        let holds = Phase::Holds {
            generation,
            power: Power::Off,
            unconfirmed: None,
        };
        let moved = Phase::Moved {
            generation,
            migration: MigrationId::new("m").unwrap(),
            to: HostName::new("b").unwrap(),
        };
        for (phase, is_shown) in [(holds, true), (moved, false), (Phase::Absent, false)] {
            let record = HostRecord {
                phase,
                ..HostRecord::absent(described.name.clone())
            };
            let records = host.records();
            let vm = as_is_here(records.host_vm(&record, described.clone(), &Life::Idle));
            let told = vm.spec.cloud_init.unwrap().user_data;
            assert_eq!(told.is_some(), is_shown, "{:?}", record.phase);
        }
    }
}
