//! Debian systems with systemd as PID 1, in containers of systemd-nspawn on this machine's kernel.
//!
//! A [`Container`] owns its root file system, its processes, its cgroup and copies of the device files (systemd inside
//! sets their modes); all of it ends with the value. Refuses, as a reason to skip: a machine without systemd-nspawn,
//! cgroup v2 or userfaultfd.

use super::{Machine, Ran};
use anyhow::{Context as _, Result, bail, ensure};
use godwit_testkit::guest::debian::{self, Images};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Device files that guests need.
const DEVICES: [&str; 3] = ["kvm", "userfaultfd", "net/tun"];
/// Longest start of a container.
const BOOT: Duration = Duration::from_secs(120);
/// What a person's shell has.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

pub struct Container {
    unique: String,
    dir: PathBuf,
    cgroup: PathBuf,
    nspawn: Child,
    /// PID 1 inside, as it is numbered outside.
    pub init: u32,
}

/// The root file systems, made where they are not there yet.
pub fn images() -> Result<Images> {
    if let Some(why) = missing() {
        return Ok(Images::NotHere(why));
    }
    debian::images("containers")
}

fn missing() -> Option<String> {
    let program = Command::new("systemd-nspawn").arg("--version").output();
    if program.is_err() {
        return Some("systemd-nspawn is not installed (scripts/install-deps.sh does)".into());
    }
    if cgroup2().is_none() {
        return Some("no cgroup v2 hierarchy is mounted here".into());
    }
    if !Path::new("/dev/userfaultfd").exists() {
        return Some("this kernel has no /dev/userfaultfd".into());
    }
    None
}

/// Where the version 2 hierarchy is mounted.
fn cgroup2() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let mut lines = mounts.lines().map(|line| line.split(' '));
    lines.find_map(|mut words| {
        let place = words.nth(1)?;
        (words.next()? == "cgroup2").then(|| PathBuf::from(place))
    })
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program).args(arguments).output()?;
    ensure!(
        output.status.success(),
        "{program} {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is no text")
}

impl Container {
    /// Unpacks a system below `dir`, boots it and waits until systemd says that it is up. `/run` is mounted as real hosts mount it.
    pub fn boot(name: &str, image: &Path, dir: &Path) -> Result<Self> {
        let dir = dir.join(name);
        if dir.exists() {
            std::fs::remove_dir_all(&dir)?;
        }
        let root = dir.join("root");
        std::fs::create_dir_all(&root)?;
        run("tar", &["xf", text(image)?, "-C", text(&root)?])?;
        std::fs::write(root.join("etc/hostname"), format!("{name}\n"))?;
        let unique = format!("godwit-test-{}-{name}", std::process::id());
        let cgroup = cgroup2().context("no cgroup v2")?.join(&unique);
        let nspawn = start(&unique, &dir, &cgroup)?;
        let mut container = Self {
            unique,
            dir,
            cgroup,
            nspawn,
            init: 0,
        };
        container.wait_until_up()?;
        Ok(container)
    }

    /// Boots a system that has powered itself off. Its cables went with the power.
    pub fn boot_again(&mut self) -> Result<()> {
        self.wait_off(BOOT)?;
        remove_groups(&self.cgroup);
        self.nspawn = start(&self.unique, &self.dir, &self.cgroup)?;
        self.wait_until_up()
    }

