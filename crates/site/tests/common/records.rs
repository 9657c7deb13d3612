//! What a host says of a VM that it holds.

use godwit_types::site::{Claim, RecordSaid};
use godwit_types::{Generation, VmName};

/// Its guest is on, or should be.
pub fn holds(vm: VmName, generation: u64) -> RecordSaid {
    let generation = Generation(generation);
    RecordSaid {
        vm,
        highest: generation,
        claim: Claim::Holds {
            generation,
            on: true,
        },
        may_live: true,
        images: Vec::new(),
    }
}
