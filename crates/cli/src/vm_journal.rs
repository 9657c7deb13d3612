//! The journal's copy of what a VM process logs: its own file is in memory, and is lost with the host.
//!
//! Owns a stream to journald, which knows lines by an identifier of the VM's own (`journalctl -t godwit-vm-NAME`). Refuses:
//! to wait for the journal, since a guest may stand still meanwhile, and more lines a minute than a guest may push others'
//! out with; how many those were is said once there is room again. Nothing is there where journald is not.

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::fmt::Write as _;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Where journald takes streams.
pub const SOCKET: &str = "/run/systemd/journal/stdout";
/// Most lines in each minute; a VM that migrates writes some tens.
const LINES_MAX: u64 = 600;
/// For how long the count goes on.
const EACH: Duration = Duration::from_secs(60);
/// Priority of what ends the process.
const ERROR: u8 = 3;

/// Writes whole lines, each of which begins with its priority.
#[derive(Debug, Clone)]
pub struct VmJournal(Arc<Mutex<Stream>>);

#[derive(Debug)]
struct Stream {
    path: PathBuf,
    identifier: String,
    /// Nothing where it was broken off.
    socket: Option<OwnedFd>,
    /// What the journal is yet to take.
    due: Vec<u8>,
    /// Lines that it was not given.
    lost: u64,
    began: Instant,
    lines: u64,
}

impl VmJournal {
    /// A stream for the VM's lines; nothing where nobody listens at the path.
    pub fn open(path: &Path, vm: &str) -> Option<Self> {
        let mut stream = Stream {
            path: path.to_owned(),
            identifier: format!("godwit-vm-{vm}"),
            socket: None,
            due: Vec::new(),
            lost: 0,
            began: Instant::now(),
            lines: 0,
        };
        stream.flush().ok()?;
        Some(Self(Arc::new(Mutex::new(stream))))
    }

    /// Tells what ends the process, however much was told before.
    pub fn tell_end(&self, words: &str) {
        let mut text = String::new();
        for line in words.lines() {
            // A text takes what is written to it.
            let _ = writeln!(text, "<{ERROR}>{line}");
        }
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        stream.tell(text.as_bytes());
    }

    /// Tells of every panic, too, before others hear of it.
    pub fn hear_panics(&self) {
        let journal = self.clone();
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            journal.tell_end(&panic.to_string());
            report(panic);
        }));
    }

    fn take(&self, lines: &[u8], now: Instant) {
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        stream.take(lines, now);
    }
}

impl Write for VmJournal {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.take(bytes, Instant::now());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn count(lines: &[u8]) -> u64 {
    lines.iter().filter(|&&byte| byte == b'\n').count() as u64
}

impl Stream {
    fn take(&mut self, lines: &[u8], now: Instant) {
        if now.saturating_duration_since(self.began) >= EACH {
            (self.began, self.lines) = (now, 0);
        }
        let count = count(lines);
        self.lines = self.lines.saturating_add(count);
        match self.lines > LINES_MAX {
            true => self.lost = self.lost.saturating_add(count),
            false => self.tell(lines),
        }
    }

    fn tell(&mut self, lines: &[u8]) {
        if self.flush().is_err() {
            self.lost = self.lost.saturating_add(count(lines));
            return;
        }
        if self.lost > 0 {
            let said = format!("<4>{} lines before this one are left out\n", self.lost);
            self.due.extend_from_slice(said.as_bytes());
            self.lost = 0;
        }
        self.due.extend_from_slice(lines);
        // What does not fit goes before the next lines.
        let _ = self.flush();
    }

    /// Gives the journal what is due; a journal that was begun anew since gets a new stream.
    fn flush(&mut self) -> io::Result<()> {
        let was_connected = self.socket.is_some();
        match self.send_due() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
            Err(error) => {
                self.socket = None;
                match was_connected {
                    true => self.send_due(),
                    false => Err(error),
                }
            }
            Ok(()) => Ok(()),
        }
    }

