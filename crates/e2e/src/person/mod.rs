//! A person's way with the package: whole Debian systems in which nothing of ours is before the package is installed.
//!
//! A [`Host`] is one such system and the transcript that all of them share; what is typed there is what a person types.
//! Modules: the README's own commands, systems in containers, systems in emulated machines, guests' memory. Refuses: a
//! command that ends otherwise than it should, with all that it said.

pub mod container;
pub mod emulated;
pub mod memory;
pub mod readme;
pub mod way;

pub use crate::stack::Ran;
use anyhow::{Result, bail, ensure};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Something that runs a root shell's scripts in a system.
pub trait Machine {
    /// Runs a script to its end, or for at most so long.
    fn shell(&self, script: &str, within: Duration) -> Result<Ran>;
}

/// Everything that was typed and answered, in order.
#[derive(Clone)]
pub struct Transcript(Arc<Mutex<File>>);

impl Transcript {
    pub fn new(path: &Path) -> Result<Self> {
        Ok(Self(Arc::new(Mutex::new(File::create(path)?))))
    }

    pub fn heading(&self, text: &str) {
        println!("  {text}");
        self.add(&format!("\n== {text}\n"));
    }

    fn add(&self, text: &str) {
        if let Ok(mut file) = self.0.lock() {
            // What a test did matters more than its protocol.
            let _ = file.write_all(text.as_bytes());
        }
    }
}

/// A system under test.
pub struct Host<M> {
    /// Its name on the site.
    pub name: String,
    /// What runs its commands.
    pub machine: M,
    transcript: Transcript,
    /// How long a command may take.
    patience: Duration,
}

impl<M: Machine> Host<M> {
    /// A system whose commands are written down.
    pub fn new(name: &str, machine: M, transcript: &Transcript, patience: Duration) -> Self {
        Self {
            name: name.to_owned(),
            machine,
            transcript: transcript.clone(),
            patience,
        }
    }

    /// Types a command and writes down what came.
    pub fn types(&self, script: &str) -> Result<Ran> {
        let ran = self.machine.shell(script, self.patience)?;
        let mut text = format!("{}# {script}\n{}{}", self.name, ran.stdout, ran.stderr);
        if ran.code != Some(0) {
            let _ = writeln!(text, "[exit code {}]", ran.code.unwrap_or(-1));
        }
        self.transcript.add(&text);
        Ok(ran)
    }

    /// Types a command that must succeed and gives what it printed.
    pub fn ok(&self, script: &str) -> Result<String> {
        let ran = self.types(script)?;
        ensure!(
            ran.code == Some(0),
            "'{script}' on {} ended with {:?}: {}{}",
            self.name,
            ran.code,
            ran.stdout,
            ran.stderr
        );
        Ok(ran.stdout)
    }

    /// Types a command that must be refused and gives all that it said.
    pub fn refused(&self, script: &str) -> Result<String> {
        let ran = self.types(script)?;
        let said = format!("{}{}", ran.stdout, ran.stderr);
        ensure!(
            ran.code.is_some_and(|code| code != 0),
            "'{script}' on {} was not refused: {said}",
            self.name
        );
        Ok(said)
    }

    /// Asks something, unwritten, until the answer is so.
    pub fn until(&self, what: &str, script: &str, is_so: impl Fn(&Ran) -> bool) -> Result<Ran> {
        let deadline = Instant::now() + self.patience;
        loop {
            let ran = self.machine.shell(script, self.patience)?;
            if is_so(&ran) {
                return Ok(ran);
            }
            if Instant::now() > deadline {
                bail!(
                    "on {} it did not come to this: {what}; '{script}' says {ran:?}\n{}",
                    self.name,
                    self.last_words()
                );
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// What a script prints, unwritten, however it ends.
    pub fn machine_text(&self, script: &str) -> Result<String> {
        Ok(self.machine.shell(script, self.patience)?.stdout)
    }

    /// A value that a script prints, unwritten.
    pub fn value(&self, script: &str) -> Result<String> {
        let ran = self.machine.shell(script, self.patience)?;
        ensure!(ran.code == Some(0), "'{script}' on {}: {ran:?}", self.name);
        Ok(ran.stdout.trim().to_owned())
    }

    /// The ends of the journals of agent and controller.
    pub fn last_words(&self) -> String {
        let script =
            "journalctl --no-pager -n 40 -o cat -u 'godwit-*'; tail -n 20 /run/godwit/vms/*/*.log";
        match self.machine.shell(script, self.patience) {
            Ok(ran) => format!("{}{}", ran.stdout, ran.stderr),
            Err(error) => format!("{error:#}"),
        }
    }
}
