//! What moves is the VM that the controller described: no source chooses what its destination opens and connects. Pure.
//!
//! Owns nothing. Refuses a source that speaks of another VM, describes it otherwise than here, or hands over hashes of
//! files that it does not boot from.

use crate::error::Outcome;
use crate::placement::place;
use crate::state::VmEntry;
use godwit_types::host_api::PreflightOutgoing;
use godwit_types::vm::Accelerator;
use godwit_types::{ApiError, ErrorCode, HostName, VmSpec};

/// The description with which this VM moves, when its source says this of it.
pub fn must_match(entry: &VmEntry, source: &HostName, said: &PreflightOutgoing) -> Outcome<VmSpec> {
    let told = &entry.as_told(&said.vm.spec);
    let described = match &entry.resolved {
        Some(resolved) => resolved,
        None if place::may_resolve_to(&entry.spec, told) => told,
        None => &entry.spec,
    };
    let runs = said.vm.accelerator.unwrap_or(described.accelerator);
    let differs = if told.name != described.name {
        Some(format!("answers for VM {} instead", told.name))
    } else if told != described {
        let what = differences(described, told).join(", ");
        Some(format!(
            "describes it otherwise than the controller ({what})"
        ))
    } else if described.accelerator != Accelerator::Auto && runs != described.accelerator {
        Some(format!("says that {runs} runs it"))
    } else {
        let is_foreign = |path: &&String| !boots_from(described, path);
        let mut paths = said.file_hashes.iter().map(|(path, _)| path);
        let foreign = paths.find(is_foreign);
        foreign.map(|_| "hands over hashes of files that it does not boot from".to_owned())
    };
    match differs {
        None => Ok(described.clone()),
        Some(what) => Err(lies(entry, source, &what)),
    }
}

fn boots_from(spec: &VmSpec, path: &str) -> bool {
    spec.boot_files().any(|file| file == path)
}

fn lies(entry: &VmEntry, source: &HostName, what: &str) -> ApiError {
    let name = &entry.spec.name;
    let message = format!(
        "host {source} was asked about VM {name} and {what}: nothing moves from there; if that host is to be trusted, stop the VM with 'godwit vm stop {name}' and start it on the other host"
    );
    ApiError::new(ErrorCode::Preflight, message).on_host(source)
}

/// The names of what differs, never what the host says there.
fn differences(described: &VmSpec, told: &VmSpec) -> Vec<&'static str> {
    let fields = [
        ("vcpus", described.vcpus == told.vcpus),
        ("memory_mib", described.memory_mib == told.memory_mib),
        ("cpu", described.cpu == told.cpu),
        ("machine", described.machine == told.machine),
        ("hardware", described.hardware == told.hardware),
        ("firmware", described.firmware == told.firmware),
        ("kernel", described.kernel == told.kernel),
        ("initramfs", described.initramfs == told.initramfs),
        ("cmdline", described.cmdline == told.cmdline),
        ("accelerator", described.accelerator == told.accelerator),
        ("encryption", described.encryption == told.encryption),
        ("on_crash", described.on_crash == told.on_crash),
        ("uid", described.uid == told.uid),
        // Its keys open the guest: a host that adds its own is refused.
        ("cloud_init", described.cloud_init == told.cloud_init),
        ("nic", described.nics == told.nics),
        ("disk", described.disks == told.disks),
    ];
    let differ = fields.into_iter().filter(|(_, same)| !same);
    differ.map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::Generation;
    use godwit_types::host_api::HostVm;
    use godwit_types::site::Claim;
    use godwit_types::vm::VmState;

    #[test]
    fn a_vm_that_has_moved_before_is_described_by_what_runs_it_and_moves_again() {
        let text = "name = \"web\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/k\"";
        let spec = VmSpec::from_toml(text).unwrap();
        let entry = VmEntry {
            spec: spec.clone(),
            resolved: Some(spec.clone()),
        };
        let moved = VmSpec {
            accelerator: Accelerator::Tcg,
            ..spec.clone()
        };
        let said = |spec: VmSpec| PreflightOutgoing {
            vm: HostVm {
                spec,
                state: VmState::Running,
                generation: Generation(3),
                claim: Claim::No,
                migration: None,
                accelerator: Some(Accelerator::Tcg),
                vm_process_pid: None,
                vm_process: None,
                qemu_pid: None,
                note: None,
                disks: Vec::new(),
                images: Vec::new(),
                guest: None,
            },
            passed: Vec::new(),
            refusals: Vec::new(),
            file_hashes: Vec::new(),
            disks: Vec::new(),
            uefi: None,
        };
        let source = HostName::new("b").unwrap();
        let taken = must_match(&entry, &source, &said(moved)).unwrap();
        assert_eq!(taken, spec);
        let other = VmSpec {
            kernel: "/other".into(),
            ..spec.clone()
        };
        assert!(must_match(&entry, &source, &said(other)).is_err());
        let told = VmSpec {
            cloud_init: Some(Default::default()),
            ..spec
        };
        let refused = must_match(&entry, &source, &said(told)).unwrap_err();
        assert!(refused.message.contains("cloud_init"), "{refused}");
    }
}
