//! A front end for tests: what QEMU and a guest's driver do, in code of its own, and a disk to do it to.
//!
//! Guest memory is read and written through the file that it is in. The driver may lie as it likes.
#![allow(dead_code, unused_imports)]

mod chance;
mod gate;
mod mirrored;
mod requests;
mod without_room;

pub use chance::Chance;
pub use gate::{Gate, wait_until};
pub use mirrored::{Mirrored, Unconfirmed, until};
pub use requests::{DISCARD, WRITE_ZEROES, places};
pub use without_room::{without_room, without_room_for};

use godwit_blockio::{Access, Filter, Image, Waits};
use godwit_guestmem::RamFile;
use godwit_vhost::block::Geometry;
use godwit_vhost::{Disk, Settings};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const RAM: u64 = 8 << 20;
/// Longer than anything here takes.
pub const LONG: Duration = Duration::from_secs(60);
/// Guest memory begins here for the guest, as above a hole.
pub const GUEST: u64 = 1 << 32;
/// And here for QEMU.
const QEMU: u64 = 0x7f12_3400_0000;
/// Each queue's rings have so much room.
const RINGS: u64 = 0x10000;
/// The first byte that no ring of four queues takes.
pub const FREE: u64 = GUEST + 8 * RINGS;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// A disk's image, a guest's memory, and where they meet.
pub struct Site {
    pub image: PathBuf,
    pub socket: PathBuf,
    pub ram: Arc<RamFile>,
    pub memory: File,
    directory: tempfile::TempDir,
    _ram_directory: tempfile::TempDir,
}

impl Site {
    pub fn new(bytes: u64) -> Self {
        // Not the default place, which may be a tmpfs.
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let image = directory.path().join("disk.raw");
        Self::over(image, bytes, directory)
    }

    /// With an image that is made at this place, and a directory that goes with the value.
    pub fn over(image: PathBuf, bytes: u64, directory: tempfile::TempDir) -> Self {
        let ram_directory = tempfile::tempdir_in("/dev/shm").unwrap();
        File::create(&image).unwrap().set_len(bytes).unwrap();
        let path = ram_directory.path().join("ram");
        let ram = Arc::new(RamFile::create(&path, RAM, None).unwrap());
        Self {
            image,
            socket: ram_directory.path().join("disk"),
            memory: open(&path),
            ram,
            directory,
            _ram_directory: ram_directory,
        }
    }

    pub fn geometry(&self) -> Geometry {
        Geometry {
            bytes: std::fs::metadata(&self.image).unwrap().len(),
            block: 512,
            queues: 2,
            read_only: false,
            erases: true,
            serial: "0123456789".to_owned(),
        }
    }

    pub fn disk(&self, filters: Vec<Box<dyn Filter>>) -> Disk {
        self.disk_of(self.geometry(), filters)
    }

    pub fn disk_of(&self, geometry: Geometry, filters: Vec<Box<dyn Filter>>) -> Disk {
        self.try_disk(geometry, filters).unwrap()
    }

    pub fn try_disk(
        &self,
        geometry: Geometry,
        filters: Vec<Box<dyn Filter>>,
    ) -> Result<Disk, godwit_vhost::Error> {
        Disk::start(self.settings(geometry, filters))
    }

    fn settings(&self, geometry: Geometry, filters: Vec<Box<dyn Filter>>) -> Settings {
        let mut image = Image::open(&self.image, Access::ReadWrite, 512).unwrap();
        image.lock("root", LONG).unwrap();
        Settings {
            name: "root".to_owned(),
            socket: self.socket.clone(),
            owner: None,
            image,
            geometry,
            filters,
            ram: Arc::clone(&self.ram),
            has_image: true,
            waits: Waits {
                for_room: true,
                for_storage: false,
            },
            handed: None,
            deltas: Vec::new(),
        }
    }

    pub fn front_end(&self) -> FrontEnd {
        FrontEnd::connect(&self.socket, self.ram.path())
    }

    /// One that has begun its queues.
    pub fn guest(&self) -> FrontEnd {
        let mut guest = self.front_end();
        guest.negotiate(0);
        guest.start();
        guest
    }

