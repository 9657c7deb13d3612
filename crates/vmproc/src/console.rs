//! The guest's serial console: what it wrote, kept for whoever reads it, and what is typed to it.
//!
//! QEMU's ring is where the text comes from, so that nothing is lost while nobody reads and none of what was not read yet while no
//! VM process lives. What was read stands in a file of the run directory before anybody gets it, so that a successor goes on
//! with the same text. Only while somebody types the serial port is on a line of [`godwit_qemu::console`], which a thread of its
//! own empties; a minute after the last word the ring is put back. A process that is killed in between loses what nobody has
//! got of the last 20 ms, and what the guest writes until its successor has put the ring back, which is the first that it does.
//!
//! Owns the text of one QEMU's guest. Connections read it by themselves: the VM's thread, which may be busy for seconds, is not
//! asked. Refuses: more than [`READERS_MAX`] that wait at a time, and what the guest does not read.

use crate::hypervisor::QMP_WAIT;
use godwit_qemu::console::Line;
use godwit_qemu::machine::Machine;
use godwit_qemu::qmp::QmpError;
use godwit_store::{load_json, save_json};
use godwit_types::console::{
    CONSOLE_TYPED_MAX, ConsoleKept, ConsolePiece, ConsolePlace, ConsoleTyped,
};
use godwit_types::host_api::VmProcessConfig;
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Most that wait at a time for what the guest writes next.
const READERS_MAX: usize = 8;
/// How often QEMU's ring is read for those who wait.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Of several who look at once, one that comes so soon after another asks nobody.
const JUST_LOOKED: Duration = Duration::from_millis(25);
/// How often a text that grows is written to its file at most while nobody wants it.
const SAVE_EVERY: Duration = Duration::from_millis(20);
/// The serial port is on a line for so long after something was typed.
const TYPES_FOR: Duration = Duration::from_secs(60);
/// Most that is taken from a line in one go, in pieces of 64 KiB: all that it can hold and some more.
const PIECES_MAX: usize = 4;
/// Longest wait of the thread that empties a line.
const LINE_WAIT: Duration = Duration::from_secs(1);

/// Where the console of the VM's QEMU is found, by the threads that answer the agent.
#[derive(Debug)]
pub(crate) struct Desk {
    vm: VmName,
    host: HostName,
    /// Nothing until it is known whether there is one.
    at: Mutex<Option<Weak<Console>>>,
}

/// The serial console of one QEMU.
#[derive(Debug)]
pub(crate) struct Console {
    machine: Arc<Machine>,
    path: PathBuf,
    /// Held by whoever takes text from QEMU until it is kept, so that it stays in order. Locked before `kept`.
    source: Mutex<Source>,
    kept: Mutex<Kept>,
    more: Condvar,
    readers: Mutex<usize>,
}

#[derive(Debug)]
enum Source {
    Ring { looked: Option<Instant> },
    Line { line: Arc<Line>, typed: Instant },
}

#[derive(Debug)]
struct Kept {
    text: ConsoleKept,
    saved: Instant,
    is_saved: bool,
}

/// Counts one that waits.
struct Reader<'a>(&'a Console);

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        *lock(&self.0.readers) -= 1;
    }
}

impl Desk {
    pub(crate) fn of(config: &VmProcessConfig) -> Self {
        Self {
            vm: config.vm.clone(),
            host: config.host.clone(),
            at: Mutex::default(),
        }
    }

    /// The console of this QEMU is the VM's from now on; with `None` there is none.
    pub(crate) fn put(&self, console: Option<&Arc<Console>>) {
        *lock(&self.at) = Some(console.map_or_else(Weak::new, Arc::downgrade));
    }

    /// What comes next for a reader at this place.
    pub(crate) fn read(
        &self,
        place: Option<&ConsolePlace>,
        wait: Duration,
    ) -> Result<ConsolePiece, ApiError> {
        let console = self.find()?;
        let _reader = (!wait.is_zero())
            .then(|| console.reader(&self.vm))
            .transpose()?;
        let piece = console.read(place, wait);
        piece.map_err(|error| self.failed(&console, &error))
    }

