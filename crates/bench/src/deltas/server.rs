//! Who serves one disk over the common image: godwit-disk, or QEMU's storage daemon.
//!
//! Owns the process, which ends with the value. Refuses: to wait longer than it was told to for a socket.

use super::plan::System;
use anyhow::{Context as _, Result, ensure};
use godwit_testkit::disk_load::Place;
use godwit_testkit::stage::go_on;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Where a disk is, and what it takes.
pub struct Server {
    child: Child,
    files: Vec<PathBuf>,
    pub place: Place,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended; either way it is waited for, so that nothing of it is left.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where disks are made.
#[derive(Debug, Clone, Copy)]
pub struct Site<'a> {
    /// On the machine's own storage,
    pub local: &'a Path,
    /// and in memory, where sockets lie.
    pub run: &'a Path,
    pub programs: &'a Path,
    /// What all disks begin as.
    pub parent: &'a Path,
    pub bytes: u64,
}

impl Server {
    /// Makes a disk of this number, empty over the common image, and serves it.
    pub fn start(site: Site<'_>, system: System, number: u32) -> Result<Self> {
        let place = Place {
            socket: site.run.join(format!("disk-{number}")),
            memory: site.run.join(format!("memory-{number}")),
        };
        place.make_memory()?;
        let (mut command, files) = match system {
            System::Godwit => ours(site, &place, number)?,
            System::Clusters | System::Subclusters => daemon(site, system, &place, number)?,
        };
        let log = File::create(site.run.join(format!("log-{number}")))?;
        // Ours ends with its input.
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null());
        let child = child.stderr(log).spawn();
        let server = Self {
            child: child.context("who serves a disk does not start")?,
            files,
            place,
        };
        server.wait()?;
        Ok(server)
    }

    fn wait(&self) -> Result<()> {
        let until = Instant::now() + SOON;
        while !self.place.socket.exists() {
            go_on()?;
            ensure!(Instant::now() < until, "nobody serves a disk");
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Bytes that its files take.
    pub fn takes(&self) -> u64 {
        let takes = |file: &PathBuf| file.metadata().map_or(0, |found| found.blocks() * 512);
        self.files.iter().map(takes).sum()
    }

    /// Bytes that it has given the kernel to write.
    pub fn written(&self) -> Result<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/io", self.child.id()))?;
        let mut lines = text.lines();
        let written = lines.find_map(|line| line.strip_prefix("write_bytes: "));
        Ok(written.context("no write_bytes")?.trim().parse()?)
    }

    /// Core-seconds that its threads have used.
    pub fn cpu_s(&self) -> f64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let nanos = |task: std::fs::DirEntry| {
            let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<u64>().ok()
        };
        let all = tasks.into_iter().flatten().flatten().filter_map(nanos);
        all.sum::<u64>() as f64 / 1e9
    }
}

/// The disk's own file is a hole.
fn ours(site: Site<'_>, place: &Place, number: u32) -> Result<(Command, Vec<PathBuf>)> {
    let at = |name: String| site.local.join(name);
    let own = at(format!("disk-{number}.raw"));
    File::create(&own)?.set_len(site.bytes)?;
    let mut command = Command::new(site.programs.join("godwit-disk"));
    command.arg("--image").arg(&own);
    command.arg("--socket").arg(&place.socket);
    command.arg("--memory").arg(&place.memory);
    command.arg("--record").arg(at(format!("record-{number}")));
    let descriptor = at(format!("disk-{number}.d1.vmdk"));
    command.arg("--delta").arg(&descriptor);
    command.arg("--over").arg(site.parent);
    let extent = at(format!("disk-{number}.d1-sesparse.vmdk"));
    Ok((command, vec![own, descriptor, extent]))
}

fn daemon(
    site: Site<'_>,
    system: System,
    place: &Place,
    number: u32,
) -> Result<(Command, Vec<PathBuf>)> {
    let overlay = site.local.join(format!("disk-{number}.qcow2"));
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
    create.arg(site.parent).args(["-o", system.options()]);
    let made = create.arg(&overlay).output().context("no qemu-img")?;
    ensure!(
        made.status.success(),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    let mut command = Command::new("qemu-storage-daemon");
    command.args(["--object", "iothread,id=thread"]);
    command.args(["--blockdev", &overlaid(&overlay, site.parent).to_string()]);
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=export,node-name=disk,writable=on,addr.type=unix,addr.path={},iothread=thread",
        place.socket.display()
    ));
    Ok((command, vec![overlay]))
}

/// Past the page cache, as ours are.
fn overlaid(overlay: &Path, parent: &Path) -> Value {
    let file = |path: &Path| {
        json!({
            "driver": "file", "filename": path, "aio": "io_uring",
            "cache": {"direct": true, "no-flush": false},
        })
    };
    json!({
        "driver": "qcow2", "node-name": "disk", "discard": "unmap",
        "cache": {"direct": true, "no-flush": false},
        "file": file(overlay),
        "backing": {"driver": "raw", "read-only": true, "file": file(parent)},
    })
}
