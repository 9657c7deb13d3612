//! What an administrator expects of a cloud image: cloud-init tells it who it is, its agent says so to people and powers it off, and an ISO image
//! beside its disk is whole. All of it goes along when the VM moves. The guest is a Debian with cloud-init and qemu-guest-agent.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::disks::{store, with_stores};
use godwit_e2e::stack::{SOON, Stack, names};
use godwit_testkit::guest::debian::{self, Images, Shell};
use std::path::Path;
use std::time::Duration;

/// Longest boot, command in the guest or wait for its agent, on a machine that has little time for it.
const PATIENCE: Duration = Duration::from_secs(300);
const VM: &str = "web_1";
/// What only the seed says.
const ADDRESS: &str = "10.77.0.77";
/// Where both hosts have the same ISO image.
const ISO_DIR: &str = "/var/tmp/iso";
/// Whole sectors of 2,048 bytes, and no whole pages.
const ISO_BYTES: usize = 3 * 2048 + (1 << 20);
const USER_DATA: &str = "#cloud-config\nruncmd:\n  - echo told >> /root/told\n";

fn bring_up(image: &Path) -> Result<Stack> {
    let stack = with_stores("guest-tools")?;
    let iso: Vec<u8> = (0..ISO_BYTES).map(|at| (at / 7 % 251) as u8).collect();
    for host in ["a", "b"] {
        stack.make_directory(host, ISO_DIR)?;
        std::fs::write(stack.inside(host, ISO_DIR)?.join("it.iso"), &iso)?;
    }
    std::fs::write(stack.dir().join("user-data.yaml"), USER_DATA)?;
    let text = format!(
        "name = \"{VM}\"\nvcpus = 1\nmemory_mib = 512\n[[disk]]\nname = \"root\"\npath = \"{}/root.raw\"\nfrom = \"{}\"\n[[disk]]\nname = \"iso\"\npath = \"{ISO_DIR}/it.iso\"\nread_only = true\n[[nic]]\nport_group = \"vm\"\n[cloud_init]\nuser_data_file = \"user-data.yaml\"\nssh_keys = [\"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJl3dIeudNqd0DPMRD6OIh65tjkxFNOtGcWB2gCgXhOm eve\"]\n[[cloud_init.network]]\naddresses = [\"10.77.0.10/24\", \"{ADDRESS}/24\"]\n",
        store("a"),
        image.display()
    );
    let file = stack.describe(VM, &text)?;
    stack.ok("controller", &["vm", "create", &file])?;
    Ok(stack)
}

fn boot(stack: &Stack) -> Result<Shell> {
    let began = std::time::Instant::now();
    stack.ok("controller", &["vm", "start", VM, "--on", "a"])?;
    let shell = debian::reach(stack, PATIENCE)?;
    println!("  a shell after {:.0} s", began.elapsed().as_secs_f64());
    Ok(shell)
}

/// Waits until the guest has told people who it is.
fn is_shown(stack: &Stack, when: &str) -> Result<()> {
    stack.until(&format!("the guest is shown {when}"), PATIENCE, || {
        let guest = &stack.vm(VM)?["guest"];
        let has_address = guest["cards"].to_string().contains(ADDRESS);
        Ok(guest["hostname"] == "web-1" && has_address)
    })?;
    let guest = &stack.vm(VM)?["guest"];
    println!("  {when}: {guest}");
    ensure!(
        guest["os"].as_str().is_some_and(|os| os.contains("Debian")),
        "{guest}"
    );
    Ok(())
}

/// Digests of the seed and of the ISO image as the guest reads them from its devices.
fn digests(shell: &mut Shell) -> Result<String> {
    shell.run(
        "sync; echo 3 >/proc/sys/vm/drop_caches; md5sum /dev/vdb /dev/disk/by-label/cidata",
        PATIENCE,
    )
}

/// The guest knows what its seed says, and did it once.
fn was_told(shell: &mut Shell) -> Result<()> {
    let done = "until systemctl is-active -q cloud-final.service; do sleep 1; done; cat /root/told";
    ensure!(
        shell.run(done, PATIENCE)? == "told",
        "it did not do it once"
    );
    ensure!(shell.run("hostname", PATIENCE)? == "web-1");
    let addresses = shell.run("ip -4 addr show eth0", PATIENCE)?;
    ensure!(addresses.contains(ADDRESS), "{addresses}");
    let keys = shell.run("cat /home/debian/.ssh/authorized_keys", PATIENCE)?;
    ensure!(keys.contains("gXhOm eve"), "{keys}");
    let size = shell.run("blockdev --getsize64 /dev/vdb", PATIENCE)?;
    ensure!(size == ISO_BYTES.to_string(), "{size}");
    ensure!(
        shell.run(
            "blockdev --getro /dev/vdb /dev/disk/by-label/cidata",
            PATIENCE
        )? == "1\n1"
    );
    Ok(())
}

#[test]
fn a_cloud_image_is_told_who_it_is_says_so_and_obeys_wherever_it_is() -> Result<()> {
    let image = match debian::images("guest")? {
        Images::Here(images) => images.into_iter().next().context("no image is named")?,
        Images::NotHere(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let stack = bring_up(&image)?;
    let mut shell = boot(&stack)?;
    was_told(&mut shell)?;
    is_shown(&stack, "where it booted")?;
    let before = digests(&mut shell)?;

    stack.migrate(VM, "b", &[])?;
    stack.runs_on(VM, "b")?;
    ensure!(
        digests(&mut shell)? == before,
        "the seed or the ISO image is another one"
    );
    is_shown(&stack, "after the move")?;
    stack.kill_vm_process(VM, "b")?;
    is_shown(&stack, "by another VM process")?;
    let said = stack.ok("controller", &["vm", "show", VM])?;
    println!("{said}");
    ensure!(
        said.contains("web-1, Debian") && !said.contains("runcmd"),
        "{said}"
    );

    let ran = stack.run("controller", &["vm", "stop", VM, "--timeout", "240"])?;
    ensure!(ran.code == Some(0), "{ran:?}");
    ensure!(ran.stderr.contains("by its guest agent"), "{ran:?}");
    stack.wait_state(VM, "stopped", SOON)?;

    // The disk is on host b now, and the guest is the same instance.
    stack.ok("controller", &["vm", "start", VM])?;
    let mut shell = debian::reach(&stack, PATIENCE)?;
    was_told(&mut shell)?;
    stack.ok("controller", &["vm", "pause", VM])?;
    let ran = stack.run("controller", &["vm", "stop", VM, "--timeout", "3"])?;
    ensure!(ran.code == Some(1), "{ran:?}");
    names(
        ran.stderr.lines().last().unwrap_or_default(),
        &["not off after 3 s", "paused"],
    )?;
    let said = stack.ok(
        "controller",
        &["vm", "stop", VM, "--timeout", "3", "--force"],
    )?;
    ensure!(
        said.contains("did not obey within 3 s, and was powered off"),
        "{said}"
    );
    stack.wait_state(VM, "stopped", SOON)?;
    stack.ok("controller", &["vm", "delete", VM]).map(drop)
}
