//! What a host knows of the site, and whether it may boot what no request asked it to boot.
//!
//! Owned by the host's agent, which keeps the table in its state directory and feeds every answer. Refuses: words of a
//! controller below the highest that it has heard, and to take its own record for the newest there is: it may stand on a
//! disk that was put back.

use crate::plant::Plant;
use godwit_types::site::{
    BootWish, Claim, Instance, RecordSaid, SiteAnswer, SiteHeard, SiteHost, SiteQuestion,
    SiteTable, SiteUpdate, SiteVm, Stamp, Standing,
};
use godwit_types::{Generation, HostName, VmName};
use std::collections::{BTreeMap, BTreeSet};

/// How long a host that never had a neighbour asks its controller before it boots alone, seconds.
pub const LONE_HOST_WAITS_S: u64 = 30;

/// Who answered.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Answerer {
    /// A controller.
    Controller,
    /// A host.
    Host(HostName),
}

/// A controller's word is below one that was heard already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the command has stamp {said}, this host has heard {heard}: it comes from a controller with an old copy of its database, or from one that was replaced; stop that one"
)]
pub struct Stale {
    /// The command's stamp.
    pub said: Stamp,
    /// The highest one heard.
    pub heard: Stamp,
}

/// Whether a VM may be booted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judged {
    /// It may.
    Boot,
    /// Not yet; why, as one sentence.
    Wait(String),
    /// This host's record is not the newest, or this host is not the one that it was: it does not boot. Why.
    Never(String),
    /// A controller that is in charge knows that another host holds the VM: this record gives way. Why.
    Yield(String),
}

/// What an agent knows of the site.
#[derive(Debug, Clone)]
pub struct HostSite {
    me: HostName,
    instance: Instance,
    table: SiteTable,
    standing: Standing,
    answers: BTreeMap<Answerer, SiteAnswer>,
    wishes: BTreeMap<VmName, Generation>,
    alone: bool,
    /// A planted fault; only in builds that can plant one.
    pub plant: Option<Plant>,
}

impl HostSite {
    /// What a host knows at its agent's start, from its table.
    pub fn new(me: HostName, instance: Instance, table: SiteTable) -> Self {
        Self {
            me,
            instance,
            table,
            standing: Standing::Known,
            answers: BTreeMap::new(),
            wishes: BTreeMap::new(),
            alone: false,
            plant: None,
        }
    }

    fn planted(&self, plant: Plant) -> bool {
        crate::plant::is(self.plant, plant)
    }

    /// The table, to be kept.
    pub fn table(&self) -> &SiteTable {
        &self.table
    }

    /// This host's life.
    pub fn instance(&self) -> &Instance {
        &self.instance
    }

    /// What others hold of this life, as far as they said.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// What this host has heard of the controller's words.
    pub fn heard(&self) -> SiteHeard {
        SiteHeard {
            stamp: self.table.stamp,
            complete: self.table.complete,
        }
    }

    /// Takes a command's stamp; true when the table is to be written before the command is carried out.
    pub fn accept(&mut self, said: Stamp) -> Result<bool, Stale> {
        let heard = self.table.stamp;
        if said < heard && !self.planted(Plant::OldWordAccepted) {
            return Err(Stale { said, heard });
        }
        self.table.stamp = heard.max(said);
        Ok(said > heard)
    }

    /// Notes that this host was granted a VM: known here even if no update of the table follows.
    pub fn granted(&mut self, vm: &VmName, generation: Generation) {
        let row = SiteVm {
            holder: Some(self.me.clone()),
            held: generation,
            may_hold: BTreeSet::from([self.me.clone()]),
            deleted: false,
            stamp: self.table.stamp,
        };
        self.table.vms.insert(vm.clone(), row);
    }

    /// Takes an update of the table. One that does not begin where the table ends changes only what is heard of words.
    pub fn update(&mut self, update: SiteUpdate) -> Result<(), Stale> {
        self.accept(update.stamp)?;
        self.standing = update.you;
        if update.since > self.table.complete {
            return Ok(());
        }
        let others = update.hosts.iter().any(|host| host.name != self.me);
        self.table.had_second |= others;
        self.table.hosts = update.hosts;
        self.table.removed = update.removed;
        self.table.vms.extend(update.vms);
        self.table.complete = self.table.complete.max(update.stamp);
        Ok(())
    }

    /// A VM that this host holds has no guest, and no request will start it.
    pub fn wish(&mut self, vm: VmName, generation: Generation) {
        self.wishes.insert(vm, generation);
    }

    /// A VM was started, stopped or moved: nothing is asked about it any more.
    pub fn no_wish(&mut self, vm: &VmName) {
        self.wishes.remove(vm);
    }

