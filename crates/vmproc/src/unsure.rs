//! A guest that was let run while its hypervisor did not answer: asked about until it is known whether it runs.
//!
//! Part of [`Vm`]. A hypervisor takes its commands in order, so that the first state it answers with is the one after the
//! command. Refuses: to end a hypervisor for its silence, which could be the end of the only copy of the guest.

use crate::hypervisor::news_of;
use crate::input::GuestNews;
use crate::vm::Vm;
use godwit_qemu::machine::RunState;
use std::time::{Duration, Instant};

/// Pause between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// A hypervisor's time for the answer to a look; nothing else is done here meanwhile.
const LOOK_WAIT: Duration = Duration::from_secs(1);

/// Since when it is not known whether the guest runs.
#[derive(Debug)]
pub(crate) struct Unsure {
    since: Instant,
    looked_at: Instant,
    is_told: bool,
}

impl Unsure {
    /// Begins to count now.
    pub(crate) fn begun() -> Self {
        let now = Instant::now();
        Self {
            since: now,
            looked_at: now,
            is_told: false,
        }
    }
}

impl Vm {
    /// What people are told.
    pub(crate) fn unsure_note(&self) -> Option<String> {
        let unsure = self.unsure.as_ref()?;
        let pid = self.hyper.as_ref()?.pid();
        Some(format!(
            "QEMU of VM '{vm}' (process {pid}) was told {seconds} s ago to let the guest run and has not answered: whether the guest runs is not known; QEMU is asked again, and 'godwit vm stop {vm} --force --host {host}' gives the guest up",
            vm = self.config.vm,
            host = self.config.host,
            seconds = unsure.since.elapsed().as_secs(),
        ))
    }

    /// Asks again, when it is time to.
    pub(crate) fn look_again(&mut self) {
        let due = |unsure: &&mut Unsure| unsure.looked_at.elapsed() >= LOOK_EVERY;
        let (Some(unsure), Some(hyper)) = (self.unsure.as_mut().filter(due), &self.hyper) else {
            return;
        };
        let state = hyper.machine.query_status(Instant::now() + LOOK_WAIT);
        unsure.looked_at = Instant::now();
        let since = unsure.since;
        match state {
            Ok(state) => self.known(&state, since),
            // The note says it all the time.
            Err(error) => {
                let told = self.unsure.as_mut().map(|unsure| &mut unsure.is_told);
                if told.is_some_and(|told| !std::mem::replace(told, true)) {
                    tracing::warn!(%error, "it is still not known whether the guest runs");
                }
            }
        }
    }

    fn known(&mut self, state: &RunState, since: Instant) {
        self.unsure = None;
        if *state == RunState::Running {
            tracing::info!("the guest runs, as is known now");
            self.runs_on(since);
            return;
        }
        tracing::error!(%state, "the guest was not let run");
        let refused =
            || format!("its hypervisor did not let the guest run (its state: {state}); resume it");
        let news = news_of(state).unwrap_or_else(|| GuestNews::Halted(refused()));
        self.happened(news);
    }
}
