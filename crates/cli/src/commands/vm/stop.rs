//! `godwit vm stop --wait` and `--timeout`: a stop that returns once the VM is off.
//!
//! Owns nothing. Refuses: to call a VM off that nobody said is off; where the time is over it says how the VM is.

use super::controller;
use crate::args::Global;
use crate::exit::{CommandResult, FAILED, Failure, NOT_FOUND};
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

/// Has the guest asked to power off; one that does not in its time, or cannot be asked, is powered off if that is wanted.
pub(super) async fn ask_first(
    vm: &VmName,
    force: bool,
    within: Duration,
    global: &Global,
    output: &Output,
) -> CommandResult {
    let client = controller(global)?;
    let asked = stopped(&client, vm, false, within, output).await;
    let Some(why) = why_force(&asked, within).filter(|_| force) else {
        return told(&asked?, within, "is off", output);
    };
    if !output.json {
        plain::tell(&format!("VM '{vm}': {why}; it is powered off"));
    }
    let last = stopped(&client, vm, true, FORCED_WITHIN, output).await?;
    let how = format!("is off: {why}, and was powered off");
    told(&last, FORCED_WITHIN, &how, output)
}

/// Why force is left of what came of asking; none where the VM is off, or is none that this person may stop.
fn why_force(asked: &Result<VmView, Failure>, within: Duration) -> Option<String> {
    match asked {
        Ok(last) if last.state == VmState::Stopped => None,
        Ok(_) => Some(format!(
            "its guest did not obey within {} s",
            within.as_secs()
        )),
        Err(why) if why.exit == NOT_FOUND || why.error.code == ErrorCode::NotAllowed => None,
        Err(why) => Some(format!(
            "its guest was not heard to obey ({})",
            why.error.message
        )),
    }
}

/// The VM once it is off, or when the time was over. A guest that is asked is asked again at half of that.
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
    if force {
        return until_off(look, began + within).await.map_err(failure);
    }
    // What this answers is of no use: the VM is looked at.
    let ask_again = async || drop(client.stop(vm, &request).await);
    let last = off_or_asked_again(look, ask_again, began, within).await;
    last.map_err(failure)
}

/// As [`until_off`], and asks once more when half of the time is over: an agent that did nothing is passed over then, and the power key pressed.
async fn off_or_asked_again(
    mut look: impl AsyncFnMut() -> Result<VmView, ClientError>,
    ask_again: impl AsyncFnOnce(),
    began: Instant,
    within: Duration,
) -> Result<VmView, ClientError> {
    match until_off(&mut look, began + within / 2).await {
        Ok(view) if view.state == VmState::Stopped => return Ok(view),
        Err(error @ ClientError::Refused(_)) => return Err(error),
        Ok(_) | Err(_) => {}
    }
    let left = (began + within).saturating_duration_since(Instant::now());
    let _ = tokio::time::timeout(left, ask_again()).await;
    until_off(look, began + within).await
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
    use std::cell::Cell;

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

    /// An agent that took the question and did nothing was never passed over.
    #[tokio::test]
    async fn a_guest_that_does_not_obey_is_asked_again_when_half_of_its_time_is_over() {
        let times = Cell::new(0);
        let look = async || {
            Ok(view(
                match times.get() {
                    0 => VmState::Running,
                    _ => VmState::Stopped,
                },
                None,
            ))
        };
        let ask_again = async || times.set(times.get() + 1);
        let (began, within) = (Instant::now(), Duration::from_secs(1));
        let last = off_or_asked_again(look, ask_again, began, within).await;
        assert_eq!(last.unwrap().state, VmState::Stopped);
        assert_eq!(times.get(), 1);
        assert!(began.elapsed() >= within / 2);
    }

    /// A monitor that did not answer the first question kept the VM on for good.
    #[test]
    fn force_is_left_of_a_stop_that_failed_and_of_none_that_is_not_allowed() {
        let within = Duration::from_secs(60);
        let failed = |code| Err(Failure::new(code, "it is mute"));
        let why = |asked| why_force(&asked, within);
        assert_eq!(why(Ok(view(VmState::Stopped, None))), None);
        let slow = why(Ok(view(VmState::Running, None))).unwrap();
        assert_eq!(slow, "its guest did not obey within 60 s");
        for code in [
            ErrorCode::Hypervisor,
            ErrorCode::HostUnreachable,
            ErrorCode::DeadlineMissed,
        ] {
            assert!(why(failed(code)).unwrap().contains("it is mute"));
        }
        for code in [ErrorCode::UnknownVm, ErrorCode::NotAllowed] {
            assert_eq!(why(failed(code)), None);
        }
    }
}
