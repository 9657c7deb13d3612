//! Arbitrary bytes as a life of a core: whatever happens in whatever order, its own promises hold.
//!
//! Called by the fuzzer and by a test. Owns nothing. Refuses: nothing; that is the point.

use crate::core::VmCore;
use crate::event::{Action, Event, PeerMessage, Timer};
use crate::record::HostRecord;
use crate::state::Qemu;
use godwit_types::{Generation, HostName, MigrationId, VmName};

/// A promise that did not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("after {steps} steps: {what}")]
pub struct FuzzFinding {
    /// How far the input got.
    pub steps: usize,
    /// What went wrong.
    pub what: &'static str,
}

struct Input<'a> {
    bytes: std::slice::Iter<'a, u8>,
}

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        self.bytes.next().copied()
    }

    fn generation(&mut self) -> Option<Generation> {
        match self.byte()? {
            255 => Some(Generation(u64::MAX)),
            254 => Some(Generation(u64::MAX / 2)),
            small => Some(Generation(u64::from(small % 8))),
        }
    }

    fn host(&mut self) -> Option<HostName> {
        let names = ["here", "peer", "third"];
        let name = names.get(usize::from(self.byte()? % 3))?;
        HostName::new(*name).ok()
    }

    fn migration(&mut self) -> Option<MigrationId> {
        MigrationId::new(format!("m{}", self.byte()? % 3)).ok()
    }

    fn event(&mut self) -> Option<Event> {
        Some(match self.byte()? % 32 {
            0 => Event::Granted {
                generation: self.generation()?,
            },
            1 => Event::GrantedAfterSurvey {
                generation: self.generation()?,
                expect: self.generation()?,
            },
            2 => Event::SurveyRequested {
                level: self.generation()?,
            },
            3 => Event::HostRemoved { host: self.host()? },
            4 => Event::DeleteRequested,
            5 => Event::StartRequested,
            6 => Event::StopRequested,
            7 => Event::PauseRequested,
            8 => Event::ResumeRequested,
            9 => Event::MigrationBegan {
                migration: self.migration()?,
                to: self.host()?,
            },
            10 | 11 => Event::SwitchoverRequested,
            12 => Event::Stopped {
                attempt: self.generation()?,
            },
            13 => Event::LastPagesApplied {
                attempt: self.generation()?,
            },
            14 => Event::DeviceStateSent {
                attempt: self.generation()?,
            },
            15 => Event::PrepareIncoming {
                migration: self.migration()?,
                from: self.host()?,
            },
            16 => Event::Loaded {
                attempt: self.generation()?,
            },
            17 => Event::IncomingFailed,
            18 => Event::LinkLost,
            19 => Event::Timeout(Timer::Switchover),
            20 => Event::Timeout(Timer::Ask),
            21 => Event::Cancel,
            22 => Event::GuestShutdown,
            23 => Event::GuestHalted,
            24 => Event::QemuDied,
            25 => Event::OperatorResolve {
                run_here: self.byte()? % 2 == 0,
                confirm_fenced: self.host()?,
            },
            _ => Event::Message {
                from: self.host()?,
                message: self.message()?,
            },
        })
    }

    fn message(&mut self) -> Option<PeerMessage> {
        let (kind, migration, generation) = (self.byte()?, self.migration()?, self.generation()?);
        Some(match kind % 13 {
            0 => PeerMessage::Prepared {
                migration,
                highest: generation,
            },
            1 => PeerMessage::Ready {
                migration,
                generation,
            },
            2 => PeerMessage::Permit {
                migration,
                generation,
            },
            3 => PeerMessage::AskHolding {
                migration,
                generation,
            },
            4 => PeerMessage::Holding {
                migration,
                generation,
            },
            5 => PeerMessage::Confirmed { generation },
            6 => PeerMessage::Superseded {
                generation,
                by: self.generation()?,
            },
            7 => PeerMessage::Refused {
                migration,
                generation,
            },
            8 => PeerMessage::AskGift {
                migration,
                generation,
            },
            9 => PeerMessage::Undecided {
                migration,
                generation,
            },
            10 => PeerMessage::Withdrawn {
                migration,
                generation,
            },
            11 => PeerMessage::Abort { migration },
            _ => PeerMessage::Failed { migration },
        })
    }
}

/// The disk as far as this needs one: what a reader finds, and what a power cut leaves.
struct Life {
    core: VmCore,
    seen: HostRecord,
    durable: HostRecord,
    writing: Option<HostRecord>,
    qemu: Qemu,
}

