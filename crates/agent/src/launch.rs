//! Starting a VM process: its configuration file, its log, its life of its own.
//!
//! The process belongs to nobody afterwards: it makes a session of its own and outlives this agent. While the agent
//! lives it is reaped here. Refuses: nothing; what fails is said.

use crate::scope::{Place, Scopes};
use godwit_qemu::scope::JOIN_VARIABLE;
use godwit_store::read_regular;
use godwit_types::host_api::VmProcessConfig;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::process::{Child, Command};

/// What a VM process was told, in its run directory.
pub const CONFIG_FILE: &str = "vm-process.json";
/// Log of a VM process, in its run directory.
pub const LOG_FILE: &str = "vm-process.log";
/// What a VM process that failed ends with: never what systemd-run ends with, which stands before it.
pub const VM_PROCESS_FAILED: u8 = 70;
/// Size from which a log is begun anew at the next start, bytes.
const LOG_LEN_MAX: u64 = 4 << 20;

/// The program that is a VM process: `godwit vm-process --config FILE`.
#[derive(Debug, Clone)]
pub struct VmProgram {
    pub program: PathBuf,
    /// What stands before `--config FILE`.
    pub arguments: Vec<OsString>,
    /// How this host gives each VM a scope.
    pub scopes: Scopes,
}

impl VmProgram {
    /// This very program, also after its file was replaced by a newer one.
    pub fn this_program() -> io::Result<Self> {
        let program = std::env::current_exe()?;
        let text = program.to_string_lossy();
        let program = match text.strip_suffix(" (deleted)") {
            Some(replaced) => PathBuf::from(replaced),
            None => program,
        };
        Ok(Self {
            program,
            arguments: vec!["vm-process".into()],
            scopes: Scopes::default(),
        })
    }

    /// Writes the configuration into its run directory and starts the process.
    pub fn start(&self, config: &VmProcessConfig, place: &Place) -> io::Result<Child> {
        let run_dir = Path::new(&config.run_dir);
        make_dir(run_dir, 0o711)?;
        make_dir(Path::new(&config.state_dir), 0o700)?;
        let path = tell(config)?;
        let log = open_log(&run_dir.join(LOG_FILE))?;
        self.command(config, place)
            .args(&self.arguments)
            .arg("--config")
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .current_dir("/")
            .kill_on_drop(false)
            .spawn()
    }

    fn command(&self, config: &VmProcessConfig, place: &Place) -> Command {
        let mut command = match place {
            Place::New => {
                let mut runner = Command::new(&self.scopes.runner);
                runner
                    .args(self.scopes.words(&config.vm))
                    .arg(&self.program);
                runner
            }
            Place::Beside | Place::Join(_) => Command::new(&self.program),
        };
        match place {
            Place::Join(scope) => command.env(JOIN_VARIABLE, scope.path()),
            Place::Beside | Place::New => command.env_remove(JOIN_VARIABLE),
        };
        command
    }
}

/// Writes a VM process's configuration into its run directory.
pub fn tell(config: &VmProcessConfig) -> io::Result<PathBuf> {
    let path = Path::new(&config.run_dir).join(CONFIG_FILE);
    write_private(&path, &serde_json::to_vec_pretty(config)?)?;
    Ok(path)
}

/// Makes a directory, whose parents may be missing too, with exactly this mode; one that is there is left alone.
pub fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    std::fs::create_dir_all(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&fresh)?;
    io::Write::write_all(&mut file, bytes)?;
    std::fs::rename(&fresh, path)
}

fn open_log(path: &Path) -> io::Result<std::fs::File> {
    let too_long = std::fs::metadata(path).is_ok_and(|data| data.len() > LOG_LEN_MAX);
    if too_long {
        std::fs::remove_file(path)?;
    }
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}

/// The last line of a VM process's log, for the note that people see.
pub fn last_log_line(run_dir: &Path) -> Option<String> {
    let text = read_regular(&run_dir.join(LOG_FILE), LOG_LEN_MAX).ok()??;
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().rev().find(|line| !line.trim().is_empty())?;
    Some(line.chars().take(300).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_log_is_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(LOG_FILE);
        std::fs::write(&path, vec![b'x'; LOG_LEN_MAX as usize + 1]).unwrap();
        drop(open_log(&path).unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
        std::fs::write(&path, "first\nlast words\n\n").unwrap();
        assert_eq!(last_log_line(dir.path()).as_deref(), Some("last words"));
    }
}
