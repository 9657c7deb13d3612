//! Gets a disk's thread out of a system call in which somebody lets it wait.
//!
//! QEMU shares the descriptor of a queue's interrupts with the thread, and can have a write to it wait at any time, also just after the thread has
//! asked for the contrary. A signal ends such a write; the thread begins every other call again that it ends.
//! Owns what the process does at SIGURG, which nobody sends it otherwise and which is ignored by default. Refuses nothing.

use std::os::unix::thread::JoinHandleExt as _;
use std::sync::Once;
use std::thread::JoinHandle;

extern "C" fn nothing(_signal: libc::c_int) {}

/// Ends the system call in which a thread waits, if it waits in one.
pub(crate) fn rouse(thread: &JoinHandle<()>) {
    static HEARD: Once = Once::new();
    // SAFETY: the handler touches nothing, and the structure lives as long as the call. Without SA_RESTART calls end.
    HEARD.call_once(|| unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigaction(libc::SIGURG, &raw const action, std::ptr::null_mut());
    });
    // SAFETY: whoever has the handle has not joined the thread, so that its number is still its own.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), libc::SIGURG) };
}