    fn wait_until_up(&mut self) -> Result<()> {
        let deadline = Instant::now() + BOOT;
        while !self.find_init()? {
            if let Some(status) = self.nspawn.try_wait()? {
                bail!("systemd-nspawn ended with {status}: {}", self.console());
            }
            ensure!(
                Instant::now() < deadline,
                "the container has no systemd: {}",
                self.console()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        let up = self.shell("systemctl is-system-running --wait", BOOT)?;
        let state = up.stdout.trim().to_owned();
        if !matches!(state.as_str(), "running" | "degraded") {
            bail!("the container is {state}: {up:?} {}", self.console());
        }
        let run = self.shell("mount -o remount,noexec,nosuid,nodev /run", BOOT)?;
        ensure!(run.code == Some(0), "/run: {run:?}");
        Ok(())
    }

    /// PID 1 is there once systemd itself runs and answers.
    fn find_init(&mut self) -> Result<bool> {
        let own = self.nspawn.id();
        let children = format!("/proc/{own}/task/{own}/children");
        let children = std::fs::read_to_string(children).unwrap_or_default();
        let Some(pid) = children.split_whitespace().next() else {
            return Ok(false);
        };
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        self.init = pid.parse()?;
        Ok(comm.trim() == "systemd" && self.inside("run/systemd/private").exists())
    }

    /// A file inside as it is reached from outside.
    pub fn inside(&self, path: &str) -> PathBuf {
        Path::new(&format!("/proc/{}/root", self.init)).join(path.trim_start_matches('/'))
    }

    /// A command of this machine in the container's network.
    pub fn in_network(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["-t", &self.init.to_string(), "-n"])
            .arg(program);
        command
    }

    /// Waits until the system has powered itself off.
    pub fn wait_off(&mut self, within: Duration) -> Result<()> {
        let deadline = Instant::now() + within;
        while self.nspawn.try_wait()?.is_none() {
            ensure!(
                Instant::now() < deadline,
                "it is not off after {within:?}: {}",
                self.console()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// What came on the console, its last part.
    fn console(&self) -> String {
        let text = std::fs::read(self.dir.join("console")).unwrap_or_default();
        let tail = text.len().saturating_sub(3000);
        String::from_utf8_lossy(text.get(tail..).unwrap_or_default()).into_owned()
    }
}

fn start(unique: &str, dir: &Path, cgroup: &Path) -> Result<Child> {
    std::fs::create_dir_all(cgroup)?;
    let root = dir.join("root");
    let log = std::fs::File::create(dir.join("console"))?;
    let mut command = Command::new("sh");
    // A cgroup of its own: what keeps its unit makes groups of fixed names below the caller's.
    command.args([
        "-c",
        "echo $$ >\"$1/cgroup.procs\" && shift && exec setpriv --pdeathsig KILL -- systemd-nspawn \"$@\"",
        "sh",
        text(cgroup)?,
        "--quiet",
        "--boot",
        "--register=no",
        "--keep-unit",
        "--private-network",
        "--console=pipe",
        "--capability=all",
        "--resolv-conf=off",
        "--timezone=off",
        "--link-journal=no",
        "--machine",
        unique,
        "--directory",
        text(&root)?,
    ]);
    for device in devices(dir)? {
        command.arg(device);
    }
    command
        .env("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", "1")
        .env("SYSTEMD_NSPAWN_LOCK", "0")
        .env("SYSTEMD_SECCOMP", "0");
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    Ok(command.spawn()?)
}

/// Copies of this machine's device files, as arguments that put them into a container.
fn devices(dir: &Path) -> Result<Vec<String>> {
    let mut arguments = Vec::new();
    for name in DEVICES {
        let own = Path::new("/dev").join(name);
        if !own.exists() {
            continue;
        }
        let copy = dir.join(name.replace('/', "-"));
        run("cp", &["-a", text(&own)?, text(&copy)?])?;
        ensure!(
            copy.metadata()?.rdev() == own.metadata()?.rdev(),
            "{} is no copy of {}",
            copy.display(),
            own.display()
        );
        arguments.push(format!("--bind={}:{}", copy.display(), own.display()));
    }
    Ok(arguments)
}

/// Lays a cable between two running containers; each end is called `name`.
pub fn cable(name: &str, ends: [&Container; 2]) -> Result<()> {
    let [a, b] = ends.map(|end| end.init.to_string());
    run(
        "ip",
        &[
            "link", "add", name, "netns", &a, "type", "veth", "peer", "name", name, "netns", &b,
        ],
    )
}

impl Machine for Container {
    fn shell(&self, script: &str, within: Duration) -> Result<Ran> {
        let limit = within.as_secs().max(1).to_string();
        let output = Command::new("timeout")
            .args(["--kill-after=5", &limit, "nsenter", "-a", "-t"])
            .arg(self.init.to_string())
            .args(["env", "-i", PATH, "HOME=/root", "LANG=C.UTF-8"])
            .args(["DEBIAN_FRONTEND=noninteractive", "sh", "-c"])
            .arg(format!("cd /root && {script}"))
            .stdin(Stdio::null())
            .output()?;
        Ok(output.into())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // Whatever is gone already needs no ending.
        if self.nspawn.try_wait().ok().flatten().is_none() {
            let init = i32::try_from(self.init).ok().filter(|pid| *pid > 1);
            let _ = init.map(|pid| crate::stack::signal(pid, crate::stack::KILL));
            let _ = self.nspawn.kill();
            let _ = self.nspawn.wait();
        }
        remove_groups(&self.cgroup);
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Removes a cgroup with those below it, once what was in them has gone.
fn remove_groups(group: &Path) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while group.exists() && Instant::now() < deadline {
        let found = Command::new("find")
            .arg(group)
            .args(["-depth", "-type", "d", "-exec", "rmdir", "{}", "+"])
            .stderr(Stdio::null())
            .status();
        if found.is_err() {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
