//! What a list may say of a VM: from what was last heard, never more than that.
//!
//! Part of [`Book`]. Refuses: to call a VM stopped while a host that may hold it is silent, is still receiving it, or has
//! not been asked since it was named.

use crate::book::{Book, Ran};
use crate::hear::is_plausible;
use crate::plant::Plant;
use godwit_types::site::{Claim, Standing};
use godwit_types::{Generation, HostName, VmName};
use std::collections::BTreeSet;

/// One of several copies of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    pub host: HostName,
    /// The generation that its record holds.
    pub generation: Generation,
    /// Whether this host was ever granted that generation.
    pub granted: bool,
}

/// A VM that several hosts hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Twice {
    /// The copies, the one to keep first: granted before never granted, higher before lower.
    pub copies: Vec<Copy>,
}

impl Twice {
    /// The copies that are to be paused, with their memory kept.
    pub fn to_pause(&self) -> impl Iterator<Item = &HostName> {
        self.copies.iter().skip(1).map(|copy| &copy.host)
    }
}

/// Where a VM is, as far as was heard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whereabouts {
    /// This host holds it.
    Held { host: HostName, answers: bool },
    /// Several hosts hold it.
    Twice(Twice),
    /// It is between two hosts, or just was: nobody has said yet that it holds it.
    HandingOver {
        /// A host that takes part.
        host: HostName,
    },
    /// Hosts that may hold it do not answer.
    Silent { hosts: Vec<HostName> },
    /// Every host that may hold it said no.
    Nowhere,
}

impl Book {
    /// Where a VM is.
    pub fn whereabouts(&self, vm: &VmName) -> Whereabouts {
        if let Some(twice) = self.twice(vm) {
            return Whereabouts::Twice(twice);
        }
        if let Some((host, _)) = self.highest_holder(vm) {
            return Whereabouts::Held {
                host: host.clone(),
                answers: self.answers(host),
            };
        }
        let silent: Vec<HostName> = self.silent_members(vm);
        if !silent.is_empty() && !self.planted(Plant::SilenceIsNo) {
            return Whereabouts::Silent { hosts: silent };
        }
        match self.between(vm) {
            Some(host) => Whereabouts::HandingOver { host },
            None => Whereabouts::Nowhere,
        }
    }

    /// The host for whose word this one waits by its claim, if this book permitted that handover, or never granted the VM
    /// at all. What a host says of anything else puts nobody's VM in doubt.
    pub fn waits_by_permission(
        &self,
        vm: &VmName,
        host: &HostName,
        claim: &Claim,
    ) -> Option<HostName> {
        let generation = match claim {
            Claim::Gave { generation, .. }
            | Claim::Promised { generation, .. }
            | Claim::Holds { generation, .. } => *generation,
            Claim::No | Claim::Receiving { .. } | Claim::Moved { .. } => return None,
        };
        let granted = &self.vms.get(vm)?.granted;
        let Some(permitted) = granted.iter().rev().find(|one| one.is_of(generation)) else {
            return claim.other().filter(|_| granted.is_empty()).cloned();
        };
        let (from, to) = (permitted.from.as_ref()?, &permitted.to);
        let is_of_it = match claim {
            Claim::Gave { to: named, .. } => from == host && to == named,
            Claim::Promised { from: named, .. } => from == named && to == host,
            _ => to == host,
        };
        let other = if from == host { to } else { from };
        is_of_it.then(|| other.clone())
    }

