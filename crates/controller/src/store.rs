//! The database: SQLite in WAL mode at `controller.db`.
//!
//! Owns the connection pool. Every value is bound, never put into SQL text. Refuses: a second active migration of a
//! VM (a unique index), and tokens that are used, expired or unknown (one conditional update).

use crate::audit::RefusedKinds;
use crate::error::ControllerError;
use crate::former::{self, Former};
use crate::site_store::write_rows;
use crate::state::{HostEntry, VmEntry};
use crate::unread::UnreadRow;
use godwit_site::Row;
use godwit_types::drain::DrainView;
use godwit_types::migration::{MigrationReport, MigrationSpec, Outcome};
use godwit_types::{HostName, MigrationId, VmName, VmSpec};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{
    SqlSafeStr as _, Sqlite, SqliteConnection, SqlitePool, Transaction, query, query_as,
    query_scalar,
};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

type Result<T> = std::result::Result<T, ControllerError>;

/// A pool of connections to the controller's SQLite database.
#[derive(Debug, Clone)]
pub struct Store {
    pub(crate) pool: SqlitePool,
    /// Requests that came too often and are not in the audit log yet.
    pub(crate) turned_away: Arc<AtomicU64>,
    /// What was refused at the door, by kind.
    pub(crate) refused: Arc<Mutex<RefusedKinds>>,
}

/// How an attempt to join ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Joined {
    Yes,
    /// The token is unknown, used or expired.
    BadToken,
    /// A host of this name is enrolled.
    NameTaken,
}

/// Whether a row could be added.
#[derive(Debug, PartialEq, Eq)]
pub enum Added {
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
        one(3, "site", include_str!("../migrations/0003_site.sql")),
        one(4, "removed", include_str!("../migrations/0004_removed.sql")),
        one(5, "audit", include_str!("../migrations/0005_audit.sql")),
        one(6, "uids", include_str!("../migrations/0006_uids.sql")),
        one(
            7,
            "certificates",
            include_str!("../migrations/0007_certificates.sql"),
        ),
        one(
            8,
            "former VMs",
            include_str!("../migrations/0008_former_vms.sql"),
        ),
    ])
}

