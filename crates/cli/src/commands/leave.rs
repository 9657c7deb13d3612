//! `godwit host leave`: takes this machine out of its site; the reverse of joining.
//!
//! Owns what it removes: certificate and configuration. The agent's records are moved aside, never deleted. Every step can
//! be taken again: what is known of the site goes last. Refuses: while VMs are held here, while the controller does not
//! answer (unless a person says that it is gone), to clear up under a running agent, and to clear records away while nobody
//! can say what they hold.

use crate::args::HostLeave;
use crate::exit::{CommandResult, Failure};
use crate::output::Output;
use crate::watch::failure;
use godwit_agent::config::{HostConfig, LEAVING_FILE};
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::{AgentClient, Client, ClientError, ControllerClient, Identity, Role};
use godwit_types::control_api::Done;
use godwit_types::{ErrorCode, VmName};
use std::path::{Path, PathBuf};
use std::time::Duration;

const SERVICE: &str = "godwit-agent.service";
/// Longest wait for the service to stop.
const STOPS_WITHIN: Duration = Duration::from_secs(60);
/// What stays in the state directory: it is removed by itself, or is of an earlier leaving.
const PKI: &str = "pki";
const FORMER: &str = "former-";
const NO_WORD: &str =
    "no agent runs here that could say whether this host holds VMs: start it, then leave";

fn refused(message: impl Into<String>) -> Failure {
    Failure::new(ErrorCode::WrongState, message)
}

/// Takes this host out of its site, if it holds no VM.
pub async fn run(arguments: HostLeave, output: &Output) -> CommandResult {
    let config = HostConfig::load(&arguments.config)
        .map_err(|error| Failure::new(ErrorCode::InvalidRequest, error.to_string()))?;
    let said = must_hold_nothing(&config).await?;
    let removal = match arguments.controller_is_gone {
        true => Removal::Before,
        false => tell_controller(&config).await?,
    };
    may_clear(said, removal, &config.state_dir)?;
    stop_agent(&config).await?;
    let kept = clear(&config, &arguments.config, now_unix_s())?;
    let kept = kept.map_or_else(String::new, |kept| {
        format!("; what it knew of its VMs is kept in {}", kept.display())
    });
    let message = format!(
        "host '{}' has left its site{kept}; join again with 'godwit host join'",
        config.name
    );
    output.show(&Done { message }, |output, done| output.line(&done.message));
    Ok(())
}

/// What the agent said of the VMs that this host holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Said {
    Nothing,
    /// No agent runs that could say.
    NoWord,
}

/// Who says that this host is no longer one of the site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Removal {
    /// The controller removed it now, which it does with no host that holds VMs.
    Now,
    /// It was removed before, or that controller never knew it, or it is gone: this says nothing of its VMs.
    Before,
}

async fn must_hold_nothing(config: &HostConfig) -> Result<Said, Failure> {
    let agent = AgentClient::new(Client::unix(&config.agent_socket()));
    let vms = match agent.vms().await {
        Ok(vms) => vms,
        Err(ClientError::NotReached { .. }) => return Ok(Said::NoWord),
        Err(error) => return Err(failure(error)),
    };
    let unread = agent.host().await.map_err(failure)?.unread;
    let held = vms.into_iter().filter(|vm| vm.claim.may_hold());
    let held = held.map(|vm| vm.spec.name).chain(unread.into_keys());
    let held: Vec<VmName> = held.collect();
    match held.as_slice() {
        [] => Ok(Said::Nothing),
        held => Err(refused(holds(&config.name, held))),
    }
}

fn holds(host: &godwit_types::HostName, held: &[VmName]) -> String {
    let names: Vec<&str> = held.iter().map(VmName::as_str).collect();
    format!(
        "host {host} holds {}: move them away with 'godwit host drain {host}', then leave",
        names.join(", ")
    )
}

/// A host that was removed before has nothing to tell.
async fn tell_controller(config: &HostConfig) -> Result<Removal, Failure> {
    let Ok(identity) = Identity::load(&config.pki_dir()) else {
        return Ok(Removal::Before);
    };
    let Some(address) = config.controller else {
        return Err(refused(
            "host.toml does not say where the controller listens: add controller = \"ADDRESS:PORT\"",
        ));
    };
    let client = Client::tls(address, &identity, Role::Controller);
    let client = client.map_err(|error| Failure::new(ErrorCode::Internal, error.to_string()))?;
    match ControllerClient::new(client).leave().await {
        Ok(_) => Ok(Removal::Now),
        Err(ClientError::Refused(error)) if error.code == ErrorCode::NotAllowed => {
            Ok(Removal::Before)
        }
        Err(error @ ClientError::Refused(_)) => Err(failure(error)),
        Err(error) => Err(Failure::new(
            ErrorCode::HostUnreachable,
            format!(
                "{error}; nothing was removed here. Bring the controller back and leave again; only if it is gone for good, leave with --controller-is-gone"
            ),
        )),
    }
}

