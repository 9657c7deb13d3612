//! A disk as the VM process has it.
//!
//! Who owns the state: the disk's own thread; this value steers it and ends it when it is dropped. A request that the kernel
//! still has is then carried out, and the image stays locked until it is.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_blockio::delta::Delta;
use godwit_blockio::{Filter, Image};
use rustix::event::{EventfdFlags, eventfd};

use crate::Error;
use crate::disk::{Device, Settings};
use crate::handover::Handover;
use crate::layers::Change;
use crate::rouse::rouse;

/// How long its thread has for an answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Whoever asks again and again waits for so long.
const GLANCE: Duration = Duration::from_secs(1);
/// A thread that has not answered for so long is got out of a system call in which it may wait.
const ROUSE_AFTER: Duration = Duration::from_secs(1);
/// A thread that may wait again is roused again.
const ROUSE_EVERY: Duration = Duration::from_millis(100);

/// What a disk's thread is told.
pub(crate) enum Command {
    Hold(Sender<()>),
    Release,
    /// Stands still until [`Command::GoOn`]: nothing goes to the image.
    Stand(Sender<()>),
    GoOn,
    Measure(Sender<Result<u64, Error>>),
    /// Takes the image, by this name and with this patience, or gives it back.
    Take(String, Duration, Sender<Result<(), Error>>),
    GiveBack(String, Sender<Result<(), Error>>),
    Lend(Sender<std::io::Result<OwnedFd>>),
    PutLowest(Box<dyn Filter>, Sender<Result<(), Error>>),
    TakeLowest(Sender<Result<(), Error>>),
    Switch(Image, Sender<Result<(), Error>>),
    /// The same with what lies over it.
    SwitchOver(Image, Vec<Delta>, Sender<Result<(), Error>>),
    Flatten(Image, Sender<Result<(), Error>>),
    HandOver(Sender<Result<Handover, Error>>),
    /// Makes durable what was answered.
    Settle(Sender<Result<(), Error>>),
    /// Has what is not durable outlive the process, also where a map was removed.
    KeepMaps(Sender<Result<(), Error>>),
    /// Has other deltas above the image.
    Layers(Change, Sender<Result<(), Error>>),
    Status(Sender<Status>),
    Stop,
}

/// How a disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// Whether QEMU is connected.
    pub connected: bool,
    /// How many connections were ended before this one.
    pub life: u16,
    /// How long the write that has waited for longest for room on the image's file system does, if one does. Those of a guest that
    /// stands still are not tried.
    pub full_for: Option<Duration>,
    /// Whether it waits for storage that ends requests with an error, and not for room.
    pub fails: bool,
    /// How long QEMU has been connected without a word. A new one says much at once. Version 7.2 says nothing before it
    /// starts the disk, if it connects again to one that was not started.
    pub mute_for: Option<Duration>,
    /// Queues that QEMU has begun and not ended.
    pub running: usize,
    /// Requests that filters or the kernel have.
    pub under_way: usize,
    /// Requests without an answer, with those that are to be carried out again, also of queues that have ended.
    pub unanswered: usize,
    /// Whether new requests stay in their rings.
    pub held: bool,
    /// Whether its image is taken.
    pub has_image: bool,
    /// What its guest was told that it has.
    pub bytes: u64,
    /// Requests that were carried out again after a process or a connection was gone, since this disk began.
    pub resubmitted: u64,
}

/// QEMU speaks as soon as it has connected, if it does.
const SPEAKS_WITHIN: Duration = Duration::from_millis(200);

impl Status {
    /// Whether QEMU is connected, and done with what it does first: it has spoken, or does not before it starts the disk.
    pub fn is_settled(&self) -> bool {
        self.connected && self.mute_for.is_none_or(|mute| mute >= SPEAKS_WITHIN)
    }
}

/// A disk that stands still until this is dropped: what its guest asks for stays in the rings, whatever else holds it or not.
#[derive(Debug)]
pub struct Standing<'a> {
    disk: &'a Disk,
    goes_on: bool,
}

