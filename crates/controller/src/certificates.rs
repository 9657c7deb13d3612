//! Certificates after the first one: renewed for who has one, given anew to a host whose own has ended, kept fresh for the
//! controller itself; and what a person must know of them.
//!
//! Owns nothing durable but what it refuses. A renewed certificate names the life that it continues, so that nothing needs
//! to be written for it to be accepted, and one that gets lost on its way is missed by nobody. Once a host has shown a
//! later one, those before it are refused, by every host, too: who has an old copy of the key is not that host. Refuses:
//! hosts of another life than the enrolled one, and whoever does not have the former certificate's key.

use crate::app::App;
use crate::error::{ControllerError, Outcome, refuse};
use crate::hosts::bad_token;
use crate::operators;
use crate::state::State;
use godwit_rpc::pki::{Holder, Issued, PkiError, now_unix_s};
use godwit_rpc::revocations::made_before;
use godwit_rpc::token::hash_of;
use godwit_rpc::{Authority, Current, Role};
use godwit_types::certificate::{CertificateDates, CertificateStage};
use godwit_types::control_api::{Done, FormerCertificate, JoinRequest, JoinResponse, RenewRequest};
use godwit_types::site::Alarm;
use godwit_types::{ApiError, ErrorCode, HostName};
use std::sync::Arc;
use std::time::Duration;

/// Longest time between two looks at the controller's own certificate.
const LOOK_EACH: Duration = Duration::from_secs(600);
/// The CA's end is told this long before, s: whoever has programs that look at it has time.
const CA_WARNED_S: i64 = 2 * 365 * 86_400;

/// Answers somebody with a certificate whether it is still wanted.
pub async fn standing(app: &App, holder: &Holder) -> Outcome<Done> {
    must_be_enrolled(app, holder)?;
    end_earlier(app, holder).await?;
    Ok(Done {
        message: format!("The certificate of {} is good here.", holder.role),
    })
}

/// Certifies a new key for who shows a certificate.
pub async fn renew(app: &App, holder: &Holder, request: &RenewRequest) -> Outcome<JoinResponse> {
    if let Role::Operator(name) = &holder.role {
        return operators::renew(app, name, holder, request).await;
    }
    must_be_enrolled(app, holder)?;
    end_earlier(app, holder).await?;
    let issued = sign_again(app, &request.csr_pem, holder)?;
    tracing::info!(whose = %holder.role, before = %holder.serial, now = %issued.serial, "a certificate is renewed");
    Ok(response(app, issued))
}

fn sign_again(app: &App, csr_pem: &str, holder: &Holder) -> Outcome<Issued> {
    let issued = app.authority.sign_again(csr_pem, holder, now_unix_s());
    issued.map_err(not_signed)
}

/// Who shows a renewed certificate has it, with its key: what was made before it is refused from now on. Noted before it
/// is answered, since the host may forget the one before by that.
async fn end_earlier(app: &App, holder: &Holder) -> Outcome<()> {
    let (life, made) = (&holder.life, holder.order);
    let known = app.revocations.made_before(life);
    if !holder.role.is_host() || holder.serial == *life || known >= Some(made) {
        return Ok(());
    }
    app.store.revoke_before(life, made).await?;
    app.revocations.revoke(made_before(life, made));
    tracing::info!(whose = %holder.role, now = %holder.serial, "a renewed certificate is in use: those before it are refused");
    Ok(())
}

/// The host that may leave with this certificate.
pub fn leaving(app: &App, holder: &Holder) -> Outcome<HostName> {
    must_be_enrolled(app, holder)?;
    match &holder.role {
        Role::Host(host) => Ok(host.clone()),
        other => refuse(
            ErrorCode::NotAllowed,
            format!("{other} is no host, and leaves nothing"),
        ),
    }
}

