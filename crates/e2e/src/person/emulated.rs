//! Debian systems in emulated machines: each has a kernel, a systemd, cgroup v2 and a `/dev/kvm` of its own.
//!
//! QEMU's emulator offers AMD's virtualisation with nested paging, so KVM inside runs Linux guests where the real CPU has
//! none. An [`Emulated`] owns its QEMU and a root shell in it, on a virtio port; both end with the value, and its disk stays as
//! it was made. Refuses: an answer that is no answer. What runs there is slow: nothing is judged by its time.

use super::{Machine, Ran};
use anyhow::{Context as _, Result, bail, ensure};
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Longest start of a machine, until its shell answers: also on cores that others use.
const BOOT: Duration = Duration::from_secs(600);
/// How often a machine that owes an answer is looked at.
const LOOK_EACH: Duration = Duration::from_secs(1);

/// Root's shell on the virtio port, which runs from the payload. A line is a number, a limit in seconds and a script in
/// base64; the answer has the same number, the exit code, and '=' with what was said in base64.
pub const SHELL: &str = r#"modprobe -q virtio_console
until [ -e /dev/virtio-ports/godwit.shell ]; do sleep 0.1; done
while :; do
    exec 3<>/dev/virtio-ports/godwit.shell
    while IFS=' ' read -r number limit script <&3; do
        printf %s "$script" | base64 -d >/tmp/script
        (cd /root && exec timeout -k 5 "$limit" sh /tmp/script) >/tmp/said 2>&1 </dev/null 3>&-
        printf '%s %s =%s\n' "$number" "$?" "$(base64 -w0 </tmp/said)" >&3
    done
    # Nobody is at the other end: a unit that ends each time would not be started for long.
    exec 3>&-
    sleep 0.5
done
"#;

/// A machine that is lost: its kernel panicked, or nothing in it answers any more. It says nothing of what ran there.
#[derive(Debug)]
pub struct Dead(String);

impl std::fmt::Display for Dead {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for Dead {}

pub struct Emulated {
    /// Not there for one that another run switched on.
    qemu: Option<Child>,
    keep: bool,
    dir: PathBuf,
    ends: Instant,
    shell: Mutex<Option<BufReader<UnixStream>>>,
}

/// What a machine is made of.
pub struct Plan<'a> {
    /// The program `qemu-system-x86_64` that emulates it.
    pub qemu: &'a Path,
    /// Whether it has a thread for each vCPU.
    pub threads: bool,
    /// Directory of `disk.raw`, `vmlinuz` and `initrd`.
    pub image: &'a Path,
    /// A tar file that is unpacked inside as `/payload`.
    pub payload: &'a Path,
    /// Socket of the network segment that it has with the other one.
    pub segment: &'a Path,
    /// 1 makes the segment, 2 joins it.
    pub number: u8,
    pub memory_mib: u32,
    /// Whether it outlives this program.
    pub keep: bool,
    /// When nothing is asked of it any more.
    pub ends: Instant,
}