    fn highest_holder<'a>(&'a self, vm: &'a VmName) -> Option<(&'a HostName, Generation)> {
        let words = self.words_of(vm);
        let on = words.filter(|(host, _)| self.answers(host) || !self.is_fenced(host));
        let holders = on.filter_map(|(host, said)| Some((host, said.claim.held()?)));
        holders.max_by_key(|(host, generation)| (*generation, self.answers(host)))
    }

    /// Where the guest of a VM may have run last; nowhere where the VM was deleted. By people's words alone a holder goes past a
    /// permission of which nothing came: a claim that is too late to be believed still tells where the newest disk is, if its host was ever
    /// permitted to hold the VM.
    pub fn ran(&self, vm: &VmName) -> Ran {
        let Some(entry) = self.vms.get(vm).filter(|entry| !entry.deleted) else {
            return Ran::default();
        };
        let words = self.words_of(vm);
        let known = words.filter(|(host, _)| self.standing(host) == Standing::Known);
        let claims = known.filter_map(|(host, said)| Some((host, said.claim.held()?)));
        let later = claims.filter(|(host, generation)| {
            let can_be = is_plausible(entry.highest, *generation) && entry.was_ever_granted(host);
            can_be && *generation > entry.held
        });
        match later.max_by_key(|(_, generation)| *generation) {
            Some((host, held)) => Ran {
                holder: Some(host.clone()),
                held,
            },
            None => entry.ran(),
        }
    }

    /// Hosts that may hold a VM, do not answer, and were not fenced.
    pub fn silent_members(&self, vm: &VmName) -> Vec<HostName> {
        let members = self.may_hold(vm).into_iter();
        members
            .filter(|host| !self.answers(host) && !self.is_fenced(host))
            .collect()
    }

    /// A member that waits for another, is receiving, or was not asked since it was named.
    fn between(&self, vm: &VmName) -> Option<HostName> {
        let entry = self.vms.get(vm)?;
        let unsettled = |host: &HostName, named: Generation| match self.said(host, vm) {
            None => self.answers(host) && entry.holder.as_ref() == Some(host),
            Some(said) => match &said.claim {
                Claim::Gave { .. } | Claim::Promised { .. } | Claim::Receiving { .. } => true,
                Claim::Holds { .. } => false,
                Claim::No | Claim::Moved { .. } => said.highest < named,
            },
        };
        let mut members = entry.may_hold.iter();
        members
            .find(|(host, named)| !self.is_fenced(host) && unsettled(host, **named))
            .map(|(host, _)| host.clone())
    }

    /// Whether a VM seems to be handed over, while every host that may hold it answers that it does not, nor waits for
    /// another: a grant or a permission that its host never got. A survey settles it.
    pub fn is_undelivered(&self, vm: &VmName) -> bool {
        let says_no = |host: &HostName| match self.said(host, vm) {
            None => true,
            Some(said) => matches!(said.claim, Claim::No | Claim::Moved { .. }),
        };
        let mut members = self.may_hold(vm).into_iter();
        matches!(self.whereabouts(vm), Whereabouts::HandingOver { .. })
            && members.all(|host| self.is_fenced(&host) || self.answers(&host) && says_no(&host))
    }

    /// Several hosts hold a VM: each was asked after the others' claim was known, so that no handover looks like it. A host
    /// that is off holds no copy that matters, nor does a record without a guest that this controller itself went past, or may
    /// have gone past where it cannot read that.
    pub fn twice(&self, vm: &VmName) -> Option<Twice> {
        let is_older = |host: &HostName, generation: Generation| {
            let entry = self.vms.get(vm);
            self.unreadable.contains(vm)
                || entry.is_some_and(|entry| entry.is_superseded(host, generation))
        };
        let holders: Vec<_> = self
            .words_of(vm)
            .filter(|(host, _)| self.answers(host) || !self.is_fenced(host))
            .filter_map(|(host, said)| Some((host, said, said.claim.held()?)))
            .filter(|(host, said, generation)| said.may_live || !is_older(host, *generation))
            .collect();
        if holders.len() < 2 {
            return None;
        }
        let (_, newest, _) = holders
            .iter()
            .max_by_key(|(_, _, generation)| *generation)?;
        let since = newest.held_since?;
        let mut copies: Vec<Copy> = holders
            .iter()
            .filter(|(_, said, generation)| {
                Some(*generation) == newest.claim.held() || said.asked > since
            })
            .map(|(host, _, generation)| self.copy(vm, host, *generation))
            .collect();
        if copies.len() < 2 {
            return None;
        }
        copies.sort_by_key(|copy| std::cmp::Reverse((copy.granted, copy.generation)));
        Some(Twice { copies })
    }

    fn copy(&self, vm: &VmName, host: &HostName, generation: Generation) -> Copy {
        let entry = self.vms.get(vm);
        let is_itself = self.standing(host) == Standing::Known;
        Copy {
            host: host.clone(),
            generation,
            granted: is_itself && entry.is_some_and(|entry| entry.was_granted(host, generation)),
        }
    }

    /// VMs that several hosts hold.
    pub fn all_twice(&self) -> Vec<(VmName, Twice)> {
        let vms: BTreeSet<&VmName> = self.vms.keys().chain(&self.unreadable).collect();
        vms.into_iter()
            .filter_map(|vm| Some((vm.clone(), self.twice(vm)?)))
            .collect()
    }
}
