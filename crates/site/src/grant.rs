//! Surveys and grants: who may begin to hold a VM.
//!
//! Part of [`Book`]. A grant needs a [`Free`], which only a survey of every host that may hold the VM gives, and which is
//! used up by it. Refuses: to count silence, an old copy's word or an older survey's no.
//!
//! The answers of a survey were not given at one instant. That every host that holds nothing answered at the same level
//! makes them one picture: such a host can since have taken only a generation above the level, and for that its giver
//! would have had to answer with one, too.

use crate::book::{Book, FENCED_GAP, Granted, Row};
use crate::plant::Plant;
use crate::refusal::Refusal;
use godwit_types::site::{Claim, RecordSaid, Standing, SurveyAnswer};
use godwit_types::{Generation, HostName, VmName};
use std::collections::{BTreeMap, BTreeSet};

/// A survey that has begun: ask each host at this level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survey {
    /// The VM.
    pub vm: VmName,
    /// The level.
    pub level: Generation,
    /// Whom to ask.
    pub hosts: BTreeSet<HostName>,
    /// The epoch in which it began.
    epoch: u64,
    /// When it began.
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
        /// The host.
        host: HostName,
        /// Under this generation.
        generation: Generation,
        /// Whether the guest should run.
        on: bool,
    },
    /// Neither is known.
    Refused(Refusal),
}

/// A right to begin, for one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The VM.
    pub vm: VmName,
    /// The host.
    pub on: HostName,
    /// The generation granted.
    pub generation: Generation,
    /// The level of the survey that it follows.
    pub expect: Generation,
}

/// The permission of a migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permission {
    /// The VM.
    pub vm: VmName,
    /// Attempts to hand over begin at this generation.
    pub generation: Generation,
}

impl Book {
    /// Begins a survey of the hosts that may hold a VM and of `also`. Its rows are written before any host is asked.
    pub fn begin_survey(
        &mut self,
        vm: &VmName,
        also: &[HostName],
    ) -> Result<(Survey, Vec<Row>), Refusal> {
        let mut hosts = self.may_hold(vm);
        hosts.extend(also.iter().cloned());
        self.survey_of(vm, hosts)
    }

    /// Begins a survey of these hosts alone, so that those that hold nothing leave the set.
    pub fn survey_of(
        &mut self,
        vm: &VmName,
        hosts: BTreeSet<HostName>,
    ) -> Result<(Survey, Vec<Row>), Refusal> {
        self.must_be_in_charge()?;
        let next = self.highest(vm).next();
        let level = next.ok_or_else(|| Refusal::Exhausted { vm: vm.clone() })?;
        self.vms.entry(vm.clone()).or_default().highest = level;
        let rows = self.touch(vm);
        // Fenced ones, too: one that answers is not off any more, and its word counts.
        let hosts = hosts
            .into_iter()
            .filter(|host| self.hosts.contains_key(host))
            .collect();
        let survey = Survey {
            vm: vm.clone(),
            level,
            hosts,
            epoch: self.stamp.epoch,
            asked: self.next(),
        };
        Ok((survey, rows))
    }

    /// Takes in the answers to a survey: hosts that hold nothing leave the set. Says what it means for a grant.
    pub fn take_survey(
        &mut self,
        survey: &Survey,
        answers: &BTreeMap<HostName, SurveyAnswer>,
    ) -> (Surveyed, Vec<Row>) {
        let mut rows = Vec::new();
        let now = self.next();
        for (host, answer) in answers {
            let record = RecordSaid {
                vm: survey.vm.clone(),
                highest: answer.highest,
                claim: answer.claim.clone(),
            };
            rows.extend(self.take_in(host, &record, survey.asked, now, &mut Vec::new()));
        }
        let verdict = self.verdict(survey, answers);
        rows.extend(self.let_out(survey, answers));
        (verdict, rows)
    }

