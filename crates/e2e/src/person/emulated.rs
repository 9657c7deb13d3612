//! Debian systems in emulated machines: each has a kernel, a systemd, cgroup v2 and a `/dev/kvm` of its own.
//!
//! QEMU's emulator offers AMD's virtualisation with nested paging, so KVM inside runs Linux guests where the real CPU has
//! none. An [`Emulated`] owns its QEMU and a root shell in it, on a virtio port; both end with the value, and its disk stays as
//! it was made. Refuses: an answer that is no answer. What runs there is slow: nothing is judged by its time.

use super::{Machine, Ran};
use anyhow::{Context as _, Result, bail, ensure};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Longest start of a machine, until its shell answers.
const BOOT: Duration = Duration::from_secs(240);

/// Root's shell on the virtio port, which runs from the payload. A line is a number, a limit in seconds and a script in
/// base64; the answer has the same number, the exit code, and '=' with what was said in base64.
pub const SHELL: &str = r#"modprobe -q virtio_console
until [ -e /dev/virtio-ports/godwit.shell ]; do sleep 0.1; done
exec 3<>/dev/virtio-ports/godwit.shell
while IFS=' ' read -r number limit script <&3; do
    printf %s "$script" | base64 -d >/tmp/script
    (cd /root && exec timeout -k 5 "$limit" sh /tmp/script) >/tmp/said 2>&1 </dev/null 3>&-
    printf '%s %s =%s\n' "$number" "$?" "$(base64 -w0 </tmp/said)" >&3
done
"#;

pub struct Emulated {
    qemu: Child,
    dir: PathBuf,
    shell: Mutex<Option<BufReader<UnixStream>>>,
}

/// What a machine is made of.
pub struct Plan<'a> {
    /// Directory of `disk.raw`, `vmlinuz` and `initrd`.
    pub image: &'a Path,
    /// A tar file that is unpacked inside as `/payload`.
    pub payload: &'a Path,
    /// Socket of the network segment that it has with the other one.
    pub segment: &'a Path,
    /// 1 makes the segment, 2 joins it.
    pub number: u8,
    pub memory_mib: u32,
}

impl Emulated {
    /// Switches a machine on.
    pub fn power_on(plan: &Plan<'_>, dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        let log = std::fs::File::create(dir.join("qemu.log"))?;
        let qemu = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64"])
            .args(arguments(plan, dir))
            .env("TMPDIR", dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("qemu-system-x86_64")?;
        Ok(Self {
            qemu,
            dir: dir.to_owned(),
            shell: Mutex::default(),
        })
    }

    /// Waits until its root shell answers, after it was switched on or while it reboots.
    pub fn wait_up(&mut self) -> Result<()> {
        let deadline = Instant::now() + BOOT;
        loop {
            if let Some(status) = self.qemu.try_wait()? {
                bail!("QEMU ended with {status}: {}", self.console());
            }
            self.forget();
            let up = "systemctl is-system-running --wait";
            if let Ok(ran) = self.ask(up, Duration::from_secs(60)) {
                let state = ran.stdout.trim().to_owned();
                ensure!(matches!(state.as_str(), "running" | "degraded"), "{ran:?}");
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "no shell answers: {}",
                self.console()
            );
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// Waits until it has booted again: its boot is another one than that.
    pub fn wait_again(&self, boot: &str) -> Result<()> {
        let deadline = Instant::now() + BOOT;
        loop {
            let asked = self.ask(
                "cat /proc/sys/kernel/random/boot_id",
                Duration::from_secs(10),
            );
            if asked.is_ok_and(|ran| !ran.stdout.trim().is_empty() && ran.stdout.trim() != boot) {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "it did not boot again: {}",
                self.console()
            );
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Closes the shell, whose other end may be another one soon.
    pub fn forget(&self) {
        if let Ok(mut shell) = self.shell.lock() {
            *shell = None;
        }
    }

    fn ask(&self, script: &str, within: Duration) -> Result<Ran> {
        let mut shell = self
            .shell
            .lock()
            .map_err(|_| anyhow::anyhow!("a shell that failed"))?;
        if shell.is_none() {
            let stream = UnixStream::connect(self.dir.join("shell"))?;
            *shell = Some(BufReader::new(stream));
        }
        let reader = shell.as_mut().context("no shell")?;
        let answer = exchange(reader, script, within);
        if answer.is_err() {
            // An answer that comes later would be taken for that to the next question.
            *shell = None;
        }
        answer
    }

    /// What came on the console, its last part.
    fn console(&self) -> String {
        let text = std::fs::read(self.dir.join("console")).unwrap_or_default();
        let tail = text.len().saturating_sub(3000);
        String::from_utf8_lossy(text.get(tail..).unwrap_or_default()).into_owned()
    }
}

fn exchange(reader: &mut BufReader<UnixStream>, script: &str, within: Duration) -> Result<Ran> {
    // Each question has a number, so that the answer to one that was given up is passed over.
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let limit = within.as_secs().max(1);
    reader
        .get_ref()
        .set_read_timeout(Some(within + Duration::from_secs(15)))?;
    let script = base64(script.as_bytes());
    reader
        .get_mut()
        .write_all(format!("{number} {limit} {script}\n").as_bytes())?;
    loop {
        let mut line = String::new();
        ensure!(reader.read_line(&mut line)? > 0, "the shell has gone");
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

fn base64(bytes: &[u8]) -> String {
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
        "-accel",
        "tcg,thread=multi",
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
    pair("-m", plan.memory_mib.to_string());
    pair("-serial", format!("file:{dir}/console"));
    pair("-kernel", format!("{image}/vmlinuz"));
    pair("-initrd", format!("{image}/initrd"));
    pair("-append", "root=/dev/vda rw console=ttyS0 quiet".into());
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
        // It may have ended by itself.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}
