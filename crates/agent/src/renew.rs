//! Renewing VM processes: each lives as long as its guest, and so do the faults of its version.
//!
//! Owns nothing. Who takes over does so as after a crash of the VM process, by the record and what lives; nothing about who
//! may run the VM is decided here. Refuses: a VM that is on its way, and one without a VM process.

use crate::agent::{ACT, Agent, NEED, READ, Reply, TOOLS, done, unexpected};
use crate::supervisor::Supervised;
use godwit_types::control_api::Done;
use godwit_types::host::{Check, CheckStatus};
use godwit_types::host_api::{HostVm, VmAnswer, VmRequest};
use godwit_types::version::VERSION;
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, VmName};
use std::sync::Arc;

/// What a VM process that says nothing of its version is called.
const UNTOLD: &str = "of a version that it does not tell";

fn version(vm: &HostVm) -> &str {
    vm.vm_process
        .as_ref()
        .map_or(UNTOLD, |build| build.version.as_str())
}

/// How many VM processes are not of the installed program's version.
pub(crate) fn check(vms: &[HostVm]) -> Check {
    let live = vms.iter().filter(|vm| vm.vm_process_pid.is_some());
    let (new, old): (Vec<_>, Vec<_>) = live.partition(|vm| version(vm) == VERSION);
    let others = old
        .iter()
        .map(|vm| format!("{} ({})", vm.spec.name, version(vm)));
    let (status, found, remedy) = match old.len() {
        0 => (
            CheckStatus::Ok,
            format!("{} VM processes, all of Godwit {VERSION}", new.len()),
            "",
        ),
        count => (
            CheckStatus::Warning,
            format!(
                "{count} of {} VM processes are not of the installed Godwit {VERSION}: {}",
                count + new.len(),
                others.take(5).collect::<Vec<_>>().join(", ")
            ),
            "godwit vm renew --all",
        ),
    };
    Check {
        name: "vm-processes".into(),
        status,
        found,
        remedy: remedy.into(),
    }
}

impl Agent {
    /// Has a VM process become the installed program, in which it goes on. One that is of an older version, and knows of no such
    /// request, has not.
    async fn has_become_another(&self, vm: &Arc<Supervised>, pid: i32) -> Reply<bool> {
        let program = self.supervisor.program().to_string_lossy().into_owned();
        vm.tell().map_err(|error| {
            let message = format!("what its VM process is to know cannot be written: {error}");
            ApiError::new(ErrorCode::Internal, message)
        })?;
        // None is started beside it while it does not answer.
        let _held = vm.hold_off();
        match asked_to(vm, &VmRequest::Renew { program }).await {
            Ok(()) => {}
            Err(error) if error.code == ErrorCode::InvalidRequest => return Ok(false),
            Err(refused) => return Err(refused),
        }
        match vm.became_another(pid, TOOLS).await {
            true => Ok(true),
            false => Err(does_not(vm, "does not become another program")),
        }
    }

    /// Has a VM process of the installed program take the guest over, which goes on meanwhile.
    pub(crate) async fn renew(&self, name: &VmName) -> Reply<Done> {
        let vm = self.known(name)?;
        let Some(pid) = vm.live_pid() else {
            let message = format!(
                "VM '{name}' has no VM process on host '{}': the next one will be of Godwit {VERSION}",
                self.host()
            );
            return Err(ApiError::new(ErrorCode::WrongState, message));
        };
        let before = status(&vm, name).await?;
        must_rest(&vm, &before).await?;
        if !self.has_become_another(&vm, pid).await? {
            give_way(&vm, pid).await?;
        }
        vm.need(NEED).await?;
        let after = status(&vm, name).await?;
        Ok(done(format!(
            "VM '{name}' has a VM process of Godwit {} on host '{}', the one before was {}",
            version(&after),
            self.host(),
            version(&before)
        )))
    }
}

/// It may end before its answer is out; what counts is that it ends.
async fn asked_to(vm: &Supervised, request: &VmRequest) -> Reply<()> {
    match vm.ask(request, ACT).await {
        Ok(_) => Ok(()),
        Err(error) if error.code == ErrorCode::Hypervisor => Ok(()),
        Err(refused) => Err(refused),
    }
}

/// An older VM process ends, and the next one takes its QEMU over.
async fn give_way(vm: &Supervised, pid: i32) -> Reply<()> {
    let request = VmRequest::Detach {
        unless_moving: true,
    };
    asked_to(vm, &request).await?;
    match vm.gave_way(pid, TOOLS).await {
        true => Ok(()),
        false => Err(does_not(vm, "does not end")),
    }
}

fn does_not(vm: &Supervised, what: &str) -> ApiError {
    let name = &vm.config().vm;
    let message = format!("the VM process of '{name}' {what}: see its log");
    ApiError::new(ErrorCode::Locked, message)
}

async fn status(vm: &Supervised, name: &VmName) -> Reply<HostVm> {
    match vm.ask(&VmRequest::Status, READ).await? {
        VmAnswer::Status(status) => Ok(status.vm),
        _ => Err(unexpected(name)),
    }
}

/// An old VM process would end in the middle of a migration: it does not know that it should refuse.
async fn must_rest(process: &Supervised, vm: &HostVm) -> Reply<()> {
    let name = &vm.spec.name;
    let refuse = |code: ErrorCode, why: String| {
        let message = format!("VM '{name}' keeps its VM process: {why}");
        Err(ApiError::new(code, message))
    };
    if let Some(migration) = vm.migration.clone() {
        let request = VmRequest::Report {
            migration: migration.clone(),
        };
        let over = match process.ask(&request, READ).await {
            Ok(VmAnswer::Report(report)) => report.outcome.is_some(),
            Ok(_) => return Err(unexpected(name)),
            Err(error) => error.code == ErrorCode::UnknownMigration,
        };
        if !over {
            let why = format!("migration '{migration}' is under way, wait for its end");
            return refuse(ErrorCode::AlreadyMigrating, why);
        }
    }
    match vm.state {
        VmState::InDoubt | VmState::Incoming | VmState::HandingOver => {
            let code = match vm.state {
                VmState::InDoubt => ErrorCode::WrongState,
                _ => ErrorCode::AlreadyMigrating,
            };
            refuse(
                code,
                format!("it is {}, see 'godwit vm show {name}'", vm.state),
            )
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "renew_tests.rs"]
mod tests;