    pub fn content(&self) -> Vec<u8> {
        std::fs::read(&self.image).unwrap()
    }

    pub fn write(&self, guest: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, guest - GUEST).unwrap();
    }

    pub fn read(&self, guest: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory
            .read_exact_at(&mut bytes, guest - GUEST)
            .unwrap();
        bytes
    }
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// A buffer of a request.
#[derive(Clone, Copy)]
pub struct Part {
    pub at: u64,
    pub len: u32,
    pub flags: u16,
}

pub fn out(at: u64, len: u32) -> Part {
    Part { at, len, flags: 0 }
}

pub fn into(at: u64, len: u32) -> Part {
    Part {
        at,
        len,
        flags: WRITE,
    }
}

/// What a driver knows of its queue.
pub struct Driver {
    pub size: u16,
    descriptors: u64,
    available: u64,
    used: u64,
    made_available: u16,
    seen: u16,
    next_descriptor: u16,
    kick: OwnedFd,
    call: OwnedFd,
}

/// QEMU and its guest.
pub struct FrontEnd {
    socket: UnixStream,
    memory: File,
    pub drivers: Vec<Driver>,
    /// What the back end gave to be kept, with its description.
    pub inflight: Option<(OwnedFd, Vec<u8>)>,
    pub features: u64,
}

pub const SEVERAL_QUEUES: u16 = 2;

