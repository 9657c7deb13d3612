//! `godwit host leave`: takes this machine out of its site; the reverse of joining.
//!
//! Owns what it removes: certificate and configuration. The agent's records are moved aside, never deleted. Every step can
//! be taken again: what is known of the site goes last. Refuses: while VMs are held here, while the controller does not
//! answer (unless a person says that it is gone), to clear up under a running agent, and to clear records away while nobody
//! can say what they hold: by what was said before only within [`NOTE_GOOD_S`] of the same boot, of the same life of this
//! host, and never a record that holds a VM or may.

use crate::args::HostLeave;
use crate::exit::{CommandResult, Failure};
use crate::output::Output;
use crate::watch::failure;
use godwit_agent::config::{ConfigError, HostConfig, LEAVING_FILE};
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::{AgentClient, Client, ClientError, ControllerClient, Identity, Role};
use godwit_store::{VmStore, load_json, save_json};
use godwit_types::control_api::Done;
use godwit_types::{ErrorCode, VmName};
use serde::{Deserialize, Serialize};
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
/// How long a note is good for, s: leaving is one command, and the same once more after a crash in its middle.
const NOTE_GOOD_S: i64 = 3600;

/// What is noted of a try to leave: that nothing was held then.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Leaving {
    /// The life of this host's certificate; none when there is none any more.
    life: Option<String>,
    /// The kernel's name of this boot.
    boot: String,
    unix_s: i64,
}

impl Leaving {
    fn now(config: &HostConfig) -> Self {
        let holder = Identity::load(&config.pki_dir()).and_then(|identity| identity.holder());
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        Self {
            life: holder.ok().map(|holder| holder.life),
            boot: boot.unwrap_or_default().trim().to_owned(),
            unix_s: now_unix_s(),
        }
    }

    /// Whether what was noted then still says something now.
    fn is_good(&self, now: &Self) -> bool {
        let age = now.unix_s.saturating_sub(self.unix_s);
        self.life.is_some()
            && self.life == now.life
            && self.boot == now.boot
            && (0..=NOTE_GOOD_S).contains(&age)
    }
}

fn refused(message: impl Into<String>) -> Failure {
    Failure::new(ErrorCode::WrongState, message)
}

/// Takes this host out of its site, if it holds no VM.
pub async fn run(arguments: HostLeave, output: &Output) -> CommandResult {
    let config = HostConfig::load(&arguments.config).map_err(|error| not_joined(&error))?;
    let place = Place {
        config: &config,
        file: &arguments.config,
    };
    let said = place.must_hold_nothing().await?;
    let removal = match arguments.controller_is_gone {
        true => Removal::Before,
        false => tell_controller(&config).await?,
    };
    place.may_clear(said, removal, &Leaving::now(&config))?;
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

/// Who never joined has nothing to leave; the remedy of a missing file, to write it, is not theirs.
fn not_joined(error: &ConfigError) -> Failure {
    let message = match error {
        ConfigError::Read { path, source } if source.kind() == std::io::ErrorKind::NotFound => {
            format!(
                "this machine is no host of a site, so there is nothing to leave: {} does not exist; name another configuration with --config FILE",
                path.display()
            )
        }
        other => other.to_string(),
    };
    Failure::new(ErrorCode::InvalidRequest, message)
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

/// What is known of the host that leaves.
#[derive(Clone, Copy)]
struct Place<'a> {
    config: &'a HostConfig,
    file: &'a Path,
}

impl Place<'_> {
    async fn must_hold_nothing(self) -> Result<Said, Failure> {
        let agent = AgentClient::new(Client::unix(&self.config.agent_socket()));
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
            held => Err(refused(self.holds(held))),
        }
    }

    /// The way out of a site that still knows this host; and of one that does not, where only a person can see whether a
    /// guest lives here that runs elsewhere, too.
    fn holds(self, held: &[VmName]) -> String {
        let (host, names) = (&self.config.name, held.iter().map(VmName::as_str));
        format!(
            "host {host} holds {}: move them away with 'godwit host drain {host}', then leave; if it was removed from its site, or the controller is gone for good: see that no guest runs here, stop the agent, move {} aside and delete {}, which lets this machine join anew",
            names.collect::<Vec<_>>().join(", "),
            self.config.state_dir.display(),
            self.file.display()
        )
    }

    /// Notes durably that the controller removed this host or its agent held nothing, for who has to leave once more. A host
    /// that was removed before while nobody could say what it holds keeps its records: a guest of it may live.
    fn may_clear(self, said: Said, removal: Removal, now: &Leaving) -> CommandResult {
        let config = self.config;
        let note = config.state_dir.join(LEAVING_FILE);
        if (said, removal) != (Said::NoWord, Removal::Before) {
            return save_json(&note, now)
                .map_err(|error| Failure::new(ErrorCode::Internal, error.to_string()));
        }
        let records = records(config)?;
        if records.is_empty() {
            return Ok(());
        }
        let held: Vec<VmName> = records
            .into_iter()
            .filter(|vm| {
                let record = VmStore::peek(&config.state_dir, vm);
                // One that cannot be read may hold its VM.
                record.map_or(true, |record| record.is_some_and(|it| it.may_hold()))
            })
            .collect();
        if !held.is_empty() {
            let holds = self.holds(&held);
            return Err(refused(format!("{NO_WORD}; by its records {holds}")));
        }
        // One that cannot be read says nothing.
        match load_json::<Leaving>(&note) {
            Ok(Some(then)) if then.is_good(now) => Ok(()),
            _ => Err(refused(NO_WORD)),
        }
    }
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