impl Emulated {
    /// Switches a machine on.
    pub fn power_on(plan: &Plan<'_>, dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        let log = std::fs::File::create(dir.join("qemu.log"))?;
        let end_with_us: &[&str] = if plan.keep {
            &["--"]
        } else {
            &["--pdeathsig", "KILL", "--"]
        };
        let qemu = Command::new("setpriv")
            .args(end_with_us)
            .arg(plan.qemu)
            .args(arguments(plan, dir))
            .env("TMPDIR", dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("the emulator")?;
        let mut machine = Self::attach(dir, plan.ends);
        (machine.qemu, machine.keep) = (Some(qemu), plan.keep);
        Ok(machine)
    }

    /// A machine that another run has left on.
    pub fn attach(dir: &Path, ends: Instant) -> Self {
        Self {
            qemu: None,
            keep: true,
            dir: dir.to_owned(),
            ends,
            shell: Mutex::default(),
        }
    }

    /// Waits until it is up: systemd inside has started what it starts.
    pub fn wait_up(&mut self) -> Result<()> {
        let deadline = Instant::now() + BOOT;
        loop {
            let ended = self.qemu.as_mut().map(Child::try_wait).transpose()?;
            if let Some(status) = ended.flatten() {
                bail!("the emulator ended with {status}: {}", self.console());
            }
            self.forget();
            let asked = self.ask("systemctl is-system-running --wait", BOOT);
            let up = |ran: &Ran| matches!(ran.stdout.trim(), "running" | "degraded");
            if asked.as_ref().is_ok_and(up) {
                return Ok(());
            }
            if Instant::now() >= deadline || self.panicked() {
                bail!(Dead(format!("it is not up: {asked:?} {}", self.console())));
            }
            std::thread::sleep(LOOK_EACH);
        }
    }

    /// Waits until it has booted again: its boot is another one than that.
    pub fn wait_again(&self, boot: &str) -> Result<()> {
        let deadline = Instant::now() + BOOT;
        let id = "cat /proc/sys/kernel/random/boot_id";
        loop {
            // The shell of the boot that ends never answers, so that none is waited for long.
            let asked = self.ask(id, Duration::from_secs(10));
            if asked.is_ok_and(|ran| !ran.stdout.trim().is_empty() && ran.stdout.trim() != boot) {
                return Ok(());
            }
            if Instant::now() >= deadline.min(self.ends) || self.panicked() {
                bail!(Dead(format!("it did not boot again: {}", self.console())));
            }
            std::thread::sleep(LOOK_EACH);
        }
    }

    /// Closes the shell, whose other end may be another one soon.
    pub fn forget(&self) {
        if let Ok(mut shell) = self.shell.lock() {
            *shell = None;
        }
    }

    fn ask(&self, script: &str, within: Duration) -> Result<Ran> {
        let within = within.min(self.ends.saturating_duration_since(Instant::now()));
        ensure!(!within.is_zero(), "no time is left");
        let mut shell = self
            .shell
            .lock()
            .map_err(|_| anyhow::anyhow!("a shell that failed"))?;
        if shell.is_none() {
            let stream = UnixStream::connect(self.dir.join("shell"))?;
            *shell = Some(BufReader::new(stream));
        }
        let reader = shell.as_mut().context("no shell")?;
        let answer = self.exchange(reader, script, within);
        if answer.is_err() {
            // An answer that comes later would be taken for that to the next question.
            *shell = None;
        }
        answer
    }

    fn exchange(
        &self,
        reader: &mut BufReader<UnixStream>,
        script: &str,
        within: Duration,
    ) -> Result<Ran> {
        // Each question has a number, so that the answer to one that was given up is passed over.
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let limit = within.as_secs().max(1);
        // The script is ended inside at its limit, and that has to be told.
        let deadline = Instant::now() + within + Duration::from_secs(30);
        reader.get_ref().set_read_timeout(Some(LOOK_EACH))?;
        let script = base64(script.as_bytes());
        reader
            .get_mut()
            .write_all(format!("{number} {limit} {script}\n").as_bytes())?;
        loop {
            let line = self.line(reader, deadline)?;
            let words: Vec<&str> = line.split_whitespace().collect();
            let [of, code, said] = words.as_slice() else {
                continue;
            };
            if *of != number.to_string() {
                continue;
            }
            return Ok(Ran {
                code: Some(code.parse()?),
                stdout: from_base64(said)?,
                stderr: String::new(),
            });
        }
    }

    /// The next line of the shell. A kernel that panicked will not send one.
    fn line(&self, reader: &mut BufReader<UnixStream>, deadline: Instant) -> Result<String> {
        let mut line = Vec::new();
        loop {
            match reader.read_until(b'\n', &mut line) {
                Ok(0) => bail!(Dead(format!("the emulator has ended: {}", self.log()))),
                Ok(_) if line.ends_with(b"\n") => return Ok(String::from_utf8(line)?),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
            if self.panicked() {
                bail!(Dead(format!(
                    "its kernel panicked, see {}/console",
                    self.dir.display()
                )));
            }
            if Instant::now() >= deadline {
                bail!(Dead("its shell does not answer".into()));
            }
        }
    }

    fn panicked(&self) -> bool {
        self.console().contains("Kernel panic")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("qemu.log")).unwrap_or_default()
    }

    /// What came on the console, its last part.
    fn console(&self) -> String {
        let text = std::fs::read(self.dir.join("console")).unwrap_or_default();
        let tail = text.len().saturating_sub(8000);
        String::from_utf8_lossy(text.get(tail..).unwrap_or_default()).into_owned()
    }
}

static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);

