//! An orderly shutdown of this host by its agent: how it begins, goes on and ends, and each guest's steps.
//!
//! Part of [`Agent`]; how far the host has come is [`Closing`]'s. Refuses: to touch a VM that no VM process of this Godwit
//! can power down, once a renewal was in vain.

use crate::agent::{ACT, Agent, NEED, Reply, blocking, done, unexpected};
use crate::boot::STOPPING_PAUSE;
use crate::closing::{ANSWER_WAIT, Closing, Hands, left_with, power_guests_down, seen_of};
use crate::evidence;
use crate::supervisor::Supervised;
use godwit_types::control_api::Done;
use godwit_types::host_api::{
    CloseState, CloseStep, ClosingStage, ClosingVm, HostClosing, VmAnswer, VmRequest,
};
use godwit_types::{ErrorCode, VmName};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

impl Agent {
    /// Begins to power this host's guests down, if that is not under way; for a shutdown if who asks says so, or else the
    /// system manager does.
    pub(crate) async fn close(self: &Arc<Self>, at_shutdown: bool) -> Reply<HostClosing> {
        let at_shutdown = at_shutdown || (self.boots.stopping)().await == Some(true);
        let agent = Arc::clone(self);
        let began = blocking(move || agent.closing.begin(at_shutdown, agent.down_by_themselves()));
        if began.await? {
            self.supervisor.rest(false);
            tokio::spawn(power_guests_down(Arc::clone(self)));
        }
        Ok(self.closing.shown())
    }

    /// Goes on with what an agent before this one had begun, unless the shutdown for which it had is over.
    pub(crate) async fn go_on_closing(self: &Arc<Self>) -> Reply<()> {
        self.open_if_back(Instant::now()).await?;
        self.supervisor
            .rest(self.closing.is_for_a_shutdown() && self.closing.stage() == ClosingStage::Closed);
        if self.closing.stage() == ClosingStage::Closing {
            tokio::spawn(power_guests_down(Arc::clone(self)));
        }
        Ok(())
    }

    /// Opens a host whose shutdown is over. A system manager that is too busy to say so is asked `again` then.
    async fn open_if_back(self: &Arc<Self>, again: Instant) -> Reply<()> {
        if !self.closing.is_for_a_shutdown() {
            return Ok(());
        }
        let asked = self.closing.asking();
        let stops = (self.boots.stopping)().await;
        let at = stops.is_none().then_some(again);
        self.closing.ask_again_at(asked, at);
        if stops != Some(false) {
            return Ok(());
        }
        tracing::info!("this host is back from its shutdown: it runs guests again");
        let agent = Arc::clone(self);
        let opened = blocking(move || {
            agent.settle_the_unseen();
            agent.closing.is_back(asked)
        })
        .await;
        if opened.is_err() {
            self.closing.ask_again_at(asked, Some(again));
        }
        opened
    }

    /// Asks again whether the shutdown is over where that is not known yet.
    pub(crate) async fn look_whether_back(self: &Arc<Self>) {
        let now = Instant::now();
        if !self.closing.is_to_ask(now) {
            return;
        }
        if let Err(error) = self.open_if_back(now + STOPPING_PAUSE).await {
            tracing::error!(%error, "this host is back from its shutdown and stays closed");
        }
        if !self.closing.is_on() {
            self.supervisor.rest(false);
            self.bring_guests_unit_back();
        }
    }

    /// Has the host run guests again, and boots those that ran before.
    pub(crate) async fn open(self: &Arc<Self>) -> Reply<Done> {
        let agent = Arc::clone(self);
        blocking(move || {
            if agent.closing.stage() == ClosingStage::Closed {
                agent.settle_the_unseen();
            }
            agent.closing.end(agent.host())
        })
        .await?;
        self.supervisor.rest(false);
        self.boots.wake();
        self.bring_guests_unit_back();
        let message = format!(
            "host '{}' runs guests again; those that ran before are booted",
            self.host()
        );
        tracing::info!("{message}");
        Ok(done(message))
    }
}

