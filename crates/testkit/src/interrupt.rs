//! Ctrl-C for programs that must clean up: a flag that a signal sets and long waits look at.
//!
//! Process-wide by nature. Refuses: nothing.

use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn interrupted(_: libc::c_int) {
    INTERRUPTED.store(true, Ordering::SeqCst);
}

/// From here on Ctrl-C and a termination signal only set the flag.
pub fn catch() {
    let handler = interrupted as extern "C" fn(libc::c_int) as libc::sighandler_t;
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores to an atomic, which is allowed in a signal handler.
        unsafe { libc::signal(signal, handler) };
    }
}

/// Whether somebody wants the program to end.
pub fn caught() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}
