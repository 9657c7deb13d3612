//! `godwit host drain` and `godwit host top`: emptying a host and watching what hosts are busy with.
//!
//! Owns the progress bars. Ctrl-C stops watching, never the work. Refuses: to call a host empty while a VM runs on it.

use crate::args::{Global, HostDrain, HostTopArgs};
use crate::connect::{Reader, controller, reader};
use crate::exit::{CommandResult, Failure, REFUSED};
use crate::figures::fitting;
use crate::follow::{self, until_left};
use crate::keys::Keys;
use crate::output::Output;
use crate::plain;
use crate::tables::drain_parts;
use crate::watch::{bar, failure, permille};
use godwit_rpc::ControllerClient;
use godwit_types::drain::{DrainRequest, DrainState, DrainStep, DrainView};
use godwit_types::load::HostTop;
use godwit_types::{ErrorCode, HostName};
use indicatif::{MultiProgress, ProgressBar};
use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

/// Columns of a name before its bar.
const PREFIX: usize = 16;

/// Empties a host, says how it would, shows how far it is, or ends it.
pub async fn drain(arguments: HostDrain, global: &Global, output: &Output) -> CommandResult {
    let client = controller(global)?;
    let host = &arguments.host;
    if arguments.stop {
        return undrain(host, global, output).await;
    }
    if arguments.status {
        let view = client.drain_view(host).await.map_err(failure)?;
        output.show(&view, |output, view| output.drain(view));
        return Ok(());
    }
    let request = DrainRequest {
        dry_run: arguments.dry_run,
        at_once: arguments.at_once,
        to: arguments.to,
    };
    let view = client.drain(host, &request).await.map_err(failure)?;
    if arguments.dry_run || arguments.detach {
        output.show(&view, |output, view| output.drain(view));
        return if arguments.dry_run {
            judged(&view)
        } else {
            Ok(())
        };
    }
    if !output.json {
        plain::tell(&format!(
            "Ctrl-C stops watching; the moves continue. End them with 'godwit host undrain {host}'"
        ));
    }
    let bars = Bars::new(output);
    let left = (
        serde_json::json!({ "detached": true, "host": host }),
        format!(
            "Detached: the host is still being emptied.\n  see how far it is:  godwit host drain {host} --status\n  end it:             godwit host undrain {host}"
        ),
    );
    let ended = follow(&client, host, &bars);
    let view = until_left(ended, || bars.clear(), output, left).await?;
    output.show(&view, |output, view| output.drain(view));
    judged(&view)
}

/// The host takes VMs again.
pub async fn undrain(host: &HostName, global: &Global, output: &Output) -> CommandResult {
    let done = controller(global)?.undrain(host).await.map_err(failure)?;
    output.show(&done, |output, done| output.line(&done.message));
    Ok(())
}

/// Success only when the host is empty, or would be: not when the drain was ended, or a VM is left that runs.
fn judged(view: &DrainView) -> CommandResult {
    let planned = view.state == DrainState::Planned;
    let left = |step: DrainStep| match step {
        DrainStep::Moved | DrainStep::Off => false,
        DrainStep::Waiting | DrainStep::Moving => !planned,
        DrainStep::CannotMove => true,
    };
    let stopped = view.state == DrainState::Stopped;
    if stopped || view.vms.iter().any(|vm| left(vm.step)) {
        return Err(Failure::told(REFUSED));
    }
    Ok(())
}

/// Follows until nothing is left to move.
async fn follow(
    client: &ControllerClient,
    host: &HostName,
    bars: &Bars,
) -> Result<DrainView, Failure> {
    let open = async || client.drain_events(host).await;
    let look = async || client.drain_view(host).await;
    let again = format!("see how far it is with 'godwit host drain {host} --status'");
    follow::events(open, look, |view| bars.show(view), &again).await
}

/// One bar for the whole and one for each VM on its way, on standard error and only on a terminal.
struct Bars {
    all: MultiProgress,
    whole: ProgressBar,
    /// Columns beside a bar.
    room: usize,
    vms: std::cell::RefCell<BTreeMap<String, ProgressBar>>,
}

impl Bars {
    fn new(output: &Output) -> Self {
        let all = MultiProgress::new();
        if output.json {
            all.set_draw_target(indicatif::ProgressDrawTarget::hidden());
        }
        let (whole, room) = bar(PREFIX);
        Self {
            whole: all.add(whole),
            room,
            all,
            vms: Default::default(),
        }
    }

