//! The book of what this host has promised of its memory: one, under one lock.
//!
//! A guest's RAM file grows as the guest touches its memory, so what is free is what the files may still grow by less.
//! The files of living guests are measured; a guest that is being launched has no file yet and is written down here for
//! that time. Refuses: to promise what is promised already, or anything while the files cannot be listed.

use crate::preflight::needed_mib;
use crate::records::unlisted;
use godwit_guestmem::mem_tmpfs;
use godwit_types::vm::VmSpec;
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes that files in the directory can grow by, all together.
pub(crate) type Available = Box<dyn Fn(&Path) -> u64 + Send + Sync>;

/// Launches under way: the bytes that each will need, and how many there are.
type Launching = BTreeMap<VmName, (u64, u32)>;

pub(crate) struct Memory {
    ram_dir: PathBuf,
    available: Available,
    launching: Mutex<Launching>,
}

/// Memory of a guest that is being launched; the guest's file stands for it afterwards.
pub(crate) struct Promise {
    book: Arc<Memory>,
    vm: VmName,
}

impl Drop for Promise {
    fn drop(&mut self) {
        let mut launching = self.book.lock();
        if let Some((_, count)) = launching.get_mut(&self.vm) {
            *count = count.saturating_sub(1);
        }
        launching.retain(|_, (_, count)| *count > 0);
    }
}

/// RAM files of one VM.
#[derive(Debug, Clone, Copy, Default)]
struct Files {
    bytes: u64,
    untouched: u64,
}

impl Memory {
    /// Of the tmpfs at `ram_dir`.
    pub(crate) fn new(ram_dir: PathBuf) -> Arc<Self> {
        let available = |dir: &Path| mem_tmpfs::available_bytes(dir).unwrap_or(0);
        Self::with(ram_dir, Box::new(available))
    }

