//! What a host gave away and was not answered for, once the site went on without that answer.
//!
//! Part of [`Book`]. Such a host waits for ever, and no grant passes it. Without a guest it is told to give up as soon as
//! that is safe; with one a person says so. Refuses: to end what may be the newest copy that is left.

use crate::book::Book;
use crate::refusal::Refusal;
use godwit_types::site::Claim;
use godwit_types::{Generation, HostName, VmName};
use std::fmt;

/// What became of a VM since a host gave it away; each with the generation under which that was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SinceGift {
    /// This host holds it by a grant, and answers.
    Held { by: HostName, at: Generation },
    /// This host was granted it, and is off by a person's word, gone for good, or let it go.
    Lost { with: HostName, at: Generation },
    /// A person deleted it, at this generation.
    Deleted { at: Generation },
}

impl SinceGift {
    /// The newest generation under which the VM was held.
    pub fn at(&self) -> Generation {
        match self {
            Self::Held { at, .. } | Self::Lost { at, .. } | Self::Deleted { at } => *at,
        }
    }
}

impl fmt::Display for SinceGift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let alone = "without a guest it gives that up by itself within a minute or two;";
        match self {
            Self::Held { by, .. } => write!(f, "what host {by} holds: {alone}"),
            Self::Lost { with, .. } => write!(
                f,
                "what host {with} was granted since, which is off, gone or holds nothing any more: unless that comes back,"
            ),
            Self::Deleted { .. } => write!(f, "the VM's deletion: {alone}"),
        }
    }
}

impl Book {
    /// The VMs that a host gave away and was not answered for, and that nobody takes from it any more; with the newest
    /// generation under which each was held.
    pub fn overtaken_gifts(&self, host: &HostName) -> Vec<(VmName, Generation)> {
        let Some(giver) = self.hosts.get(host) else {
            return Vec::new();
        };
        let vms = giver.said.keys();
        let overtaken = vms.filter_map(|vm| Some((vm.clone(), self.overtaken_gift(vm, host)?)));
        overtaken.collect()
    }

    /// As [`Book::overtaken_gifts`], of one VM. Whoever is to receive it, and is ready or was not asked, may have the only
    /// memory that is left.
    pub fn overtaken_gift(&self, vm: &VmName, host: &HostName) -> Option<Generation> {
        let (given, to) = self.gift_at(vm, host)?;
        let is_ready = |claim: &Claim| matches!(claim, Claim::Promised { generation, .. } if *generation == given);
        let mut words = self.words_of(vm);
        if !self.is_in_charge() || words.any(|(_, said)| is_ready(&said.claim)) {
            return None;
        }
        let entry = self.vms.get(vm)?;
        let is_unheard = !self.answers(to) && !self.is_fenced(to);
        if entry.may_hold.contains_key(to) && is_unheard {
            return None;
        }
        self.is_gone_past(vm, entry, host, given)
            .then_some(entry.held)
    }

    /// What became of a VM after this host gave it away, if a person may therefore have the host give up what it has, its
    /// guest included.
    pub fn since_gift(&self, vm: &VmName, host: &HostName) -> Option<SinceGift> {
        let (given, _) = self.gift_at(vm, host)?;
        self.holder_since(vm, given)
            .or_else(|| self.end_since(vm, host, given))
    }

    /// The host that holds the VM by a grant, and answers, under a later generation.
    fn holder_since(&self, vm: &VmName, given: Generation) -> Option<SinceGift> {
        let entry = self.vms.get(vm)?;
        let others = self.words_of(vm).filter_map(|(other, said)| {
            let held = said.claim.held().filter(|held| *held > given)?;
            let counts = self.is_heard_itself(other) && entry.was_granted(other, held);
            counts.then(|| (other.clone(), held))
        });
        let (by, at) = others.max_by_key(|(_, held)| *held)?;
        Some(SinceGift::Held { by, at })
    }

    /// That the VM was deleted, or went on to a host that has it no more, or that nobody can ask.
    fn end_since(&self, vm: &VmName, host: &HostName, given: Generation) -> Option<SinceGift> {
        let entry = self.vms.get(vm)?;
        if !self.is_in_charge() || !entry.is_superseded(host, given) {
            return None;
        }
        let at = entry.held;
        if entry.deleted {
            return Some(SinceGift::Deleted { at });
        }
        let is_off = |holder| self.is_fenced(holder) || self.removed.contains(holder);
        // One that the grant has not reached says no as well, and may boot by it yet.
        let has_let_go = |holder| {
            let said = self.said(holder, vm).filter(|said| said.highest >= at);
            let has_none =
                said.is_some_and(|said| matches!(said.claim, Claim::No | Claim::Moved { .. }));
            has_none && self.is_heard_itself(holder)
        };
        let is_lost = |holder| is_off(holder) || has_let_go(holder);
        if !entry.holder.as_ref().is_none_or(is_lost) {
            return None;
        }
        let newest = entry.granted.iter().rev().find(|one| one.is_of(at))?;
        let with = newest.to.clone();
        Some(SinceGift::Lost { with, at })
    }

    /// That a host still has what it gave away before the VM went on without it.
    pub fn kept_gift(&self, vm: &VmName, host: &HostName) -> Option<Refusal> {
        let since = self.since_gift(vm, host)?;
        let (vm, host) = (vm.clone(), host.clone());
        Some(Refusal::GiftKept { vm, host, since })
    }

    /// What a host that answers gave away, by its own record, and to whom.
    fn gift_at(&self, vm: &VmName, host: &HostName) -> Option<(Generation, &HostName)> {
        let Claim::Gave { generation, to } = &self.said(host, vm)?.claim else {
            return None;
        };
        self.is_heard_itself(host).then_some((*generation, to))
    }
}
