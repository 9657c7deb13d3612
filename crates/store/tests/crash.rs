//! The journal on a disk that crashes at every step and fails at every step: old or new record, never a third.

use godwit_ownership::{HostRecord, Phase, Power};
use godwit_store::{Files, StoreError, VmStore};
use godwit_types::{Generation, HostName, MigrationId, VmName};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// A file's content as readers see it, and as it would be after a power cut (`None`: no content survives).
#[derive(Debug, Clone, Default)]
struct Inode {
    seen: Vec<u8>,
    durable: Option<Vec<u8>>,
}

/// A disk with a page cache: names and contents become durable only by their own fsync.
#[derive(Debug, Default)]
struct Disk {
    inodes: Vec<Inode>,
    names: BTreeMap<PathBuf, usize>,
    durable_names: BTreeMap<PathBuf, usize>,
    operations: usize,
    fail_at: Option<(usize, Failure)>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Failure {
    /// The operation does not happen, nor anything after it.
    CrashBefore,
    /// A write happens by half, then the crash.
    CrashWithin,
    /// The file system is shut down before the operation, which fails, and so do all that follow: but for the fsync of a directory, which
    /// says that all is well, as XFS does.
    ShutDown,
    /// The operation fails with this error, the next ones work.
    Error(io::ErrorKind),
}

#[derive(Debug, Clone, Default)]
struct FaultyFiles(Rc<RefCell<Disk>>);

impl Disk {
    fn step(&mut self) -> io::Result<Option<Failure>> {
        let now = self.operations;
        self.operations += 1;
        match self.fail_at {
            Some((at, Failure::Error(kind))) if at == now => Err(kind.into()),
            Some((at, Failure::CrashWithin)) if at == now => Ok(Some(Failure::CrashWithin)),
            Some((at, Failure::CrashBefore | Failure::CrashWithin | Failure::ShutDown))
                if now >= at =>
            {
                Err(io::Error::other("crashed"))
            }
            _ => Ok(None),
        }
    }

    /// Whether the fsync of a directory says nothing of what is lost.
    fn is_shut_down(&self) -> bool {
        matches!(self.fail_at, Some((at, Failure::ShutDown)) if self.operations >= at)
    }

    fn inode(&mut self, path: &Path) -> io::Result<usize> {
        self.names
            .get(path)
            .copied()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// What a power cut leaves. `kept` says for each unsynced name and content whether it reached the disk.
    fn power_cut(&mut self, kept: u32) {
        let mut bit = kept;
        let mut lucky = || {
            let is = bit & 1 == 1;
            bit >>= 1;
            is
        };
        if lucky() {
            self.durable_names = self.names.clone();
        }
        let keep_contents = lucky();
        for inode in &mut self.inodes {
            let torn = inode.seen.len() / 2;
            let lost = inode.seen.get(..torn).unwrap_or_default().to_vec();
            let kept = if keep_contents {
                inode.seen.clone()
            } else {
                lost
            };
            inode.seen = inode.durable.clone().unwrap_or(kept);
        }
        self.names = self.durable_names.clone();
        self.fail_at = None;
    }
}

impl Files for FaultyFiles {
    fn read(&self, path: &Path, _limit: u64) -> io::Result<Option<Vec<u8>>> {
        let disk = self.0.borrow();
        let inode = disk.names.get(path).and_then(|n| disk.inodes.get(*n));
        Ok(inode.map(|i| i.seen.clone()))
    }

    fn write(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        let mut disk = self.0.borrow_mut();
        let half = disk.step()?.is_some();
        let length = if half {
            content.len() / 2
        } else {
            content.len()
        };
        let seen = content.get(..length).unwrap_or_default().to_vec();
        disk.inodes.push(Inode {
            seen,
            durable: None,
        });
        let number = disk.inodes.len() - 1;
        disk.names.insert(path.to_owned(), number);
        if half {
            Err(io::Error::other("crashed"))
        } else {
            Ok(())
        }
    }

    fn sync_file(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.0.borrow_mut();
        disk.step()?;
        let number = disk.inode(path)?;
        if let Some(inode) = disk.inodes.get_mut(number) {
            inode.durable = Some(inode.seen.clone());
        }
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut disk = self.0.borrow_mut();
        disk.step()?;
        let number = disk.inode(from)?;
        disk.names.remove(from);
        disk.names.insert(to.to_owned(), number);
        Ok(())
    }

