//! The library that QEMU preloads, as an open file from which it can be loaded.
//!
//! What it is for: many hosts mount `/run`, `/tmp` or more with `noexec`, and the dynamic loader passes over a library
//! there with no more than a message. So the library lives in memory, without a place in any file system, and QEMU
//! loads it through the descriptor that it inherits; a host that forbids this has a file in the state directory.
//!
//! Who owns the state: a [`Library`] owns its descriptor; QEMU closes its own copy once it has loaded the library.
//!
//! What it refuses: a place from which nothing can be mapped to be run, which it tries before QEMU is started.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::Error;

/// The library, as built for this machine.
static BYTES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/handout.so"));
/// Its name, in memory and in a directory.
const NAME: &str = "godwit-handout.so";
/// Anybody may read it: QEMU's user does.
const MODE: u32 = 0o444;

/// The library, from where it can be loaded.
#[derive(Debug)]
pub struct Library {
    fd: OwnedFd,
}

impl Library {
    /// Makes the library in memory, or, where the host does not let it be loaded from there, as a file of `dir`. No
    /// user but ours needs to reach `dir`.
    pub fn make(dir: &Path) -> Result<Self, Error> {
        first_of(&[&in_memory, &|| in_directory(dir)]).map_err(|reasons| Error::Library {
            path: dir.to_owned(),
            reasons: reasons.join("; as a file: "),
        })
    }

    /// The descriptor that QEMU inherits.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Whether the library is mapped in the process, which it is before the program's first instruction or never.
pub fn is_loaded(pid: u32) -> io::Result<bool> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    Ok(maps.lines().any(|line| line.contains(NAME)))
}

/// The first place that can be used, or what is wrong with each.
fn first_of(places: &[&dyn Fn() -> io::Result<OwnedFd>]) -> Result<Library, Vec<String>> {
    let mut reasons = Vec::new();
    for place in places {
        match place().and_then(|fd| try_to_map(fd.as_fd()).map(|()| fd)) {
            Ok(fd) => return Ok(Library { fd }),
            Err(error) => reasons.push(error.to_string()),
        }
    }
    Err(reasons)
}

/// Nothing that can be started as a program, so that it is made whatever `vm.memfd_noexec` says; a library needs no
/// more than to be mapped. Sealed, since QEMU may write to what it inherits.
fn in_memory() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
    let mut file = File::from(rustix::fs::memfd_create(NAME, flags)?);
    file.write_all(BYTES)?;
    file.set_permissions(Permissions::from_mode(MODE))?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

/// A running QEMU keeps the file it has loaded: the new one replaces it by a rename.
fn in_directory(dir: &Path) -> io::Result<OwnedFd> {
    let path = dir.join(NAME);
    let staged = dir.join(format!("{NAME}.{}", std::process::id()));
    let written = write_file(&staged).and_then(|()| fs::rename(&staged, &path));
    if written.is_err() {
        // It may not exist; what matters is the first error.
        let _ = fs::remove_file(&staged);
    }
    written?;
    Ok(File::open(&path)?.into())
}

fn write_file(path: &Path) -> io::Result<()> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(MODE);
    let mut file = options.open(path)?;
    file.set_permissions(Permissions::from_mode(MODE))?;
    file.write_all(BYTES)
}

/// Does what the dynamic loader will do, so that what forbids it is known by its error.
fn try_to_map(fd: BorrowedFd<'_>) -> io::Result<()> {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::EXEC, MapFlags::PRIVATE);
    // SAFETY: a new private mapping at an address of the kernel's choice; nobody reads it, and it is unmapped at once.
    unsafe {
        let at = rustix::mm::mmap(std::ptr::null_mut(), BYTES.len(), prot, flags, fd, 0)?;
        rustix::mm::munmap(at, BYTES.len())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn refused() -> io::Result<OwnedFd> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    #[test]
    fn the_library_in_memory_can_be_mapped_and_changed_by_nobody() {
        let library = Library::make(Path::new("/nonexistent")).expect("no directory is needed");
        let path = format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&library.fd)
        );
        let mut file = File::options().write(true).open(&path).expect("root may");
        let error = file.write_all(b"other").expect_err("sealed");
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(fs::read(&path).expect("readable"), BYTES);
    }

    /// The setting is a PID namespace's own, so the test above runs again in one of its own.
    #[test]
    fn a_host_that_forbids_programs_in_memory_lets_the_library_be_loaded() {
        let set = "echo 2 > /proc/sys/vm/memfd_noexec && exec \"$0\" --exact \
                   library::tests::the_library_in_memory_can_be_mapped_and_changed_by_nobody";
        let inside = Command::new("unshare")
            .args(["--pid", "--fork", "--mount-proc", "sh", "-c", set])
            .arg(std::env::current_exe().expect("this test"))
            .output()
            .expect("unshare");
        let said = String::from_utf8_lossy(&inside.stdout);
        if !said.contains("running") {
            println!("skipped: {}", String::from_utf8_lossy(&inside.stderr));
            return;
        }
        assert!(said.contains("1 passed"), "{said}");
    }

    #[test]
    fn a_host_without_executable_memory_uses_the_directory() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let found = first_of(&[&refused, &|| in_directory(dir.path())]).expect("the second");
        assert_eq!(
            fs::read(dir.path().join(NAME)).expect("installed"),
            BYTES,
            "{found:?}"
        );
    }

    #[test]
    fn a_host_where_nothing_can_be_loaded_is_told_why_and_what_to_do() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "noexec", "tmpfs"])
            .arg(dir.path())
            .status();
        if !mounted.is_ok_and(|status| status.success()) {
            println!("skipped: a file system cannot be mounted here");
            return;
        }
        let outcome = first_of(&[&refused, &|| in_directory(dir.path())]);
        let unmounted = Command::new("umount").arg(dir.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()));
        let reasons = outcome.expect_err("nothing may be mapped from there");
        assert_eq!(reasons.len(), 2, "{reasons:?}");
        assert!(
            reasons[1].contains("not permitted"),
            "the kernel's own word: {reasons:?}"
        );
    }

    #[test]
    fn a_process_without_the_library_is_known() {
        assert!(!is_loaded(std::process::id()).expect("our own maps"));
        assert!(is_loaded(0).is_err());
    }
}
