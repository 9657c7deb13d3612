//! Who may run the VM: messages between hosts, the file of the durable record, and the core under any events.
//!
//! Owns nothing. The core is driven by an input read as decisions: which event comes next, whether a write lands, fails
//! or is cut by a crash of the process or of the host. Judged at every step: a permit is backed by what is on the disk,
//! generations never go back, nothing is said that is not durable, and every crash leaves a record that a successor
//! accepts.

use super::Decisions;
use crate::outcome::{self, Outcome};
use godwit_ownership::{
    Action, Event, EventKind, HostRecord, PeerMessage, Phase, Qemu, Reason, Timer, VmCore,
};
use godwit_store::frame;
use godwit_types::{Generation, HostName, MigrationId, VmName};

pub fn peer_message(input: &[u8]) -> Outcome {
    let judged: Result<PeerMessage, _> = serde_json::from_slice(input);
    if let Ok(message) = &judged {
        let again = serde_json::to_vec(message).unwrap_or_default();
        let again: Option<PeerMessage> = serde_json::from_slice(&again).ok();
        assert_eq!(
            again.as_ref(),
            Some(message),
            "a message changed on the way"
        );
    }
    outcome::of_result(&judged, |message| outcome::of(message.kind()))
}

pub fn peer_message_seeds() -> Vec<Vec<u8>> {
    (0..13)
        .filter_map(|kind| message(kind, migration(1)?, Generation(2)))
        .filter_map(|message| serde_json::to_vec(&message).ok())
        .collect()
}

/// First byte: how the rest reaches the decoder (as a file, as the content of a sound file, or with one bit turned).
pub fn record_file(input: &[u8]) -> Outcome {
    let mut decisions = Decisions(input);
    let mode = decisions.byte() % 3;
    if mode == 0 {
        return read_file(decisions.0);
    }
    let turned = usize::from(decisions.byte()) << 3 | usize::from(decisions.byte() & 7);
    let Some(mut file) = frame::encode(decisions.0) else {
        return 0;
    };
    assert_eq!(
        frame::decode(&file),
        Ok(decisions.0),
        "a sound file is refused"
    );
    let place = turned / 8 % file.len().max(1);
    match file.get_mut(place) {
        Some(byte) if mode == 2 => {
            *byte ^= 1 << (turned % 8);
            let judged = frame::decode(&file);
            assert!(judged.is_err(), "a damaged file is accepted");
            outcome::of_result(&judged, |_| 0)
        }
        _ => read_file(&file),
    }
}

fn read_file(file: &[u8]) -> Outcome {
    let judged = frame::decode(file);
    let Ok(payload) = judged else {
        return outcome::of_result(&judged, |_| 0);
    };
    assert_eq!(
        frame::encode(payload).as_deref(),
        Some(file),
        "a file has two forms"
    );
    let record: Result<HostRecord, _> = serde_json::from_slice(payload);
    let Ok(record) = record else {
        return outcome::of_result(&record, |_| 0);
    };
    let judged = record.check();
    if judged.is_ok() {
        assert!(record.held <= record.highest, "holds more than the highest");
        let recovered = host(0).map(|host| VmCore::recover(record, host, Qemu::Dead));
        assert!(
            matches!(recovered, Some(Ok(_))),
            "a sound record is not taken up"
        );
    }
    outcome::of_result(&judged, |()| 1)
}

pub fn record_file_seeds() -> Vec<Vec<u8>> {
    let texts = [
        r#"{"format":1,"vm":"web","highest":0,"held":0,"phase":{"phase":"absent"}}"#,
        r#"{"format":1,"vm":"web","highest":4,"held":4,"phase":{"phase":"holds","generation":4,"power":"on","unconfirmed":{"migration":"m1","peer":"b"}}}"#,
        r#"{"format":1,"vm":"web","highest":5,"held":4,"phase":{"phase":"gave","generation":5,"migration":"m1","to":"b"}}"#,
        r#"{"format":1,"vm":"web","highest":5,"held":4,"phase":{"phase":"stopping","generation":4,"next":5,"migration":"m1","to":"b"}}"#,
    ];
    let whole = texts
        .iter()
        .filter_map(|text| frame::encode(text.as_bytes()));
    let whole: Vec<_> = whole.map(|file| [&[0][..], &file].concat()).collect();
    let modes = [[1, 0, 0], [2, 0, 3], [2, 12, 1], [2, 40, 7]];
    let parts = texts
        .iter()
        .flat_map(|text| modes.map(|mode| [&mode[..], text.as_bytes()].concat()));
    whole.into_iter().chain(parts).collect()
}

fn host(index: u8) -> Option<HostName> {
    HostName::new(["a", "b", "c"][usize::from(index % 3)]).ok()
}

