//! QEMUs on this VM's RAM files that no identity file tells of, as [`crate::adoption`] asks crate `qemu` for them.
//!
//! Owns nothing. Refuses: nothing by itself.

use crate::files::Paths;
use godwit_qemu::process::ProcessError;
pub(crate) use godwit_qemu::strays::Stray;
use std::io;
use std::time::Instant;

/// All of them, the newest first.
pub(crate) fn living(paths: &Paths, qemu_uid: u32) -> io::Result<Vec<Stray>> {
    paths.ram_files.living(qemu_uid)
}

/// Ends one that does not run this VM's guest.
pub(crate) fn end(stray: &Stray, deadline: Instant) -> Result<(), ProcessError> {
    stray.end(deadline)
}

/// Removes the RAM files of all launches but this one.
pub(crate) fn remove_ram_files(paths: &Paths, kept: Option<u64>) {
    paths.ram_files.remove_all_but(kept);
}
