//! Whether a person's word may let a host run a VM on, as far as the controller knows.
//!
//! Part of [`Book`]. Refuses, while this controller is not in charge, where the host is not itself, and where a later
//! holder is known than the one whose handover is in doubt.

use crate::book::Book;
use crate::refusal::Refusal;
use godwit_types::site::{Claim, Standing};
use godwit_types::{Generation, HostName, VmName};

impl Book {
    /// Lets a host run a VM on that it gave away, or that it holds with a doubt, on a person's word that host `off` is powered
    /// off. What that one did with the VM since is lost by the word, and is no reason against it once it counts as off.
    pub fn may_run_on(
        &self,
        vm: &VmName,
        host: &HostName,
        off: Option<&HostName>,
    ) -> Result<(), Refusal> {
        self.must_be_in_charge()?;
        if self.standing(host) != Standing::Known {
            return Err(Refusal::NotItself { host: host.clone() });
        }
        let Some(waits_for) = self.said(host, vm).and_then(|said| waits_for(&said.claim)) else {
            return Ok(());
        };
        let gone = off.filter(|off| self.is_fenced(off) || self.removed.contains(*off));
        match self.later_holder(vm, host, waits_for, gone) {
            Some(newest) => Err(Refusal::Overtaken {
                vm: vm.clone(),
                host: host.clone(),
                newest,
            }),
            None => Ok(()),
        }
    }

    /// Who took the generation that was given, or a later one, as far as is known, but for the host that is gone; without a
    /// name where the VM was deleted or that host gave it up.
    fn later_holder(
        &self,
        vm: &VmName,
        host: &HostName,
        given: Generation,
        gone: Option<&HostName>,
    ) -> Option<Option<HostName>> {
        let entry = self.vms.get(vm)?;
        let was_gone_ones = match &entry.holder {
            // What it was granted since is above what would run on: when it comes back, it would boot all the same.
            Some(holder) => gone == Some(holder) && entry.held <= given,
            // A host that is removed takes what it held with it. Whoever was granted it last is named, not one before.
            None => gone.is_some_and(|gone| {
                self.removed.contains(gone)
                    && entry
                        .newest_ends()
                        .is_none_or(|mut ends| ends.any(|end| end == gone))
            }),
        };
        if entry.deleted || entry.held >= given && !was_gone_ones {
            return Some(entry.holder.clone().filter(|holder| holder != host));
        }
        let others = self.hosts.keys();
        let others = others.filter(|other| *other != host && gone != Some(*other));
        let claims = others.filter_map(|other| Some((other, &self.said(other, vm)?.claim)));
        let mut later = claims.filter_map(|(other, claim)| match claim {
            Claim::Holds { generation, .. } if *generation >= given => Some(other),
            // Whoever gave a later one has taken this one.
            Claim::Gave { generation, to } | Claim::Moved { generation, to }
                if *generation > given =>
            {
                Some(to)
            }
            _ => None,
        });
        later.next().map(|holder| Some(holder.clone()))
    }
}

/// The generation that another host would hold if it had taken the VM.
fn waits_for(claim: &Claim) -> Option<Generation> {
    match claim {
        Claim::Gave { generation, .. } => Some(*generation),
        Claim::Holds { generation, .. } => generation.next(),
        Claim::No | Claim::Receiving { .. } | Claim::Promised { .. } | Claim::Moved { .. } => None,
    }
}
