//! The guest held to what it may dirty, if the host can do that.
//!
//! Shared by the migration's driver, which says how much is allowed, and the VM's thread, which lifts every limit before
//! it says anything to QEMU that must not wait. Owns the vCPUs' control groups and, while something is limited, a thread
//! that looks at what each vCPU did and sets its share of a CPU. Refuses: to limit anything after it was released.

use crate::machine::Machine;
use crate::throttle::{LOWEST_SHARE, ThreadUse, Throttle, check_threads, thread_use};
use godwit_migrate::account::PAGE_BYTES;
use godwit_migrate::convergence::Slowing;
use godwit_migrate::governor::{Governor, VcpuUse};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// QEMU's time to name its vCPU threads.
const QMP_WAIT: Duration = Duration::from_secs(10);
/// How often shares are set. Quotas work over 10 to 20 ms, so nothing is measured in less.
const TICK: Duration = Duration::from_millis(50);
/// Weight of a tick in an average over about a second.
const AVERAGE_SHARE: f64 = 0.05;
/// A host that could not slow the guest is asked again, once an iteration, so many times in all.
const FAILURES_MAX: u32 = 5;

/// The throttle of one migration.
#[derive(Debug, Clone)]
pub struct SharedThrottle {
    machine: Arc<Machine>,
    /// QEMU's process, whose threads alone are slowed.
    process: i32,
    floor: f64,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes per second that the guest may dirty; nothing is limited without it.
    allowed_bytes_per_s: Option<f64>,
    /// Whether the thread runs.
    governed: bool,
    /// How often the guest could not be slowed, and why the last time.
    failures: u32,
    unable: Option<String>,
    throttle: Option<Throttle>,
    /// The smallest share that any vCPU has.
    lowest: Option<f64>,
    /// The same averaged over a second or so, and the least that it ever was.
    average: Option<f64>,
    slowest: Option<f64>,
    /// Whether it could be slowed more since that was last asked.
    slowing: Slowing,
}

impl State {
    fn book_failure(&mut self, reason: String) {
        tracing::warn!(reason, "the guest is not slowed");
        self.failures += 1;
        self.unable = Some(reason);
    }

