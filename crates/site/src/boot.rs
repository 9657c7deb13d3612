//! What a host knows of the site, and whether it may boot what no request asked it to boot.
//!
//! Owned by the host's agent, which keeps the table in its state directory and feeds every answer. Refuses: words of a
//! controller below the highest that it has heard, and to take its own record for the newest there is: it may stand on a
//! disk that was put back.

mod answering;
mod word;

use crate::plant::Plant;
use godwit_types::site::{
    BootWish, Claim, Instance, RecordSaid, SiteAnswer, SiteHeard, SiteHost, SiteQuestion,
    SiteTable, SiteUpdate, SiteVm, Stamp, Standing,
};
use godwit_types::{Generation, HostName, VmName};
use std::collections::{BTreeMap, BTreeSet};

/// How long a host that never had a neighbour asks its controller before it boots alone, seconds.
pub const LONE_HOST_WAITS_S: u64 = 30;

/// Who answered a host that asked before it boots.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Answerer {
    Controller,
    Host(HostName),
}

/// A controller's word is below one that was heard already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the command has stamp {said}, and this host knows stamp {heard} already: the command comes from a controller with an old copy of its database, or from one that was replaced; stop that controller"
)]
pub struct Stale {
    pub said: Stamp,
    /// The highest one heard.
    pub heard: Stamp,
}