/// Whether a connection may be used again. Where the disk is full SQLite takes a transaction back by itself, of which sqlx does not know: the
/// next one that fails would stay open for good, and all that is written after it be lost with the connection.
async fn is_outside_transactions(connection: &mut SqliteConnection) -> sqlx::Result<bool> {
    let taken_back = query("ROLLBACK").execute(connection).await;
    Ok(taken_back.is_err())
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
            // What is deleted or replaced may be a password: zeroes take its place.
            .pragma("secure_delete", "ON")
            .busy_timeout(Duration::from_secs(5));
        // One connection: SQLite has one writer anyway, and nothing here is slow.
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .after_release(|connection, _| Box::pin(is_outside_transactions(connection)))
            .connect_with(options)
            .await?;
        formats().run(&pool).await.map_err(|error| match error {
            MigrateError::VersionMissing(format) => ControllerError::Newer {
                format,
                newest: formats().iter().map(|known| known.version).max(),
            },
            other => other.into(),
        })?;
        Ok(Self {
            pool,
            turned_away: Arc::default(),
            refused: Arc::default(),
        })
    }

    pub async fn close(&self) {
        self.pool.close().await;
    }

    pub async fn hosts(&self) -> Result<Vec<(HostName, HostEntry)>> {
        type Row = (String, String, String, Option<String>, i64);
        let sql = "SELECT name, agent_address, serial, info, last_seen_unix_s FROM hosts";
        let rows: Vec<Row> = query_as(sql).fetch_all(&self.pool).await?;
        rows.into_iter()
            .map(|(name, address, serial, info, last_seen_unix_s)| {
                let unread = |e: String| ControllerError::Row(UnreadRow::new("hosts", &name, e));
                let address = address.parse();
                let address =
                    address.map_err(|e: std::net::AddrParseError| unread(e.to_string()))?;
                let mut entry = HostEntry::new(address, serial);
                // What it said last is heard again.
                entry.info = info
                    .as_deref()
                    .and_then(|info| serde_json::from_str(info).ok());
                entry.last_seen_unix_s = last_seen_unix_s;
                let known = HostName::new(name.clone()).map_err(|e| unread(e.to_string()))?;
                Ok((known, entry))
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

    /// Removes a host and revokes its certificate, with what follows for who may hold which VM. One that did not answer is
    /// kept with its address.
    pub async fn remove_host(
        &self,
        name: &HostName,
        serial: &str,
        unheard_at: Option<SocketAddr>,
        rows: &[Row],
        now_unix_s: i64,
    ) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        query(
            "INSERT OR IGNORE INTO revoked (serial, host, unix_s, unheard_at) VALUES (?, ?, ?, ?)",
        )
        .bind(serial)
        .bind(name.as_str())
        .bind(now_unix_s)
        .bind(unheard_at.map(|address| address.to_string()))
        .execute(&mut *tx)
        .await?;
        for sql in [
            "DELETE FROM hosts WHERE name = ?",
            "DELETE FROM site_hosts WHERE host = ?",
        ] {
            query(sql).bind(name.as_str()).execute(&mut *tx).await?;
        }
        write_rows(&mut tx, rows).await?;
        tx.commit().await?;
        Ok(())
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

    /// Uses a token up and enrols a host, or does neither.
    pub async fn join(
        &self,
        hash: &str,
        name: &HostName,
        entry: &HostEntry,
        now_unix_s: i64,
    ) -> Result<Joined> {
        let mut tx = self.pool.begin().await?;
        if !use_token(&mut tx, hash, now_unix_s).await? {
            return Ok(Joined::BadToken);
        }
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

    /// Enrols a host again that this copy of the database had forgotten.
    pub async fn enrol_again(&self, name: &HostName, entry: &HostEntry) -> Result<()> {
        query("INSERT OR IGNORE INTO hosts (name, agent_address, serial, last_seen_unix_s) VALUES (?, ?, ?, ?)")
            .bind(name.as_str())
            .bind(entry.address.to_string())
            .bind(&entry.serial)
            .bind(entry.last_seen_unix_s)
            .execute(&self.pool)
            .await?;
        Ok(())
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

    /// All VMs, and the rows that cannot be read.
    pub async fn vms(&self) -> Result<(Vec<VmEntry>, Vec<UnreadRow>)> {
        let sql = "SELECT name, spec, resolved FROM vms";
        let rows: Vec<(String, String, Option<String>)> =
            query_as(sql).fetch_all(&self.pool).await?;
        let read = rows.into_iter().map(|(name, spec, resolved)| {
            let entry = vm_entry(&name, &spec, resolved.as_deref());
            entry.map_err(|cause| UnreadRow::new("vms", &name, cause))
        });
        Ok(apart(read))
    }

    pub async fn add_vm(&self, vm: &VmEntry) -> Result<Added> {
        let done = query("INSERT OR IGNORE INTO vms (name, spec, resolved) VALUES (?, ?, ?)")
            .bind(vm.spec.name.as_str())
            .bind(to_json(&vm.spec)?)
            .bind(vm.resolved.as_ref().map(to_json).transpose()?)
            .execute(&self.pool)
            .await?;
        Ok(if done.rows_affected() == 1 {
            Added::Yes
        } else {
            Added::Exists
        })
    }

    /// Notes VMs as they are described now, whether or not they were known.
    pub async fn put_vms(&self, vms: &[VmEntry]) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        for vm in vms {
            query("INSERT INTO vms (name, spec, resolved) VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET spec = excluded.spec, resolved = excluded.resolved")
                .bind(vm.spec.name.as_str())
                .bind(to_json(&vm.spec)?)
                .bind(vm.resolved.as_ref().map(to_json).transpose()?)
                .execute(&mut *tx)
                .await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// Replaces what is known of a VM.
    pub async fn save_vm(&self, vm: &VmEntry) -> Result<()> {
        query("UPDATE vms SET spec = ?, resolved = ? WHERE name = ?")
            .bind(to_json(&vm.spec)?)
            .bind(vm.resolved.as_ref().map(to_json).transpose()?)
            .bind(vm.spec.name.as_str())
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Forgets a VM; what is known of its generations stays, and of its images what is said here.
    pub async fn delete_vm(
        &self,
        name: &VmName,
        former: Option<&Former>,
        rows: &[Row],
    ) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        former::keep(&mut tx, name, former).await?;
        query("DELETE FROM vms WHERE name = ?")
            .bind(name.as_str())
            .execute(&mut *tx)
            .await?;
        write_rows(&mut tx, rows).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Records, before any host hears of it, that a host may take a VM that nobody holds, and as what.
    pub async fn grant_start(&self, vm: &VmEntry, rows: &[Row]) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        write_rows(&mut tx, rows).await?;
        // A disk that was made is not described as one to be made any more.
        query("UPDATE vms SET spec = ?, resolved = ? WHERE name = ?")
            .bind(to_json(&vm.spec)?)
            .bind(vm.resolved.as_ref().map(to_json).transpose()?)
            .bind(vm.spec.name.as_str())
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(())
    }

    /// Records, before any host hears of it, that a migration may take a VM from its source to its destination.
    pub async fn grant_migration(
        &self,
        spec: &MigrationSpec,
        report: &MigrationReport,
        rows: &[Row],
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
        write_rows(&mut tx, rows).await?;
        tx.commit().await?;
        Ok(Added::Yes)
    }

    /// Stores a migration's report while it goes on.
    pub async fn save_report(&self, report: &MigrationReport) -> Result<()> {
        query("UPDATE migrations SET report = ? WHERE id = ?")
            .bind(to_json(report)?)
            .bind(report.id.as_str())
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Stores how a migration ended, and, in the same transaction, who holds the VM by that.
    pub async fn end_migration(&self, report: &MigrationReport, rows: &[Row]) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        query("UPDATE migrations SET report = ?, ended = 1 WHERE id = ?")
            .bind(to_json(report)?)
            .bind(report.id.as_str())
            .execute(&mut *tx)
            .await?;
        let oldest = "DELETE FROM migrations WHERE ended = 1 AND seq <= (SELECT max(seq) FROM migrations) - ?";
        const REPORTS_KEPT: i64 = 10_000;
        query(oldest).bind(REPORTS_KEPT).execute(&mut *tx).await?;
        write_rows(&mut tx, rows).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Reports of what has not ended, however old, then of the newest that have.
    pub async fn reports(&self) -> Result<Vec<MigrationReport>> {
        const SHOWN_MAX: i64 = 1000;
        let sql = "SELECT report FROM migrations ORDER BY ended, seq DESC LIMIT ?";
        let rows: Vec<String> = query_scalar(sql)
            .bind(SHOWN_MAX)
            .fetch_all(&self.pool)
            .await?;
        // One that cannot be read is no reason to show none.
        let read = rows
            .iter()
            .filter_map(|text| serde_json::from_str(text).ok());
        Ok(read.collect())
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
        let reports = rows
            .iter()
            .filter_map(|text| serde_json::from_str(text).ok());
        let completed = |report: &MigrationReport| report.outcome == Some(Outcome::Completed);
        Ok(reports.filter(completed).collect())
    }

    /// All drains, and the rows that cannot be read.
    pub async fn drains(&self) -> Result<(Vec<DrainView>, Vec<UnreadRow>)> {
        let rows: Vec<(String, String)> = query_as("SELECT host, record FROM drains")
            .fetch_all(&self.pool)
            .await?;
        let read = rows.iter().map(|(host, record)| {
            serde_json::from_str(record).map_err(|e| UnreadRow::new("drains", host, e))
        });
        Ok(apart(read))
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
        // A name that cannot be read counts as one of nobody, which stands in the way of more.
        Ok(rows
            .into_iter()
            .filter_map(|name| HostName::new(name).ok())
            .collect())
    }

    /// Hosts that were removed unheard and have not joined again, with where they were.
    pub async fn removed_unheard(&self) -> Result<Vec<(HostName, SocketAddr)>> {
        let sql = "SELECT host, unheard_at FROM revoked WHERE unheard_at IS NOT NULL AND host NOT IN (SELECT name FROM hosts)";
        let rows: Vec<(String, String)> = query_as(sql).fetch_all(&self.pool).await?;
        let read = |(host, address): (String, String)| {
            let host = HostName::new(host).map_err(|e| unreadable("host name", e))?;
            let address = address.parse().map_err(|e| unreadable("address", e))?;
            Ok((host, address))
        };
        rows.into_iter().map(read).collect()
    }

    /// A host that was removed unheard is off: nobody asks it any more.
    pub async fn forget_unheard(&self, host: &HostName) -> Result<()> {
        query("UPDATE revoked SET unheard_at = NULL WHERE host = ?")
            .bind(host.as_str())
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Reports of migrations that have not ended; VMs with a row that cannot be read.
    pub async fn active_reports(&self) -> Result<(Vec<MigrationReport>, Vec<(String, UnreadRow)>)> {
        let sql = "SELECT id, vm, report FROM migrations WHERE ended = 0";
        let rows: Vec<(String, String, String)> = query_as(sql).fetch_all(&self.pool).await?;
        let read = rows.into_iter().map(|(id, vm, report)| {
            let read = serde_json::from_str(&report);
            read.map_err(|e| (vm, UnreadRow::new("migrations", &id, e)))
        });
        Ok(apart(read))
    }

    pub async fn report(&self, id: &MigrationId) -> Result<Option<MigrationReport>> {
        let sql = "SELECT report FROM migrations WHERE id = ?";
        let row: Option<String> = query_scalar(sql)
            .bind(id.as_str())
            .fetch_optional(&self.pool)
            .await?;
        row.map(|text| from_json("report", &text)).transpose()
    }
}

/// Uses a token up; false when it is not good.
pub async fn use_token(
    tx: &mut Transaction<'_, Sqlite>,
    hash: &str,
    now_unix_s: i64,
) -> Result<bool> {
    let sql = "UPDATE tokens SET used_unix_s = ?1 WHERE hash = ?2 AND used_unix_s IS NULL AND expires_unix_s > ?1";
    let used = query(sql)
        .bind(now_unix_s)
        .bind(hash)
        .execute(&mut **tx)
        .await?;
    Ok(used.rows_affected() == 1)
}

fn vm_entry(
    name: &str,
    spec: &str,
    resolved: Option<&str>,
) -> std::result::Result<VmEntry, String> {
    let read = |text: &str| {
        let spec: VmSpec = serde_json::from_str(text).map_err(|e| e.to_string())?;
        match spec.name.as_str() == name {
            true => Ok(spec),
            false => Err(format!("it describes VM {}", spec.name)),
        }
    };
    Ok(VmEntry {
        spec: read(spec)?,
        resolved: resolved.map(read).transpose()?,
    })
}

/// What could be read, and what could not.
pub(crate) fn apart<T, E>(
    read: impl Iterator<Item = std::result::Result<T, E>>,
) -> (Vec<T>, Vec<E>) {
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    for one in read {
        match one {
            Ok(one) => good.push(one),
            Err(one) => bad.push(one),
        }
    }
    (good, bad)
}

fn without_secret(spec: &MigrationSpec) -> Result<String> {
    let mut value = serde_json::to_value(spec).map_err(|e| unreadable("migration", e))?;
    if let Some(object) = value.as_object_mut() {
        object.remove("secret");
    }
    to_json(&value)
}

pub(crate) fn to_json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| unreadable("value", e))
}

pub(crate) fn from_json<T: DeserializeOwned>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| unreadable(what, e))
}

pub(crate) fn unreadable(what: &'static str, cause: impl std::fmt::Display) -> ControllerError {
    ControllerError::Unreadable {
        what,
        cause: cause.to_string(),
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
