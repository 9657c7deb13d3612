//! The label of a block device that holds a disk: where the disk ends, whose it is, and whether it is whole.
//!
//! A half-made file has a name of its own; a device has one name whatever is on it. So its last MiB bears what a file's name and extended
//! attributes say, and the disk ends before it: its guest never reaches it. Two slots are written in turn, each with a
//! number and a checksum, so that a write that is torn leaves what was said before. Each is read and written beside the page cache and
//! made durable, since another host may reach the device, too.
//!
//! A device that was made longer has its label where its end was: who knows how long it was finds it there, and [`move_to_end`] brings it to the
//! new end. Owns nothing: the label is the device's, and whoever has the device's lock writes it. Refuses: a label whose numbers do not fit its
//! device, one of another format or with names that nothing has, one that lacks the slot before it, and one of which neither slot can be read.
//! Anybody with rights on the device may have written it.

use std::io;
use std::os::fd::BorrowedFd;

use godwit_store::frame::crc32;
use godwit_types::VmName;
use godwit_types::ids::is_valid_name;
use rustix::fs::{
    FallocateFlags, FileType, OFlags, SeekFrom, fallocate, fcntl_getfl, fcntl_setfl, fdatasync,
    fstat, seek,
};
use rustix::io::{pread, pwrite};

use crate::{Buffer, SECTOR};

/// What the label takes of its device's end.
pub const ROOM: u64 = 1 << 20;
/// Bytes of a slot; what a device writes at once may be less.
pub const SLOT: usize = 4096;
/// Where the second slot is.
const SECOND: u64 = ROOM / 2;
const MAGIC: &[u8; 8] = b"GODWITLB";
/// The format that this build writes, and the only one that it reads.
const VERSION: u32 = 1;
/// Before what has no fixed length: the checksum is of all that follows it.
const CHECKED: usize = 16;
/// Bytes of a name.
const NAME_MAX: usize = 255;
/// Bytes of what [`crate::holder`] keeps.
const TEXT_MAX: usize = 2048;
/// No label's number is larger.
const NUMBER_MAX: u64 = 1 << 48;
/// So much is zeroed at a time.
const ZEROED: u64 = 128 << 20;

/// What a device holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holds {
    /// No disk: whatever its bytes are, nobody needs them, for as long as its beginning is as it was left.
    Nothing,
    /// A part of a disk, which nobody opens for one. The name is what a file would have meanwhile, and tells whose work it is.
    Part(String),
    Disk,
}

/// What a label says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    pub holds: Holds,
    /// Bytes of the disk; none where there is no disk.
    pub bytes: u64,
    /// For which VM's disk it was made,
    pub vm: String,
    pub disk: String,
    /// and what [`crate::holder`] keeps; nothing before somebody has had it. Where there is no disk, the checksum of its first MiB.
    pub text: Option<Vec<u8>>,
}

/// A label as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Each later one has a larger one.
    pub number: u64,
    /// Bytes of the device when it was labelled: the label is in the last MiB of these.
    pub device: u64,
    pub label: Label,
}

/// Where the disk on a block device ends, as far as that is known before the device is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// With its device: what looks like a label there its guest has written.
    OfDevice,
    /// Before its label, if it bears one. The device was so long when it was labelled, if that is known.
    ByLabel(Option<u64>),
}

/// What is in a slot.
#[derive(Debug, PartialEq, Eq)]
pub enum Slot {
    Found(Found),
    /// No label was ever there.
    Empty,
    /// A write of one that broke off: what was said before counts.
    Torn,
    /// One that may be later than the other, and is not understood, for this reason: a part of a sentence.
    Foreign(&'static str),
}

impl Label {
    /// That a device holds no disk, and with which first MiB it was left.
    pub fn free(beginning: u32) -> Self {
        Self {
            holds: Holds::Nothing,
            bytes: 0,
            vm: String::new(),
            disk: String::new(),
            text: Some(beginning.to_le_bytes().to_vec()),
        }
    }