    /// The same, where something else says what is available.
    pub(crate) fn with(ram_dir: PathBuf, available: Available) -> Arc<Self> {
        Arc::new(Self {
            ram_dir,
            available,
            launching: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Launching> {
        self.launching
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory that a new guest could have, MiB: none while that is not known.
    pub(crate) fn free_mib(&self) -> u64 {
        let launching = self.lock();
        match ram_files(&self.ram_dir) {
            Ok(files) => self.count(&files, &launching).0 >> 20,
            Err(error) => {
                tracing::error!(%error, "what memory is free is not known, so none is offered");
                0
            }
        }
    }

    /// Free and promised bytes.
    fn count(&self, files: &BTreeMap<String, Files>, launching: &Launching) -> (u64, u64) {
        let mut free = (self.available)(&self.ram_dir);
        let mut promised = 0u64;
        for file in files.values() {
            free = free.saturating_sub(file.untouched);
            promised = promised.saturating_add(file.bytes);
        }
        for (vm, (bytes, _)) in launching {
            let has = files.get(vm.as_str()).map_or(0, |file| file.bytes);
            let more = bytes.saturating_sub(has);
            free = free.saturating_sub(more);
            promised = promised.saturating_add(more);
        }
        (free, promised)
    }

    /// Promises a guest its memory until the promise is dropped: by then it has its RAM file, or was not launched.
    pub(crate) fn promise(
        self: &Arc<Self>,
        host: &HostName,
        spec: &VmSpec,
    ) -> Result<Promise, ApiError> {
        let vm = spec.name.clone();
        let needed = needed_mib(spec);
        let mut launching = self.lock();
        let files = ram_files(&self.ram_dir).map_err(|error| {
            let message = format!(
                "what memory host '{host}' has for VM '{vm}' is not known: {error}; see what is wrong with that directory"
            );
            ApiError::new(ErrorCode::Internal, message)
        })?;
        let (free, promised) = self.count(&files, &launching);
        let known = launching.contains_key(&vm);
        let has = files.get(vm.as_str()).map_or(0, |file| file.bytes);
        let more = (needed << 20).saturating_sub(has);
        if !known && more > free {
            let message = format!(
                "VM '{vm}' needs {needed} MiB, host '{host}' has {} MiB for new guests, {} MiB are promised: stop or move another VM there, or choose another host",
                free >> 20,
                promised >> 20
            );
            return Err(ApiError::new(ErrorCode::OutOfMemory, message));
        }
        let entry = launching.entry(vm.clone()).or_insert((needed << 20, 0));
        entry.1 += 1;
        Ok(Promise {
            book: Arc::clone(self),
            vm,
        })
    }
}

/// RAM files by VM: each is named after its VM and the count of its launches. Only a directory that is not there has none.
fn ram_files(dir: &Path) -> std::io::Result<BTreeMap<String, Files>> {
    let mut files: BTreeMap<String, Files> = BTreeMap::new();
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(files),
        entries => entries.map_err(|error| unlisted(dir, error))?,
    };
    for entry in entries {
        let entry = entry.map_err(|error| unlisted(dir, error))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let vm = name.rsplit_once('.').map_or(name.as_str(), |(vm, _)| vm);
        let data = match entry.metadata() {
            // It was removed meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            data => data.map_err(|error| unlisted(&entry.path(), error))?,
        };
        if data.is_file() {
            let touched = data.blocks().saturating_mul(512);
            let file = files.entry(vm.to_owned()).or_default();
            file.bytes = file.bytes.saturating_add(data.len());
            let untouched = data.len().saturating_sub(touched);
            file.untouched = file.untouched.saturating_add(untouched);
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::Served;
    use crate::test_support::{BOOT_WAITS, TestHost, spec, vm};
    use godwit_ownership::Power;

    const MIB: u64 = 1 << 20;

    fn book(dir: &Path, mib: u64) -> Arc<Memory> {
        Memory::with(dir.into(), Box::new(move |_| mib * MIB))
    }

    fn host() -> HostName {
        HostName::new("a").unwrap()
    }

    #[test]
    fn a_launch_counts_once_before_and_after_its_file_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let needed = needed_mib(&spec("web"));
        let book = book(dir.path(), 1000);
        let promise = book.promise(&host(), &spec("web")).unwrap();
        assert_eq!(book.free_mib(), 1000 - needed);
        let file = std::fs::File::create(dir.path().join("web.3")).unwrap();
        file.set_len(64 * MIB).unwrap();
        assert_eq!(book.free_mib(), 1000 - needed);
        drop(promise);
        assert_eq!(book.free_mib(), 1000 - 64);
        std::fs::remove_file(dir.path().join("web.3")).unwrap();
        assert_eq!(book.free_mib(), 1000);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_three_starts_at_once_on_a_host_with_room_for_two_one_is_refused() {
        let mut host = TestHost::new();
        host.available_mib = 2 * needed_mib(&spec("a")) + 100;
        let names = ["a", "b", "c"];
        for name in names {
            host.hold(name, Power::Off);
            std::fs::write(host.run_dir(name).join(BOOT_WAITS), "").unwrap();
        }
        let served = Served::of_host(host).await;
        served.agent.take_up().unwrap();
        let free = served.local().host().await.unwrap().memory_free_mib;
        let mut starts = tokio::task::JoinSet::new();
        for name in names {
            let controller = served.controller();
            starts.spawn(async move { controller.start(&vm(name)).await });
        }
        // The two others wait until they are let go.
        let first = starts.join_next().await.unwrap().unwrap();
        assert_eq!(first.unwrap_err().code(), ErrorCode::OutOfMemory);
        assert_eq!(served.local().host().await.unwrap().memory_free_mib, 100);
        for name in names {
            std::fs::remove_file(served.host.run_dir(name).join(BOOT_WAITS)).unwrap();
        }
        for started in starts.join_all().await {
            started.unwrap();
        }
        let left = served.local().host().await.unwrap().memory_free_mib;
        assert_eq!(left, free - 2 * spec("a").memory_mib);
        names.into_iter().for_each(|name| served.end(name));
    }

    #[test]
    fn ram_files_that_cannot_be_listed_are_not_taken_for_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ram");
        std::fs::write(&file, "").unwrap();
        let book = book(&file, 1000);
        assert_eq!(book.free_mib(), 0);
        let refused = book.promise(&host(), &spec("web")).err().unwrap();
        assert!(refused.message.contains("cannot list"), "{refused}");
        std::fs::remove_file(&file).unwrap();
        assert_eq!(book.free_mib(), 1000, "a directory to be made is empty");
    }

    #[test]
    fn what_is_promised_is_not_promised_again() {
        let dir = tempfile::tempdir().unwrap();
        let needed = needed_mib(&spec("web"));
        let book = book(dir.path(), 2 * needed + needed / 2);
        let first = book.promise(&host(), &spec("a")).unwrap();
        let _second = book.promise(&host(), &spec("b")).unwrap();
        let refused = book.promise(&host(), &spec("c")).err().unwrap();
        assert_eq!(refused.code, ErrorCode::OutOfMemory);
        let numbers = format!("needs {needed} MiB, host 'a' has {} MiB", needed / 2);
        assert!(refused.message.contains(&numbers), "{refused}");
        // The same launch asked for twice is one.
        let again = book.promise(&host(), &spec("a")).unwrap();
        drop((first, again));
        assert!(!book.lock().contains_key(&vm("a")));
        assert!(book.promise(&host(), &spec("c")).is_ok());
    }
}
