//! Where what a guest wrote is: its own disks, its UEFI variables. Pure.
//!
//! Owns nothing. Refuses a start away from the only host that has it.

use crate::error::Outcome;
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, ErrorCode, HostName, VmSpec};

/// Where a VM's own disks were written last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WrittenOn {
    /// The VM has not run.
    Nowhere,
    Host(HostName),
    /// By a VM of this name that was deleted since.
    Former {
        /// Where it ran last; none where that host was removed.
        host: Option<HostName>,
        /// Whether a person named the host to start on.
        is_named: bool,
    },
    /// On a host that was removed since; a person names the host that has what was saved of it.
    Removed {
        /// Whether a person named the host to start on.
        is_named: bool,
    },
}

/// The host on which a VM that is described anew goes on, unless a person names another one: where the one before it ran last.
pub fn goes_on_at<'a>(spec: &VmSpec, written: &'a WrittenOn) -> Option<&'a HostName> {
    match written {
        WrittenOn::Former { host, .. } => disk_that_is_there(spec).and(host.as_ref()),
        _ => None,
    }
}

/// A disk of its host alone whose image is there before the VM starts the first time.
fn disk_that_is_there(spec: &VmSpec) -> Option<&DiskSpec> {
    let mut disks = spec.disks.iter();
    disks.find(|disk| disk.goes_along() && !disk.is_to_be_made())
}

/// Refuses a start away from the host that held the VM last while what its guest wrote to a disk is only there.
pub fn disks_are_there(spec: &VmSpec, written: &WrittenOn, to: &HostName) -> Outcome<()> {
    let mut disks = spec.disks.iter();
    let Some(disk) = disks.find(|disk| disk.goes_along()) else {
        return variables_are_there(spec, written, to);
    };
    if let WrittenOn::Former { host, is_named } = written {
        return match *is_named || host.as_ref() == Some(to) {
            true => Ok(()),
            false => former_disks_are_there(spec, host.as_ref(), to),
        };
    }
    let (vm, disk, path) = (&spec.name, &disk.name, &disk.path);
    let message = match written {
        WrittenOn::Host(last) if last != to => format!(
            "disk {disk} of VM {vm} is writable and was last written on host {last}, which {path} on host {to} may lack: start the VM on host {last}, from where it can move while it runs; if {path} is the same storage on both, set shared = true for the disk with 'godwit vm edit {vm} FILE'; if its guest never ran there, delete the VM with 'godwit vm delete {vm}', which removes no image, create it again, and start it with --on {to}"
        ),
        WrittenOn::Removed { is_named: false } => format!(
            "disk {disk} of VM {vm} is writable and was last written on a host that was removed, so any other {path} may be an older one: name the host that has the right one with 'godwit vm start {vm} --on HOST'"
        ),
        _ => return Ok(()),
    };
    Err(ApiError::new(ErrorCode::WrongState, message).on_host(to))
}

/// A migration may have left an older image of the deleted VM under the same path.
fn former_disks_are_there(spec: &VmSpec, former: Option<&HostName>, to: &HostName) -> Outcome<()> {
    let Some(disk) = disk_that_is_there(spec) else {
        return Ok(());
    };
    let (vm, disk, path) = (&spec.name, &disk.name, &disk.path);
    let ran_on = match former {
        Some(host) => format!("host {host}"),
        None => "a host that was removed".to_owned(),
    };
    let message = format!(
        "a VM {vm} that was deleted ran last on {ran_on}, and disk {disk} is described with an image that is there already, of which any other {path} may be an older one: name the host that has the right one with 'godwit vm start {vm} --on HOST'"
    );
    Err(ApiError::new(ErrorCode::WrongState, message).on_host(to))
}

