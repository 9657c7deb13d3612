//! Migrations from host `a` to host `b` that are interrupted: by a link that is lost, or by a process that dies.

use super::{LONG, LOOK_EVERY, Site, dies_at, has_died};
use anyhow::{Result, ensure};
use godwit_e2e::Host;
use godwit_e2e::pair::Options;
use godwit_e2e::relay::Mode;
use godwit_types::disk_move::Method;
use godwit_types::migration::Outcome;
use godwit_types::vm::VmState;
use std::time::Instant;

impl Site {
    /// The link is lost for a while half way, during which the guest works on.
    pub fn migrates_over_a_lost_link(&self, method: Method) -> Result<()> {
        let (a, b) = (&self.pair.a, &self.pair.b);
        let options = Options {
            relayed: true,
            method,
            ..self.slowly()
        };
        let id = self.pair.begin(a, b, &options)?;
        self.is_half_way(&id)?;
        self.pair.link(Mode::Cut);
        // Nobody waits for a destination that is not there.
        self.goes_on(a, 50)?;
        self.pair.link(Mode::Open);
        self.ends(&id, Outcome::Completed)?;
        self.goes_on(b, 20)
    }

    /// The process of the source, or of the destination, dies at a point before the handover: the guest goes on where it was, and nothing is left at the
    /// other host.
    pub fn dies_before_the_handover(&self, point: &'static str, at_source: bool) -> Result<()> {
        let (a, b) = (&self.pair.a, &self.pair.b);
        let victim = if at_source { a } else { b };
        dies_at(victim, point)?;
        let (id, begun) = self.pair.try_begin(a, b, &Options::default())?;
        has_died(victim)?;
        if begun.is_ok() {
            self.ends(&id, Outcome::Failed)?;
        }
        self.goes_on(a, 20)?;
        self.has_nothing(b)
    }

    /// The same in the handover: one of the hosts runs the guest, and nothing is left at the other one. Returns whether that is the destination.
    pub fn dies_in_the_handover(&self, point: &'static str, at_source: bool) -> Result<bool> {
        let (a, b) = (&self.pair.a, &self.pair.b);
        let victim = if at_source { a } else { b };
        dies_at(victim, point)?;
        let (id, _) = self.pair.try_begin(a, b, &Options::default())?;
        has_died(victim)?;
        let outcome = self.pair.wait_end(a, &id, LONG)?.outcome;
        let has_gone = outcome == Some(Outcome::Completed);
        let (holder, other) = if has_gone { (b, a) } else { (a, b) };
        runs(holder)?;
        self.goes_on(holder, 20)?;
        self.has_nothing(other)?;
        println!("  killed at {point}: {outcome:?}");
        Ok(has_gone)
    }
}

fn runs(host: &Host) -> Result<()> {
    let deadline = Instant::now() + LONG;
    while !host.vm().is_ok_and(|vm| vm.state == VmState::Running) {
        ensure!(Instant::now() < deadline, "nobody runs it");
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
