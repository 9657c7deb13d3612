//! The faults, and when they strike.
//!
//! Each seed allows its own subset (so that rare combinations are not drowned). Owned by the world.

use crate::model::{HOSTS, Happening, HostId};
use crate::world::World;
use godwit_ownership::{Event, StateName};
use godwit_types::named;

named! {
    /// A kind of fault.
    pub enum Fault {
        KillProcess => "VM process killed",
        KillQemu => "QEMU killed",
        KillAgent => "agent killed",
        KillController => "controller killed",
        CrashHost => "host crashed",
        CutLink => "link cut",
        LoseMessage => "message lost",
        DoubleMessage => "message doubled",
        DelayMessage => "message delayed",
        WriteFails => "journal write failed, old record kept",
        WriteUnknown => "journal write failed, outcome unknown",
        Cancel => "migration cancelled",
        GuestShutdown => "guest shut down",
        GuestHalts => "guest halted",
        GuestResets => "guest reset",
        DiskFull => "disk full",
        LinkReset => "channels reset",
        RestoreController => "controller restored from an old database",
        OperatorResolves => "operator resolved, peer fenced",
        OperatorGivesUp => "operator gave up a destination, source fenced",
        HostLost => "host dead for good, VM begun anew elsewhere",
    }
}

/// Faults that strike something at a moment; the others strike messages and writes as they happen.
const STRIKES: &[Fault] = &[
    Fault::KillProcess,
    Fault::KillProcess,
    Fault::KillQemu,
    Fault::KillAgent,
    Fault::KillController,
    Fault::CrashHost,
    Fault::CutLink,
    Fault::Cancel,
    Fault::GuestShutdown,
    Fault::GuestHalts,
    Fault::GuestResets,
    Fault::DiskFull,
    Fault::LinkReset,
    Fault::RestoreController,
    Fault::OperatorResolves,
    Fault::OperatorResolves,
    Fault::OperatorGivesUp,
    Fault::OperatorGivesUp,
    Fault::HostLost,
];

impl World {
    /// Which faults this seed allows.
    pub(crate) fn draw_swarm(&mut self) {
        for fault in Fault::ALL {
            let often = match fault {
                Fault::HostLost => 200,
                _ => 500,
            };
            if self.rng.chance(often) {
                self.swarm.insert(*fault);
            }
        }
    }

    /// Whether this fault may strike now.
    pub(crate) fn allows(&self, fault: Fault) -> bool {
        self.is_faulty && self.swarm.contains(&fault)
    }

    /// Whether a fault of messages or writes strikes now.
    pub(crate) fn strikes(&mut self, fault: Fault, in_thousand: u64) -> bool {
        let hit = self.allows(fault) && self.rng.chance(in_thousand);
        if hit {
            self.coverage.fault(fault);
        }
        hit
    }

    /// Perhaps a fault, more often while a handover is in progress.
    pub(crate) fn perhaps_strike(&mut self) {
        let rate = if self.is_handing_over() { 35 } else { 3 };
        if !self.is_faulty || !self.rng.chance(rate) {
            return;
        }
        let fault = STRIKES[self.rng.index(STRIKES.len())];
        if self.allows(fault) && self.strike(fault) {
            self.coverage.fault(fault);
        }
    }

    fn is_handing_over(&self) -> bool {
        self.hosts
            .iter()
            .filter_map(|h| h.process.as_ref())
            .any(|p| {
                matches!(
                    p.core.state_name(),
                    StateName::Stopping
                        | StateName::LastPages
                        | StateName::Devices
                        | StateName::AwaitingReady
                        | StateName::Gave
                        | StateName::InDoubt
                        | StateName::Ready
                        | StateName::ReadyInDoubt
                        | StateName::Unconfirmed
                )
            })
    }

