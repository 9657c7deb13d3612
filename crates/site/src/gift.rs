//! What a host gave away and was not answered for, once the site went on without that answer.
//!
//! Part of [`Book`]. Such a host waits for ever, and no grant passes it. Without a guest it is told to give up as soon as
//! that is safe; with one a person says so. Refuses: to end what may be the newest copy that is left.

use crate::book::{Book, Entry};
use godwit_types::site::Claim;
use godwit_types::{Generation, HostName, VmName};
use std::fmt;

/// What became of a VM since a host gave it away; each with the newest generation under which it was held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SinceGift {
    /// This host holds it by a grant, and answers.
    Held { by: HostName, at: Generation },
    /// This host was granted it, and is off by a person's word, or gone for good.
    Lost { with: HostName, at: Generation },
    /// This host was granted it, answers, and holds it no more; or its grant never reached it.
    LetGo { by: HostName, at: Generation },
    /// A person deleted it, at this generation.
    Deleted { at: Generation },
}

impl SinceGift {
    /// The newest generation under which the VM was held.
    pub fn at(&self) -> Generation {
        match self {
            Self::Held { at, .. }
            | Self::Lost { at, .. }
            | Self::LetGo { at, .. }
            | Self::Deleted { at } => *at,
        }
    }
}

/// A host that still has what it gave away before the VM went on without it: in the way of every grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptGift {
    pub vm: VmName,
    /// The host that gave it.
    pub host: HostName,
    /// The host that was to receive it.
    pub to: HostName,
    pub since: SinceGift,
    /// Whether the host is told to give up what has no guest.
    ends_alone: bool,
}

impl KeptGift {
    /// The command that ends it.
    pub fn way_out(&self) -> String {
        let Self { vm, host, .. } = self;
        match &self.since {
            SinceGift::Lost { with, .. } => {
                format!("godwit vm resolve {vm} --give-up-on {host} --confirm-fenced {with}")
            }
            _ => format!("godwit vm resolve {vm} --give-up-on {host}"),
        }
    }
}

impl fmt::Display for KeptGift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vm, host, to, .. } = self;
        write!(
            f,
            "host {host} still waits for the end of a handover of VM {vm} to host {to}"
        )?;
        match &self.since {
            SinceGift::Held { by, .. } => write!(f, ", which is older than what host {by} holds")?,
            SinceGift::LetGo { by, .. } => {
                write!(
                    f,
                    ", which is older than what host {by} was granted since and does not hold"
                )?;
            }
            SinceGift::Deleted { .. } => write!(f, ", and the VM was deleted since")?,
            SinceGift::Lost { with, .. } => {
                return write!(
                    f,
                    "; host {with} was granted the VM later and is off or removed: bring it back if it has the VM; else '{}' ends what is left on host {host} and at host {to}, which may be the only memory of the VM, and the VM may start anew",
                    self.way_out()
                );
            }
        }
        if self.ends_alone {
            write!(
                f,
                ": if no guest is left there, host {host} gives it up by itself within a minute or two"
            )?;
        }
        let memory = match self.since {
            SinceGift::LetGo { .. } => "which may be the only memory of the VM",
            _ => "with its memory",
        };
        write!(
            f,
            "; '{}' ends what is left on host {host} and at host {to}, {memory}",
            self.way_out()
        )
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
            .or_else(|| self.end_since(vm, host))
    }

    /// What this book has of a VM that this host gave away, if it let another host hold it later, or deleted it.
    fn older_gift(&self, vm: &VmName, host: &HostName) -> Option<&Entry> {
        let (given, _) = self.gift_at(vm, host)?;
        let entry = self.vms.get(vm)?;
        entry.is_superseded(host, given).then_some(entry)
    }

    /// Whether what a host gave away is not the newest: this book let another host hold the VM later, or deleted it.
    pub fn is_older_gift(&self, vm: &VmName, host: &HostName) -> bool {
        self.older_gift(vm, host).is_some()
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

    /// That the VM was deleted, or went on to a host that has it no more, or that nobody can ask. Whoever may hold it and is
    /// merely silent is waited for.
    fn end_since(&self, vm: &VmName, host: &HostName) -> Option<SinceGift> {
        let entry = self.older_gift(vm, host).filter(|_| self.is_in_charge())?;
        let at = entry.held;
        if entry.deleted {
            return Some(SinceGift::Deleted { at });
        }
        if !self.silent_members(vm).is_empty() {
            return None;
        }
        let Some(holder) = &entry.holder else {
            let with = entry
                .newest_ends()?
                .find(|end| self.removed.contains(*end))?
                .clone();
            return Some(SinceGift::Lost { with, at });
        };
        if self.is_fenced(holder) {
            let with = holder.clone();
            return Some(SinceGift::Lost { with, at });
        }
        // It left the set by a no that binds: one that a grant has not reached yet is in it.
        let has_let_go = self.is_heard_itself(holder) && !entry.may_hold.contains_key(holder);
        has_let_go.then(|| SinceGift::LetGo {
            by: holder.clone(),
            at,
        })
    }

    /// The host that was let hold the VM after this one gave it away, and is to be asked whether it does: it answers, and its
    /// list does not name the VM, which looks the same while the grant is on its way.
    pub fn unsure_since(&self, vm: &VmName, host: &HostName) -> Option<HostName> {
        let holder = self.older_gift(vm, host)?.holder.as_ref()?;
        let is_unsure = self.is_heard_itself(holder) && self.since_gift(vm, host).is_none();
        is_unsure.then(|| holder.clone())
    }

    /// That a host still has what it gave away before the VM went on without it.
    pub fn kept_gift(&self, vm: &VmName, host: &HostName) -> Option<KeptGift> {
        let since = self.since_gift(vm, host)?;
        let (_, to) = self.gift_at(vm, host)?;
        Some(KeptGift {
            vm: vm.clone(),
            host: host.clone(),
            to: to.clone(),
            since,
            ends_alone: self.overtaken_gift(vm, host).is_some(),
        })
    }

    /// What a host that answers gave away, by its own record, and to whom.
    fn gift_at(&self, vm: &VmName, host: &HostName) -> Option<(Generation, &HostName)> {
        let Claim::Gave { generation, to } = &self.said(host, vm)?.claim else {
            return None;
        };
        self.is_heard_itself(host).then_some((*generation, to))
    }
}
