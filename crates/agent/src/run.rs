//! The agent's life: set up, serve until told to stop, leave the VMs alone.
//!
//! Owns the listeners. Refuses: to start without this host's certificate, beside another agent, or as anybody but
//! root.

use crate::addresses::Addresses;
use crate::agent::{self, Agent};
use crate::api;
use crate::boot::{self, Boots};
use crate::cancelled::Cancelled;
use crate::carrying::Carrier;
use crate::closing::Closing;
use crate::config::{CONFIG_PATH, ConfigError, HostConfig, LEAVING_FILE};
use crate::datastore_rooms::Rooms;
use crate::launch::{VmProgram, make_dir};
use crate::manager::Manager;
use crate::memory::Memory;
use crate::probe::Probes;
use crate::qemu_now::QemuNow;
use crate::records::{BOOT_FILE_MAX, Records};
use crate::removed::Removed;
use crate::renewal::Certificate;
use crate::reports::Reports;
use crate::site::Site;
use crate::supervisor::Supervisor;
use crate::system::System;
use crate::users::{self, UserError};
use godwit_guestmem::mem_tmpfs;
use godwit_rpc::agent_client::RULES;
use godwit_rpc::listen::Place;
use godwit_rpc::pki::Holder;
use godwit_rpc::pki::PkiError;
use godwit_rpc::{
    Admission, AgentClient, Client, Current, Identity, Revocations, Role, Server, Unwanted, tls,
    unix_socket,
};
use godwit_store::read_text;
use godwit_types::control_api::HostCheck;
use godwit_types::host_api::PeerEnvelope;
use godwit_types::{ApiError, ErrorCode, VmName};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// Why the agent could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    User(#[from] UserError),
    #[error(
        "this host has no usable certificate in {dir}: {source}; join a controller with 'godwit host join'"
    )]
    Identity {
        /// Where it should be.
        dir: PathBuf,
        /// Why it is not usable.
        source: PkiError,
    },
    /// The certificate is another host's.
    #[error(
        "the certificate in {dir} is that of {found}, the configuration says host '{name}': join again or correct the name"
    )]
    OtherHost {
        dir: PathBuf,
        found: String,
        /// Who this host is.
        name: String,
    },
    /// An address or socket cannot be listened on.
    #[error("cannot listen on {place}: {source}; is another agent running?")]
    Listen {
        /// The address or path.
        place: String,
        source: std::io::Error,
    },
    /// A directory or the RAM file system.
    #[error("cannot {doing}: {message}")]
    Setup {
        doing: &'static str,
        message: String,
    },
}

pub(crate) fn setup<E: std::fmt::Display>(doing: &'static str) -> impl FnOnce(E) -> AgentError {
    move |error| AgentError::Setup {
        doing,
        message: error.to_string(),
    }
}

/// The configuration file, or, before this host has joined, the defaults.
pub(crate) fn config_or_defaults(config: &Path) -> Result<HostConfig, ConfigError> {
    config_or_defaults_of(config, config == Path::new(CONFIG_PATH))
}

/// A file that a person named is one that has to be there; the one that joining writes need not.
fn config_or_defaults_of(config: &Path, is_default: bool) -> Result<HostConfig, ConfigError> {
    match config.try_exists() {
        Ok(false) if is_default => HostConfig::before_joining(),
        _ => HostConfig::load(config),
    }
}

/// The VMs that an agent of this host is to look after, by their records alone: those that are to run, whether or not
/// they do, those in doubt, and those whose record cannot be read.
pub fn on_record(config: &Path) -> Result<Vec<VmName>, AgentError> {
    let config = config_or_defaults(config)?;
    let records = Records::new(&config.state_dir, config.name);
    let mut names = match records.vms_dir().try_exists() {
        Ok(false) => Vec::new(),
        _ => records.names().map_err(setup("read this host's records"))?,
    };
    names.retain(|name| records.needs_process(name));
    Ok(names)
}

/// Checks this host by its configuration file, or, before it has joined, with the defaults.
pub async fn check(config: &Path) -> Result<HostCheck, AgentError> {
    let config = config_or_defaults(config)?;
    Ok(agent::check_host(&config, &System::default()).await)
}

