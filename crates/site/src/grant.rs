//! Surveys and grants: who may begin to hold a VM.
//!
//! Part of [`Book`]. A grant needs a [`Free`], which only a survey of every host that may hold the VM gives, and which is
//! used up by it. Refuses: to count silence, an old copy's word or an older survey's no.
//!
//! The answers of a survey were not given at one instant. That every host that holds nothing answered at the same level
//! makes them one picture: such a host can since have taken only a generation above the level, and for that its giver
//! would have had to answer with one, too.

use crate::book::{Book, FENCED_GAP, Granted, NotBegun, Ran};
use crate::plant::Plant;
use crate::refusal::Refusal;
use godwit_types::site::{Claim, RecordSaid, Standing, SurveyAnswer};
use godwit_types::{Generation, HostName, VmName};
use std::collections::{BTreeMap, BTreeSet};

mod leave;

pub use leave::Deletion;

/// A survey that has begun: ask each host at this level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survey {
    pub vm: VmName,
    pub level: Generation,
    pub hosts: BTreeSet<HostName>,
    /// The epoch in which it began.
    epoch: u64,
    asked: u64,
}

/// That nobody may hold the VM: the ground of one grant.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "it is used up by a grant"]
pub struct Free {
    vm: VmName,
    level: Generation,
    epoch: u64,
    fenced: BTreeSet<HostName>,
}

/// What a survey came to.
#[derive(Debug, PartialEq, Eq)]
pub enum Surveyed {
    /// Nobody may hold the VM.
    Free(Free),
    /// Just this host holds it; every other one said no, or is fenced.
    HeldBy {
        host: HostName,
        generation: Generation,
        /// Whether the guest should run.
        on: bool,
    },
    /// Just this host holds it, under an older generation than another host that is off: without a guest. It is to let it
    /// go, then the VM is granted anew.
    OlderCopy {
        host: HostName,
        /// Whether its guest should run: then it is turned off first.
        on: bool,
    },
    Refused(Refusal),
}

/// A right to begin, for one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    pub vm: VmName,
    pub on: HostName,
    pub generation: Generation,
    /// The level of the survey that it follows.
    pub expect: Generation,
    /// Where the guest may have run before it.
    pub before: Ran,
}

/// The permission of a migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permission {
    pub vm: VmName,
    /// Attempts to hand over begin at this generation.
    pub generation: Generation,
}

impl Book {
    /// Begins a survey of the hosts that may hold a VM and of `also`. Its level is written before any host is asked.
    pub fn begin_survey(&mut self, vm: &VmName, also: &[HostName]) -> Result<Survey, Refusal> {
        let mut hosts = self.may_hold(vm);
        hosts.extend(also.iter().cloned());
        self.survey_of(vm, hosts)
    }

    /// Begins a survey of these hosts alone, so that those that hold nothing leave the set.
    pub fn survey_of(&mut self, vm: &VmName, hosts: BTreeSet<HostName>) -> Result<Survey, Refusal> {
        self.must_be_in_charge()?;
        let next = self.highest(vm).next();
        let level = next.ok_or_else(|| Refusal::Exhausted { vm: vm.clone() })?;
        self.vms.entry(vm.clone()).or_default().highest = level;
        self.touch(vm);
        // Fenced ones, too: one that answers is not off any more, and its word counts.
        let hosts = hosts
            .into_iter()
            .filter(|host| self.hosts.contains_key(host))
            .collect();
        Ok(Survey {
            vm: vm.clone(),
            level,
            hosts,
            epoch: self.stamp.epoch,
            asked: self.next(),
        })
    }

    /// Takes in the answers to a survey: hosts that hold nothing leave the set. Says what it means for a grant.
    pub fn take_survey(
        &mut self,
        survey: &Survey,
        answers: &BTreeMap<HostName, SurveyAnswer>,
    ) -> Surveyed {
        let now = self.next();
        let mut news = Vec::new();
        for (host, answer) in answers {
            let record = RecordSaid {
                vm: survey.vm.clone(),
                highest: answer.highest,
                claim: answer.claim.clone(),
                may_live: answer.may_live,
                images: answer.images.clone(),
            };
            let (life, heard) = (&answer.instance, answer.knows.stamp);
            self.meet_asked(host, life, heard, survey.asked, &mut news);
            self.take_in(host, &record, survey.asked, now, &mut news);
        }
        self.unsaid.extend(news);
        let verdict = self.verdict(survey, answers);
        self.let_out(survey, answers);
        verdict
    }

