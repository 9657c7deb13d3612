//! Load and its measurement, from outside the guest and with a clock of its own.

pub mod client;
pub mod commits;
pub mod pace;
pub mod ping;
pub mod resp;
pub mod run;
pub mod series;
pub mod values;

use anyhow::{Context as _, Result};
use series::Workload;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

static STOPPED: AtomicBool = AtomicBool::new(false);

/// Makes SIGINT and SIGTERM set the returned flag instead of ending the process, so that a run ends with its report.
pub fn stop_on_signal() -> &'static AtomicBool {
    extern "C" fn stop(_: i32) {
        STOPPED.store(true, Ordering::Relaxed);
    }
    let handler = stop as extern "C" fn(i32) as libc::sighandler_t;
    // SAFETY: the handler only stores to an atomic, which is allowed in a signal handler.
    unsafe {
        libc::signal(libc::SIGINT, handler);
        libc::signal(libc::SIGTERM, handler);
    }
    &STOPPED
}

/// 0 where all is as it was acknowledged, 1 where it is not, and 2 for what kept a load from knowing, which is said.
pub fn exit_code(program: &str, is_sound: Result<bool>) -> ExitCode {
    match is_sound {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{program}: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Writes a load's report where somebody wants it.
pub fn report_of(workload: &Workload, path: Option<&Path>) -> Result<()> {
    let Some(path) = path else {
        return Ok(());
    };
    let text = serde_json::to_vec_pretty(workload)?;
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
