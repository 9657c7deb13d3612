//! This host's certificate: renewed from the controller when two thirds of its life are over, for a key made here.
//!
//! Owns the identity that the agent speaks with and its files. The old one is good until its end and is kept until the
//! new one is durable, so that a process that ends at any step speaks with one that fits. The controller says which life
//! the new one is of: the host stays the host that was enrolled. One that a person brought is taken at once; the
//! controller is shown a new one as soon as it is spoken with, and refuses those before it from then on. Refuses: to renew one that has ended, which the
//! controller does not accept; a person says then that this is still that host, with 'godwit host renew'.

use crate::pause::stops_within;
use godwit_rpc::pki::{PkiError, Request, now_unix_s};
use godwit_rpc::{Client, ControllerClient, Current, Identity, Role};
use godwit_types::certificate::{CertificateInfo, CertificateStage};
use godwit_types::control_api::{Done, RenewRequest};
use godwit_types::{ApiError, ErrorCode};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// Longest time between two looks.
const LOOK_EACH: Duration = Duration::from_secs(600);

/// What a person does about a certificate that was made while the controller's clock was ahead.
pub(crate) const NOT_VALID_YET: &str = "it is not valid yet, and nobody accepts it: correct this host's clock; if that is right, the certificate was made while the controller's was ahead: run 'godwit host add' where the controller is and 'godwit host renew TOKEN' here; this host's VMs run on";

pub(crate) struct Certificate {
    current: Arc<Current>,
    dir: PathBuf,
    controller: Option<SocketAddr>,
    /// One at a time looks after it: what a person brought is not replaced by what was asked for before.
    turn: tokio::sync::Mutex<()>,
    /// Why it is not renewed, or not accepted.
    problem: Mutex<Option<String>>,
}

impl Certificate {
    /// The one in `dir`, which the controller at that address renews.
    pub(crate) fn new(current: Arc<Current>, dir: PathBuf, controller: Option<SocketAddr>) -> Self {
        Self {
            current,
            dir,
            controller,
            turn: tokio::sync::Mutex::default(),
            problem: Mutex::default(),
        }
    }

    /// What is said of it.
    pub(crate) fn info(&self) -> CertificateInfo {
        let holder = self.current.holder();
        let problem = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        CertificateInfo {
            dates: holder.dates(),
            serial: holder.serial,
            problem: problem.clone(),
        }
    }

    /// Looks after it until `stop` turns true.
    pub(crate) async fn keep(&self, mut stop: watch::Receiver<bool>) {
        let mut pause = Duration::ZERO;
        while !stops_within(&mut stop, pause).await {
            let found = self.look(now_unix_s()).await;
            self.note(found);
            pause = self.look_each();
        }
    }

    fn look_each(&self) -> Duration {
        let life_s = self.current.holder().dates().life_s();
        let life = Duration::from_secs(u64::try_from(life_s).unwrap_or(0));
        (life / 30).clamp(Duration::from_secs(1), LOOK_EACH)
    }

    /// Each problem is logged once, and its end.
    fn note(&self, found: Option<String>) {
        let mut problem = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        if *problem == found {
            return;
        }
        match &found {
            Some(found) => tracing::error!("this host's certificate: {found}"),
            None => tracing::info!("this host's certificate is in order again"),
        }
        *problem = found;
    }

    /// Takes what a person brought, and shows it to the controller before it answers.
    pub(crate) async fn take_now(&self) -> Result<Done, ApiError> {
        let found = self.look(now_unix_s()).await;
        self.note(found.clone());
        match found {
            Some(problem) => Err(ApiError::new(ErrorCode::WrongState, problem)),
            None => Ok(Done {
                message: format!("the agent goes on with {}", self.current.holder().serial),
            }),
        }
    }

    /// Does what is due at that time; says what is wrong.
    pub(crate) async fn look(&self, now_unix_s: i64) -> Option<String> {
        let _turn = self.turn.lock().await;
        self.take_what_a_person_brought();
        let holder = self.current.holder();
        let stage = holder.dates().stage(now_unix_s);
        if stage == CertificateStage::Ended {
            return Some(format!(
                "it {}, and neither the controller nor another host accepts it: run 'godwit host add' where the controller is and 'godwit host renew TOKEN' here; this host's VMs run on",
                holder.dates().left(now_unix_s)
            ));
        }
        let Some(controller) = self.controller else {
            let why = "host.toml does not say where the controller listens, so that it cannot be renewed: add controller = \"ADDRESS:PORT\"";
            return (stage >= CertificateStage::Due).then(|| why.into());
        };
        if stage >= CertificateStage::Due {
            let renewed = match self.client(controller) {
                Ok(client) => self.renew(&client).await,
                Err(why) => Err(why),
            };
            if let Err(why) = renewed {
                return Some(match holder.dates().is_not_valid_yet(now_unix_s) {
                    true => format!("{NOT_VALID_YET} ({why})"),
                    false => format!("it cannot be renewed: {why}"),
                });
            }
        }
        // With the one that it has now: the controller then refuses those before it.
        let client = match self.client(controller) {
            Ok(client) => client,
            Err(why) => return Some(why),
        };
        match client.certificate().await {
            // Of an older controller, which has no such route, nothing is known.
            Err(error) if error.code() == ErrorCode::NotAllowed && self.is_refused(&error) => {
                Some(format!("the controller does not accept it: {error}"))
            }
            _ => None,
        }
    }

    fn client(&self, controller: SocketAddr) -> Result<ControllerClient, String> {
        let client = Client::tls(controller, &self.current.identity(), Role::Controller);
        let client = client.map_err(|error| error.to_string())?;
        Ok(ControllerClient::new(client))
    }

    fn is_refused(&self, error: &godwit_rpc::ClientError) -> bool {
        matches!(error, godwit_rpc::ClientError::Refused(_))
    }

    /// 'godwit host renew' writes beside a running agent.
    fn take_what_a_person_brought(&self) {
        let Ok(found) = Identity::load(&self.dir) else {
            return;
        };
        let held = self.current.identity();
        if found.must_succeed(&held).is_ok() {
            let before = self.current.holder().serial;
            if self.current.replace(found).is_ok() {
                let now = self.current.holder().serial;
                tracing::info!(%before, %now, "this host's certificate was replaced");
            }
        }
    }

    async fn renew(&self, client: &ControllerClient) -> Result<(), String> {
        let text = |error: PkiError| error.to_string();
        let request = Request::new().map_err(text)?;
        let csr_pem = request.csr_pem.clone();
        let answer = client.renew_certificate(&RenewRequest { csr_pem }).await;
        let answer = answer.map_err(|error| error.to_string())?;
        let known = self.current.identity();
        let identity = request
            .into_successor(answer.certificate_pem, answer.ca_pem, &known)
            .map_err(|error| format!("the controller's answer is not this host's: {error}"))?;
        let before = self.current.holder().serial;
        let dir = self.dir.clone();
        // Durable before it is shown: an agent that is started again shows it too.
        let saved = tokio::task::spawn_blocking(move || identity.save(&dir).map(|()| identity));
        let identity = saved
            .await
            .map_err(|error| error.to_string())?
            .map_err(text)?;
        self.current.replace(identity).map_err(text)?;
        let now = self.current.holder().serial;
        tracing::info!(%before, %now, "this host's certificate is renewed");
        Ok(())
    }
}

#[cfg(test)]
#[path = "renewal_tests.rs"]
mod tests;
