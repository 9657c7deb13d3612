//! A controller on an old copy of its database reads every host, then takes a new epoch.
//!
//! Owns nothing; the rules and what was read are the book's. Refuses nothing by itself: until it has taken over, every
//! grant is refused by the book, and the hosts refuse this controller's commands.

use crate::app::{App, site_host};
use crate::error::ControllerError;
use crate::reconcile;
use crate::state::HostEntry;
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::{AgentClient, Client, Role};
use godwit_site::HostRow;
use godwit_types::HostName;
use godwit_types::site::{SiteHost, Stamp};
use std::sync::Arc;

/// Reads a host whole, if that is still missing, and takes over once everybody was read.
pub async fn go_on(app: &Arc<App>, host: &HostName) -> Result<(), ControllerError> {
    let Some(takeover) = app.state().book.takeover() else {
        return Ok(());
    };
    for site in takeover.enrol {
        enrol_again(app, site).await?;
    }
    if takeover.hosts.contains(host) {
        read(app, host, takeover.stamp).await?;
    }
    let finished = app.state().book.finish_takeover();
    if let Ok(rows) = finished
        && !rows.is_empty()
    {
        app.write(&rows).await?;
        tracing::warn!(
            stamp = %takeover.stamp,
            "every host was read: this controller takes over from the one whose database it has an older copy of. What that one knew alone (VMs that were never started, drains, tokens, old reports) is forgotten"
        );
        app.tell_host(host);
    }
    Ok(())
}

async fn read(app: &App, host: &HostName, at: Stamp) -> Result<(), ControllerError> {
    let Ok(entry) = app.host(host) else {
        return Ok(());
    };
    let client = Client::tls_admitted(
        entry.address,
        &app.identity,
        Role::Host(host.clone()),
        Some(app.revocations.clone()),
    )?;
    let agent = AgentClient::new(client.with_stamps(Arc::new(move || at)));
    let whole = match agent
        .with_deadlines(app.config.deadlines)
        .site_survey()
        .await
    {
        Ok(whole) => whole,
        Err(error) => {
            tracing::warn!(%host, %error, "the host cannot be read yet");
            return Ok(());
        }
    };
    let (rows, news) = app.state().book.take_whole(host, at, whole);
    app.write(&rows).await?;
    reconcile::tell_news(host, &news);
    // Whoever watches sees for whom this controller still waits.
    app.tell_host(host);
    Ok(())
}

/// A host that other hosts' tables name, with the certificate that it had: the old copy of the database lacks it.
async fn enrol_again(app: &Arc<App>, site: SiteHost) -> Result<(), ControllerError> {
    let mut entry = HostEntry::new(site.address, site.serial.clone());
    entry.last_seen_unix_s = now_unix_s();
    app.store.enrol_again(&site.name, &entry).await?;
    let name = site.name;
    let row = HostRow::default();
    let rows = {
        let mut state = app.state();
        let site = site_host(&name, &entry, row.instance.counter);
        state.hosts.insert(name.clone(), entry);
        state.book.add_host(site, row)
    };
    app.write(&rows).await?;
    tracing::warn!(host = %name, "a host that this database had forgotten is enrolled again");
    app.tell_host(&name);
    reconcile::spawn(app.clone(), name);
    Ok(())
}
