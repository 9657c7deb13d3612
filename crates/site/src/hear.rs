//! What the controller learns from a host's answers, and from their absence.
//!
//! Part of [`Book`]. An answer counts for what was so when its question was asked ([`Ticket`]), so that answers that
//! overtake each other never look like two holders. Refuses: to drop a host from a may-hold set for a poll's sake; only a
//! survey's no binds.

use crate::book::{Book, Entry, Row};
use crate::plant::Plant;
use crate::takeover::Charge;
use godwit_types::site::{Claim, Instance, RecordSaid, SiteHeard, Stamp, Standing};
use godwit_types::{Generation, HostName, VmName};
use std::collections::{BTreeMap, BTreeSet};

/// How far above every generation known here one that a host tells may be; what is beyond is not believed.
const PLAUSIBLE_STEP: u64 = 1 << 32;

/// When a question was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub(crate) u64);

/// A host's answer to a poll.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heard {
    /// Its life.
    pub instance: Instance,
    /// What it knows of the controller's words.
    pub knows: SiteHeard,
    /// Its records: all of them.
    pub records: Vec<RecordSaid>,
}

/// What a person or the log should hear of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// The hosts know a later word: this database is an old copy.
    RestoredCopy {
        /// The word that they know.
        heard: Stamp,
    },
    /// A host that was fenced has answered.
    FencedAnswered {
        /// The host.
        host: HostName,
        /// It is the same life as before: it was never off.
        was_never_off: bool,
    },
    /// The host's life is not the one that it should be.
    NotItself {
        /// The host.
        host: HostName,
        /// What it is instead.
        standing: Standing,
    },
    /// A record names a host that the inventory does not know.
    Stranger {
        /// The VM.
        vm: VmName,
        /// The host.
        host: HostName,
    },
    /// Another host holds the VM than was known.
    Held {
        /// The VM.
        vm: VmName,
        /// The host.
        host: HostName,
    },
}

/// What a host said of one VM last.
#[derive(Debug, Clone)]
pub(crate) struct Said {
    pub claim: Claim,
    pub highest: Generation,
    /// When that was asked.
    pub asked: u64,
    /// When this claim to hold the VM was first taken in; none while it claims nothing.
    pub held_since: Option<u64>,
}

impl Book {
    /// Notes that a host is asked now.
    pub fn ask(&mut self) -> Ticket {
        Ticket(self.next())
    }

    /// A host does not answer.
    pub fn lose(&mut self, host: &HostName) {
        if let Some(book) = self.hosts.get_mut(host) {
            book.answers = false;
        }
    }

    /// A host has answered a poll.
    pub fn hear(&mut self, host: &HostName, ticket: Ticket, heard: Heard) -> (Vec<Row>, Vec<News>) {
        let mut news = std::mem::take(&mut self.unsaid);
        let mut rows = self.meet(host, &heard.instance, &mut news);
        if !self.hosts.contains_key(host) {
            return (rows, news);
        }
        self.note_word(heard.knows.stamp, &mut news);
        let now = self.next();
        if let Some(book) = self.hosts.get_mut(host) {
            book.answers = true;
            book.heard = Some(ticket.0);
            book.knows = heard.knows;
            let named: BTreeSet<&VmName> = heard.records.iter().map(|said| &said.vm).collect();
            book.said
                .retain(|vm, said| said.asked > ticket.0 || named.contains(vm));
        }
        for record in &heard.records {
            rows.extend(self.take_in(host, record, ticket.0, now, &mut news));
        }
        (rows, news)
    }

    /// Which of a host's lives speaks, and whether it is the one that should.
    pub(crate) fn meet(
        &mut self,
        host: &HostName,
        instance: &Instance,
        news: &mut Vec<News>,
    ) -> Vec<Row> {
        let standing = self.standing_of(host, instance);
        let keeps_fence = self.planted(Plant::FenceOutlivesHearing);
        let Some(book) = self.hosts.get_mut(host) else {
            return Vec::new();
        };
        let mut changed = false;
        if book.standing != standing {
            book.standing = standing;
            if standing != Standing::Known {
                let host = host.clone();
                news.push(News::NotItself { host, standing });
            }
        }
        if book.row.fenced && !keeps_fence {
            let was_never_off = book.row.instance == *instance;
            book.row.fenced = false;
            book.false_fence = was_never_off;
            changed = true;
            let host = host.clone();
            news.push(News::FencedAnswered {
                host,
                was_never_off,
            });
        }
        if standing == Standing::Known && book.row.instance != *instance {
            book.row.instance = instance.clone();
            book.site.counter = instance.counter;
            changed = true;
        }
        match changed {
            true => {
                let row = book.row.clone();
                let stamp = self.word();
                vec![Row::Stamp(stamp), Row::Host(host.clone(), row)]
            }
            false => Vec::new(),
        }
    }

    /// What a life of a host is, by what is known of the lives before it.
    pub(crate) fn standing_of(&self, host: &HostName, instance: &Instance) -> Standing {
        let Some(book) = self.hosts.get(host) else {
            return Standing::Removed;
        };
        let known = &book.row.instance;
        if self.planted(Plant::OldCopyBoots) || *known == Instance::default() {
            return Standing::Known;
        }
        // A reboot does not change the machine. Another machine with the same certificate is the host only when a person
        // said that the first one is off: that it is silent proves nothing.
        let moved = !known.machine_id.is_empty() && instance.machine_id != known.machine_id;
        if moved && !book.row.fenced {
            return Standing::SecondInstance;
        }
        match instance.counter.cmp(&known.counter) {
            std::cmp::Ordering::Greater => Standing::Known,
            std::cmp::Ordering::Less => Standing::OldCopy,
            std::cmp::Ordering::Equal if instance == known => Standing::Known,
            std::cmp::Ordering::Equal => Standing::SecondInstance,
        }
    }

