//! What the agent does about migrations: passes them on, and finds one by its id.
//!
//! Part of [`Agent`]; the index is [`crate::reports::Reports`]'s. Refuses: to ask more than the one VM that a migration
//! is of.

use crate::agent::{Agent, READ, Reply, blocking, unexpected};
use godwit_ownership::Reason;
use godwit_store::StoreError;
use godwit_types::control_api::Done;
use godwit_types::host_api::HostCancel;
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::migration::{MigrationReport, MigrationSpec};
use godwit_types::{ApiError, ErrorCode, HostName, MigrationId, VmName};
use std::sync::Arc;

/// The migration is known, its report is no good: its other host and the controller may have theirs.
fn unreadable(id: &MigrationId, host: &HostName, error: &StoreError) -> ApiError {
    let message = format!(
        "the report of migration '{id}' on host '{host}' cannot be read: {error}; what became of its VM, 'godwit vm list' says"
    );
    ApiError::new(ErrorCode::Internal, message).on_host(host)
}

impl Agent {
    /// Begins a migration here.
    pub(crate) async fn migrate(self: &Arc<Self>, spec: MigrationSpec) -> Reply<Done> {
        self.closing.refuse(self.host())?;
        let name = spec.vm.clone();
        self.migration_begins(&spec.id, &name).await?;
        tracing::info!(vm = %name, migration = %spec.id, to = %spec.destination.host, "the VM is to leave for another host");
        self.act(&name, VmRequest::Migrate(Box::new(spec))).await
    }

    /// From here on the migration is found by its id. One that was cancelled does not begin.
    pub(crate) async fn migration_begins(
        self: &Arc<Self>,
        id: &MigrationId,
        vm: &VmName,
    ) -> Reply<()> {
        let (agent, id, vm) = (Arc::clone(self), id.clone(), vm.clone());
        blocking(move || {
            agent.reports.begins(&id, &vm);
            let checked = agent.cancelled.check(&id, agent.host());
            if checked.is_err() {
                agent.reports.never_began(&id);
            }
            checked
        })
        .await
    }

    /// All migrations that this host knows, newest first.
    pub(crate) async fn migrations(self: &Arc<Self>) -> Reply<Vec<MigrationReport>> {
        let (agent, names) = (Arc::clone(self), self.supervisor.names());
        let mut reports = blocking(move || Ok(agent.reports.all(&names))).await?;
        for vm in self.vms().await {
            let Some(id) = vm.migration else { continue };
            if let Ok(report) = self.live_report(&vm.spec.name, &id).await {
                reports.retain(|known| known.id != report.id);
                reports.push(report);
            }
        }
        reports.sort_by_key(|report| std::cmp::Reverse(report.began_unix_s));
        Ok(reports)
    }

    /// The report of a VM's own process.
    pub(crate) async fn live_report(
        &self,
        vm: &VmName,
        id: &MigrationId,
    ) -> Reply<MigrationReport> {
        let vm = self.known(vm)?;
        let request = VmRequest::Report {
            migration: id.clone(),
        };
        match vm.ask(&request, READ).await? {
            VmAnswer::Report(report) => Ok(*report),
            _ => Err(unexpected(&vm.config().vm)),
        }
    }

    fn unknown_migration(&self, id: &MigrationId) -> ApiError {
        let message = format!(
            "host '{}' knows no migration '{id}': see 'godwit migration list'",
            self.host()
        );
        ApiError::new(ErrorCode::UnknownMigration, message)
    }

    async fn vm_of(self: &Arc<Self>, id: &MigrationId) -> Reply<VmName> {
        let (agent, wanted) = (Arc::clone(self), id.clone());
        let names = self.supervisor.names();
        let found = blocking(move || Ok(agent.reports.vm_of(&wanted, &names))).await?;
        found.ok_or_else(|| self.unknown_migration(id))
    }

    /// One migration: its VM's process says, or else its file.
    pub(crate) async fn migration(self: &Arc<Self>, id: &MigrationId) -> Reply<MigrationReport> {
        let vm = self.vm_of(id).await?;
        let is_live = self.supervisor.find(&vm).is_some_and(|vm| vm.is_live());
        if is_live && let Ok(report) = self.live_report(&vm, id).await {
            return Ok(report);
        }
        let (agent, wanted) = (Arc::clone(self), id.clone());
        let read = blocking(move || {
            let read = agent.reports.read(&vm, &wanted);
            read.map_err(|error| unreadable(&wanted, agent.host(), &error))
        });
        read.await?.ok_or_else(|| self.unknown_migration(id))
    }

    /// Cancels a migration: where it has come here it ends, and where it has not it never begins here.
    pub(crate) async fn cancel(
        self: &Arc<Self>,
        id: &MigrationId,
        request: HostCancel,
    ) -> Reply<Done> {
        if request.vm.is_some() {
            let (agent, id) = (Arc::clone(self), id.clone());
            blocking(move || agent.cancelled.add(&id)).await?;
        }
        // After that: a migration that begins is found here, or finds itself cancelled.
        let vm = match (self.vm_of(id).await, request.vm) {
            (Ok(vm), _) => vm,
            (Err(unknown), None) => return Err(unknown),
            (Err(_), Some(vm)) => {
                let message = format!(
                    "migration '{id}' of VM '{vm}' will not begin on host '{}'",
                    self.host()
                );
                return Ok(Done { message });
            }
        };
        let reason = request.reason.as_deref();
        let reason = Reason::clipped(reason.unwrap_or("cancelled by its user")).into();
        let migration = id.clone();
        self.supervised(&vm);
        self.act(&vm, VmRequest::Cancel { migration, reason }).await
    }
}