/// Runs the agent until `stop` turns true. VMs and their processes go on.
pub async fn run(
    config: &Path,
    program: VmProgram,
    stop: watch::Receiver<bool>,
) -> Result<(), AgentError> {
    let config = HostConfig::load(config)?;
    let current = Current::new(identity(&config)?).map_err(setup("use this host's certificate"))?;
    let system = System::default();
    prepare_dirs(&config, &system)?;
    stay(&config.state_dir).map_err(setup("forget that this host was about to leave"))?;
    let agent = Arc::new(make_agent(config, system, program, &current).await?);
    let server = Server::new(api::router(agent.clone()), RULES, agent.revocations.clone());
    let tls = tls::server_config_of(&current).map_err(setup("use this host's certificate"))?;
    let (local, remote) = listen(&agent.config).await?;
    let socket = unix_socket::OwnSocket::of(agent.config.agent_socket());
    // From here on nothing waits for an address that this host does not have yet.
    agent.take_up().map_err(setup("take up this host's VMs"))?;
    agent
        .go_on_closing()
        .await
        .map_err(setup("see whether this host still shuts down"))?;
    agent.bring_guests_unit_back();
    tokio::spawn(agent.clone().keep_booting(stop.clone()));
    tokio::spawn(agent.clone().keep_telling(stop.clone()));
    tokio::spawn(agent.clone().keep_qemu_known(stop.clone()));
    let (keeper, ends) = (agent.clone(), stop.clone());
    tokio::spawn(async move { keeper.certificate.keep(ends).await });
    let (keeper, ends) = (agent.clone(), stop.clone());
    tokio::spawn(async move { keeper.addresses.keep(&keeper.config, ends).await });
    tracing::info!(host = %agent.config.name, listen = %agent.config.listen, "the agent is ready");
    tokio::join!(
        server.clone().run_unix(local, stop.clone()),
        server.run_tls_at(remote, tls, stop)
    );
    socket.remove();
    tracing::info!("the agent ends; VMs go on");
    Ok(())
}

fn identity(config: &HostConfig) -> Result<Identity, AgentError> {
    let dir = config.pki_dir();
    let loaded = Identity::load(&dir).and_then(|identity| Ok((identity.holder()?, identity)));
    let (holder, identity) = loaded.map_err(|source| AgentError::Identity {
        dir: dir.clone(),
        source,
    })?;
    if holder.role != Role::Host(config.name.clone()) {
        return Err(AgentError::OtherHost {
            dir,
            found: holder.role.to_string(),
            name: config.name.to_string(),
        });
    }
    Ok(identity)
}