    /// Takes the hosts that said a binding no out of the set.
    fn let_out(&mut self, survey: &Survey, answers: &BTreeMap<HostName, SurveyAnswer>) -> Vec<Row> {
        let old_counts = self.planted(Plant::OldNoCounts);
        let said_no = |host: &HostName, named: Generation| {
            let answer = answers.get(host)?;
            let no = matches!(answer.claim, Claim::No | Claim::Moved { .. });
            let binds = answer.highest >= survey.level && named <= survey.level;
            (no && (binds || old_counts)).then_some(())
        };
        let Some(entry) = self.vms.get(&survey.vm) else {
            return Vec::new();
        };
        let members = entry.may_hold.iter();
        let out: Vec<HostName> = members
            .filter(|(host, named)| said_no(host, **named).is_some())
            .filter(|(host, _)| self.standing(host) == Standing::Known)
            .map(|(host, _)| host.clone())
            .collect();
        if out.is_empty() {
            return Vec::new();
        }
        if let Some(entry) = self.vms.get_mut(&survey.vm) {
            entry.may_hold.retain(|host, _| !out.contains(host));
        }
        self.touch(&survey.vm)
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
                    Claim::Holds { generation, on } => Surveyed::HeldBy {
                        host: host.clone(),
                        generation: *generation,
                        on: *on,
                    },
                    _ => {
                        let host = host.clone();
                        Surveyed::Refused(Refusal::HandingOver { vm, host })
                    }
                };
            }
            _ => {
                let hosts = holders.into_iter().map(|(host, _)| host.clone()).collect();
                return Surveyed::Refused(Refusal::Twice { vm, hosts });
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

    /// Lets a host begin to hold the VM. The rows are written before the host hears of it.
    pub fn grant(&mut self, free: Free, on: &HostName) -> Result<(Grant, Vec<Row>), Refusal> {
        self.must_be_in_charge()?;
        let vm = free.vm;
        let stale = self.highest(&vm) != free.level || self.stamp.epoch != free.epoch;
        if stale {
            return Err(Refusal::Stale { vm });
        }
        if self.standing(on) != Standing::Known {
            return Err(Refusal::NotItself { host: on.clone() });
        }
        let step = if free.fenced.is_empty() {
            1
        } else {
            FENCED_GAP
        };
        let next = free.level.0.checked_add(step).map(Generation);
        let generation = next.ok_or_else(|| Refusal::Exhausted { vm: vm.clone() })?;
        let entry = self.vms.entry(vm.clone()).or_default();
        entry.highest = generation;
        entry.held = generation;
        entry.holder = Some(on.clone());
        entry.deleted = false;
        entry.may_hold.retain(|host, _| !free.fenced.contains(host));
        entry.may_hold.insert(on.clone(), generation);
        entry.note_grant(Granted {
            generation,
            to: on.clone(),
            from: None,
        });
        let rows = self.touch(&vm);
        let grant = Grant {
            vm,
            on: on.clone(),
            generation,
            expect: free.level,
        };
        Ok((grant, rows))
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

    /// Permits a migration. The rows are written before either host hears of it.
    pub fn permit_migration(
        &mut self,
        vm: &VmName,
        from: &HostName,
        to: &HostName,
    ) -> Result<(Permission, Vec<Row>), Refusal> {
        self.must_be_in_charge()?;
        for host in [from, to] {
            if self.standing(host) != Standing::Known {
                return Err(Refusal::NotItself { host: host.clone() });
            }
        }
        if let Some(twice) = self.twice(vm) {
            let hosts = twice.copies.into_iter().map(|copy| copy.host).collect();
            return Err(Refusal::Twice {
                vm: vm.clone(),
                hosts,
            });
        }
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
        let rows = self.touch(vm);
        let permission = Permission {
            vm: vm.clone(),
            generation,
        };
        Ok((permission, rows))
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
    ) -> Vec<Row> {
        if self.planted(Plant::ForgetDestination) {
            return Vec::new();
        }
        let Some(entry) = self.vms.get_mut(vm) else {
            return Vec::new();
        };
        let mut granted = entry.granted.iter().rev();
        let permitted = granted.find(|one| one.to == *to && one.from.as_ref() == Some(from));
        let Some(generation) = permitted.map(|one| one.generation) else {
            return Vec::new();
        };
        match completed {
            true if generation > entry.held => {
                entry.held = generation;
                entry.holder = Some(to.clone());
                let named = entry.may_hold.entry(to.clone()).or_default();
                *named = (*named).max(generation);
            }
            // At the source the VM is held as before.
            false if entry.holder.is_none() => entry.holder = Some(from.clone()),
            _ => return Vec::new(),
        }
        self.touch(vm)
    }

    /// A VM is deleted: only after a survey found it free.
    pub fn delete(&mut self, free: Free) -> Result<Vec<Row>, Refusal> {
        self.must_be_in_charge()?;
        let vm = free.vm;
        if self.highest(&vm) != free.level || self.stamp.epoch != free.epoch {
            return Err(Refusal::Stale { vm });
        }
        let entry = self.vms.entry(vm.clone()).or_default();
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
        entry.deleted = true;
        Ok(self.touch(&vm))
    }

    /// A person says that a host is off. It holds until the host is heard.
    pub fn fence(&mut self, host: &HostName) -> Result<Vec<Row>, Refusal> {
        if let Some(book) = self.hosts.get_mut(host) {
            if book.answers {
                return Err(Refusal::Answers { host: host.clone() });
            }
            book.row.fenced = true;
            book.false_fence = false;
            let row = book.row.clone();
            return Ok(vec![Row::Host(host.clone(), row)]);
        }
        let named = self
            .vms
            .values()
            .any(|entry| entry.may_hold.contains_key(host));
        if named || self.strangers.contains_key(host) {
            self.fenced_strangers.insert(host.clone());
            return Ok(vec![Row::FencedStranger(host.clone())]);
        }
        Err(Refusal::UnknownHost { host: host.clone() })
    }

    /// A host is taken out of the site: one that answers once it holds nothing, one that is silent by a person's word.
    pub fn remove(&mut self, host: &HostName, confirmed: bool) -> Result<Vec<Row>, Refusal> {
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
        self.hosts.remove(host);
        self.removed.insert(host.clone());
        let mut rows = vec![Row::Stamp(self.word())];
        for vm in vms {
            if let Some(entry) = self.vms.get_mut(&vm) {
                entry.may_hold.remove(host);
                entry.highest = Generation(entry.highest.0.saturating_add(FENCED_GAP));
            }
            rows.extend(self.touch(&vm));
        }
        Ok(rows)
    }
}