    fn sync_dir(&self, _path: &Path) -> io::Result<()> {
        let mut disk = self.0.borrow_mut();
        if disk.is_shut_down() {
            disk.operations += 1;
            return Ok(());
        }
        disk.step()?;
        disk.durable_names = disk.names.clone();
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.0.borrow_mut();
        disk.step()?;
        disk.names.remove(path);
        Ok(())
    }
}

fn vm() -> VmName {
    VmName::new("web").expect("a valid name")
}

fn holds(generation: u64) -> HostRecord {
    HostRecord {
        highest: Generation(generation),
        held: Generation(generation),
        phase: Phase::Holds {
            generation: Generation(generation),
            power: Power::On,
            unconfirmed: None,
        },
        ..HostRecord::absent(vm())
    }
}

fn gave(generation: u64) -> HostRecord {
    HostRecord {
        highest: Generation(generation),
        phase: Phase::Gave {
            generation: Generation(generation),
            migration: MigrationId::new("m1").expect("a valid id"),
            to: HostName::new("b").expect("a valid name"),
        },
        ..holds(generation - 1)
    }
}

fn open(files: &FaultyFiles) -> VmStore<FaultyFiles> {
    VmStore::with_files(Path::new("/vms/web"), &vm(), files.clone()).expect("readable journal")
}

/// A disk with `holds(1)` on it, durably; the next operation is number 0.
fn prepared() -> FaultyFiles {
    let files = FaultyFiles::default();
    open(&files).persist(&holds(1)).expect("no faults yet");
    files.0.borrow_mut().operations = 0;
    files
}

fn fail(files: &FaultyFiles, at: usize, how: Failure) -> Result<(), StoreError> {
    files.0.borrow_mut().fail_at = Some((at, how));
    let result = open(files).persist(&gave(2));
    files.0.borrow_mut().fail_at = None;
    result
}

/// Steps of one replacement: write, fsync, rename, fsync of the directory, fsync of the file under its name.
const STEPS: usize = 5;

#[test]
fn a_power_cut_at_every_step_leaves_the_old_or_the_new_record() {
    let mut outcomes = BTreeMap::new();
    for at in 0..=STEPS {
        for how in [Failure::CrashBefore, Failure::CrashWithin] {
            for kept in 0..4 {
                let files = prepared();
                let acknowledged = fail(&files, at, how).is_ok();
                files.0.borrow_mut().power_cut(kept);
                let found = open(&files).load().expect("undamaged").expect("a record");
                assert!(
                    found == holds(1) || found == gave(2),
                    "step {at} {how:?}: {found:?}"
                );
                assert!(
                    !acknowledged || found == gave(2),
                    "step {at}: acknowledged, then lost"
                );
                *outcomes.entry(found == gave(2)).or_insert(0) += 1;
            }
        }
    }
    assert!(
        outcomes.len() == 2,
        "both outcomes must occur: {outcomes:?}"
    );
}

#[test]
fn a_killed_process_at_every_step_leaves_the_old_or_the_new_record() {
    for at in 0..=STEPS {
        for how in [Failure::CrashBefore, Failure::CrashWithin] {
            let files = prepared();
            let acknowledged = fail(&files, at, how).is_ok();
            let found = open(&files).load().expect("undamaged").expect("a record");
            assert!(found == holds(1) || found == gave(2));
            assert!(!acknowledged || found == gave(2));
        }
    }
}

#[test]
fn a_file_system_that_is_shut_down_at_any_step_loses_no_acknowledged_record() {
    for at in 0..=STEPS {
        let files = prepared();
        let written = fail(&files, at, Failure::ShutDown);
        assert_eq!(written.is_ok(), at == STEPS, "step {at}");
        // Whatever was not made durable is lost.
        files.0.borrow_mut().power_cut(0);
        let found = open(&files).load().expect("undamaged").expect("a record");
        match written {
            Ok(()) => assert_eq!(found, gave(2)),
            Err(error) => assert!(
                !error.unchanged() || found == holds(1),
                "step {at}: {error}"
            ),
        }
    }
}

#[test]
fn an_error_at_every_step_says_truly_whether_the_old_record_is_in_place() {
    for at in 0..STEPS {
        for kind in [io::ErrorKind::StorageFull, io::ErrorKind::Other] {
            for kept in 0..4 {
                let files = prepared();
                let error = fail(&files, at, Failure::Error(kind)).expect_err("it failed");
                let full = matches!(error, StoreError::NoSpace { .. });
                assert_eq!(full, kind == io::ErrorKind::StorageFull);
                files.0.borrow_mut().power_cut(kept);
                let found = open(&files).load().expect("undamaged").expect("a record");
                assert!(found == holds(1) || found == gave(2));
                assert!(
                    !error.unchanged() || found == holds(1),
                    "step {at}: {error}"
                );
            }
        }
    }
}

#[test]
fn after_a_full_disk_the_same_journal_writes_again() {
    let files = prepared();
    let mut store = open(&files);
    files.0.borrow_mut().fail_at = Some((0, Failure::Error(io::ErrorKind::StorageFull)));
    let error = store.persist(&gave(2)).expect_err("no space");
    assert!(error.to_string().contains("no space left"), "{error}");
    store.persist(&holds(3)).expect("space again");
    assert_eq!(store.load().expect("readable"), Some(holds(3)));
}
