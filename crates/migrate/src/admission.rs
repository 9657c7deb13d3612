//! What a VM process refuses to begin as part of a migration, by what the migration and the VM are.
//!
//! Pure. Refuses: a version of the control channel that this build does not speak, and a disk that does not travel.

use godwit_types::migration::MigrationSpec;
use godwit_types::version::{MIGRATION, VERSION};
use godwit_types::vm::VmSpec;
use godwit_types::{ApiError, ErrorCode};

/// The version of the control channel that the controller found both sides to speak.
pub fn agreed_protocol(spec: &MigrationSpec) -> Result<u32, ApiError> {
    let agreed = spec.control_protocol.unwrap_or(MIGRATION.max);
    if MIGRATION.contains(agreed) {
        return Ok(agreed);
    }
    let message = format!(
        "migration '{}' is to speak migration protocol {agreed}, and the VM process on host {}, Godwit {VERSION}, speaks {MIGRATION}: run 'godwit vm renew {}' there",
        spec.id, spec.source.host, spec.vm
    );
    Err(ApiError::new(ErrorCode::Incompatible, message))
}

/// What is written to a disk does not travel: the destination's image would be another one.
pub fn refuse_writable_disks(spec: &VmSpec) -> Result<(), ApiError> {
    match spec.disks.iter().find(|disk| !disk.read_only) {
        None => Ok(()),
        Some(disk) => {
            let message = format!(
                "VM '{}' has the writable disk '{}', which cannot move yet: make it read_only = true or remove it, with the VM stopped",
                spec.name, disk.name
            );
            Err(ApiError::new(ErrorCode::NotMigratable, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writable_disk_is_refused_by_name() {
        let spec = |read_only| {
            let text = format!(
                "name = \"web\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/k\"\n[[disk]]\nname = \"data\"\npath = \"/d\"\nread_only = {read_only}"
            );
            VmSpec::from_toml(&text).unwrap()
        };
        let refused = refuse_writable_disks(&spec(false)).unwrap_err();
        assert_eq!(refused.code, ErrorCode::NotMigratable);
        let message = "VM 'web' has the writable disk 'data', which cannot move yet: ";
        assert!(refused.message.starts_with(message), "{}", refused.message);
        assert!(refuse_writable_disks(&spec(true)).is_ok());
    }
}
