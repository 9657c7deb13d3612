//! The database: SQLite in WAL mode at `controller.db`.
//!
//! Owns the connection pool. Every value is bound, never put into SQL text. Refuses: a second active migration of a
//! VM (a unique index), and tokens that are used, expired or unknown (one conditional update).

use crate::error::ControllerError;
use crate::state::{HostEntry, VmEntry};
use godwit_types::drain::DrainView;
use godwit_types::migration::{MigrationReport, MigrationSpec, Outcome};
use godwit_types::{Generation, HostName, MigrationId, VmName};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{SqlSafeStr as _, SqlitePool, query, query_as, query_scalar};
use std::path::Path;
use std::time::Duration;

type Result<T> = std::result::Result<T, ControllerError>;

/// The database.
#[derive(Debug, Clone)]
pub struct Store {
    pool: SqlitePool,
}

/// A right that is about to be given.
#[derive(Debug)]
pub struct Grant<'a> {
    /// The VM.
    pub vm: &'a VmName,
    /// The generation.
    pub generation: Generation,
    /// Who gets it.
    pub destination: &'a HostName,
}

/// How an attempt to join ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Joined {
    /// Enrolled.
    Yes,
    /// The token is unknown, used or expired.
    BadToken,
    /// A host of this name is enrolled.
    NameTaken,
}

/// Whether a row could be added.
#[derive(Debug, PartialEq, Eq)]
pub enum Added {
    /// It was.
    Yes,
    /// There is one already.
    Exists,
}

/// Every format that the database has had, oldest first. A text here never changes: databases know its checksum.
fn formats() -> Migrator {
    let one = |version, description: &'static str, sql: &'static str| {
        let sql = sql.into_sql_str();
        Migration::new(
            version,
            description.into(),
            MigrationType::Simple,
            sql,
            false,
        )
    };
    Migrator::with_migrations(vec![
        one(1, "initial", include_str!("../migrations/0001_initial.sql")),
        one(2, "drains", include_str!("../migrations/0002_drains.sql")),
    ])
}