/// A host whose agent starts has not left: the note of a try to leave would let a later one clear records away unasked.
fn stay(state_dir: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(state_dir.join(LEAVING_FILE)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn prepare_dirs(config: &HostConfig, system: &System) -> Result<(), AgentError> {
    let dirs = [
        (config.state_dir.clone(), 0o700),
        (config.vms_dir(), 0o700),
        (config.run_dir.clone(), 0o711),
        (config.run_dir.join("vms"), 0o711),
        (config.ram_dir(), 0o711),
    ];
    for (dir, mode) in dirs {
        make_dir(&dir, mode).map_err(setup("make the agent's directories"))?;
    }
    let total = system.meminfo_mib("MemTotal").unwrap_or(0) << 20;
    // A tenth stays for the host; the mount is left alone where it exists, since guests may live on it.
    let bytes = total / 10 * 9;
    mem_tmpfs::ensure_mounted(&config.ram_dir(), bytes)
        .map_err(setup("mount the RAM file system"))?;
    Ok(())
}

async fn make_agent(
    config: HostConfig,
    system: System,
    program: VmProgram,
    current: &Arc<Current>,
) -> Result<Agent, AgentError> {
    let user = users::qemu_user(config.qemu_user.as_deref())?;
    if users::is_nobody_for_want_of(config.qemu_user.as_deref(), user) {
        tracing::warn!(
            "{}: 'useradd --system --no-create-home godwit-qemu', then restart the agent; a VM gets its own id when it is powered off and on",
            users::NOBODY_RUNS
        );
    }
    let qemu = QemuNow::begin(&config, user).await;
    let addresses = Addresses::find(&config).await;
    let records = Records::new(&config.state_dir, config.name.clone());
    let revocations = Arc::new(Revocations::default());
    revocations.extend(
        records
            .revoked()
            .map_err(setup("read the list of revoked certificates"))?,
    );
    let boot_id = boot_id(&config, &system).map_err(setup("note this boot of the host"))?;
    // A copied disk has the same machine-id; the machine's own number is not on the disk.
    let machine_id = ["/sys/class/dmi/id/product_uuid", "/etc/machine-id"]
        .map(|path| system.read(path).unwrap_or_default().trim().to_owned())
        .join("/");
    let name = config.name.clone();
    let site = Site::open(&config.state_dir, name, boot_id.clone(), machine_id)
        .map_err(setup("read what this host knows of its site"))?;
    let site = Arc::new(site);
    let removed = Removed::default();
    removed.are(site.with(|site| site.table().removed.clone()));
    let asker = boot::asker(current.clone(), config.controller, revocations.clone());
    Ok(Agent {
        boots: Boots::new(asker, boot::system_is_stopping()),
        closing: Closing::open(&config.run_dir, &boot_id, config.guest_shutdown_s)
            .map_err(setup("read whether this host shuts down"))?,
        manager: Manager::default(),
        bursts: Arc::default(),
        rooms: Rooms::default(),
        readings: Mutex::default(),
        memory: Memory::new(config.ram_dir()),
        reports: Reports::new(records.clone()),
        cancelled: Cancelled::open(&config.state_dir),
        removed,
        makings: Default::default(),
        crowd: Default::default(),
        certificate: Certificate::new(current.clone(), config.pki_dir(), config.controller),
        boot_id,
        supervisor: Supervisor::new(
            program,
            carrier(current.clone(), revocations.clone(), Arc::clone(&site)),
            records.clone(),
        ),
        site,
        config,
        system,
        user,
        qemu,
        addresses,
        records,
        probes: Probes::default(),
        revocations,
    })
}

/// Names this boot: the kernel's own id, and a mark in the run directory, which a reboot empties too where a host is
/// only a set of namespaces.
pub(crate) fn boot_id(config: &HostConfig, system: &System) -> std::io::Result<String> {
    let path = config.run_dir.join("boot");
    let named = |error: std::io::Error| {
        std::io::Error::other(format!("cannot read or write {}: {error}", path.display()))
    };
    // Only a mark that is not there shows a new boot: one that cannot be read shows nothing.
    let mark = match read_text(&path, BOOT_FILE_MAX).map_err(named)? {
        Some(mark) => mark,
        None => {
            let mut bytes = [0u8; 8];
            getrandom::fill(&mut bytes)
                .map_err(|error| std::io::Error::other(error.to_string()))?;
            let mark = godwit_rpc::pki::hex(&bytes);
            std::fs::write(&path, &mark).map_err(named)?;
            mark
        }
    };
    let kernel = system.kernel_boot_id().ok_or_else(|| {
        std::io::Error::other("cannot read the kernel's boot id, /proc/sys/kernel/random/boot_id")
    })?;
    Ok(format!("{kernel}-{}", mark.trim()))
}

/// Lets only certificates through that no later one of their life has replaced. Hosts that were removed are spoken with:
/// what they know of a VM in doubt may be all there is.
struct NotReplaced(Arc<Revocations>);

impl Admission for NotReplaced {
    fn admits(&self, holder: &Holder) -> bool {
        !self.0.is_replaced(holder)
    }

    fn why_unwanted(&self, holder: &Holder) -> Unwanted {
        self.0.why_unwanted(holder)
    }
}

/// Carries messages to other hosts' agents with this host's certificate, each with the life that speaks and whom it is for.
fn carrier(current: Arc<Current>, revocations: Arc<Revocations>, site: Arc<Site>) -> Carrier {
    let admission: Arc<dyn Admission> = Arc::new(NotReplaced(revocations));
    Arc::new(move |vm, message| {
        let (identity, admission) = (current.identity(), Some(admission.clone()));
        let envelope = site.with(|site| PeerEnvelope {
            message: message.message,
            life: Some(site.instance().clone()),
            meant: site.knows(&message.peer.host).cloned(),
        });
        Box::pin(async move {
            let role = Role::Host(message.peer.host.clone());
            let client = Client::tls_admitted(message.peer.address, &identity, role, admission)
                .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
            Ok(AgentClient::new(client).peer(&vm, &envelope).await?)
        })
    })
}

async fn listen(config: &HostConfig) -> Result<(tokio::net::UnixListener, Place), AgentError> {
    let failed = |place: String| move |source| AgentError::Listen { place, source };
    let path = config.agent_socket();
    let local = unix_socket::bind_unix(&path).map_err(failed(path.display().to_string()))?;
    let remote = Place::open(config.listen)
        .await
        .map_err(failed(config.listen.to_string()))?;
    Ok((local, remote))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{TestHost, vm};
    use godwit_ownership::Power;

    #[test]
    fn a_vm_that_is_to_run_is_on_record_without_an_agent_and_one_that_is_off_is_not() {
        let host = TestHost::new();
        host.hold("on", Power::On);
        host.hold("off", Power::Off);
        let text = format!(
            "name = \"a\"\nlisten = \"127.0.0.1:1\"\nmigration_interfaces = [\"lo\"]\nstate_dir = \"{}\"\n",
            host.config.state_dir.display()
        );
        let file = host.config.run_dir.join("host.toml");
        std::fs::write(&file, &text).unwrap();
        assert_eq!(on_record(&file).unwrap(), [vm("on")]);
        // A host that has nothing yet, and one whose configuration nobody can read.
        let gone = host.config.state_dir.join("none");
        let text = text.replace(
            &host.config.state_dir.display().to_string(),
            &gone.display().to_string(),
        );
        std::fs::write(&file, text).unwrap();
        assert_eq!(on_record(&file).unwrap(), []);
        std::fs::write(&file, "nonsense").unwrap();
        on_record(&file).unwrap_err();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_machine_that_has_not_joined_is_checked_and_told_so() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("host.toml");
        config_or_defaults_of(&file, false).unwrap_err();
        let config = config_or_defaults_of(&file, true).unwrap();
        let checks = agent::check_host(&config, &System::default()).await.checks;
        let found = |name: &str| checks.iter().find(|check| check.name == name);
        assert!(found("kernel").is_some() && found("qemu").is_some());
        let joining = found("configuration").unwrap();
        assert!(joining.found.contains("this host has not joined"));
        // Nothing of this is there before.
        assert!(found("certificate").is_none() && found("listen").is_none());
    }

    #[test]
    fn a_host_that_stayed_is_not_cleared_by_a_note_of_an_earlier_try_to_leave() {
        let dir = tempfile::tempdir().unwrap();
        let note = dir.path().join(LEAVING_FILE);
        std::fs::write(&note, "{}").unwrap();
        stay(dir.path()).unwrap();
        assert!(!note.exists());
        stay(dir.path()).unwrap();
    }
}