    /// Why a device that bears it has no disk to be opened, if it has none: a part of a sentence.
    pub fn why_no_disk(&self) -> Option<String> {
        let Self { vm, disk, .. } = self;
        match self.holds {
            Holds::Disk => None,
            Holds::Part(_) => Some(format!(
                "by its label it holds a part of disk '{disk}' of VM '{vm}', whose copying did not end: give this disk another path, or copy it there anew"
            )),
            Holds::Nothing => Some(
                "by its label it holds no disk: the one that it held has moved elsewhere, so name the path that it has now; where somebody has put one there since, 'godwit image release' with the device's path drops the label"
                    .to_owned(),
            ),
        }
    }
}

/// Most bytes of a disk on a device of this length; nothing where it has no room for a label.
pub fn capacity(device: u64) -> u64 {
    let bytes = device.saturating_sub(ROOM);
    bytes - bytes % SECTOR
}

/// The label of a block device; nothing of a file, or of a device that bears none.
pub fn read(image: BorrowedFd<'_>) -> io::Result<Option<Found>> {
    match device_of(image)? {
        Some(device) => read_before(image, device),
        None => Ok(None),
    }
}

/// The same of one that bore it while it was so long, and may have been made longer since.
pub fn read_of(image: BorrowedFd<'_>, was: Option<u64>) -> io::Result<Option<Found>> {
    let (found, device) = (read(image)?, device_of(image)?);
    let was = was.filter(|was| *was >= 2 * ROOM && was.is_multiple_of(SECTOR));
    match was.filter(|was| found.is_none() && device.is_some_and(|device| *was < device)) {
        Some(was) => read_before(image, was),
        None => Ok(found),
    }
}

fn read_before(image: BorrowedFd<'_>, end: u64) -> io::Result<Option<Found>> {
    let slots = beside_cache(image, || {
        Ok([read_slot(image, end, 0)?, read_slot(image, end, 1)?])
    })?;
    newest(slots)
}

fn newest(slots: [Slot; 2]) -> io::Result<Option<Found>> {
    let (mut found, mut is_torn, mut is_empty) = (None::<Found>, false, false);
    let refused = |why| {
        let why = format!(
            "the label in its last MiB cannot be read: {why}; 'godwit image release' with the device's path on its host drops the label if nobody needs it"
        );
        Err(io::Error::other(why))
    };
    for slot in slots {
        match slot {
            Slot::Found(other) => {
                let is_newer = |found: &Found| found.number < other.number;
                if found.as_ref().is_none_or(is_newer) {
                    found = Some(other);
                }
            }
            Slot::Torn => is_torn = true,
            Slot::Foreign(why) => return refused(why),
            Slot::Empty => is_empty = true,
        }
    }
    match &found {
        None if is_torn => refused("its checksum is wrong"),
        // The one after it was written, or both were.
        Some(found) if is_empty && found.number > 1 => refused("what was said before it is gone"),
        _ => Ok(found),
    }
}

/// Puts a label in the place of what was found, durably. Whoever calls this has the device's lock.
pub fn write(image: BorrowedFd<'_>, before: Option<&Found>, label: Label) -> io::Result<Found> {
    let end = device_of(image)?.ok_or_else(|| {
        io::Error::other("it is no block device, or one with no room for a disk and its label")
    })?;
    let number = before.map_or(0, |found| found.number).saturating_add(1);
    // One that is at an earlier end stays there.
    let device = before.map_or(end, |found| found.device);
    if device > end {
        return Err(io::Error::other("it is shorter than when it was labelled"));
    }
    let found = Found {
        number,
        device,
        label,
    };
    let bytes = encode(&found, device).ok_or_else(|| io::Error::other("its label does not fit"))?;
    let at = place_of(device, found.slot());
    beside_cache(image, || {
        write_all(image, bytes.bytes(), at)?;
        Ok(fdatasync(image)?)
    })?;
    Ok(found)
}

/// Has a label that is at an earlier end of its device be at the one that it has now, durably. Returns it as it is then.
pub fn move_to_end(image: BorrowedFd<'_>, found: &Found) -> io::Result<Found> {
    let end = device_of(image)?.unwrap_or_default();
    if found.device == end {
        return Ok(found.clone());
    }
    if end < found.device.saturating_add(ROOM) {
        return Err(io::Error::other(
            "it is longer than when it was labelled by less than 1 MiB: make it longer by more",
        ));
    }
    let moved = write(image, None, found.label.clone())?;
    erase_before(image, found.device)?;
    Ok(moved)
}

/// Has a device say that it holds no disk, and with which beginning it was left, durably.
pub fn let_go(image: BorrowedFd<'_>, before: Option<&Found>) -> io::Result<Found> {
    write(image, before, Label::free(beginning(image)?))
}

/// Whether a device that is free still begins as when it was left: nobody has put anything there since.
pub fn is_as_left(image: BorrowedFd<'_>, label: &Label) -> io::Result<bool> {
    let left = label.text.as_deref();
    Ok(left == Some(&beginning(image)?.to_le_bytes()[..]))
}

/// Takes the label off a device, whatever it says: it is one without a label from then on. Whoever calls this has the device's lock.
pub fn take_off(image: BorrowedFd<'_>) -> io::Result<()> {
    match device_of(image)? {
        Some(device) => erase_before(image, device),
        None => Ok(()),
    }
}

/// The older slot goes first: what it said never counts again.
fn erase_before(image: BorrowedFd<'_>, end: u64) -> io::Result<()> {
    let zeros = Buffer::zeroed(SLOT);
    beside_cache(image, || {
        let number = |slot| match read_slot(image, end, slot)? {
            Slot::Found(found) => Ok::<_, io::Error>(found.number),
            _ => Ok(0),
        };
        let order = match number(0)? > number(1)? {
            true => [1, 0],
            false => [0, 1],
        };
        for slot in order {
            write_all(image, zeros.bytes(), place_of(end, slot))?;
            fdatasync(image)?;
        }
        Ok(())
    })
}

fn beginning(image: BorrowedFd<'_>) -> io::Result<u32> {
    let mut buffer = Buffer::zeroed(ROOM as usize);
    beside_cache(image, || read_all(image, buffer.bytes_mut(), 0))?;
    Ok(crc32(&[buffer.bytes()]))
}

/// The label that counts on a device, if one does.
pub fn read_at(image: BorrowedFd<'_>, end: End) -> io::Result<Option<Found>> {
    match end {
        End::OfDevice => Ok(None),
        End::ByLabel(was) => read_of(image, was),
    }
}

/// Bytes of the whole disk that a file or device holds. Refused of a device that holds none, or a part of one.
pub fn length(image: BorrowedFd<'_>, end: End) -> io::Result<u64> {
    match read_at(image, end)?.map(|found| found.label) {
        None => Ok(seek(image, SeekFrom::End(0))?),
        Some(label) => match label.why_no_disk() {
            None => Ok(label.bytes),
            Some(why) => Err(io::Error::other(why)),
        },
    }
}

/// Whether a device without a label has nothing that anybody has put there: its first MiB and its last are zero.
pub fn is_blank(image: BorrowedFd<'_>) -> io::Result<bool> {
    let Some(device) = device_of(image)? else {
        return Ok(false);
    };
    let mut buffer = Buffer::zeroed(ROOM as usize);
    beside_cache(image, || {
        for at in [0, device - ROOM] {
            read_all(image, buffer.bytes_mut(), at)?;
            if buffer.bytes().iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
        }
        Ok(true)
    })
}

/// Has the first bytes of a device read as zero. `go_on` is asked now and then.
pub fn zero(image: BorrowedFd<'_>, bytes: u64, go_on: impl Fn() -> bool) -> io::Result<()> {
    let mut at = 0;
    while at < bytes {
        if !go_on() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let len = ZEROED.min(bytes - at);
        let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        fallocate(image, flags, at, len)?;
        at += len;
    }
    Ok(fdatasync(image)?)
}

/// The length of a block device that has room for a label and a disk as long.
pub fn device_of(image: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    if FileType::from_raw_mode(fstat(image)?.st_mode) != FileType::BlockDevice {
        return Ok(None);
    }
    let device = seek(image, SeekFrom::End(0))?;
    let has_room = device >= 2 * ROOM && device.is_multiple_of(SECTOR);
    Ok(has_room.then_some(device))
}

/// Another descriptor of the same file may be read through the cache still, so this one gets back what it had.
fn beside_cache<R>(image: BorrowedFd<'_>, work: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
    let flags = fcntl_getfl(image)?;
    let is_direct = flags.contains(OFlags::DIRECT);
    if !is_direct {
        fcntl_setfl(image, flags | OFlags::DIRECT)?;
    }
    let done = work();
    if !is_direct {
        fcntl_setfl(image, flags)?;
    }
    done
}

fn place_of(device: u64, slot: u64) -> u64 {
    device - ROOM + slot * SECOND
}

fn read_slot(image: BorrowedFd<'_>, device: u64, slot: u64) -> io::Result<Slot> {
    let mut buffer = Buffer::zeroed(SLOT);
    read_all(image, buffer.bytes_mut(), place_of(device, slot))?;
    Ok(match decode(buffer.bytes(), device) {
        Slot::Found(found) if found.slot() != slot => {
            Slot::Foreign("it is in the other one's place")
        }
        read => read,
    })
}

fn write_all(image: BorrowedFd<'_>, bytes: &[u8], at: u64) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
        match pwrite(image, rest, at + done as u64)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => done += written,
        }
    }
    Ok(())
}