/// The VMs that this host has a record of, or a directory for one.
fn records(config: &HostConfig) -> Result<Vec<VmName>, Failure> {
    let dir = config.state_dir.join("vms");
    let unread = |why: String| {
        refused(format!(
            "{NO_WORD}; {} cannot be read: {why}",
            dir.display()
        ))
    };
    let entries = match std::fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(unread(error.to_string())),
    };
    entries
        .map(|entry| {
            let name = entry
                .map_err(|error| unread(error.to_string()))?
                .file_name();
            let name = name.to_string_lossy().into_owned();
            VmName::new(name.clone()).map_err(|_| unread(format!("'{name}' is no VM's name")))
        })
        .collect()
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
    use godwit_rpc::Authority;

    /// A host that has joined, with its certificate.
    fn host(dir: &Path, ca: &Authority) -> HostConfig {
        let text = format!(
            "name = \"a\"\nlisten = \"127.0.0.1:1\"\nmigration_addresses = [\"127.0.0.1\"]\nstate_dir = \"{}\"\n",
            dir.display()
        );
        let config = HostConfig::parse(&text, Path::new("t")).unwrap();
        join(&config, ca);
        config
    }

    fn place(config: &HostConfig) -> Place<'_> {
        let file = Path::new("/t/host.toml");
        Place { config, file }
    }

    fn join(config: &HostConfig, ca: &Authority) {
        let identity = ca.identity(&Role::Host(config.name.clone()), now_unix_s());
        std::fs::create_dir_all(config.pki_dir()).unwrap();
        identity.unwrap().save(&config.pki_dir()).unwrap();
    }

    #[test]
    fn a_host_that_was_removed_and_whose_agent_is_silent_keeps_its_records() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path();
        let ca = Authority::create(now_unix_s()).unwrap();
        let config = host(state, &ca);
        std::fs::create_dir_all(state.join("vms/web")).unwrap();
        let may_clear =
            |said, removal| place(&config).may_clear(said, removal, &Leaving::now(&config));
        let silent = || may_clear(Said::NoWord, Removal::Before);
        assert_eq!(silent().unwrap_err().error.message, NO_WORD);
        may_clear(Said::NoWord, Removal::Now).unwrap();
        // Left once more after a crash, or after the agent was stopped by hand.
        silent().unwrap();
        std::fs::remove_file(state.join(LEAVING_FILE)).unwrap();
        assert!(silent().is_err());
        may_clear(Said::Nothing, Removal::Before).unwrap();
        silent().unwrap();
        std::fs::remove_file(state.join(LEAVING_FILE)).unwrap();
        std::fs::remove_dir_all(state.join("vms")).unwrap();
        silent().unwrap();
    }

    #[test]
    fn a_note_of_another_life_boot_or_hour_clears_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let ca = Authority::create(now_unix_s()).unwrap();
        let config = host(dir.path(), &ca);
        std::fs::create_dir_all(dir.path().join("vms/web")).unwrap();
        let noted = Leaving::now(&config);
        place(&config)
            .may_clear(Said::Nothing, Removal::Before, &noted)
            .unwrap();
        let silent = |now: &Leaving| place(&config).may_clear(Said::NoWord, Removal::Before, now);
        silent(&Leaving::now(&config)).unwrap();
        for (boot, unix_s) in [
            ("another", noted.unix_s),
            (noted.boot.as_str(), noted.unix_s + NOTE_GOOD_S + 1),
            (noted.boot.as_str(), noted.unix_s - 1),
        ] {
            let (life, boot) = (noted.life.clone(), boot.to_owned());
            let now = Leaving { life, boot, unix_s };
            assert_eq!(silent(&now).unwrap_err().error.message, NO_WORD, "{now:?}");
        }
        // It joined anew since.
        join(&config, &ca);
        assert!(silent(&Leaving::now(&config)).is_err());
        // What an older version has noted says nothing.
        let note = dir.path().join(LEAVING_FILE);
        save_json(
            &note,
            &"the controller removed this host, or its agent held no VM",
        )
        .unwrap();
        assert!(silent(&Leaving::now(&config)).is_err());
    }

    #[test]
    fn a_note_does_not_clear_a_record_that_holds_its_vm_or_may() {
        let dir = tempfile::tempdir().unwrap();
        let ca = Authority::create(now_unix_s()).unwrap();
        let config = host(dir.path(), &ca);
        let may_clear =
            |said| place(&config).may_clear(said, Removal::Before, &Leaving::now(&config));
        may_clear(Said::Nothing).unwrap();
        let web = dir.path().join("vms/web");
        std::fs::create_dir_all(&web).unwrap();
        std::fs::write(web.join("ownership"), "noise").unwrap();
        let silent = || may_clear(Said::NoWord);
        let told = silent().unwrap_err().error.message;
        assert!(told.contains("holds web"), "{told}");
        let aside = format!(
            "move {} aside and delete /t/host.toml",
            dir.path().display()
        );
        assert!(
            told.contains(&aside),
            "no way out of a site that removed this host: {told}"
        );
        std::fs::remove_file(web.join("ownership")).unwrap();
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
