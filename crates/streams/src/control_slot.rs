//! Where the VM's thread finds the control channel of the present connection set, to send ownership messages on.
//!
//! Filled and emptied by the migration's driver. A message that finds it empty travels through the agents alone.

use crate::control::SharedControl;
use serde::Serialize;
use std::sync::{Arc, Mutex, PoisonError};

/// Holds the channel of the present set, if there is one.
#[derive(Debug, Clone, Default)]
pub struct ControlSlot(Arc<Mutex<Option<Arc<SharedControl>>>>);

impl ControlSlot {
    /// Puts the channel of a new set in.
    pub fn set(&self, control: &Arc<SharedControl>) {
        *self.lock() = Some(Arc::clone(control));
    }

    /// Takes the channel out, since its set is gone.
    pub fn clear(&self) {
        *self.lock() = None;
    }

    /// Closes the channel, if there is one: whoever waits on it ends.
    pub fn close(&self) {
        if let Some(control) = &*self.lock() {
            control.close();
        }
    }

    /// Sends, if there is a channel; a failure is seen by its reader.
    pub fn send<M: Serialize>(&self, message: &M) {
        let control = self.lock().clone();
        if let Some(control) = control {
            let _ = control.send(message);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<SharedControl>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