impl Standing<'_> {
    /// Goes on with another image of the same bytes, which is locked as the one before and has all that deltas showed, if there were any; the filter that
    /// was put below the others, without which this is refused, is taken away. Where this fails the disk may work with either.
    pub fn switch(&self, image: Image) -> Result<(), Error> {
        self.disk.ask(|answer| Command::Switch(image, answer))?
    }

    /// The same with an image over which deltas lie, from the lowest to the top, in place of those that it had. Where this fails the disk is to be
    /// ended: what its guest asks for next would go to the wrong image.
    pub fn switch_over(&self, image: Image, deltas: Vec<Delta>) -> Result<(), Error> {
        self.disk
            .ask(|answer| Command::SwitchOver(image, deltas, answer))?
    }

    /// Goes on with another image of the same bytes, which is locked as the one before and holds what that one and the deltas above it hold together: those are taken away,
    /// as they are. Where this fails the disk is to be ended: it may work with either.
    pub fn flatten(&self, image: Image) -> Result<(), Error> {
        self.disk.ask(|answer| Command::Flatten(image, answer))?
    }

    /// What another program needs to go on with the disk over QEMU's connection. QEMU is not heard from here on, until this value
    /// is dropped; a program that ends before that leaves the connection to whoever has this.
    pub fn hand_over(&self) -> Result<Handover, Error> {
        self.disk.ask(Command::HandOver)?
    }

    /// As [`Disk::settle`]: whoever has waited for that beforehand finds little left to be made durable.
    pub fn settle(&self, limit: Duration) -> Result<(), Error> {
        self.disk.settle(limit)
    }

    /// Has what was answered and is not durable be found by whoever comes after this process, whatever became of the run directory.
    pub fn keep_maps(&self) -> Result<(), Error> {
        self.disk.ask(Command::KeepMaps)?
    }

    /// Goes on with other deltas above its image, from the lowest to the top, over which the disk has the same content: `change` makes
    /// them of those that it had, in the disk's thread. What was settled counts as durable. Where this fails the disk is to be ended: what
    /// its guest asks for next would go to the wrong image.
    pub fn change_layers(
        &self,
        change: impl FnOnce(Vec<Delta>) -> Result<Vec<Delta>, String> + Send + 'static,
    ) -> Result<(), Error> {
        self.disk
            .ask(|answer| Command::Layers(Box::new(change), answer))?
    }

    /// Ends the disk: it takes nothing any more.
    pub fn end(mut self) {
        self.goes_on = false;
        self.disk.begin_end();
    }
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        if self.goes_on {
            let _ = self.disk.tell(Command::GoOn);
        }
    }
}

/// A disk that is served.
#[derive(Debug)]
pub struct Disk {
    commands: Sender<Command>,
    wake: OwnedFd,
    thread: Option<JoinHandle<()>>,
    /// Disconnected once the thread has ended.
    ended: Mutex<Receiver<()>>,
    /// Where the answer to a glance comes that was not waited for.
    glance: Mutex<Option<Receiver<Status>>>,
}

