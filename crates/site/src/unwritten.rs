//! What of the book is not in the database yet.
//!
//! Part of [`Book`]. Each change marks what it changed; a batch takes the marks and carries the values as they stand then.
//! Whoever writes owns the batch until it is written, or gives it back. Refuses: to lose a mark for a write that failed,
//! so that no later word is said over a database that knows less than the book.

use crate::book::{Book, Row};
use crate::plant::Plant;
use godwit_types::{HostName, VmName};
use std::collections::BTreeSet;

/// Marks of what changed since the last batch.
#[derive(Debug, Clone, Default)]
pub(crate) struct Unwritten {
    pub stamp: bool,
    pub vms: BTreeSet<VmName>,
    pub hosts: BTreeSet<HostName>,
    /// Hosts of which more was heard than is written: written when something else is, never for its own sake.
    pub heard: BTreeSet<HostName>,
    pub strangers: bool,
}

impl Unwritten {
    fn is_nothing(&self) -> bool {
        !self.stamp && !self.strangers && self.vms.is_empty() && self.hosts.is_empty()
    }
}

/// Rows to be written in one transaction.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "what is not written is to be given back"]
pub struct Batch {
    rows: Vec<Row>,
}

impl Batch {
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl Book {
    /// Takes what is to be written before anything is said that follows from it.
    pub fn take_unwritten(&mut self) -> Batch {
        if self.unwritten.is_nothing() {
            return Batch::default();
        }
        let mut due = std::mem::take(&mut self.unwritten);
        due.hosts.append(&mut due.heard);
        let mut rows = Vec::new();
        if due.stamp {
            rows.push(Row::Stamp(self.stamp));
        }
        for vm in due.vms {
            if let Some(entry) = self.vms.get(&vm) {
                rows.push(Row::Vm(vm, Box::new(entry.clone())));
            }
        }
        for host in due.hosts {
            // One that was removed meanwhile has no row any more.
            if let Some(book) = self.hosts.get(&host) {
                rows.push(Row::Host(host, book.row.clone()));
            }
        }
        if due.strangers {
            rows.push(Row::FencedStrangers(self.fenced_strangers.clone()));
        }
        Batch { rows }
    }

    /// Whether anything is to be written.
    pub fn has_unwritten(&self) -> bool {
        !self.unwritten.is_nothing()
    }

    /// A batch was not written, or nobody knows whether it was: it is due again, with the values of then.
    pub fn not_written(&mut self, batch: Batch) {
        if self.planted(Plant::LosesUnwritten) {
            return;
        }
        for row in batch.rows {
            match row {
                Row::Stamp(_) => self.unwritten.stamp = true,
                Row::Vm(vm, _) => drop(self.unwritten.vms.insert(vm)),
                Row::Host(host, _) => drop(self.unwritten.hosts.insert(host)),
                Row::FencedStrangers(_) => self.unwritten.strangers = true,
            }
        }
    }
}
