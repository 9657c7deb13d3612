//! Hosts that are gone for good: every VM process hears of each, however often it takes.
//!
//! Owns which VM has answered to which removal, in memory. Refuses: to count a VM as told that did not answer.

use crate::agent::{Agent, Reply};
use crate::pause::stops_within;
use godwit_types::control_api::Done;
use godwit_types::host_api::VmRequest;
use godwit_types::{HostName, VmName};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Longest wait for a VM process to take in that a host is gone.
const ACT: Duration = Duration::from_secs(10);
/// Until those that did not answer, and VMs that are new, are told.
const TELL_EACH: Duration = Duration::from_secs(5);

/// Removed hosts, each with the VMs that know.
#[derive(Debug, Default)]
pub(crate) struct Removed(Mutex<BTreeMap<HostName, BTreeSet<VmName>>>);

impl Removed {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<HostName, BTreeSet<VmName>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Exactly these hosts are gone.
    pub(crate) fn are(&self, hosts: BTreeSet<HostName>) {
        let mut removed = self.lock();
        removed.retain(|host, _| hosts.contains(host));
        for host in hosts {
            removed.entry(host).or_default();
        }
    }

    /// The VM may come to wait for a host anew.
    pub(crate) fn begin_anew(&self, vm: &VmName) {
        self.lock().values_mut().for_each(|told| {
            told.remove(vm);
        });
    }

    fn untold(&self, vms: &[VmName]) -> Vec<(HostName, VmName)> {
        let removed = self.lock();
        let untold = removed.iter().flat_map(|(host, told)| {
            let vms = vms.iter().filter(|vm| !told.contains(*vm));
            vms.map(|vm| (host.clone(), vm.clone()))
        });
        untold.collect()
    }

    fn told(&self, host: &HostName, vm: VmName) {
        if let Some(told) = self.lock().get_mut(host) {
            told.insert(vm);
        }
    }
}

impl Agent {
    /// Tells every VM process of hosts that are gone for good: nothing is settled with them any more.
    pub(crate) async fn removed_hosts(self: &Arc<Self>, hosts: Vec<HostName>) -> Reply<Done> {
        let others = hosts.into_iter().filter(|host| host != self.host());
        let hosts: BTreeSet<HostName> = others.collect();
        let message = format!("{} hosts are gone for good", hosts.len());
        self.removed.are(hosts);
        self.tell_of_the_removed().await;
        Ok(Done { message })
    }

    /// Tells those that were not reached, and those that are new, until `stop` turns true.
    pub(crate) async fn keep_telling(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        let mut pause = Duration::ZERO;
        while !stops_within(&mut stop, pause).await {
            tokio::select! {
                () = self.tell_of_the_removed() => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
            pause = TELL_EACH;
        }
    }

    pub(crate) async fn tell_of_the_removed(self: &Arc<Self>) {
        let agent = Arc::clone(self);
        let untold = tokio::task::spawn_blocking(move || {
            let untold = agent.removed.untold(&agent.supervisor.names());
            let waiting = untold.into_iter();
            waiting
                .filter(|(_, vm)| agent.records.needs_process(vm))
                .collect::<Vec<_>>()
        });
        let mut telling = JoinSet::new();
        for (host, vm) in untold.await.unwrap_or_default() {
            let agent = Arc::clone(self);
            telling.spawn(async move { agent.tell_removed(host, vm).await });
        }
        telling.join_all().await;
    }

    /// One that waits for nothing from that host says so, which is an answer; one that refuses is told again.
    async fn tell_removed(&self, host: HostName, name: VmName) {
        let Some(vm) = self.supervisor.find(&name) else {
            return;
        };
        let request = VmRequest::HostRemoved { host: host.clone() };
        match vm.ask(&request, ACT).await {
            Ok(_) => {
                tracing::info!(vm = %name, %host, "the VM waits for the host that is gone no more")
            }
            Err(error) => {
                tracing::debug!(vm = %name, %host, %error, "the VM is told again that the host is gone");
                return;
            }
        }
        self.removed.told(&host, name);
    }
}

#[cfg(test)]
#[path = "removed_tests.rs"]
mod tests;