fn coreutil(arguments: &[&str], input: &[u8]) -> Vec<u8> {
    let run = || -> std::io::Result<Vec<u8>> {
        let mut child = Command::new("base64")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut stdin = child.stdin.take();
        let input = input.to_vec();
        let writer = std::thread::spawn(move || stdin.as_mut().map(|pipe| pipe.write_all(&input)));
        let output = child.wait_with_output();
        let _ = writer.join();
        Ok(output?.stdout)
    };
    run().unwrap_or_default()
}

/// Text that any shell takes as one word.
pub fn base64(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&coreutil(&["-w0"], bytes)).into_owned()
}

fn from_base64(text: &str) -> Result<String> {
    let bytes = coreutil(&["-d"], text.trim_start_matches('=').as_bytes());
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn arguments(plan: &Plan<'_>, dir: &Path) -> Vec<String> {
    let (image, dir) = (plan.image.display(), dir.display());
    let segment = format!(
        "stream,id=n,server={},addr.type=unix,addr.path={}",
        if plan.number == 1 { "on" } else { "off" },
        plan.segment.display()
    );
    let number = plan.number;
    let mut line: Vec<String> = [
        "-machine",
        "q35",
        "-cpu",
        "max",
        "-smp",
        "2",
        "-nodefaults",
        "-display",
        "none",
    ]
    .map(str::to_owned)
    .to_vec();
    let mut pair = |name: &str, value: String| line.extend([name.to_owned(), value]);
    let threads = if plan.threads { "multi" } else { "single" };
    pair("-accel", format!("tcg,thread={threads}"));
    pair("-m", plan.memory_mib.to_string());
    pair("-serial", format!("file:{dir}/console"));
    pair("-kernel", format!("{image}/vmlinuz"));
    pair("-initrd", format!("{image}/initrd"));
    // One CPU until what the kernel patches in its own code is held, see the site's unit: with two, the emulator at times runs a
    // breakpoint that is gone already. A clock that is found unstable would be patched in later.
    pair(
        "-append",
        "root=/dev/vda rw console=ttyS0 quiet maxcpus=1 tsc=reliable".into(),
    );
    // The disk stays as it was made: what is written lives as long as this QEMU, also over a reboot.
    let unlocked = "format=raw,if=virtio,cache=unsafe,file.locking=off";
    pair(
        "-drive",
        format!("file={image}/disk.raw,snapshot=on,{unlocked}"),
    );
    let payload = plan.payload.display();
    pair("-drive", format!("file={payload},readonly=on,{unlocked}"));
    pair("-netdev", segment);
    let card = format!("virtio-net-pci,netdev=n,mac=52:54:00:00:77:0{number},romfile=");
    pair("-device", card);
    pair("-device", "virtio-serial-pci".into());
    pair(
        "-chardev",
        format!("socket,id=s,server=on,wait=off,path={dir}/shell"),
    );
    pair(
        "-device",
        "virtserialport,chardev=s,name=godwit.shell".into(),
    );
    pair("-device", "virtio-rng-pci".into());
    line
}

impl Machine for Emulated {
    fn shell(&self, script: &str, within: Duration) -> Result<Ran> {
        self.ask(script, within)
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        if let Some(qemu) = self.qemu.as_mut().filter(|_| !self.keep) {
            // It may have ended by itself.
            let _ = qemu.kill();
            let _ = qemu.wait();
        }
    }
}
