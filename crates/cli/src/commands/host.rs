//! `godwit host`: join, leave, renew, list, show, add, remove, check; what empties and watches hosts is in `drain`.
//!
//! Owns nothing.

use crate::args::{Global, HostCommand};
use crate::commands::{close, drain, join, leave, renew, site};
use crate::connect::controller;
use crate::exit::{CommandResult, FAILED, Failure};
use crate::output::Output;
use crate::wait;
use crate::watch::failure;
use godwit_types::ErrorCode;
use godwit_types::host::{Check, CheckStatus};
use std::path::Path;

/// Carries a command out.
pub async fn run(command: HostCommand, global: &Global, output: &Output) -> CommandResult {
    match command {
        HostCommand::Join(arguments) => join::run(arguments, output).await,
        HostCommand::Renew(arguments) => renew::run(arguments, output).await,
        HostCommand::Leave(arguments) => leave::run(arguments, output).await,
        HostCommand::List => {
            let client = controller(global)?;
            let alarms = site::alarms(&client, output).await;
            let hosts = client.hosts().await.map_err(failure)?;
            output.show(&hosts, |output, hosts| output.hosts(hosts));
            alarms
        }
        HostCommand::Show { host } => {
            let view = controller(global)?.host(&host).await.map_err(failure)?;
            output.show(&view, |output, view| output.host(view));
            Ok(())
        }
        HostCommand::Add => {
            let token = controller(global)?.add_host().await.map_err(failure)?;
            output.show(&token, |output, token| {
                output.line(format!(
                    "Run this on the new host within {} minutes:",
                    token.valid_for_s / 60
                ));
                join::show_command(output, &token.command);
            });
            Ok(())
        }
        HostCommand::Remove {
            host,
            confirm_unreachable,
        } => {
            let done = controller(global)?
                .remove_host(&host, confirm_unreachable)
                .await
                .map_err(failure)?;
            output.show(&done, |output, done| output.line(&done.message));
            Ok(())
        }
        HostCommand::Check {
            host: Some(host), ..
        } => {
            let client = controller(global)?;
            let why = std::future::ready(format!("waiting for host {host}, which checks itself"));
            let found = wait::saying(why, client.check_host(&host)).await;
            let found = found.map_err(failure)?;
            output.show(&found, |output, found| output.checks(&found.checks));
            judged(&found.checks)
        }
        HostCommand::Check { host: None, config } => check_this_host(&config, output).await,
        HostCommand::Top(arguments) => drain::top(arguments, global, output).await,
        HostCommand::Drain(arguments) => drain::drain(arguments, global, output).await,
        HostCommand::Fenced { host, yes } => site::fenced(&host, yes, global, output).await,
        HostCommand::BootAlone { yes } => site::boot_alone(yes, global, output).await,
        HostCommand::Close { at_shutdown } => close::close(at_shutdown, global, output).await,
        HostCommand::Open => close::open(global, output).await,
        HostCommand::Undrain { host } => drain::undrain(&host, global, output).await,
    }
}

async fn check_this_host(config: &Path, output: &Output) -> CommandResult {
    let found = godwit_agent::check(config).await;
    let found =
        found.map_err(|error| Failure::new(ErrorCode::InvalidRequest, error.to_string()))?;
    output.show(&found, |output, found| output.checks(&found.checks));
    judged(&found.checks)
}

fn judged(checks: &[Check]) -> CommandResult {
    if checks
        .iter()
        .any(|check| check.status == CheckStatus::Failed)
    {
        return Err(Failure::told(FAILED));
    }
    Ok(())
}
