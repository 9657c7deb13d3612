//! Which handler takes which event. Nothing is decided here but that.

use crate::core::VmCore;
use crate::event::{Event, PeerMessage, Timer};
use crate::record::Power;
use crate::state::Reaction;
use godwit_types::HostName;

impl VmCore {
    pub(crate) fn react(&self, event: Event) -> Reaction {
        match event {
            Event::Persisted | Event::PersistFailed { .. } => {
                Reaction::Ignore("nothing was being written")
            }
            Event::Granted { generation, expect } => self.on_granted(generation, expect),
            Event::SurveyRequested { level } => self.on_survey(level),
            Event::HostRemoved { host } => self.on_host_removed(&host),
            Event::GiftOvertaken { by, with_guest } => self.on_gift_overtaken(by, with_guest),
            Event::DeleteRequested => self.on_delete(),
            Event::StartRequested => self.on_start(),
            Event::StopRequested => self.on_stop(),
            Event::PauseRequested => self.on_pause(Power::Paused),
            Event::OutOfRoom => self.on_pause(Power::WaitsForRoom),
            Event::ResumeRequested => self.on_resume(),
            Event::MigrationBegan {
                migration,
                to,
                generation,
            } => self.on_migration_began(migration, to, generation),
            Event::SwitchoverRequested => self.on_switchover(),
            Event::Stopped { attempt } => self.on_stopped(attempt),
            Event::LastPagesApplied { attempt } => self.on_last_pages(attempt),
            Event::DeviceStateSent { attempt } => self.on_device_state(attempt),
            Event::PrepareIncoming {
                migration,
                from,
                generation,
            } => self.on_prepare(migration, from, generation),
            Event::Loaded { attempt } => self.on_loaded(attempt),
            Event::IncomingFailed => self.on_incoming_failed(),
            Event::Message { from, message } => self.on_message(&from, message),
            Event::LinkLost => self.on_link_lost(),
            Event::Timeout(Timer::Switchover) => self.on_switchover_timeout(),
            Event::Timeout(Timer::Ask) => self.on_ask_timeout(),
            Event::Cancel => self.on_cancel(),
            Event::GuestShutdown => self.on_guest_shutdown(),
            Event::GuestHalted => self.on_guest_halted(Power::Paused),
            Event::StillOutOfRoom => self.on_guest_halted(Power::WaitsForRoom),
            Event::GuestReset => self.on_guest_reset(),
            Event::QemuDied => self.on_qemu_died(),
            Event::OperatorResolve {
                run_here,
                confirm_fenced,
            } => self.on_operator_resolve(run_here, &confirm_fenced),
        }
    }

    fn on_message(&self, from: &HostName, message: PeerMessage) -> Reaction {
        match message {
            PeerMessage::Prepared { migration, highest } => {
                self.on_peer_prepared(from, &migration, highest)
            }
            PeerMessage::Ready {
                migration,
                generation,
            } => self.on_peer_ready(from, &migration, generation),
            PeerMessage::AskGift {
                migration,
                generation,
            } => self.on_asked_gift(from, &migration, generation),
            PeerMessage::Permit {
                migration,
                generation,
            }
            | PeerMessage::AskHolding {
                migration,
                generation,
            } => self.on_gift(from, &migration, generation),
            PeerMessage::Holding {
                migration,
                generation,
            } => self.on_peer_holding(from, &migration, generation),
            PeerMessage::Confirmed { generation } => self.on_peer_confirmed(from, generation),
            PeerMessage::Superseded { generation, by } => {
                self.on_peer_superseded(from, generation, by)
            }
            PeerMessage::Refused {
                migration,
                generation,
            } => self.on_peer_refused(from, &migration, generation),
            PeerMessage::Undecided { .. } => self.on_peer_undecided(),
            PeerMessage::Withdrawn {
                migration,
                generation,
            } => self.on_peer_withdrawn(from, &migration, generation),
            PeerMessage::Abort { migration, .. } => self.on_peer_aborted(from, &migration),
            PeerMessage::Failed { migration, .. } => self.on_peer_failed(from, &migration),
        }
    }
}