    /// Takes the hosts that said a binding no out of the set.
    fn let_out(&mut self, survey: &Survey, answers: &BTreeMap<HostName, SurveyAnswer>) {
        let old_counts = self.planted(Plant::OldNoCounts);
        let said_no = |host: &HostName, named: Generation| {
            let answer = answers.get(host)?;
            let no = matches!(answer.claim, Claim::No | Claim::Moved { .. });
            let binds = answer.highest >= survey.level && named <= survey.level;
            (no && (binds || old_counts)).then_some(())
        };
        let Some(entry) = self.vms.get(&survey.vm) else {
            return;
        };
        let members = entry.may_hold.iter();
        let out: Vec<HostName> = members
            .filter(|(host, named)| said_no(host, **named).is_some())
            .filter(|(host, _)| self.standing(host) == Standing::Known)
            .map(|(host, _)| host.clone())
            .collect();
        if out.is_empty() {
            return;
        }
        if let Some(entry) = self.vms.get_mut(&survey.vm) {
            entry.may_hold.retain(|host, _| !out.contains(host));
        }
        self.touch(&survey.vm);
    }

    fn verdict(&self, survey: &Survey, answers: &BTreeMap<HostName, SurveyAnswer>) -> Surveyed {
        let vm = survey.vm.clone();
        let members = self.may_hold(&survey.vm);
        let asked = || members.iter().chain(&survey.hosts);
        if let Some(refusal) = self.nobody_to_ask(&survey.vm, asked()) {
            return Surveyed::Refused(refusal);
        }
        let silent: BTreeSet<&HostName> = asked()
            .filter(|host| !answers.contains_key(*host) && !self.is_fenced(host))
            .collect();
        if !silent.is_empty() && !self.planted(Plant::SilenceIsNo) {
            let hosts = silent.into_iter().cloned().collect();
            return Surveyed::Refused(Refusal::Silent { vm, hosts });
        }
        let claiming = answers.iter().filter(|(_, answer)| answer.claim.may_hold());
        let holders: Vec<_> = claiming.collect();
        match holders[..] {
            [] => {}
            [(host, answer)] => {
                return match &answer.claim {
                    Claim::Holds { generation, on } if self.is_older(&vm, *generation, answers) => {
                        self.older_copy(vm, host, *on, answer.may_live)
                    }
                    Claim::Holds { generation, on } => Surveyed::HeldBy {
                        host: host.clone(),
                        generation: *generation,
                        on: *on,
                    },
                    _ => Surveyed::Refused(self.gift_refused(&vm, host).unwrap_or_else(|| {
                        let hosts = vec![host.clone()];
                        Refusal::HandingOver { vm, hosts }
                    })),
                };
            }
            _ => {
                if let Some(older) = self.one_to_let_go(&vm, &holders) {
                    return older;
                }
                let held = holders.iter().filter(|(_, one)| one.claim.held().is_some());
                let is_twice = held.count() > 1;
                let hosts: Vec<_> = holders.into_iter().map(|(host, _)| host.clone()).collect();
                // One that gave it, or waits to take it, holds no second copy.
                if is_twice {
                    return Surveyed::Refused(Refusal::Twice { vm, hosts });
                }
                let kept = hosts.iter().find_map(|host| self.gift_refused(&vm, host));
                let between = || Refusal::HandingOver { vm, hosts };
                return Surveyed::Refused(kept.unwrap_or_else(between));
            }
        }
        let at_level = answers
            .values()
            .all(|answer| answer.highest == survey.level);
        if !at_level || self.highest(&survey.vm) != survey.level {
            return Surveyed::Refused(Refusal::Stale { vm });
        }
        let fenced = members.into_iter().filter(|host| self.is_fenced(host));
        Surveyed::Free(Free {
            vm,
            level: survey.level,
            epoch: survey.epoch,
            fenced: fenced.collect(),
        })
    }

    /// Whether a host's copy is not the newest that is known: the VM was deleted since, or another host held it later
    /// and is off. One that says itself that it does not hold it has none.
    fn is_older(
        &self,
        vm: &VmName,
        generation: Generation,
        answers: &BTreeMap<HostName, SurveyAnswer>,
    ) -> bool {
        let entry = self.vms.get(vm);
        entry.is_some_and(|entry| {
            let newest = entry.holder.as_ref();
            let elsewhere = entry.deleted
                || newest.is_some_and(|holder| {
                    entry.may_hold.contains_key(holder) && !answers.contains_key(holder)
                });
            entry.held > generation && elsewhere
        })
    }

    fn gift_refused(&self, vm: &VmName, host: &HostName) -> Option<Refusal> {
        self.kept_gift(vm, host).map(Refusal::GiftKept)
    }