/// Notes durably that the controller removed this host or its agent held nothing, for who has to leave once more. A host
/// that was removed before while nobody could say what it holds keeps its records: a guest of it may live.
fn may_clear(said: Said, removal: Removal, state_dir: &Path) -> CommandResult {
    let note = state_dir.join(LEAVING_FILE);
    if (said, removal) == (Said::NoWord, Removal::Before) {
        let no_records = match std::fs::read_dir(state_dir.join("vms")) {
            Ok(mut records) => records.next().is_none(),
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        return match no_records || note.exists() {
            true => Ok(()),
            false => Err(refused(NO_WORD)),
        };
    }
    godwit_store::save_json(
        &note,
        &"the controller removed this host, or its agent held no VM",
    )
    .map_err(|error| Failure::new(ErrorCode::Internal, error.to_string()))
}

async fn stop_agent(config: &HostConfig) -> CommandResult {
    if Path::new("/run/systemd/system").exists() {
        let stopped = tokio::process::Command::new("systemctl")
            .args(["disable", "--now", SERVICE])
            .output();
        // Whether it worked is seen by the socket.
        let _ = tokio::time::timeout(STOPS_WITHIN, stopped).await;
    }
    let socket = config.agent_socket();
    match std::os::unix::net::UnixStream::connect(&socket) {
        Err(_) => Ok(()),
        Ok(_) => Err(refused(format!(
            "this host leaves, and its agent still runs ({}): stop it, then run the same command once more",
            socket.display()
        ))),
    }
}

/// Moves the records aside and removes certificate and configuration, in this order. Says where the records are.
fn clear(config: &HostConfig, file: &Path, now_unix_s: i64) -> Result<Option<PathBuf>, Failure> {
    let failed = |doing: &str, path: &Path, error: std::io::Error| {
        let message = format!("cannot {doing} {}: {error}", path.display());
        Failure::new(ErrorCode::Internal, message)
    };
    let state = &config.state_dir;
    let former = state.join(format!("{FORMER}{now_unix_s}"));
    let mut entries = match std::fs::read_dir(state) {
        Ok(entries) => entries.flatten().collect::<Vec<_>>(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(failed("read", state, error)),
    };
    // The note last: until then a crash lets this be done once more.
    entries.sort_by_key(|entry| entry.file_name() == LEAVING_FILE);
    let mut moved = false;
    for entry in entries {
        let name = entry.file_name();
        if name == PKI || name.to_string_lossy().starts_with(FORMER) {
            continue;
        }
        if !moved {
            godwit_store::make_directory(&former, 0o700)
                .map_err(|error| failed("make", &former, std::io::Error::other(error)))?;
            moved = true;
        }
        std::fs::rename(entry.path(), former.join(&name))
            .map_err(|error| failed("move", &entry.path(), error))?;
    }
    let gone = |removed: std::io::Result<()>, path: &Path| match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(failed("remove", path, error))
        }
        _ => Ok(()),
    };
    let pki = config.pki_dir();
    gone(std::fs::remove_dir_all(&pki), &pki)?;
    gone(std::fs::remove_file(file), file)?;
    Ok(moved.then_some(former))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_was_removed_and_whose_agent_is_silent_keeps_its_records() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path();
        std::fs::create_dir_all(state.join("vms/web")).unwrap();
        let silent = || may_clear(Said::NoWord, Removal::Before, state);
        assert_eq!(silent().unwrap_err().error.message, NO_WORD);
        may_clear(Said::NoWord, Removal::Now, state).unwrap();
        // Left once more after a crash, or after the agent was stopped by hand.
        silent().unwrap();
        std::fs::remove_file(state.join(LEAVING_FILE)).unwrap();
        assert!(silent().is_err());
        may_clear(Said::Nothing, Removal::Before, state).unwrap();
        silent().unwrap();
        std::fs::remove_file(state.join(LEAVING_FILE)).unwrap();
        std::fs::remove_dir_all(state.join("vms")).unwrap();
        silent().unwrap();
    }

    #[test]
    fn what_is_left_lets_the_machine_join_again_and_keeps_its_records() {
        let dir = tempfile::tempdir().unwrap();
        let (state, file) = (dir.path().join("state"), dir.path().join("host.toml"));
        std::fs::create_dir_all(state.join("vms/web")).unwrap();
        std::fs::create_dir_all(state.join("pki")).unwrap();
        std::fs::write(state.join("site.json"), "{}").unwrap();
        let text = format!(
            "name = \"a\"\nlisten = \"127.0.0.1:1\"\nmigration_addresses = [\"127.0.0.1\"]\nstate_dir = \"{}\"\n",
            state.display()
        );
        std::fs::write(&file, &text).unwrap();
        let config = HostConfig::parse(&text, &file).unwrap();
        let kept = clear(&config, &file, 7).unwrap().unwrap();
        assert!(kept.join("vms/web").is_dir() && kept.join("site.json").is_file());
        let left: Vec<_> = std::fs::read_dir(&state).unwrap().flatten().collect();
        assert_eq!(left.len(), 1, "only what was moved aside");
        assert!(!file.exists());
        // Taken again, as after a crash in the middle, it changes nothing more.
        assert!(clear(&config, &file, 8).unwrap().is_none());
    }
}