    /// What to ask, once for all VMs; none while nothing waits.
    pub fn question(&self) -> Option<SiteQuestion> {
        if self.wishes.is_empty() {
            return None;
        }
        let wishes = self.wishes.iter();
        Some(SiteQuestion {
            instance: self.instance.clone(),
            wishes: wishes
                .map(|(vm, generation)| BootWish {
                    vm: vm.clone(),
                    generation: *generation,
                })
                .collect(),
        })
    }

    /// The hosts to ask, beside the controller.
    pub fn neighbours(&self) -> impl Iterator<Item = &SiteHost> {
        let hosts = self.table.hosts.iter();
        hosts.filter(|host| host.name != self.me && !self.table.removed.contains(&host.name))
    }

    /// Takes an answer to the question.
    pub fn hear(&mut self, answer: SiteAnswer) {
        if answer.standing != Standing::Known {
            self.standing = answer.standing;
        } else if answer.from.is_none() && answer.in_charge {
            self.standing = Standing::Known;
        }
        let from = match &answer.from {
            Some(host) => Answerer::Host(host.clone()),
            None => Answerer::Controller,
        };
        self.answers.insert(from, answer);
    }

    /// Forgets what was answered: before the question is asked anew.
    pub fn forget_answers(&mut self) {
        self.answers.clear();
    }

    /// A person lets this host boot what it holds, for this life of it.
    pub fn boot_alone(&mut self) {
        self.alone = true;
    }

    /// Whether a person has let this host boot alone.
    pub fn is_alone(&self) -> bool {
        self.alone
    }

    /// Whether `boot = "alone"` of the host's configuration counts: only while no second host was ever known.
    pub fn may_be_configured_alone(&self) -> bool {
        !self.table.had_second
    }

    /// Whether a VM may be booted now, `waited_s` seconds after the question was first asked.
    pub fn judge(&self, vm: &VmName, waited_s: u64, configured_alone: bool) -> Judged {
        let Some(mine) = self.wishes.get(vm).copied() else {
            return Judged::Wait("nothing was asked about it yet".into());
        };
        if self.planted(Plant::BootWithoutAsking) {
            return Judged::Boot;
        }
        if let Some(why) = self.not_itself() {
            return Judged::Never(why);
        }
        if let Some(judged) = self.against(vm, mine) {
            return judged;
        }
        let lone = !self.table.had_second;
        if self.alone || lone && (configured_alone || waited_s >= LONE_HOST_WAITS_S) {
            return Judged::Boot;
        }
        let enough = self
            .answers
            .values()
            .any(|answer| self.is_enough(vm, answer) && self.rivals_answered(vm, answer));
        if enough || self.all_answered() {
            return Judged::Boot;
        }
        Judged::Wait(self.waits_for())
    }

    fn not_itself(&self) -> Option<String> {
        if self.planted(Plant::OldCopyBoots) {
            return None;
        }
        let (what, first) = match self.standing {
            Standing::Known => return None,
            Standing::Removed => ("this host was removed from its site", String::new()),
            Standing::SecondInstance => (
                "another machine has this host's certificate and answers",
                self.removal(),
            ),
            Standing::OldCopy => (
                "this host's state directory is an older copy of itself",
                self.removal(),
            ),
        };
        Some(format!(
            "{what}: it boots nothing; to use it again, {first}let it join anew with an empty state directory"
        ))
    }

    /// What comes before joining anew: a host that answers and may hold VMs is not removed.
    fn removal(&self) -> String {
        format!(
            "power it off, run 'godwit host remove {} --confirm-unreachable' and ",
            self.me
        )
    }

    /// Somebody knows of a later holder, or of a later life of this one.
    fn against(&self, vm: &VmName, mine: Generation) -> Option<Judged> {
        let told = self
            .answers
            .values()
            .filter_map(|answer| Some((answer, answer.vms.get(vm)?)));
        for (answer, row) in told {
            let Some(why) = self.row_against(vm, mine, row) else {
                continue;
            };
            let authority = answer.from.is_none() && answer.in_charge;
            // Its own later generation is nobody else's: this record may be the last that there is.
            let is_mine = !row.deleted && row.held > mine && row.holder.as_ref() == Some(&self.me);
            return Some(match authority && !is_mine {
                true => Judged::Yield(why),
                false => Judged::Never(why),
            });
        }
        let own = self.table.vms.get(vm);
        if let Some(why) = own.and_then(|row| self.row_against(vm, mine, row)) {
            return Some(Judged::Never(why));
        }
        let records = self.answers.iter().filter_map(|(from, answer)| match from {
            Answerer::Host(host) => Some((host, answer.records.iter())),
            Answerer::Controller => None,
        });
        for (host, records) in records {
            for record in records.filter(|record| record.vm == *vm) {
                if let Some(why) = self.record_against(mine, host, record) {
                    return Some(Judged::Never(why));
                }
            }
        }
        None
    }