/// Gives a host whose certificate has ended another one of the same life: its records and VMs stay as they are. The former
/// one is good until the new one is used: should the answer be lost, the host asks again with another token.
pub async fn go_on(
    app: &App,
    request: &JoinRequest,
    former: &FormerCertificate,
) -> Outcome<JoinResponse> {
    let now = now_unix_s();
    let shown = app
        .authority
        .former_holder(former, &request.secret, &request.csr_pem);
    let holder = shown.map_err(|error| {
        let message = format!(
            "the certificate that host {} had does not show that it is that host: {error}",
            request.name
        );
        ApiError::new(ErrorCode::NotAllowed, message)
    })?;
    if holder.role != Role::Host(request.name.clone()) {
        return refuse(
            ErrorCode::NotAllowed,
            format!(
                "the former certificate is that of {}, not of host {}",
                holder.role, request.name
            ),
        );
    }
    must_be_enrolled(app, &holder)?;
    if app.revocations.is_replaced(&holder) {
        return refuse(
            ErrorCode::NotAllowed,
            format!(
                "host {0} has used a later certificate than this one, which is that of an old copy of its disk or key: if this machine is host {0} all the same, remove that one with 'godwit host remove {0}', then move its state directory aside, delete its host.toml and let it join anew",
                request.name
            ),
        );
    }
    let issued = sign_again(app, &request.csr_pem, &holder)?;
    if !app.store.use_up(&hash_of(&request.secret), now).await? {
        return Err(bad_token());
    }
    tracing::info!(host = %request.name, before = %holder.serial, now = %issued.serial, "the host goes on with a new certificate");
    Ok(response(app, issued))
}

/// A host is enrolled with one life; who has a certificate of another one was removed, whoever has its name now.
fn must_be_enrolled(app: &App, holder: &Holder) -> Outcome<()> {
    let Role::Host(host) = &holder.role else {
        return Ok(());
    };
    let life = app.of_host(host, |entry| entry.serial.clone());
    match life {
        Ok(life) if life == holder.life => Ok(()),
        Ok(_) => refuse(
            ErrorCode::NotAllowed,
            format!(
                "this certificate is that of a former host {host}, which was removed: another machine is host {host} now"
            ),
        ),
        Err(_) => refuse(
            ErrorCode::NotAllowed,
            format!("this controller knows no host {host}: see 'godwit site show' there"),
        ),
    }
}

/// What somebody gets who has a new certificate.
pub fn response(app: &App, issued: Issued) -> JoinResponse {
    JoinResponse {
        certificate_pem: issued.certificate_pem,
        ca_pem: app.authority.certificate_pem().to_owned(),
    }
}

/// Why a key was not certified.
pub fn not_signed(error: PkiError) -> ApiError {
    match error {
        PkiError::Request(_) => ApiError::new(ErrorCode::InvalidRequest, error.to_string()),
        other => ControllerError::from(other).into(),
    }
}

/// Renews the controller's own certificate when that is due; false when it was not.
pub fn renew_own(
    authority: &Authority,
    current: &Current,
    dir: &std::path::Path,
    now_unix_s: i64,
) -> Result<bool, ControllerError> {
    let holder = current.holder();
    if holder.dates().stage(now_unix_s) == CertificateStage::Fresh {
        return Ok(false);
    }
    let identity = authority.identity(&Role::Controller, now_unix_s)?;
    // Durable before it is shown: a controller that is started again shows it too.
    identity.save(dir)?;
    current.replace(identity)?;
    let now = current.holder().serial;
    tracing::info!(before = %holder.serial, %now, "the controller's certificate is renewed");
    Ok(true)
}

