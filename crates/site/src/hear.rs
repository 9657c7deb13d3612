//! What the controller learns from a host's answers, and from their absence.
//!
//! Part of [`Book`]. An answer counts for what was so when its question was asked ([`Ticket`]), so that answers that
//! overtake each other never look like two holders. Refuses: to drop a host from a may-hold set for a poll's sake; only a
//! survey's no binds.

use crate::book::{Book, Entry, Granted};
use crate::plant::Plant;
use godwit_ownership::PEERS_REACH;
use godwit_types::site::{Claim, Instance, RecordSaid, SiteHeard, Stamp, Standing};
use godwit_types::{Generation, HostName, VmName};
use std::collections::{BTreeMap, BTreeSet};

/// How far above every generation known here one that a host tells may be; what is beyond is not believed.
pub(crate) const PLAUSIBLE_STEP: u64 = 1 << 32;

/// Whether a generation that a host tells can have come about. All that hosts can make each other's counters is believed,
/// so that the next survey is above it.
pub(crate) fn is_plausible(known: Generation, told: Generation) -> bool {
    told <= PEERS_REACH || told.0 <= known.0.saturating_add(PLAUSIBLE_STEP)
}

/// How far above this controller's epoch one may be that a host tells: each restored copy takes one.
pub(crate) const PLAUSIBLE_EPOCHS: u64 = 1 << 16;

/// The highest number within an epoch that can have been said.
pub(crate) const PLAUSIBLE_NUMBER: u64 = 1 << 60;

/// When a question was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub(crate) u64);

/// A host's answer to a poll.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heard {
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
        /// The host that says so.
        host: HostName,
    },
    /// A host that was fenced has answered.
    FencedAnswered {
        host: HostName,
        /// It is the same life as before: it was never off.
        was_never_off: bool,
    },
    /// The host's life is not the one that it should be.
    NotItself {
        host: HostName,
        /// What it is instead.
        standing: Standing,
    },
    /// Another controller has taken over from this one.
    Replaced {
        /// The word that it said.
        heard: Stamp,
        /// The host that heard it.
        host: HostName,
    },
    /// A host says that it has heard a word that no controller can have said.
    Impossible { host: HostName },
    /// A record names a host that the inventory does not know.
    Stranger { vm: VmName, host: HostName },
    /// Another host holds the VM than was known.
    Held { vm: VmName, host: HostName },
}

