//! Making a controller and running one.
//!
//! Owns the listeners and their shutdown. Refuses: to make a controller where one is, to run where none is. An
//! address that this machine does not have yet keeps it from nothing else.

use crate::api;
use crate::app::App;
use crate::audit::AuditLog;
use crate::config::ControllerConfig;
use crate::error::ControllerError;
use crate::placement::drain;
use crate::store::Store;
use crate::{certificates, hosts, operators, reconcile, removed, taken_over, watch};
use godwit_rpc::controller_client::RULES;
use godwit_rpc::listen::Place;
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::{Authority, Current, Identity, Role, Server};
use godwit_types::HostName;
use godwit_types::control_api::JoinToken;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::watch as signal;
use tokio::task::JoinHandle;

/// Name in the first operator's certificate.
const FIRST_OPERATOR: &str = "admin";

/// What `init` has made.
#[derive(Debug)]
pub struct Initialised {
    /// SHA-256 of the CA's certificate, hex.
    pub ca_fingerprint: String,
    /// Directory with the operator's `cert.pem`, `key.pem` and `ca.pem`, to be carried to where people work.
    pub operator_dir: PathBuf,
    /// A join token for the first host.
    pub join: JoinToken,
}

/// Makes a controller: CA, its own and an operator's certificate, database, and a first join token.
pub async fn init(config: &ControllerConfig) -> Result<Initialised, ControllerError> {
    let dir = &config.state_dir;
    if dir.join("ca.key").exists() {
        return Err(ControllerError::Setup(format!(
            "there is a controller in {} already: run it with 'godwit controller run'",
            dir.display()
        )));
    }
    make_dir(dir)?;
    let now = now_unix_s();
    let authority = Authority::create(now)?.with_validity(config.certificate_valid);
    let operator_dir = dir.join("operator");
    make_dir(&operator_dir)?;
    let admin =
        HostName::new(FIRST_OPERATOR).map_err(|error| ControllerError::Setup(error.to_string()))?;
    let first = authority.identity(&Role::Operator(admin.clone()), now)?;
    first.save(&operator_dir)?;
    authority.identity(&Role::Controller, now)?.save(dir)?;
    let store = Store::open(&database(dir), true).await?;
    operators::note_first(&store, &admin, &first).await?;
    // Last, since it says that there is a controller here.
    authority.save(dir)?;
    let (_stop, stopped) = signal::channel(false);
    let identity = Current::new(Identity::load(dir)?)?;
    let advertise = addresses(config, &config.listen);
    let app = App::load(
        config.clone(),
        store,
        authority,
        identity,
        advertise,
        stopped,
    )
    .await?;
    let join = hosts::token(&app).await?;
    app.store.close().await;
    Ok(Initialised {
        ca_fingerprint: app.authority.fingerprint().to_string(),
        operator_dir,
        join,
    })
}

/// When a host was heard before this start is not in the database to the second, or to the day: how long it has been
/// silent is counted from here on, so that what is shown is never more than is known.
fn count_silence_from_now(app: &App) {
    let now = now_unix_s();
    for host in app.state().hosts.values_mut() {
        host.last_seen_unix_s = now;
    }
}

fn database(dir: &Path) -> PathBuf {
    dir.join("controller.db")
}

fn make_dir(dir: &Path) -> Result<(), ControllerError> {
    let made = godwit_store::make_directory(dir, 0o700)
        .map_err(std::io::Error::other)
        .and_then(|()| std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700)));
    made.map_err(|source| ControllerError::Io {
        doing: "make",
        what: dir.display().to_string(),
        source,
    })
}

/// What tokens say: the given addresses, else those that are listened on.
fn addresses(config: &ControllerConfig, listening: &[SocketAddr]) -> Vec<SocketAddr> {
    match config.advertise.as_slice() {
        [] => listening
            .iter()
            .filter(|address| !address.ip().is_unspecified())
            .copied()
            .collect(),
        given => given.to_vec(),
    }
}

/// A controller whose servers and tasks run until it is dropped or stopped.
pub struct Controller {
    /// Where it listens for TLS.
    pub addresses: Vec<SocketAddr>,
    stop: signal::Sender<bool>,
    listeners: Vec<JoinHandle<()>>,
    app: Arc<App>,
}

