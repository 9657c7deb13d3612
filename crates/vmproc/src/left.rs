//! A QEMU that a predecessor left: its memory and its disks, which it needs before it is asked anything, and kept over as many
//! questions as it takes until it answers.
//!
//! Owns both until whoever takes QEMU over does. Refuses: memory that is not as long as it has to be.

use crate::adoption::{Known, lock};
use crate::disks::Disks;
use crate::files::{Paths, QemuIdentity};
use crate::hypervisor::{Hyper, open_ram};
use crate::renewal::Handed;
use crate::variables::Variables;
use godwit_guestmem::RamFile;
use godwit_qemu::machine::RunState;
use godwit_types::host_api::VmProcessConfig;
use godwit_types::vm::VmSpec;
use godwit_types::{ApiError, Generation};
use std::sync::{Arc, Mutex};

/// What belongs to a QEMU with this number.
type Parts = (u64, Arc<RamFile>, Disks);

/// A VM whose QEMU is to be taken over.
pub(crate) struct Left {
    config: VmProcessConfig,
    paths: Paths,
    /// How much memory the VM's description gives it, in bytes.
    described: Option<u64>,
    /// Whether the VM is described with disks that are served.
    has_disks: bool,
    /// The generation under which its guest may run here, as the record says.
    held: Option<Generation>,
    /// Whether its QEMU has UEFI variables.
    has_variables: bool,
    parts: Mutex<Option<Parts>>,
    /// What the program before this one handed over of its disks.
    handed: Handed,
}

impl Left {
    pub(crate) fn new(known: &Known<'_>) -> Arc<Self> {
        let serves = |spec: &VmSpec| spec.serves_disks() && !spec.disks.is_empty();
        Arc::new(Self {
            has_disks: known.spec.is_some_and(serves),
            handed: known.handed.clone(),
            ..Self::stray(known)
        })
    }

    /// One beside it, which is only looked at.
    pub(crate) fn stray(known: &Known<'_>) -> Self {
        Self {
            config: known.config.clone(),
            paths: known.paths.clone(),
            described: known.spec.map(VmSpec::memory_bytes),
            has_disks: false,
            held: known.record.may_run(),
            has_variables: known.spec.is_some_and(VmSpec::has_variables),
            parts: Mutex::default(),
            handed: Handed::default(),
        }
    }

    pub(crate) fn attempt(
        &self,
        identity: &QemuIdentity,
    ) -> Result<(Box<Hyper>, RunState), ApiError> {
        let (_, ram, disks) = self.parts(identity)?;
        disks.mend();
        let variables = Variables::go_on(&self.paths, self.has_variables);
        let taken = Hyper::take_over(&self.paths, identity, (ram, disks, variables));
        taken.map(|(hyper, state)| (Box::new(hyper), state))
    }

    /// Serves what could not be served, also where nobody takes QEMU over.
    pub(crate) fn mend(&self) {
        let parts = lock(&self.parts);
        if let Some((_, _, disks)) = parts.as_ref() {
            disks.mend();
        }
    }

    /// QEMU is gone, and with it who needs its disks.
    pub(crate) fn end(&self) {
        let parts = lock(&self.parts);
        if let Some((_, _, disks)) = parts.as_ref() {
            disks.end();
        }
    }

    fn parts(&self, identity: &QemuIdentity) -> Result<Parts, ApiError> {
        let mut parts = lock(&self.parts);
        if let Some(parts) = parts.as_ref().filter(|parts| parts.0 == identity.launch) {
            return Ok(parts.clone());
        }
        // The former one's disks end first: they may be on the same images.
        *parts = None;
        let ram = Arc::new(open_ram(&self.paths, identity, self.described)?);
        let disks = Disks::go_on(
            &self.config,
            &self.paths,
            identity.launch,
            &ram,
            (self.has_disks, self.held),
            self.handed.take(),
        )?;
        Ok(parts.insert((identity.launch, ram, disks)).clone())
    }
}
