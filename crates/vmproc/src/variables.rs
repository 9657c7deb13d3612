//! The UEFI variables of a VM: a file in its state directory, which its QEMU has open as flash memory.
//!
//! QEMU writes what the guest changes into the file at once, and never waits for the disk: that is done here, within a second.
//! The journal removes the file where the VM is no longer ([`godwit_store::UEFI_VARIABLES_FILE`]). At a destination it is made
//! anew before QEMU starts, and filled by the source before the guest is taken: QEMU gets them in the device state, too, and writes them
//! only once the guest runs, which is too late for a host that dies just then.
//!
//! Owns a thread while QEMU lives. Refuses: a host without UEFI, and variables of another length than its firmware's.

use crate::files::Paths;
use crate::hypervisor::{Start, internal};
use godwit_migrate::protocol::VARIABLES_WHOLE_MAX;
use godwit_qemu::command_line::Flash;
use godwit_qemu::uefi::Uefi;
use godwit_store::{RealFiles, StoreError, load_json, remove_document, replace_durably, save_json};
use godwit_types::clones::ClonedVariables;
use godwit_types::{ApiError, ErrorCode};
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How often it is looked whether the guest has changed any.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The variables of a QEMU that lives.
#[derive(Debug)]
pub(crate) struct Variables {
    file: Arc<File>,
    /// Dropped with this: the thread then ends.
    _life: Arc<()>,
}

/// What a QEMU that is to be started gets.
#[derive(Debug)]
pub(crate) struct Opened {
    code: File,
    variables: File,
}

impl Opened {
    /// As QEMU's command line has them.
    pub(crate) fn flash(&self) -> Flash {
        Flash {
            code_fd: self.code.as_raw_fd(),
            variables_fd: self.variables.as_raw_fd(),
        }
    }

    /// Which descriptors QEMU inherits.
    pub(crate) fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.code.as_fd(), self.variables.as_fd()]
    }
}

/// The UEFI of a QEMU that is to be started, if its VM has it. A VM that has no variables here gets empty ones.
pub(crate) fn open(start: &Start<'_>) -> Result<Option<Opened>, ApiError> {
    if !start.spec.has_variables() {
        return Ok(None);
    }
    let (vm, host) = (&start.config.vm, &start.config.host);
    let refused = |code, why: String| {
        let message =
            format!("VM '{vm}' has firmware = \"uefi\", and cannot be on host '{host}': {why}");
        ApiError::new(code, message).on_host(host)
    };
    let uefi = Uefi::open(&start.config.uefi_code, &start.config.uefi_variables)
        .map_err(|error| refused(ErrorCode::MissingFile, error.to_string()))?;
    let path = start.paths.variables();
    // Whatever an earlier move left is of no use for this one.
    if start.coming.is_some() || !path.try_exists().map_err(internal)? {
        let first = match cloned(start)? {
            Some(cloned) => cloned,
            None => uefi.empty_variables().map_err(internal)?,
        };
        replace_durably(&RealFiles, &path, &first).map_err(internal)?;
    }
    forget_cloned(&start.paths.cloned_variables());
    let variables = OpenOptions::new().read(true).write(true).open(&path);
    let variables = variables.map_err(internal)?;
    let (found, wanted) = (length(&variables)?, uefi.sizes.variables);
    if found != wanted {
        let path = path.display();
        let why = format!(
            "its variables there ({path}) have {found} bytes, and go with firmware whose variables have as many, not {wanted}: name that with uefi_code and uefi_variables in host.toml, or remove the file, and the VM begins with empty ones"
        );
        return Err(refused(ErrorCode::Incompatible, why));
    }
    save_json(&start.paths.uefi_sizes(), &uefi.sizes).map_err(internal)?;
    let code = uefi.code;
    Ok(Some(Opened { code, variables }))
}

/// Those with which a VM begins that is a clone. Another one of that name may have been made here and never started.
fn cloned(start: &Start<'_>) -> Result<Option<Vec<u8>>, ApiError> {
    match start.coming {
        None => cloned_for(start.paths, start.spec.uid).map_err(internal),
        Some(_) => Ok(None),
    }
}

/// The same of the VM of this user id.
pub(crate) fn cloned_for(paths: &Paths, uid: Option<u32>) -> Result<Option<Vec<u8>>, StoreError> {
    let kept: Option<ClonedVariables> = load_json(&paths.cloned_variables())?;
    let kept = kept.filter(|kept| kept.uid == uid);
    Ok(kept.map(|kept| kept.bytes))
}

/// They are of no use from the first start on.
fn forget_cloned(path: &Path) {
    if !path.try_exists().unwrap_or(true) {
        return;
    }
    if let Err(error) = remove_document(path) {
        tracing::warn!(%error, "the UEFI variables with which a clone began stay");
    }
}

fn length(file: &File) -> Result<u64, ApiError> {
    Ok(file.metadata().map_err(internal)?.len())
}

