//! The permit: the only thing that lets anybody send `cont` to a QEMU.
//!
//! Minted by the core alone, from a record that is known to be durable. Cannot be cloned, stored or sent.

use crate::record::HostRecord;
use godwit_types::{Generation, VmName};

/// The right to let the guest run once, here, now. Consumed by value by the one function that sends `cont`.
///
/// ```compile_fail
/// # fn f(permit: godwit_ownership::RunPermit) {
/// let twice = permit.clone();
/// # }
/// ```
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a permit that is dropped leaves the guest stopped"]
pub struct RunPermit {
    vm: VmName,
    generation: Generation,
}

impl RunPermit {
    /// A permit, if the durable record says that this host may run the VM.
    pub(crate) fn mint(durable: &HostRecord) -> Option<Self> {
        let generation = durable.may_run()?;
        Some(Self {
            vm: durable.vm.clone(),
            generation,
        })
    }

    /// Mints without looking at the record: the fault that the simulator must catch.
    #[cfg(feature = "planted-faults")]
    pub(crate) fn forge(vm: VmName, generation: Generation) -> Self {
        Self { vm, generation }
    }

    /// The generation under which the guest runs.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    pub fn vm(&self) -> &VmName {
        &self.vm
    }
}
