//! A VM that boots from its disk, served by its VM process: killed, paused, stopped while its guest works with it.

mod booted;

use anyhow::{Context as _, Result, ensure};
use booted::{LONG, LOOK_EVERY, Site, under_way, versions};
use godwit_e2e::guests::{disk, vm_with_disk};
use godwit_testkit::testvol;
use godwit_types::host_api::VmRequest;
use godwit_types::vm::{DiskSpec, VmState};
use serde_json::json;
use std::fs::Permissions;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What QEMU knows of the disk while nobody serves it.
#[derive(Debug)]
struct Dead {
    /// Requests that were taken out of the ring and not answered.
    under_way: usize,
    /// Entries of the largest ring.
    ring: u64,
}

/// Kills the VM process and looks before its successor begins.
fn killed(site: &Site) -> Result<Dead> {
    let (host, deadline) = (&site.pair.a, Instant::now() + LONG);
    let qemu = host.vm()?.qemu_pid.context("no QEMU")?;
    site.pair.supervised.store(false, Ordering::SeqCst);
    host.signal_kill()?;
    while !host.has_died() {
        ensure!(Instant::now() < deadline, "it does not die");
        std::thread::sleep(LOOK_EVERY);
    }
    let under_way = under_way(qemu)?;
    let path = "/machine/peripheral/disk0/virtio-backend";
    let asked = json!({"path": path, "queue": 0});
    let told = site.ask_qemu("x-query-virtio-queue-status", asked)?;
    let ring = told["vring-num"].as_u64().context("no size of a ring")?;
    site.pair.supervised.store(true, Ordering::SeqCst);
    Ok(Dead { under_way, ring })
}

