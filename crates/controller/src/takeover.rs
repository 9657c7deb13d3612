//! A controller on an old copy of its database reads every host, then takes a new epoch.
//!
//! Owns nothing; the rules and what was read are the book's. Refuses nothing by itself: until it has taken over, every
//! grant is refused by the book, and the hosts refuse this controller's commands.

use crate::app::{App, site_host};
use crate::bounds;
use crate::error::ControllerError;
use crate::reconcile;
use crate::state::HostEntry;
use futures_util::StreamExt as _;
use godwit_rpc::pki::{Holder, now_unix_s};
use godwit_rpc::{Admission, AgentClient, Client, Revocations, Role, Unwanted};
use godwit_site::HostRow;
use godwit_types::HostName;
use godwit_types::control_api::InventoryEvent;
use godwit_types::site::{SiteHost, Stamp};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long a host that a table names may take to show itself.
const MET_WITHIN: Duration = Duration::from_secs(2);
/// How many of them are asked at once.
const MET_AT_ONCE: usize = 64;

/// Reads a host whole, if that is still missing, and takes over once everybody was read.
pub async fn go_on(app: &Arc<App>, host: &HostName) -> Result<(), ControllerError> {
    let forgotten = app.state().book.to_enrol();
    for site in met(app, forgotten).await {
        enrol_again(app, site).await?;
    }
    let takeover = app.state().book.takeover();
    // Its VMs are seen before it counts as read: a poll before this one may have failed.
    if let Some(takeover) = &takeover
        && takeover.hosts.contains(host)
        && app.state().has_seen(host)
    {
        read(app, host, takeover.stamp).await?;
    }
    if takeover.is_none() || !finish(app).await? {
        return Ok(());
    }
    tracing::warn!(
        stamp = %app.state().book.stamp(),
        "every host was read: this controller takes over from the one whose database it has an older copy of. What that one knew alone (removed hosts and revoked certificates, edited and deleted descriptions, VMs that were never started, drains, tokens, old reports) is forgotten"
    );
    app.tell_host(host);
    app.tell(InventoryEvent::Site);
    Ok(())
}

/// Takes over once every host was read: what they say of descriptions is written first, so that it is not believed by
/// half after a restart. False while somebody is waited for, or somebody else has done it.
async fn finish(app: &App) -> Result<bool, ControllerError> {
    let _macs = app.macs_turn().await;
    loop {
        let due = {
            let mut state = app.state();
            let due = state.due_descriptions();
            if due.is_empty() {
                if state.book.finish_takeover() != Ok(true) {
                    return Ok(false);
                }
                // Whether or not the new word can be written at once: the book is in charge from here on.
                state.took_over();
                break;
            }
            due
        };
        for entry in &due {
            tracing::warn!(vm = %entry.spec.name, "the VM is described as the host that holds it says");
        }
        if let Err(error) = app.store.put_vms(&due).await {
            app.state().still_due(&due);
            return Err(error);
        }
    }
    app.write().await?;
    Ok(true)
}

async fn read(app: &App, host: &HostName, at: Stamp) -> Result<(), ControllerError> {
    let Ok(entry) = app.host(host) else {
        return Ok(());
    };
    let client = Client::tls_admitted(
        entry.address,
        &app.identity.identity(),
        Role::Host(host.clone()),
        Some(app.revocations.clone()),
    )?;
    let agent = AgentClient::new(client.with_stamps(Arc::new(move || at)));
    let ticket = app.state().book.ask();
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
    let bounded = bounds::whole(host, whole);
    let taken = bounded.and_then(|whole| app.state().bring_whole(host, &whole).map(|()| whole));
    let whole = match taken {
        Ok(whole) => whole,
        Err(error) => {
            tracing::error!(%host, %error, "the host's records are not taken");
            return Ok(());
        }
    };
    let news = app.state().book.take_whole(host, at, ticket, whole);
    app.write().await?;
    reconcile::tell_news(host, &news);
    // Whoever watches sees for whom this controller still waits.
    app.tell_host(host);
    Ok(())
}

/// Which life a host's certificate is of. By that it is revoked once, so that no table says which it is.
struct Shown {
    revocations: Arc<Revocations>,
    serial: Mutex<Option<String>>,
}

impl Shown {
    fn new(revocations: Arc<Revocations>) -> Self {
        let serial = Mutex::new(None);
        Self {
            revocations,
            serial,
        }
    }

    fn serial(&self) -> Option<String> {
        let serial = self.serial.lock();
        serial.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Admission for Shown {
    fn admits(&self, holder: &Holder) -> bool {
        let admitted = self.revocations.admits(holder);
        if admitted {
            let mut serial = self.serial.lock().unwrap_or_else(PoisonError::into_inner);
            *serial = Some(holder.life.clone());
        }
        admitted
    }

    fn why_unwanted(&self, holder: &Holder) -> Unwanted {
        self.revocations.why_unwanted(holder)
    }
}

/// Of the hosts that tables name those that show their certificate, with its serial number: a table may be invented. The
/// others are waited for, named by their tellers, and come to no inventory.
async fn met(app: &App, named: Vec<SiteHost>) -> Vec<SiteHost> {
    let asked = named.into_iter().map(|site| async move {
        let shown = Arc::new(Shown::new(app.revocations.clone()));
        let admission = Some(shown.clone() as _);
        let role = Role::Host(site.name.clone());
        let client =
            Client::tls_admitted(site.address, &app.identity.identity(), role, admission).ok()?;
        let agent = AgentClient::new(client).with_deadlines(app.config.deadlines);
        let answer = tokio::time::timeout(MET_WITHIN, agent.host()).await;
        let serial = shown.serial()?;
        matches!(answer, Ok(Ok(_))).then_some(SiteHost { serial, ..site })
    });
    let asked = futures_util::stream::iter(asked).buffer_unordered(MET_AT_ONCE);
    asked.filter_map(std::future::ready).collect().await
}

/// A host that other hosts' tables name, with the certificate that it had: the old copy of the database lacks it.
async fn enrol_again(app: &Arc<App>, site: SiteHost) -> Result<(), ControllerError> {
    if app.state().hosts.contains_key(&site.name) {
        // Another host's poll was first.
        return Ok(());
    }
    if app.revocations.all().contains(&site.serial) {
        // A table that is older than its removal, or a host that lies, names it.
        app.state().book.add_removed(site.name);
        return Ok(());
    }
    let mut entry = HostEntry::new(site.address, site.serial.clone());
    entry.last_seen_unix_s = now_unix_s();
    app.store.enrol_again(&site.name, &entry).await?;
    let name = site.name;
    let row = HostRow::default();
    {
        let mut state = app.state();
        if state.hosts.contains_key(&name) {
            // Another host's poll was first, while the row was written; it has its task.
            return Ok(());
        }
        let site = site_host(&name, &entry, &row);
        state.hosts.insert(name.clone(), entry);
        state.book.add_host(site, row);
    }
    app.write().await?;
    tracing::warn!(host = %name, "a host that this database had forgotten is enrolled again");
    app.tell_host(&name);
    reconcile::spawn(app.clone(), name);
    Ok(())
}