    /// Of several records one without a guest, which this book itself went past.
    fn one_to_let_go(
        &self,
        vm: &VmName,
        holders: &[(&HostName, &SurveyAnswer)],
    ) -> Option<Surveyed> {
        let entry = self.vms.get(vm)?;
        holders
            .iter()
            .find_map(|(host, answer)| match answer.claim {
                Claim::Holds { generation, on }
                    if !answer.may_live && entry.is_superseded(host, generation) =>
                {
                    let host = (*host).clone();
                    Some(Surveyed::OlderCopy { host, on })
                }
                _ => None,
            })
    }

    fn older_copy(&self, vm: VmName, host: &HostName, on: bool, may_live: bool) -> Surveyed {
        let host = host.clone();
        if !may_live {
            return Surveyed::OlderCopy { host, on };
        }
        let newest = self.vms.get(&vm).and_then(|entry| entry.holder.clone());
        Surveyed::Refused(Refusal::OlderCopy { vm, host, newest })
    }

    /// Members that cannot be asked, or whose word does not count.
    fn nobody_to_ask<'a>(
        &self,
        vm: &VmName,
        asked: impl Iterator<Item = &'a HostName>,
    ) -> Option<Refusal> {
        for host in asked {
            if self.is_fenced(host) {
                continue;
            }
            match self.standing(host) {
                Standing::Known => {}
                Standing::Removed if self.removed.contains(host) => {}
                Standing::Removed => {
                    let (vm, host) = (vm.clone(), host.clone());
                    return Some(Refusal::Stranger { vm, host });
                }
                Standing::SecondInstance | Standing::OldCopy => {
                    return Some(Refusal::NotItself { host: host.clone() });
                }
            }
        }
        None
    }

    /// Lets a host begin to hold the VM. It is written before the host hears of it.
    pub fn grant(&mut self, free: Free, on: &HostName) -> Result<Grant, Refusal> {
        self.must_be_in_charge()?;
        let vm = free.vm;
        let fresh = self.is_still(&vm, free.level, free.epoch, &free.fenced);
        if !fresh {
            return Err(Refusal::Stale { vm });
        }
        if self.standing(on) != Standing::Known {
            return Err(Refusal::NotItself { host: on.clone() });
        }
        self.must_not_be_off(&vm, on)?;
        let step = if free.fenced.is_empty() {
            1
        } else {
            FENCED_GAP
        };
        let next = free.level.0.checked_add(step).map(Generation);
        let generation = next.ok_or_else(|| Refusal::Exhausted { vm: vm.clone() })?;
        let entry = self.vms.entry(vm.clone()).or_default();
        let before = entry.ran();
        entry.not_begun = None;
        entry.highest = generation;
        entry.held = generation;
        entry.holder = Some(on.clone());
        entry.deleted = false;
        entry.hearsay = false;
        entry.may_hold.retain(|host, _| !free.fenced.contains(host));
        entry.may_hold.insert(on.clone(), generation);
        entry.note_grant(Granted {
            generation,
            to: on.clone(),
            from: None,
        });
        self.touch(&vm);
        Ok(Grant {
            vm,
            on: on.clone(),
            generation,
            expect: free.level,
            before,
        })
    }

    /// The host of a grant refused the start before a guest was let run there, and has let the VM go: where its guest ran is
    /// as before. Nothing follows where the host may hold the VM, or somebody else has since.
    pub fn nothing_began(&mut self, grant: &Grant) {
        let Some(entry) = self.vms.get_mut(&grant.vm) else {
            return;
        };
        let is_newest = entry.held == grant.generation && entry.holder.as_ref() == Some(&grant.on);
        if !is_newest || entry.deleted || entry.may_hold.contains_key(&grant.on) {
            return;
        }
        entry.not_begun = Some(NotBegun {
            generation: grant.generation,
            before: grant.before.clone(),
        });
        self.touch(&grant.vm);
    }

    /// Who counts as off gets no VM before it was heard: surveys would pass it over while it runs the VM.
    fn must_not_be_off(&self, vm: &VmName, host: &HostName) -> Result<(), Refusal> {
        match self.is_fenced(host) {
            true => Err(Refusal::Silent {
                vm: vm.clone(),
                hosts: vec![host.clone()],
            }),
            false => Ok(()),
        }
    }

    /// Whether what a survey found still holds: nothing was granted since, and whoever counted as off still does.
    fn is_still(
        &self,
        vm: &VmName,
        level: Generation,
        epoch: u64,
        off: &BTreeSet<HostName>,
    ) -> bool {
        let same = self.highest(vm) == level && self.stamp.epoch == epoch;
        same && off.iter().all(|host| self.is_fenced(host))
    }

    /// Grants on what was heard last: a fault that the simulator must catch.
    #[cfg(feature = "planted-faults")]
    pub fn free_unasked(&mut self, vm: &VmName) -> Option<Free> {
        self.planted(Plant::GrantWithoutSurvey).then(|| Free {
            vm: vm.clone(),
            level: self.highest(vm),
            epoch: self.stamp.epoch,
            fenced: BTreeSet::new(),
        })
    }

    /// Permits a migration. It is written before either host hears of it.
    pub fn permit_migration(
        &mut self,
        vm: &VmName,
        from: &HostName,
        to: &HostName,
    ) -> Result<Permission, Refusal> {
        self.must_be_in_charge()?;
        for host in [from, to] {
            if self.standing(host) != Standing::Known {
                return Err(Refusal::NotItself { host: host.clone() });
            }
            self.must_not_be_off(vm, host)?;
        }
        if let Some(twice) = self.twice(vm) {
            let hosts = twice.copies.into_iter().map(|copy| copy.host).collect();
            return Err(Refusal::Twice {
                vm: vm.clone(),
                hosts,
            });
        }
        self.must_come_from(vm, from)?;
        let next = self.highest(vm).next();
        let generation = next.ok_or_else(|| Refusal::Exhausted { vm: vm.clone() })?;
        let forgets = self.planted(Plant::ForgetDestination);
        let entry = self.vms.entry(vm.clone()).or_default();
        entry.highest = generation;
        entry.may_hold.insert(from.clone(), generation);
        if !forgets {
            entry.may_hold.insert(to.clone(), generation);
        }
        entry.note_grant(Granted {
            generation,
            to: to.clone(),
            from: Some(from.clone()),
        });
        self.touch(vm);
        Ok(Permission {
            vm: vm.clone(),
            generation,
        })
    }

    /// Whether a host says of itself that it does not hold the VM, or nothing of it at all, or is known to be off.
    fn says_it_left(&self, host: &HostName, vm: &VmName) -> bool {
        let left = match self.said(host, vm) {
            Some(said) => said.claim.held().is_none(),
            None => self.answers(host),
        };
        left || self.is_fenced(host)
    }

    /// Only the holder gives a VM away, or a host that was granted it since: an end of a handover may be heard late. Where
    /// the book knows no holder, or the one that it knows says itself that it holds the VM no more, the hosts alone decide:
    /// a database that was put back forgot a handover that was under way.
    fn must_come_from(&self, vm: &VmName, from: &HostName) -> Result<(), Refusal> {
        let Some(entry) = self.vms.get(vm) else {
            return Ok(());
        };
        let mut later = entry
            .granted
            .iter()
            .filter(|one| one.generation > entry.held);
        match &entry.holder {
            Some(holder)
                if holder != from
                    && !later.any(|one| one.to == *from)
                    && !self.says_it_left(holder, vm) =>
            {
                Err(Refusal::NotHolder {
                    vm: vm.clone(),
                    from: from.clone(),
                    holder: holder.clone(),
                })
            }
            _ => Ok(()),
        }
    }

    /// A migration has ended, with the VM at its destination or at its source: part of the transaction of its report.
    ///
    /// A report may come late: what was granted or permitted since stands.
    pub fn migration_ended(
        &mut self,
        vm: &VmName,
        from: &HostName,
        to: &HostName,
        completed: bool,
    ) {
        if self.planted(Plant::ForgetDestination) {
            return;
        }
        let still_there = self.hosts.contains_key(from);
        let arrives = self.hosts.contains_key(to);
        let Some(entry) = self.vms.get_mut(vm) else {
            return;
        };
        let mut granted = entry.granted.iter().rev();
        let permitted = granted.find(|one| one.to == *to && one.from.as_ref() == Some(from));
        let Some(generation) = permitted.map(|one| one.generation) else {
            return;
        };
        match completed {
            true if generation > entry.held => {
                entry.held = generation;
                entry.hearsay = false;
                // What is on a host that was removed since is gone with it.
                entry.holder = arrives.then(|| to.clone());
                if arrives {
                    let named = entry.may_hold.entry(to.clone()).or_default();
                    *named = (*named).max(generation);
                }
            }
            // At the source the VM is held as before.
            false if entry.holder.is_none() && still_there => entry.holder = Some(from.clone()),
            _ => return,
        }
        self.touch(vm);
    }

    /// A person has a host do something to a VM that its record keeps: it hears so under a word of its own, and an older
    /// copy of its state directory is known as one by that.
    pub fn order(&mut self, vm: &VmName) {
        if self.vms.contains_key(vm) {
            self.touch(vm);
        }
    }
}
