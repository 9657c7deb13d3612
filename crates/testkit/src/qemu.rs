//! A QEMU to check guests with, driven over QMP on its standard input and output.
//!
//! For testing the *guests and checkers*; the product has its own way to run QEMU. Owns the process and kills it
//! when dropped. Every wait takes a deadline.

use crate::qmp::Qmp;
use anyhow::{Context as _, Result};
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Arguments for a q35 machine with `ram_mib` of RAM in the file `ram`, no display, no default devices.
/// `accelerator` is `tcg` or `kvm`.
pub fn machine_args(accelerator: &str, ram: &Path, ram_mib: u32) -> Vec<String> {
    let backend = format!(
        "memory-backend-file,id=ram,share=on,size={ram_mib}M,align=2M,mem-path={}",
        ram.display()
    );
    let fixed =
        "-nodefaults -no-user-config -display none -vga none -machine q35,memory-backend=ram";
    let mut args: Vec<String> = fixed.split(' ').map(String::from).collect();
    let size = format!("{ram_mib}M");
    args.extend(["-accel", accelerator, "-object", &backend, "-m", &size].map(String::from));
    args
}

pub struct TestQemu {
    child: Child,
    qmp: Qmp,
}

impl Deref for TestQemu {
    type Target = Qmp;

    fn deref(&self) -> &Qmp {
        &self.qmp
    }
}

impl DerefMut for TestQemu {
    fn deref_mut(&mut self) -> &mut Qmp {
        &mut self.qmp
    }
}

impl TestQemu {
    /// Starts `qemu-system-x86_64` with `args` and negotiates QMP within `deadline`.
    pub fn start(args: &[String], deadline: Instant) -> Result<Self> {
        Self::start_program(Path::new("qemu-system-x86_64"), args, deadline)
    }

    /// The same of another program.
    pub fn start_program(program: &Path, args: &[String], deadline: Instant) -> Result<Self> {
        let mut child = Command::new(program)
            .args(args)
            .args(["-qmp", "stdio"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (stdin, stdout) = stdin.zip(stdout).context("QEMU has no pipes")?;
        let connected = Qmp::over(stdout, stdin, deadline);
        if connected.is_err() {
            let _ = child.kill(); // it has ended by itself otherwise
            let _ = child.wait();
        }
        Ok(Self {
            qmp: connected?,
            child,
        })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for TestQemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