fn is_taken_over(site: &Site, before: Option<i32>) -> Result<()> {
    let (host, deadline) = (&site.pair.a, Instant::now() + LONG);
    while host.vm().map_or(true, |vm| vm.vm_process_pid == before) {
        ensure!(Instant::now() < deadline, "not taken over");
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// Until some of the kills have met a request under way.
fn is_killed_many_times(version: &str, usr: Option<&Path>) -> Result<()> {
    const MOST: usize = 100;
    let site = Site::booted_by(usr)?;
    let (mut kills, mut met) = (0, 0);
    while kills < 10 || met < 3 {
        ensure!(kills < MOST, "{met} of {kills} met a request");
        let pid = site.pair.a.vm()?.vm_process_pid;
        site.goes_on(20)?;
        let dead = killed(&site)?;
        (kills, met) = (kills + 1, met + dead.under_way.min(1));
        is_taken_over(&site, pid)?;
        site.goes_on(20)?;
    }
    site.ask(&VmRequest::Pause)?;
    let round = site.image_has_all()?;
    println!("  QEMU {version}: {met} of {kills} kills met a request, {round} rounds");
    Ok(())
}

#[test]
fn a_vm_process_is_killed_ten_times_and_its_guest_loses_no_write() -> Result<()> {
    is_killed_many_times("7.2", None)
}

#[test]
fn a_vm_process_under_qemu_10_is_killed_ten_times_and_its_guest_loses_no_write() -> Result<()> {
    match versions()?.into_iter().nth(1) {
        Some((version, usr)) => is_killed_many_times(version, usr.as_deref()),
        None => Ok(()),
    }
}

/// Each of the guest's threads waits for its own request, and all of them have to come to their end.
fn linux_loses_no_request(version: &str, usr: Option<&Path>, ring: u64) -> Result<()> {
    const LOAD: (u32, u32) = (32, 30);
    let work = |mounts: &OwnedFd| {
        let site = Site::with_linux(usr, mounts, LOAD)?;
        let met = linux_is_killed(&site, ring)?;
        println!("  QEMU {version}: a ring of {ring}, the kills met {met:?} requests");
        let several = met.iter().filter(|met| **met > 1).count();
        ensure!(several >= 5, "{met:?}");
        Ok(())
    };
    testvol::apart(work)?.unwrap_or(Ok(()))
}

/// Gives how many requests each kill met.
fn linux_is_killed(site: &Site, ring: u64) -> Result<Vec<usize>> {
    let mut met = Vec::new();
    for _ in 0..10 {
        site.linux_writes(100)?;
        let pid = site.pair.a.vm()?.vm_process_pid;
        let dead = killed(site)?;
        ensure!(dead.ring == ring, "{dead:?}");
        met.push(dead.under_way);
        is_taken_over(site, pid)?;
    }
    site.linux_ends()?;
    Ok(met)
}

#[test]
fn a_vm_process_is_killed_ten_times_and_linux_loses_no_request() -> Result<()> {
    linux_loses_no_request("7.2", None, 256)
}

/// Its ring has 1,024 entries, since firmware has used the disk before.
#[test]
fn a_vm_process_under_qemu_10_is_killed_ten_times_and_linux_loses_no_request() -> Result<()> {
    match versions()?.into_iter().nth(1) {
        Some((version, usr)) => linux_loses_no_request(version, usr.as_deref(), 1024),
        None => Ok(()),
    }
}

#[test]
fn a_guest_is_paused_and_resumed_and_its_disk_is_whole_each_time() -> Result<()> {
    let site = Site::booted()?;
    for _ in 0..20 {
        site.goes_on(3)?;
        site.ask(&VmRequest::Pause)?;
        site.image_has_all()?;
        site.ask(&VmRequest::Resume)?;
    }
    site.goes_on(3)
}

#[test]
fn a_killed_vm_process_of_a_paused_guest_does_not_matter_to_its_disk() -> Result<()> {
    let site = Site::booted()?;
    let host = &site.pair.a;
    site.ask(&VmRequest::Pause)?;
    let (pid, round) = (host.vm()?.vm_process_pid, site.image_has_all()?);
    host.signal_kill()?;
    host.wait_state(VmState::Paused, LONG)?;
    ensure!(host.vm()?.vm_process_pid != pid && site.image_has_all()? == round);
    site.ask(&VmRequest::Resume)?;
    site.goes_on(20)
}

#[test]
fn a_vm_that_is_stopped_leaves_its_image_to_the_next_and_no_socket() -> Result<()> {
    let site = Site::booted()?;
    for _ in 0..2 {
        ensure!(
            site.sockets()? == 1,
            "the RAM file, since QEMU is connected"
        );
        site.ask(&VmRequest::Stop { force: true })?;
        site.pair.a.wait_state(VmState::Stopped, LONG)?;
        ensure!(site.sockets()? == 0, "something is left");
        site.ask(&VmRequest::Start)?;
        site.goes_on(10)?;
    }
    Ok(())
}

#[test]
fn an_image_that_somebody_has_open_is_refused_and_nothing_is_left() -> Result<()> {
    let site = Site::booted()?;
    site.ask(&VmRequest::Stop { force: true })?;
    site.pair.a.wait_state(VmState::Stopped, LONG)?;
    let mut other =
        godwit_blockio::Image::open(&site.image, godwit_blockio::Access::ReadWrite, 512)?;
    other.lock("other", LONG)?;
    let error = site.ask(&VmRequest::Start).err();
    let error = error
        .context("it started on an image that is in use")?
        .to_string();
    let told = ["disk 'root'", "root.raw", "is in use"];
    ensure!(told.iter().all(|word| error.contains(word)), "{error}");
    ensure!(site.sockets()? == 0, "something is left");
    drop(other);
    site.ask(&VmRequest::Start)?;
    site.goes_on(10)
}

#[test]
fn a_guest_that_was_reset_while_its_vm_process_was_dead_boots_again() -> Result<()> {
    let site = Site::booted()?;
    site.pair.a.signal_kill()?;
    site.tell_qemu(&["system_reset"])?;
    // It counts from 0 again.
    let deadline = Instant::now() + LONG;
    while site.progress()?.round > 10 {
        ensure!(Instant::now() < deadline, "the guest does not boot again");
        std::thread::sleep(LOOK_EVERY);
    }
    site.goes_on(20)
}

/// QEMU 7.2 never starts a disk that was away when its guest was let run, as by a `cont` that a dying VM process has sent.
#[test]
fn a_guest_that_was_let_run_while_its_disk_was_away_goes_on_where_it_was() -> Result<()> {
    let site = Site::booted()?;
    let before = site.progress()?.round;
    site.pair.a.signal_kill()?;
    site.tell_qemu(&["stop", "cont"])?;
    site.goes_on(20)?;
    ensure!(site.progress()?.round > before, "it was reset");
    site.ask(&VmRequest::Pause)?;
    site.image_has_all().map(drop)
}

#[test]
fn another_file_in_the_place_of_an_image_is_not_served_to_a_guest_that_runs() -> Result<()> {
    let site = Site::booted()?;
    let host = &site.pair.a;
    let aside = site.image.with_extension("aside");
    std::fs::rename(&site.image, &aside)?;
    std::fs::copy(&aside, &site.image)?;
    std::fs::set_permissions(&site.image, Permissions::from_mode(0o666))?;
    let pid = host.vm()?.vm_process_pid;
    host.signal_kill()?;
    let deadline = Instant::now() + LONG;
    let told = |vm: &godwit_types::host_api::HostVm| {
        let note = vm.note.as_deref().unwrap_or_default();
        vm.vm_process_pid != pid && note.contains("'root' is not served")
    };
    while !host.vm().is_ok_and(|vm| told(&vm)) {
        ensure!(Instant::now() < deadline, "{:?}", host.vm());
        std::thread::sleep(LOOK_EVERY);
    }
    let copied = std::fs::read(&site.image)?;
    std::fs::rename(&aside, &site.image)?;
    site.goes_on(20)?;
    site.ask(&VmRequest::Pause)?;
    site.image_has_all()?;
    ensure!(
        copied != std::fs::read(&site.image)?,
        "the guest worked with it"
    );
    Ok(())
}

#[test]
fn a_guest_with_two_disks_has_both() -> Result<()> {
    let site = Site::booted()?;
    site.ask(&VmRequest::Stop { force: true })?;
    site.pair.a.wait_state(VmState::Stopped, LONG)?;
    let (mut spec, second) = (
        vm_with_disk(site.pair.dir(), &site.image, false)?,
        site.image.with_extension("2"),
    );
    std::fs::write(&second, [0; 4096])?;
    std::fs::set_permissions(&second, Permissions::from_mode(0o666))?;
    spec.disks.push(DiskSpec {
        read_only: true,
        ..disk("data", &second, false)?
    });
    let file = site
        .pair
        .a
        .state_dir()
        .join(godwit_types::host_api::SPEC_FILE);
    site.pair.a.kill_process();
    godwit_store::save_json(&file, &spec)?;
    site.pair.a.start_process()?;
    site.ask(&VmRequest::Start)?;
    site.goes_on(10)?;
    for image in [&site.image, &second] {
        let locked = godwit_blockio::Image::open(image, godwit_blockio::Access::ReadWrite, 512)?
            .lock("other", Duration::ZERO);
        ensure!(locked.is_err(), "nobody has {} open", image.display());
    }
    site.pair.a.signal_kill()?;
    site.goes_on(20)
}
