//! A disk of an emulated guest, whose own load is measured: through the socket, and by QEMU's own device.
//!
//! Owns QEMU, which ends with the value. The guest is the testkit's Linux, and its `guest-probe` makes the load and says on the
//! console what it saw. Refuses: to wait longer than a boot and the load take.

use super::plan::{Cell, GUEST_S, System, Way};
use super::server::{blockdev, ours};
use super::site::{RUN, Site};
use anyhow::{Context as _, Result, bail};
use godwit_testkit::disk_load::Order;
use godwit_testkit::guest::linux::{GuestNetwork, LinuxGuest, command_line, target_dir};
use godwit_testkit::qemu::machine_args;
use serde_json::Value;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const MEMORY_MIB: u32 = 256;
/// A boot under emulation, the load, and as much again on a machine that others use.
const LIMIT: Duration = Duration::from_secs(180);

struct Emulated(Child);

impl Drop for Emulated {
    fn drop(&mut self) {
        // It may have ended; either way it is waited for, so that nothing of it is left.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the guest saw of its disk, whose image has been prepared: `iops`, `read` and `write`.
pub fn load(site: &Site, cell: &Cell, system: System, programs: &Path) -> Result<Value> {
    let image = site.image(cell);
    site.resize_memory(u64::from(MEMORY_MIB) << 20)?;
    let deadline = Instant::now() + LIMIT;
    let (device, _server) = match system {
        System::VirtioBlk => (own_device(&image), None),
        _ => {
            let server = ours(site, &image, (programs, Way::Mirror), deadline)?;
            (socket_device(), Some(server))
        }
    };
    let guest = site.lend(&LinuxGuest::find(&target_dir()?)?)?;
    let order = format!(
        "{},{},{},{GUEST_S}",
        cell.kind.io_bytes,
        cell.outstanding,
        if cell.kind.order == Order::Sequential {
            "sequential"
        } else {
            "random"
        },
    );
    let line = command_line(&GuestNetwork::default());
    let line = format!("{line} godwit.redis=no godwit.disk={order}");
    let mut command = site.command("qemu-system-x86_64");
    command.args(machine_args(
        "tcg",
        &Path::new(RUN).join("memory"),
        MEMORY_MIB,
    ));
    command.args(["-serial", "stdio", "-no-reboot", "-append", &line]);
    command.arg("-kernel").arg(&guest.kernel);
    command.arg("-initrd").arg(&guest.initrd);
    command.args(device);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut qemu = Emulated(child.context("QEMU does not start")?);
    let console = qemu.0.stdout.take().context("QEMU has no console")?;
    said(console, deadline)
}

/// What comes after `disk-load: `; whoever waits for too long ends QEMU, and with it the console.
fn said(console: impl std::io::Read + Send + 'static, deadline: Instant) -> Result<Value> {
    let (sender, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut console = BufReader::new(console);
        let mut line = Vec::new();
        while console
            .read_until(b'\n', &mut line)
            .is_ok_and(|count| count > 0)
        {
            let text = String::from_utf8_lossy(&line).into_owned();
            line.clear();
            if let Some((_, said)) = text.split_once("disk-load: ") {
                let _ = sender.send(said.trim().to_owned()); // whoever asked may have given up
                return;
            }
        }
    });
    let left = deadline.saturating_duration_since(Instant::now());
    let said = told
        .recv_timeout(left)
        .context("the guest said nothing of its disk")?;
    match serde_json::from_str(&said) {
        Ok(seen) => Ok(seen),
        Err(_) => bail!("the guest's load {said}"),
    }
}

/// As the product gives it to QEMU.
fn socket_device() -> Vec<String> {
    let path = Path::new(RUN).join("disk");
    let socket = format!("socket,id=disk,path={}", path.display());
    let device = "vhost-user-blk-pci,chardev=disk,num-queues=1,queue-size=256";
    ["-chardev", &socket, "-device", device]
        .map(String::from)
        .into()
}

/// QEMU's own, with a thread for it, io_uring, and no page cache.
fn own_device(image: &Path) -> Vec<String> {
    let device = "virtio-blk-pci,drive=disk,iothread=thread,num-queues=1,queue-size=256";
    let drive = blockdev("disk", image).to_string();
    [
        "-object",
        "iothread,id=thread",
        "-blockdev",
        &drive,
        "-device",
        device,
    ]
    .map(String::from)
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(console: &'static str) -> Result<Value> {
        said(console.as_bytes(), Instant::now() + LIMIT)
    }

    #[test]
    fn the_guests_line_is_found_among_others_and_a_failure_is_told_in_its_words() {
        let seen =
            heard("boot\r\n[ 1.2] disk-load: {\"iops\":12.5,\"read\":null}\r\nmore\n").unwrap();
        assert_eq!(seen["iops"], 12.5);
        let failed = heard("disk-load: failed: no /dev/vda\r\n").unwrap_err();
        assert!(failed.to_string().contains("no /dev/vda"), "{failed}");
        let silent = heard("Kernel panic\n").unwrap_err();
        assert!(format!("{silent:#}").contains("said nothing"), "{silent:#}");
    }
}
