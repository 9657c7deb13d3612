//! What a durable record says of a migration whose process is gone.
//!
//! Pure. Nobody else says whether a migration is over: a report may have been left open by a death or by a full disk.
//! Refuses: to call a migration over that the record still waits to settle, and to guess how an old one ended.

use crate::record::{HostRecord, Phase};
use godwit_types::migration::{Outcome, Side};
use godwit_types::{Generation, MigrationId};

const DIED: &str = "the VM process of this host ended during the migration";
const UNKNOWN: &str = "it is over; how it ended is not on record on this host any more";

/// How a migration ended, and why where it did not complete.
pub type End = (Outcome, Option<&'static str>);

const ARRIVED: End = (Outcome::Completed, None);
const STAYED: End = (Outcome::Failed, Some(DIED));
const FORGOTTEN: End = (Outcome::Failed, Some(UNKNOWN));

impl HostRecord {
    /// How a migration ended by this record alone; none while the record waits to settle it. `is_last` says that no
    /// later migration of the VM was prepared or begun on this host. Ask only where no VM process follows it.
    pub fn end_of(&self, id: &MigrationId, side: Side, is_last: bool) -> Option<End> {
        match &self.phase {
            Phase::Stopping { migration, .. }
            | Phase::Gave { migration, .. }
            | Phase::Incoming { migration, .. }
            | Phase::Ready { migration, .. }
                if migration == id =>
            {
                None
            }
            Phase::Moved { migration, .. } if migration == id => Some(ARRIVED),
            Phase::Refused { migration, .. } if migration == id => Some(STAYED),
            Phase::Holds {
                unconfirmed: Some(with),
                ..
            } if with.migration == *id => Some(ARRIVED),
            // What the last migration left behind is its work.
            Phase::Holds { .. } if is_last => Some(match side {
                Side::Source => STAYED,
                Side::Destination => ARRIVED,
            }),
            Phase::Absent if is_last && side == Side::Destination && self.held == Generation(0) => {
                Some(STAYED)
            }
            Phase::Absent
            | Phase::Holds { .. }
            | Phase::Stopping { .. }
            | Phase::Gave { .. }
            | Phase::Moved { .. }
            | Phase::Incoming { .. }
            | Phase::Ready { .. }
            | Phase::Refused { .. } => Some(FORGOTTEN),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Handover, Power};
    use godwit_types::{HostName, VmName};

    fn id(text: &str) -> MigrationId {
        MigrationId::new(text).unwrap()
    }

    fn end(phase: &Phase, side: Side, is_last: bool) -> Option<Outcome> {
        let record = HostRecord {
            phase: phase.clone(),
            ..HostRecord::absent(VmName::new("web").unwrap())
        };
        record.end_of(&id("m"), side, is_last).map(|end| end.0)
    }

    fn holds(unconfirmed: Option<&str>) -> Phase {
        Phase::Holds {
            generation: Generation(2),
            power: Power::On,
            unconfirmed: unconfirmed.map(|migration| Handover {
                migration: id(migration),
                peer: HostName::new("a").unwrap(),
            }),
        }
    }

    #[test]
    fn a_migration_is_over_as_the_record_says_and_open_while_the_record_waits_for_it() {
        use Outcome::{Completed, Failed};
        use Side::{Destination, Source};
        let (generation, to) = (Generation(2), HostName::new("b").unwrap());
        let gave = |text| Phase::Gave {
            generation,
            migration: id(text),
            to: to.clone(),
        };
        let moved = |text| Phase::Moved {
            generation,
            migration: id(text),
            to: to.clone(),
        };
        let refused = Phase::Refused {
            generation,
            migration: id("m"),
            from: to.clone(),
        };
        let incoming = Phase::Incoming {
            migration: id("m"),
            from: to.clone(),
        };
        let wanted = [
            (gave("m"), Source, None),
            (gave("n"), Source, Some(Failed)),
            (moved("m"), Source, Some(Completed)),
            (moved("n"), Source, Some(Failed)),
            (incoming, Destination, None),
            (refused, Destination, Some(Failed)),
            (holds(Some("m")), Destination, Some(Completed)),
            (holds(None), Destination, Some(Completed)),
            (holds(None), Source, Some(Failed)),
            (Phase::Absent, Destination, Some(Failed)),
        ];
        for (phase, side, outcome) in wanted {
            assert_eq!(end(&phase, side, true), outcome, "{phase:?} {side:?}");
        }
        let later = end(&holds(None), Destination, false);
        assert_eq!(later, Some(Failed), "what came later brought the VM");
        assert_eq!(end(&gave("m"), Source, false), None);
    }
}