    fn row_against(&self, vm: &VmName, mine: Generation, row: &SiteVm) -> Option<String> {
        let own = self
            .table
            .vms
            .get(vm)
            .map(|row| row.stamp)
            .unwrap_or_default();
        if row.stamp < own {
            return None;
        }
        if row.deleted {
            return Some("the VM was deleted".into());
        }
        match &row.holder {
            Some(holder) if *holder != self.me && row.held > mine => Some(format!(
                "host {holder} holds it under generation {}, this host's record is older",
                row.held
            )),
            Some(_) if row.held > mine => Some(format!(
                "this host held it under generation {} since, its record of generation {mine} is an older copy",
                row.held
            )),
            _ if row.held >= mine && !row.may_hold.contains(&self.me) => {
                Some("this host has said since that it does not hold it".into())
            }
            _ => None,
        }
    }

    fn record_against(
        &self,
        mine: Generation,
        host: &HostName,
        record: &RecordSaid,
    ) -> Option<String> {
        match &record.claim {
            Claim::Holds { generation, .. } if *generation > mine => Some(format!(
                "host {host} holds it under generation {generation}"
            )),
            Claim::Gave { generation, to } | Claim::Moved { generation, to }
                if *generation > mine && *to != self.me =>
            {
                Some(format!(
                    "host {host} gave it to host {to} under generation {generation}"
                ))
            }
            Claim::Gave { generation, .. } | Claim::Moved { generation, .. }
                if *generation > mine =>
            {
                Some(format!(
                    "host {host} gave it to this host under generation {generation}: the record here is an older copy"
                ))
            }
            _ => None,
        }
    }

    /// A controller in charge knows all; a host knows enough when its row of the VM is at least as new as this host's.
    fn is_enough(&self, vm: &VmName, answer: &SiteAnswer) -> bool {
        if answer.from.is_none() {
            return answer.in_charge;
        }
        let stamp_of = |row: Option<&SiteVm>| row.map(|row| row.stamp).unwrap_or_default();
        let theirs = stamp_of(answer.vms.get(vm));
        let own = stamp_of(self.table.vms.get(vm));
        theirs >= own || self.planted(Plant::OldAnswerBoots)
    }

    /// A row that names other hosts was written before a handover whose outcome only they know: each has to answer
    /// itself. A record that is not an old copy would know it, too; this host cannot tell.
    fn rivals_answered(&self, vm: &VmName, answer: &SiteAnswer) -> bool {
        let Some(row) = answer.vms.get(vm) else {
            return true;
        };
        let others = row.may_hold.iter().filter(|host| **host != self.me);
        let mut enrolled = others.filter(|host| !self.table.removed.contains(*host));
        enrolled.all(|host| self.answers.contains_key(&Answerer::Host(host.clone())))
    }

    fn all_answered(&self) -> bool {
        let mut others = self.neighbours().peekable();
        others.peek().is_some()
            && others.all(|host| {
                self.answers
                    .contains_key(&Answerer::Host(host.name.clone()))
            })
    }

    fn waits_for(&self) -> String {
        let missing: Vec<&str> = self
            .neighbours()
            .filter(|host| {
                !self
                    .answers
                    .contains_key(&Answerer::Host(host.name.clone()))
            })
            .map(|host| host.name.as_str())
            .collect();
        let whom = match missing[..] {
            [] => "the controller".to_owned(),
            _ => format!("the controller or host {}", missing.join(", ")),
        };
        format!(
            "this host asks {whom} whether the VM went elsewhere before it boots it; if nobody will answer and no other host runs it, run 'godwit host boot-alone' here"
        )
    }

    /// Answers another host's question, from the table and from this host's records, also while this host waits itself.
    pub fn answer(
        &self,
        asker: &HostName,
        question: &SiteQuestion,
        records: Vec<RecordSaid>,
    ) -> SiteAnswer {
        let asked: BTreeSet<&VmName> = question.wishes.iter().map(|wish| &wish.vm).collect();
        let rows = self.table.vms.iter().filter(|(vm, _)| asked.contains(vm));
        SiteAnswer {
            from: Some(self.me.clone()),
            standing: self.standing_of(asker, &question.instance),
            in_charge: false,
            stamp: self.table.stamp,
            vms: rows.map(|(vm, row)| (vm.clone(), row.clone())).collect(),
            records: records
                .into_iter()
                .filter(|record| asked.contains(&record.vm))
                .collect(),
        }
    }

    fn standing_of(&self, asker: &HostName, instance: &Instance) -> Standing {
        if self.table.removed.contains(asker) {
            return Standing::Removed;
        }
        let known = self.table.hosts.iter().find(|host| host.name == *asker);
        match known {
            Some(host) if instance.counter < host.counter => Standing::OldCopy,
            _ => Standing::Known,
        }
    }
}
