//! Which hosts are being emptied, and how far each is.
//!
//! Plain data: owns the records that are shown; who changes one writes the database first and holds the turn. Refuses
//! VMs for a host that is being emptied, or was and has not been given back.

use crate::error::Outcome;
use godwit_types::drain::{DrainState, DrainView};
use godwit_types::{ApiError, ErrorCode, HostName};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// Which beginning of a drain: a task works for one only.
pub type Run = u64;

#[derive(Debug)]
struct Record {
    run: Run,
    view: watch::Sender<DrainView>,
}

/// The drains under way, of which each host has at most one.
#[derive(Debug, Default)]
pub struct Drains {
    records: Mutex<BTreeMap<HostName, Record>>,
    /// Orders what is written to the database and then shown.
    turn: tokio::sync::Mutex<()>,
    runs: AtomicU64,
}

impl Drains {
    fn records(&self) -> MutexGuard<'_, BTreeMap<HostName, Record>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The turn to change drains in the database.
    pub async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// Whether a host takes no VMs.
    pub fn is_draining(&self, host: &HostName) -> bool {
        self.records().contains_key(host)
    }

    /// How far a drain is, now and from now on.
    pub fn watch(&self, host: &HostName) -> Option<watch::Receiver<DrainView>> {
        let records = self.records();
        records.get(host).map(|record| record.view.subscribe())
    }

    /// How far a drain is.
    pub fn get(&self, host: &HostName) -> Option<DrainView> {
        let records = self.records();
        records.get(host).map(|record| record.view.borrow().clone())
    }

    /// How far this run is, as long as it goes on.
    pub fn current(&self, host: &HostName, run: Run) -> Option<DrainView> {
        let records = self.records();
        let record = records.get(host).filter(|record| record.run == run)?;
        let view = record.view.borrow().clone();
        (view.state == DrainState::Draining).then_some(view)
    }

    /// Shows the record of a new run; the first one makes the host draining.
    pub fn put(&self, view: DrainView) -> Run {
        let run = self.runs.fetch_add(1, Ordering::Relaxed);
        let mut records = self.records();
        match records.get_mut(&view.host) {
            Some(record) => {
                record.run = run;
                record.view.send_replace(view);
            }
            None => {
                let host = view.host.clone();
                let view = watch::channel(view).0;
                records.insert(host, Record { run, view });
            }
        }
        run
    }

    /// Shows what a running drain has come to.
    pub fn renew(&self, view: DrainView) {
        if let Some(record) = self.records().get(&view.host) {
            record.view.send_if_modified(|shown| {
                let changed = *shown != view;
                *shown = view;
                changed
            });
        }
    }

    /// Shows the end, then forgets.
    pub fn remove(&self, host: &HostName) {
        if let Some(record) = self.records().remove(host) {
            record
                .view
                .send_modify(|view| view.state = DrainState::Stopped);
        }
    }
    /// Refuses for a host that is being emptied, which no VM may go to.
    pub fn must_take_vms(&self, host: &HostName) -> Outcome<()> {
        if !self.is_draining(host) {
            return Ok(());
        }
        Err(ApiError::new(
            ErrorCode::WrongState,
            format!(
                "host {host} is being emptied and takes no VMs: choose another, or run 'godwit host undrain {host}'"
            ),
        )
        .on_host(host))
    }
}