impl Agent {
    /// VMs that should run and have no guest.
    fn down_by_themselves(&self) -> BTreeSet<VmName> {
        let mut down = self.supervisor.names();
        down.retain(|vm| self.is_to_run_and_does_not(vm).is_some());
        down.into_iter().collect()
    }

    /// Whether the VM should run and has no guest; then, whether it had one in this boot.
    fn is_to_run_and_does_not(&self, vm: &VmName) -> Option<bool> {
        self.runs_without_qemu(vm)?;
        Some(self.records.ran_in_boot(vm, &self.boot_id))
    }

    /// A guest that went while nobody looked, since no agent was there, has not crashed.
    fn settle_the_unseen(&self) {
        for vm in self.supervisor.names() {
            if self.closing.was_down_before(&vm) || self.is_to_run_and_does_not(&vm) != Some(true) {
                continue;
            }
            self.records.forget_boot(&vm);
            let (state, why) = (CloseState::Off, None);
            self.closing.saw(ClosingVm { vm, state, why });
        }
    }

    /// One step of one guest. A VM process that is too old to know that its host shuts down gives way to one that does:
    /// with the old one, a guest that powers itself off would be off on record.
    async fn close_supervised(&self, vm: &Arc<Supervised>, step: CloseStep) -> ClosingVm {
        let name = &vm.config().vm;
        let first = match ask_guest(vm, step).await {
            Err(error) if error.code == ErrorCode::InvalidRequest => error,
            asked => return seen_of(name, step, asked),
        };
        if self.closing.was_renewed(name) {
            return left_with(name, &first);
        }
        match self.renew(name).await {
            // It may be renewed once its migration has ended.
            Err(error) if error.code == ErrorCode::AlreadyMigrating && step != CloseStep::End => {
                let (vm, state) = (name.clone(), CloseState::Migrating);
                let why = Some(error.message);
                ClosingVm { vm, state, why }
            }
            Ok(done) => {
                self.closing.renewed(name);
                tracing::info!("{}", done.message);
                match ask_guest(vm, step).await {
                    Err(error) if error.code == ErrorCode::InvalidRequest => {
                        left_with(name, &error)
                    }
                    asked => seen_of(name, step, asked),
                }
            }
            Err(error) => {
                self.closing.renewed(name);
                left_with(name, &error)
            }
        }
    }
}

impl Hands for Agent {
    fn closing(&self) -> &Closing {
        &self.closing
    }

    async fn with_guests(self: &Arc<Self>) -> Vec<VmName> {
        let agent = Arc::clone(self);
        let found = blocking(move || {
            let mut names = agent.supervisor.names();
            names.retain(|name| evidence::qemu_may_live(&agent.run_dir(name)));
            Ok(names)
        });
        found.await.unwrap_or_default()
    }

    async fn close_guest(self: &Arc<Self>, vm: &VmName, step: CloseStep) -> ClosingVm {
        match self.known(vm) {
            Ok(vm) => self.close_supervised(&vm, step).await,
            Err(error) => seen_of(vm, step, Err(error)),
        }
    }

    fn went_down(&self, vm: &VmName) {
        self.records.forget_boot(vm);
    }

    fn at_the_end(&self) {
        self.settle_the_unseen();
        self.supervisor.rest(self.closing.is_for_a_shutdown());
    }
}

async fn ask_guest(vm: &Arc<Supervised>, step: CloseStep) -> Reply<ClosingVm> {
    let patience = match step {
        CloseStep::Look | CloseStep::Press => (ANSWER_WAIT, ANSWER_WAIT),
        CloseStep::End => (NEED, ACT),
    };
    vm.need(patience.0).await?;
    match vm.ask(&VmRequest::Close { step }, patience.1).await? {
        VmAnswer::Closing(seen) => Ok(seen),
        _ => Err(unexpected(&vm.config().vm)),
    }
}
