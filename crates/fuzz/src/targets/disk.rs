//! What QEMU says to a disk, and what a guest's driver puts into its rings.
//!
//! Owns one small guest memory for each thread, in a file without a name.

use super::Decisions;
use crate::outcome::{self, Outcome};
use godwit_blockio::Work;
use godwit_blockio::label::{self, Found, Holds, Label, Slot};
use godwit_guestmem::device_memory::device_memory;
use godwit_guestmem::{DeviceMemory, RamFile, RegionPlace};
use godwit_store::frame::crc32;
use godwit_vhost::block::{Asked, Geometry, Status, understand};
use godwit_vhost::message::{HEADER, Header, Message, decode};
use godwit_vhost::ring::{Place, Ring};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

const MEMORY: u64 = 2 << 20;
/// Descriptors of the ring; they are the first bytes of an input, and the guest's data follows.
const SIZE: u16 = 16;
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x10000;
const USED: u64 = 0x11000;
/// Most bytes of an input that are looked at.
const INPUT_MAX: usize = 0x8000;
const DISK: u64 = 1 << 20;
/// Bytes of the device whose label is read.
const DEVICE: u64 = 8 << 20;

pub fn message(input: &[u8]) -> Outcome {
    let mut decisions = Decisions(input);
    let fds = usize::from(decisions.byte() % 9);
    let Some((header, body)) = decisions.0.split_first_chunk::<HEADER>() else {
        return 0;
    };
    let Ok(header) = Header::decode(header) else {
        return 1;
    };
    let body = &body[..body.len().min(header.body)];
    let read = decode(header.request, body, fds);
    if let Ok(Message::SetMemTable(regions)) = &read {
        assert_eq!(regions.len(), fds, "regions without descriptors");
    }
    outcome::of_result(&read, |_| 2 + u64::from(header.request))
}

pub fn message_seeds() -> Vec<Vec<u8>> {
    let said = |request: u32, fds: u8, body: &[u8]| {
        let words = [request, 1, body.len() as u32].map(u32::to_le_bytes);
        [&[fds], words.concat().as_slice(), body].concat()
    };
    let longs = |longs: &[u64]| longs.iter().flat_map(|long| long.to_le_bytes()).collect();
    let table: Vec<u8> = longs(&[1, 0, MEMORY, 0x7f00_0000_0000, 0]);
    let ring: Vec<u8> = longs(&[0, 0x7f00_0000_0000, 0x7f00_0000_1000, 0x7f00_0000_2000, 0]);
    let config = [[0u32, 4, 0].map(u32::to_le_bytes).concat(), vec![0; 4]].concat();
    vec![
        said(1, 0, &[]),
        said(2, 0, &longs(&[1 << 32])),
        said(5, 1, &table),
        said(8, 0, &longs(&[256 << 32])),
        said(9, 0, &ring),
        said(12, 1, &longs(&[0])),
        said(12, 0, &longs(&[0x100])),
        said(24, 0, &config),
        said(31, 0, &longs(&[0, 0, 256 << 16 | 1])),
        said(32, 1, &longs(&[16448, 0, 256 << 16 | 1])),
    ]
}

/// As a slot whose checksum is right in every other input: else nothing behind it is reached.
pub fn label(input: &[u8]) -> Outcome {
    let mut slot = vec![0; label::SLOT];
    let length = input.len().min(slot.len());
    slot[..length].copy_from_slice(&input[..length]);
    if input.len().is_multiple_of(2) {
        let sum = crc32(&[&slot[16..]]);
        slot[12..16].copy_from_slice(&sum.to_le_bytes());
    }
    match label::decode(&slot, DEVICE) {
        Slot::Empty => outcome::of("no label"),
        Slot::Torn => outcome::of("torn"),
        Slot::Foreign(why) => outcome::of(why),
        Slot::Found(found) => {
            assert!(
                found.label.bytes <= label::capacity(DEVICE),
                "beyond its device"
            );
            let again = label::slot_of(&found, DEVICE).expect("it can be written again");
            assert_eq!(again, slot, "two ways to say the same");
            outcome::of("found") + u64::from(found.label.text.is_some())
        }
    }
}

pub fn label_seeds() -> Vec<Vec<u8>> {
    let disk = |holds, text: Option<&[u8]>| Label {
        holds,
        bytes: 1 << 20,
        vm: "web".to_owned(),
        disk: "root".to_owned(),
        text: text.map(<[u8]>::to_vec),
    };
    let labels = [
        Label::free(7),
        disk(Holds::Part("lun.moving-1".to_owned()), None),
        disk(Holds::Disk, Some(b"{}")),
    ];
    let said = |label| {
        label::slot_of(
            &Found {
                number: 7,
                device: DEVICE,
                label,
            },
            DEVICE,
        )
    };
    let slots = labels.into_iter().filter_map(said);
    // As long as what is said, so that a change is of that.
    slots.map(|slot| slot[..96].to_vec()).collect()
}

struct Guest {
    ram: Arc<RamFile>,
    memory: DeviceMemory,
}

