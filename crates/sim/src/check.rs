//! The invariants. Checked after every step; at the end, liveness.
//!
//! Uses nothing of the core but what it shows to people and what is on the disks.

use crate::model::{HOSTS, HostId};
use crate::world::World;
use godwit_ownership::{HostRecord, Phase, Status};

impl World {
    /// Safety, after every step; the first violation ends the run.
    pub(crate) fn check(&mut self) {
        let found = self
            .never_two()
            .or_else(|| self.never_two_owners())
            .or_else(|| self.never_nowhere())
            .or_else(|| self.shown_as_it_is());
        if let Some(what) = found {
            self.violated(what);
        }
    }

    fn never_two(&self) -> Option<String> {
        let running = (0..HOSTS).filter(|h| self.runs_at(*h)).count();
        (running > 1).then(|| format!("{running} hosts run the guest"))
    }

    pub(crate) fn runs_at(&self, host: HostId) -> bool {
        self.hosts[host].qemu.as_ref().is_some_and(|q| q.running)
    }

    fn never_two_owners(&self) -> Option<String> {
        let records = self.hosts.iter().filter_map(|h| h.disk.durable.as_ref());
        let owners = records.filter(|r| is_undisputed(r)).count();
        (owners > 1).then(|| format!("{owners} journals hold the VM without dispute"))
    }

    /// Whether no journal says that its host may run the VM.
    pub(crate) fn nobody_holds(&self) -> bool {
        let mut records = self.hosts.iter().filter_map(|h| h.disk.durable.as_ref());
        !records.any(HostRecord::may_hold)
    }

    /// Somebody has the right to run the VM, or is waiting to get it back.
    fn never_nowhere(&mut self) -> Option<String> {
        let records = self.hosts.iter().filter_map(|h| h.disk.durable.as_ref());
        let holders = records.filter(|r| !matches!(r.phase, Phase::Ready { .. }) && r.may_hold());
        let nobody = holders.count() == 0;
        // A write whose outcome is unknown does not make a holder: the core must know it, too.
        let processes = self.hosts.iter().filter_map(|h| h.process.as_ref());
        let known = processes
            .map(|p| p.core.record())
            .filter(|r| r.may_run().is_some());
        if known.map(|r| r.held).max() > self.lost_at {
            self.lost_at = None;
        }
        (nobody && self.lost_at.is_none()).then(|| "no journal holds the VM any more".to_owned())
    }

    /// Whoever shows the VM as running runs it; whoever is in doubt shows the command that ends it.
    fn shown_as_it_is(&self) -> Option<String> {
        for (host, at) in self.hosts.iter().enumerate() {
            let Some(process) = at.process.as_ref() else {
                continue;
            };
            let is_idle = process.todo.is_empty() && process.inbox.is_empty();
            let status = process.core.status();
            match &status {
                Status::Running { .. } | Status::Migrating { .. }
                    if is_idle && !process.core.is_writing() && !self.runs_at(host) =>
                {
                    return Some(format!(
                        "{} shows {status:?} but does not run it",
                        self.name(host)
                    ));
                }
                Status::InDoubt { command, .. } if !command.starts_with("godwit vm resolve ") => {
                    return Some(format!("{} is in doubt without a command", self.name(host)));
                }
                _ => {}
            }
        }
        None
    }

    /// After everything has healed: exactly one host runs the VM and nobody waits for anything.
    pub(crate) fn settled(&self) -> Result<HostId, String> {
        let running: Vec<_> = (0..HOSTS).filter(|h| self.runs_at(*h)).collect();
        let [host] = running[..] else {
            return Err(format!("healed, but {} hosts run the guest", running.len()));
        };
        for at in 0..HOSTS {
            let Some(process) = self.hosts[at].process.as_ref() else {
                continue;
            };
            let status = process.core.status();
            let is_fine = match &status {
                Status::Running { .. } => at == host,
                Status::Absent | Status::Moved { .. } => at != host,
                _ => false,
            };
            if !is_fine {
                return Err(format!("healed, but {} shows {status:?}", self.name(at)));
            }
            let record = self.hosts[at].disk.durable.as_ref();
            if at == host && !record.is_some_and(is_undisputed) {
                return Err(format!("healed, but {} is unconfirmed", self.name(at)));
            }
        }
        Ok(host)
    }
}

fn is_undisputed(record: &HostRecord) -> bool {
    match &record.phase {
        Phase::Holds { unconfirmed, .. } => unconfirmed.is_none(),
        Phase::Stopping { .. } => true,
        Phase::Absent
        | Phase::Gave { .. }
        | Phase::Moved { .. }
        | Phase::Incoming { .. }
        | Phase::Ready { .. }
        | Phase::Refused { .. } => false,
    }
}
