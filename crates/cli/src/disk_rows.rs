//! What is shown of a VM's disks: where each is, what is not usual about it, what it does, and what the iterations of one that moves came to.
//!
//! Pure text, owns nothing. Refuses nothing: of a disk that its host says nothing about, what it does is left out.

use crate::figures::{amount, mib};
use godwit_types::control_api::VmView;
use godwit_types::disk_activity::DiskActivity;
use godwit_types::disk_move::DiskIteration;
use godwit_types::vm::DiskSpec;
use std::fmt::Write as _;

/// Each disk in a line: where it is, what is not usual about it, and what it does.
pub fn disk_rows(vm: &VmView) -> Vec<(&'static str, String)> {
    let row = |disk: &DiskSpec| {
        let does = vm.disks.iter().find(|does| does.disk == disk.name);
        let mut said = vec![format!("{} {}", disk.name, disk.path)];
        said.extend(does.and_then(|does| does.bytes).map(amount));
        said.extend(disk.read_only.then(|| "read only".to_owned()));
        said.extend(disk.shared.then(|| "shared".to_owned()));
        said.extend((!disk.on_full.waits()).then(|| "an error when it is full".to_owned()));
        said.extend((!disk.on_error.fails()).then(|| "waits when its storage fails".to_owned()));
        said.extend((!disk.limits.are_none()).then(|| disk.limits.to_string()));
        said.extend(does.map(disk_does));
        ("disk", said.join(", "))
    };
    vm.spec.disks.iter().map(row).collect()
}

/// What an iteration of dirty block tracking came to, or a consolidation of a redo log.
pub fn iteration(ended: &DiskIteration) -> String {
    let left_out = match ended.deferred_bytes {
        0 => String::new(),
        bytes => format!(
            ", without {} that is written again and again",
            amount(bytes)
        ),
    };
    format!(
        "iteration {}: {} in {:.2} s{left_out}; {} written meanwhile",
        ended.number,
        amount(ended.copied_bytes),
        ended.seconds,
        amount(ended.dirty_bytes.saturating_sub(ended.deferred_bytes))
    )
}

/// How long a guest waited while redo logs were put over its disks, ms, and to what part of its requests it was slowed.
pub fn put_over(frozen_ms: f64, slowed_to: Option<f64>) -> String {
    let slowed = slowed_to.map_or_else(String::new, |part| match part < 0.01 {
        true => "; its guest was slowed to less than 1 %".to_owned(),
        false => format!("; its guest was slowed to {:.0} %", part * 1e2),
    });
    format!("its guest waited {frozen_ms:.1} ms while they were put over{slowed}")
}

fn disk_does(disk: &DiskActivity) -> String {
    let rate = &disk.rate;
    let mut said = format!(
        "{:.0} reads/s ({}/s), {:.0} writes/s ({}/s)",
        rate.reads,
        mib(rate.read_bytes as u64),
        rate.writes,
        mib(rate.written_bytes as u64)
    );
    if let Some(mean_ms) = rate.mean_ms {
        let _ = write!(said, ", {mean_ms:.1} ms each");
    }
    match disk.failed() {
        0 => {}
        failed => drop(write!(said, ", {failed} failed")),
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::tests::vm;
    use godwit_types::disk_activity::{DiskRate, DiskWork};
    use godwit_types::vm::{DiskLimits, OnError, OnFull, VmState};
    use serde_json::json;

    #[test]
    fn a_disk_is_shown_with_its_place_its_limits_and_what_it_does() {
        let mut web = vm("web", VmState::Running, json!({}));
        web.spec.disks = vec![
            DiskSpec::new("root", "/fast/web-root.raw"),
            DiskSpec {
                read_only: true,
                shared: true,
                ..DiskSpec::new("iso", "/san/iso.raw")
            },
        ];
        let plain = [
            ("disk", "root /fast/web-root.raw".to_owned()),
            ("disk", "iso /san/iso.raw, read only, shared".to_owned()),
        ];
        assert_eq!(disk_rows(&web), plain);
        let root = &mut web.spec.disks[0];
        root.on_full = OnFull::Error;
        root.on_error = OnError::Wait;
        root.limits = DiskLimits {
            iops: Some(500),
            mib_per_s: None,
        };
        web.disks = vec![DiskActivity {
            disk: "root".into(),
            bytes: Some(20 << 30),
            writes: DiskWork {
                failed: 2,
                ..DiskWork::default()
            },
            rate: DiskRate {
                reads: 12.4,
                read_bytes: 524_288.0,
                writes: 300.0,
                written_bytes: 3_145_728.0,
                mean_ms: Some(0.84),
            },
            ..DiskActivity::default()
        }];
        assert_eq!(
            disk_rows(&web)[0].1,
            "root /fast/web-root.raw, 20.0 GiB, an error when it is full, waits when its storage fails, at most 500 requests a second, 12 reads/s (0.5 MiB/s), 300 writes/s (3.0 MiB/s), 0.8 ms each, 2 failed"
        );
        assert_eq!(disk_rows(&web)[1], plain[1]);
    }
}
