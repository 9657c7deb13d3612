//! Faults on purpose in the VM process: those of crate `streams`, what stands at the journal, and a `cont` that nobody may
//! send.
//!
//! Owns nothing. Compiled to nothing without the feature `faults`, which no product build has.

#[cfg(feature = "faults")]
mod active {
    use std::path::Path;

    /// What the permit is there to prevent: somebody who reaches QEMU lets the guest run.
    pub(crate) fn cont_without_permit(monitor: &Path) {
        use std::io::{BufRead as _, BufReader, Write as _};
        let run = || -> std::io::Result<()> {
            let mut socket = std::os::unix::net::UnixStream::connect(monitor)?;
            let mut answers = BufReader::new(socket.try_clone()?);
            for command in ["qmp_capabilities", "cont"] {
                answers.read_line(&mut String::new())?;
                writeln!(socket, "{{\"execute\":\"{command}\"}}")?;
            }
            answers.read_line(&mut String::new()).map(drop)
        };
        if let Err(error) = run() {
            tracing::warn!(%error, "the planted fault did not work");
        }
    }
}

#[cfg(not(feature = "faults"))]
mod active {
    #[inline(always)]
    pub(crate) fn cont_without_permit(_monitor: &std::path::Path) {}
}

pub(crate) use active::cont_without_permit;
pub(crate) use godwit_streams::faults::{is_late, patience, planted, qemu_is, reached};

use godwit_ownership::{HostRecord, Phase};

/// Before a record is written.
pub(crate) fn before_journal(record: &HostRecord) {
    reached(journal_points(record)[0]);
}

/// After a record was written.
pub(crate) fn after_journal(record: &HostRecord) {
    reached(journal_points(record)[1]);
}

/// The fault points around the writing of a record.
fn journal_points(record: &HostRecord) -> [&'static str; 2] {
    match &record.phase {
        Phase::Absent => ["journal.absent.before", "journal.absent.after"],
        Phase::Holds { .. } => ["journal.holds.before", "journal.holds.after"],
        Phase::Stopping { .. } => ["journal.stopping.before", "journal.stopping.after"],
        Phase::Gave { .. } => ["journal.gave.before", "journal.gave.after"],
        Phase::Moved { .. } => ["journal.moved.before", "journal.moved.after"],
        Phase::Incoming { .. } => ["journal.incoming.before", "journal.incoming.after"],
        Phase::Ready { .. } => ["journal.ready.before", "journal.ready.after"],
        Phase::Refused { .. } => ["journal.refused.before", "journal.refused.after"],
    }
}