/// Looks after the controller's own certificate until it stops.
pub async fn keep_own(app: Arc<App>) {
    let mut stop = app.stopped();
    let mut told = String::new();
    loop {
        let dir = &app.config.state_dir;
        match renew_own(&app.authority, &app.identity, dir, now_unix_s()) {
            Ok(true) => app.forget_clients(),
            Ok(false) => {}
            Err(error) if error.to_string() == told => {}
            Err(error) => {
                tracing::error!(%error, "the controller's own certificate cannot be renewed");
                told = error.to_string();
            }
        }
        tokio::select! {
            () = tokio::time::sleep(look_each(app.identity.holder().dates())) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

fn look_each(dates: CertificateDates) -> Duration {
    let life = Duration::from_secs(u64::try_from(dates.life_s()).unwrap_or(0));
    (life / 30).clamp(Duration::from_secs(1), LOOK_EACH)
}

/// What a person must know of certificates.
pub fn alarms(app: &App, state: &State, now_unix_s: i64) -> Vec<Alarm> {
    let mut alarms = Vec::new();
    for (host, entry) in &state.hosts {
        let said = entry
            .info
            .as_ref()
            .and_then(|info| info.certificate.as_ref());
        if let Some(said) = said
            && said.dates.stage(now_unix_s) >= CertificateStage::NearEnd
        {
            alarms.push(Alarm::CertificateEnds {
                host: host.clone(),
                dates: said.dates,
            });
        }
    }
    let own = app.identity.holder().dates();
    if own.stage(now_unix_s) >= CertificateStage::NearEnd {
        let dates = own;
        alarms.push(Alarm::ControllerCertificateEnds { dates });
    }
    let dates = app.authority.dates();
    if dates.ends_unix_s.saturating_sub(now_unix_s) < CA_WARNED_S {
        alarms.push(Alarm::AuthorityEnds { dates });
    }
    alarms
}

/// What a person does about an alarm of certificates; nothing of other alarms.
pub fn sentence(state: &State, alarm: &Alarm, now_unix_s: i64) -> String {
    match alarm {
        Alarm::CertificateEnds { host, dates } => {
            let entry = state.hosts.get(host);
            let said = entry.and_then(|entry| entry.info.as_ref()?.certificate.as_ref());
            let why = said.and_then(|said| said.problem.clone());
            let why = why.unwrap_or_else(|| "its log says why it was not renewed".into());
            format!(
                "the certificate of host {host} {}: {why}. Mend that, or run 'godwit host add' here and 'godwit host renew TOKEN' on host {host}; its VMs run on",
                dates.left(now_unix_s)
            )
        }
        Alarm::ControllerCertificateEnds { dates } => format!(
            "the controller's own certificate {}: its log says why it was not renewed",
            dates.left(now_unix_s)
        ),
        Alarm::AuthorityEnds { dates } => format!(
            "the certificate authority of this site {}: hosts, controller and operators go on as before, also after that, since Godwit knows the authority by its key; other programs that reach the controller by its certificate (curl, scripts) will refuse it. Who uses such does what \"When the authority ends\" in docs/security.md says",
            dates.left(now_unix_s)
        ),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_rpc::Identity;

    #[test]
    fn the_controllers_certificate_of_a_clock_that_was_ahead_is_renewed_once_that_is_right() {
        let dir = tempfile::tempdir().unwrap();
        let now = now_unix_s();
        let authority = Authority::create(now).unwrap();
        let first = authority.identity(&Role::Controller, now).unwrap();
        first.save(dir.path()).unwrap();
        let current = Current::new(first).unwrap();
        // The clock jumps ahead, past two thirds of the first one's life.
        let ahead = now + 300 * 86_400;
        assert!(renew_own(&authority, &current, dir.path(), ahead).unwrap());
        assert!(current.holder().dates().is_not_valid_yet(now));
        // And back.
        assert!(renew_own(&authority, &current, dir.path(), now).unwrap());
        let holder = current.holder();
        assert_eq!(holder.dates().stage(now), CertificateStage::Fresh);
        assert!(!holder.dates().is_not_valid_yet(now));
        let kept = Identity::load(dir.path()).unwrap().holder().unwrap();
        assert_eq!(kept.serial, holder.serial);
        assert!(!renew_own(&authority, &current, dir.path(), now).unwrap());
    }
}
