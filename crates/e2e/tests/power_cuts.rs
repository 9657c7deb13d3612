//! The journals on a file system whose power is cut: what was acknowledged is there afterwards, and a missing sync shows.

use anyhow::{Context as _, Result, ensure};
use godwit_ownership::{HostRecord, Phase, Power};
use godwit_store::{Files, RealFiles, StoreError, VmStore, load_json, save_json};
use godwit_testkit::guest::linux::target_dir;
use godwit_testkit::lab::Machine;
use godwit_testkit::lab::namespace::Plan;
use godwit_testkit::testvol::{self, Survives};
use godwit_types::{Generation, VmName};
use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

const AT: &str = "/var/lib/godwit";
/// Cuts of each case.
const CUTS: u64 = 200;

/// A machine with a volume; none, and a line that says so, where there is no FUSE.
fn machine() -> Result<Option<Machine>> {
    machine_that_sees(&[])
}

fn machine_that_sees(visible: &[PathBuf]) -> Result<Option<Machine>> {
    if let Some(why) = testvol::unavailable() {
        println!("skipped: {why}");
        return Ok(None);
    }
    let mut machine = Machine::start(&Plan {
        name: "journal",
        visible,
        shared: &[],
        outlive_maker: false,
    })?;
    machine.mount_volume(Path::new(AT))?;
    Ok(Some(machine))
}

fn cut(machine: &Machine, seed: u64) -> Result<()> {
    // The strictest disk takes every fourth turn.
    let survives = match seed % 4 {
        0 => Survives::Nothing,
        _ => Survives::Some(seed),
    };
    machine.volume(AT)?.cut(survives);
    Ok(())
}

fn vm() -> Result<VmName> {
    Ok(VmName::new("web")?)
}

fn holds(generation: u64) -> Result<HostRecord> {
    Ok(HostRecord {
        highest: Generation(generation),
        held: Generation(generation),
        phase: Phase::Holds {
            generation: Generation(generation),
            power: Power::On,
            unconfirmed: None,
        },
        ..HostRecord::absent(vm()?)
    })
}

/// The operating system's files, of which only so many operations are done before the power goes.
#[derive(Clone)]
struct Counted<F: Files> {
    files: F,
    left: Rc<RefCell<u64>>,
}

impl<F: Files> Counted<F> {
    fn step(&self) -> io::Result<()> {
        let mut left = self.left.borrow_mut();
        *left = left.checked_sub(1).ok_or(io::ErrorKind::NotConnected)?;
        Ok(())
    }
}

impl<F: Files> Files for Counted<F> {
    fn read(&self, path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
        self.files.read(path, limit)
    }

    fn write(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        self.step()?;
        self.files.write(path, content)
    }

    fn sync_file(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        self.files.sync_file(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        self.files.rename(from, to)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        self.files.sync_dir(path)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.files.remove(path)
    }
}

/// The operating system's files without one kind of sync: a fault that the cases below must find.
#[derive(Clone, Copy)]
struct Forgetful {
    syncs_files: bool,
    syncs_directories: bool,
}

impl Files for Forgetful {
    fn read(&self, path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
        RealFiles.read(path, limit)
    }

    fn write(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        RealFiles.write(path, content)
    }