    /// A host has heard a later word of a controller than this one ever said.
    pub(crate) fn note_word(&mut self, heard: Stamp, news: &mut Vec<News>) {
        if self.planted(Plant::RestoredGoesOn) {
            return;
        }
        let known = match &self.charge {
            Charge::InCharge => self.stamp,
            Charge::Restored {
                heard, candidate, ..
            } => (*heard).max(*candidate),
        };
        if heard <= known {
            return;
        }
        self.charge = Charge::restored(heard);
        news.push(News::RestoredCopy { heard });
    }

    /// Takes in one record that a host has told.
    pub(crate) fn take_in(
        &mut self,
        host: &HostName,
        record: &RecordSaid,
        asked: u64,
        now: u64,
        news: &mut Vec<News>,
    ) -> Vec<Row> {
        let vm = &record.vm;
        let older = self.said(host, vm).is_some_and(|said| said.asked > asked);
        if older {
            return Vec::new();
        }
        self.note_said(host, record, asked, now);
        let before = self.vms.get(vm).cloned();
        self.learn(host, record, news);
        match self.vms.get(vm) == before.as_ref() {
            true => Vec::new(),
            false => self.touch(vm),
        }
    }

    fn note_said(&mut self, host: &HostName, record: &RecordSaid, asked: u64, now: u64) {
        let Some(book) = self.hosts.get_mut(host) else {
            return;
        };
        let before = book.said.get(&record.vm);
        let same = before.filter(|said| said.claim.held() == record.claim.held());
        let since = same.and_then(|said| said.held_since).unwrap_or(now);
        let said = Said {
            claim: record.claim.clone(),
            highest: record.highest,
            asked,
            held_since: record.claim.held().map(|_| since),
        };
        book.said.insert(record.vm.clone(), said);
    }

    /// What follows from a record for the VM's entry. A record that claims something adds its host to the set, whoever
    /// forgot it; none takes a host out.
    fn learn(&mut self, host: &HostName, record: &RecordSaid, news: &mut Vec<News>) {
        let known = self.vms.contains_key(&record.vm);
        let says_something = record.claim != Claim::No || record.highest > Generation(0);
        if !known && !says_something {
            return;
        }
        // What nobody here granted is believed only where this book knows nothing, or too little.
        let all_is_news = !known || !self.is_in_charge();
        let is_itself = self.standing(host) == Standing::Known;
        let entry = self.vms.entry(record.vm.clone()).or_default();
        let is_news = record.highest > entry.highest;
        if record.highest.0 <= entry.highest.0.saturating_add(PLAUSIBLE_STEP) {
            entry.highest = entry.highest.max(record.highest);
        }
        let believed = |entry: &Entry, host: &HostName, generation: Generation| {
            is_itself && (all_is_news || entry.was_granted(host, generation))
        };
        if record.claim.may_hold() {
            let named = entry.may_hold.entry(host.clone()).or_default();
            *named = (*named).max(record.claim.held().unwrap_or(record.highest));
        }
        if let Some((generation, to)) = record.claim.went() {
            if is_news || matches!(record.claim, Claim::Gave { .. }) {
                let named = entry.may_hold.entry(to.clone()).or_default();
                *named = (*named).max(generation);
            }
            let arrived = matches!(record.claim, Claim::Moved { .. });
            // Only the host that gave it can say that it has arrived.
            let gave = all_is_news || entry.was_given_by(host, generation);
            if arrived && gave && generation > entry.held && believed(entry, to, generation) {
                entry.held = generation;
                entry.holder = Some(to.clone());
            }
        }
        if let Some(generation) = record.claim.held()
            && (generation > entry.held || generation == entry.held && entry.holder.is_none())
            && believed(entry, host, generation)
        {
            let moved = entry.holder.as_ref() != Some(host);
            entry.held = generation;
            entry.holder = Some(host.clone());
            entry.deleted = false;
            if moved {
                let (vm, host) = (record.vm.clone(), host.clone());
                news.push(News::Held { vm, host });
            }
        }
        self.note_strangers(record, news);
    }

    /// A host that a record names and nobody knows here stands in the way of every grant of the VM.
    fn note_strangers(&mut self, record: &RecordSaid, news: &mut Vec<News>) {
        let Some(other) = record.claim.other() else {
            return;
        };
        let known = self.hosts.contains_key(other) || self.removed.contains(other);
        if known || self.strangers.contains_key(other) {
            return;
        }
        self.strangers.insert(other.clone(), None);
        news.push(News::Stranger {
            vm: record.vm.clone(),
            host: other.clone(),
        });
    }

    pub(crate) fn said(&self, host: &HostName, vm: &VmName) -> Option<&Said> {
        self.hosts.get(host)?.said.get(vm)
    }

    /// What every host said of a VM last.
    pub(crate) fn words_of<'a>(
        &'a self,
        vm: &'a VmName,
    ) -> impl Iterator<Item = (&'a HostName, &'a Said)> {
        let hosts = self.hosts.iter();
        hosts.filter_map(|(name, book)| Some((name, book.said.get(vm)?)))
    }

    /// What each host said of a VM last, by name.
    pub fn claims(&self, vm: &VmName) -> BTreeMap<HostName, Claim> {
        let words = self.words_of(vm);
        words
            .map(|(host, said)| (host.clone(), said.claim.clone()))
            .collect()
    }
}
