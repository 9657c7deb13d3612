//! The guest's vCPUs slowed down, if the host can do that.
//!
//! Shared by the migration's driver, which slows, and the VM's thread, which releases before it says anything to QEMU
//! that must not wait. Owns the cgroup while the guest is slowed.

use godwit_qemu::machine::Machine;
use godwit_qemu::throttle::Throttle;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// QEMU's time to name its vCPU threads.
const QMP_WAIT: Duration = Duration::from_secs(2);

/// The throttle of one VM.
#[derive(Debug, Clone)]
pub(crate) struct SharedThrottle {
    machine: Arc<Machine>,
    throttle: Arc<Mutex<Option<Throttle>>>,
}

impl SharedThrottle {
    /// Nothing is slowed yet.
    pub(crate) fn new(machine: Arc<Machine>) -> Self {
        Self {
            machine,
            throttle: Arc::default(),
        }
    }

    /// Leaves the guest this share of its speed; returns what it really has, 100 where the host cannot slow it.
    pub(crate) fn slow_to(&self, percent: u32) -> u32 {
        match self.try_slow(percent) {
            Ok(()) => percent,
            Err(error) => {
                tracing::warn!(%error, "the guest is not slowed");
                100
            }
        }
    }

    fn try_slow(&self, percent: u32) -> Result<(), String> {
        let percent = u8::try_from(percent).unwrap_or(100);
        let mut throttle = self.throttle.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(throttle) = throttle.as_ref() {
            return throttle
                .set_percent(percent)
                .map_err(|error| error.to_string());
        }
        let threads = self.machine.vcpu_thread_ids(Instant::now() + QMP_WAIT);
        let threads = threads.map_err(|error| error.to_string())?;
        *throttle = Some(Throttle::apply(&threads, percent).map_err(|error| error.to_string())?);
        Ok(())
    }

    /// Full speed at once.
    pub(crate) fn release(&self) {
        // Dropping it releases.
        drop(
            self.throttle
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
    }
}
