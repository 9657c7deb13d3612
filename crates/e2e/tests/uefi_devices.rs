//! A machine's flash memory under each QEMU: it goes with the device state, and QEMU writes it once the guest runs.

use anyhow::{Result, ensure};
use common::{Guest, Place, permit, soon};
use godwit_e2e::peers::qemu_10;
use godwit_qemu::command_line::{Flash, MachineConfig};
use godwit_qemu::device_state::SaveNews;
use godwit_qemu::uefi::Uefi;
use godwit_testkit::guest::uefi_program::{self, Progress};
use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[path = "../../qemu/tests/common/mod.rs"]
mod common;

const LONG: Duration = Duration::from_secs(120);
const MEMORY_MIB: u64 = 128;

/// A machine whose variables are in this file.
fn place(uefi: &Uefi, variables: &File, program: &PathBuf, kernel: &std::path::Path) -> Place {
    let mut place = Place::with_memory(&[], MEMORY_MIB);
    place.spec.binary.clone_from(program);
    // Open until the test's process ends: the place has no room for them.
    let [code, variables] = [&uefi.code, variables].map(|file| -> &'static File {
        Box::leak(Box::new(file.try_clone().expect("a descriptor")))
    });
    place.spec.machine = MachineConfig {
        hardware: 2,
        kernel: Some(kernel.to_owned()),
        flash: Some(Flash {
            code_fd: code.as_raw_fd(),
            variables_fd: variables.as_raw_fd(),
        }),
        ..place.spec.machine
    };
    place.spec.inherited = vec![code.as_fd(), variables.as_fd()];
    place
}

fn shows(place: &Place, number: u32) -> Result<()> {
    let until = Instant::now() + LONG;
    let progress = || -> Result<Progress> { Ok(uefi_program::progress(&place.ram())?) };
    let mut from = None;
    loop {
        let now = progress()?;
        match from {
            Some(round) if now.number == number && round != now.round => return Ok(()),
            _ if now.number == number => from = Some(now.round),
            _ => from = None,
        }
        ensure!(
            now.wrong == 0 && Instant::now() < until,
            "{now:?}, not {number}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn whole(file: &File) -> Result<Vec<u8>> {
    let mut content = vec![0; file.metadata()?.len() as usize];
    file.read_exact_at(&mut content, 0)?;
    Ok(content)
}

#[test]
fn flash_memory_goes_with_the_devices_and_is_written_when_the_guest_runs() -> Result<()> {
    let Ok(uefi) = Uefi::open("", "") else {
        println!("skipped: there is no UEFI firmware (package ovmf)");
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755))?;
    let kernel = directory.path().join("program.efi");
    std::fs::write(&kernel, uefi_program::program()?)?;
    let empty = uefi.empty_variables()?;
    let mut programs = vec![PathBuf::from("/usr/bin/qemu-system-x86_64")];
    programs.extend(qemu_10()?.map(|at| at.join("qemu-system-x86_64")));
    for program in programs {
        let files = [tempfile::tempfile()?, tempfile::tempfile()?];
        for file in &files {
            file.write_all_at(&empty, 0)?;
        }
        let [before, after] = &files;
        let source = place(&uefi, before, &program, &kernel);
        let destination = place(&uefi, after, &program, &kernel).incoming();
        let (from, to) = (Guest(source.try_start()?), Guest(destination.try_start()?));
        let blocked = from.machine().blocked_reasons(soon())?;
        ensure!(blocked.is_empty(), "{blocked:?}");
        from.machine().prepare_outgoing(soon())?;
        let incoming = to.machine().prepare_incoming(soon())?;
        from.machine().cont(permit(), soon())?;
        shows(&source, 1)?;
        let _stopped = from.machine().stop(soon())?;
        // What the guest wrote is in the file: so it can be carried before QEMU carries it.
        let written = whole(before)?;
        ensure!(written != empty);
        source.copy_ram_to(&destination);
        let mut state = Vec::new();
        from.machine().save_device_state(soon(), |news| {
            if let SaveNews::Piece(piece) = news {
                state.extend_from_slice(piece);
            }
            Ok(())
        })?;
        to.load(incoming, &state)?;
        ensure!(
            whole(after)? == empty,
            "QEMU writes it before the guest runs"
        );
        to.machine().cont(permit(), soon())?;
        shows(&destination, 1)?;
        ensure!(
            whole(after)? == written,
            "{} does not write it",
            program.display()
        );
        uefi_program::want(&destination.ram(), 40)?;
        shows(&destination, 40)?;
        to.machine().system_reset(soon())?;
        shows(&destination, 41)?;
        println!(
            "  {}: {} bytes of device state",
            program.display(),
            state.len()
        );
    }
    Ok(())
}