    fn sync_file(&self, path: &Path) -> io::Result<()> {
        // One that has its name already makes that durable on some file systems, too.
        let is_fresh = path.extension().is_some_and(|end| end == "new");
        match self.syncs_files && (self.syncs_directories || is_fresh) {
            true => RealFiles.sync_file(path),
            false => Ok(()),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealFiles.rename(from, to)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        match self.syncs_directories {
            true => RealFiles.sync_dir(path),
            false => Ok(()),
        }
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        RealFiles.remove(path)
    }
}

/// What went wrong in so many cuts, each within or after one of many replacements: a record that was acknowledged and is
/// not there, or one that nobody wrote.
fn violations(machine: &Machine, files: impl Files + Clone) -> Result<Vec<String>> {
    let state = machine.path_from_outside(AT);
    drop(VmStore::open(&state, &vm()?)?);
    let directory = VmStore::directory(&state, &vm()?);
    let mut found = Vec::new();
    let mut acknowledged = 0;
    for seed in 0..CUTS {
        let left = Rc::new(RefCell::new(seed % 11));
        let counted = Counted {
            files: files.clone(),
            left,
        };
        let mut tried = acknowledged;
        match VmStore::with_files(&directory, &vm()?, counted) {
            Ok(mut store) => loop {
                tried += 1;
                match store.persist(&holds(tried)?) {
                    Ok(()) => acknowledged = tried,
                    Err(StoreError::Io { .. }) => break,
                    Err(error) => return Err(error.into()),
                }
            },
            Err(error) => found.push(format!("cut {seed}: before it {error}")),
        }
        cut(machine, seed)?;
        match VmStore::with_files(&directory, &vm()?, RealFiles).and_then(|store| store.load()) {
            Ok(record) => {
                let there = record.map_or(0, |record| record.held.0);
                if !(acknowledged..=tried).contains(&there) {
                    let text = format!("cut {seed}: {there} of {acknowledged} to {tried}");
                    found.push(text);
                }
                acknowledged = there;
            }
            Err(error) => {
                found.push(format!("cut {seed}: {error}"));
                std::fs::remove_file(directory.join("ownership"))?;
                std::fs::File::open(&directory)?.sync_all()?;
                acknowledged = 0;
            }
        }
    }
    Ok(found)
}

#[test]
fn the_journal_survives_power_cuts_with_every_acknowledged_record() -> Result<()> {
    let Some(machine) = machine()? else {
        return Ok(());
    };
    let found = violations(&machine, RealFiles)?;
    ensure!(found.is_empty(), "{found:#?}");
    Ok(())
}

#[test]
fn a_journal_that_forgets_to_sync_is_found_out() -> Result<()> {
    for (syncs_files, syncs_directories) in [(true, false), (false, true)] {
        let Some(machine) = machine()? else {
            return Ok(());
        };
        let forgetful = Forgetful {
            syncs_files,
            syncs_directories,
        };
        let found = violations(&machine, forgetful)?;
        let what = if syncs_files { "directories" } else { "files" };
        println!(
            "  no sync of {what}: {} violations in {CUTS} cuts",
            found.len()
        );
        ensure!(!found.is_empty(), "no cut shows that {what} are not synced");
    }
    Ok(())
}

/// Whoever made the directory may have been killed before it was durable.
#[test]
fn a_journal_in_a_directory_that_was_there_but_not_durable_survives() -> Result<()> {
    let Some(machine) = machine()? else {
        return Ok(());
    };
    let state = machine.path_from_outside(AT);
    std::fs::create_dir_all(VmStore::directory(&state, &vm()?))?;
    VmStore::open(&state, &vm()?)?.persist(&holds(1)?)?;
    machine.volume(AT)?.cut(Survives::Nothing);
    let there = VmStore::peek(&state, &vm()?)?;
    ensure!(there == Some(holds(1)?), "{there:?}");
    Ok(())
}

#[test]
fn a_document_that_was_saved_survives() -> Result<()> {
    let Some(machine) = machine()? else {
        return Ok(());
    };
    let path: PathBuf = machine.path_from_outside(AT).join("document.json");
    for value in 0..50_u64 {
        save_json(&path, &value)?;
        cut(&machine, value)?;
        let there: u64 = load_json(&path)?.context("it is gone")?;
        ensure!(there == value, "{there} in place of {value}");
    }
    Ok(())
}

/// What `controller init` said is made must not be gone with the directory that it is in.
#[test]
fn a_controller_that_was_just_made_survives() -> Result<()> {
    let target = target_dir()?;
    let Some(machine) = machine_that_sees(std::slice::from_ref(&target))? else {
        return Ok(());
    };
    let godwit = target.join("release/godwit");
    ensure!(godwit.exists(), "{} is missing", godwit.display());
    let dir = "/var/lib/godwit/site/controller";
    let mut command = machine.command(godwit);
    command.args(["controller", "init", "--state-dir", dir]);
    let made = command.args(["--listen", "127.0.0.1:7443"]).output()?;
    let said = String::from_utf8_lossy(&made.stderr);
    ensure!(made.status.success(), "{said}");
    machine.volume(AT)?.cut(Survives::Nothing);
    let dir = machine.path_from_outside(dir);
    for file in ["ca.key", "key.pem", "controller.db", "operator/key.pem"] {
        ensure!(dir.join(file).exists(), "{file} is gone");
    }
    Ok(())
}
