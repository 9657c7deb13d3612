//! `godwit site`, what a person decides about hosts, and the alarms that come before every list.
//!
//! Owns nothing. Refuses: to pass on that a host is off, or that this one boots alone, before the person has said yes.

use crate::args::{Global, SiteCommand};
use crate::connect::{agent, controller};
use crate::exit::{CommandResult, Failure, RUNNING_TWICE};
use crate::output::Output;
use crate::watch::failure;
use godwit_rpc::ControllerClient;
use godwit_types::site::{Alarm, SiteView};
use godwit_types::{ErrorCode, HostName, VmName};
use std::io::{BufRead as _, IsTerminal as _, Write as _};

/// Carries a command out.
pub async fn run(command: SiteCommand, global: &Global, output: &Output) -> CommandResult {
    match command {
        SiteCommand::Show => {
            let view = controller(global)?.site().await.map_err(failure)?;
            output.show(&view, |output, view| show(view, output));
            judged(&view)
        }
    }
}

fn show(view: &SiteView, output: &Output) {
    let charge = match view.in_charge {
        true => "grants what is asked for",
        false => "grants nothing",
    };
    output.line(format!("controller: {charge}, last word {}", view.stamp));
    for (host, state) in &view.hosts {
        let state = match state {
            godwit_types::control_api::HostState::Connected => "answers",
            godwit_types::control_api::HostState::Unreachable => "does not answer",
        };
        output.line(format!("host {host} {state}"));
    }
    match view.sentences.is_empty() {
        true => output.line("no alarm"),
        false => tell(view),
    }
}

fn tell(view: &SiteView) {
    for sentence in &view.sentences {
        eprintln!("ALARM: {sentence}");
    }
}

/// An exit code of its own while a VM is held twice.
fn judged(view: &SiteView) -> CommandResult {
    let twice = |alarm: &Alarm| matches!(alarm, Alarm::RunningTwice { .. });
    match view.alarms.iter().any(twice) {
        true => Err(Failure::told(RUNNING_TWICE)),
        false => Ok(()),
    }
}

/// What a person must know before a list, to standard error. A controller that cannot say it is no reason to show no list.
pub async fn alarms(client: &ControllerClient, output: &Output) -> CommandResult {
    let Ok(view) = client.site().await else {
        return Ok(());
    };
    if !output.json {
        tell(&view);
    }
    judged(&view)
}

/// Says that a host is off, once the person has said yes.
pub async fn fenced(host: &HostName, yes: bool, global: &Global, output: &Output) -> CommandResult {
    let question = format!(
        "Is host {host} powered off, and will it stay off until it is heard again? If it runs, a VM of it may run twice."
    );
    must_agree(&question, yes)?;
    let done = controller(global)?.fenced(host).await.map_err(failure)?;
    output.show(&done, |output, done| output.line(&done.message));
    Ok(())
}

/// Lets this host boot what it holds, once the person has said yes.
pub async fn boot_alone(yes: bool, global: &Global, output: &Output) -> CommandResult {
    let question = "Does no other host run the VMs that this host waits to boot? A VM that went elsewhere would run twice.";
    must_agree(question, yes)?;
    let client = agent(global).ok_or_else(no_agent)?;
    let done = client.boot_alone().await.map_err(failure)?;
    output.show(&done, |output, done| output.line(&done.message));
    Ok(())
}

/// Puts a damaged record aside, once the person has said yes.
pub async fn forget_record(
    vm: &VmName,
    yes: bool,
    global: &Global,
    output: &Output,
) -> CommandResult {
    let question = format!(
        "Does this host not run VM {vm}? Its damaged record is put aside, and the host counts as one that does not hold the VM."
    );
    must_agree(&question, yes)?;
    let client = agent(global).ok_or_else(no_agent)?;
    let done = client.forget_record(vm).await.map_err(failure)?;
    output.show(&done, |output, done| output.line(&done.message));
    Ok(())
}

fn no_agent() -> Failure {
    let message =
        "no agent runs on this machine: run this on the host itself, with its agent running";
    Failure::new(ErrorCode::HostUnreachable, message)
}

fn must_agree(question: &str, yes: bool) -> CommandResult {
    if yes {
        return Ok(());
    }
    let refused = |message: &str| Err(Failure::new(ErrorCode::WrongState, message));
    if !std::io::stdin().is_terminal() {
        return refused(&format!("{question} Say so with --yes"));
    }
    eprint!("{question} Type 'yes': ");
    let _ = std::io::stderr().flush();
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    match read.is_ok() && answer.trim() == "yes" {
        true => Ok(()),
        false => refused("nothing is changed"),
    }
}
