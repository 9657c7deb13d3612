//! A VM that comes or goes: what stands in the way at this end, and how this host becomes a destination.
//!
//! Owns nothing. Refuses: a VM for which there is no memory, one whose record may hold it here already.

use super::{ACT, Agent, NEED, Reply, blocking, done, took_too_long, tracking, unexpected};
use crate::addresses::missing;
use crate::check_network;
use crate::preflight;
use crate::probe::{self};
use crate::system::unix_ms;
use godwit_store::load_json;
use godwit_types::control_api::Done;
use godwit_types::host_api::{
    IncomingReady, PreflightIncoming, PreflightOutgoing, PrepareIncoming, UEFI_SIZES_FILE,
    VmAnswer, VmRequest,
};
use godwit_types::migration::PreflightReport;
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, VmName, VmSpec};
use std::sync::Arc;

impl Agent {
    /// Makes this host a destination.
    pub(crate) async fn prepare_incoming(
        self: &Arc<Self>,
        request: PrepareIncoming,
    ) -> Reply<IncomingReady> {
        request
            .spec
            .check()
            .map_err(|error| ApiError::new(ErrorCode::InvalidVm, error.to_string()))?;
        self.closing.refuse(self.host())?;
        let name = request.spec.name.clone();
        let (book, host, spec) = (
            self.memory.clone(),
            self.host().clone(),
            request.spec.clone(),
        );
        let _promise = blocking(move || book.promise(&host, &spec)).await?;
        let (id, from) = (&request.migration.id, &request.migration.source.host);
        self.migration_begins(id, &name).await?;
        tracing::info!(vm = %name, migration = %id, %from, "a VM is to arrive from another host");
        self.removed.begin_anew(&name);
        let vm = self.supervised(&name);
        self.renew_idle(&vm).await?;
        vm.need(NEED).await?;
        match vm
            .ask(&VmRequest::PrepareIncoming(Box::new(request)), ACT)
            .await?
        {
            VmAnswer::IncomingReady(ready) => {
                let agent = Arc::clone(self);
                blocking(move || {
                    agent.remember_boot(&name);
                    Ok(ready)
                })
                .await
            }
            _ => Err(unexpected(&name)),
        }
    }

    /// What stands in the way of the VM leaving here.
    pub(crate) async fn preflight_outgoing(
        self: &Arc<Self>,
        name: &VmName,
    ) -> Reply<PreflightOutgoing> {
        let supervised = self.known(name)?;
        let vm = self.vm(name).await?;
        let (mut blockers, mut for_now) = (Vec::new(), None);
        if matches!(vm.state, VmState::Running | VmState::Paused) {
            match supervised.ask(&VmRequest::Blockers, ACT).await {
                Ok(VmAnswer::Blockers(found)) => blockers = found,
                Ok(_) => return Err(unexpected(name)),
                Err(refused) if is_for_now(&refused) => for_now = Some(refused),
                Err(error) => return Err(error),
            }
        }
        let addresses = self.addresses.migration();
        let report = preflight::outgoing(&preflight::Source {
            config: &self.config,
            host: self.host(),
            spec: &vm.spec,
            state: vm.state,
            blockers: &blockers,
            system: &self.system,
            tracking: tracking(),
            addresses: &addresses,
            missing_addresses: &missing(&addresses),
        });
        let (host, spec) = (self.host().clone(), vm.spec.clone());
        let sizes = self.config.vms_dir().join(name.as_str());
        let sizes = sizes.join(UEFI_SIZES_FILE);
        let uefi = vm.spec.has_variables();
        let agent = Arc::clone(self);
        let looked = tokio::task::spawn_blocking(move || {
            let hashed = preflight::hash_files(&host, &spec);
            let uefi = uefi.then(|| load_json(&sizes)).transpose();
            let record = agent.disk_record(&spec.name);
            let end = |path: &str| record.end_of(&agent.config.datastores, path);
            (hashed, preflight::to_move(&host, &spec, end), uefi)
        });
        let looked = looked.await.map_err(took_too_long)?;
        let ((file_hashes, missing), (disks, unmovable), uefi) = looked;
        let uefi = uefi.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
        let refusals = for_now.into_iter().chain(report.refusals);
        let refusals = refusals.chain(missing);
        Ok(PreflightOutgoing {
            uefi: uefi.flatten(),
            refusals: refusals.chain(unmovable).collect(),
            passed: report.passed,
            vm,
            file_hashes,
            disks,
        })
    }

    /// What stands in the way of a VM coming here; listens for its probe from here on.
    pub(crate) async fn preflight_incoming(
        self: &Arc<Self>,
        request: PreflightIncoming,
    ) -> Reply<PreflightReport> {
        request
            .spec
            .check()
            .map_err(|error| ApiError::new(ErrorCode::InvalidVm, error.to_string()))?;
        let arrived_ms = unix_ms();
        let agent = self.clone();
        let looked = tokio::task::spawn_blocking(move || {
            let report = agent.look_at_incoming(&request, arrived_ms);
            (request, report)
        });
        let (request, report) = looked.await.map_err(took_too_long)?;
        // All that is wrong is shown at once: also whether frames arrive, where there are bridges for them.
        let mut refusals = report.refusals.iter();
        let lacks_bridge = refusals.any(|error| error.code == ErrorCode::MissingBridge);
        if !lacks_bridge && !request.probe_nonce.is_empty() {
            let nonce = probe::parse_nonce(&request.probe_nonce)?;
            let bridges = probe::bridges_of(&self.config, &request.spec);
            let listens = self.probes.listen(nonce, &bridges, self.host());
            // What is refused anyway is refused for its own reasons.
            if report.refusals.is_empty() {
                listens?;
            }
        }
        Ok(report)
    }

