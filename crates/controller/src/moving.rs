//! VMs that nobody begins to move: somebody is beginning to already, or the controller asks their hosts something.
//!
//! Owns the marks; one ends with its value. Refuses: a second one of the same VM.

use godwit_types::VmName;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Why a VM is marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// It is about to move.
    Moves,
    /// The controller asks by itself who holds it, which ends soon. It has the VM's turn meanwhile.
    IsAsked,
}

/// The VMs that are marked now.
#[derive(Debug, Default)]
pub struct Marks(Mutex<BTreeMap<VmName, Why>>);

/// Marks a VM until dropped.
pub struct Mark<'a> {
    marks: &'a Marks,
    vm: VmName,
}

impl Drop for Mark<'_> {
    fn drop(&mut self) {
        self.marks.all().remove(&self.vm);
    }
}

impl Marks {
    fn all(&self) -> std::sync::MutexGuard<'_, BTreeMap<VmName, Why>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks a VM; says why that cannot be.
    pub fn mark(&self, vm: &VmName, why: Why) -> Result<Mark<'_>, Why> {
        let mut all = self.all();
        if let Some(why) = all.get(vm) {
            return Err(*why);
        }
        all.insert(vm.clone(), why);
        let (marks, vm) = (self, vm.clone());
        Ok(Mark { marks, vm })
    }
}
