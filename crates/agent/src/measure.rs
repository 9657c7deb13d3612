//! What the agent measures for others: a guest's writes, the link to another host, this host's load.
//!
//! Part of [`Agent`]. Owns nothing. Refuses: what takes longer than a few seconds.

use crate::addresses::missing;
use crate::agent::{Agent, Reply, took_too_long, unexpected};
use crate::link::Here;
use crate::load::{self, Reading, Wanted};
use crate::preflight::no_address;
use godwit_types::forecast::{
    DirtyRate, LinkMeasured, LinkProbeListen, LinkProbeReady, LinkProbeSend,
};
use godwit_types::host_api::{HostVm, MEASURE_MS_MAX, VmAnswer, VmRequest};
use godwit_types::load::{HostLoad, InterfaceLoad, MigrationLoad};
use godwit_types::migration::MigrationReport;
use godwit_types::{ApiError, ErrorCode, VmName};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Longest wait beside the measuring itself: the descriptor, protecting all of a guest's memory.
const GRACE: Duration = Duration::from_secs(10);

impl Agent {
    /// Measures how a guest writes.
    pub(crate) async fn measure(&self, name: &VmName, millis: u64) -> Reply<DirtyRate> {
        if !(1..=MEASURE_MS_MAX).contains(&millis) {
            return Err(ApiError::new(
                ErrorCode::InvalidRequest,
                format!("writes are measured for 1 to {MEASURE_MS_MAX} ms, not {millis}"),
            ));
        }
        let vm = self.known(name)?;
        let patience = Duration::from_millis(millis) + GRACE;
        let request = VmRequest::MeasureDirtyRate { millis };
        match vm.ask(&request, patience).await? {
            VmAnswer::DirtyRate(rate) => Ok(rate),
            _ => Err(unexpected(name)),
        }
    }

    /// Listens for a burst.
    pub(crate) async fn link_listen(
        self: &Arc<Self>,
        probe: LinkProbeListen,
    ) -> Reply<LinkProbeReady> {
        let agent = Arc::clone(self);
        let listening = tokio::task::spawn_blocking(move || {
            let addresses = agent.addresses.migration();
            no_address(&agent.config, &missing(&addresses)).map_or(Ok(()), Err)?;
            let here = Here {
                addresses: &addresses,
                ports: (
                    agent.config.migration_ports.first,
                    agent.config.migration_ports.last,
                ),
                ram_dir: &agent.config.ram_dir(),
                free_mib: agent.memory.free_mib(),
            };
            agent.bursts.listen(&probe, &here)
        });
        let listening = listening.await.map_err(took_too_long)?;
        listening.map_err(|error| error.on_host(self.host()))
    }

    pub(crate) async fn link_send(
        self: &Arc<Self>,
        mut probe: LinkProbeSend,
    ) -> Reply<LinkMeasured> {
        let agent = Arc::clone(self);
        let sent = tokio::task::spawn_blocking(move || {
            let missing = missing(&probe.source_addresses);
            let ours = &mut probe.source_addresses;
            ours.retain(|address| !missing.contains(address));
            if ours.is_empty() {
                no_address(&agent.config, &missing).map_or(Ok(()), Err)?;
            }
            agent.bursts.send(&probe)
        });
        let sent = sent.await.map_err(took_too_long)?;
        sent.map_err(|error| error.on_host(self.host()))
    }

    /// What this host is busy with. Waits for a second reading when nobody asked within the last seconds.
    pub(crate) async fn load(self: &Arc<Self>) -> HostLoad {
        let (moving, reading) = self.read_load().await;
        let known = self.with_readings(&reading);
        let (moving, reading, base) = match known {
            Some(base) => (moving, reading, base),
            None => {
                tokio::time::sleep(load::wait()).await;
                let (moving, later) = self.read_load().await;
                let base = self.with_readings(&later).unwrap_or(reading);
                (moving, later, base)
            }
        };
        let links = self.addresses.links();
        let interfaces: Vec<InterfaceLoad> = links
            .iter()
            .map(|(name, addresses)| reading.interface(&base, &self.system, name, addresses))
            .collect();
        HostLoad {
            host: self.host().clone(),
            seconds: reading.seconds_since(&base),
            cpus: self.system.cpus(),
            cpu_percent: reading.cpu_percent(&base),
            memory_total_mib: self.system.meminfo_mib("MemTotal").unwrap_or(0),
            memory_free_mib: self.memory.free_mib(),
            migrations: moving
                .iter()
                .map(|(vm, report)| migration_load(vm, report, &reading, &base))
                .collect(),
            interfaces,
        }
    }

    fn with_readings(&self, reading: &Reading) -> Option<Reading> {
        let mut readings = self.readings.lock().unwrap_or_else(PoisonError::into_inner);
        readings.base_for(reading)
    }

    async fn read_load(self: &Arc<Self>) -> (Vec<(HostVm, MigrationReport)>, Reading) {
        let mut moving = Vec::new();
        for vm in self.vms().await {
            let Some(id) = &vm.migration else { continue };
            match self.live_report(&vm.spec.name, id).await {
                Ok(report) if report.outcome.is_none() => moving.push((vm, report)),
                _ => {}
            }
        }
        let mut wanted = Wanted::default();
        for (vm, report) in &moving {
            wanted.processes.extend(vm.vm_process_pid);
            wanted.processes.extend(vm.qemu_pid);
            wanted
                .migrations
                .insert(report.id.clone(), report.bytes_on_wire);
        }
        let reading = tokio::task::block_in_place(|| Reading::take(&self.system, &wanted));
        (moving, reading)
    }
}

fn migration_load(
    vm: &HostVm,
    report: &MigrationReport,
    now: &Reading,
    base: &Reading,
) -> MigrationLoad {
    let (busiest_thread, busiest_thread_percent) = now.busiest_thread(base, vm.vm_process_pid);
    // One that has just begun says itself how fast it is.
    let bytes_per_s = now.migration_rate(base, &report.id);
    MigrationLoad {
        id: report.id.clone(),
        vm: report.vm.clone(),
        from: report.from.clone(),
        to: report.to.clone(),
        side: report.side,
        phase: report.phase,
        streams: report.streams,
        bytes_per_s: bytes_per_s.unwrap_or(report.wire_bytes_per_s),
        cpu_percent: now.process_percent(base, vm.vm_process_pid),
        busiest_thread_percent,
        busiest_thread,
        hypervisor_cpu_percent: now.process_percent(base, vm.qemu_pid),
        percent: report.done_percent,
        guest_speed_percent: report.guest_speed_percent,
        eta_s: report.eta_s,
    }
}