fn migration(index: u8) -> Option<MigrationId> {
    MigrationId::new(["m1", "m2", "m3"][usize::from(index % 3)]).ok()
}

fn message(kind: u8, migration: MigrationId, generation: Generation) -> Option<PeerMessage> {
    Some(match kind {
        0 => PeerMessage::Ready {
            migration,
            generation,
        },
        1 => PeerMessage::Permit {
            migration,
            generation,
        },
        2 => PeerMessage::AskHolding {
            migration,
            generation,
        },
        3 => PeerMessage::Holding {
            migration,
            generation,
        },
        4 => PeerMessage::Confirmed { generation },
        5 => PeerMessage::Superseded {
            generation,
            by: Generation(generation.0.saturating_add(1)),
        },
        6 => PeerMessage::Refused {
            migration,
            generation,
        },
        7 => PeerMessage::AskGift {
            migration,
            generation,
        },
        8 => PeerMessage::Undecided {
            migration,
            generation,
        },
        9 => PeerMessage::Withdrawn {
            migration,
            generation,
        },
        10 => PeerMessage::Abort {
            migration,
            reason: Some(Reason::clipped("nobody wants it")),
            cancelled: true,
            has_disks: true,
        },
        11 => PeerMessage::Failed {
            migration,
            reason: Some(Reason::clipped("its disk is full")),
        },
        12 => PeerMessage::Prepared {
            migration,
            highest: generation,
        },
        _ => return None,
    })
}

/// Most bytes of an input that decide what happens to the core.
const STORY_LEN_MAX: usize = 512;

/// One host with its disk.
struct Host {
    core: VmCore,
    /// What a reader finds.
    disk: HostRecord,
    /// What a power cut leaves: behind `disk` after a write that failed, or whose process died, and that can still be
    /// read.
    durable: HostRecord,
    /// Events handed over since the last write began.
    waiting: usize,
    /// The record being written.
    writing: Option<HostRecord>,
    /// The highest generation that may be on the disk.
    highest: Generation,
    qemu: Qemu,
    last: Option<EventKind>,
}

pub fn core(input: &[u8]) -> Outcome {
    // Longer stories tell nothing new and only take time.
    let input = input.get(..STORY_LEN_MAX).unwrap_or(input);
    let mut decisions = Decisions(input);
    let Some(mut host) = Host::new() else {
        return 0;
    };
    while !decisions.is_over() {
        host.turn(&mut decisions);
    }
    let event = host.last.map(outcome::of).unwrap_or_default();
    outcome::of(host.core.state_name().name()) ^ event.rotate_left(7)
}

impl Host {
    fn new() -> Option<Self> {
        let record = HostRecord::absent(VmName::new("web").ok()?);
        let (core, actions) = VmCore::recover(record.clone(), host(0)?, Qemu::Dead).ok()?;
        let mut new = Self {
            core,
            durable: record.clone(),
            disk: record,
            waiting: 0,
            writing: None,
            highest: Generation(0),
            qemu: Qemu::Dead,
            last: None,
        };
        new.carry_out(actions);
        new.written();
        Some(new)
    }

    /// Lets one thing happen.
    fn turn(&mut self, decisions: &mut Decisions<'_>) {
        let kind = decisions.byte();
        match (kind % 32, self.writing.is_some()) {
            (0 | 1, true) => self.write_failed(kind.is_multiple_of(32)),
            (2, _) => self.crash(decisions.byte()),
            // While a record is written most turns end that; some let another event come first.
            (_, true) if kind < 0xc0 => self.written(),
            _ => {
                if let Some(event) = self.event(kind % 32, decisions) {
                    self.feed(event);
                }
            }
        }
    }

    fn feed(&mut self, event: Event) {
        self.last = Some(event.kind());
        self.waiting += 1;
        match &event {
            Event::QemuDied => self.qemu = Qemu::Dead,
            Event::Stopped { .. } | Event::GuestHalted | Event::StillOutOfRoom
                if self.qemu == Qemu::Running =>
            {
                self.qemu = Qemu::Paused
            }
            _ => {}
        }
        let actions = self.core.handle(event);
        self.carry_out(actions);
    }

    fn written(&mut self) {
        if let Some(record) = self.writing.take() {
            self.disk = record.clone();
            self.durable = record;
            self.feed(Event::Persisted);
        }
    }

    fn write_failed(&mut self, unchanged: bool) {
        if let Some(record) = self.writing.take() {
            if !unchanged {
                self.disk = record;
            }
            self.feed(Event::PersistFailed { unchanged });
        }
    }

