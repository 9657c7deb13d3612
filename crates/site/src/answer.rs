//! The controller's answer to a host that asks before it boots.
//!
//! Part of [`Book`]. Refuses: to speak for the site while its database is an old copy, and to know a life of a host while
//! another one answers.

use crate::book::{Book, Entry};
use crate::hear::News;
use crate::plant::Plant;
use godwit_types::site::{SiteAnswer, SiteQuestion, Standing};
use godwit_types::{Generation, HostName, VmName};
use std::collections::BTreeSet;

impl Book {
    /// Answers a host's question. `other_answers` says whether the life that was known until now answers at this moment.
    /// What it changes is written before the answer is given.
    pub fn answer(
        &mut self,
        asker: &HostName,
        question: &SiteQuestion,
        other_answers: bool,
    ) -> SiteAnswer {
        let mut news = Vec::new();
        self.note_word(asker, question.knows.stamp, &mut news);
        let is_unknown = self.note_unknown(asker, &mut news);
        if !self.is_second(asker, question, other_answers) {
            self.meet(asker, &question.instance, &mut news);
        }
        let standing = self.standing_for(asker, question, other_answers);
        let given_on = match standing {
            Standing::Known => self.given_on(asker, question),
            _ => BTreeSet::new(),
        };
        self.unsaid.extend(news);
        let in_charge = self.is_in_charge() || self.planted(Plant::RestoredGoesOn);
        let is_overtaken = self.is_overtaken(asker, question);
        // Nobody polls a host that is not enrolled: what it boots would not be seen.
        let in_charge = in_charge && !is_unknown && !is_overtaken;
        let asked_again = question.wishes.iter().filter(|_| is_overtaken);
        let wishes = question.wishes.iter();
        let rows_of = wishes.filter_map(|wish| {
            let entry = self.vms.get(&wish.vm)?;
            Some((wish.vm.clone(), entry.row()))
        });
        SiteAnswer {
            from: None,
            standing,
            in_charge,
            stamp: self.stamp,
            vms: rows_of.collect(),
            records: Vec::new(),
            unread: asked_again.map(|wish| wish.vm.clone()).collect(),
            off: self.fenced(),
            given_on,
            replaced: false,
        }
    }

    /// A host with a good certificate that this database lacks was enrolled after it was copied: whoever takes over waits
    /// for it. If a person said that it is off, it is so no more. True for such a host.
    fn note_unknown(&mut self, asker: &HostName, news: &mut Vec<News>) -> bool {
        if self.hosts.contains_key(asker) || self.removed.contains(asker) {
            return false;
        }
        self.note_stranger(asker, asker);
        if self.fenced_strangers.remove(asker) {
            self.unwritten.strangers = true;
            news.push(News::FencedAnswered {
                host: asker.clone(),
                was_never_off: false,
            });
        }
        true
    }

    /// Whether the host has acknowledged a later word than its question knows: the question comes late, or the host's disk
    /// went back, which a poll tells. It asks again.
    fn is_overtaken(&self, asker: &HostName, question: &SiteQuestion) -> bool {
        let known = self.hosts.get(asker);
        let is_older = known.is_some_and(|host| question.knows.stamp < host.row.heard);
        is_older && !self.planted(Plant::OldCopyBoots) && !self.planted(Plant::MissesWentBack)
    }

    /// Whether the life that asks is a new one of a host whose known life is to be asked first whether it still answers.
    pub fn is_new_life(&self, asker: &HostName, question: &SiteQuestion) -> bool {
        let known = self.hosts.get(asker);
        known.is_some_and(|host| host.row.instance != question.instance)
    }

    fn standing_for(
        &self,
        asker: &HostName,
        question: &SiteQuestion,
        other_answers: bool,
    ) -> Standing {
        if !self.hosts.contains_key(asker) && !self.removed.contains(asker) {
            // It has a good certificate, so this database is older than its enrolment: nothing is known of its lives.
            return Standing::Known;
        }
        match self.standing_of(asker, &question.instance) {
            Standing::Known if self.is_second(asker, question, other_answers) => {
                Standing::SecondInstance
            }
            standing => standing,
        }
    }

    fn is_second(&self, asker: &HostName, question: &SiteQuestion, other_answers: bool) -> bool {
        let is_new = other_answers && self.is_new_life(asker, question);
        is_new && !self.planted(Plant::OldCopyBoots)
    }

    /// VMs that this book granted to another host after the asker's record of them, which holds them and answers; or that
    /// were deleted here.
    fn given_on(&self, asker: &HostName, question: &SiteQuestion) -> BTreeSet<VmName> {
        if !self.is_in_charge() {
            return BTreeSet::new();
        }
        let wishes = question.wishes.iter();
        let given = wishes.filter(|wish| {
            let Some(entry) = self.vms.get(&wish.vm) else {
                return false;
            };
            self.is_gone_past(&wish.vm, entry, asker, wish.generation)
        });
        given.map(|wish| wish.vm.clone()).collect()
    }

    /// Whether a host's record is one that nobody needs any more: this book let another host hold the VM later, which says
    /// now that it does, or deleted it.
    pub(crate) fn is_gone_past(
        &self,
        vm: &VmName,
        entry: &Entry,
        host: &HostName,
        at: Generation,
    ) -> bool {
        let holds = |host: &HostName| {
            let said = self.said(host, vm).and_then(|said| said.claim.held());
            self.answers(host) && said.is_some_and(|held| held >= entry.held)
        };
        let is_safe = entry.deleted || entry.holder.as_ref().is_some_and(holds);
        is_safe && entry.is_superseded(host, at)
    }

    pub(crate) fn is_heard_itself(&self, host: &HostName) -> bool {
        self.answers(host) && self.standing(host) == Standing::Known
    }
}
