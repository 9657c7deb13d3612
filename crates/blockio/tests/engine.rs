//! The engine beside ordinary reads and writes of the image: what it does is on the disk, and what it refuses is not.

mod common;

use common::{guest, read_all, request, run, stack, volume};
use godwit_blockio::{Access, Buffer, Data, Image, Outcome, Request, Work};
use godwit_guestmem::{DeviceReadable, DeviceWritable};
use rustix::io::Errno;
use std::time::Instant;
use vm_memory::{Bytes as _, GuestAddress};

#[test]
fn what_is_written_is_read_and_is_in_the_file() {
    let volume = volume(1 << 20);
    let mut stack = stack(&volume);
    let mut buffer = Buffer::zeroed(8192);
    buffer.bytes_mut().fill(7);
    let work = Work::Write(4096..12288);
    let done = run(&mut stack, vec![request(work, Data::Own(buffer))]);
    assert_eq!(done[0].1, Outcome::Done);
    let read = request(Work::Read(0..16384), Data::Own(Buffer::zeroed(16384)));
    let done = run(&mut stack, vec![read]);
    let Data::Own(seen) = &done[0].0.data else {
        panic!("{done:?}");
    };
    let file = read_all(&volume);
    assert_eq!(seen.bytes(), &file[..16384]);
    let sevens: Vec<usize> = (0..file.len()).filter(|&at| file[at] == 7).collect();
    assert_eq!(sevens, (4096..12288).collect::<Vec<_>>());
}

#[test]
fn a_guests_buffers_are_used_as_they_are_and_told_of_and_unaligned_ones_are_copied() {
    let volume = volume(1 << 20);
    let mut stack = stack(&volume);
    let (ram, memory) = guest();
    // Pieces that direct IO takes, and the same bytes in pieces that it does not take.
    let aligned = [(0u64, 512usize), (8192, 3584)];
    let unaligned = [(20_001u64, 1000usize), (30_003, 3096)];
    for (pieces, fill) in [(aligned, 3u8), (unaligned, 5)] {
        let mut from = DeviceReadable::new(&ram);
        for (at, len) in pieces {
            memory
                .write_slice(&vec![fill; len], GuestAddress(at))
                .unwrap();
            from.push(&memory, at, len).unwrap();
        }
        let done = run(
            &mut stack,
            vec![request(Work::Write(0..4096), Data::FromGuest(from))],
        );
        assert_eq!(done[0].1, Outcome::Done);
        assert_eq!(read_all(&volume)[..4096], vec![fill; 4096]);

        let mut to = DeviceWritable::new(&ram);
        for (at, len) in pieces {
            to.push(&memory, at + 1_000_448, len).unwrap();
        }
        let done = run(
            &mut stack,
            vec![request(Work::Read(0..4096), Data::ToGuest(to))],
        );
        assert_eq!(done[0].1, Outcome::Done);
        for (at, len) in pieces {
            let mut seen = vec![0; len];
            memory
                .read_slice(&mut seen, GuestAddress(at + 1_000_448))
                .unwrap();
            assert_eq!(seen, vec![fill; len]);
        }
    }
}

#[test]
fn what_does_not_fit_the_disk_is_refused_and_changes_nothing() {
    let volume = volume(1 << 20);
    let mut stack = stack(&volume);
    let end = 1 << 20;
    let buffer = |len| Data::Own(Buffer::zeroed(len));
    let cases = [
        request(Work::Write(end - 512..end + 512), buffer(1024)),
        request(Work::Read(end..end + 512), buffer(512)),
        request(Work::Write(0..1024), buffer(512)),
        request(Work::Discard(end..end + 512), Data::None),
        #[allow(clippy::reversed_empty_ranges)]
        request(Work::Discard(1024..512), Data::None),
    ];
    let count = cases.len();
    let done = run(&mut stack, cases.into());
    let refused = done
        .iter()
        .filter(|one| one.1 == Outcome::Failed(Errno::INVAL));
    assert_eq!(refused.count(), count);
    assert_eq!(read_all(&volume).len(), 1 << 20);
}

#[test]
fn discards_and_zeroes_reach_the_file() {
    let volume = volume(1 << 20);
    std::fs::write(&volume.path, vec![9; 1 << 20]).unwrap();
    let blocks =
        || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&volume.path).unwrap());
    let full = blocks();
    let mut stack = stack(&volume);
    let zero = |range, unmap| request(Work::WriteZeroes { range, unmap }, Data::None);
    let mut durable = request(Work::Discard(65536..131072), Data::None);
    durable.durable = true;
    let work = vec![
        durable,
        zero(131072..196608, true),
        zero(196608..262144, false),
    ];
    let done = run(&mut stack, work);
    assert!(done.iter().all(|one| one.1 == Outcome::Done), "{done:?}");
    let file = read_all(&volume);
    assert!(file[65536..262144].iter().all(|&byte| byte == 0));
    assert!(
        file[..65536]
            .iter()
            .chain(&file[262144..])
            .all(|&byte| byte == 9)
    );
    // Two of the three gave their space back.
    assert_eq!(full - blocks(), 2 * 65536 / 512);
}

#[test]
fn many_requests_at_once_are_all_answered_once() {
    let volume = volume(4 << 20);
    let mut stack = stack(&volume);
    let requests: Vec<Request> = (0..1024u64)
        .map(|token| {
            let mut buffer = Buffer::zeroed(4096);
            buffer.bytes_mut().fill(token as u8);
            let at = token * 4096;
            let work = Work::Write(at..at + 4096);
            Request::new(work, Data::Own(buffer), token, Instant::now())
        })
        .collect();
    let done = run(&mut stack, requests);
    let mut tokens: Vec<u64> = done.iter().map(|one| one.0.token).collect();
    tokens.sort_unstable();
    assert!(tokens.into_iter().eq(0..1024));
    let file = read_all(&volume);
    assert!((0..4 << 20).all(|at| file[at] == (at / 4096) as u8));
}

#[test]
fn what_cannot_be_a_disk_is_refused_in_one_sentence() {
    let volume = volume(1 << 20);
    let odd = volume.path.with_extension("odd");
    std::fs::write(&odd, [0; 1000]).unwrap();
    let fifo = volume.path.with_extension("fifo");
    let name = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &*name,
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    let directory = volume.path.parent().unwrap();
    let missing = volume.path.with_extension("gone");
    for (path, access, says) in [
        (
            odd.as_path(),
            Access::ReadWrite,
            "its 1000 bytes are no whole blocks of 512 bytes",
        ),
        (
            &fifo,
            Access::ReadWrite,
            "neither a file nor a block device",
        ),
        (
            directory,
            Access::ReadOnly,
            "neither a file nor a block device",
        ),
        (
            directory,
            Access::ReadWrite,
            "neither a file nor a block device",
        ),
        (&missing, Access::ReadWrite, "No such file"),
    ] {
        let error = Image::open(path, access, 512).unwrap_err().to_string();
        assert!(error.contains(says), "{}: {error}", path.display());
    }
}