/// What a host said of one VM last.
#[derive(Debug, Clone)]
pub(crate) struct Said {
    pub claim: Claim,
    pub highest: Generation,
    /// When that was asked.
    pub asked: u64,
    /// Whether a guest may be there.
    pub may_live: bool,
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
        self.unasked.remove(host);
        if let Some(book) = self.hosts.get_mut(host) {
            book.answers = false;
        }
    }

    /// A host has answered a poll.
    pub fn hear(&mut self, host: &HostName, ticket: Ticket, heard: Heard) -> Vec<News> {
        let mut news = std::mem::take(&mut self.unsaid);
        self.unasked.remove(host);
        let Some(fenced) = self.hosts.get(host).map(|book| book.row.fenced) else {
            return news;
        };
        // Before anything counts this controller's words up to what it may have forgotten.
        self.note_word(host, heard.knows.stamp, &mut news);
        if let Some(book) = self.hosts.get_mut(host) {
            // Whoever speaks is not off, which is news also to a controller that forgets whom it took for off.
            book.row.fenced = fenced;
        }
        self.meet_asked(
            host,
            &heard.instance,
            heard.knows.stamp,
            ticket.0,
            &mut news,
        );
        self.note_known(host, heard.knows, ticket.0);
        let now = self.next();
        if let Some(book) = self.hosts.get_mut(host) {
            book.answers = true;
            book.heard = Some(ticket.0);
            let named: BTreeSet<&VmName> = heard.records.iter().map(|said| &said.vm).collect();
            book.said
                .retain(|vm, said| said.asked > ticket.0 || named.contains(vm));
        }
        for record in &heard.records {
            self.take_in(host, record, ticket.0, now, &mut news);
        }
        news
    }

    /// Which of a host's lives speaks in answer to what was asked at `asked`, and whether it is the one that should:
    /// `heard` is the newest word that it knows.
    pub(crate) fn meet_asked(
        &mut self,
        host: &HostName,
        instance: &Instance,
        heard: Stamp,
        asked: u64,
        news: &mut Vec<News>,
    ) {
        self.note_went_back(host, instance, heard, asked);
        self.meet(host, instance, news);
    }

    /// Which of a host's lives speaks, whenever that was composed: what it says of words may be overtaken.
    pub(crate) fn meet(&mut self, host: &HostName, instance: &Instance, news: &mut Vec<News>) {
        let standing = self.standing_of(host, instance);
        let as_of = self.machine_is_new_as_of(host, instance);
        let keeps_fence = self.planted(Plant::FenceOutlivesHearing);
        let is_starting = self.is_starting();
        let Some(book) = self.hosts.get_mut(host) else {
            return;
        };
        let mut changed = false;
        if book.standing != standing {
            book.standing = standing;
            if standing != Standing::Known {
                let host = host.clone();
                news.push(News::NotItself { host, standing });
            }
        }
        // By the fence another machine is the host, too: it stands until that one is noted.
        let is_due = !is_starting || book.row.instance == *instance;
        if book.row.fenced && !keeps_fence && is_due {
            let known = &book.row.instance.boot_id;
            let was_never_off = !known.is_empty() && *known == instance.boot_id;
            book.row.fenced = false;
            book.row.false_fence |= was_never_off;
            changed = true;
            let host = host.clone();
            news.push(News::FencedAnswered {
                host,
                was_never_off,
            });
        }
        // To note a life takes a word: a host that is still to be heard may know one that this database lacks, which would be
        // overtaken. The next answer says the same.
        if standing == Standing::Known && book.row.instance != *instance && !is_starting {
            book.row.instance = instance.clone();
            book.site.counter = instance.counter;
            book.site.machine_id.clone_from(&instance.machine_id);
            changed = true;
            if let Some(as_of) = as_of {
                book.row.machine_as_of = as_of;
                self.must_be_read_again(host);
            }
        }
        if changed {
            self.unwritten.hosts.insert(host.clone());
            if !is_starting {
                self.word();
            }
        }
    }

    /// A host that has acknowledged a word and was asked afterwards knows it, or its state directory was put back.
    ///
    /// Another machine that speaks in its place, without a person's word, says nothing of that directory.
    fn note_went_back(&mut self, host: &HostName, instance: &Instance, heard: Stamp, asked: u64) {
        if self.planted(Plant::OldCopyBoots) {
            return;
        }
        let misses = self.planted(Plant::MissesWentBack);
        let Some(book) = self.hosts.get_mut(host) else {
            return;
        };
        let known = &book.row.instance.machine_id;
        let is_another = !known.is_empty() && *known != instance.machine_id && !book.row.fenced;
        let is_older = heard < book.row.heard && asked > book.knew_at && !is_another;
        if is_older && !book.row.went_back && !misses {
            book.row.went_back = true;
            self.unwritten.hosts.insert(host.clone());
        }
    }

    /// Notes what a host knows of the controller's words, as it said at `asked` or later.
    pub(crate) fn note_known(&mut self, host: &HostName, knows: SiteHeard, asked: u64) {
        let mine = self.stamp;
        let Some(book) = self.hosts.get_mut(host) else {
            return;
        };
        if asked < book.knew_at {
            return;
        }
        book.knew_at = asked;
        book.knows = knows;
        // What this controller never said proves nothing about its own words.
        let heard = knows.stamp.min(mine);
        if heard > book.row.heard {
            book.row.heard = heard;
            self.unwritten.heard.insert(host.clone());
        }
    }

    /// What a life of a host is, by what is known of the lives before it.
    pub(crate) fn standing_of(&self, host: &HostName, instance: &Instance) -> Standing {
        let Some(book) = self.hosts.get(host) else {
            return Standing::Removed;
        };
        let told = self.other_machine(host).map(|other| other.life());
        let known = told.as_ref().unwrap_or(&book.row.instance);
        // Tables do not tell boots.
        let is_told = told
            .as_ref()
            .is_some_and(|told| told.machine_id == instance.machine_id);
        if self.planted(Plant::OldCopyBoots) {
            return Standing::Known;
        }
        if book.row.went_back {
            return Standing::OldCopy;
        }
        if *known == Instance::default() {
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
            std::cmp::Ordering::Equal if instance == known || is_told => Standing::Known,
            std::cmp::Ordering::Equal => Standing::SecondInstance,
        }
    }

    /// Takes in one record that a host has told.
    pub(crate) fn take_in(
        &mut self,
        host: &HostName,
        record: &RecordSaid,
        asked: u64,
        now: u64,
        news: &mut Vec<News>,
    ) {
        let vm = &record.vm;
        let older = self.said(host, vm).is_some_and(|said| said.asked > asked);
        if older {
            return;
        }
        self.note_said(host, record, asked, now);
        if !self.unreadable.contains(vm) && !self.is_starting() {
            self.take_up(host, record, news);
        }
    }

    /// Learns from a record, and marks what changed by it.
    pub(crate) fn take_up(&mut self, host: &HostName, record: &RecordSaid, news: &mut Vec<News>) {
        let vm = &record.vm;
        let before = self.vms.get(vm).cloned();
        self.learn(host, record, news);
        self.take_handover(vm, news);
        if self.vms.get(vm) != before.as_ref() {
            self.touch(vm);
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
            may_live: record.may_live,
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
        let no_bound = self.planted(Plant::BelievesAnyGeneration);
        self.note_strangers(host, record, news);
        let may_enter = |host: &HostName| {
            let named = self.removed.contains(host) || self.strangers.contains_key(host);
            self.hosts.contains_key(host) || self.is_restored() && named
        };
        let target = record.claim.went().filter(|(_, to)| may_enter(to));
        // It may come to hold the VM by a permission that was forgotten here.
        let receives = matches!(record.claim, Claim::Receiving { .. }) && self.is_restored();
        let entry = self.vms.entry(record.vm.clone()).or_default();
        let is_news = record.highest > entry.highest;
        enter(entry, host, record, receives, no_bound);
        let believed = |entry: &Entry, host: &HostName, generation: Generation| {
            is_itself && (all_is_news || entry.was_granted(host, generation))
        };
        if let Some((generation, to)) = target
            && (is_plausible(entry.highest, generation) || no_bound)
        {
            // Whoever gives a VM was permitted to: in each of its answers an invented gift would name its host anew.
            let may_give = all_is_news || entry.may_ever_give(host);
            // Only the host that gave it can say that it has arrived.
            let gave = all_is_news || entry.was_given_by(host, generation);
            if may_give && (is_news || matches!(record.claim, Claim::Gave { .. })) {
                self.name_holder(&record.vm, to, generation);
            }
            let entry = self.vms.entry(record.vm.clone()).or_default();
            let arrived = matches!(record.claim, Claim::Moved { .. });
            if arrived && gave && generation > entry.held && believed(entry, to, generation) {
                entry.held = generation;
                entry.holder = Some(to.clone());
                // What this book granted itself it knows, whoever tells.
                entry.hearsay = !entry.was_granted(to, generation);
            }
        }
        let entry = self.vms.entry(record.vm.clone()).or_default();
        if let Some(generation) = record.claim.held()
            && (is_plausible(entry.highest, generation) || no_bound)
            && (generation > entry.held || generation == entry.held && entry.holder.is_none())
            && believed(entry, host, generation)
        {
            let moved = entry.holder.as_ref() != Some(host);
            entry.held = generation;
            entry.holder = Some(host.clone());
            // What this book granted itself it knows, whoever is polled first.
            entry.hearsay = !entry.was_granted(host, generation);
            entry.deleted = false;
            if moved {
                let (vm, host) = (record.vm.clone(), host.clone());
                news.push(News::Held { vm, host });
            }
        }
        let entry = self.vms.entry(record.vm.clone()).or_default();
        if let Some(generation) = record.claim.held()
            && is_itself
            && (generation, Some(host)) == (entry.held, entry.holder.as_ref())
            // Who is its holder by hearsay alone may have made that up.
            && entry.was_granted(host, generation)
        {
            entry.hear_images(&record.images, generation);
        }
    }

    /// A migration that was permitted before the database was put back, and ended after this controller took over, has no grant here. What its two ends say
    /// alike is believed: the holder, that it gave the VM, and the host that it names, that it holds it under that generation or a later one.
    /// One of them alone may have made it up.
    fn take_handover(&mut self, vm: &VmName, news: &mut Vec<News>) {
        let Some((generation, from, to)) = self.handover(vm) else {
            return;
        };
        self.name_holder(vm, &to, generation);
        let entry = self.vms.entry(vm.clone()).or_default();
        entry.highest = entry.highest.max(generation);
        entry.held = generation;
        entry.holder = Some(to.clone());
        entry.hearsay = true;
        entry.note_grant(Granted {
            generation,
            to: to.clone(),
            from: Some(from),
        });
        news.push(News::Held {
            vm: vm.clone(),
            host: to,
        });
    }

    fn handover(&self, vm: &VmName) -> Option<(Generation, HostName, HostName)> {
        let entry = self.vms.get(vm).filter(|entry| !entry.deleted)?;
        let from = entry.holder.as_ref()?;
        let (generation, to) = self.said(from, vm)?.claim.went()?;
        // A person's word may have let it run on there under a later one.
        let held = self.said(to, vm)?.claim.held();
        let holds = held.is_some_and(|held| held >= generation);
        let are_themselves = [from, to]
            .into_iter()
            .all(|host| self.standing(host) == Standing::Known);
        let is_later = generation > entry.held && is_plausible(entry.highest, generation);
        (holds && are_themselves && is_later && from != to)
            .then(|| (generation, from.clone(), to.clone()))
    }

    /// A host that a record names and nobody knows here: after a restored database it may hold the VM.
    fn note_strangers(&mut self, by: &HostName, record: &RecordSaid, news: &mut Vec<News>) {
        let Some(other) = record.claim.other() else {
            return;
        };
        let known = self.hosts.contains_key(other) || self.removed.contains(other);
        if known || !self.note_stranger(by, other) {
            return;
        }
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

/// Raises an entry by what a record tells, and takes its host into the set. No claim is above what the next survey asks
/// at: its host's no would never bind.
fn enter(entry: &mut Entry, host: &HostName, record: &RecordSaid, receives: bool, no_bound: bool) {
    let before = entry.highest;
    for told in record.generations() {
        if is_plausible(before, told) || no_bound {
            entry.highest = entry.highest.max(told);
        }
    }
    if let Some(held) = record.claim.held() {
        // Whoever holds it by that grant after all, as an old copy of its host's disk, may have run it.
        entry
            .not_begun
            .take_if(|not_begun| not_begun.generation <= held);
    }
    if record.claim.may_hold() || receives {
        let told = record.claim.held().unwrap_or(record.highest);
        let is_bounded = is_plausible(entry.highest, told) || no_bound;
        let told = if is_bounded { told } else { entry.highest };
        let named = entry.may_hold.entry(host.clone()).or_default();
        *named = (*named).max(told);
    }
}
