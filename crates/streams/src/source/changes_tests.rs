//! Changes on real channels to real images: in any order, cut off, to a destination that is silent, and awaited on a near link.

use super::*;
use crate::destination::{ChangeChannels, Disks};
use crate::testing::spec;
use godwit_blockio::{Access, Arriving, Buffer, Image};
use godwit_testkit::testvol::{Survives, Volume, apart};
use godwit_transport::{ConnectOptions, Gate, Listener, Tuning, connect};
use godwit_types::version::MIGRATION;
use godwit_wire::ChannelId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU16;

const LONG: Duration = Duration::from_secs(120);
const BYTES: u64 = 4 << 20;
const CHANNELS_HERE: u16 = 4;
const FAR: Link = Link {
    rtt: FAR_RTT,
    protocol: MIGRATION.max,
};
const NEAR: Link = Link {
    rtt: Duration::ZERO,
    protocol: MIGRATION.max,
};

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
    image: PathBuf,
    changes: Changes,
    outlet: Box<dyn Outlet>,
    course: Course,
    set: Arc<AtomicU16>,
    channels: ChangeChannels,
    disk: Vec<u8>,
    numbers: u64,
    /// Of the image, if it is nobody else's.
    _directory: Option<tempfile::TempDir>,
}

impl Bench {
    fn new() -> Self {
        let directory =
            tempfile::tempdir_in(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")).unwrap();
        let bench = Self::on(directory.path());
        Self {
            _directory: Some(directory),
            ..bench
        }
    }

    fn on(directory: &Path) -> Self {
        let path = directory.join("disk.raw");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(BYTES).unwrap();
        file.sync_all().unwrap();
        std::fs::File::open(directory).unwrap().sync_all().unwrap();
        let image = Image::open(&path, Access::ReadWrite, 512).unwrap();
        let arriving = Arriving::of(&image).unwrap();
        let changes = Changes::default();
        let course = Course::default();
        let set = Arc::new(AtomicU16::new(0));
        let (heard, of_set) = (changes.clone(), Arc::clone(&set));
        let tell = move |channel, records| {
            heard.applied(of_set.load(Ordering::SeqCst), channel, (records, None));
            Ok(())
        };
        let disks = Disks::new(vec![OnceLock::new(), OnceLock::from(arriving)]);
        Self {
            image: path,
            outlet: changes.of_disk(1, &course).unwrap(),
            course,
            set,
            changes,
            channels: ChangeChannels::new(disks, Arc::new(tell)),
            disk: vec![0; BYTES as usize],
            numbers: 1,
            _directory: None,
        }
    }

    fn connect(&mut self, set: u16) {
        let unread = self.connect_over(FAR, set, CHANNELS_HERE);
        assert!(unread.is_empty());
    }

    /// Of the channels so many are read; gives the others back.
    fn connect_over(&mut self, link: Link, set: u16, read: u16) -> Vec<Connection> {
        self.set.store(set, Ordering::SeqCst);
        let (source, mut destination) = connected(set, CHANNELS_HERE);
        destination.sort_by_key(|connection| connection.channel().changes_index());
        let unread = destination.split_off(usize::from(read));
        self.channels.begin(u32::from(read));
        for connection in destination {
            let index = connection.channel().changes_index().unwrap();
            self.channels.admit(index, connection).unwrap();
        }
        assert!(self.channels.complete());
        self.attach(source, link);
        unread
    }

    fn attach(&self, source: Vec<Connection>, link: Link) {
        let tell: TellDriver = Arc::new(|_| true);
        let set = self.set.load(Ordering::SeqCst);
        self.changes.attach(set, source, link, &tell).unwrap();
    }

    /// Hears of so many that are over, without asking for more than the bell.
    fn wait_for(&mut self, count: usize) -> Vec<u64> {
        let mut over = self.outlet.take_ended();
        while over.len() < count {
            let bell = self.outlet.bell().unwrap();
            let mut asked = [PollFd::new(&bell, PollFlags::IN)];
            let within = Timespec::try_from(LONG).unwrap();
            assert_eq!(
                poll(&mut asked, Some(&within)).unwrap(),
                1,
                "it hears {over:?} alone"
            );
            let _ = rustix::io::read(bell, &mut [0u8; 8]);
            over.extend(self.outlet.take_ended());
        }
        over.sort_unstable();
        over
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
            let set = self.set.load(Ordering::SeqCst);
            self.changes.applied(set, index as u32, applied);
        }
    }

    /// Until this number is over; of what is copied nobody tells at once.
    fn hear_until(&mut self, number: u64) {
        while !self.outlet.take_ended().contains(&number) {
            self.hear();
            std::thread::yield_now();
        }
    }