thread_local! {
    static GUEST: Guest = guest().expect("a guest of 2 MiB can be made");
}

fn guest() -> Result<Guest, Box<dyn std::error::Error>> {
    let name = format!("godwit-fuzz-{:?}", std::thread::current().id());
    let path = Path::new("/dev/shm").join(format!("{name}-{}", std::process::id()));
    let ram = RamFile::create(&path, MEMORY, None)?;
    std::fs::remove_file(&path)?;
    let ram = Arc::new(ram);
    let place = RegionPlace {
        guest: 0,
        offset: 0,
        bytes: MEMORY,
    };
    let memory = device_memory(&ram, &[place])?;
    Ok(Guest { ram, memory })
}

/// One request as a driver put it into the rings; the last byte of the input is its head.
pub fn request(input: &[u8]) -> Outcome {
    GUEST.with(|guest| carry_out(guest, &input[..input.len().min(INPUT_MAX)]))
}

fn carry_out(guest: &Guest, input: &[u8]) -> Outcome {
    let Some((head, input)) = input.split_last() else {
        return 0;
    };
    let file = std::fs::File::from(
        std::os::fd::AsFd::as_fd(&*guest.ram)
            .try_clone_to_owned()
            .expect("a descriptor is left"),
    );
    let put = |at: u64, bytes: &[u8]| file.write_all_at(bytes, at).expect("it has room");
    put(DESCRIPTORS, &[0; 16 * SIZE as usize]);
    put(DESCRIPTORS, input);
    put(AVAILABLE, &[0, 0, 1, 0, *head, 0]);
    put(USED, &[0; 4]);
    let place = Place {
        size: SIZE,
        descriptors: DESCRIPTORS,
        available: AVAILABLE,
        used: USED,
    };
    let mut ring = Ring::new(&guest.memory, place, true, 0).expect("the ring is good");
    let taken = match ring.take(&guest.memory) {
        Ok(taken) => taken.expect("one is available"),
        Err(_) => return 1,
    };
    let mut chain = Vec::new();
    if ring.chain(&guest.memory, taken, &mut chain).is_err() {
        return 2;
    }
    let geometry = Geometry {
        bytes: DISK,
        block: 512,
        queues: 1,
        read_only: false,
        erases: true,
        serial: "s".to_owned(),
    };
    match understand(&chain, &guest.memory, &guest.ram, &geometry) {
        Ok(asked) => {
            let used = ring.answer(&guest.memory, taken, asked.reads.saturating_add(1));
            assert_eq!(
                used.ok(),
                Some(1),
                "a request that was understood is answered"
            );
            judge(&asked)
        }
        Err(_) => 3,
    }
}

/// What is passed on fits the disk, and has as many bytes as it says.
fn judge(asked: &Asked) -> Outcome {
    match &asked.work {
        Ok((work, data)) => {
            if let Some(range) = work.range() {
                assert!(range.start < range.end && range.end <= DISK, "{range:?}");
                assert!(range.start.is_multiple_of(512) && range.end.is_multiple_of(512));
            }
            if let Work::Read(range) | Work::Write(range) = work {
                assert_eq!(range.end - range.start, data.len() as u64);
            }
            match work {
                Work::Read(_) => 10,
                Work::Write(_) => 11,
                Work::Flush => 12,
                Work::Discard(_) => 13,
                Work::WriteZeroes { unmap, .. } => 14 + u64::from(*unmap),
            }
        }
        Err(Status::Ok) => 20,
        Err(Status::Failed) => 21,
        Err(Status::Unsupported) => 22,
    }
}

pub fn request_seeds() -> Vec<Vec<u8>> {
    const DATA: u64 = 0x1000;
    let chain = |kind: u32, parts: &[(u64, u32, u16)]| {
        let mut bytes = Vec::new();
        for (number, (at, len, flags)) in parts.iter().enumerate() {
            let last = number + 1 == parts.len();
            let flags = flags | u16::from(!last);
            bytes.extend(at.to_le_bytes());
            bytes.extend(len.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend((number as u16 + 1).to_le_bytes());
        }
        bytes.resize(DATA as usize, 0);
        bytes.extend([kind, 0, 8, 0].map(u32::to_le_bytes).concat());
        // A segment to be erased, and the head.
        bytes.extend([8, 0, 8, 0].map(u32::to_le_bytes).concat());
        bytes.push(0);
        bytes
    };
    let header = (DATA, 16, 0);
    let status = (DATA + 64, 1, 2);
    vec![
        chain(0, &[header, (DATA + 512, 4096, 2), status]),
        chain(
            1,
            &[header, (DATA + 512, 1024, 0), (DATA + 4096, 512, 0), status],
        ),
        chain(4, &[header, status]),
        chain(8, &[header, (DATA + 512, 20, 2), status]),
        chain(11, &[header, (DATA + 16, 16, 0), status]),
        chain(13, &[header, (DATA + 16, 16, 0), status]),
        chain(1, &[(0x100, 48, 4)]),
    ]
}
