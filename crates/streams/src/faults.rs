//! Faults on purpose: what the real-QEMU tests use to stop, kill or spoil this process at a named point.
//!
//! Compiled to nothing without the feature `faults`, which no product build has. With it the environment of the process
//! says what happens: `GODWIT_FAULT` names a point, `GODWIT_FAULT_DO` is `kill` (this process), `kill-qemu`, `hold`
//! (stop there until the marker file is removed), `slow` (20 ms each time) or `late` (what is done there has taken longer than it
//! may, where that is asked for: [`is_late`]); `GODWIT_FAULT_MARK` is the marker file,
//! created when the point is reached, so that everything but `slow` happens once. `GODWIT_PLANT` names a planted fault:
//! a step of the product left out or done too early, which a test must notice. `GODWIT_PATIENCE_MS` replaces the shortest
//! silence that counts in a switchover, for machines that are busier than any host should be.

#[cfg(feature = "faults")]
mod active {
    use std::path::{Path, PathBuf};
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
    use std::time::{Duration, Instant};

    /// Longest hold: a test that died must not leave processes behind for ever.
    const HOLD_MAX: Duration = Duration::from_secs(120);

    static QEMU: AtomicI32 = AtomicI32::new(0);
    static DONE: AtomicBool = AtomicBool::new(false);

    struct Armed {
        point: String,
        action: String,
        mark: PathBuf,
    }

    fn armed() -> Option<&'static Armed> {
        static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
        ARMED
            .get_or_init(|| {
                Some(Armed {
                    point: std::env::var("GODWIT_FAULT").ok()?,
                    action: std::env::var("GODWIT_FAULT_DO").ok()?,
                    mark: std::env::var_os("GODWIT_FAULT_MARK")?.into(),
                })
            })
            .as_ref()
    }

    pub fn qemu_is(pid: i32) {
        QEMU.store(pid, Ordering::SeqCst);
    }

    pub fn reached(point: &str) {
        let Some(armed) = armed().filter(|armed| armed.point == point) else {
            return;
        };
        match armed.action.as_str() {
            "slow" => return std::thread::sleep(Duration::from_millis(20)),
            // Whoever looks at the time there asks.
            "late" => return,
            _ => {}
        }
        if DONE.swap(true, Ordering::SeqCst) {
            return;
        }
        tracing::warn!(point, action = armed.action, "fault on purpose");
        let marked = std::fs::write(&armed.mark, point);
        match armed.action.as_str() {
            "hold" if marked.is_ok() => hold(&armed.mark),
            "kill" => kill(std::process::id() as i32),
            "kill-qemu" => kill(QEMU.load(Ordering::SeqCst)),
            _ => {}
        }
    }

    /// Whether what was done since this point counts as having taken longer than it may, whatever the clock says; once.
    pub fn is_late(point: &str) -> bool {
        let armed = armed().filter(|armed| armed.point == point && armed.action == "late");
        let Some(armed) = armed.filter(|_| !DONE.swap(true, Ordering::SeqCst)) else {
            return false;
        };
        tracing::warn!(point, action = armed.action, "fault on purpose");
        std::fs::write(&armed.mark, point).is_ok()
    }

    pub fn patience(product: Duration) -> Duration {
        let wanted = std::env::var("GODWIT_PATIENCE_MS").ok();
        wanted
            .and_then(|ms| ms.parse().ok())
            .map_or(product, Duration::from_millis)
    }

    fn hold(mark: &Path) {
        let began = Instant::now();
        while mark.exists() && began.elapsed() < HOLD_MAX {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn kill(pid: i32) {
        if let Some(pid) = rustix::process::Pid::from_raw(pid) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

#[cfg(not(feature = "faults"))]
mod active {
    #[inline(always)]
    pub fn qemu_is(_pid: i32) {}

    #[inline(always)]
    pub fn reached(_point: &str) {}

    #[inline(always)]
    pub fn is_late(_point: &str) -> bool {
        false
    }

    #[inline(always)]
    pub fn patience(product: std::time::Duration) -> std::time::Duration {
        product
    }
}

pub use active::{is_late, patience, qemu_is, reached};
pub use godwit_types::plant::planted;