fn read_all(image: BorrowedFd<'_>, into: &mut [u8], at: u64) -> io::Result<()> {
    let length = into.len();
    let mut done = 0;
    while done < length {
        let rest = into.get_mut(done..).unwrap_or_default();
        match pread(image, rest, at + done as u64)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => done += read,
        }
    }
    Ok(())
}

impl Found {
    /// Never the one that has what was said before.
    fn slot(&self) -> u64 {
        self.number % 2
    }
}

/// Nothing where it does not fit.
fn encode(found: &Found, device: u64) -> Option<Buffer> {
    let Found { number, label, .. } = found;
    let (holds, name) = match &label.holds {
        Holds::Nothing => (0_u8, ""),
        Holds::Part(name) => (1, name.as_str()),
        Holds::Disk => (2, ""),
    };
    let text = label.text.as_deref();
    let parts = [
        name.as_bytes(),
        label.vm.as_bytes(),
        label.disk.as_bytes(),
        text.unwrap_or_default(),
    ];
    let mut slot = MAGIC.to_vec();
    slot.extend(VERSION.to_le_bytes());
    slot.extend([0; 4]);
    for value in [*number, device, label.bytes] {
        slot.extend(value.to_le_bytes());
    }
    slot.extend([holds, u8::from(text.is_some()), 0, 0]);
    for part in parts {
        slot.extend(u16::try_from(part.len()).ok()?.to_le_bytes());
    }
    parts.iter().for_each(|part| slot.extend(*part));
    let mut buffer = Buffer::zeroed(SLOT);
    buffer
        .bytes_mut()
        .get_mut(..slot.len())?
        .copy_from_slice(&slot);
    let sum = crc32(&[buffer.bytes().get(CHECKED..)?]);
    let place = buffer.bytes_mut().get_mut(12..CHECKED)?;
    place.copy_from_slice(&sum.to_le_bytes());
    // What could not be read back is not written.
    matches!(decode(buffer.bytes(), device), Slot::Found(_)).then_some(buffer)
}