impl Store {
    /// Opens the database, making it when `create` is set, and brings its format up to date.
    pub async fn open(path: &Path, create: bool) -> Result<Self> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(create)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(Duration::from_secs(5));
        // One connection: SQLite has one writer anyway, and nothing here is slow.
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .connect_with(options)
            .await?;
        formats().run(&pool).await?;
        Ok(Self { pool })
    }

    /// Closes it.
    pub async fn close(&self) {
        self.pool.close().await;
    }

    /// All hosts.
    pub async fn hosts(&self) -> Result<Vec<(HostName, HostEntry)>> {
        type Row = (String, String, String, Option<String>, i64);
        let sql = "SELECT name, agent_address, serial, info, last_seen_unix_s FROM hosts";
        let rows: Vec<Row> = query_as(sql).fetch_all(&self.pool).await?;
        rows.into_iter()
            .map(|(name, address, serial, info, last_seen_unix_s)| {
                let address = address.parse().map_err(|e| unreadable("host address", e))?;
                let mut entry = HostEntry::new(address, serial);
                entry.info = info
                    .as_deref()
                    .map(|info| from_json("host", info))
                    .transpose()?;
                entry.last_seen_unix_s = last_seen_unix_s;
                let name = HostName::new(name).map_err(|e| unreadable("host name", e))?;
                Ok((name, entry))
            })
            .collect()
    }

    /// Notes what a host said of itself.
    pub async fn save_host_info(
        &self,
        name: &HostName,
        info: &impl Serialize,
        now_unix_s: i64,
    ) -> Result<()> {
        query("UPDATE hosts SET info = ?, last_seen_unix_s = ? WHERE name = ?")
            .bind(to_json(info)?)
            .bind(now_unix_s)
            .bind(name.as_str())
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Removes a host and revokes its certificate; VMs on record there are held by nobody from now on.
    pub async fn remove_host(&self, name: &HostName, serial: &str, now_unix_s: i64) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        query("INSERT OR IGNORE INTO revoked (serial, host, unix_s) VALUES (?, ?, ?)")
            .bind(serial)
            .bind(name.as_str())
            .bind(now_unix_s)
            .execute(&mut *tx)
            .await?;
        query("UPDATE vms SET host = NULL WHERE host = ?")
            .bind(name.as_str())
            .execute(&mut *tx)
            .await?;
        query("DELETE FROM hosts WHERE name = ?")
            .bind(name.as_str())
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(())
    }

    /// Whether a host of this name was ever removed.
    pub async fn was_removed(&self, name: &HostName) -> Result<bool> {
        let sql = "SELECT COUNT(*) FROM revoked WHERE host = ?";
        let count: i64 = query_scalar(sql)
            .bind(name.as_str())
            .fetch_one(&self.pool)
            .await?;
        Ok(count > 0)
    }

    /// Serial numbers of all revoked certificates.
    pub async fn revoked(&self) -> Result<Vec<String>> {
        Ok(query_scalar("SELECT serial FROM revoked")
            .fetch_all(&self.pool)
            .await?)
    }

    /// Notes a new token, and forgets those that ended long ago.
    pub async fn add_token(&self, hash: &str, expires_unix_s: i64, now_unix_s: i64) -> Result<()> {
        const KEPT_S: i64 = 7 * 86_400;
        query("DELETE FROM tokens WHERE expires_unix_s < ?")
            .bind(now_unix_s.saturating_sub(KEPT_S))
            .execute(&self.pool)
            .await?;
        query("INSERT INTO tokens (hash, expires_unix_s) VALUES (?, ?)")
            .bind(hash)
            .bind(expires_unix_s)
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Uses a token up and enrols a host, or does neither. A host of the same name that was never heard is replaced:
    /// its answer got lost.
    pub async fn join(
        &self,
        hash: &str,
        name: &HostName,
        entry: &HostEntry,
        now_unix_s: i64,
    ) -> Result<Joined> {
        let mut tx = self.pool.begin().await?;
        let used = query("UPDATE tokens SET used_unix_s = ? WHERE hash = ? AND used_unix_s IS NULL AND expires_unix_s > ?")
            .bind(now_unix_s)
            .bind(hash)
            .bind(now_unix_s)
            .execute(&mut *tx)
            .await?;
        if used.rows_affected() != 1 {
            return Ok(Joined::BadToken);
        }
        query("INSERT OR IGNORE INTO revoked (serial, host, unix_s) SELECT serial, name, ? FROM hosts WHERE name = ? AND info IS NULL")
            .bind(now_unix_s)
            .bind(name.as_str())
            .execute(&mut *tx)
            .await?;
        query("DELETE FROM hosts WHERE name = ? AND info IS NULL")
            .bind(name.as_str())
            .execute(&mut *tx)
            .await?;
        let added = query("INSERT OR IGNORE INTO hosts (name, agent_address, serial, last_seen_unix_s) VALUES (?, ?, ?, ?)")
            .bind(name.as_str())
            .bind(entry.address.to_string())
            .bind(&entry.serial)
            .bind(now_unix_s)
            .execute(&mut *tx)
            .await?;
        if added.rows_affected() != 1 {
            return Ok(Joined::NameTaken);
        }
        tx.commit().await?;
        Ok(Joined::Yes)
    }

    /// Whether a token could be used now.
    pub async fn token_is_good(&self, hash: &str, now_unix_s: i64) -> Result<bool> {
        let sql = "SELECT COUNT(*) FROM tokens WHERE hash = ? AND used_unix_s IS NULL AND expires_unix_s > ?";
        let count: i64 = query_scalar(sql)
            .bind(hash)
            .bind(now_unix_s)
            .fetch_one(&self.pool)
            .await?;
        Ok(count == 1)
    }

    /// All VMs.
    pub async fn vms(&self) -> Result<Vec<VmEntry>> {
        type Row = (String, Option<String>, Option<String>);
        let rows: Vec<Row> = query_as("SELECT spec, resolved, host FROM vms")
            .fetch_all(&self.pool)
            .await?;
        rows.into_iter()
            .map(|(spec, resolved, host)| {
                Ok(VmEntry {
                    spec: from_json("VM", &spec)?,
                    resolved: resolved
                        .as_deref()
                        .map(|text| from_json("VM", text))
                        .transpose()?,
                    host: host
                        .map(HostName::new)
                        .transpose()
                        .map_err(|e| unreadable("host name", e))?,
                })
            })
            .collect()
    }

    /// Adds a VM.
    pub async fn add_vm(&self, vm: &VmEntry) -> Result<Added> {
        let done =
            query("INSERT OR IGNORE INTO vms (name, spec, resolved, host) VALUES (?, ?, ?, ?)")
                .bind(vm.spec.name.as_str())
                .bind(to_json(&vm.spec)?)
                .bind(vm.resolved.as_ref().map(to_json).transpose()?)
                .bind(vm.host.as_ref().map(HostName::as_str))
                .execute(&self.pool)
                .await?;
        Ok(if done.rows_affected() == 1 {
            Added::Yes
        } else {
            Added::Exists
        })
    }

    /// Replaces what is known of a VM.
    pub async fn save_vm(&self, vm: &VmEntry) -> Result<()> {
        query("UPDATE vms SET spec = ?, resolved = ?, host = ? WHERE name = ?")
            .bind(to_json(&vm.spec)?)
            .bind(vm.resolved.as_ref().map(to_json).transpose()?)
            .bind(vm.host.as_ref().map(HostName::as_str))
            .bind(vm.spec.name.as_str())
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Forgets a VM; its highest generation stays.
    pub async fn delete_vm(&self, name: &VmName) -> Result<()> {
        query("DELETE FROM vms WHERE name = ?")
            .bind(name.as_str())
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// All highest generations.
    pub async fn generations(&self) -> Result<Vec<(VmName, Generation)>> {
        let rows: Vec<(String, i64)> = query_as("SELECT vm, highest FROM generations")
            .fetch_all(&self.pool)
            .await?;
        rows.into_iter()
            .map(|(vm, highest)| {
                let vm = VmName::new(vm).map_err(|e| unreadable("VM name", e))?;
                let highest = u64::try_from(highest).map_err(|e| unreadable("generation", e))?;
                Ok((vm, Generation(highest)))
            })
            .collect()
    }

    /// Notes a generation that a host has reported.
    pub async fn see_generation(&self, vm: &VmName, generation: Generation) -> Result<()> {
        raise(&self.pool, vm, generation).await
    }

    /// Records, before any host hears of it, that a host may take a VM that nobody holds.
    pub async fn grant_start(
        &self,
        grant: &Grant<'_>,
        vm: &VmEntry,
        now_unix_s: i64,
    ) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        raise(&mut *tx, grant.vm, grant.generation).await?;
        query("INSERT INTO grants (vm, generation, destination, unix_s) VALUES (?, ?, ?, ?)")
            .bind(grant.vm.as_str())
            .bind(sql_integer(grant.generation)?)
            .bind(grant.destination.as_str())
            .bind(now_unix_s)
            .execute(&mut *tx)
            .await?;
        query("UPDATE vms SET resolved = ?, host = ? WHERE name = ?")
            .bind(vm.resolved.as_ref().map(to_json).transpose()?)
            .bind(grant.destination.as_str())
            .bind(grant.vm.as_str())
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(())
    }

    /// Records, before any host hears of it, that a migration may take a VM from its source to its destination. The
    /// generation counts as seen from now on.
    pub async fn grant_migration(
        &self,
        spec: &MigrationSpec,
        report: &MigrationReport,
    ) -> Result<Added> {
        let mut tx = self.pool.begin().await?;
        let added = query("INSERT OR IGNORE INTO migrations (id, vm, source, destination, spec, report, ended) VALUES (?, ?, ?, ?, ?, ?, 0)")
            .bind(spec.id.as_str())
            .bind(spec.vm.as_str())
            .bind(spec.source.host.as_str())
            .bind(spec.destination.host.as_str())
            .bind(without_secret(spec)?)
            .bind(to_json(report)?)
            .execute(&mut *tx)
            .await?;
        if added.rows_affected() != 1 {
            return Ok(Added::Exists);
        }
        raise(&mut *tx, &spec.vm, spec.generation).await?;
        query("INSERT INTO grants (vm, generation, source, destination, migration, unix_s) VALUES (?, ?, ?, ?, ?, ?)")
            .bind(spec.vm.as_str())
            .bind(sql_integer(spec.generation)?)
            .bind(spec.source.host.as_str())
            .bind(spec.destination.host.as_str())
            .bind(spec.id.as_str())
            .bind(i64::try_from(report.began_unix_s).unwrap_or(i64::MAX))
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(Added::Yes)
    }

    /// Stores a migration's report.
    pub async fn save_report(&self, report: &MigrationReport, ended: bool) -> Result<()> {
        query("UPDATE migrations SET report = ?, ended = ? WHERE id = ?")
            .bind(to_json(report)?)
            .bind(i64::from(ended))
            .bind(report.id.as_str())
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// All reports, newest first.
    pub async fn reports(&self) -> Result<Vec<MigrationReport>> {
        const SHOWN_MAX: i64 = 1000;
        let sql = "SELECT report FROM migrations ORDER BY seq DESC LIMIT ?";
        let rows: Vec<String> = query_scalar(sql)
            .bind(SHOWN_MAX)
            .fetch_all(&self.pool)
            .await?;
        rows.iter().map(|text| from_json("report", text)).collect()
    }

    /// Newest reports of completed migrations from one host to another.
    pub async fn reports_between(
        &self,
        source: &HostName,
        destination: &HostName,
    ) -> Result<Vec<MigrationReport>> {
        const LOOKED_AT_MAX: i64 = 20;
        let sql = "SELECT report FROM migrations WHERE source = ? AND destination = ? AND ended = 1 ORDER BY seq DESC LIMIT ?";
        let rows: Vec<String> = query_scalar(sql)
            .bind(source.as_str())
            .bind(destination.as_str())
            .bind(LOOKED_AT_MAX)
            .fetch_all(&self.pool)
            .await?;
        let reports = rows.iter().map(|text| from_json("report", text));
        let completed = |report: &MigrationReport| report.outcome == Some(Outcome::Completed);
        let mut reports: Vec<MigrationReport> = reports.collect::<Result<_>>()?;
        reports.retain(completed);
        Ok(reports)
    }

    /// All drains.
    pub async fn drains(&self) -> Result<Vec<DrainView>> {
        let rows: Vec<String> = query_scalar("SELECT record FROM drains")
            .fetch_all(&self.pool)
            .await?;
        rows.iter().map(|text| from_json("drain", text)).collect()
    }

    /// Notes how far a drain is.
    pub async fn save_drain(&self, view: &DrainView) -> Result<()> {
        query("INSERT INTO drains (host, record) VALUES (?, ?) ON CONFLICT (host) DO UPDATE SET record = excluded.record")
            .bind(view.host.as_str())
            .bind(to_json(view)?)
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Forgets a drain.
    pub async fn delete_drain(&self, host: &HostName) -> Result<()> {
        query("DELETE FROM drains WHERE host = ?")
            .bind(host.as_str())
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Hosts that were removed and have not joined again.
    pub async fn removed_hosts(&self) -> Result<Vec<HostName>> {
        let sql = "SELECT DISTINCT host FROM revoked WHERE host NOT IN (SELECT name FROM hosts)";
        let rows: Vec<String> = query_scalar(sql).fetch_all(&self.pool).await?;
        rows.into_iter()
            .map(|name| HostName::new(name).map_err(|e| unreadable("host name", e)))
            .collect()
    }

    /// Reports of migrations that have not ended.
    pub async fn active_reports(&self) -> Result<Vec<MigrationReport>> {
        let rows: Vec<String> = query_scalar("SELECT report FROM migrations WHERE ended = 0")
            .fetch_all(&self.pool)
            .await?;
        rows.iter().map(|text| from_json("report", text)).collect()
    }

    /// One report.
    pub async fn report(&self, id: &MigrationId) -> Result<Option<MigrationReport>> {
        let sql = "SELECT report FROM migrations WHERE id = ?";
        let row: Option<String> = query_scalar(sql)
            .bind(id.as_str())
            .fetch_optional(&self.pool)
            .await?;
        row.map(|text| from_json("report", &text)).transpose()
    }
}

async fn raise<'e>(
    executor: impl sqlx::Executor<'e, Database = sqlx::Sqlite>,
    vm: &VmName,
    generation: Generation,
) -> Result<()> {
    query("INSERT INTO generations (vm, highest) VALUES (?, ?) ON CONFLICT (vm) DO UPDATE SET highest = MAX(highest, excluded.highest)")
        .bind(vm.as_str())
        .bind(sql_integer(generation)?)
        .execute(executor)
        .await?;
    Ok(())
}

fn without_secret(spec: &MigrationSpec) -> Result<String> {
    let mut value = serde_json::to_value(spec).map_err(|e| unreadable("migration", e))?;
    if let Some(object) = value.as_object_mut() {
        object.remove("secret");
    }
    to_json(&value)
}

fn sql_integer(generation: Generation) -> Result<i64> {
    i64::try_from(generation.0).map_err(|e| unreadable("generation", e))
}

fn to_json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| unreadable("value", e))
}

fn from_json<T: DeserializeOwned>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| unreadable(what, e))
}

fn unreadable(what: &'static str, cause: impl std::fmt::Display) -> ControllerError {
    ControllerError::Unreadable {
        what,
        cause: cause.to_string(),
    }
}
