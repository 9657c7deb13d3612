//! `godwit vm stop --wait` and `--timeout`: a stop that returns once the VM is off.
//!
//! Owns nothing. Refuses: to call a VM off that nobody said is off; where the time is over it says how the VM is.

use super::controller;
use crate::args::Global;
use crate::exit::{CommandResult, FAILED, Failure};
use crate::output::Output;
use crate::plain;
use crate::wait::{of_vm, saying};
use crate::watch::failure;
use godwit_rpc::{ClientError, ControllerClient};
use godwit_types::control_api::{Done, StopRequest, VmView};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, VmName};
use std::time::{Duration, Instant};

/// How long a VM may take to be off that is powered off.
const FORCED_WITHIN: Duration = Duration::from_secs(60);
/// Between two looks at the VM.
const LOOK_EACH: Duration = Duration::from_millis(300);

/// Stops the VM and waits until it is off, `within` so long.
pub(super) async fn and_wait(
    vm: &VmName,
    force: bool,
    within: Duration,
    global: &Global,
    output: &Output,
) -> CommandResult {
    let client = controller(global)?;
    let last = stopped(&client, vm, force, within, output).await?;
    told(&last, within, "is off", output)
}

/// Has the guest asked to power off; one that does not in its time is powered off if that is wanted.
pub(super) async fn ask_first(
    vm: &VmName,
    force: bool,
    within: Duration,
    global: &Global,
    output: &Output,
) -> CommandResult {
    let client = controller(global)?;
    let last = stopped(&client, vm, false, within, output).await?;
    if !force || last.state == VmState::Stopped {
        return told(&last, within, "is off", output);
    }
    let seconds = within.as_secs();
    if !output.json {
        plain::tell(&format!(
            "VM '{vm}' is not off after {seconds} s: it is powered off"
        ));
    }
    let last = stopped(&client, vm, true, FORCED_WITHIN, output).await?;
    let how = format!("is off: its guest did not obey within {seconds} s, and was powered off");
    told(&last, FORCED_WITHIN, &how, output)
}

/// The VM once it is off, or when the time was over.
async fn stopped(
    client: &ControllerClient,
    vm: &VmName,
    force: bool,
    within: Duration,
    output: &Output,
) -> Result<VmView, Failure> {
    let began = Instant::now();
    let request = StopRequest { force };
    let asked = saying(of_vm(client, vm), client.stop(vm, &request)).await;
    let asked = asked.map_err(failure)?.message;
    if !output.json && !force {
        plain::tell(&format!("{asked}; waiting (Ctrl-C stops waiting)"));
    }
    let look = async || client.vm(vm).await;
    until_off(look, began + within).await.map_err(failure)
}

fn told(last: &VmView, within: Duration, how: &str, output: &Output) -> CommandResult {
    if last.state != VmState::Stopped {
        return Err(still_on(last, within));
    }
    let message = format!("VM '{}' {how}.", last.spec.name);
    output.show(&Done { message }, |output, done| output.line(&done.message));
    Ok(())
}

/// How the VM is once it is off, or was last when the time was over. Who is asked may be away for a while meanwhile.
async fn until_off(
    mut look: impl AsyncFnMut() -> Result<VmView, ClientError>,
    end: Instant,
) -> Result<VmView, ClientError> {
    loop {
        let is_over = Instant::now() >= end;
        match look().await {
            Ok(view) if is_over || view.state == VmState::Stopped => return Ok(view),
            Err(error) if is_over || matches!(error, ClientError::Refused(_)) => return Err(error),
            Ok(_) | Err(_) => {}
        }
        let left = end.saturating_duration_since(Instant::now());
        tokio::time::sleep(left.min(LOOK_EACH)).await;
    }
}

/// It was asked to power off, and has not.
fn still_on(view: &VmView, within: Duration) -> Failure {
    let (vm, state) = (&view.spec.name, view.state);
    let on = view.host.as_ref();
    let on = on.map_or_else(String::new, |host| format!(" on host {host}"));
    let what = match (&view.note, state) {
        (Some(note), _) => note.clone(),
        (None, VmState::Running) => format!(
            "the guest may still be powering off; 'godwit vm stop {vm} --force' powers it off at once"
        ),
        (None, _) => format!("see 'godwit vm show {vm}'"),
    };
    let message = format!(
        "VM '{vm}' is not off after {} s, it is {state}{on}: {what}",
        within.as_secs()
    );
    Failure {
        exit: FAILED,
        ..ApiError::new(ErrorCode::WrongState, message).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn view(state: VmState, note: Option<&str>) -> VmView {
        let spec = json!({
            "name": "web", "vcpus": 1, "memory_mib": 64, "kernel": "/k", "nic": []
        });
        let view = json!({
            "spec": spec, "state": state, "host": "a", "generation": 1, "note": note
        });
        serde_json::from_value(view).unwrap()
    }

    fn away() -> ClientError {
        ClientError::NotReached {
            peer: "the controller".into(),
            cause: "nobody listens there".into(),
        }
    }

    #[tokio::test]
    async fn a_stop_is_waited_for_until_the_vm_is_off_also_over_a_controller_that_was_away() {
        let mut answers = vec![
            Ok(view(VmState::Stopped, None)),
            Err(away()),
            Ok(view(VmState::Running, None)),
        ];
        let look = async || answers.pop().unwrap();
        let end = Instant::now() + Duration::from_secs(600);
        let last = until_off(look, end).await.unwrap();
        assert_eq!(last.state, VmState::Stopped);
        assert!(answers.is_empty());
    }

    #[tokio::test]
    async fn a_vm_that_does_not_power_off_in_time_is_told_as_it_is() {
        let over = Instant::now();
        let last = until_off(async || Ok(view(VmState::Running, None)), over).await;
        let failed = still_on(&last.unwrap(), Duration::from_secs(60));
        assert_eq!(failed.exit, FAILED);
        let wanted = "VM 'web' is not off after 60 s, it is running on host a: the guest may still be powering off; 'godwit vm stop web --force' powers it off at once";
        assert_eq!(failed.error.message, wanted);
        let doubted = still_on(
            &view(VmState::InDoubt, Some("do this")),
            Duration::from_secs(1),
        );
        let message = doubted.error.message;
        assert!(
            message.ends_with("it is in-doubt on host a: do this"),
            "{message}"
        );
        assert!(until_off(async || Err(away()), over).await.is_err());
    }
}
