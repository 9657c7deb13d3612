//! The site's rules' part of the database: the controller's last word, and who may hold which VM.
//!
//! Part of [`Store`]. Rows are written before a host hears what follows from them, in the order of the book: whoever
//! writes has the turn to. Refuses to go back to an earlier word.

use crate::error::ControllerError;
use crate::store::{Store, apart, to_json, unreadable};
use crate::unread::UnreadRow;
use godwit_site::{Entry, HostRow, Row};
use godwit_types::site::Stamp;
use godwit_types::{HostName, VmName};
use sqlx::{Sqlite, Transaction, query, query_as, query_scalar};
use std::collections::BTreeSet;

type Result<T> = std::result::Result<T, ControllerError>;

impl Store {
    /// Writes rows, all or none.
    pub async fn write(&self, rows: &[Row]) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let mut tx = self.pool.begin().await?;
        write_rows(&mut tx, rows).await?;
        tx.commit().await?;
        Ok(())
    }

    /// The controller's last word.
    pub async fn stamp(&self) -> Result<Stamp> {
        let sql = "SELECT epoch, number FROM site_stamp";
        let row: Option<(i64, i64)> = query_as(sql).fetch_optional(&self.pool).await?;
        let (epoch, number) = row.ok_or_else(|| stamp_unread("there is none"))?;
        Ok(Stamp {
            epoch: u64::try_from(epoch).map_err(stamp_unread)?,
            number: u64::try_from(number).map_err(stamp_unread)?,
        })
    }

    /// Every VM's entry, and the rows that cannot be read.
    pub async fn entries(&self) -> Result<(Vec<(VmName, Entry)>, Vec<UnreadRow>)> {
        let rows: Vec<(String, String)> = query_as("SELECT vm, entry FROM site_vms")
            .fetch_all(&self.pool)
            .await?;
        let read = rows.into_iter().map(|(vm, entry)| {
            let unread = |e: String| UnreadRow::new("site_vms", &vm, e);
            let entry = serde_json::from_str(&entry).map_err(|e| unread(e.to_string()))?;
            let name = VmName::new(vm.clone()).map_err(|e| unread(e.to_string()))?;
            Ok((name, entry))
        });
        Ok(apart(read))
    }

    /// What is kept of each host beside its enrolment.
    pub async fn host_rows(&self) -> Result<Vec<(HostName, HostRow)>> {
        let rows: Vec<(String, String)> = query_as("SELECT host, record FROM site_hosts")
            .fetch_all(&self.pool)
            .await?;
        // It says which life of the host is its newest: without that an old copy of it would be believed.
        let read = |(host, record): (String, String)| {
            let unread = |e: String| ControllerError::Row(UnreadRow::new("site_hosts", &host, e));
            let row = serde_json::from_str(&record).map_err(|e| unread(e.to_string()))?;
            let name = HostName::new(host.clone()).map_err(|e| unread(e.to_string()))?;
            Ok((name, row))
        };
        rows.into_iter().map(read).collect()
    }

    /// Hosts that are not enrolled and that a person said are off.
    pub async fn fenced_strangers(&self) -> Result<Vec<HostName>> {
        let rows: Vec<String> = query_scalar("SELECT host FROM site_strangers")
            .fetch_all(&self.pool)
            .await?;
        // One that cannot be read counts as on.
        Ok(rows
            .into_iter()
            .filter_map(|name| HostName::new(name).ok())
            .collect())
    }
}

fn stamp_unread(cause: impl std::fmt::Display) -> ControllerError {
    ControllerError::Row(UnreadRow::new("site_stamp", "1", cause))
}

/// Writes rows as part of a transaction.
pub(crate) async fn write_rows(tx: &mut Transaction<'_, Sqlite>, rows: &[Row]) -> Result<()> {
    for row in rows {
        match row {
            Row::Stamp(stamp) => write_stamp(tx, *stamp).await?,
            Row::Vm(vm, entry) => write_entry(tx, vm, entry).await?,
            Row::Host(host, row) => {
                let sql = "INSERT INTO site_hosts (host, record) VALUES (?, ?) ON CONFLICT (host) DO UPDATE SET record = excluded.record";
                query(sql)
                    .bind(host.as_str())
                    .bind(to_json(row)?)
                    .execute(&mut **tx)
                    .await?;
            }
            Row::FencedStrangers(hosts) => write_strangers(tx, hosts).await?,
        }
    }
    Ok(())
}

async fn write_strangers(
    tx: &mut Transaction<'_, Sqlite>,
    hosts: &BTreeSet<HostName>,
) -> Result<()> {
    query("DELETE FROM site_strangers")
        .execute(&mut **tx)
        .await?;
    for host in hosts {
        query("INSERT INTO site_strangers (host) VALUES (?)")
            .bind(host.as_str())
            .execute(&mut **tx)
            .await?;
    }
    Ok(())
}

async fn write_stamp(tx: &mut Transaction<'_, Sqlite>, stamp: Stamp) -> Result<()> {
    let (epoch, number) = integers(stamp)?;
    query("UPDATE site_stamp SET epoch = ?1, number = ?2 WHERE (epoch, number) < (?1, ?2)")
        .bind(epoch)
        .bind(number)
        .execute(&mut **tx)
        .await?;
    Ok(())
}

async fn write_entry(tx: &mut Transaction<'_, Sqlite>, vm: &VmName, entry: &Entry) -> Result<()> {
    let (epoch, number) = integers(entry.stamp)?;
    let sql = "INSERT INTO site_vms (vm, entry, epoch, number) VALUES (?, ?, ?, ?) ON CONFLICT (vm) DO UPDATE SET entry = excluded.entry, epoch = excluded.epoch, number = excluded.number WHERE (excluded.epoch, excluded.number) > (site_vms.epoch, site_vms.number)";
    query(sql)
        .bind(vm.as_str())
        .bind(to_json(entry)?)
        .bind(epoch)
        .bind(number)
        .execute(&mut **tx)
        .await?;
    Ok(())
}

fn integers(stamp: Stamp) -> Result<(i64, i64)> {
    let integer = |part: u64| i64::try_from(part).map_err(|e| unreadable("stamp", e));
    Ok((integer(stamp.epoch)?, integer(stamp.number)?))
}