    /// The process dies, or the host with it; a successor finds the old or the new record and QEMU as it was, or dead.
    fn crash(&mut self, how: u8) {
        let (landed, host_too) = (how & 1 == 1, how & 4 == 4);
        if let Some(record) = self.writing.take().filter(|_| landed) {
            self.disk = record;
        }
        if how & 2 == 2 || host_too {
            self.qemu = Qemu::Dead;
        }
        match (host_too, landed) {
            // What can be read outlives the process, and need not outlive the host.
            (false, _) => {}
            (true, true) => self.durable = self.disk.clone(),
            (true, false) => self.disk = self.durable.clone(),
        }
        // What was being written and did not land is known to nobody any more.
        self.highest = self.disk.highest;
        self.waiting = 0;
        let successor = host(0).map(|name| VmCore::recover(self.disk.clone(), name, self.qemu));
        let Some(Ok((core, actions))) = successor else {
            panic!("a successor does not take up the record {:?}", self.disk);
        };
        self.core = core;
        self.carry_out(actions);
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        let count = actions.len();
        assert!(
            count <= 32 * (1 + self.waiting),
            "{} events lead to {count} actions",
            self.waiting
        );
        let last = actions.last();
        if !matches!(last, Some(Action::Persist(_))) && self.writing.is_none() {
            self.waiting = 0;
        }
        for (index, action) in actions.into_iter().enumerate() {
            match action {
                Action::Persist(record) => {
                    assert!(
                        index + 1 == count,
                        "something follows a write that has not landed"
                    );
                    self.begin_write(record);
                }
                Action::Boot(permit) | Action::Cont(permit) => {
                    let backed = Some(permit.generation());
                    assert_eq!(backed, self.disk.may_run(), "a permit without a record");
                    assert_eq!(backed, self.durable.may_run(), "a permit too early");
                    self.qemu = Qemu::Running;
                }
                Action::KillQemu => self.qemu = Qemu::Dead,
                Action::StopGuest { attempt: None } => self.qemu = Qemu::Paused,
                Action::Send { message, .. } => self.check_word(&message),
                _ => {}
            }
        }
    }

    fn begin_write(&mut self, record: HostRecord) {
        assert!(self.writing.is_none(), "two writes at once");
        let judged = record.check_follows(&self.disk);
        assert!(judged.is_ok(), "{judged:?}");
        assert!(record.highest >= self.highest, "a generation is forgotten");
        self.highest = record.highest;
        self.writing = Some(record);
    }

    /// What is said to the peer is durable.
    fn check_word(&self, message: &PeerMessage) {
        assert!(
            backs(&self.durable, message),
            "{message:?} said with {:?}",
            self.durable
        );
    }

    fn event(&self, kind: u8, decisions: &mut Decisions<'_>) -> Option<Event> {
        Some(match kind {
            3 | 4 => Event::Granted {
                generation: self.generation(decisions),
                expect: self.generation(decisions),
            },
            5 => Event::SurveyRequested {
                level: self.generation(decisions),
            },
            6 => Event::HostRemoved {
                host: host(decisions.byte())?,
            },
            7 => Event::DeleteRequested,
            8 => Event::StartRequested,
            9 => Event::StopRequested,
            10 => Event::PauseRequested,
            11 => Event::ResumeRequested,
            12 => Event::MigrationBegan {
                migration: migration(decisions.byte())?,
                to: host(decisions.byte())?,
                generation: self.generation(decisions),
            },
            13 => Event::SwitchoverRequested,
            14 => Event::Stopped {
                attempt: self.generation(decisions),
            },
            15 => Event::LastPagesApplied {
                attempt: self.generation(decisions),
            },
            16 => Event::DeviceStateSent {
                attempt: self.generation(decisions),
            },
            17 => Event::PrepareIncoming {
                migration: migration(decisions.byte())?,
                from: host(decisions.byte())?,
                generation: self.generation(decisions),
            },
            18 => Event::Loaded {
                attempt: self.generation(decisions),
            },
            19 => Event::IncomingFailed,
            20 => Event::LinkLost,
            21 => Event::Timeout(Timer::Switchover),
            22 => Event::Timeout(Timer::Ask),
            23 => Event::Cancel,
            24 => guest_event(decisions.byte())?,
            25 => Event::QemuDied,
            26 => Event::OperatorResolve {
                run_here: decisions.byte() & 1 == 0,
                confirm_fenced: host(decisions.byte())?,
            },
            27..=30 => {
                let what = decisions.byte();
                let message =
                    message(what % 13, migration(what / 13)?, self.generation(decisions))?;
                Event::Message {
                    from: host(decisions.byte())?,
                    message,
                }
            }
            31 => Event::GiftOvertaken {
                by: self.generation(decisions),
                with_guest: decisions.byte() & 1 == 0,
            },
            _ => return None,
        })
    }

