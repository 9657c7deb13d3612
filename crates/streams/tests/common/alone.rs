//! A test in a process of its own in which no thread can be started.
//!
//! For the crates that name this file by its path; owns nothing.

use std::process::Command;

/// Runs the test of this name so and checks that it passes; `false` in that process, where the test is to be done. The stack
/// that a thread gets there, unless it asks for a smaller one, fits into no address space.
pub(crate) fn without_threads(name: &str) -> bool {
    const STACK: &str = "RUST_MIN_STACK";
    let too_much = (1_u64 << 62).to_string();
    if std::env::var_os(STACK).is_some_and(|stack| *stack == *too_much) {
        return false;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name, "--test-threads=1"]);
    let ended = child.env(STACK, too_much).output().unwrap();
    let told = String::from_utf8_lossy(&ended.stdout);
    let passed = ended.status.success() && told.contains("1 passed");
    assert!(passed, "{ended:?}");
    true
}
