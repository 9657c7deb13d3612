//! `godwit site`, what a person decides about hosts, and the alarms that come before every list.
//!
//! Owns nothing. Refuses: to pass on that a host is off, or that this one boots alone, before the person has said yes.

use crate::args::{Global, SiteCommand};
use crate::connect::{agent, controller};
use crate::exit::{CommandResult, Failure, RUNNING_TWICE};
use crate::output::Output;
use crate::plain;
use crate::watch::failure;
use godwit_rpc::ControllerClient;
use godwit_types::control_api::{HostState, VmView};
use godwit_types::site::{Alarm, SiteView};
use godwit_types::vm::VmState;
use godwit_types::{ErrorCode, HostName, VmName};
use std::io::{BufRead as _, IsTerminal as _};

/// Carries a command out.
pub async fn run(command: SiteCommand, global: &Global, output: &Output) -> CommandResult {
    match command {
        SiteCommand::Show => {
            let client = controller(global)?;
            let view = client.site().await.map_err(failure)?;
            let vms = client.vms().await.map_err(failure)?;
            output.show(&view, |output, view| show(view, &vms, output));
            judged(&view)
        }
        SiteCommand::Acknowledge => {
            let done = controller(global)?.acknowledge().await.map_err(failure)?;
            output.show(&done, |output, done| output.line(&done.message));
            Ok(())
        }
    }
}

fn show(view: &SiteView, vms: &[VmView], output: &Output) {
    let charge = match view.in_charge {
        true => "grants what is asked for",
        false => "grants nothing",
    };
    output.line(format!("controller: {charge}, last word {}", view.stamp));
    for (host, state) in &view.hosts {
        output.line(host_line(host, *state, vms));
    }
    let waiting = vms.iter().filter_map(vm_line);
    let waiting: Vec<String> = waiting.collect();
    let lines = waiting.iter().map(|line| plain::sentence(line));
    lines.for_each(|line| output.line(line));
    match view.sentences.is_empty() {
        true if waiting.is_empty() => output.line("no alarm"),
        true => output.line("no other alarm"),
        false => tell(view),
    }
}

/// Whether a host answers; of one that does not, which VMs wait for it and what a person may do.
fn host_line(host: &HostName, state: HostState, vms: &[VmView]) -> String {
    if state == HostState::Connected {
        return format!("host {host} answers");
    }
    let its = vms
        .iter()
        .filter(|vm| vm.state == VmState::Unreachable && vm.host.as_ref() == Some(host));
    let its: Vec<&str> = its.map(|vm| vm.spec.name.as_str()).collect();
    match its.is_empty() {
        true => format!("host {host} does not answer; no VM waits for it"),
        false => format!(
            "host {host} does not answer, and VMs wait for it: {}: bring it back; or, when it is powered off, run 'godwit host fenced {host}' and start them elsewhere",
            its.join(", ")
        ),
    }
}

/// A VM that waits for something, with what ends that; those that are held twice are alarms.
fn vm_line(vm: &VmView) -> Option<String> {
    let waits = matches!(
        vm.state,
        VmState::InDoubt | VmState::DamagedRecord | VmState::Crashed | VmState::HandingOver
    );
    let why = vm.note.as_deref().unwrap_or("see 'godwit vm show'");
    waits.then(|| format!("VM {} is {}: {why}", vm.spec.name, vm.state))
}

fn tell(view: &SiteView) {
    for sentence in &view.sentences {
        plain::tell(&format!("ALARM: {sentence}"));
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
        "Is host {host} powered off now? If it runs, a VM of it may run twice. It may be powered on later: it asks its site before it boots a VM."
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
    plain::ask(&format!("{question} Type 'yes':"));
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    match read.is_ok() && answer.trim() == "yes" {
        true => Ok(()),
        false => refused("nothing was changed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(name: &str, state: VmState, note: Option<&str>) -> VmView {
        serde_json::from_value(serde_json::json!({
            "spec": { "name": name, "vcpus": 1, "memory_mib": 64, "kernel": "/k" },
            "state": state, "host": "b", "generation": 3, "note": note,
        }))
        .unwrap()
    }

    #[test]
    fn a_silent_host_is_shown_with_its_vms_and_the_command() {
        let vms = [
            vm("web", VmState::Unreachable, None),
            vm("db", VmState::Running, None),
        ];
        let host = HostName::new("b").unwrap();
        let line = host_line(&host, HostState::Unreachable, &vms);
        assert!(
            line.contains("web: bring") && !line.contains("db"),
            "{line}"
        );
        assert!(line.contains("godwit host fenced b"), "{line}");
        let line = host_line(&host, HostState::Connected, &vms);
        assert_eq!(line, "host b answers");
    }

    #[test]
    fn a_vm_that_waits_is_shown_with_what_it_waits_for() {
        let waits = vm("web", VmState::InDoubt, Some("it waits for host a"));
        let line = vm_line(&waits).unwrap();
        assert!(
            line.contains("in-doubt") && line.contains("it waits for host a"),
            "{line}"
        );
        assert!(vm_line(&vm("web", VmState::Crashed, None)).is_some());
        assert_eq!(vm_line(&vm("web", VmState::Running, None)), None);
    }
}