/// As QEMU does: a socket that is not there, or refuses, is tried again.
fn connect(path: &Path) -> UnixStream {
    let until = Instant::now() + LONG;
    loop {
        match UnixStream::connect(path) {
            Ok(socket) => return socket,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        std::thread::yield_now();
    }
}

impl FrontEnd {
    pub fn connect(socket: &Path, ram: &Path) -> Self {
        Self::over(connect(socket), ram)
    }

    fn over(socket: UnixStream, ram: &Path) -> Self {
        let drivers = (0..SEVERAL_QUEUES).map(|number| {
            let base = GUEST + u64::from(number) * 4 * RINGS;
            let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            Driver {
                size: 256,
                descriptors: base,
                available: base + RINGS,
                used: base + 2 * RINGS,
                made_available: 0,
                seen: 0,
                next_descriptor: 0,
                kick: event(),
                call: event(),
            }
        });
        Self {
            socket,
            memory: open(ram),
            drivers: drivers.collect(),
            inflight: None,
            features: 0,
        }
    }

    pub fn hang_up(&mut self) {
        self.socket = UnixStream::pair().unwrap().0;
    }

    /// One that is to be connected.
    pub fn unconnected(ram: &RamFile) -> Self {
        Self::over(UnixStream::pair().unwrap().0, ram.path())
    }

    /// As after a lost connection: the guest and its rings are as they were.
    pub fn connect_again(&mut self, socket: &Path) {
        // The other end hears that the last one is gone before it is tried again, as with QEMU's pause in between.
        self.hang_up();
        self.socket = connect(socket);
    }

    pub fn send(&mut self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send_with(request, 0, body, fds);
    }

    fn send_with(&mut self, request: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        let header = [request, 1 | flags, body.len() as u32];
        let mut bytes = header.map(u32::to_le_bytes).concat();
        bytes.extend_from_slice(body);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(beside.push(SendAncillaryMessage::ScmRights(fds)));
        }
        // A back end that has hung up is found when it is to answer.
        let parts = [IoSlice::new(&bytes)];
        let _ = rustix::net::sendmsg(&self.socket, &parts, &mut beside, SendFlags::NOSIGNAL);
    }

    /// Body and descriptor of an answer, or nothing if the back end has hung up.
    pub fn answer(&mut self, request: u32) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut header)];
        let flags = RecvFlags::WAITALL;
        let got = rustix::net::recvmsg(&self.socket, &mut parts, &mut beside, flags).ok()?;
        if got.bytes != 12 {
            return None;
        }
        let mut fd = None;
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                fd = fds.last();
            }
        }
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!(
            (word(0), word(4)),
            (request, 5),
            "an answer to what was asked"
        );
        let mut body = vec![0; word(8) as usize];
        self.socket.read_exact(&mut body).ok()?;
        Some((body, fd))
    }

    pub fn ask(&mut self, request: u32, body: &[u8]) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        self.send(request, body, &[]);
        self.answer(request)
    }

    pub fn ask_with(
        &mut self,
        request: u32,
        flags: u32,
        body: &[u8],
    ) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        self.send_with(request, flags, body, &[]);
        self.answer(request)
    }

    pub fn number(&mut self, request: u32) -> u64 {
        let (body, _) = self.ask(request, &[]).expect("an answer");
        u64::from_le_bytes(body.try_into().unwrap())
    }

    /// Takes all that is offered but `without`.
    pub fn negotiate(&mut self, without: u64) {
        self.features = self.number(1) & !without;
        let protocol = self.number(15);
        self.send(16, &protocol.to_le_bytes(), &[]);
        self.send(3, &[], &[]);
        self.send(2, &self.features.to_le_bytes(), &[]);
    }

    pub fn set_memory(&mut self) {
        let table = [1, GUEST, RAM, QEMU, 0].map(u64::to_le_bytes).concat();
        let memory = self.memory.try_clone().unwrap();
        self.send(5, &table, &[memory.as_fd()]);
    }

    /// Gives the back end what it gave to be kept, or has it make that.
    pub fn set_inflight(&mut self) {
        let count = self.drivers.len() as u16;
        if self.inflight.is_none() {
            let mut asked = [0u64; 2].map(u64::to_le_bytes).concat();
            asked.extend([count, 256].map(u16::to_le_bytes).concat());
            asked.extend([0; 4]);
            let (body, fd) = self.ask(31, &asked).expect("an in-flight area");
            self.inflight = Some((fd.expect("its descriptor"), body));
        }
        let (fd, body) = self.inflight.take().unwrap();
        self.send(32, &body, &[fd.as_fd()]);
        self.inflight = Some((fd, body));
    }

    /// Begins all queues at what was seen last, as QEMU does after a lost connection or at `cont`.
    pub fn start(&mut self) {
        self.set_memory();
        self.set_inflight();
        for number in 0..self.drivers.len() {
            self.start_queue(number);
        }
        // Whoever asks has all before it done.
        self.number(1);
    }

    pub fn start_queue(&mut self, number: usize) {
        self.describe_queue(number);
        self.begin_queue(number);
    }

    pub fn begin_queue(&mut self, number: usize) {
        let index = number as u32;
        let (call, kick) = self.descriptors_of(number);
        self.send(13, &u64::from(index).to_le_bytes(), &[call.as_fd()]);
        self.send(12, &u64::from(index).to_le_bytes(), &[kick.as_fd()]);
        self.send(18, &pair(index, 1), &[]);
    }

    pub fn descriptors_of(&self, number: usize) -> (OwnedFd, OwnedFd) {
        let driver = &self.drivers[number];
        (
            driver.call.try_clone().unwrap(),
            driver.kick.try_clone().unwrap(),
        )
    }

    /// All that goes before the descriptors.
    pub fn describe_queue(&mut self, number: usize) {
        let index = number as u32;
        let driver = &self.drivers[number];
        let used_index = self.load(driver.used + 2);
        let size = driver.size;
        let mut addresses = [index, 0].map(u32::to_le_bytes).concat();
        for at in [driver.descriptors, driver.used, driver.available, 0] {
            addresses.extend((at.wrapping_sub(GUEST).wrapping_add(QEMU)).to_le_bytes());
        }
        self.send(8, &pair(index, size.into()), &[]);
        self.send(10, &pair(index, used_index.into()), &[]);
        self.send(9, &addresses, &[]);
    }

    /// Ends a queue and returns its base.
    pub fn end_queue(&mut self, number: u32) -> u32 {
        let (body, _) = self.ask(11, &pair(number, 0)).expect("the queue's base");
        assert_eq!(body[..4], number.to_le_bytes());
        u32::from_le_bytes(body[4..].try_into().unwrap())
    }

    /// Where a queue's used ring is.
    pub fn used_ring(&self, queue: usize) -> u64 {
        self.drivers[queue].used
    }

    pub fn load(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        self.memory.read_exact_at(&mut bytes, at - GUEST).unwrap();
        u16::from_le_bytes(bytes)
    }

    pub fn store(&self, at: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, at - GUEST).unwrap();
    }

    pub fn descriptor(&self, queue: usize, index: u16, part: Part, next: u16) {
        let at = self.drivers[queue].descriptors + 16 * u64::from(index);
        self.store(at, &raw(part, next));
    }

    /// Puts a chain into the next descriptors and returns its head. It is not available yet.
    pub fn chain(&mut self, queue: usize, parts: &[Part]) -> u16 {
        let size = self.drivers[queue].size;
        let head = self.drivers[queue].next_descriptor;
        for (number, part) in parts.iter().enumerate() {
            let index = (head + number as u16) % size;
            let mut part = *part;
            if number + 1 < parts.len() {
                part.flags |= NEXT;
            }
            self.descriptor(queue, index, part, (index + 1) % size);
        }
        self.drivers[queue].next_descriptor = (head + parts.len() as u16) % size;
        head
    }

    /// Puts a chain of at most three into a place of its own, of which there are as many as a third of the ring, and makes it
    /// available: also while earlier ones are under way.
    pub fn put_at(&mut self, place: usize, parts: &[Part]) {
        let head = place as u16 * 3;
        for (index, part) in parts.iter().enumerate() {
            let (mut part, at) = (*part, head + index as u16);
            if index + 1 < parts.len() {
                part.flags |= NEXT;
            }
            self.descriptor(0, at, part, at + 1);
        }
        self.make_available(0, head);
    }

    /// Makes a head available, whatever it is.
    pub fn make_available(&mut self, queue: usize, head: u16) {
        let driver = &self.drivers[queue];
        let (index, at) = (driver.made_available, driver.available);
        let slot = u64::from(index % driver.size);
        self.store(at + 4 + 2 * slot, &head.to_le_bytes());
        let index = index.wrapping_add(1);
        self.store(at + 2, &index.to_le_bytes());
        self.drivers[queue].made_available = index;
    }

    pub fn kick(&self, queue: usize) {
        rustix::io::write(&self.drivers[queue].kick, &1u64.to_ne_bytes()).unwrap();
    }

    pub fn submit(&mut self, queue: usize, parts: &[Part]) -> u16 {
        let head = self.chain(queue, parts);
        self.make_available(queue, head);
        self.kick(queue);
        head
    }

    /// What has been answered and was not looked at before.
    pub fn answered(&mut self, queue: usize) -> Option<(u32, u32)> {
        let driver = &self.drivers[queue];
        if self.load(driver.used + 2) == driver.seen {
            return None;
        }
        let at = driver.used + 4 + 8 * u64::from(driver.seen % driver.size);
        let mut element = [0; 8];
        self.memory.read_exact_at(&mut element, at - GUEST).unwrap();
        let seen = driver.seen.wrapping_add(1);
        // An interrupt for the next one, by index.
        let event = driver.available + 4 + 2 * u64::from(driver.size);
        self.store(event, &seen.to_le_bytes());
        self.drivers[queue].seen = seen;
        let word = |at: usize| u32::from_le_bytes(element[at..at + 4].try_into().unwrap());
        Some((word(0), word(4)))
    }

    /// Waits for the next answer as a driver does: until it is interrupted, for a minute at most.
    pub fn wait(&mut self, queue: usize) -> (u32, u32) {
        loop {
            if let Some(answered) = self.answered(queue) {
                return answered;
            }
            let call = &self.drivers[queue].call;
            let mut fds = [PollFd::new(call, PollFlags::IN)];
            let minute = rustix::time::Timespec {
                tv_sec: 60,
                tv_nsec: 0,
            };
            assert_eq!(
                poll(&mut fds, Some(&minute)).unwrap(),
                1,
                "no interrupt came"
            );
            let mut count = [0; 8];
            rustix::io::read(call, &mut count).unwrap();
        }
    }
}

pub fn pair(a: u32, b: u32) -> Vec<u8> {
    [a, b].map(u32::to_le_bytes).concat()
}

pub fn raw(part: Part, next: u16) -> Vec<u8> {
    let mut bytes = part.at.to_le_bytes().to_vec();
    bytes.extend(part.len.to_le_bytes());
    bytes.extend([part.flags, next].map(u16::to_le_bytes).concat());
    bytes
}
