//! The guest comes first: threads that move its pages give way to its vCPUs.
//!
//! A vCPU and a sender that want the same core would otherwise share it evenly, and the guest would feel its own
//! migration. While the guest is stopped there is nobody to give way to, so the switchover loses nothing.

/// Niceness of page threads, 0 (as the guest) to 19.
const NICENESS: i32 = 10;

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Makes the calling thread give way.
pub(crate) fn give_way_to_the_guest() {
    // On Linux the caller's own thread is meant, not its process.
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        tracing::debug!(%error, "a page thread keeps its priority");
    }
}
