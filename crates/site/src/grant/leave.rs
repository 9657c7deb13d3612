//! What leaves the book: a VM that is deleted, a host that is removed, and a person's word that a host is off. Each can be
//! taken back while it is not written.
//!
//! Owns no state of its own; the book is the caller's. Refuses: a deletion without a survey, a host that may hold VMs.

use super::Free;
use crate::book::{Book, Entry, FENCED_GAP, HostBook};
use crate::refusal::Refusal;
use godwit_types::{Generation, HostName, VmName};

impl Book {
    /// A VM is deleted: only after a survey found it free.
    pub fn delete(&mut self, free: Free) -> Result<Deletion, Refusal> {
        self.must_be_in_charge()?;
        let vm = free.vm;
        let fresh = self.is_still(&vm, free.level, free.epoch, &free.fenced);
        if !fresh {
            return Err(Refusal::Stale { vm });
        }
        let entry = self.vms.entry(vm.clone()).or_default();
        let before = entry.clone();
        let skip = if free.fenced.is_empty() {
            0
        } else {
            FENCED_GAP
        };
        entry.highest = Generation(entry.highest.0.saturating_add(skip));
        // Whatever a record says of an earlier generation is older than this: an old copy does not bring it back.
        entry.held = entry.highest;
        entry.may_hold.clear();
        entry.holder = None;
        entry.images.clear();
        entry.deleted = true;
        entry.hearsay = false;
        self.touch(&vm);
        Ok(Deletion { vm, before })
    }

    /// A deletion could not be written: the VM is there as before. What was heard of it since stands.
    pub fn not_deleted(&mut self, deletion: Deletion) {
        let Deletion { vm, before } = deletion;
        let entry = self.vms.entry(vm.clone()).or_default();
        for (host, named) in before.may_hold {
            entry.may_hold.entry(host).or_insert(named);
        }
        if entry.deleted {
            entry.deleted = before.deleted;
            entry.holder = before.holder;
            entry.images = before.images;
            entry.held = before.held;
            entry.hearsay = before.hearsay;
        }
        self.touch(&vm);
    }

    /// A person says that a host is off. It holds until the host is heard.
    pub fn fence(&mut self, host: &HostName) -> Result<(), Refusal> {
        if let Some(book) = self.hosts.get_mut(host) {
            if book.answers {
                return Err(Refusal::Answers { host: host.clone() });
            }
            book.row.fenced = true;
            book.row.false_fence = false;
            self.unwritten.hosts.insert(host.clone());
            return Ok(());
        }
        let named = self
            .vms
            .values()
            .any(|entry| entry.may_hold.contains_key(host));
        if named || self.strangers.contains_key(host) {
            self.fenced_strangers.insert(host.clone());
            self.unwritten.strangers = true;
            return Ok(());
        }
        Err(Refusal::UnknownHost { host: host.clone() })
    }

    /// A host is taken out of the site: one that answers once it holds nothing, one that is silent by a person's word.
    pub fn remove(&mut self, host: &HostName, confirmed: bool) -> Result<Removal, Refusal> {
        let Some(book) = self.hosts.get(host) else {
            return Err(Refusal::UnknownHost { host: host.clone() });
        };
        let vms = self.may_be_on(host);
        let named = host.clone();
        if !vms.is_empty() && book.answers {
            return Err(Refusal::HoldsVms { host: named, vms });
        }
        if !vms.is_empty() && !confirmed && !book.row.fenced {
            return Err(Refusal::MayRun { host: named, vms });
        }
        let mut removal = Removal {
            host: host.clone(),
            book: self.hosts.remove(host),
            vms: Vec::new(),
        };
        self.removed.insert(host.clone());
        self.unasked.remove(host);
        self.forget_word_of(host);
        self.word();
        for (vm, entry) in &mut self.vms {
            let might_hold = entry.may_hold.remove(host).is_some();
            // Its copy is gone for good: an older one elsewhere is the newest there is.
            let held_last = entry.holder.take_if(|holder| holder == host).is_some();
            let ran_last = entry.forget_ran_on(host);
            if might_hold {
                entry.highest = Generation(entry.highest.0.saturating_add(FENCED_GAP));
            }
            if might_hold || held_last || ran_last {
                removal.vms.push(LetGo {
                    vm: vm.clone(),
                    might_hold,
                    held_last,
                    ran_last,
                });
            }
        }
        for gone in &removal.vms {
            self.touch(&gone.vm);
        }
        Ok(removal)
    }

    /// A removal could not be written: the host is in the site as before, and may hold what it might.
    pub fn not_removed(&mut self, removal: Removal) {
        let Removal { host, book, vms } = removal;
        let Some(book) = book else { return };
        self.removed.remove(&host);
        self.hosts.insert(host.clone(), book);
        // Nobody knows whether its row is there.
        self.unwritten.hosts.insert(host.clone());
        self.must_be_read_again(&host);
        for gone in vms {
            let entry = self.vms.entry(gone.vm.clone()).or_default();
            let named = entry.highest;
            if gone.might_hold {
                entry.may_hold.entry(host.clone()).or_insert(named);
            }
            if gone.held_last && entry.holder.is_none() {
                entry.holder = Some(host.clone());
            }
            if let Some(not_begun) = entry.not_begun.as_mut().filter(|_| gone.ran_last) {
                not_begun.before.holder = Some(host.clone());
            }
            self.touch(&gone.vm);
        }
    }

    /// A person's word that a host is off could not be written: it was not taken.
    pub fn not_fenced(&mut self, host: &HostName) {
        if let Some(book) = self.hosts.get_mut(host) {
            book.row.fenced = false;
            self.unwritten.hosts.insert(host.clone());
        } else if self.fenced_strangers.remove(host) {
            self.unwritten.strangers = true;
        }
    }
}

/// A host that was taken out of the site, until that is written.
#[derive(Debug)]
pub struct Removal {
    host: HostName,
    book: Option<HostBook>,
    vms: Vec<LetGo>,
}

/// What a removal takes from one VM.
#[derive(Debug)]
struct LetGo {
    vm: VmName,
    might_hold: bool,
    held_last: bool,
    /// Before a grant by which nothing began.
    ran_last: bool,
}

/// A deletion that is not written yet.
#[derive(Debug)]
#[must_use = "one that cannot be written did not happen"]
pub struct Deletion {
    vm: VmName,
    before: Entry,
}