    fn found(&self) -> Vec<u8> {
        std::fs::read(&self.image).unwrap()
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
    bench.attach(source, FAR);
    let len = 1 << 20;
    let change = filled(len as usize, 1);
    while bench.outlet.takes(Origin::Guest) {
        bench.outlet.give(Origin::Guest, 0..len, change.clone());
    }
    let full = bench.changes.under_way_bytes();
    assert!(full >= UNDER_WAY_MAX || bench.outlet.is_silent());
    assert!(full <= UNDER_WAY_MAX + len, "{full} bytes");
    while !bench.outlet.is_silent() {
        std::thread::yield_now();
    }
    assert!(!bench.outlet.takes(Origin::Copy));
}

#[test]
fn a_write_may_wait_for_four_round_trips_and_for_half_a_second_at_least() {
    for (rtt_us, patience_ms) in [(200_000, 800), (200, 500)] {
        let bench = Bench::new();
        let (source, _unread) = connected(0, 1);
        let rtt = Duration::from_micros(rtt_us);
        bench.attach(source, Link { rtt, ..FAR });
        let patience = Duration::from_millis(patience_ms);
        assert_eq!(bench.outlet.patience(), patience, "{rtt:?}");
    }
}

#[test]
fn what_is_heard_of_channels_that_are_gone_counts_for_none_of_the_present_set() {
    let mut bench = Bench::new();
    bench.connect(3);
    for _ in 0..100 {
        bench.give();
    }
    let before = bench.changes.under_way_bytes();
    for channel in 0..u32::from(CHANNELS_HERE) {
        bench.changes.applied(2, channel, (u64::MAX, None));
    }
    assert_eq!(bench.changes.under_way_bytes(), before);
    bench.changes.end();
    let ended = bench.channels.have_ended(Instant::now() + LONG);
    assert_eq!(ended, Ok(true));
    bench.hear();
    assert_eq!(bench.changes.under_way_bytes(), 0);
}

/// Bytes of this value, from 0 on.
fn filled(len: usize, fill: u8) -> Change {
    let mut buffer = Buffer::zeroed(len);
    buffer.bytes_mut().fill(fill);
    Change::Written(Arc::new(buffer), 0)
}

#[test]
fn on_a_near_link_a_write_is_over_once_all_of_it_is_at_the_destination_and_that_is_told_at_once() {
    let mut bench = Bench::new();
    bench.connect_over(NEAR, 2, CHANNELS_HERE);
    assert!(bench.outlet.confirms());
    // More than two records hold.
    let len = 2 * PAYLOAD_LEN_MAX + 512;
    for number in 1..=20u8 {
        let range = 0..len as u64;
        let change = filled(len, number);
        assert!(bench.outlet.give_write(number.into(), range, change));
        assert_eq!(bench.wait_for(1), [u64::from(number)]);
        let found = &bench.found()[..len];
        assert!(found.iter().all(|byte| *byte == number), "write {number}");
    }
    bench.outlet.give_write(21, 0..512, Change::Zeroed);
    assert_eq!(bench.wait_for(1), [21]);
    assert!(bench.found()[..512].iter().all(|byte| *byte == 0));
    assert!(bench.course.take_lost().is_empty());
}

#[test]
fn on_a_far_link_and_before_an_older_destination_nobody_waits() {
    let older = Link {
        protocol: MIGRATION_WITH_AWAITED_CHANGES - 1,
        ..NEAR
    };
    for link in [FAR, older] {
        let mut bench = Bench::new();
        bench.connect_over(link, 0, CHANNELS_HERE);
        assert!(!bench.outlet.confirms());
        assert!(!bench.outlet.give_write(1, 0..512, filled(512, 1)));
        assert!(!bench.outlet.flush(2));
        bench.changes.end();
        let ended = bench.channels.have_ended(Instant::now() + LONG);
        assert_eq!(ended, Ok(true));
        assert!(bench.outlet.take_ended().is_empty());
        assert_eq!(bench.found()[..512], [1; 512]);
    }
}

#[test]
fn a_write_to_a_near_destination_does_not_queue_behind_what_is_copied() {
    let mut bench = Bench::new();
    // Nobody reads what is copied.
    let _unread = bench.connect_over(NEAR, 0, CHANNELS_HERE / 2);
    let region = 1 << 20;
    while bench.outlet.takes(Origin::Copy) {
        bench
            .outlet
            .give(Origin::Copy, 0..region, filled(region as usize, 1));
    }
    for number in 1..=50 {
        bench
            .outlet
            .give_write(number, region..region + 512, filled(512, 2));
    }
    assert_eq!(bench.wait_for(50), (1..=50).collect::<Vec<_>>());
}

#[test]
fn a_flush_on_a_near_link_is_over_no_sooner_than_what_was_copied_before_it() {
    let mut bench = Bench::new();
    let mut unread = bench.connect_over(NEAR, 0, CHANNELS_HERE / 2);
    bench.outlet.give(Origin::Copy, 0..512, filled(512, 1));
    bench.outlet.flush(1);
    // What came later is there, and what was copied is read by nobody.
    bench.outlet.give_write(2, 512..1024, filled(512, 2));
    assert_eq!(bench.wait_for(1), [2]);
    bench.channels.begin(CHANNELS_HERE.into());
    for connection in unread.drain(..) {
        let index = connection.channel().changes_index().unwrap();
        bench.channels.admit(index, connection).unwrap();
    }
    bench.hear_until(1);
    assert_eq!(bench.found()[..512], [1; 512]);
}

#[test]
fn a_near_destination_that_kept_somebody_waiting_is_waited_for_by_nobody_from_then_on() {
    let mut bench = Bench::new();
    bench.connect_over(NEAR, 0, CHANNELS_HERE);
    assert!(bench.outlet.confirms() && bench.outlet.may_be_left_alone());
    bench.outlet.kept_waiting();
    assert!(!bench.outlet.confirms() && !bench.outlet.may_be_left_alone());
    assert!(!bench.outlet.give_write(1, 0..512, filled(512, 1)));
    bench.changes.detach();
    bench.channels.close();
    bench.connect_over(NEAR, 1, CHANNELS_HERE);
    assert!(
        !bench.outlet.confirms(),
        "over a link that was made anew, too"
    );
}

#[test]
fn what_is_awaited_when_the_link_is_lost_is_over_after_it_was_told_as_lost() {
    let mut bench = Bench::new();
    // Nobody reads any of it.
    let _unread = bench.connect_over(NEAR, 0, 0);
    bench.outlet.give_write(1, 512..1024, filled(512, 1));
    bench.outlet.flush(2);
    assert!(bench.outlet.take_ended().is_empty());
    bench.changes.detach();
    assert_eq!(bench.wait_for(2), [1, 2]);
    assert!(bench.course.take_lost().contains(&(512..1024)));
    // Nor is anybody kept waiting while there is no link.
    bench.outlet.give_write(3, 0..512, filled(512, 1));
    assert_eq!(bench.wait_for(1), [3]);
    let (start, end) = (0, 512);
    assert_eq!(bench.course.take_lost(), [Range { start, end }]);
}

/// A bench on a near link, whose image is on a volume.
fn on_a_volume(work: impl FnOnce(Bench, &Volume) + Send) {
    let worked = apart(|mounts| {
        let directory = tempfile::tempdir().unwrap();
        let volume = Volume::mount_direct(mounts.as_fd(), directory.path()).unwrap();
        let mut bench = Bench::on(directory.path());
        bench.connect_over(NEAR, 0, CHANNELS_HERE);
        work(bench, &volume);
    });
    worked.unwrap();
}

#[test]
fn what_a_flush_on_a_near_link_covers_survives_a_power_cut_of_the_destination() {
    on_a_volume(|mut bench, volume| {
        bench.outlet.give_write(1, 0..4096, filled(4096, 7));
        assert_eq!(bench.wait_for(1), [1]);
        bench.outlet.flush(2);
        assert_eq!(bench.wait_for(1), [2]);
        bench.outlet.give_write(3, 4096..8192, filled(4096, 8));
        assert_eq!(bench.wait_for(1), [3]);
        volume.cut(Survives::Nothing);
        let found = bench.found();
        assert_eq!(found[..4096], [7; 4096]);
        assert_eq!(found[4096..8192], [0; 4096], "this cut loses nothing");
    });
}

#[test]
fn a_flush_that_fails_at_a_near_destination_is_over_for_nobody_and_no_later_one_succeeds() {
    on_a_volume(|mut bench, volume| {
        bench.outlet.give_write(1, 0..4096, filled(4096, 7));
        assert_eq!(bench.wait_for(1), [1]);
        volume.change(|settings| settings.fails.syncs = true);
        bench.outlet.flush(2);
        while bench.channels.failure().is_none() {
            std::thread::yield_now();
        }
        assert!(bench.outlet.take_ended().is_empty());
        volume.change(|settings| settings.fails.syncs = false);
        let why = bench.channels.sync().unwrap_err();
        assert!(why.contains("Input/output error"), "{why}");
    });
}