    fn send_due(&mut self) -> io::Result<()> {
        let socket = match self.socket.take() {
            Some(socket) => socket,
            None => self.connect()?,
        };
        let socket = self.socket.insert(socket);
        while !self.due.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let sent = rustix::net::send(&*socket, &self.due, flags)?;
            self.due.drain(..sent);
        }
        Ok(())
    }

    /// A stream of its own: who it is, no unit, the priority of lines without one, that lines may begin with theirs, and
    /// three times no to sending them further.
    fn connect(&self) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(&self.path)?)?;
        let header = format!("{}\n\n6\n1\n0\n0\n0\n", self.identifier);
        // An empty stream has room for it.
        rustix::net::send(&socket, header.as_bytes(), SendFlags::NOSIGNAL)?;
        Ok(socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::os::unix::net::UnixListener;
    use tracing_subscriber::layer::SubscriberExt as _;

    const HEADER: &str = "godwit-vm-web\n\n6\n1\n0\n0\n0\n";
    const CHILD: &str = "GODWIT_TEST_JOURNAL";

    struct Journald {
        dir: tempfile::TempDir,
        listener: UnixListener,
    }

    impl Journald {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let listener = UnixListener::bind(dir.path().join("stdout")).unwrap();
            // Who is looked for is there already.
            listener.set_nonblocking(true).unwrap();
            Self { dir, listener }
        }

        fn open(&self) -> VmJournal {
            VmJournal::open(&self.dir.path().join("stdout"), "web").unwrap()
        }

        /// What the next stream says until its writers are gone.
        fn reads(&self) -> String {
            let mut text = String::new();
            let (mut stream, _) = self.listener.accept().unwrap();
            stream.read_to_string(&mut text).unwrap();
            text.strip_prefix(HEADER).unwrap().to_owned()
        }
    }

    #[test]
    fn lines_come_with_the_vm_s_name_and_their_priority() {
        let journald = Journald::new();
        let journal = journald.open();
        journal.tell_end("it ended\nfor this reason");
        let layer = tracing_subscriber::fmt::layer()
            .with_ansi(false)
            .event_format(crate::journal::Lines)
            .with_writer(move || journal.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::warn!("the guest was reset");
            tracing::info!("as usual");
        });
        let said = journald.reads();
        let lines = "<3>it ended\n<3>for this reason\n<4>the guest was reset\n<6>as usual\n";
        assert_eq!(said, lines);
    }

    #[test]
    fn where_no_journal_listens_there_is_none() {
        let dir = tempfile::tempdir().unwrap();
        assert!(VmJournal::open(&dir.path().join("stdout"), "web").is_none());
    }

    #[test]
    fn a_flood_of_lines_is_cut_and_how_many_were_left_out_is_said() {
        let journald = Journald::new();
        let journal = journald.open();
        let (mut stream, _) = journald.listener.accept().unwrap();
        stream.read_exact(&mut [0; HEADER.len()]).unwrap();
        let began = Instant::now();
        let line = b"<6>the guest was reset\n";
        for _ in 0..LINES_MAX {
            journal.take(line, began);
            let mut read = [0; 23];
            stream.read_exact(&mut read).unwrap();
            assert_eq!(&read, line);
        }
        for _ in 0..1000 {
            journal.take(line, began);
        }
        // What ends the process is not among them.
        journal.tell_end("it ends");
        journal.take(b"<6>a minute later\n", began + EACH);
        drop(journal);
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        let last = "<4>1000 lines before this one are left out\n<3>it ends\n<6>a minute later\n";
        assert_eq!(said, last);
    }

    #[test]
    fn a_journal_that_takes_nothing_makes_nobody_wait_and_gets_whole_lines_later() {
        let journald = Journald::new();
        let journal = journald.open();
        let now = Instant::now();
        let long = format!("<6>{}\n", "x".repeat(8000));
        for _ in 0..LINES_MAX - 1 {
            journal.take(long.as_bytes(), now);
        }
        let lost = journal.0.lock().unwrap().lost;
        assert!(lost > 0, "the stream took everything");
        let said = std::thread::scope(|scope| {
            let reader = scope.spawn(|| journald.reads());
            drain(&journal);
            journal.take(b"<6>last words\n", now);
            drain(&journal);
            drop(journal);
            reader.join().unwrap()
        });
        let last = format!("<4>{lost} lines before this one are left out\n<6>last words\n");
        let before = said.strip_suffix(&last).expect("the last lines");
        assert!(before.split_inclusive('\n').all(|line| line == long));
        assert_eq!(before.lines().count() as u64 + lost, LINES_MAX - 1);
    }

    /// Until the reader has made room for all that is due.
    fn drain(journal: &VmJournal) {
        while journal.0.lock().unwrap().flush().is_err() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_journal_that_was_begun_anew_gets_a_new_stream() {
        let journald = Journald::new();
        let journal = journald.open();
        journal.tell_end("first");
        drop(journald.listener.accept().unwrap());
        journal.tell_end("second");
        drop(journal);
        assert_eq!(journald.reads(), "<3>second\n");
    }

    #[test]
    fn a_panic_is_told() {
        if let Some(path) = std::env::var_os(CHILD) {
            VmJournal::open(Path::new(&path), "web")
                .unwrap()
                .hear_panics();
            panic!("on purpose");
        }
        let journald = Journald::new();
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "vm_journal::tests::a_panic_is_told"]);
        child.env(CHILD, journald.dir.path().join("stdout"));
        assert!(!child.output().unwrap().status.success());
        let said = journald.reads();
        assert!(said.starts_with("<3>") && said.contains("\n<3>on purpose\n"));
    }
}
