//! The one system call that has no safe wrapper: reading the clock's state.
//!
//! Owns nothing; the only file of this crate with `unsafe`. Refuses: nothing beyond what the kernel refuses.

use std::io;

/// What the kernel says of its clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockState {
    /// Whether something keeps it synchronised.
    pub synchronised: bool,
    /// Largest error that the kernel assumes, us.
    pub max_error_us: i64,
}

/// Asks the kernel for its clock's state; changes nothing.
pub fn clock_state() -> io::Result<ClockState> {
    // SAFETY: timex is plain numbers, for which all zeroes is a valid value.
    let mut timex: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: `timex` is a valid, exclusively borrowed struct; modes = 0 only reads.
    let state = unsafe { libc::adjtimex(&mut timex) };
    if state < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(ClockState {
        synchronised: state != libc::TIME_ERROR && timex.status & libc::STA_UNSYNC == 0,
        max_error_us: timex.maxerror,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_answers() {
        let state = clock_state().unwrap();
        assert!(state.max_error_us >= 0);
    }
}
