//! The soak finds what it is there to find: a guest that really runs twice, a disk that lost a write.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::soak::checks::Kind;
use godwit_e2e::soak::disks;
use godwit_e2e::soak::site::Site;
use godwit_e2e::stack::site::HOST_STATE;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::process::Command;

/// One round in which a person's false word runs a VM on two hosts.
fn false_word(arguments: &[&str]) -> Result<(Option<i32>, String)> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit-soak"));
    command.args([
        "--only",
        "false-word",
        "--rounds",
        "1",
        "--seed",
        "1",
        "--vms",
        "1",
    ]);
    let output = command.args(arguments).output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{said}{}", String::from_utf8_lossy(&output.stderr));
    Ok((output.status.code(), said))
}

#[test]
fn a_guest_that_runs_twice_is_seen_from_outside() -> Result<()> {
    let (code, said) = false_word(&["--unforgiving"])?;
    ensure!(code == Some(1), "exit code {code:?}");
    ensure!(
        said.contains("VIOLATION running twice: vm0: QEMU "),
        "{said}"
    );
    let (code, said) = false_word(&[])?;
    ensure!(code == Some(0), "exit code {code:?}");
    ensure!(said.trim_end().ends_with("violations: 0"), "{said}");
    Ok(())
}

#[test]
fn a_disk_that_lost_a_write_is_seen_from_outside() -> Result<()> {
    let site = Site::new(2)?;
    let (vm, host) = ("vm1", "b");
    site.stack.wait_passes(vm, host, 1)?;
    site.stack.ok("controller", &["vm", "pause", vm])?;
    let wrong = disks::writes(&site, vm, host);
    ensure!(wrong.is_none(), "{wrong:?}");
    let path = site.image_at(vm, host).context("it has no image")?;
    let image = File::options()
        .write(true)
        .open(site.stack.inside(host, path)?)?;
    // Every place was written by now; this one lost it.
    image.write_all_at(&[0; 512], 512)?;
    let wrong = disks::writes(&site, vm, host).context("nobody saw it")?;
    ensure!(
        wrong.kind == Kind::Writes && wrong.what.contains("sector 1 "),
        "{wrong}"
    );
    Ok(())
}

#[test]
fn a_restored_disk_outlives_the_next_power_cut() -> Result<()> {
    let mut site = Site::new(1)?;
    let host = ["c".to_owned()];
    let certificate = site.stack.inside("c", HOST_STATE)?.join("pki/cert.pem");
    site.keep_copies()?;
    site.power_off(&host)?;
    // Each of these power cuts leaves something else of what was not synced.
    for _ in 0..8 {
        site.restore_host("c")?;
        site.power_on("c")?;
        site.power_off(&host)?;
        let there = certificate.exists();
        ensure!(there, "the restored host lost {}", certificate.display());
    }
    Ok(())
}
