//! What people read in a log of a record's phase and of a status.
//!
//! Owns nothing. Refuses: nothing; what a host does follows from the values, never from these words.

use crate::event::Status;
use crate::record::{Phase, Power};
use std::fmt;

impl fmt::Display for Power {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::On => "to run",
            Self::Paused => "paused",
            Self::WaitsForRoom => "to run once its disk has room",
            Self::Off => "powered off",
        })
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("not here"),
            Self::Holds {
                generation,
                power,
                unconfirmed,
            } => {
                write!(f, "held at generation {generation}, {power}")?;
                match unconfirmed {
                    Some(with) => write!(f, ", not yet confirmed to {}", with.peer),
                    None => Ok(()),
                }
            }
            Self::Stopping {
                generation,
                next,
                to,
                ..
            } => write!(
                f,
                "held at generation {generation}, stopped to give {next} to {to}"
            ),
            Self::Gave { generation, to, .. } => {
                write!(f, "generation {generation} given to {to}")
            }
            Self::Moved { generation, to, .. } => {
                write!(f, "generation {generation} moved to {to}")
            }
            Self::Incoming { from, .. } => write!(f, "coming from {from}"),
            Self::Ready {
                generation, from, ..
            } => write!(f, "ready to take generation {generation} from {from}"),
            Self::Refused {
                generation, from, ..
            } => write!(f, "generation {generation} of {from} refused"),
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("not here"),
            Self::Off => f.write_str("powered off"),
            Self::Running { generation } => write!(f, "running at generation {generation}"),
            Self::Paused => f.write_str("paused"),
            Self::Migrating { migration } => write!(f, "moving away by {migration}"),
            Self::SwitchingOver { migration } => write!(f, "switching over by {migration}"),
            Self::Incoming { migration } => write!(f, "coming by {migration}"),
            Self::InDoubt {
                generation,
                peer,
                command,
            } => write!(
                f,
                "in doubt: only {peer} knows of generation {generation}; '{command}' ends that"
            ),
            Self::Down { reason } => write!(f, "down: {reason}"),
            Self::Moved { to } => write!(f, "moved to {to}"),
            Self::JournalFailed => f.write_str("its journal cannot be written"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Handover;
    use godwit_types::{Generation, HostName, MigrationId};

    #[test]
    fn a_phase_and_a_status_are_told_in_words() {
        let peer = HostName::new("b").unwrap();
        let migration = MigrationId::new("m-1").unwrap();
        let holds = |unconfirmed| Phase::Holds {
            generation: Generation(5),
            power: Power::On,
            unconfirmed,
        };
        assert_eq!(holds(None).to_string(), "held at generation 5, to run");
        let with = Handover {
            migration: migration.clone(),
            peer: peer.clone(),
        };
        let unconfirmed = "held at generation 5, to run, not yet confirmed to b";
        assert_eq!(holds(Some(with)).to_string(), unconfirmed);
        let gave = Phase::Gave {
            generation: Generation(6),
            migration: migration.clone(),
            to: peer.clone(),
        };
        assert_eq!(gave.to_string(), "generation 6 given to b");
        let moving = Status::Migrating { migration };
        assert_eq!(moving.to_string(), "moving away by m-1");
        let in_doubt = Status::InDoubt {
            generation: Generation(6),
            peer,
            command: "godwit vm resolve web".into(),
        };
        let words = "in doubt: only b knows of generation 6; 'godwit vm resolve web' ends that";
        assert_eq!(in_doubt.to_string(), words);
    }
}
