//! Operators: people and scripts on other machines, each with a certificate of a name.
//!
//! Owns who was seen since the controller started; the rest is in the database. Certificates that an older version made
//! are in no table until they are used, so that removing is by name and time, too. The local socket needs no certificate
//! and is the way back in. Refuses: to renew what was removed, also when both come at once.

use crate::app::App;
use crate::certificates::{not_signed, response};
use crate::error::{Outcome, refuse};
use godwit_rpc::pki::{Holder, Identity, now_unix_s};
use godwit_rpc::revocations::made_before;
use godwit_rpc::{Admission as _, Role};
use godwit_types::certificate::CertificateDates;
use godwit_types::control_api::{Done, JoinResponse, OperatorRequest, OperatorView, RenewRequest};
use godwit_types::{ErrorCode, HostName};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Who came with an operator's certificate since the controller started, and the turn to make and to end such.
#[derive(Debug, Default)]
pub struct Operators {
    /// The newest certificate of each life.
    seen: Mutex<BTreeMap<String, Holder>>,
    turn: tokio::sync::Mutex<()>,
}

impl Operators {
    /// Notes a certificate that is wanted.
    pub fn see(&self, holder: &Holder) {
        if !matches!(holder.role, Role::Operator(_)) {
            return;
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let known = seen.get(&holder.life);
        if known.is_none_or(|known| known.made_unix_s < holder.made_unix_s) {
            seen.insert(holder.life.clone(), holder.clone());
        }
    }

    fn seen(&self) -> Vec<Holder> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.values().cloned().collect()
    }
}

/// Writes down what was only seen.
async fn note_seen(app: &App) -> Outcome<()> {
    for holder in app.operators.seen() {
        if let Role::Operator(name) = &holder.role
            && app.revocations.admits(&holder)
        {
            app.store.note_operator(name.as_str(), &holder).await?;
        }
    }
    Ok(())
}

/// Every operator's certificate that is wanted.
pub async fn views(app: &App) -> Outcome<Vec<OperatorView>> {
    let _turn = app.operators.turn.lock().await;
    note_seen(app).await?;
    let rows = app.store.operators().await?;
    let view = |row: crate::certificates_store::OperatorRow| OperatorView {
        name: row.name,
        life: row.life,
        dates: CertificateDates {
            made_unix_s: row.made_unix_s,
            ends_unix_s: row.ends_unix_s,
        },
    };
    Ok(rows.into_iter().map(view).collect())
}

/// Makes an operator's first certificate.
pub async fn add(app: &App, request: &OperatorRequest) -> Outcome<JoinResponse> {
    let _turn = app.operators.turn.lock().await;
    let role = Role::Operator(request.name.clone());
    // One that was removed and is wanted again has what is made from now on.
    let earliest = app.revocations.made_before(&role.uri());
    let issued =
        app.authority
            .sign_from(&request.csr_pem, &role, now_unix_s(), earliest.unwrap_or(0));
    let issued = issued.map_err(not_signed)?;
    let holder = issued.holder().map_err(not_signed)?;
    app.store
        .note_operator(request.name.as_str(), &holder)
        .await?;
    tracing::info!(whose = %role, serial = %issued.serial, "an operator has a certificate");
    Ok(response(app, issued))
}

/// Notes the operator that a new controller begins with.
pub async fn note_first(
    store: &crate::store::Store,
    name: &HostName,
    identity: &Identity,
) -> Result<(), crate::error::ControllerError> {
    let holder = identity.holder()?;
    store.note_operator(name.as_str(), &holder).await
}

/// Certifies a new key for an operator who is still one.
pub async fn renew(
    app: &App,
    name: &HostName,
    holder: &Holder,
    request: &RenewRequest,
) -> Outcome<JoinResponse> {
    let _turn = app.operators.turn.lock().await;
    // It may have been removed since the request was let in.
    if !app.revocations.admits(holder) {
        return refuse(
            ErrorCode::NotAllowed,
            format!("operator {name} was removed: the certificate is not renewed"),
        );
    }
    let issued = app
        .authority
        .sign_again(&request.csr_pem, holder, now_unix_s());
    let issued = issued.map_err(not_signed)?;
    let made = issued.holder().map_err(not_signed)?;
    app.store.note_operator(name.as_str(), &made).await?;
    tracing::info!(whose = %holder.role, before = %holder.serial, now = %issued.serial, "a certificate is renewed");
    Ok(response(app, issued))
}

/// Revokes every certificate of an operator, at once.
pub async fn remove(app: &App, name: &HostName) -> Outcome<Done> {
    let _turn = app.operators.turn.lock().await;
    note_seen(app).await?;
    let known = app.store.operators().await?;
    let lives: Vec<String> = known
        .into_iter()
        .filter(|row| row.name == name.as_str())
        .map(|row| row.life)
        .collect();
    let (role, now) = (Role::Operator(name.clone()).uri(), now_unix_s());
    // Made in this second counts as before.
    let before = now.saturating_add(1);
    app.store
        .remove_operator(name.as_str(), &role, before, now)
        .await?;
    let known = lives.len();
    app.revocations
        .extend(lives.into_iter().chain([made_before(&role, before)]));
    tracing::info!(operator = %name, "an operator is removed, every certificate of that name revoked");
    let message = match known {
        0 => format!(
            "No certificate of an operator {name} was known here; should there be one, it is refused from now on. See 'godwit operator list'."
        ),
        _ => format!(
            "Operator {name} is removed and every certificate of that name revoked, on open connections, too."
        ),
    };
    Ok(Done { message })
}
