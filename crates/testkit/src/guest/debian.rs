//! The Debian test guest: systemd and PostgreSQL on a disk that a BIOS boots, and root shells in it.
//!
//! `scripts/debian-images.sh` makes the disk from the distribution's packages, once. A [`Shell`] owns its connection to a
//! guest that runs. Refuses: an answer that does not come in its time, and a command that fails, with what it said.

use crate::stage::Stage;
use anyhow::{Context as _, Result, bail, ensure};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Where the image says that the guest is.
pub const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 10));
pub const ADDRESS6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 0x10));
/// Where it gives root shells to everybody.
const PORT: u16 = 23;
/// Exit code of the script for "not on this machine".
const NOT_HERE: i32 = 3;
/// Longest single try to reach a guest that boots.
const TRY: Duration = Duration::from_secs(5);
/// Stands before the exit code at the end of an answer.
const END: &str = "end-of-answer";
/// Longest line of a guest that is read.
const LINE_MAX: usize = 1 << 20;

/// What becomes of a wish for images.
#[derive(Debug)]
pub enum Images {
    /// They are these, Debian 12's first.
    Here(Vec<PathBuf>),
    /// This machine cannot have them, for this reason.
    NotHere(String),
}

/// Images of a kind that `scripts/debian-images.sh` knows, made where they are not there yet.
pub fn images(kind: &str) -> Result<Images> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/debian-images.sh");
    let output = Command::new(&script).arg(kind).output();
    let output = output.with_context(|| format!("cannot run {}", script.display()))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    match output.status.code() {
        Some(0) => Ok(Images::Here(said.lines().map(PathBuf::from).collect())),
        Some(NOT_HERE) => Ok(Images::NotHere(said.trim().to_owned())),
        _ => bail!("{}", String::from_utf8_lossy(&output.stderr)),
    }
}

/// Waits until a guest that boots gives the stage's client a root shell.
pub fn reach(stage: &Stage, within: Duration) -> Result<Shell> {
    reach_at(stage, ADDRESS, within)
}

/// The same of a guest that was told to be elsewhere.
pub fn reach_at(stage: &Stage, guest: IpAddr, within: Duration) -> Result<Shell> {
    let client = stage.machine("client")?;
    let connect = |limit| client.in_network(|| Shell::connect(guest, limit));
    stage.until(
        &format!("the guest at {guest} gives a shell"),
        within,
        || Ok(connect(TRY)??.run("true", TRY).is_ok()),
    )?;
    Ok(connect(within)??)
}

/// A root shell in a guest.
#[derive(Debug)]
pub struct Shell {
    lines: BufReader<TcpStream>,
}

impl Shell {
    /// Connects from this thread's network; nothing takes longer than `within`.
    pub fn connect(guest: IpAddr, within: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&SocketAddr::new(guest, PORT), within)?;
        stream.set_read_timeout(Some(within))?;
        stream.set_write_timeout(Some(within))?;
        stream.set_nodelay(true)?;
        Ok(Self {
            lines: BufReader::new(stream),
        })
    }

    /// The connection, for whoever wants to end it.
    pub fn stream(&self) -> &TcpStream {
        self.lines.get_ref()
    }

    pub fn send(&mut self, text: &str) -> io::Result<()> {
        self.lines.get_mut().write_all(text.as_bytes())
    }

    /// The next line that comes, without its end.
    pub fn line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        loop {
            let piece = self.lines.fill_buf()?;
            if piece.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let end = piece.iter().position(|&byte| byte == b'\n');
            let taken = end.map_or(piece.len(), |at| at + 1);
            line.extend_from_slice(piece.get(..end.unwrap_or(taken)).unwrap_or_default());
            self.lines.consume(taken);
            if end.is_some() {
                return Ok(String::from_utf8_lossy(&line).into_owned());
            }
            if line.len() > LINE_MAX {
                return Err(io::Error::other("a line of the guest has no end"));
            }
        }
    }

    /// Runs a command, which must succeed, and gives what it said.
    pub fn run(&mut self, command: &str, within: Duration) -> Result<String> {
        let until = Instant::now() + within;
        self.send(&format!(
            "{{ {command}\n}} </dev/null 2>&1; printf '\\n%s %s\\n' {END} $?\n"
        ))?;
        let mut said = String::new();
        loop {
            let line = self.line().with_context(|| {
                format!("the guest does not end '{command}', which said '{said}'")
            })?;
            if let Some(code) = line.strip_prefix(END) {
                let said = said.trim().to_owned();
                ensure!(
                    code.trim() == "0",
                    "'{command}' in the guest ended with{code}: {said}"
                );
                return Ok(said);
            }
            said.push_str(&line);
            said.push('\n');
            ensure!(
                Instant::now() < until,
                "'{command}' in the guest takes longer than {within:?} and said '{said}'"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// A shell of this machine in the place of a guest's.
    fn shell() -> Result<(Shell, std::process::Child)> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let stream = TcpStream::connect(listener.local_addr()?)?;
        let (theirs, _) = listener.accept()?;
        let mut command = Command::new("sh");
        command.stdin(std::os::fd::OwnedFd::from(theirs.try_clone()?));
        let child = command.stdout(std::os::fd::OwnedFd::from(theirs)).spawn()?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let lines = BufReader::new(stream);
        Ok((Shell { lines }, child))
    }

    #[test]
    fn what_a_command_says_comes_whole_and_its_failure_is_an_error() -> Result<()> {
        let (mut shell, mut child) = shell()?;
        let minute = Duration::from_secs(60);
        assert_eq!(shell.run("printf 'a b'", minute)?, "a b");
        assert_eq!(shell.run("echo x; echo y >&2", minute)?, "x\ny");
        let failed = shell.run("echo why; false", minute).err();
        let said = failed.context("it did not fail")?.to_string();
        assert!(said.contains("ended with 1: why"), "{said}");
        // What reads takes nothing of what is typed next.
        assert_eq!(shell.run("cat", minute)?, "");
        assert_eq!(shell.run("echo still", minute)?, "still");
        shell.send("exit\n")?;
        child.wait()?;
        let gone = shell.run("echo", minute);
        assert!(gone.is_err());
        Ok(())
    }
}