    /// Types this to the guest.
    pub(crate) fn type_in(&self, typed: &ConsoleTyped) -> Result<(), ApiError> {
        if typed.bytes.len() > CONSOLE_TYPED_MAX {
            let message =
                format!("at most {CONSOLE_TYPED_MAX} bytes are typed at once: send them in pieces");
            return Err(ApiError::new(ErrorCode::TooLarge, message));
        }
        if typed.bytes.is_empty() {
            return Ok(());
        }
        let (console, vm) = (self.find()?, &self.vm);
        let line = console
            .line()
            .map_err(|error| self.failed(&console, &error))?;
        line.write(&typed.bytes).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::WriteZero => {
                let message = format!(
                    "the guest of VM '{vm}' has not read what was typed before on its serial console, and takes no more"
                );
                ApiError::new(ErrorCode::WrongState, message)
            }
            _ => self.failed(&console, &QmpError::from(error)),
        })
    }

    fn find(&self) -> Result<Arc<Console>, ApiError> {
        let (vm, host) = (&self.vm, &self.host);
        match lock(&self.at).as_ref().map(Weak::upgrade) {
            Some(Some(console)) => Ok(console),
            Some(None) => Err(self.not_running()),
            None => {
                let message = format!(
                    "the VM process of VM '{vm}' on host '{host}' is just taking over its QEMU: try again in a second"
                );
                Err(ApiError::new(ErrorCode::Hypervisor, message))
            }
        }
    }

    /// A QEMU that is gone has failed in nothing.
    fn failed(&self, console: &Console, error: &QmpError) -> ApiError {
        match console.machine.is_closed() {
            true => self.not_running(),
            false => ApiError::new(ErrorCode::Hypervisor, error.to_string()),
        }
    }

    fn not_running(&self) -> ApiError {
        let (vm, host) = (&self.vm, &self.host);
        let message = format!("VM '{vm}' is not running on host '{host}'");
        ApiError::new(ErrorCode::WrongState, message)
    }
}

impl Console {
    /// Of a QEMU that was just started.
    pub(crate) fn new(machine: Arc<Machine>, path: PathBuf) -> Arc<Self> {
        Self::with(machine, path, ConsoleKept::named(new_name()))
    }

    /// Of a QEMU that a predecessor left, maybe with its serial port on a line.
    pub(crate) fn take_over(machine: Arc<Machine>, path: PathBuf) -> Arc<Self> {
        let kept: Option<ConsoleKept> = load_json(&path).unwrap_or_else(|error| {
            tracing::warn!(%error, "what was read of the console before is lost");
            None
        });
        let kept = kept.filter(ConsoleKept::is_within_bounds);
        let kept = kept.unwrap_or_else(|| ConsoleKept::named(new_name()));
        let console = Self::with(machine, path, kept);
        if let Err(error) = console.put_ring_back() {
            tracing::warn!(%error, "what the guest writes to its console may not be kept");
        }
        console
    }

    fn with(machine: Arc<Machine>, path: PathBuf, text: ConsoleKept) -> Arc<Self> {
        Arc::new(Self {
            machine,
            path,
            source: Mutex::new(Source::Ring { looked: None }),
            kept: Mutex::new(Kept {
                text,
                saved: Instant::now(),
                is_saved: false,
            }),
            more: Condvar::new(),
            readers: Mutex::new(0),
        })
    }

    fn put_ring_back(&self) -> Result<(), QmpError> {
        if self.machine.is_console_on_line(soon())? {
            tracing::warn!(
                "somebody typed to the guest when this process's predecessor ended: what it wrote since is not kept"
            );
            self.machine.close_console_line(soon())?;
        }
        Ok(())
    }

    /// All that is kept, with the last of what the guest wrote.
    pub(crate) fn whole(&self, deadline: Instant) -> Result<ConsoleKept, QmpError> {
        self.look(Duration::ZERO, deadline)?;
        Ok(self.saved().text.clone())
    }

    /// The text that came along with the guest, before all that it has written here.
    pub(crate) fn came_along(&self, text: ConsoleKept) {
        let mut kept = lock(&self.kept);
        if kept.text.came_along {
            return;
        }
        let came = ConsoleKept {
            came_along: true,
            ..text
        };
        let here = std::mem::replace(&mut kept.text, came);
        kept.text.add(&here.bytes);
        self.save(&mut kept);
        self.more.notify_all();
    }

    /// Puts the ring back, for a time in which nobody empties the line.
    pub(crate) fn rest(&self) {
        let mut source = lock(&self.source);
        if let Err(error) = self.leave_line(&mut source) {
            tracing::warn!(%error, "the serial port stays on its line");
        }
        let mut kept = lock(&self.kept);
        self.save(&mut kept);
    }

    /// What comes next for a reader, as soon as something does; at the end of the wait maybe nothing.
    fn read(&self, place: Option<&ConsolePlace>, wait: Duration) -> Result<ConsolePiece, QmpError> {
        let deadline = Instant::now() + wait;
        loop {
            self.look(JUST_LOOKED.min(wait), soon())?;
            let kept = self.saved();
            let piece = kept.text.after(place);
            let left = deadline.saturating_duration_since(Instant::now());
            let is_news = place.is_none_or(|place| piece.place() != *place);
            if is_news || left.is_zero() {
                return Ok(piece);
            }
            drop(self.more.wait_timeout(kept, left.min(LOOK_EVERY)));
        }
    }