/// What is in a slot of a device of this length.
pub fn decode(slot: &[u8], device: u64) -> Slot {
    match slot.strip_prefix(MAGIC) {
        None => return Slot::Empty,
        Some(_) if slot.len() != SLOT => return Slot::Torn,
        Some(_) => {}
    }
    let mut at = Reader(slot.get(MAGIC.len()..).unwrap_or_default());
    let [version, sum] =
        [at.number::<4>(), at.number::<4>()].map(|word| word.map(u32::from_le_bytes));
    if version != Some(VERSION) {
        return Slot::Foreign("it has another format, so use the version of Godwit that wrote it");
    }
    if sum != slot.get(CHECKED..).map(|checked| crc32(&[checked])) {
        return Slot::Torn;
    }
    match decode_checked(at, device) {
        Ok(found) => Slot::Found(found),
        Err(why) => Slot::Foreign(why),
    }
}

fn decode_checked(mut at: Reader<'_>, device: u64) -> Result<Found, &'static str> {
    const CUT: &str = "it is cut";
    let mut long = || at.number::<8>().map(u64::from_le_bytes).ok_or(CUT);
    let (number, of, bytes) = (long()?, long()?, long()?);
    let [holds, has_text, 0, 0] = at.number::<4>().ok_or(CUT)? else {
        return Err("it has what this version does not know");
    };
    let mut short = || at.number::<2>().map(u16::from_le_bytes).ok_or(CUT);
    let lengths = [short()?, short()?, short()?, short()?].map(usize::from);
    let mut part = |length: usize| at.take(length).ok_or(CUT);
    let [name, vm, disk, text] = lengths;
    let (name, vm, disk, text) = (part(name)?, part(vm)?, part(disk)?, part(text)?);
    let is_rest_zero = at.0.iter().all(|byte| *byte == 0);
    let is_name = |name: &[u8]| name.len() <= NAME_MAX;
    if !is_rest_zero || ![name, vm, disk].into_iter().all(is_name) || text.len() > TEXT_MAX {
        return Err("its lengths are wrong");
    }
    let word = |bytes: &[u8]| {
        let word = String::from_utf8(bytes.to_vec());
        word.map_err(|_| "its names are no text")
    };
    let (name, vm, disk) = (word(name)?, word(vm)?, word(disk)?);
    if !(name.is_empty() || is_part_name(&name)) || !are_names(&vm, &disk) {
        return Err("its names are none of a VM, a disk or a part of one");
    }
    let holds = match (holds, name.is_empty()) {
        (0, true) => Holds::Nothing,
        (1, false) => Holds::Part(name),
        (2, true) => Holds::Disk,
        _ => return Err("it says of nothing that this version knows what it holds"),
    };
    let is_length = match holds {
        Holds::Nothing => bytes == 0,
        _ => bytes > 0 && bytes.is_multiple_of(SECTOR) && bytes <= capacity(device),
    };
    if of != device || !is_length || number == 0 || number > NUMBER_MAX {
        return Err("its numbers are not this device's");
    }
    let text = match has_text {
        0 if text.is_empty() => None,
        1 => Some(text.to_vec()),
        _ => return Err("its lengths are wrong"),
    };
    if holds == Holds::Nothing && text.as_ref().map(Vec::len) != Some(size_of::<u32>()) {
        return Err("it does not say how its device was left");
    }
    Ok(Found {
        number,
        device,
        label: Label {
            holds,
            bytes,
            vm,
            disk,
            text,
        },
    })
}

/// A file's name, as it could be in a terminal.
fn is_part_name(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Both are empty where there is no disk.
fn are_names(vm: &str, disk: &str) -> bool {
    (vm.is_empty() && disk.is_empty()) || (VmName::new(vm).is_ok() && is_valid_name(disk))
}

/// Takes what is next, if there is as much.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn number<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*number)
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }
}

/// For the tests and fuzzers of this workspace: a slot that says this.
pub fn slot_of(found: &Found, device: u64) -> Option<Vec<u8>> {
    encode(found, device).map(|buffer| buffer.bytes().to_vec())
}

#[cfg(test)]
#[path = "label_tests.rs"]
mod tests;