/// Runs `data` as a sequence of events, write results and restarts of one core.
pub fn fuzz(data: &[u8]) -> Result<(), FuzzFinding> {
    let mut input = Input { bytes: data.iter() };
    let Some(mut life) = begin() else {
        return Ok(());
    };
    let mut steps = 0;
    while let Some(choice) = input.byte() {
        steps += 1;
        let step = life.step(choice, &mut input);
        match step {
            Ok(true) => {}
            Ok(false) => break,
            Err(what) => return Err(FuzzFinding { steps, what }),
        }
    }
    Ok(())
}

fn begin() -> Option<Life> {
    let record = HostRecord::absent(VmName::new("vm").ok()?);
    let host = HostName::new("here").ok()?;
    let (core, actions) = VmCore::recover(record.clone(), host, Qemu::Dead).ok()?;
    let mut life = Life {
        core,
        seen: record.clone(),
        durable: record,
        writing: None,
        qemu: Qemu::Dead,
    };
    life.carry_out(actions).ok()?;
    Some(life)
}

impl Life {
    /// One step; `false` when the input is used up.
    fn step(&mut self, choice: u8, input: &mut Input<'_>) -> Result<bool, &'static str> {
        let actions = match choice {
            0..=7 if self.writing.is_some() => self.fail_write(choice),
            8..=15 => self.restart(choice)?,
            16..=160 if self.writing.is_some() => self.finish_write(),
            _ => match input.event() {
                Some(event) => {
                    if event == Event::QemuDied {
                        self.qemu = Qemu::Dead;
                    }
                    self.core.handle(event)
                }
                None => return Ok(false),
            },
        };
        self.carry_out(actions).map(|()| true)
    }

    fn finish_write(&mut self) -> Vec<Action> {
        if let Some(record) = self.writing.take() {
            self.seen = record.clone();
            self.durable = record;
        }
        self.core.handle(Event::Persisted)
    }

    fn fail_write(&mut self, choice: u8) -> Vec<Action> {
        let record = self.writing.take();
        let unchanged = choice.is_multiple_of(2);
        if let Some(record) = record.filter(|_| !unchanged && choice % 4 == 1) {
            self.seen = record;
        }
        self.core.handle(Event::PersistFailed { unchanged })
    }

    /// The process, or with it the host, dies and another one begins.
    fn restart(&mut self, choice: u8) -> Result<Vec<Action>, &'static str> {
        if choice.is_multiple_of(2) {
            self.seen = self.durable.clone();
            self.qemu = Qemu::Dead;
        } else if let Some(record) = self.writing.take() {
            self.seen = record;
        }
        self.writing = None;
        let host = self.core.host.clone();
        let (core, actions) = VmCore::recover(self.seen.clone(), host, self.qemu)
            .map_err(|_| "a record that the core wrote is refused")?;
        self.core = core;
        Ok(actions)
    }

    fn carry_out(&mut self, actions: Vec<Action>) -> Result<(), &'static str> {
        let mut rest = actions.into_iter().peekable();
        while let Some(action) = rest.next() {
            match action {
                Action::Persist(record) => {
                    if rest.peek().is_some() {
                        return Err("an action follows a record in the same batch");
                    }
                    record
                        .check_follows(&self.seen)
                        .map_err(|_| "a record that must not be written")?;
                    self.writing = Some(record);
                }
                Action::Boot(permit) | Action::Cont(permit) => {
                    if self.durable.may_run() != Some(permit.generation()) {
                        return Err("a permit without a durable record");
                    }
                    self.qemu = Qemu::Running;
                }
                Action::KillQemu => self.qemu = Qemu::Dead,
                Action::StopGuest { .. } if self.qemu == Qemu::Running => self.qemu = Qemu::Paused,
                Action::Send { message, .. } => self.check_said(&message)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// What is said must be what the disk says.
    fn check_said(&self, message: &PeerMessage) -> Result<(), &'static str> {
        match message {
            PeerMessage::Permit { generation, .. } | PeerMessage::AskHolding { generation, .. }
                if self.durable.may_run().is_some() || *generation > self.durable.highest =>
            {
                Err("a gift is announced that is not durable")
            }
            PeerMessage::Holding { generation, .. } if self.durable.held < *generation => {
                Err("a generation is claimed that is not durably held")
            }
            PeerMessage::Refused { generation, .. } if self.durable.highest < *generation => {
                Err("a refusal is said that is not durable")
            }
            PeerMessage::Withdrawn { generation, .. } if self.durable.highest < *generation => {
                Err("a withdrawal is said that is not durable")
            }
            _ => Ok(()),
        }
    }
}