    /// Which VM that this host may hold has the user id of another one.
    fn same_user(&self, spec: &VmSpec) -> Option<VmName> {
        let uid = spec.uid?;
        let names = self.records.names().unwrap_or_default();
        let mut others = names.into_iter().filter(|name| *name != spec.name);
        others.find(|name| {
            let may_hold = || self.records.record(name).is_none_or(|held| held.may_hold());
            let described = self.records.spec(name).ok().flatten();
            described.is_some_and(|other| other.uid == Some(uid)) && may_hold()
        })
    }

    fn look_at_incoming(&self, request: &PreflightIncoming, unix_ms: u64) -> PreflightReport {
        let addresses = self.addresses.migration();
        let (free_ports, _) = check_network::free_ports(&self.config, &addresses);
        let record = self.records.record(&request.spec.name);
        let known = self.qemu.get();
        let tried = known.as_ref().as_ref().ok().map(|facts| &facts.tried);
        let no_handout = tried.and_then(|tried| tried.no_handout.clone());
        let mut report = preflight::incoming(
            &preflight::Destination {
                config: &self.config,
                system: &self.system,
                info: &self.info(),
                free_mib: self.memory.free_mib(),
                cpus: tried.and_then(|tried| tried.cpus.get(&request.accelerator)),
                tracking: tracking().and(no_handout.map_or(Ok(()), Err)),
                // A record that cannot be read may hold anything.
                name_taken: record.is_none_or(|record| record.may_hold()),
                same_user: self.same_user(&request.spec),
                free_ports,
                missing_addresses: &missing(&addresses),
                unix_ms,
            },
            request,
        );
        report
            .refusals
            .extend(self.closing.refuse(self.host()).err());
        report
    }

    /// Sends the probe from each of the VM's port groups.
    pub(crate) fn probe(&self, name: &VmName, nonce: &str) -> Reply<Done> {
        let nonce = probe::parse_nonce(nonce)?;
        let spec = self.spec(name)?;
        let bridges = probe::bridges_of(&self.config, &spec);
        probe::send(nonce, &bridges, self.host())?;
        Ok(done(format!("sent from {} port groups", bridges.len())))
    }
}

/// Whether a VM process refuses what it would do at another time.
fn is_for_now(error: &ApiError) -> bool {
    matches!(
        error.code,
        ErrorCode::AlreadyMigrating | ErrorCode::WrongState
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::Served;
    use crate::test_support::{TestHost, spec};
    use godwit_ownership::Power;
    use godwit_store::save_json;
    use godwit_types::host_api::SPEC_FILE;
    use godwit_types::vm::{Accelerator, UIDS};

    fn coming(spec: VmSpec) -> PreflightIncoming {
        PreflightIncoming {
            spec,
            accelerator: Accelerator::Tcg,
            file_hashes: Vec::new(),
            uefi: None,
            source_unix_ms: unix_ms(),
            probe_nonce: String::new(),
            disks: Vec::new(),
        }
    }

    /// A host that lied invented a VM with another one's user id, and had it moved to that one's host.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_vm_with_the_user_id_of_another_one_here_is_refused() {
        let with = |name: &str, uid: u32| VmSpec {
            uid: Some(uid),
            ..spec(name)
        };
        let [first, second] = [*UIDS.start(), *UIDS.start() + 1];
        let host = TestHost::new();
        host.hold("web", Power::Off);
        let described = host.config.vms_dir().join("web").join(SPEC_FILE);
        save_json(&described, &with("web", first)).unwrap();
        let served = Served::of_host(host).await;
        for (vm, is_refused) in [(with("evil", first), true), (with("other", second), false)] {
            let report = served.agent.preflight_incoming(coming(vm)).await.unwrap();
            let mut refusals = report.refusals.iter();
            let told = refusals.any(|error| error.message.contains("same user as VM 'web'"));
            assert_eq!(told, is_refused, "{:?}", report.refusals);
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_host_that_is_closed_says_so_and_refuses_a_vm_before_it_comes() {
        let served = Served::new().await;
        let request = coming(spec("web"));
        let refused = async || {
            let asked = served.agent.preflight_incoming(request.clone()).await;
            let mut refusals = asked.unwrap().refusals.into_iter();
            refusals.any(|error| {
                error.code == ErrorCode::WrongState && error.message.contains("godwit host open")
            })
        };
        assert!(!served.agent.info().closing && !refused().await);
        served.agent.close(false).await.unwrap();
        assert!(served.agent.info().closing && refused().await);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_host_that_refuses_a_vm_listens_for_its_probe_all_the_same() {
        let served = Served::new().await;
        served.agent.close(false).await.unwrap();
        let request = PreflightIncoming {
            probe_nonce: "00".repeat(16),
            ..coming(spec("web"))
        };
        assert!(request.spec.nics.is_empty());
        let report = served
            .agent
            .preflight_incoming(request.clone())
            .await
            .unwrap();
        assert!(!report.refusals.is_empty());
        assert!(served.agent.probes.result([0; 16]).await.is_ok());
        // However many are refused, and none is probed: each has its own reason.
        for number in 1..=80_u8 {
            let again = PreflightIncoming {
                probe_nonce: format!("{number:02x}").repeat(16),
                ..request.clone()
            };
            let report = served.agent.preflight_incoming(again).await.unwrap();
            assert!(!report.refusals.is_empty());
        }
    }
}