impl Variables {
    /// Those of a QEMU that was just started.
    pub(crate) fn begin(opened: Option<Opened>) -> Result<Option<Self>, ApiError> {
        let begun = opened.map(|opened| Self::keep(opened.variables));
        begun.transpose().map_err(internal)
    }

    /// Those of a QEMU that a predecessor left. It lives on where they cannot be opened, but does not move.
    pub(crate) fn go_on(paths: &Paths, has_some: bool) -> Option<Self> {
        let opened = has_some.then(|| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .open(paths.variables())
        })?;
        let kept = opened.and_then(Self::keep);
        kept.inspect_err(
            |error| tracing::error!(%error, "the guest's UEFI variables cannot be opened"),
        )
        .ok()
    }

    fn keep(file: File) -> io::Result<Self> {
        let (file, life) = (Arc::new(file), Arc::new(()));
        let (synced, until) = (Arc::clone(&file), Arc::downgrade(&life));
        std::thread::Builder::new()
            .name("uefi-variables".into())
            .spawn(move || keep_durable(&synced, &until))?;
        Ok(Self { file, _life: life })
    }

    /// For a migration's driver.
    pub(crate) fn file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }
}

/// Makes durable what the guest changed, and at the end once more.
fn keep_durable(file: &File, life: &Weak<()>) {
    let changed = |found: Metadata| (found.mtime(), found.mtime_nsec());
    let mut durable = None;
    loop {
        let lives = life.strong_count() > 0;
        let now = file.metadata().ok().map(changed);
        if now != durable || now.is_none() {
            match file.sync_data() {
                Ok(()) => durable = now,
                Err(error) => {
                    tracing::warn!(%error, "the guest's UEFI variables are not durable yet")
                }
            }
        }
        if !lives {
            return;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// All of a file, as it is now.
pub(crate) fn read_whole(file: &File) -> io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    if length == 0 || length > VARIABLES_WHOLE_MAX {
        let message =
            format!("the guest's UEFI variables have {length} bytes: QEMU was not to change that");
        return Err(io::Error::other(message));
    }
    let length = usize::try_from(length).map_err(io::Error::other)?;
    let mut content = vec![0; length];
    file.read_exact_at(&mut content, 0)?;
    Ok(content)
}

/// At a destination: the file that the source fills.
#[derive(Debug)]
pub(crate) struct Arriving {
    file: Arc<File>,
    length: u64,
    is_durable: bool,
}

impl Arriving {
    pub(crate) fn new(file: Arc<File>) -> io::Result<Self> {
        let length = file.metadata()?.len();
        Ok(Self {
            file,
            length,
            is_durable: false,
        })
    }

    /// Takes a piece; the last one makes all durable.
    pub(crate) fn take(&mut self, at: u64, bytes: &[u8], last: bool) -> Result<(), String> {
        let end = at.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.length) {
            return Err("the source has more UEFI variables than fit here".to_owned());
        }
        self.is_durable = false;
        let written = self.file.write_all_at(bytes, at);
        let done = match last {
            true => written.and_then(|()| self.file.sync_data()),
            false => written,
        };
        done.map_err(|error| format!("the guest's UEFI variables cannot be written: {error}"))?;
        self.is_durable = last;
        Ok(())
    }

    /// Refuses to take a guest without them.
    pub(crate) fn must_be_whole(&self) -> Result<(), String> {
        match self.is_durable {
            true => Ok(()),
            false => Err("the source did not send the guest's UEFI variables".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arriving(length: u64) -> (Arc<File>, Arriving) {
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(length).unwrap();
        let arriving = Arriving::new(Arc::clone(&file)).unwrap();
        (file, arriving)
    }

    #[test]
    fn a_guest_is_not_taken_before_its_variables_are_whole() {
        let (file, mut arriving) = arriving(8);
        assert!(arriving.must_be_whole().is_err());
        arriving.take(0, b"abcd", false).unwrap();
        assert!(arriving.must_be_whole().is_err());
        arriving.take(4, b"efgh", true).unwrap();
        arriving.must_be_whole().unwrap();
        assert_eq!(read_whole(&file).unwrap(), b"abcdefgh");
        // What has changed since is a part.
        arriving.take(2, b"x", false).unwrap();
        assert!(arriving.must_be_whole().is_err());
        arriving.take(7, b"y", true).unwrap();
        arriving.must_be_whole().unwrap();
        assert_eq!(read_whole(&file).unwrap(), b"abxdefgy");
    }

    #[test]
    fn no_source_makes_the_file_longer() {
        let (file, mut arriving) = arriving(8);
        for (at, bytes) in [(8, &b"x"[..]), (6, b"xyz"), (u64::MAX, b"x")] {
            assert!(arriving.take(at, bytes, true).is_err(), "{at}");
        }
        assert_eq!(read_whole(&file).unwrap(), [0; 8]);
    }
}
