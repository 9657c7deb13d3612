//! A person at a guest's console on the whole product: what is typed comes to the guest, and what the guest wrote is there, after
//! a move, a killed VM process and another agent; the terminal is as it was afterwards.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::{LONG, Plan, SOON, Stack};
use godwit_testkit::guest::linux::target_dir;
use std::io::{Read as _, Write as _};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Writes back what it reads from its serial port.
const ECHOING: &[u8] = &[
    0xba, 0xfd, 0x03, // again: mov dx, 0x3fd
    0xec, // wait: in al, dx
    0xa8, 0x01, // test al, 1
    0x74, 0xfb, // jz wait
    0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xec, // in al, dx
    0xee, // out dx, al
    0xeb, 0xf1, // jmp again
];

/// Whoever types Ctrl-] gets up from the console.
const LEAVE: &[u8] = b"\x1d";

/// An image in the boot protocol of 1991: a boot sector that says "four more sectors", and those.
fn kernel() -> Vec<u8> {
    let mut image = vec![0; 6 * 512];
    image[0x1f1] = 4;
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x200..0x200 + ECHOING.len()].copy_from_slice(ECHOING);
    image
}

fn start(stack: &Stack, host: &str) -> Result<()> {
    let path = stack.dir().join("echo.kernel");
    std::fs::write(&path, kernel())?;
    let text = format!(
        "name = \"echo\"\nvcpus = 1\nmemory_mib = 32\nkernel = \"{}\"\naccelerator = \"tcg\"\n",
        path.display()
    );
    let file = stack.describe("echo", &text)?;
    stack.ok("controller", &["vm", "create", &file])?;
    stack.ok("controller", &["vm", "start", "echo", "--on", host])?;
    Ok(())
}

/// Somebody at a terminal.
struct Person {
    child: Child,
    keys: ChildStdin,
    shown: Receiver<Vec<u8>>,
    /// All that has come.
    screen: String,
}

impl Person {
    /// Runs a shell command at a terminal of its own.
    fn at(stack: &Stack, machine: &str, command: &str) -> Result<Self> {
        let mut terminal = stack.machine(machine)?.command("script");
        terminal.args(["-qec", command, "/dev/null"]);
        terminal.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = terminal.stderr(Stdio::inherit()).spawn()?;
        let keys = child.stdin.take().context("no keys")?;
        let mut screen = child.stdout.take().context("no screen")?;
        let (show, shown) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                if show.send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            child,
            keys,
            shown,
            screen: String::new(),
        })
    }

    fn types(&mut self, text: &[u8]) -> Result<()> {
        self.keys.write_all(text)?;
        Ok(self.keys.flush()?)
    }

    /// Waits until this has come.
    fn sees(&mut self, text: &str) -> Result<()> {
        let deadline = Instant::now() + LONG;
        while !self.screen.contains(text) {
            let left = deadline.saturating_duration_since(Instant::now());
            let shown = self.shown.recv_timeout(left);
            let shown = shown.with_context(|| format!("no {text:?} in {:?}", self.screen))?;
            self.screen.push_str(&String::from_utf8_lossy(&shown));
        }
        Ok(())
    }

    /// Types this and sees it.
    fn says(&mut self, text: &str) -> Result<()> {
        self.types(text.as_bytes())?;
        self.sees(text)
    }
}

#[test]
fn a_person_stays_at_a_console_through_a_move_and_whatever_is_restarted() -> Result<()> {
    let stack = Stack::new("console", &Plan::default())?;
    start(&stack, "a")?;
    let godwit = target_dir()?.join("release/godwit");
    let command = format!("stty -a; {} vm console echo; stty -a", godwit.display());
    let mut person = Person::at(&stack, "controller", &command)?;
    person.sees("Ctrl-] leaves the console.")?;
    person.says("<before the move>")?;

    stack.migrate("echo", "b", &[])?;
    person.sees("[godwit: the VM is on host b now]")?;
    person.says("<after the move>")?;

    stack.kill_vm_process("echo", "b")?;
    person.says("<another VM process>")?;
    stack.kill_daemon("b")?;
    stack.start_daemon("b")?;
    stack.wait_connected()?;
    person.says("<another agent>")?;
    stack.kill_daemon("controller")?;
    stack.start_daemon("controller")?;
    stack.wait_connected()?;
    person.says("<another controller>")?;

    let all =
        "<before the move><after the move><another VM process><another agent><another controller>";
    let printed = stack.run("controller", &["vm", "console", "echo"])?;
    ensure!(printed.stdout.trim_end().ends_with(all), "{printed:?}");
    let came = "the VM came from host a, with what it wrote there";
    ensure!(printed.stderr.contains(came), "{printed:?}");

    person.types(LEAVE)?;
    let ended = person.child.wait()?;
    while let Ok(shown) = person.shown.recv_timeout(Duration::from_secs(60)) {
        person.screen.push_str(&String::from_utf8_lossy(&shown));
    }
    ensure!(ended.success(), "{ended}: {}", person.screen);
    // As it was: each key was handed on and shown by the guest alone meanwhile.
    let modes = |word: &str| person.screen.matches(word).count();
    ensure!(
        modes(" icanon ") == 2 && modes(" echo ") == 2,
        "{}",
        person.screen
    );

    stack.ok("controller", &["vm", "stop", "echo", "--force"])?;
    stack.until("it is off", SOON, || {
        Ok(stack.vm("echo")?["state"] == "stopped")
    })?;
    let off = stack.refused("controller", &["vm", "console", "echo"], 3, "wrong-state")?;
    ensure!(off.contains("godwit vm start echo"), "{off}");
    Ok(())
}
