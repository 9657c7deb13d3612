//! An orderly shutdown of this host whose agent is not there or does not answer.
//!
//! Does what the agent would have done, with the same rounds: writes the mark, then has each VM process power its guest
//! down. Owns nothing beyond that. Refuses: to start or renew a VM process, which is an agent's business; a guest whose VM
//! process does not answer is named and left.

use crate::agent::{ACT, blocking, unexpected};
use crate::closing::{ANSWER_WAIT, Closing, Hands, left_with, power_guests_down, seen_of};
use crate::config::HostConfig;
use crate::evidence;
use crate::records::{Records, named};
use crate::run::{AgentError, boot_id, config_or_defaults, setup};
use crate::system::System;
use crate::vm_client;
use godwit_types::host_api::{CloseStep, ClosingVm, HostClosing, SOCKET_FILE, VmAnswer, VmRequest};
use godwit_types::{ErrorCode, VmName};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

struct Alone {
    run_dirs: PathBuf,
    closing: Closing,
    records: Records,
}

impl Hands for Alone {
    fn closing(&self) -> &Closing {
        &self.closing
    }

    async fn with_guests(self: &Arc<Self>) -> Vec<VmName> {
        let alone = Arc::clone(self);
        let found = blocking(move || {
            let mut names = named(&alone.run_dirs).unwrap_or_default();
            names.retain(|name| evidence::qemu_may_live(&alone.run_dirs.join(name.as_str())));
            Ok(names)
        });
        found.await.unwrap_or_default()
    }

    async fn close_guest(self: &Arc<Self>, vm: &VmName, step: CloseStep) -> ClosingVm {
        let socket = self.run_dirs.join(vm.as_str()).join(SOCKET_FILE);
        let patience = match step {
            CloseStep::Look | CloseStep::Press => ANSWER_WAIT,
            CloseStep::End => ACT,
        };
        match vm_client::ask(&socket, vm, &VmRequest::Close { step }, patience).await {
            Ok(VmAnswer::Closing(seen)) => seen,
            Ok(_) => seen_of(vm, step, Err(unexpected(vm))),
            Err(error) if error.code == ErrorCode::InvalidRequest => left_with(vm, &error),
            Err(error) => seen_of(vm, step, Err(error)),
        }
    }

    fn went_down(&self, vm: &VmName) {
        self.records.forget_boot(vm);
    }

    /// The next agent does, if there is one in this boot.
    fn at_the_end(&self) {}
}

/// Powers this host's guests down without its agent, since the host goes down; comes back when they are, or their time is
/// over. A configuration that cannot be read is no ground to cut guests off: then the usual directories and limit count.
pub async fn close_without_agent(config: &Path) -> Result<HostClosing, AgentError> {
    let config = match config_or_defaults(config) {
        Ok(config) => config,
        Err(error) => {
            tracing::error!(%error, "guests are powered down as on a host without a configuration");
            HostConfig::before_joining()?
        }
    };
    close_alone(&config, &System::default()).await
}

async fn close_alone(config: &HostConfig, system: &System) -> Result<HostClosing, AgentError> {
    let boot_id = boot_id(config, system).map_err(setup("note this boot of the host"))?;
    let closing = Closing::open(&config.run_dir, &boot_id, config.guest_shutdown_s);
    let alone = Arc::new(Alone {
        run_dirs: config.run_dir.join("vms"),
        closing: closing.map_err(setup("read whether this host shuts down"))?,
        records: Records::new(&config.state_dir, config.name.clone()),
    });
    let begun = alone.closing.begin(true, BTreeSet::new());
    begun.map_err(setup("mark that this host shuts down"))?;
    power_guests_down(Arc::clone(&alone)).await;
    Ok(alone.closing.shown())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::closing::tests::guest;
    use crate::scope::Place;
    use crate::test_support::{CLOSED, TestHost, stub_program, vm};
    use godwit_types::host_api::{CLOSING_FILE, CloseState, ClosingStage};

    #[tokio::test(flavor = "multi_thread")]
    async fn guests_of_a_host_whose_agent_does_not_answer_are_powered_down_with_it() {
        let host = TestHost::new().with("guest_shutdown_s = 1");
        let _children = [
            guest(&host, "obeys", "obeys"),
            guest(&host, "deaf", "deaf"),
            guest(&host, "old", "too old"),
            guest(&host, "silent", "obeys"),
        ];
        let mut processes = ["obeys", "deaf", "old"].map(|name| {
            let config = host.vm_config(name);
            let process = stub_program().start(&config, &Place::Beside).unwrap();
            let run_dir = host.run_dir(name);
            while !evidence::process_may_live(&run_dir) {
                std::thread::yield_now();
            }
            process
        });
        let closing = close_alone(&host.config, &System::default()).await.unwrap();
        for process in &mut processes {
            process.kill().await.unwrap();
        }
        assert_eq!(closing.stage, ClosingStage::Closed);
        let states = closing.vms.iter().map(|seen| (seen.vm.clone(), seen.state));
        let wanted = [
            ("deaf", CloseState::Ended),
            ("obeys", CloseState::Off),
            ("old", CloseState::Left),
            ("silent", CloseState::Left),
        ];
        let wanted = wanted.map(|(name, state)| (vm(name), state));
        assert_eq!(states.collect::<Vec<_>>(), wanted);
        let pressed = std::fs::read_to_string(host.run_dir("obeys").join(CLOSED)).unwrap();
        assert_eq!(pressed, "press\n");
        let silent = closing.vms[3].why.clone().unwrap();
        assert!(silent.contains("does not listen"), "{silent}");
        assert!(host.config.run_dir.join(CLOSING_FILE).exists());
    }
}