impl Disk {
    /// Serves a disk. QEMU may be started once this has returned: it waits for a back end without end.
    pub fn start(settings: Settings) -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake =
            wake.map_err(|error| Error::system("make a descriptor to wake a disk", error))?;
        let other = wake.try_clone();
        let other = other.map_err(|error| Error::system("wake a disk", error))?;
        let (commands, orders) = channel();
        let name = settings.name.clone();
        let (began, begins) = channel();
        let (ends, ended) = channel::<()>();
        let thread = std::thread::Builder::new()
            .name("disk".to_owned())
            .spawn(move || {
                let _ends = ends;
                match Device::new(settings) {
                    Ok(device) => {
                        let _ = began.send(Ok(()));
                        if let Err(error) = device.run(&orders, &other) {
                            tracing::error!(disk = name, %error, "a disk is no longer served");
                        }
                    }
                    Err(error) => {
                        let _ = began.send(Err(error));
                    }
                }
            });
        let thread = thread.map_err(|error| Error::system("begin a disk's thread", error))?;
        begins.recv().map_err(|_| Error::Ended)??;
        Ok(Self {
            commands,
            wake,
            thread: Some(thread),
            ended: Mutex::new(ended),
            glance: Mutex::default(),
        })
    }

    /// Takes no more requests, which then stay in their rings, and waits until none is under way. QEMU can then stop the guest
    /// at once. Writes that wait for room wait on: a queue that ends leaves them in the in-flight area. The disk is held also where
    /// that takes longer than `patience`, until [`Self::release`].
    pub fn hold(&self, patience: Duration) -> Result<(), Error> {
        self.wait(Command::Hold, patience)
    }

    fn wait(
        &self,
        command: impl FnOnce(Sender<()>) -> Command,
        patience: Duration,
    ) -> Result<(), Error> {
        let (idle, is_idle) = channel();
        self.tell(command(idle))?;
        match is_idle.recv_timeout(patience) {
            Ok(()) => Ok(()),
            Err(RecvTimeoutError::Timeout) => Err(Error::Busy {
                under_way: self.glance()?.under_way,
                waited: patience,
            }),
            Err(RecvTimeoutError::Disconnected) => Err(Error::Ended),
        }
    }

    /// Takes requests again after [`Self::hold`], without waiting for it.
    pub fn release(&self) -> Result<(), Error> {
        self.tell(Command::Release)
    }

    /// Looks how large the image is now and tells the guest. Returns its bytes.
    pub fn measure(&self) -> Result<u64, Error> {
        self.ask(Command::Measure)?
    }

    /// Takes the image of a disk that began without, or gave it back, as [`godwit_blockio::Image::lock`]. Without its image a
    /// disk takes no requests.
    pub fn take_image(&self, name: &str, patience: Duration) -> Result<(), Error> {
        self.take_image_beyond(ANSWER, name, patience)
    }

    /// Waits for the answer for so long beyond the patience that the thread itself has.
    fn take_image_beyond(
        &self,
        limit: Duration,
        name: &str,
        patience: Duration,
    ) -> Result<(), Error> {
        let limit = limit.saturating_add(patience);
        self.ask_within(limit, |answer| {
            Command::Take(name.to_owned(), patience, answer)
        })?
    }

    /// The image's own descriptor once more. The image stays locked, if it is, for as long as it is open.
    pub fn lend_image(&self) -> Result<OwnedFd, Error> {
        let lent = self.ask(Command::Lend)?;
        lent.map_err(|error| Error::system("lend an image", error))
    }

    /// Makes durable what was written, and lets another host or process have the image. The disk must be held.
    pub fn give_image_back(&self, name: &str) -> Result<(), Error> {
        self.ask(|answer| Command::GiveBack(name.to_owned(), answer))?
    }

    /// Puts a filter below all others, in place of the one that was put there before. Nothing goes to the image meanwhile;
    /// waits for what does at most for `patience`.
    pub fn put_lowest(&self, filter: Box<dyn Filter>, patience: Duration) -> Result<(), Error> {
        let _standing = self.stand_still(patience)?;
        self.ask(|answer| Command::PutLowest(filter, answer))?
    }

    /// Takes it away again; refused where there is none.
    pub fn take_lowest(&self, patience: Duration) -> Result<(), Error> {
        let _standing = self.stand_still(patience)?;
        self.ask(Command::TakeLowest)?
    }

    /// Makes durable all that the guest was told. What takes longer than this limit goes on beside the guest, whose requests it does not hold up; what the
    /// storage lost that hears with its next flush.
    pub fn settle(&self, limit: Duration) -> Result<(), Error> {
        let (answer, answers) = channel();
        self.tell(Command::Settle(answer))?;
        match answers.recv_timeout(limit) {
            Ok(settled) => settled,
            Err(RecvTimeoutError::Timeout) => Err(Error::NotDurable { waited: limit }),
            Err(RecvTimeoutError::Disconnected) => Err(Error::Ended),
        }
    }

    /// Lets nothing go to the image and waits until nothing of the guest's is on its way to it; writes for which there is no
    /// room wait as they do. Goes on when the value that is returned is dropped.
    pub fn stand_still(&self, patience: Duration) -> Result<Standing<'_>, Error> {
        let standing = Standing {
            disk: self,
            goes_on: true,
        };
        self.wait(Command::Stand, patience)?;
        Ok(standing)
    }

    /// How the disk is.
    pub fn status(&self) -> Result<Status, Error> {
        self.ask(Command::Status)
    }

    /// As [`Self::status`], for whoever cannot wait longer than this.
    pub fn status_within(&self, limit: Duration) -> Result<Status, Error> {
        self.ask_within(limit, Command::Status)
    }

    /// As [`Self::status`], for whoever asks again and again: a disk that has not answered the last time is silent at once.
    pub fn glance(&self) -> Result<Status, Error> {
        let silent = Err(Error::Silent { waited: GLANCE });
        let mut glance = self.glance.lock().unwrap_or_else(PoisonError::into_inner);
        let before = glance.as_ref().map(Receiver::try_recv);
        if matches!(before, Some(Err(TryRecvError::Empty))) {
            self.thread.as_ref().inspect(|thread| rouse(thread));
            return silent;
        }
        let (answer, answers) = channel();
        self.tell(Command::Status(answer))?;
        match answers.recv_timeout(GLANCE) {
            Ok(status) => {
                *glance = None;
                Ok(status)
            }
            Err(RecvTimeoutError::Timeout) => {
                *glance = Some(answers);
                silent
            }
            Err(RecvTimeoutError::Disconnected) => Err(Error::Ended),
        }
    }

    /// Tells it to end, which dropping it waits for.
    pub fn begin_end(&self) {
        let _ = self.tell(Command::Stop);
    }

    /// Whether its thread is gone, since the kernel failed it; nobody serves the disk then.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn tell(&self, command: Command) -> Result<(), Error> {
        self.commands.send(command).map_err(|_| Error::Ended)?;
        // A descriptor that is full has been signalled already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        Ok(())
    }

    /// The thread waits for nothing alone but for an image that changes hands ([`Self::take_image`], [`Self::give_image_back`]), so its
    /// answer comes; but it may be in the kernel's hands.
    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> Result<T, Error> {
        self.ask_within(ANSWER, command)
    }

    fn ask_within<T>(
        &self,
        limit: Duration,
        command: impl FnOnce(Sender<T>) -> Command,
    ) -> Result<T, Error> {
        let (answer, answers) = channel();
        self.tell(command(answer))?;
        self.roused(&answers, limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => Error::Silent { waited: limit },
            RecvTimeoutError::Disconnected => Error::Ended,
        })
    }

    /// What comes of the thread within this limit; it is roused if that takes long.
    fn roused<T>(&self, news: &Receiver<T>, limit: Duration) -> Result<T, RecvTimeoutError> {
        let soon = news.recv_timeout(ROUSE_AFTER.min(limit));
        if !matches!(soon, Err(RecvTimeoutError::Timeout)) {
            return soon;
        }
        // It may wait for one thing after the other, and a signal that comes before it waits does nothing.
        let until = Instant::now() + limit.saturating_sub(ROUSE_AFTER);
        loop {
            self.thread.as_ref().inspect(|thread| rouse(thread));
            let answer = news.recv_timeout(ROUSE_EVERY);
            let is_over = !matches!(answer, Err(RecvTimeoutError::Timeout));
            if is_over || Instant::now() >= until {
                return answer;
            }
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = self.tell(Command::Stop);
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let has_ended = self.roused(&ended, ANSWER);
        drop(ended);
        match (has_ended, self.thread.take()) {
            (Err(RecvTimeoutError::Disconnected), Some(thread)) => drop(thread.join()),
            _ => tracing::error!(
                "a disk's thread does not end; its image stays locked until it does"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Geometry;
    use godwit_blockio::{Access, Waits};
    use godwit_guestmem::RamFile;
    use std::sync::Arc;

    #[test]
    fn whoever_takes_an_image_that_another_has_hears_that_and_no_silence() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = directory.path().join("disk.raw");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let open = || Image::open(&path, Access::ReadWrite, 512).unwrap();
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram = RamFile::create(&memory.path().join("ram"), 2 << 20, None).unwrap();
        let disk = Disk::start(Settings {
            name: "root".to_owned(),
            socket: directory.path().join("socket"),
            owner: None,
            image: open(),
            geometry: Geometry {
                bytes: 1 << 20,
                block: 512,
                queues: 1,
                read_only: false,
                erases: true,
                serial: String::new(),
            },
            filters: Vec::new(),
            ram: Arc::new(ram),
            has_image: false,
            waits: Waits {
                for_room: true,
                for_storage: false,
            },
            handed: None,
            deltas: Vec::new(),
        })
        .unwrap();
        let mut holder = open();
        holder.lock("other", Duration::ZERO).unwrap();
        // Longer than its thread has for any other answer.
        let (answer, patience) = (Duration::from_secs(1), Duration::from_millis(1500));
        let refused = disk.take_image_beyond(answer, "root", patience);
        let Err(Error::Image(godwit_blockio::Error::InUse { .. })) = refused else {
            panic!("{refused:?}");
        };
    }
}