    fn reader(&self, vm: &VmName) -> Result<Reader<'_>, ApiError> {
        let mut readers = lock(&self.readers);
        if *readers >= READERS_MAX {
            let message = format!(
                "{READERS_MAX} readers follow the console of VM '{vm}' already: end one of them, or print it with 'godwit vm console {vm} --print'"
            );
            return Err(ApiError::new(ErrorCode::WrongState, message));
        }
        *readers += 1;
        Ok(Reader(self))
    }

    /// The line to type on, which is begun where there is none.
    fn line(self: &Arc<Self>) -> Result<Arc<Line>, QmpError> {
        let mut source = lock(&self.source);
        let line = match &*source {
            Source::Line { line, .. } => Arc::clone(line),
            Source::Ring { .. } => self.begin_line()?,
        };
        *source = Source::Line {
            line: Arc::clone(&line),
            typed: Instant::now(),
        };
        Ok(line)
    }
}

/// Taking text from QEMU.
impl Console {
    /// Takes what the guest wrote since the last look, unless that was so short a time ago.
    fn look(&self, not_within: Duration, deadline: Instant) -> Result<(), QmpError> {
        let mut source = lock(&self.source);
        match &mut *source {
            Source::Ring { looked } => {
                if looked.is_some_and(|at| at.elapsed() < not_within) {
                    return Ok(());
                }
                let news = self.machine.console_news(deadline)?;
                *looked = Some(Instant::now());
                self.keep(&news);
            }
            Source::Line { line, .. } => {
                self.empty(line);
            }
        }
        Ok(())
    }

    /// Changes the serial port over and has a thread empty the line.
    fn begin_line(self: &Arc<Self>) -> Result<Arc<Line>, QmpError> {
        let mut text = Vec::new();
        let opened = self.machine.open_console_line(&mut text, soon());
        self.keep(&text);
        let line = Arc::new(opened?);
        let (console, emptied) = (Arc::downgrade(self), Arc::clone(&line));
        let spawned = std::thread::Builder::new()
            .name("console".into())
            .spawn(move || empty_line(&console, &emptied));
        if let Err(error) = spawned {
            // Nobody would empty it.
            if let Err(error) = self.machine.close_console_line(soon()) {
                tracing::warn!(%error, "the serial port stays on its line");
            }
            self.empty(&line);
            return Err(error.into());
        }
        Ok(line)
    }

    /// Takes what stands on a line; whether QEMU has it still.
    fn empty(&self, line: &Line) -> bool {
        // A guest may write as fast as it is read.
        for _ in 0..PIECES_MAX {
            match line.read(Instant::now()) {
                Ok(Some(news)) if news.is_empty() => return true,
                Ok(Some(news)) => self.keep(&news),
                Ok(None) => return false,
                Err(error) => {
                    tracing::warn!(%error, "the console cannot be read");
                    return false;
                }
            }
        }
        true
    }

    fn leave_line(&self, source: &mut Source) -> Result<(), QmpError> {
        let Source::Line { line, .. } = &*source else {
            return Ok(());
        };
        let line = Arc::clone(line);
        self.machine.close_console_line(soon())?;
        self.empty(&line);
        *source = Source::Ring { looked: None };
        Ok(())
    }

    fn keep(&self, news: &[u8]) {
        if news.is_empty() {
            return;
        }
        let mut kept = lock(&self.kept);
        kept.text.add(news);
        kept.is_saved = false;
        if kept.saved.elapsed() >= SAVE_EVERY {
            self.save(&mut kept);
        }
        self.more.notify_all();
    }

    /// The text as a successor finds it: nobody gets more of it, or a place in it would mean something else there.
    fn saved(&self) -> MutexGuard<'_, Kept> {
        let mut kept = lock(&self.kept);
        if !kept.is_saved {
            self.save(&mut kept);
        }
        kept
    }

    /// Writes the text where a successor finds it.
    fn save(&self, kept: &mut Kept) {
        (kept.saved, kept.is_saved) = (Instant::now(), true);
        if let Err(error) = save_json(&self.path, &kept.text) {
            tracing::debug!(%error, "the console's text is not kept for a successor");
        }
    }
}

/// The thread of a line.
impl Console {
    /// One round of it; how long the next one may wait, nothing where the line is no more.
    fn tend(&self, line: &Arc<Line>) -> Option<Duration> {
        let mut source = lock(&self.source);
        let typed = match &*source {
            Source::Line { line: now, typed } if Arc::ptr_eq(now, line) => *typed,
            _ => return None,
        };
        if !self.empty(line) {
            // QEMU is gone.
            *source = Source::Ring { looked: None };
            return None;
        }
        if typed.elapsed() > TYPES_FOR {
            if let Err(error) = self.leave_line(&mut source) {
                tracing::warn!(%error, "the serial port stays on its line");
                return Some(LINE_WAIT);
            }
            return None;
        }
        drop(source);
        let mut kept = lock(&self.kept);
        if kept.is_saved {
            return Some(LINE_WAIT);
        }
        let due = SAVE_EVERY.saturating_sub(kept.saved.elapsed());
        if due.is_zero() {
            self.save(&mut kept);
            return Some(LINE_WAIT);
        }
        Some(due)
    }
}

