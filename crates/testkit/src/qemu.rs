//! A QEMU to check guests with, driven over QMP on its standard input and output.
//!
//! For testing the *guests and checkers*; the product has its own way to run QEMU. Owns the process and kills it
//! when dropped. Every wait takes a deadline.

use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Arguments for a q35 machine with `ram_mib` of RAM in the file `ram`, no display, no default devices.
/// `accelerator` is `tcg` or `kvm`.
pub fn machine_args(accelerator: &str, ram: &Path, ram_mib: u32) -> Vec<String> {
    let backend = format!(
        "memory-backend-file,id=ram,share=on,size={ram_mib}M,align=2M,mem-path={}",
        ram.display()
    );
    let machine = "q35,memory-backend=ram".to_owned();
    let mut args: Vec<String> = [
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-vga",
        "none",
        "-accel",
    ]
    .map(String::from)
    .into();
    args.extend([
        accelerator.to_owned(),
        "-machine".into(),
        machine,
        "-object".into(),
        backend,
    ]);
    args.extend(["-m".into(), format!("{ram_mib}M")]);
    args
}

/// A running QEMU.
pub struct TestQemu {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<Value>,
    events: Vec<Value>,
}

impl TestQemu {
    /// Starts `qemu-system-x86_64` with `args` and negotiates QMP within `deadline`.
    pub fn start(args: &[String], deadline: Instant) -> io::Result<Self> {
        let mut child = Command::new("qemu-system-x86_64")
            .args(args)
            .args(["-qmp", "stdio"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child
            .stdin
            .take()
            .ok_or_else(|| io::Error::other("no standard input"))?;
        let stdout = child
            .stdout
            .take()
            .ok_or_else(|| io::Error::other("no standard output"))?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let Ok(value) = serde_json::from_str(&line) else {
                    continue;
                };
                if sender.send(value).is_err() {
                    return;
                }
            }
        });
        let mut qemu = Self {
            child,
            stdin,
            lines,
            events: Vec::new(),
        };
        qemu.execute("qmp_capabilities", json!({}), deadline)?;
        Ok(qemu)
    }

    /// Runs one command and gives what it returns.
    pub fn execute(
        &mut self,
        command: &str,
        arguments: Value,
        deadline: Instant,
    ) -> io::Result<Value> {
        let request = json!({"execute": command, "arguments": arguments, "id": command});
        writeln!(self.stdin, "{request}")?;
        self.stdin.flush()?;
        loop {
            let reply = self.next_line(deadline)?;
            if reply.get("event").is_some() {
                self.events.push(reply);
            } else if let Some(error) = reply.get("error") {
                return Err(io::Error::other(format!("{command}: {error}")));
            } else if let Some(value) = reply.get("return") {
                return Ok(value.clone());
            }
        }
    }

    /// Waits for an event, also one that came earlier and was not asked for yet.
    pub fn wait_event(&mut self, name: &str, deadline: Instant) -> io::Result<Value> {
        loop {
            if let Some(at) = self.events.iter().position(|event| event["event"] == name) {
                return Ok(self.events.remove(at));
            }
            let line = self.next_line(deadline)?;
            if line.get("event").is_some() {
                self.events.push(line);
            }
        }
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn next_line(&mut self, deadline: Instant) -> io::Result<Value> {
        let left = deadline
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        self.lines.recv_timeout(left).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                io::Error::new(io::ErrorKind::TimedOut, "QEMU did not answer in time")
            }
            RecvTimeoutError::Disconnected => {
                io::Error::new(io::ErrorKind::BrokenPipe, "QEMU has ended")
            }
        })
    }
}

impl Drop for TestQemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
