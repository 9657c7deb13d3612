//! Whether a VM has a process, and whether it ought to. Pure; the supervisor owns the state.

use godwit_ownership::{Phase, Power};

/// Whether a VM process lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Life {
    Idle,
    /// One is being found or started; what went wrong so far.
    Starting(Option<String>),
    Live {
        pid: i32,
    },
}

/// Whether a phase asks for a VM process.
pub(crate) fn phase_wants_process(phase: &Phase) -> bool {
    match phase {
        Phase::Holds {
            power, unconfirmed, ..
        } => *power != Power::Off || unconfirmed.is_some(),
        Phase::Stopping { .. }
        | Phase::Gave { .. }
        | Phase::Incoming { .. }
        | Phase::Ready { .. } => true,
        Phase::Absent | Phase::Moved { .. } | Phase::Refused { .. } => false,
    }
}
