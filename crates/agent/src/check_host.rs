//! The part of `host check` that looks at memory and disk: the first touch of fresh memory, room for records.
//!
//! Owns some memory for a moment. Refuses: to measure where little is free.

use crate::check::{note, ok, warning};
use crate::config::HostConfig;
use crate::system::System;
use godwit_types::host::Check;
use godwit_types::host_api::CLOSING_FILE;
use std::path::Path;
use std::time::Instant;

/// Memory that is touched, bytes.
const TOUCHED: usize = 256 << 20;
/// Free memory below which nothing is measured, MiB.
const FREE_MIN_MIB: u64 = 1024;
/// Bytes per touch.
const PAGE: usize = 4096;
/// Speed that any machine's own memory reaches, GB/s.
const SPEED_GOOD: f64 = 1.0;
/// Room for records and reports, bytes.
const ROOM_GOOD: u64 = 256 << 20;

/// That this host boots nothing, if it was closed; its agent knows whether that still holds, a file stays for as long.
pub fn closed(config: &HostConfig) -> Option<Check> {
    let mark = config.run_dir.join(CLOSING_FILE);
    mark.exists().then(|| {
        warning(
            "closed",
            "this host shuts down or was closed for that: it boots no VM and takes none",
            "godwit host open, if it is to run VMs now",
        )
    })
}

/// Speed of touching memory that was never used, twice: what was freed by the first may be fast or not.
pub fn first_touch(system: &System) -> Check {
    let name = "first-touch";
    if system.meminfo_mib("MemAvailable").unwrap_or(0) < FREE_MIN_MIB {
        return note(
            name,
            format!("not measured: less than {FREE_MIN_MIB} MiB of memory are free"),
            "",
        );
    }
    let speeds = [touch(), touch()];
    judge_touch(
        speeds,
        system.exists("/sys/bus/virtio/drivers/virtio_balloon"),
    )
}

fn touch() -> f64 {
    let mut memory = vec![0u8; TOUCHED];
    let began = Instant::now();
    for page in memory.chunks_mut(PAGE) {
        if let Some(first) = page.first_mut() {
            *first = 1;
        }
    }
    std::hint::black_box(&memory);
    TOUCHED as f64 / 1e9 / began.elapsed().as_secs_f64().max(1e-9)
}

fn judge_touch([first, second]: [f64; 2], has_balloon: bool) -> Check {
    let name = "first-touch";
    let found =
        format!("fresh memory is touched at {first:.1} GB/s, and at {second:.1} GB/s again");
    if first.min(second) >= SPEED_GOOD {
        return ok(name, found);
    }
    let reason = match has_balloon {
        true => {
            "this virtual machine's hypervisor probably takes free pages back (free page reporting of virtio-balloon), so that guests start and arrive slowly: turn that off for this machine, or expect figures below those of hardware"
        }
        false => {
            "guests start and arrive slowly: see what else uses this machine's memory and cores"
        }
    };
    note(name, found, reason)
}

/// Room where records are written: a guest whose record cannot be written is not started.
pub fn room(config: &HostConfig) -> Check {
    let name = "state-dir";
    let there = config.state_dir.ancestors().find(|dir| dir.is_dir());
    let dir = there.unwrap_or(Path::new("/"));
    let shown = config.state_dir.display();
    match rustix::fs::statvfs(dir) {
        Err(error) => warning(
            name,
            format!("the file system of {shown} cannot be looked at: {error}"),
            "see that it is mounted",
        ),
        Ok(found) => {
            let free = found.f_bavail.saturating_mul(found.f_frsize);
            let text = format!("{} MiB free for records in {shown}", free >> 20);
            match free >= ROOM_GOOD {
                true => ok(name, text),
                false => warning(
                    name,
                    text,
                    "free some: no VM starts where its record cannot be written",
                ),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::host::CheckStatus;

    #[test]
    fn slow_first_touch_names_the_balloon_where_there_is_one() {
        let fine = judge_touch([9.0, 8.0], true);
        assert_eq!((fine.status, fine.remedy.as_str()), (CheckStatus::Ok, ""));
        let slow = judge_touch([5.0, 0.3], true);
        assert_eq!(slow.status, CheckStatus::Note);
        assert!(slow.remedy.contains("free page reporting") && slow.found.contains("0.3"));
        assert!(!judge_touch([0.3, 0.3], false).remedy.contains("balloon"));
    }
}
