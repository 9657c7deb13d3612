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
        let request = VmRequest::Detach {
            unless_moving: true,
        };
        match vm.ask(&request, ACT).await {
            // It may end before its answer is out; what counts is that it ends.
            Ok(_) => {}
            Err(error) if error.code == ErrorCode::Hypervisor => {}
            Err(refused) => return Err(refused),
        }
        if !vm.gave_way(pid, TOOLS).await {
            let message = format!("the VM process of '{name}' does not end: see its log");
            return Err(ApiError::new(ErrorCode::Locked, message));
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