    fn book(&mut self, governor: &Governor) {
        let lowest = governor.lowest();
        self.slowing = self.slowing.then(governor.slowing());
        let average = self.average.unwrap_or(1.0);
        let average = average + AVERAGE_SHARE * (lowest - average);
        (self.lowest, self.average) = (Some(lowest), Some(average));
        self.slowest = Some(self.slowest.unwrap_or(1.0).min(average));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SharedThrottle {
    /// Nothing is limited yet. `max_slowdown_percent` is what was promised about the guest's speed.
    pub fn new(machine: Arc<Machine>, process: i32, max_slowdown_percent: Option<u32>) -> Self {
        let promised = max_slowdown_percent.map_or(0.0, |percent| 1.0 - f64::from(percent) / 100.0);
        Self {
            machine,
            process,
            floor: promised.clamp(LOWEST_SHARE, 1.0),
            shared: Arc::default(),
        }
    }

    /// From now on the guest may dirty so many bytes per second.
    pub fn allow(&self, bytes_per_s: f64) {
        let mut state = self.shared.lock();
        state.allowed_bytes_per_s = Some(bytes_per_s);
        if state.governed || state.failures >= FAILURES_MAX {
            return;
        }
        let govern = Govern {
            machine: Arc::clone(&self.machine),
            process: self.process,
            floor: self.floor,
            shared: Arc::clone(&self.shared),
        };
        let thread = std::thread::Builder::new().name("govern".into());
        match thread.spawn(move || govern.run()) {
            Ok(_) => state.governed = true,
            Err(error) => state.book_failure(error.to_string()),
        }
    }

    /// Why the guest cannot be slowed although that was wanted.
    pub fn unable(&self) -> Option<String> {
        self.shared.lock().unable.clone()
    }

    /// Whether the guest could be slowed more at any time since this was last asked.
    pub fn slowing(&self) -> Slowing {
        let mut state = self.shared.lock();
        match state.unable {
            Some(_) => Slowing::Least,
            None => std::mem::take(&mut state.slowing),
        }
    }

    /// The speed of the vCPU that is slowed most, percent.
    pub fn lowest_percent(&self) -> u32 {
        let lowest = self.shared.lock().lowest.unwrap_or(1.0);
        (100.0 * lowest).round() as u32
    }

    /// What the guest was slowed to at most so far, for about a second, percent.
    pub fn slowest_percent(&self) -> u32 {
        let slowest = self.shared.lock().slowest.unwrap_or(1.0);
        (100.0 * slowest).round() as u32
    }

    /// The least speed that was promised, percent.
    pub fn floor_percent(&self) -> u32 {
        (100.0 * self.floor).round() as u32
    }

    /// Full speed at once; the vCPUs' groups stay for the next limit.
    pub fn lift(&self) {
        let mut state = self.shared.lock();
        (state.allowed_bytes_per_s, state.lowest) = (None, None);
        (state.average, state.slowing) = (None, Slowing::NotYet);
        if let Some(throttle) = &mut state.throttle
            && let Err(error) = throttle.lift()
        {
            // Moving the threads out of their groups frees them in another way.
            tracing::warn!(%error, "a limit may be left on the guest; its groups are given up");
            state.throttle = None;
        }
        self.shared.changed.notify_all();
    }

    /// Full speed, and nothing left behind.
    pub fn release(&self) {
        self.lift();
        // Dropping it moves the threads back, which takes a while: not under the lock.
        let throttle = self.shared.lock().throttle.take();
        drop(throttle);
    }
}

/// The thread that holds vCPUs to the allowance.
struct Govern {
    machine: Arc<Machine>,
    process: i32,
    floor: f64,
    shared: Arc<Shared>,
}

impl Govern {
    fn run(self) {
        if let Err(reason) = self.govern() {
            let mut state = self.shared.lock();
            state.book_failure(reason);
            state.governed = false;
            (state.throttle, state.lowest) = (None, None);
        }
    }

    fn govern(&self) -> Result<(), String> {
        let threads = self.machine.vcpu_thread_ids(Instant::now() + QMP_WAIT);
        let threads = threads.map_err(|error| error.to_string())?;
        check_threads(self.process, &threads).map_err(|error| error.to_string())?;
        self.make_groups(&threads)?;
        let mut governor = Governor::new(threads.len(), self.floor, PAGE_BYTES);
        let (mut before, mut looked) = (self.uses(&threads)?, Instant::now());
        while let Some(allowed_bytes_per_s) = self.wait_tick() {
            let (now, at) = (self.uses(&threads)?, Instant::now());
            let used: Vec<VcpuUse> = before
                .iter()
                .zip(&now)
                .map(|(old, new)| difference(*old, *new))
                .collect();
            let seconds = at.duration_since(looked).as_secs_f64();
            governor.tick(seconds, &used, allowed_bytes_per_s);
            self.set(&governor)?;
            (before, looked) = (now, at);
        }
        Ok(())
    }

    fn make_groups(&self, threads: &[i32]) -> Result<(), String> {
        let mut state = self.shared.lock();
        if state.allowed_bytes_per_s.is_some() && state.throttle.is_none() {
            let made =
                Throttle::prepare(self.process, threads).map_err(|error| error.to_string())?;
            state.throttle = Some(made);
        }
        Ok(())
    }

    fn uses(&self, threads: &[i32]) -> Result<Vec<ThreadUse>, String> {
        threads
            .iter()
            .map(|thread| thread_use(self.process, *thread).map_err(|error| error.to_string()))
            .collect()
    }

    /// The allowance after a tick; `None` when nothing is limited any more.
    fn wait_tick(&self) -> Option<f64> {
        let until = Instant::now() + TICK;
        let mut state = self.shared.lock();
        loop {
            let Some(allowed_bytes_per_s) = state.allowed_bytes_per_s else {
                // In one breath with the look: a limit that follows starts another thread.
                state.governed = false;
                return None;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Some(allowed_bytes_per_s);
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Under the lock, so that a limit that was lifted meanwhile is not set again.
    fn set(&self, governor: &Governor) -> Result<(), String> {
        let mut state = self.shared.lock();
        if state.allowed_bytes_per_s.is_none() {
            return Ok(());
        }
        state.book(governor);
        match &mut state.throttle {
            Some(throttle) => throttle
                .set_shares(governor.shares())
                .map_err(|error| error.to_string())?,
            None => return Err("its control groups are gone".into()),
        }
        state.unable = None;
        Ok(())
    }
}

fn difference(old: ThreadUse, new: ThreadUse) -> VcpuUse {
    VcpuUse {
        first_writes: new.faults.saturating_sub(old.faults),
        cpu_s: new.cpu_ns.saturating_sub(old.cpu_ns) as f64 / 1e9,
    }
}