/// Of a removed host's there is no copy: where a person wants it, the VM begins with empty ones.
fn variables_are_there(spec: &VmSpec, written: &WrittenOn, to: &HostName) -> Outcome<()> {
    if !spec.has_variables() {
        return Ok(());
    }
    let vm = &spec.name;
    let message = match written {
        WrittenOn::Host(last) if last != to => format!(
            "the UEFI variables of VM {vm} are on host {last}, where it ran last: start it there, and move it while it runs; if host {last} is lost, remove it from the site, and the VM begins with empty ones"
        ),
        WrittenOn::Removed { is_named: false } => format!(
            "the UEFI variables of VM {vm} were on a host that was removed: begin with empty ones on a host that you name, with 'godwit vm start {vm} --on HOST'"
        ),
        _ => return Ok(()),
    };
    Err(ApiError::new(ErrorCode::WrongState, message).on_host(to))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> VmSpec {
        VmSpec::from_toml("name = \"web\"\nvcpus = 1\nmemory_mib = 1024\nkernel = \"/k\"").unwrap()
    }

    #[test]
    fn a_vm_starts_elsewhere_only_if_all_that_was_written_is_there_too() {
        let name = |name: &str| HostName::new(name).unwrap();
        let (a, b) = (name("a"), name("b"));
        let disk = |name: &str, read_only, shared| godwit_types::vm::DiskSpec {
            read_only,
            shared,
            ..godwit_types::vm::DiskSpec::new(name, format!("/{name}.raw"))
        };
        let mut vm = spec();
        let on_a = WrittenOn::Host(a.clone());
        assert!(disks_are_there(&vm, &on_a, &b).is_ok());
        vm.disks = vec![disk("iso", true, false), disk("san", false, true)];
        assert!(disks_are_there(&vm, &on_a, &b).is_ok());
        vm.disks.push(disk("data", false, false));
        let error = disks_are_there(&vm, &on_a, &b).unwrap_err();
        assert_eq!(error.code, ErrorCode::WrongState);
        for text in [
            "disk data",
            "on host a",
            "/data.raw on host b",
            "shared = true",
            "never ran there, delete the VM",
        ] {
            assert!(error.message.contains(text), "{text}: {error}");
        }
        // Where it was, and where nobody wrote it, it may start.
        assert!(disks_are_there(&vm, &on_a, &a).is_ok());
        assert!(disks_are_there(&vm, &WrittenOn::Nowhere, &b).is_ok());
        // Of what a removed host wrote, a person says where it is now.
        let removed = |is_named| WrittenOn::Removed { is_named };
        let error = disks_are_there(&vm, &removed(false), &b).unwrap_err();
        assert!(error.message.contains("removed") && error.message.contains("--on HOST"));
        assert!(disks_are_there(&vm, &removed(true), &b).is_ok());
    }

    /// It began with an image that a migration had left on the other host, and lacked all that was written since.
    #[test]
    fn a_vm_that_is_described_anew_starts_where_the_deleted_one_of_its_name_ran_last() {
        let name = |name: &str| HostName::new(name).unwrap();
        let (a, b) = (name("a"), name("b"));
        let former = |host, is_named| WrittenOn::Former { host, is_named };
        let on_a = former(Some(a.clone()), false);
        let mut vm = spec();
        assert!(disks_are_there(&vm, &on_a, &b).is_ok(), "nothing of it");
        assert_eq!(goes_on_at(&vm, &on_a), None);
        vm.disks = vec![godwit_types::vm::DiskSpec::new("root", "/root.raw")];
        assert_eq!(goes_on_at(&vm, &on_a), Some(&a));
        assert!(disks_are_there(&vm, &on_a, &a).is_ok());
        let error = disks_are_there(&vm, &on_a, &b).unwrap_err();
        for text in [
            "on host a",
            "disk root",
            "/root.raw",
            "vm start web --on HOST",
        ] {
            assert!(error.message.contains(text), "{text}: {error}");
        }
        let removed = disks_are_there(&vm, &former(None, false), &a).unwrap_err();
        assert!(removed.message.contains("removed"), "{removed}");
        for host in [None, Some(a.clone())] {
            assert!(disks_are_there(&vm, &former(host, true), &b).is_ok());
        }
        // One that is made is no older one.
        vm.disks[0].size_gib = Some(1);
        assert!(disks_are_there(&vm, &on_a, &b).is_ok());
        assert_eq!(goes_on_at(&vm, &on_a), None);
    }

    #[test]
    fn a_vm_with_uefi_starts_where_its_variables_are() {
        let name = |name: &str| HostName::new(name).unwrap();
        let (a, b) = (name("a"), name("b"));
        let mut vm = spec();
        let on_a = WrittenOn::Host(a.clone());
        assert!(disks_are_there(&vm, &on_a, &b).is_ok());
        vm.firmware = godwit_types::vm::Firmware::Uefi;
        let error = disks_are_there(&vm, &on_a, &b).unwrap_err();
        assert!(error.message.contains("on host a"), "{error}");
        assert!(disks_are_there(&vm, &on_a, &a).is_ok());
        assert!(disks_are_there(&vm, &WrittenOn::Nowhere, &b).is_ok());
        let removed = |is_named| WrittenOn::Removed { is_named };
        let error = disks_are_there(&vm, &removed(false), &b).unwrap_err();
        assert!(error.message.contains("--on HOST"), "{error}");
        assert!(disks_are_there(&vm, &removed(true), &b).is_ok());
    }
}