    fn strike(&mut self, fault: Fault) -> bool {
        let host = self.rng.index(HOSTS);
        match fault {
            Fault::KillProcess => self.kill_process(host),
            Fault::KillQemu => self.kill_qemu(host),
            Fault::KillAgent => self.kill_agent(host),
            Fault::KillController => self.kill_controller(),
            Fault::CrashHost => self.crash_for_a_while(host),
            Fault::CutLink => self.cut_link(host),
            Fault::Cancel => self.feed(host, Event::Cancel),
            Fault::GuestShutdown => self.guest_does(host, Event::GuestShutdown),
            Fault::GuestHalts => self.guest_does(host, Event::GuestHalted),
            Fault::GuestResets => self.guest_does(host, Event::GuestReset),
            // Its process stops it.
            Fault::DiskFull => self.feed(host, Event::OutOfRoom),
            Fault::LinkReset => self.feed(host, Event::LinkLost),
            Fault::RestoreController => self.restore_controller(),
            Fault::OperatorResolves => self.operator_resolves(true),
            Fault::OperatorGivesUp => self.operator_resolves(false),
            Fault::HostLost => self.lose_host(host),
            Fault::LoseMessage
            | Fault::DoubleMessage
            | Fault::DelayMessage
            | Fault::WriteFails
            | Fault::WriteUnknown => false,
        }
    }

    fn kill_process(&mut self, host: HostId) -> bool {
        if self.hosts[host].process.take().is_none() {
            return false;
        }
        self.note(|w| format!("{}: VM process killed", w.name(host)));
        self.channels_reset(host);
        let delay = 5 + self.rng.below(200);
        self.after(delay, Happening::AgentLooks { host });
        true
    }

    fn kill_qemu(&mut self, host: HostId) -> bool {
        let Some(qemu) = self.hosts[host].qemu.take() else {
            return false;
        };
        self.note(|w| format!("{}: QEMU killed", w.name(host)));
        self.guest_copy_gone(qemu.version);
        self.feed(host, Event::QemuDied);
        true
    }

    fn kill_agent(&mut self, host: HostId) -> bool {
        if !self.hosts[host].has_agent {
            return false;
        }
        self.note(|w| format!("{}: agent killed", w.name(host)));
        self.hosts[host].has_agent = false;
        let delay = 10 + self.rng.below(800);
        self.after(delay, Happening::AgentStarts { host });
        true
    }

    fn crash_for_a_while(&mut self, host: HostId) -> bool {
        if !self.crash(host) {
            return false;
        }
        let delay = 100 + self.rng.below(4000);
        self.after(delay, Happening::HostStarts { host });
        true
    }

    /// Power off: all that was not durable may or may not be.
    pub(crate) fn crash(&mut self, host: HostId) -> bool {
        if !self.hosts[host].is_up {
            return false;
        }
        self.note(|w| format!("{}: host crashed", w.name(host)));
        let reached_disk = self.rng.chance(500);
        let at = &mut self.hosts[host];
        at.is_up = false;
        at.has_agent = false;
        at.process = None;
        if reached_disk {
            at.disk.durable = at.disk.seen.clone();
        } else {
            at.disk.seen = at.disk.durable.clone();
        }
        let version = at.qemu.take().and_then(|q| q.version);
        self.guest_copy_gone(version);
        self.channels_reset(host);
        true
    }

    fn cut_link(&mut self, a: HostId) -> bool {
        let b = (a + 1) % HOSTS;
        if self.is_cut[a] {
            return false;
        }
        self.note(|w| format!("link {} - {} cut", w.name(a), w.name(b)));
        self.is_cut[a] = true;
        let delay = 50 + self.rng.below(3000);
        self.after(delay, Happening::LinkHeals { a });
        if self.rng.chance(500) {
            self.feed(a, Event::LinkLost);
            self.feed(b, Event::LinkLost);
        }
        true
    }

    fn guest_does(&mut self, host: HostId, event: Event) -> bool {
        let Some(qemu) = self.hosts[host].qemu.as_mut().filter(|q| q.running) else {
            return false;
        };
        if event != Event::GuestReset {
            qemu.running = false;
        }
        if event == Event::GuestShutdown {
            self.guest.died = true;
        }
        self.feed(host, event)
    }

    /// The peer's channels are reset, which it may or may not notice at once.
    fn channels_reset(&mut self, host: HostId) {
        for other in 0..HOSTS {
            if other != host && self.rng.chance(500) {
                self.feed(other, Event::LinkLost);
            }
        }
    }
}
