//! `godwit vm start`: asks until the VM runs, since its disks may have to be made first, and shows how far that is.
//!
//! Owns the bar. Ctrl-C stops asking; the host goes on with the disks. Refuses nothing by itself.

use crate::connect::controller;
use crate::exit::{CommandResult, Failure};
use crate::figures::mib;
use crate::output::Output;
use crate::plain;
use crate::wait::{of_vm, saying};
use crate::watch::{bar, failure, permille};
use godwit_rpc::ControllerClient;
use godwit_types::VmName;
use godwit_types::control_api::{DiskMaking, Done, StartRequest};
use indicatif::{ProgressBar, ProgressDrawTarget};
use std::time::Duration;

/// How often it is looked how far a disk is.
const LOOK_EVERY: Duration = Duration::from_millis(250);

pub(super) async fn start(
    vm: &VmName,
    request: &StartRequest,
    global: &crate::args::Global,
    output: &Output,
) -> CommandResult {
    let client = controller(global)?;
    let mut shown = None;
    let message = loop {
        let asked = saying(of_vm(&client, vm), client.start(vm, request)).await;
        let started = asked.map_err(failure)?;
        let Some(making) = started.making else {
            break started.message;
        };
        let shown = shown.get_or_insert_with(|| Shown::new(output));
        shown.follow(&client, vm, making).await?;
    };
    drop(shown);
    output.show(&Done { message }, |output, done| output.line(&done.message));
    Ok(())
}

/// The bar, on standard error and only on a terminal; elsewhere a line for each disk.
struct Shown {
    bar: ProgressBar,
    is_plain: bool,
    said: Option<String>,
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl Shown {
    fn new(output: &Output) -> Self {
        let (bar, _) = bar(PREFIX);
        if output.json {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        Self {
            is_plain: bar.is_hidden() && !output.json,
            bar,
            said: None,
        }
    }

    /// Shows the disks until all are there, or their making has ended otherwise, which the next start tells.
    async fn follow(
        &mut self,
        client: &ControllerClient,
        vm: &VmName,
        first: DiskMaking,
    ) -> Result<(), Failure> {
        let mut making = Some(first);
        while let Some(now) = making {
            self.show(&now);
            tokio::time::sleep(LOOK_EVERY).await;
            making = client.disks(vm).await.map_err(failure)?.making;
        }
        Ok(())
    }

    fn show(&mut self, making: &DiskMaking) {
        let disk = plain::sentence(&making.disk);
        self.bar.set_prefix(disk.clone());
        self.bar.set_position(permille(percent(making)));
        self.bar.set_message(words(making));
        if self.is_plain && self.said.as_ref() != Some(&disk) {
            plain::tell(&format!("disk {disk} is being made, {}", words(making)));
            self.said = Some(disk);
        }
    }
}

/// Columns of the disk's name, which stands before the bar.
const PREFIX: usize = 20;

fn percent(making: &DiskMaking) -> f64 {
    match making.total_bytes {
        0 => 100.0,
        total => 100.0 * making.done_bytes as f64 / total as f64,
    }
}

fn words(making: &DiskMaking) -> String {
    format!("{} of {}", mib(making.done_bytes), mib(making.total_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_is_made_of_nothing_is_done() {
        let making = |done_bytes, total_bytes| DiskMaking {
            disk: "root".into(),
            done_bytes,
            total_bytes,
        };
        assert_eq!(percent(&making(0, 0)), 100.0);
        assert_eq!(percent(&making(1 << 20, 4 << 20)), 25.0);
        assert!(words(&making(1 << 20, 4 << 20)).contains(" of "));
    }
}