    /// Shows a drain that goes on; hands back one that is over.
    fn show(&self, view: DrainView) -> Option<DrainView> {
        if view.state != DrainState::Draining {
            return Some(view);
        }
        let done = view.vms.iter().map(|vm| match vm.step {
            DrainStep::Waiting => 0.0,
            DrainStep::Moving => vm.percent.unwrap_or(0.0) / 100.0,
            DrainStep::Moved | DrainStep::CannotMove | DrainStep::Off => 1.0,
        });
        let share = done.sum::<f64>() / view.vms.len().max(1) as f64;
        self.whole.set_prefix(view.host.to_string());
        self.whole.set_position(permille(100.0 * share));
        self.whole
            .set_message(fitting(&drain_parts(&view), self.room));
        let mut bars = self.vms.borrow_mut();
        for vm in &view.vms {
            let name = vm.vm.to_string();
            if vm.step != DrainStep::Moving {
                if let Some(bar) = bars.remove(&name) {
                    bar.finish_and_clear();
                }
                continue;
            }
            let bar = bars
                .entry(name.clone())
                .or_insert_with(|| self.all.add(bar(PREFIX).0));
            let percent = vm.percent.unwrap_or(0.0);
            bar.set_prefix(name);
            bar.set_position(permille(percent));
            let to = vm
                .to
                .as_ref()
                .map_or(String::new(), |to| format!(" to {to}"));
            bar.set_message(format!("{percent:.0} %{to}"));
        }
        None
    }

    fn clear(&self) {
        self.whole.finish_and_clear();
        for bar in self.vms.borrow().values() {
            bar.finish_and_clear();
        }
    }
}

/// Shows what hosts are busy with, again and again.
pub async fn top(arguments: HostTopArgs, global: &Global, output: &Output) -> CommandResult {
    let reader = reader(global).await?;
    let live = std::io::stdout().is_terminal() && !arguments.once && !output.json;
    let mut keys = live.then(Keys::listen);
    loop {
        let mut tops = loads(&reader).await?;
        if let Some(host) = &arguments.host {
            tops.retain(|top| top.host == *host);
            if tops.is_empty() {
                let message = format!("there is no host {host}: see 'godwit host list'");
                return Err(Failure::new(ErrorCode::UnknownHost, message));
            }
        }
        if live {
            // Home, and what is below is cleared: the table is drawn over the last one.
            let _ = write!(std::io::stdout(), "\x1b[H\x1b[2J");
        }
        output.show(&tops, |output, tops| output.top(tops));
        if arguments.once {
            return Ok(());
        }
        if live {
            output.line("\nq or Ctrl-C ends this.");
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(arguments.every.into())) => {}
            _ = tokio::signal::ctrl_c() => return Ok(()),
            () = quit(keys.as_mut()) => return Ok(()),
        }
    }
}

async fn quit(keys: Option<&mut Keys>) {
    match keys {
        Some(keys) => keys.quit().await,
        None => std::future::pending().await,
    }
}

async fn loads(reader: &Reader) -> Result<Vec<HostTop>, Failure> {
    match reader {
        Reader::Controller(client) => client.top().await.map_err(failure),
        Reader::Agent(client) => {
            let load = client.load().await.map_err(failure)?;
            Ok(vec![HostTop {
                host: load.host.clone(),
                load: Some(load),
                draining: false,
            }])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::VmName;
    use godwit_types::drain::DrainVm;

    fn exit(state: DrainState, steps: &[DrainStep]) -> u8 {
        let vm = |step: &DrainStep| DrainVm {
            step: *step,
            ..DrainVm::waiting(VmName::new("web").unwrap(), 64)
        };
        let view = DrainView {
            host: HostName::new("b").unwrap(),
            state,
            began_unix_s: 0,
            request: DrainRequest::default(),
            vms: steps.iter().map(vm).collect(),
            at_once: 1,
            plan: String::new(),
            eta_s: None,
        };
        judged(&view).map_or_else(|failure| failure.exit, |()| 0)
    }

    #[test]
    fn a_drain_that_was_ended_or_left_a_vm_behind_is_no_success() {
        use DrainState::{Done, Planned, Stopped};
        use DrainStep::{CannotMove, Moved, Moving, Off, Waiting};
        assert_eq!(exit(Done, &[]), 0);
        assert_eq!(exit(Done, &[Moved, Off]), 0);
        assert_eq!(exit(Done, &[Moved, CannotMove]), REFUSED);
        assert_eq!(exit(Done, &[Moved, Waiting]), REFUSED);
        assert_eq!(exit(Stopped, &[Moved, Moving]), REFUSED);
        assert_eq!(exit(Stopped, &[Moved]), REFUSED);
        assert_eq!(exit(Planned, &[Waiting]), 0);
        assert_eq!(exit(Planned, &[Waiting, CannotMove]), REFUSED);
    }
}