fn empty_line(console: &Weak<Console>, line: &Arc<Line>) {
    let mut wait = Duration::ZERO;
    loop {
        if let Err(error) = line.wait(Instant::now() + wait) {
            tracing::warn!(%error, "the console cannot be waited for");
            return;
        }
        let next = console.upgrade().and_then(|console| console.tend(line));
        match next {
            Some(next) => wait = next,
            None => return,
        }
    }
}

fn soon() -> Instant {
    Instant::now() + QMP_WAIT
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A name that no other text has.
fn new_name() -> String {
    let mut bytes = [0; 8];
    if let Err(error) = getrandom::fill(&mut bytes) {
        tracing::warn!(%error, "the console's text has no name of its own");
    }
    format!("{:016x}", u64::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{FakeQemu, LONG, Site};
    use godwit_qemu::qmp::Client;

    fn desk(site: &Site) -> Desk {
        Desk::of(&site.config)
    }

    fn said<T: std::fmt::Debug>(refused: Result<T, ApiError>) -> (ErrorCode, String) {
        let error = refused.unwrap_err();
        (error.code, error.message)
    }

    /// The console of a QEMU that answers nothing of use, and where its text is kept.
    fn console(site: &Site) -> (FakeQemu, Arc<Machine>, PathBuf) {
        let qemu = site.qemu(&["running"]);
        let client = Client::connect(&site.paths.monitor(1, 0), Instant::now() + LONG);
        let machine = Arc::new(Machine::new(client.unwrap(), None));
        (qemu, machine, site.paths.console(1))
    }

    #[test]
    fn before_anybody_looked_a_vm_is_not_said_to_be_off() {
        let (site, none) = (Site::new(), ConsoleTyped::default());
        let desk = desk(&site);
        let (code, message) = said(desk.read(None, Duration::ZERO));
        assert_eq!(code, ErrorCode::Hypervisor);
        assert!(message.contains("taking over"), "{message}");
        desk.put(None);
        let off = "VM 'web' is not running on host 'b'".to_owned();
        assert_eq!(
            said(desk.read(None, Duration::ZERO)),
            (ErrorCode::WrongState, off.clone())
        );
        let key = ConsoleTyped { bytes: vec![b'x'] };
        assert_eq!(said(desk.type_in(&key)), (ErrorCode::WrongState, off));
        desk.type_in(&none).unwrap();
        let bytes = vec![b'x'; CONSOLE_TYPED_MAX + 1];
        let (code, _) = said(desk.type_in(&ConsoleTyped { bytes }));
        assert_eq!(code, ErrorCode::TooLarge);
    }

    #[test]
    fn what_came_along_stands_before_what_was_written_here_and_a_successor_finds_both() {
        let site = Site::new();
        let (_qemu, machine, path) = console(&site);
        let console = Console::new(Arc::clone(&machine), path.clone());
        console.keep(b"here");
        let came = ConsoleKept {
            end: 10,
            bytes: b"before".to_vec(),
            ..ConsoleKept::named("c0de".into())
        };
        console.came_along(came.clone());
        console.came_along(came);
        let whole = lock(&console.kept).text.clone();
        assert_eq!(
            (whole.end, whole.bytes.as_slice()),
            (14, &b"beforehere"[..])
        );
        assert!(whole.came_along && whole.text == "c0de");
        drop(console);
        let next = Console::take_over(machine, path);
        assert_eq!(lock(&next.kept).text, whole);
    }

    #[test]
    fn a_damaged_file_begins_another_text() {
        let site = Site::new();
        let (_qemu, machine, path) = console(&site);
        std::fs::write(&path, "{\"text\":\"c0de\",\"end\":1,\"bytes\":\"bHMK\"}").unwrap();
        let next = Console::take_over(machine, path);
        let text = lock(&next.kept).text.clone();
        assert!(text.end == 0 && text.text != "c0de", "{text:?}");
    }

    #[test]
    fn only_so_many_wait_at_a_time() {
        let site = Site::new();
        let (_qemu, machine, path) = console(&site);
        let console = Console::new(machine, path);
        let vm = &site.config.vm;
        let mut readers: Vec<_> = (0..READERS_MAX)
            .map(|_| console.reader(vm).unwrap())
            .collect();
        let refused = console.reader(vm).map(drop);
        assert_eq!(said(refused).0, ErrorCode::WrongState);
        readers.pop();
        drop(console.reader(vm).unwrap());
    }
}
