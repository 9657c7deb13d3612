//! Changes on real channels to real images: in any order, cut off, and to a destination that is silent.

use super::*;
use crate::destination::{ChangeChannels, Disks};
use crate::testing::spec;
use godwit_blockio::{Access, Arriving, Buffer, Image};
use godwit_transport::{ConnectOptions, Gate, Listener, Tuning, connect};
use godwit_wire::ChannelId;

const LONG: Duration = Duration::from_secs(120);
const BYTES: u64 = 4 << 20;

/// Connected channels for disks: the source's ends and the destination's.
fn connected(set: u16, count: u16) -> (Vec<Connection>, Vec<Connection>) {
    let gate = Gate::new(spec(), Tuning::default(), LONG);
    let mut listener = Listener::bind(gate, [127, 0, 0, 1].into(), 0..=0).unwrap();
    let (address, until) = (listener.address(), Instant::now() + LONG);
    let accepting = std::thread::spawn(move || {
        let accept = |_| listener.accept(until).unwrap();
        (0..count).map(accept).collect::<Vec<_>>()
    });
    let options = ConnectOptions::default();
    let channel = |index| ChannelId::changes(set, index).unwrap();
    let made =
        (0..count).map(|index| connect(address, &options, &spec(), channel(index), until).unwrap());
    (made.collect(), accepting.join().unwrap())
}

struct Bench {
    directory: tempfile::TempDir,
    changes: Changes,
    outlet: Box<dyn Outlet>,
    course: Course,
    set: u16,
    channels: ChangeChannels,
    disk: Vec<u8>,
    numbers: u64,
}

impl Bench {
    fn new() -> Self {
        let directory =
            tempfile::tempdir_in(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")).unwrap();
        let path = directory.path().join("disk.raw");
        std::fs::File::create(&path)
            .unwrap()
            .set_len(BYTES)
            .unwrap();
        let image = Image::open(&path, Access::ReadWrite, 512).unwrap();
        let arriving = Arriving::of(&image).unwrap();
        let changes = Changes::default();
        let course = Course::default();
        Self {
            directory,
            outlet: changes.of_disk(1, &course),
            course,
            set: 0,
            changes,
            channels: ChangeChannels::new(Disks::new(vec![None, Some(arriving)])),
            disk: vec![0; BYTES as usize],
            numbers: 1,
        }
    }

    fn connect(&mut self, set: u16) {
        self.set = set;
        let (source, destination) = connected(set, 4);
        self.channels.begin(4);
        for connection in destination {
            let index = connection.channel().changes_index().unwrap();
            self.channels.admit(index, connection).unwrap();
        }
        assert!(self.channels.complete());
        let tell: TellDriver = Arc::new(|_| true);
        self.changes
            .attach(set, source, Duration::ZERO, &tell)
            .unwrap();
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.numbers = self
            .numbers
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.numbers >> 33) % limit
    }

    /// One change, of many that overlap.
    fn give(&mut self) {
        let start = self.below(BYTES / 512 - 200) * 512;
        let len = (1 + self.below(200)) * 512;
        let fill = self.below(256) as u8;
        let inside = start as usize..(start + len) as usize;
        self.disk[inside].fill(fill);
        let change = match fill {
            0 => Change::Zeroed,
            fill => {
                let mut buffer = Buffer::zeroed(len as usize + 512);
                buffer.bytes_mut().fill(fill);
                Change::Written(Arc::new(buffer), 512)
            }
        };
        self.outlet.give(Origin::Guest, start..start + len, change);
    }

    fn hear(&mut self) {
        for (index, (records, writing)) in self.channels.applied().into_iter().enumerate() {
            let applied = (records, Some(writing));
            self.changes.applied(self.set, index as u32, applied);
        }
    }

    fn found(&self) -> Vec<u8> {
        std::fs::read(self.directory.path().join("disk.raw")).unwrap()
    }
}

#[test]
fn of_many_changes_on_many_channels_the_latest_is_what_the_disk_holds() {
    let mut bench = Bench::new();
    bench.connect(0);
    let began = Instant::now();
    assert_eq!(bench.changes.writing(), None);
    for _ in 0..3000 {
        while !bench.outlet.takes(Origin::Guest) {
            bench.hear();
        }
        bench.give();
    }
    bench.changes.end();
    let ended = bench.channels.have_ended(Instant::now() + LONG);
    assert_eq!(ended, Ok(true));
    bench.hear();
    assert_eq!(bench.changes.under_way_bytes(), 0);
    let writing = bench.changes.writing().unwrap();
    assert!(!writing.is_zero() && writing <= began.elapsed());
    assert!(bench.course.take_lost().is_empty());
    assert!(bench.found() == bench.disk, "they differ");
}

#[test]
fn what_a_lost_set_had_under_way_is_told_and_later_numbers_win_over_it() {
    let mut bench = Bench::new();
    bench.connect(0);
    for _ in 0..500 {
        bench.give();
    }
    bench.changes.detach();
    bench.channels.close();
    assert!(bench.outlet.is_silent());
    assert_eq!(bench.changes.under_way_bytes(), 0);
    bench.give();
    let lost = bench.course.take_lost();
    assert!(!lost.is_empty(), "nothing was under way");
    bench.connect(1);
    for range in lost {
        let inside = range.start as usize..range.end as usize;
        let mut buffer = Buffer::zeroed(inside.len());
        buffer.bytes_mut().copy_from_slice(&bench.disk[inside]);
        let again = Change::Written(Arc::new(buffer), 0);
        bench.outlet.give(Origin::Copy, range, again);
    }
    bench.changes.end();
    let ended = bench.channels.have_ended(Instant::now() + LONG);
    assert_eq!(ended, Ok(true));
    assert!(bench.found() == bench.disk, "they differ");
}

#[test]
fn a_destination_that_carries_nothing_out_takes_no_more_than_fits_and_is_silent_soon() {
    let mut bench = Bench::new();
    // Nobody reads its other end.
    let (source, _unread) = connected(0, 1);
    let tell: TellDriver = Arc::new(|_| true);
    bench
        .changes
        .attach(0, source, Duration::ZERO, &tell)
        .unwrap();
    while bench.outlet.takes(Origin::Guest) {
        bench.give();
    }
    let full = bench.changes.under_way_bytes();
    assert!(full >= UNDER_WAY_MAX || bench.outlet.is_silent());
    while !bench.outlet.is_silent() {
        std::thread::yield_now();
    }
    assert!(!bench.outlet.takes(Origin::Copy));
}

#[test]
fn what_is_heard_of_channels_that_are_gone_counts_for_none_of_the_present_set() {
    let mut bench = Bench::new();
    bench.connect(3);
    for _ in 0..100 {
        bench.give();
    }
    let before = bench.changes.under_way_bytes();
    for channel in 0..4 {
        bench.changes.applied(2, channel, (u64::MAX, None));
    }
    assert_eq!(bench.changes.under_way_bytes(), before);
    bench.changes.end();
    let ended = bench.channels.have_ended(Instant::now() + LONG);
    assert_eq!(ended, Ok(true));
    bench.hear();
    assert_eq!(bench.changes.under_way_bytes(), 0);
}
