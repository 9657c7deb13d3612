//! What is refused as a migration, or as a part of one, by what the migration and the VM are.
//!
//! Pure. Refuses: a version of the control channel that this build does not speak, and a VM that stays where it is.

use godwit_types::cpu::CpuWish;
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

/// What in a VM's description keeps it where it is: its owner's word, its CPU, and what would lose writes. By this controller
/// and agents judge whether a VM may leave; whether a host can take it is another matter.
pub fn reasons_to_stay(spec: &VmSpec) -> Vec<ApiError> {
    let (vm, wish) = (&spec.name, CpuWish::parse(&spec.cpu));
    let fixed = (!spec.movable).then(|| {
        format!(
            "VM '{vm}' has movable = false: change that with 'godwit vm edit {vm} FILE' while it is stopped"
        )
    });
    let of_one_host = wish.is_of_one_host() && spec.movable;
    let cpu = of_one_host.then(|| wish.why_not_movable(vm));
    let reasons = fixed.into_iter().chain(cpu).map(stays);
    reasons.chain(losing_writes(spec)).collect()
}

/// Refuses a VM of which some writes would be lost on the way: the part of [`reasons_to_stay`] that VM processes look at
/// again. A CPU that is whatever its host has may run guests of its own, too; where one moves, agents have refused it.
pub fn refuse_losing_writes(spec: &VmSpec) -> Result<(), ApiError> {
    losing_writes(spec).next().map_or(Ok(()), Err)
}

fn losing_writes(spec: &VmSpec) -> impl Iterator<Item = ApiError> + '_ {
    let vm = &spec.name;
    let wish = CpuWish::parse(&spec.cpu);
    let nested = wish.nested().map(|feature| {
        format!(
            "VM '{vm}' has CPU feature '{feature}', with which it may run guests of its own, whose writes cannot be tracked: remove the feature, with the VM stopped"
        )
    });
    let writable = spec.disks.iter().filter(|disk| !disk.read_only);
    let disks = writable.filter(|_| !spec.serves_disks()).map(move |disk| {
        format!(
            "VM '{vm}' has the writable disk '{}' and hardware version {}, whose disks cannot move: give it 'hardware = 2' with 'godwit vm edit {vm} FILE' while it is stopped",
            disk.name,
            spec.hardware()
        )
    });
    nested.into_iter().chain(disks).map(stays)
}

fn stays(why: String) -> ApiError {
    ApiError::new(ErrorCode::NotMigratable, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(more: &str) -> VmSpec {
        let text = format!("name = \"web\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/k\"\n{more}");
        VmSpec::from_toml(&text).unwrap()
    }

    #[test]
    fn each_reason_to_stay_is_told_and_what_would_lose_writes_is_refused_by_all() {
        let disk = |read_only| {
            format!("[[disk]]\nname = \"data\"\npath = \"/d\"\nread_only = {read_only}\n")
        };
        let (shut, open) = (disk(true), disk(false));
        let new = format!("hardware = 2\n{}", disk(false));
        let cases: [(&str, &[&str], bool); 8] = [
            ("", &[], false),
            (&shut, &[], false),
            ("movable = false", &["movable = false"], false),
            ("cpu = \"host\"", &["CPU model host"], false),
            (
                "cpu = \"host\"\nmovable = false",
                &["movable = false"],
                false,
            ),
            ("cpu = \"qemu64,+svm\"", &["feature 'svm'"], true),
            (
                &open,
                &["writable disk 'data' and hardware version 1"],
                true,
            ),
            (&new, &[], false),
        ];
        for (more, words, loses) in cases {
            let reasons = reasons_to_stay(&spec(more));
            assert_eq!(reasons.len(), words.len(), "{more}: {reasons:?}");
            for (reason, word) in reasons.iter().zip(words) {
                assert_eq!(reason.code, ErrorCode::NotMigratable);
                assert!(reason.message.contains(word), "{}", reason.message);
            }
            assert_eq!(refuse_losing_writes(&spec(more)).is_err(), loses, "{more}");
        }
    }
}
