//! Keeps a program from all files but those that it is given, its own and its libraries: by Landlock, where the kernel has that.
//!
//! What may be opened is told by the file itself, by whatever path it is reached. What lies in `/proc` is not among it, so that a program
//! which is confined so reaches no other process's memory, though it be of the same user. Owns the rules, which stay over `exec`.
//! Refuses: nothing where the kernel has no Landlock.

use landlock::{
    ABI, Access as _, AccessFs, PathBeneath, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _,
    RulesetError, path_beneath_rules,
};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::Path;

/// Where the loader finds what a program needs; some of it is nowhere on some hosts.
const LIBRARIES: [&str; 6] = [
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
];
/// What is refused if nothing allows it: all that this one knows, as far as the kernel does.
const KNOWN: ABI = ABI::V6;

/// What a program may open; `None` where the kernel cannot be told.
pub(crate) struct OnlyFiles(Option<OwnedFd>);

impl OnlyFiles {
    /// To run `program`, read some files, and read and write another one.
    pub(crate) fn of(program: &Path, read: &[impl AsFd], written: impl AsFd) -> io::Result<Self> {
        let rules = || {
            let of_itself = AccessFs::ReadFile | AccessFs::Execute;
            let of_written = AccessFs::ReadFile | AccessFs::WriteFile;
            let mut rules = Ruleset::default()
                .handle_access(AccessFs::from_all(KNOWN))?
                .create()?
                .add_rules(path_beneath_rules([program], of_itself))?
                .add_rules(path_beneath_rules(LIBRARIES, of_itself))?
                .add_rule(PathBeneath::new(written, of_written))?;
            for file in read {
                rules = rules.add_rule(PathBeneath::new(file, AccessFs::ReadFile))?;
            }
            Ok::<_, RulesetError>(rules.into())
        };
        rules().map(Self).map_err(io::Error::other)
    }

    /// Between fork and exec: this thread and what it becomes open nothing else from here on. It must have given up to gain privileges.
    pub(crate) fn confine_this_thread(&self) -> io::Result<()> {
        let Some(rules) = &self.0 else {
            return Ok(());
        };
        // SAFETY: a plain system call on numbers, of which the first is a descriptor that is open.
        match unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    #[cfg(test)]
    pub(crate) fn are_kept(&self) -> bool {
        self.0.is_some()
    }
}
