//! A host's durable record, in one word. Pure.

use godwit_ownership::{HostRecord, Phase, Power};
use godwit_types::site::Claim;

/// What a host's record of a VM says to the rest of the site.
pub fn claim_of(record: &HostRecord) -> Claim {
    match &record.phase {
        Phase::Absent | Phase::Refused { .. } => Claim::No,
        Phase::Holds {
            generation, power, ..
        } => Claim::Holds {
            generation: *generation,
            on: *power != Power::Off,
        },
        Phase::Stopping { generation, .. } => Claim::Holds {
            generation: *generation,
            on: true,
        },
        Phase::Gave { generation, to, .. } => Claim::Gave {
            generation: *generation,
            to: to.clone(),
        },
        Phase::Moved { generation, to, .. } => Claim::Moved {
            generation: *generation,
            to: to.clone(),
        },
        Phase::Incoming { from, .. } => Claim::Receiving { from: from.clone() },
        Phase::Ready {
            generation, from, ..
        } => Claim::Promised {
            generation: *generation,
            from: from.clone(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::VmName;

    #[test]
    fn a_record_and_its_claim_agree_on_who_may_hold() {
        let mut record = HostRecord::absent(VmName::new("web").expect("a name"));
        assert_eq!(claim_of(&record), Claim::No);
        record.phase = Phase::Holds {
            generation: Default::default(),
            power: Power::Off,
            unconfirmed: None,
        };
        assert!(claim_of(&record).may_hold() && record.may_hold());
    }
}