impl Controller {
    /// Starts one that was made with [`init`].
    pub async fn start(config: ControllerConfig) -> Result<Self, ControllerError> {
        let dir = config.state_dir.clone();
        if !dir.join("ca.key").exists() {
            return Err(ControllerError::Setup(format!(
                "there is no controller in {}: make one with 'godwit controller init'",
                dir.display()
            )));
        }
        let authority = Authority::load(&dir)?.with_validity(config.certificate_valid);
        let identity = Current::new(Identity::load(&dir)?)?;
        certificates::renew_own(&authority, &identity, &dir, now_unix_s())?;
        let store = Store::open(&database(&dir), false).await?;
        let (tcp, addresses) = listen(&config.listen).await?;
        let unix = godwit_rpc::unix_socket::bind_unix(&config.socket).map_err(|source| {
            ControllerError::Io {
                doing: "listen on",
                what: config.socket.display().to_string(),
                source,
            }
        })?;
        let (stop, stopped) = signal::channel(false);
        let tls = godwit_rpc::tls::server_config_of(&identity)?;
        let advertise = self::addresses(&config, &addresses);
        let app = App::load(
            config,
            store,
            authority,
            identity,
            advertise,
            stopped.clone(),
        )
        .await?;
        let app = Arc::new(app);
        count_silence_from_now(&app);
        // What the database says now is noted before any host is asked.
        let looking = app.clone();
        let looked = tokio::task::spawn_blocking(move || drop(taken_over::look(&looking))).await;
        if let Err(error) = looked {
            tracing::warn!(%error, "when this controller took over is not known");
        }
        tokio::spawn(certificates::keep_own(app.clone()));
        tokio::spawn(taken_over::keep_looking(app.clone(), stopped.clone()));
        resume(&app).await?;
        let server = Server::audited(
            api::router(app.clone()),
            RULES,
            app.clone(),
            Arc::new(AuditLog::new(app.store.clone())),
        );
        let mut listeners = vec![tokio::spawn(server.clone().run_unix(unix, stopped.clone()))];
        for place in tcp {
            listeners.push(tokio::spawn(server.clone().run_tls_at(
                place,
                tls.clone(),
                stopped.clone(),
            )));
        }
        let listed: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        tracing::info!(addresses = listed.join(" "), socket = %app.config.socket.display(), "controller runs");
        Ok(Self {
            addresses,
            stop,
            listeners,
            app,
        })
    }

    /// Ends it: requests under way get a second, guests notice nothing.
    pub async fn stop(self) {
        self.stop.send_replace(true);
        for listener in self.listeners {
            let _ = listener.await;
        }
        if let Err(error) = self.app.store.count_turned_away().await {
            tracing::warn!(%error, "strangers who were turned away last are not in the audit log");
        }
        self.app.store.close().await;
    }
}

/// Goes on with what the database says was under way: migrations, drains, the polls of every host.
async fn resume(app: &Arc<App>) -> Result<(), ControllerError> {
    watch::resume(app).await?;
    drain::resume(app).await?;
    let names: Vec<HostName> = app.state().hosts.keys().cloned().collect();
    for host in names {
        reconcile::spawn(app.clone(), host);
    }
    for (host, address) in app.store.removed_unheard().await? {
        removed::watch(app, host, address);
    }
    Ok(())
}

async fn listen(wanted: &[SocketAddr]) -> Result<(Vec<Place>, Vec<SocketAddr>), ControllerError> {
    let (mut places, mut addresses) = (Vec::new(), Vec::new());
    for address in wanted {
        let failed = |source| ControllerError::Io {
            doing: "listen on",
            what: address.to_string(),
            source,
        };
        let place = Place::open(*address).await.map_err(failed)?;
        addresses.push(place.address().map_err(failed)?);
        places.push(place);
    }
    Ok((places, addresses))
}

/// Runs a controller until SIGINT or SIGTERM; for the command line.
pub fn run(config: ControllerConfig) -> Result<(), ControllerError> {
    let io = |doing: &'static str, what: &str| {
        let what = what.to_owned();
        move |source| ControllerError::Io {
            doing,
            what,
            source,
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(io("start", "the runtime"))?;
    runtime.block_on(async {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate()).map_err(io("wait for", "signals"))?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(io("wait for", "signals"))?;
        let controller = Controller::start(config).await?;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        controller.stop().await;
        Ok(())
    })
}