/// Whether a VM may be booted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judged {
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
    /// It is an old copy since its certificate was replaced.
    replaced: bool,
    answers: BTreeMap<Answerer, SiteAnswer>,
    /// The controller has not answered this round of questions, and will not.
    no_controller: bool,
    /// Nobody else will answer this round of questions.
    is_round_over: bool,
    wishes: BTreeMap<VmName, Generation>,
    /// Wishes against which somebody spoke, in whichever round, and why.
    refuted: BTreeMap<VmName, String>,
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
            replaced: false,
            answers: BTreeMap::new(),
            no_controller: false,
            is_round_over: false,
            wishes: BTreeMap::new(),
            refuted: BTreeMap::new(),
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
        (self.standing, self.replaced) = (update.you, false);
        if update.since > self.table.complete {
            return Ok(());
        }
        let others = update.hosts.iter().any(|host| host.name != self.me);
        self.table.had_second |= others;
        self.table.hosts = update.hosts;
        self.table.hosts_at = update.stamp;
        self.table.removed = update.removed;
        self.table.vms.extend(update.vms);
        self.table.complete = self.table.complete.max(update.upto);
        Ok(())
    }

    /// A VM that this host holds has no guest, and no request will start it.
    pub fn wish(&mut self, vm: VmName, generation: Generation) {
        if self.wishes.get(&vm) != Some(&generation) {
            self.refuted.remove(&vm);
        }
        self.wishes.insert(vm, generation);
    }

    /// A VM was started, stopped or moved: nothing is asked about it any more.
    pub fn no_wish(&mut self, vm: &VmName) {
        self.wishes.remove(vm);
        self.refuted.remove(vm);
    }

    /// What to ask, once for all VMs; none while nothing waits.
    pub fn question(&self) -> Option<SiteQuestion> {
        if self.wishes.is_empty() {
            return None;
        }
        let wishes = self.wishes.iter();
        Some(SiteQuestion {
            instance: self.instance.clone(),
            knows: self.heard(),
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
    ///
    /// Who does not speak for the site, and knows less of it than this host, does not say what this host is.
    pub fn hear(&mut self, answer: SiteAnswer) {
        let speaks = answer.from.is_none() && answer.in_charge;
        if speaks || answer.standing != Standing::Known && answer.stamp >= self.table.stamp {
            (self.standing, self.replaced) = (answer.standing, answer.replaced);
        }
        let from = match &answer.from {
            Some(host) => Answerer::Host(host.clone()),
            None => Answerer::Controller,
        };
        self.answers.insert(from, answer);
        self.keep_what_speaks_against();
    }

    /// Who knew of a later holder may be silent in the next round, in which others that missed it answer. Only a controller in
    /// charge that knows of none takes it back.
    fn keep_what_speaks_against(&mut self) {
        let mut refuted = std::mem::take(&mut self.refuted);
        for (vm, mine) in &self.wishes {
            match self.against(vm, *mine) {
                Some(Judged::Never(why) | Judged::Yield(why)) => {
                    refuted.insert(vm.clone(), why);
                }
                _ if self.is_let_by_controller(vm) => drop(refuted.remove(vm)),
                _ => {}
            }
        }
        self.refuted = refuted;
    }

    /// Why a VM is not booted that waits: somebody has spoken against it since it was found.
    pub fn refuted(&self, vm: &VmName) -> Option<&str> {
        self.refuted.get(vm).map(String::as_str)
    }

    /// The controller does not answer this round of questions: what hosts answer counts, once all were heard out.
    pub fn no_controller(&mut self) {
        self.no_controller = true;
    }

    /// Everybody has answered this round of questions, or had the time to: one host's answer is not overtaken by another's
    /// any more.
    pub fn round_is_over(&mut self) {
        self.is_round_over = true;
    }

    /// Forgets what was answered: before the question is asked anew.
    pub fn forget_answers(&mut self) {
        self.answers.clear();
        self.no_controller = false;
        self.is_round_over = false;
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
        if let Some(why) = self.owes_a_word(vm, mine) {
            return Judged::Wait(why);
        }
        if self.alone || self.is_let_by_controller(vm) {
            return Judged::Boot;
        }
        let first_counts = self.planted(Plant::FirstAnswerBoots);
        if let Some(why) = self.refuted(vm).filter(|_| !first_counts) {
            return Judged::Never(why.to_owned());
        }
        let lone = !self.table.had_second;
        if lone && (configured_alone || waited_s >= LONE_HOST_WAITS_S) {
            return Judged::Boot;
        }
        let mut answers = self.answers.values();
        let enough =
            (self.is_round_over || first_counts) && answers.any(|answer| self.lets(vm, answer));
        if enough || self.hosts_count() && self.all_answered(vm) {
            return Judged::Boot;
        }
        Judged::Wait(self.waits_for(vm))
    }

    /// Whether an answer alone is enough to boot, where nobody speaks against it.
    fn lets(&self, vm: &VmName, answer: &SiteAnswer) -> bool {
        self.is_enough(vm, answer) && self.rivals_answered(vm, answer)
    }

    fn is_let_by_controller(&self, vm: &VmName) -> bool {
        let controller = self.answers.get(&Answerer::Controller);
        controller.is_some_and(|answer| self.lets(vm, answer))
    }

    /// Whether hosts' answers count: a controller that answers knows more than any of them, and is heard out first.
    fn hosts_count(&self) -> bool {
        self.no_controller
            || self.answers.contains_key(&Answerer::Controller)
            || self.planted(Plant::NeighboursFirst)
    }

    /// What is held of this life, also by this host's own table: that one belongs to a machine. A controller in charge
    /// knows better; and of another host's word a person may know better, where no controller answers.
    fn judged_standing(&self) -> Standing {
        let controller = self.answers.get(&Answerer::Controller);
        let vouched =
            controller.is_some_and(|said| said.in_charge && said.standing == Standing::Known);
        let moved = self
            .knows(&self.me)
            .is_some_and(|own| self.is_another_machine(own, &self.instance));
        match self.standing {
            Standing::Known if moved && !vouched && !self.alone => Standing::SecondInstance,
            Standing::SecondInstance if self.alone && controller.is_none() => Standing::Known,
            standing => standing,
        }
    }

    fn not_itself(&self) -> Option<String> {
        if self.planted(Plant::OldCopyBoots) {
            return None;
        }
        let (what, first) = match self.judged_standing() {
            Standing::Known => return None,
            Standing::Removed => ("this host was removed from its site", String::new()),
            Standing::SecondInstance => {
                let what = "another machine has this host's certificate: it boots nothing; power off the machine that is not meant; to use this one as a host of its own, empty its state directory and let it join under another name";
                return Some(what.to_owned());
            }
            Standing::OldCopy if self.replaced => {
                return Some(format!(
                    "this host's identity was replaced by a newer one, so that this machine is an old copy of host '{0}': it boots nothing; if another machine is host '{0}' now, power this one off; if none is, run 'godwit host remove {0} --confirm-unreachable' where the controller is and here stop the agent, move its state directory aside and delete its host.toml, and let it join anew",
                    self.me
                ));
            }
            Standing::OldCopy => (
                "this host's state directory is an older copy of itself",
                self.removal(),
            ),
        };
        Some(format!(
            "{what}: it boots nothing; to use it again, {first}let it join anew with an empty state directory and without its host.toml"
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
        self.against_but_for(vm, mine, None)
    }

    /// The same, but for what host `gone` held by what others know of it.
    fn against_but_for(
        &self,
        vm: &VmName,
        mine: Generation,
        gone: Option<&HostName>,
    ) -> Option<Judged> {
        let is_gone_ones = |row: &SiteVm| gone.is_some() && row.holder.as_ref() == gone;
        let told = self
            .answers
            .values()
            .filter_map(|answer| Some((answer, answer.vms.get(vm)?)))
            .filter(|(_, row)| !is_gone_ones(row));
        for (answer, row) in told {
            let Some(why) = self.row_against(vm, mine, row) else {
                continue;
            };
            let speaks = answer.from.is_none() && answer.in_charge;
            return Some(match speaks && answer.given_on.contains(vm) {
                true => Judged::Yield(why),
                false => Judged::Never(why),
            });
        }
        let own = self.table.vms.get(vm).filter(|row| !is_gone_ones(row));
        if let Some(why) = own.and_then(|row| self.row_against(vm, mine, row)) {
            return Some(Judged::Never(why));
        }
        let mut records = self.records_of(vm);
        let why = records.find_map(|(host, record)| self.record_against(mine, host, record));
        why.map(Judged::Never)
    }

    /// What hosts answered that their records say of a VM.
    fn records_of<'a>(
        &'a self,
        vm: &'a VmName,
    ) -> impl Iterator<Item = (&'a HostName, &'a RecordSaid)> {
        let hosts = self.answers.iter().filter_map(|(from, answer)| match from {
            Answerer::Host(host) => Some((host, answer)),
            Answerer::Controller => None,
        });
        let records = hosts.flat_map(|(host, answer)| {
            let records = answer.records.iter();
            records.map(move |record| (host, record))
        });
        records.filter(move |(_, record)| record.vm == *vm)
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

    /// A host that is ready to take the VM from here under a later generation may have been given it since by a message
    /// that is under way. It asks this host, and gives up if this one did not give the VM; an old copy cannot tell.
    fn owes_a_word(&self, vm: &VmName, mine: Generation) -> Option<String> {
        let mut records = self.records_of(vm);
        records.find_map(|(host, record)| match &record.claim {
            Claim::Promised { generation, from } if *generation > mine && *from == self.me => {
                Some(format!(
                    "host {host} waits for the word of host {me} on a handover of the VM under generation {generation}: that ends by itself; if it does not, the record here is an older copy, and 'godwit vm show {vm}' says how to decide",
                    me = self.me
                ))
            }
            _ => None,
        })
    }

    /// A controller in charge knows all but what it cannot read; a host knows enough when its row of the VM is at least as
    /// new as this host's and as any that was answered: a newer one may name a rival that this one does not.
    fn is_enough(&self, vm: &VmName, answer: &SiteAnswer) -> bool {
        if !answer.knows(vm) {
            return false;
        }
        if answer.from.is_none() {
            // One that was put back, and does not know it yet, has said less than this host has heard.
            return answer.in_charge && answer.stamp >= self.table.stamp;
        }
        if !self.hosts_count() || self.controller_cannot_tell(vm) {
            return false;
        }
        let stamp_of = |row: Option<&SiteVm>| row.map(|row| row.stamp).unwrap_or_default();
        let theirs = stamp_of(answer.vms.get(vm));
        let rows = self.answers.values().map(|answer| answer.vms.get(vm));
        let newest = rows.chain([self.table.vms.get(vm)]).map(stamp_of).max();
        newest.is_none_or(|newest| theirs >= newest) || self.planted(Plant::OldAnswerBoots)
    }

    /// A controller that answers and says nothing of the VM may have granted it since: one host's row does not stand in
    /// for that, the answers of all hosts do.
    fn controller_cannot_tell(&self, vm: &VmName) -> bool {
        let controller = self.answers.get(&Answerer::Controller);
        controller.is_some_and(|answer| !answer.knows(vm))
    }

    /// A row that names other hosts was written before a handover whose outcome only they know: each has to answer
    /// itself. A record that is not an old copy would know it, too; this host cannot tell.
    ///
    /// A controller that is in charge says of whom it knows that he is off: nobody waits for those.
    fn rivals_answered(&self, vm: &VmName, answer: &SiteAnswer) -> bool {
        let Some(row) = answer.vms.get(vm) else {
            return true;
        };
        let others = row.may_hold.iter().filter(|host| **host != self.me);
        let mut enrolled = others.filter(|host| !self.table.removed.contains(*host));
        enrolled.all(|host| answer.off.contains(host) || self.has_answered(host, vm))
    }

    /// Whether a host has said what it knows of a VM: one that cannot read its record has not.
    fn has_answered(&self, host: &HostName, vm: &VmName) -> bool {
        let answer = self.answers.get(&Answerer::Host(host.clone()));
        answer.is_some_and(|answer| answer.knows(vm))
    }

    fn all_answered(&self, vm: &VmName) -> bool {
        let mut others = self.neighbours().peekable();
        others.peek().is_some() && others.all(|host| self.has_answered(&host.name, vm))
    }

    /// Hosts that the controller's own answer names beside this one, and that have not answered themselves.
    fn waits_for_rivals(&self, vm: &VmName) -> Option<String> {
        let answer = self.answers.get(&Answerer::Controller)?;
        let row = answer.vms.get(vm).filter(|_| self.is_enough(vm, answer))?;
        let silent = row.may_hold.iter().filter(|host| {
            let counts = **host != self.me && !self.table.removed.contains(*host);
            counts && !answer.off.contains(*host) && !self.has_answered(host, vm)
        });
        let silent: Vec<&str> = silent.map(HostName::as_str).collect();
        let first = silent.first()?;
        Some(format!(
            "host {} asks host {} whether it holds the VM, which a handover named last: bring it back, or, once it is powered off, run 'godwit host fenced {first}' at the controller",
            self.me,
            silent.join(", ")
        ))
    }

    fn waits_for(&self, vm: &VmName) -> String {
        if let Some(sentence) = self.waits_for_rivals(vm) {
            return sentence;
        }
        let missing: Vec<&str> = self
            .neighbours()
            .filter(|host| !self.has_answered(&host.name, vm))
            .map(|host| host.name.as_str())
            .collect();
        let whom = match missing[..] {
            [] => "the controller".to_owned(),
            _ => format!("the controller or host {}", missing.join(", ")),
        };
        format!(
            "host {me} asks {whom} whether the VM went elsewhere before it boots it; if none of them will answer and no other host runs it, run 'godwit host boot-alone' on host {me}",
            me = self.me
        )
    }
}