    /// A generation near those that matter; now and then the last there is.
    fn generation(&self, decisions: &mut Decisions<'_>) -> Generation {
        let near = self.highest.0;
        Generation(match decisions.byte() % 16 {
            0..=6 => near,
            7..=10 => near.saturating_add(1),
            11 => near.saturating_sub(1),
            12 => self.disk.held.0,
            13 => near.saturating_add(u64::from(decisions.byte())),
            14 => u64::from(decisions.byte()),
            _ => u64::MAX,
        })
    }
}

/// Whether a host with this record may say that.
fn backs(record: &HostRecord, message: &PeerMessage) -> bool {
    match message {
        PeerMessage::Permit { generation, .. } | PeerMessage::AskHolding { generation, .. } => {
            // `Moved` is written after `Gave`, of the same generation: a late question gets the same answer.
            matches!(
                &record.phase,
                Phase::Gave { generation: given, .. } | Phase::Moved { generation: given, .. }
                    if given == generation
            )
        }
        PeerMessage::Ready { generation, .. } => {
            matches!(&record.phase, Phase::Ready { generation: promised, .. } if promised == generation)
        }
        PeerMessage::Holding { generation, .. } => record.held >= *generation,
        PeerMessage::Refused { generation, .. } => {
            record.highest >= *generation && record.held != *generation
        }
        PeerMessage::Withdrawn { generation, .. } => record.highest >= *generation,
        _ => true,
    }
}

/// Byte 31 ends a write that is under way and means nothing otherwise.
pub fn core_seeds() -> Vec<Vec<u8>> {
    let land = 31;
    let granted = [3, 7, 0, land, 8, land];
    let given: Vec<u8> = [
        &granted[..],
        &[12, 0, 1, 7, 13, land, 14, 0, 15, 0, 16, 0],
        &[27, 0, 0, 1, land],
    ]
    .concat();
    let held = [&given[..], &[27, 3, 0, 1, land]].concat();
    let refused = [&given[..], &[27, 6, 0, 1, land]].concat();
    let doubt = [&given[..], &[21, 22, 20, 2, 0, land, 26, 0, 1, land]].concat();
    let received = vec![
        17, 0, 1, 7, land, 18, 7, land, 27, 1, 0, 1, land, 27, 4, 0, 1, land,
    ];
    // The process dies while it writes, then its host before the successor has written that again.
    let lost = vec![3, 7, 0, 2, 1, 2, 4, 3, 7, 0, land];
    vec![
        granted.to_vec(),
        given,
        held,
        refused,
        doubt,
        lost,
        received,
    ]
}

/// What a guest does by itself.
fn guest_event(which: u8) -> Option<Event> {
    let all = [
        Event::GuestShutdown,
        Event::GuestHalted,
        Event::GuestReset,
        Event::OutOfRoom,
        Event::StillOutOfRoom,
    ];
    let count = all.len();
    all.into_iter().nth(usize::from(which) % count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use godwit_ownership::{Power, StateName};

    fn run(input: &[u8]) -> Host {
        let mut decisions = Decisions(input);
        let mut host = Host::new().expect("valid names");
        while !decisions.is_over() {
            host.turn(&mut decisions);
        }
        host
    }

    #[test]
    fn seeds_reach_both_ends_of_a_handover() {
        let names: Vec<_> = core_seeds()
            .iter()
            .map(|seed| run(seed).core.state_name())
            .collect();
        for name in [StateName::Running, StateName::Gave, StateName::Moved] {
            assert!(names.contains(&name), "{name:?} is not in {names:?}");
        }
        let received = core_seeds().pop().expect("seeds");
        let disk = run(&received).disk;
        assert!(disk.may_run().is_some(), "{disk:?}");
    }

    /// A small generator, so that the test is the same everywhere.
    fn noise(seed: u64) -> Vec<u8> {
        let mut rng = Rng::new(seed);
        (0..STORY_LEN_MAX).map(|_| rng.byte()).collect()
    }

    #[test]
    fn no_sequence_of_events_breaks_a_promise() {
        for seed in 0..20_000 {
            core(&noise(seed));
        }
    }

    #[test]
    fn what_outlives_the_process_and_not_the_host_is_written_again_before_it_counts() {
        // Granted, and the process dies while that is written; its successor reads it, and the host dies too.
        let host = run(&[3, 7, 0, 2, 1]);
        assert_eq!(host.disk.may_run(), Some(Generation(1)));
        assert_eq!(host.durable.may_run(), None);
        let host = run(&[3, 7, 0, 2, 1, 2, 4]);
        assert_eq!(host.disk.may_run(), None);
    }

    #[test]
    fn a_power_is_kept() {
        let running = run(&core_seeds()[0]);
        assert!(matches!(
            running.disk.phase,
            Phase::Holds {
                power: Power::On,
                ..
            }
        ));
    }
}
