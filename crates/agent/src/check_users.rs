//! `godwit host check` of users: whom QEMU runs as, and whether the ids that are kept for VMs are free.
//!
//! Reads `/etc` alone: a directory service is not asked. Refuses: nothing.

use crate::check::{failed, ok, warning};
use crate::config::HostConfig;
use crate::system::System;
use crate::users;
use godwit_types::host::Check;
use godwit_types::vm::UIDS;

const NAME: &str = "qemu-user";
const IDS: &str = "vm-uids";
/// In which field the first id stands, and in which the number of them, where there are several.
const FILES: [(&str, usize, Option<usize>); 4] = [
    ("/etc/passwd", 2, None),
    ("/etc/group", 2, None),
    ("/etc/subuid", 1, Some(2)),
    ("/etc/subgid", 1, Some(2)),
];

/// The common user, then the users of VMs.
pub fn check(system: &System, config: &HostConfig) -> [Check; 2] {
    [common(config), ids(system)]
}

fn common(config: &HostConfig) -> Check {
    match users::qemu_user(config.qemu_user.as_deref()) {
        Err(error) => failed(
            NAME,
            error.to_string(),
            "set qemu_user to a user that exists",
        ),
        Ok(user) if users::is_nobody_for_want_of(config.qemu_user.as_deref(), user) => warning(
            NAME,
            users::NOBODY_RUNS,
            "useradd --system --no-create-home godwit-qemu",
        ),
        Ok(user) => ok(
            NAME,
            format!(
                "a VM's QEMU runs as the VM's own user, without one as uid {}, gid {}",
                user.uid, user.gid
            ),
        ),
    }
}

fn ids(system: &System) -> Check {
    let (first, last) = (UIDS.start(), UIDS.end());
    let users: Vec<String> = FILES
        .into_iter()
        .filter_map(|(path, id, count)| {
            let text = system.read(path)?;
            let line = text.lines().find(|line| overlaps(line, id, count))?;
            let name: String = line.split(':').next()?.chars().take(64).collect();
            Some(format!("'{}' in {path}", name.escape_debug()))
        })
        .collect();
    if users.is_empty() {
        return ok(IDS, format!("ids {first} to {last} are free for VMs"));
    }
    warning(
        IDS,
        format!(
            "ids from {first} to {last}, which are kept for VMs, are used by {}: such a user may reach the VM with the same id",
            users.join(", ")
        ),
        "give them other ids",
    )
}

/// Whether a line tells of ids of the range.
fn overlaps(line: &str, id: usize, count: Option<usize>) -> bool {
    let number = |index: usize| line.split(':').nth(index)?.parse::<u64>().ok();
    let Some(from) = number(id) else {
        return false;
    };
    let count = count.map_or(Some(1), number).unwrap_or(1);
    let (first, last) = (u64::from(*UIDS.start()), u64::from(*UIDS.end()));
    count > 0 && from <= last && from.saturating_add(count) > first
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::host::CheckStatus;

    #[test]
    fn ids_of_vms_that_somebody_else_has_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let etc = dir.path().join("etc");
        std::fs::create_dir_all(&etc).unwrap();
        let found = |file: &str, text: &str| {
            std::fs::write(etc.join(file), text).unwrap();
            let found = ids(&System::under(dir.path()));
            std::fs::remove_file(etc.join(file)).unwrap();
            (found.status, found.found)
        };
        let root = "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n";
        assert_eq!(found("passwd", root).0, CheckStatus::Ok);
        let (status, said) = found("passwd", &format!("{root}ada:x:1879048200:5::/:/bin/sh\n"));
        assert_eq!(status, CheckStatus::Warning);
        assert!(said.contains("'ada' in /etc/passwd"), "{said}");
        assert_eq!(
            found("group", "big:x:2147483647:\n").0,
            CheckStatus::Warning
        );
        assert_eq!(found("subuid", "ada:1879048000:192\n").0, CheckStatus::Ok);
        assert_eq!(
            found("subuid", "ada:1879048000:193\n").0,
            CheckStatus::Warning
        );
        assert_eq!(found("subgid", "noise\nx:y:z\n").0, CheckStatus::Ok);
    }
}
