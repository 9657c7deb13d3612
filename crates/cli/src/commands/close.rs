//! `godwit host close` and `open`: powers this host's guests down before the host goes down, and takes that back.
//!
//! Owns nothing: the agent does the work, and goes on with it if this command is ended; where it does not answer while the
//! host shuts down, its code does the same here. Refuses: to power anything down with `--at-shutdown` on a host that does
//! not shut down.

use crate::args::Global;
use crate::connect::{agent, coming_agent};
use crate::exit::{CommandResult, Failure};
use crate::output::Output;
use crate::plain;
use crate::watch::failure;
use godwit_agent::config::CONFIG_PATH;
use godwit_rpc::AgentClient;
use godwit_types::ErrorCode;
use godwit_types::host_api::{CloseRequest, CloseState, ClosingStage, ClosingVm, HostClosing};
use std::path::Path;
use std::time::{Duration, Instant};

/// Between two looks at how far the agent has come.
const LOOK_EACH: Duration = Duration::from_millis(500);
/// How long an agent that does not answer is waited for: it may be starting anew.
const SILENT_MAX: Duration = Duration::from_secs(60);
/// How long the system manager is asked whether the host shuts down.
const STOPPING_WAIT: Duration = Duration::from_secs(20);

/// Powers this host's guests down.
pub async fn close(at_shutdown: bool, global: &Global, output: &Output) -> CommandResult {
    if at_shutdown && !godwit_agent::host_is_shutting_down(STOPPING_WAIT).await {
        let open = HostClosing::default();
        output.show(&open, |output, _| {
            output.line("This host does not shut down: its guests run on. 'godwit host close' powers them down.");
        });
        return Ok(());
    }
    let closed = match closed_by_the_agent(CloseRequest { at_shutdown }, global).await {
        Err(silent) if at_shutdown => without_agent(silent).await?,
        closed => closed?,
    };
    output.show(&closed, |output, closed| {
        closed.vms.iter().for_each(|vm| output.line(outcome(vm)));
        let is_down = |vm: &ClosingVm| matches!(vm.state, CloseState::Off | CloseState::Ended);
        let down = match closed.vms.iter().all(is_down) {
            true => "This host's guests are down.",
            false => "This host's other guests are down.",
        };
        output.line(format!(
            "{down} They are booted when the host is back; 'godwit host open' boots them now."
        ));
    });
    Ok(())
}

/// Lets this host run guests again.
pub async fn open(global: &Global, output: &Output) -> CommandResult {
    let client = agent(global).ok_or_else(no_agent)?;
    let done = client.open().await.map_err(failure)?;
    output.show(&done, |output, done| output.line(&done.message));
    Ok(())
}

async fn closed_by_the_agent(
    request: CloseRequest,
    global: &Global,
) -> Result<HostClosing, Failure> {
    let client = match request.at_shutdown {
        // One that is just started anew does it better than nobody.
        true => coming_agent(global),
        false => agent(global).ok_or_else(no_agent)?,
    };
    until_closed(request, &client).await
}

/// Guests are not cut off for want of an agent.
async fn without_agent(silent: Failure) -> Result<HostClosing, Failure> {
    plain::tell(&format!(
        "godwit: {}; this host goes down, so its guests are powered down without its agent",
        silent.error.message
    ));
    let closed = godwit_agent::close_without_agent(Path::new(CONFIG_PATH)).await;
    closed.map_err(|error| Failure::new(ErrorCode::Internal, error.to_string()))
}

/// Asks until the agent has done it; one that is started anew in between goes on by itself.
async fn until_closed(request: CloseRequest, client: &AgentClient) -> Result<HostClosing, Failure> {
    let mut heard = Instant::now();
    let mut has_begun = false;
    loop {
        let asked = match has_begun {
            false => client.close(&request).await,
            true => client.closing().await,
        };
        match asked {
            Ok(closing) if has_begun && closing.stage == ClosingStage::Closed => {
                return Ok(closing);
            }
            Ok(closing) => {
                heard = Instant::now();
                // An agent that does not know of it any more is told again.
                has_begun = closing.stage != ClosingStage::Open;
            }
            Err(error) if heard.elapsed() >= SILENT_MAX => return Err(failure(error)),
            Err(_) => {}
        }
        tokio::time::sleep(LOOK_EACH).await;
    }
}

fn outcome(vm: &ClosingVm) -> String {
    let why = vm.why.as_deref().unwrap_or("it did not answer");
    let name = &vm.vm;
    match vm.state {
        CloseState::Off => format!("VM {name} is powered down"),
        CloseState::Ended => format!("VM {name} did not power off in time: it was stopped hard"),
        CloseState::Left => format!("VM {name} is left as it is: {why}"),
        CloseState::Waits | CloseState::Migrating => {
            format!("VM {name} was not powered down: {why}")
        }
    }
}

fn no_agent() -> Failure {
    let message = "no agent runs on this host: start it with 'systemctl start godwit-agent'";
    Failure::new(ErrorCode::HostUnreachable, message)
}
